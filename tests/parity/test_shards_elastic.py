"""State of shards moves by name and slice when workers come and go: what moves is what is lacking, the bits stay."""

import gc
import weakref
from itertools import pairwise, product
from pathlib import Path

import pytest
import torch
from helpers import checkpoint_folders as checkpoint_files
from helpers import torch_flesh
from helpers.generations import SHARDS, Generations, mesh
from helpers.protocol import Fault
from helpers.shard_grid import SHALLOW, Cell, graph
from helpers.zero_layouts import small_pieces

from raypar.comm.local_transport import LocalMesh
from raypar.model.tensor_parallel.compute_shard_layout import compute_shard_layout
from raypar.plan import MicrobatchRouting, ParallelPlan
from raypar.schedule import registry
from raypar.worker.make_worker_assignments import make_worker_assignments
from raypar.worker.run_in_one_process import OneProcessRun
from raypar.worker.state.mirror import StateCopy

pytestmark = pytest.mark.part(5)

PATHS = [
    [(1, 1, 2), (1, 2, 2), (2, 1, 2)],
    [(1, 1, 1), (1, 1, 4), (1, 2, 3)],
    [(2, 2, 2), (1, 1, 1), (1, 1, 2)],
    [(1, 2, 4), (2, 1, 3), (1, 1, 4)],
]


MODELS = ["llama", SHALLOW, "dropped"]
CASES = [
    pytest.param(model, path, marks=[] if number % 5 == 0 else pytest.mark.full)
    for number, (model, path) in enumerate(product(MODELS, PATHS))
]
"""The default suite takes every model once, and three of the paths."""


@pytest.mark.ci
@pytest.mark.parametrize("model, path", CASES, ids=str)
def test_workers_that_change_their_shards_go_on_as_from_a_checkpoint(model, path, tmp_path):
    """replicas x stages x shards; two steps under each. Every second generation has new workers in half of its seats."""
    spec = Cell(model, "1f1b", (1,), (1,), 3, True).job
    job = torch_flesh.TorchJob(spec, graph(model), shards=SHARDS)
    live = Generations(job)
    there: Path | None = None
    for number, shape in enumerate(path):
        plan, done = mesh(model, *shape), 2 * number
        first = plan.world // 2 if number == 2 else 0
        live.adopt(plan, list(range(first, first + plan.world)), done)
        with OneProcessRun(spec, plan, "1f1b", graph=graph(model)) as local:
            for core in local.cores if there is not None else ():
                core.load(there)
            for step in (done, done + 1):
                live.step(step)
                local.step(step)
            there = checkpoint_files.save_run(local, tmp_path / "local", done + 2, contract={})
        found, want = (
            checkpoint_files.read_checkpoint_state(live.save(tmp_path / "live", done + 2)),
            checkpoint_files.read_checkpoint_state(there),
        )
        assert found.keys() == want.keys()
        for name, kinds in want.items():
            for kind, value in kinds.items():
                assert torch.equal(torch.as_tensor(found[name][kind]), torch.as_tensor(value)), (shape, name, kind)


def test_a_new_worker_in_the_seat_of_a_shard_gets_its_slices_and_nobody_else_anything():
    job = torch_flesh.TorchJob(Cell(SHALLOW, "1f1b", (1,), (1,), 5).job, graph(SHALLOW), shards=SHARDS)
    live = Generations(job)
    plan = mesh(SHALLOW, 2, 1, 2)
    live.adopt(plan, [0, 1, 2, 3], 0)
    live.step(0)
    sizes = [sum(p.size for p in pieces) for pieces in job.layout(plan)]
    del live.bodies[1]
    assert live.adopt(plan, [0, 7, 2, 3], 1) == sizes[1]
    live.step(1)


def plans_of(model: str, shards: int):
    """The planner: as many workers as make whole seats, with so many shards each."""

    def chosen(generation: int, workers: int) -> ParallelPlan:
        seats = max(1, workers // shards)
        stages = 2 if seats > 1 else 1
        return mesh(model, seats // stages, stages, shards)

    return chosen


@pytest.mark.parametrize("whole", [False, pytest.param(True, marks=pytest.mark.full)])
@pytest.mark.parametrize("model, sequence", [(SHALLOW, False), ("llama", True)])
def test_whatever_befalls_a_worker_the_bits_of_so_many_shards_stay(model, sequence, whole):
    """Killed, stopped, joined: the real run machine and real bodies; 2 shards before and after."""
    from helpers.protocol import random_faults

    spec = Cell(model, "1f1b", (1,), (1,), 2, sequence).job
    job = torch_flesh.TorchJob(spec, graph(model), shards=SHARDS)
    plan = mesh(model, 2, 1, 2)
    plain, reference = torch_flesh.simulate(job, plan, plans=plans_of(model, 2), **torch_flesh.QUICK)
    assert reference is not None
    kinds = ("kill", "zombie", "stop", "late_answer", "kill_driver", "join", "drain")
    for seed in range(30 if whole else 3):
        faults = random_faults(seed, 2, plain, workers=4, kinds=kinds)
        world, found = torch_flesh.simulate(job, plan, faults, plans=plans_of(model, 2), **torch_flesh.QUICK)
        assert world.over.end == "done" or "the only copies" in world.over.why, world.tell(f"{faults}: {world.over.why}")
        assert found in (reference, None), world.tell(f"{faults}: other bits")


@pytest.mark.parametrize("holders", [1, 2])
@pytest.mark.parametrize("every", [pytest.param(41, marks=pytest.mark.ci), pytest.param(1, marks=pytest.mark.full)])
def test_a_kill_of_an_owner_on_shards_leaves_the_bits(every, holders):
    """Replicas divide state and gradients; of the sequence shards have parts, so that gradients are completed over them."""
    from helpers.protocol import single_faults

    spec = Cell(SHALLOW, "1f1b", (1,), (1,), 3, True).job
    job = torch_flesh.TorchJob(spec, graph(SHALLOW), shards=SHARDS, mirror_every=int(holders == 1))
    plan, chosen = mesh(SHALLOW, 3, 1, 2), plans_of(SHALLOW, 2)
    with small_pieces():
        plain, reference = torch_flesh.simulate(job, plan, plans=chosen, **torch_flesh.QUICK)
        divided = {"plans": lambda number, workers: chosen(number, workers).with_zero(2, holders), **torch_flesh.QUICK}
        plain, found = torch_flesh.simulate(job, plan.with_zero(2, holders), **divided)
        assert found == reference
        for fault in single_faults(plain, ["kill"])[::every]:
            world, found = torch_flesh.simulate(job, plan.with_zero(2, holders), [fault], **divided)
            assert world.over.end == "done", world.tell(f"{fault}: {world.over.why}")
            assert found == reference, world.tell(f"{fault}: other bits")


@pytest.mark.ci
def test_the_only_copy_of_a_slice_comes_back_from_the_mirror():
    spec = Cell("llama", "1f1b", (1,), (1,), 2).job
    job = torch_flesh.TorchJob(spec, graph("llama"), shards=SHARDS, mirror_every=1)
    plan = mesh("llama", 1, 1, 4)
    policy = torch_flesh.QUICK | {"hires": True, "min_workers": 4}
    plain, reference = torch_flesh.simulate(job, plan, plans=plans_of("llama", 4), **policy)
    cured = 0
    for at in range(plain.points // 3, plain.points, plain.points // 4):
        world, found = torch_flesh.simulate(job, plan, [Fault(at, "kill")], plans=plans_of("llama", 4), **policy)
        assert found in (reference, None), world.tell(f"{at}: other bits")
        cured += found == reference
    assert cured


@pytest.mark.ci
def test_steps_that_are_executed_again_with_other_shards_are_not_held_against_the_run():
    """One of two shards dies and nobody comes: the other goes back to the mirror's cut, or to the beginning, and on alone."""
    spec = Cell(SHALLOW, "1f1b", (1,), (1,), 2).job.replace(steps=5)
    job = torch_flesh.TorchJob(spec, graph(SHALLOW), shards=SHARDS, mirror_every=2)
    plan = mesh(SHALLOW, 1, 1, 2)
    plain, reference = torch_flesh.simulate(job, plan, plans=plans_of(SHALLOW, 2), **torch_flesh.QUICK)
    replayed, other = 0, 0
    for at in range(plain.points // 8, plain.points, plain.points // 6):
        faults = [Fault(at, "kill")]
        world, found = torch_flesh.simulate(job, plan, faults, plans=lambda _, n: mesh(SHALLOW, 1, 1, n), **torch_flesh.QUICK)
        assert world.over.end == "done", world.tell(f"{at}: {world.over.why}")
        replayed, other = replayed + world.replayed, other + (found != reference)
    assert replayed and other


@pytest.mark.parametrize("schedule, shards", [("1f1b", 1), ("zb-h1", 1), ("1f1b", 2), ("zb-h1", 2)])
def test_the_stages_of_a_former_plan_are_freed_without_pythons_collector(schedule, shards):
    """Workers freeze what there is after every adoption: the collector does not look at it again."""
    job = Cell(SHALLOW, schedule, (1,), (1,), 4, True).job
    plan = mesh(SHALLOW, 1, 1, shards)
    with OneProcessRun(job, plan, schedule, graph=graph(SHALLOW)) as local:
        local.step(0)
        former = [weakref.ref(p) for core in local.cores for stage in core.stages.values() for p in stage.parameters.values()]
        gc.collect()
        gc.freeze()
        gc.disable()
        try:
            parts = make_worker_assignments(
                job, graph(SHALLOW), plan, registry.build_schedule("1f1b", MicrobatchRouting(plan, job.batching))
            )
            for core, part, transport in zip(local.cores, parts, LocalMesh(plan.world).transports, strict=True):
                core.adopt(part, transport)
            assert [reference() for reference in former] == [None] * len(former)
        finally:
            gc.enable()  # without unfreezing: every later collection would look through all that was frozen before the tests


def test_digests_of_two_shards_are_of_different_things():
    job = torch_flesh.TorchJob(Cell(SHALLOW, "1f1b", (1,), (1,), 4).job, graph(SHALLOW), shards=SHARDS)
    live = Generations(job)
    live.adopt(mesh(SHALLOW, 2, 1, 2), [0, 1, 2, 3], 0)
    for body in live.bodies.values():
        body._take_mirror_snapshot(None)
    digests = [live.bodies[w].mirror.digests[0] for w in range(4)]
    assert digests[0] == digests[2] and digests[1] == digests[3]
    assert digests[0][0] != digests[1][0], "shards are not compared with each other"
    for worker, (one, other) in enumerate(pairwise([live.bodies[0], live.bodies[2]])):
        assert one.mirror.pieces() == other.mirror.pieces(), worker
    assert compute_shard_layout(graph(SHALLOW), 2).cuts


@pytest.mark.parametrize("shards", [1, 2])
def test_training_goes_on_beside_the_mirrors_cut_and_not_in_it(shards):
    """All went back to the cut, and before the first step worker 0 gets what it had only kept for others."""
    job = torch_flesh.TorchJob(Cell(SHALLOW, "1f1b", (1,), (1,), 4).job, graph(SHALLOW), shards=SHARDS)
    live = Generations(job)
    live.adopt(mesh(SHALLOW, 1, 2, shards), list(range(2 * shards)), 0)
    live.step(0)
    body = live.bodies[0]
    copies = {
        worker: StateCopy.of(other._stages_state(), body.mirror.pool, other._slices())
        for worker, other in live.bodies.items()
        if worker
    }
    body._take_mirror_snapshot(None)
    body.mirror._snapshots[1] |= copies
    body._old = body.mirror.state_of_snapshot(1)
    before = {worker: copy.digest() for worker, copy in body.mirror._snapshots[1].items()}
    assert live.adopt(mesh(SHALLOW, 1, 1, 1), [0], 1) == 0
    live.step(1)
    assert {worker: copy.digest() for worker, copy in body.mirror._snapshots[1].items()} == before
