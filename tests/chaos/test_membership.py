"""Whatever joins, leaves, hangs or dies: the undisturbed run's parameters, optimizer state, losses and samples, bit for bit.

Real stages, optimizers, reductions and checkpoints over the local transport, under the real protocol on a virtual clock. The
default suite runs a few histories, `.ci/run` some more, `pytest -m full tests/chaos/test_membership.py` the rest of 300. With
a report all 300 are run by

    python tests/chaos/test_membership.py --histories 300 --seed 1
"""

import argparse
import itertools
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import pytest

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]

from helpers.membership import Case, Report, history, job, run, undisturbed
from helpers.protocol import Change

from raypar.plan import ParallelPlan

pytestmark = pytest.mark.part(5)

FEW = 2
SOME = 10
ALL = 300


def try_all(seeds: Iterable[int]) -> Report:
    """Each of these histories ends with the bits of the undisturbed run; what they went through."""
    start, report = time.perf_counter(), Report()
    for seed in seeds:
        case = history(seed)
        world, found, record = run(case)
        assert found == undisturbed(case.spec), world.tell(f"seed {seed}: other bits, {case}")
        report.add(world, record)
    report.seconds = time.perf_counter() - start
    return report


@pytest.mark.parametrize(
    "seeds",
    [range(FEW), pytest.param(range(FEW, SOME), marks=pytest.mark.ci), pytest.param(range(SOME, ALL), marks=pytest.mark.full)],
)
def test_every_membership_history_ends_with_the_bits_of_the_undisturbed_run(seeds: range):
    report = try_all(seeds)
    print(f"\n{report}")
    assert report.total.epochs >= 2 * len(seeds)
    if len(seeds) > 100:
        assert report.total.loads and report.replayed and report.waited and report.changes["kill of two"]


SHAPES = {
    "2 stages x 4": ParallelPlan.mesh(pp=2, dp=4, layers=8),
    "4 stages x 2": ParallelPlan.mesh(pp=4, dp=2, layers=8),
    "8 stages": ParallelPlan.mesh(pp=8, layers=8),
    "8 replicas": ParallelPlan.mesh(dp=8, layers=8),
    "uneven": ParallelPlan.of([1, 3, 2, 2], layers=8),
    "two chunks each": ParallelPlan.mesh(pp=4, dp=2, layers=8, chunks=2),
    "a V": ParallelPlan.mesh(pp=2, dp=4, layers=8, chunks=2, placement="v"),
}
PLAIN = 1
"""The model of eight layers, and of 23 samples an epoch."""


@pytest.mark.ci
@pytest.mark.parametrize("spec", [PLAIN, 3])
def test_eight_workers_in_one_shape_after_the_other(spec: int):
    """Each hands its state over to seven workers, and they to the next shape."""
    shapes = itertools.cycle([*list(SHAPES.values())[1:], SHAPES["2 stages x 4"]])
    moving = [Change(6 * n + at, 0.0, kind) for n in range(7) for at, kind in ((1, "drain"), (4, "join"))]

    def next_shape(generation: int, workers: int) -> ParallelPlan:
        return next(shapes) if workers == 8 else ParallelPlan.mesh(dp=workers, layers=8)

    case = Case(spec, SHAPES["2 stages x 4"], tuple(moving), policy=(("grow_after_s", 0.0),), steps=44)
    world, found, _ = run(case, next_shape)
    assert found == undisturbed(spec, 44)
    assert {plan for plan, _ in world.records.values()} >= set(SHAPES.values()), world.tell("not every shape had its turn")


@pytest.mark.parametrize("plan", SHAPES.values(), ids=SHAPES)
def test_the_shape_does_not_decide_the_bits(plan: ParallelPlan):
    assert run(Case(PLAIN, plan, ()))[1] == undisturbed(PLAIN)


def test_a_parameter_tied_across_two_chunks_of_a_worker_is_updated_once_after_a_new_driver():
    """Both chunks once took over the same tensor, and each optimizer updated it."""
    plan = ParallelPlan.mesh(pp=2, dp=2, layers=job(0).layers, chunks=2, placement="v")
    assert run(Case(0, plan, (Change(4, 0.0, "kill_driver"),)))[1] == undisturbed(0)


def test_without_growth_new_workers_wait_until_a_seat_is_empty():
    plan = ParallelPlan.mesh(dp=2, pp=2, layers=8)
    changes = (Change(1, 0.0, "join", 2), Change(6, 0.0, "kill"))
    world, found, _ = run(Case(PLAIN, plan, changes, policy=(("grow", False), ("max_workers", 8))))
    assert found == undisturbed(PLAIN)
    assert world.flesh.sizes == [4, 4] and 4 in world.driver.machine.membership.members


def test_no_more_workers_get_a_seat_than_max_workers():
    plan = ParallelPlan.mesh(dp=2, pp=2, layers=8)
    policy = (("max_workers", 6), ("grow_after_s", 5.0))
    world, found, _ = run(Case(PLAIN, plan, (Change(1, 0.0, "join", 5),), policy=policy))
    assert found == undisturbed(PLAIN)
    assert world.flesh.sizes == [4, 6] and len(world.driver.machine.membership.spares) == 3


def test_below_min_workers_the_run_waits_until_somebody_joins():
    plan = ParallelPlan.mesh(dp=4, layers=8)
    changes = (Change(3, 0.0, "kill", 2), Change(3, 900.0, "join", 1))
    world, found, _ = run(Case(PLAIN, plan, changes, policy=(("min_workers", 3),)))
    assert found == undisturbed(PLAIN)
    assert any("waiting for 1 more worker of 1 CPU each (2 workers are left" in line for line in world.story)
    assert world.now > 900.0 and world.flesh.sizes[:2] == [4, 3]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--histories", type=int, default=ALL, help="how many")
    parser.add_argument("--seed", type=int, default=1, help="of the first; the others follow")
    asked = parser.parse_args()
    print(try_all(range(asked.seed, asked.seed + asked.histories)))
