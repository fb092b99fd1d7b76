"""Workers of models whose forward writes buffers are killed at any point: the buffers are those of an undisturbed run.

Real stages and exchanges over the local transport, under the real elastic protocol on a virtual clock.
"""

from dataclasses import replace
from functools import cache

import pytest
from helpers import ugly_models
from helpers.protocol import Fault, Kind, World, random_faults
from helpers.torch_flesh import TorchJob, simulate

from raypar.plan import ParallelPlan
from raypar.worker.layer_graph_of_job import make_layer_graph

QUICK = {
    "step_deadline_s": 0.5,
    "start_deadline_s": 1.0,
    "pass_deadline_s": 2.0,
    "status_s": 0.5,
    "adopt_s": 2.0,
    "capacity_s": 5.0,
}
LAYERS = 8
GRID = ParallelPlan.mesh(dp=2, pp=2, layers=LAYERS)


@cache
def job(model: str, policy: str = "refuse") -> TorchJob:
    spec = ugly_models.job(model, steps=4).replace(model=ugly_models.job(model, steps=4).model.replace(buffers=policy))
    return TorchJob(spec, make_layer_graph(spec))


@cache
def undisturbed(model: str, policy: str = "refuse") -> int:
    """The hash of one worker that nothing happens to."""
    found = simulate(job(model, policy), ParallelPlan.mesh(layers=LAYERS), **QUICK)[1]
    assert found is not None
    return found


def late(world: World) -> int:
    """How often a worker has applied kept gradients after a recovery."""
    return sum("ApplyKeptGradients(" in line for line in world.story)


def check_kills(model: str, policy: str, every: int) -> None:
    """Kill a worker at every so many points, and at those around the end of a step in the middle: some of these are after the
    vote, so that others apply what they have kept."""
    plain, reference = simulate(job(model, policy), GRID, **QUICK)
    assert reference == undisturbed(model, policy)
    applied_late = 0
    middle = plain.points // 2
    for at in sorted({*range(3, plain.points, every), *range(middle - 6, middle)}):
        world, found = simulate(job(model, policy), GRID, [Fault(at, "kill")], **QUICK)
        assert found == reference, world.tell(f"a kill at {at}: {world.over.why}")
        applied_late += late(world)
    assert applied_late > 0


@pytest.mark.parametrize(
    "model, policy",
    [pytest.param("plain norms", "refuse", marks=pytest.mark.ci), pytest.param("counters", "sum", marks=pytest.mark.full)],
)
def test_a_killed_worker_changes_no_buffer_whether_the_step_is_run_again_or_applied_late(model, policy):
    check_kills(model, policy, every=53)


@pytest.mark.full
@pytest.mark.parametrize("model, policy", [("norms", "refuse"), ("counters", "last"), ("counters", "sum")])
def test_a_kill_at_any_point_changes_no_buffer(model, policy):
    check_kills(model, policy, every=2)


@pytest.mark.ci
def test_the_only_copy_of_buffers_comes_back_from_the_mirror():
    work = replace(job("norms"), mirror_every=1)
    plan = ParallelPlan.mesh(pp=4, layers=LAYERS)
    plain, reference = simulate(work, plan, **QUICK)
    assert reference == undisturbed("norms")
    cured = 0
    for at in range(plain.points // 2, plain.points, 97):
        world, found = simulate(work, plan, [Fault(at, "kill")], **QUICK)
        assert found == reference, world.tell(f"a kill at {at}: {world.over.why}")
        cured += any("from_mirror=True" in line for line in world.story)
    assert cured > 0


@pytest.mark.full
@pytest.mark.parametrize("seed", range(20))
def test_seeded_histories_leave_the_buffers_of_one_process(seed: int):
    kinds: tuple[Kind, ...] = ("kill", "zombie", "stop", "late_answer", "kill_driver", "stop_driver", "join", "drain")
    plain, reference = simulate(job("norms"), GRID, **QUICK)
    world, found = simulate(job("norms"), GRID, random_faults(seed, 3, plain, workers=4, kinds=kinds), **QUICK)
    assert world.over is not None and (world.over.end == "done" or "the only copies" in world.over.why), world.tell("")
    assert found in (reference, None)


@cache
def of_six_blocks(model: str) -> TorchJob:
    spec = ugly_models.job(model, microbatches=6, steps=14)
    return TorchJob(spec, make_layer_graph(spec))


@pytest.mark.ci
@pytest.mark.parametrize("model", ["norms", "tangled", "branching"])
def test_replicas_with_other_shares_have_the_state_of_one_process(model):
    """A straggler gets fewer blocks while its run goes on, and one is killed after that."""
    work = of_six_blocks(model)
    plan = ParallelPlan.of([3, 1], layers=len(work.graph.layers))
    reference = simulate(work, ParallelPlan.mesh(layers=len(work.graph.layers)), **QUICK)[1]
    more = {"rebalance_stragglers": True, "straggler_steps": 2, "block_work": (1,) * 6, "slow": {1: 2.0}}
    plain, found = simulate(work, plan, **QUICK, **more)
    assert found == reference and plain.driver.machine.membership.plan.stages[0].share[1] == 1
    for at in range(plain.points // 2, plain.points, max(1, plain.points // 16)):
        world, found = simulate(work, plan, [Fault(at, "kill")], **QUICK, **more)
        gone = world.over.end == "failed" and "the only copies" in world.over.why
        assert found == reference or gone, world.tell(f"a kill at {at}: {world.over.why}")
