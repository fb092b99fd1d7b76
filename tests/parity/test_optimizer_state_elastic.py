"""Optimizer state of any shape comes through deaths, moves and joins with the bits of one process: real bodies, by hand."""

import pytest
from helpers import optimizers
from helpers.optimizer_layouts import LAYERS, job_of
from helpers.protocol import Change, World
from helpers.torch_flesh import TorchFlesh, TorchJob
from helpers.zero_layouts import small_pieces

from raypar.job import OptimizerConfig
from raypar.plan import ParallelPlan
from raypar.worker.job_preflight import preflight
from raypar.worker.layer_graph_of_job import make_layer_graph

pytestmark = pytest.mark.part(4)

STEPS = 8
OPTIMIZERS = {
    "odd shapes": {"function": optimizers.KeepsOddShapes, "groups": [{"match": "*.bias", "lr": 0.02}]},
    "8 bits": {"function": "raypar.optimizers:AdamW8bit", "args": {"min_8bit_size": 500, "block_size": 128}},
    "several": [
        {"match": "block*.*.weight", "function": "torch.optim:Muon", "args": {"lr": 0.02}},
        {"match": "*.bias", "function": optimizers.CountsInAttribute},
        {"match": "*", "function": optimizers.CountsInGroup},
    ],
}
GRID, CHAIN = ParallelPlan.mesh(dp=2, pp=2, layers=LAYERS), ParallelPlan.mesh(pp=3, layers=LAYERS)
HISTORIES = {
    "a replica dies": (GRID, 0, Change(3, 0.0, "kill")),
    "a stage moves to others": (GRID, 0, Change(3, 0.0, "drain", 2)),
    "an owner dies": (GRID.with_zero(3), 1, Change(3, 0.0, "kill")),
    "a worker joins": (CHAIN, 0, Change(3, 0.0, "join")),
    "the only copy of a stage dies, and comes back from the mirror": (CHAIN, 1, Change(4, 0.0, "kill")),
}


def final_hash(which: str, plan: ParallelPlan, mirror_every: int = 0, *changes: Change) -> int:
    spec = job_of(OptimizerConfig.model_validate(OPTIMIZERS[which]), steps=STEPS)
    trial = preflight(spec).optimizer
    assert trial is not None
    spec = spec.with_undivided(trial.undivided)
    job = TorchJob(spec, make_layer_graph(spec), mirror_every=mirror_every)
    world = World(job, plan, changes=changes, flesh=TorchFlesh, tick_ms=5.0, max_workers=8, grow_after_s=0.0)
    try:
        world.run()
        assert world.over is not None and world.over.end == "done", world.tell(str(world.over))
        assert bool(changes) == bool(world.changed)
        return world.final_hash()
    finally:
        world.flesh.close()


@pytest.fixture(autouse=True, scope="module")
def small_runs():
    """Owners have runs of these small parameters, too."""
    with small_pieces():
        yield


@pytest.fixture(scope="module")
def undisturbed() -> dict[str, int]:
    return {which: final_hash(which, ParallelPlan.mesh(layers=LAYERS)) for which in OPTIMIZERS}


@pytest.mark.parametrize("which", OPTIMIZERS)
@pytest.mark.parametrize("history", HISTORIES)
def test_state_of_any_shape_comes_through_recovery(which: str, history: str, undisturbed: dict[str, int]):
    plan, mirror_every, change = HISTORIES[history]
    assert final_hash(which, plan, mirror_every, change) == undisturbed[which]
