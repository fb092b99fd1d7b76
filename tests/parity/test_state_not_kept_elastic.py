"""Optimizer state that no file holds, found when workers come or go before the next look for it: the weights are not lost."""

from pathlib import Path

import pytest
import torch
from helpers import checkpoint_folders as checkpoint_files
from helpers import optimizers
from helpers.optimizer_layouts import LAYERS, job_of
from helpers.protocol import Change, World
from helpers.torch_flesh import TorchFlesh, TorchJob

from raypar.errors import StateNotKeptError
from raypar.job import OptimizerConfig
from raypar.plan import ParallelPlan
from raypar.worker.checkpoint.checkpoint_files import CheckpointTensors
from raypar.worker.layer_graph_of_job import make_layer_graph
from raypar.worker.run_in_one_process import OneProcessRun

BEGINS, STEPS = 5, 24
"""Steps after which a list is kept (they are looked for after 4 and 8), and of the job."""
GRID = ParallelPlan.mesh(dp=2, pp=2, layers=LAYERS)
CHAIN = ParallelPlan.mesh(pp=3, layers=LAYERS)


def run(plan: ParallelPlan, *changes: Change, mirror_every: int = 0, begins: int = BEGINS) -> tuple[World, TorchJob]:
    keeps_list = OptimizerConfig(function=optimizers.KeepsListLater, args={"lr": 0.01, "after": begins - 1})
    spec = job_of(keeps_list, steps=STEPS, clip_norm=None)
    job = TorchJob(spec, make_layer_graph(spec), mirror_every=mirror_every)
    world = World(job, plan, changes=changes, flesh=TorchFlesh, tick_ms=5.0, save_at_end=True, max_workers=8, grow_after_s=0.0)
    world.run()
    return world, job


def weights_of(world: World, folder: Path) -> CheckpointTensors:
    """What the driver saves after the failed checkpoint: every member's parameters and buffers."""
    done = world.driver.machine.progress.committed
    begun = checkpoint_files.create_checkpoint(folder, done, only_weights=True)
    bodies = [world.processes[worker].body for worker in world.driver.machine.membership.members]
    for body in bodies:
        assert body.applied() == done
        body.core.start_save(begun, only_weights=True)
    records = [body.core.save_result() for body in bodies]
    return CheckpointTensors(
        checkpoint_files.commit_checkpoint(begun, records, steps_done=done, contract={}, only_weights=True)
    )


def undisturbed(job: TorchJob, steps: int) -> dict[str, torch.Tensor]:
    with OneProcessRun(job.spec.replace(steps=steps), ParallelPlan.mesh(layers=LAYERS), "1f1b", graph=job.graph) as one:
        for step in range(steps):
            one.step(step)
        return {name: copies[0] for name, copies in one.parameters().items()}


CASES = {
    "a replica dies": (GRID, 0, Change(BEGINS + 1, 0.0, "kill"), BEGINS + 1),
    "a stage moves to others": (GRID, 0, Change(BEGINS + 1, 0.0, "drain", 2), BEGINS + 1),
    "a worker joins": (CHAIN, 0, Change(BEGINS + 1, 0.0, "join"), BEGINS + 1),
    "the only copy of a stage dies": (CHAIN, 2, Change(BEGINS + 2, 0.0, "kill"), BEGINS),
}


@pytest.mark.parametrize("what", CASES)
def test_weights_are_saved_if_state_that_cannot_be_moved_is_met_before_the_next_look(what: str, tmp_path: Path):
    plan, mirror_every, change, least = CASES[what]
    world, job = run(plan, change, mirror_every=mirror_every)
    try:
        assert world.changed, "it has happened"
        assert world.over is not None and world.over.end == "failed"
        assert isinstance(world.over.error, StateNotKeptError), world.tell(str(world.over.error))
        assert "'factors' of" in str(world.over.error) and "is a list" in str(world.over.error)
        found, done = weights_of(world, tmp_path), world.driver.machine.progress.committed
        assert least <= done < STEPS, "not the whole job without its state"
        want = undisturbed(job, done)
        assert all(torch.equal(found[name], want[name]) for name in want)
    finally:
        world.flesh.close()
