"""Workers that recompute are killed in the middle of a step: the bits are those of a run that lost nobody and kept everything.

Real stages, optimizers and reductions over the local transport, under the real elastic protocol on a virtual clock.
"""

from collections.abc import Callable
from dataclasses import replace

import pytest
from helpers.membership import Case, run, undisturbed
from helpers.protocol import Change

from raypar.plan import ParallelPlan
from raypar.schedule.recomputation import has_recomputation

TANGLED, PLAIN = 0, 1
LAYERS = {TANGLED: 9, PLAIN: 8}
EVERY, SOME, NONE = range(9), (1, 4, 6), ()


def shape(spec: int, recompute, **mesh) -> ParallelPlan:
    """A plan for this model of so many replicas, stages and chunks."""
    layers = LAYERS[spec]
    return ParallelPlan.mesh(layers=layers, recompute=[layer for layer in recompute if layer < layers], **mesh)


CASES = {
    "1f1b, everything": (PLAIN, shape(PLAIN, EVERY, pp=2, dp=2)),
    "three stages, some layers": (TANGLED, shape(TANGLED, SOME, pp=3, dp=2)),
    "two chunks, everything": (TANGLED, shape(TANGLED, EVERY, pp=2, dp=2, chunks=2)),
    "a V, everything": (PLAIN, shape(PLAIN, EVERY, pp=2, dp=2, chunks=2, placement="v")),
    "a V, some layers": (TANGLED, shape(TANGLED, SOME, pp=2, dp=2, chunks=2, placement="v")),
    "four replicas, everything": (TANGLED, shape(TANGLED, EVERY, dp=4)),
}


def smaller(spec: int, recompute) -> Callable[[int, int], ParallelPlan]:
    """The planner: as many replicas of two stages as there are workers for, with this recomputation."""

    def plans(generation: int, workers: int) -> ParallelPlan:
        return shape(spec, recompute, pp=2, dp=workers // 2) if workers > 1 else shape(spec, recompute, pp=1)

    return plans


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if i % 4 == 1 else pytest.mark.full) for i, n in enumerate(CASES)])
def test_a_run_that_recomputes_goes_through_kills_with_the_bits_of_an_undisturbed_one(name):
    spec, plan = CASES[name]
    changes = (Change(2, 1.3, "kill"), Change(5, 0.4, "join"), Change(7, 2.1, "kill", seed=3))
    world, found, _ = run(Case(spec, plan, changes), smaller(spec, plan.recompute))
    assert found == undisturbed(spec)
    assert world.driver.machine.membership.generation >= 2, world.tell("nobody was killed")
    plans = {adopted for adopted, _ in world.records.values()}
    assert all(adopted.recompute == plan.recompute for adopted in plans) and len(plans) > 1
    assert any(has_recomputation(part.program) for parts in world.job.lowered.values() for part in parts)


def test_recovery_may_recompute_other_layers_than_the_plan_before():
    spec, plan = CASES["1f1b, everything"]
    changes = (Change(2, 1.3, "kill"), Change(5, 0.0, "drain", 2))  # one is left, whom the same stages do not fit
    world, found, _ = run(Case(spec, plan, changes), smaller(spec, NONE))
    assert found == undisturbed(spec)
    assert {adopted.recompute for adopted, _ in world.records.values()} == {plan.recompute, ()}


def test_refilled_seats_keep_the_recomputation():
    spec, plan = CASES["three stages, some layers"]
    world, found, _ = run(Case(spec, plan, (Change(2, 0.0, "kill"),)), lambda generation, workers: replace(plan))
    assert found == undisturbed(spec)
    assert all(adopted.recompute == plan.recompute for adopted, _ in world.records.values())
