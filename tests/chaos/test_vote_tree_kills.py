"""Votes that go up and down a tree: whoever dies in between, the bits are the undisturbed run's, and no step counts twice.

Runs of many workers vote so (`worker/step/vote_exchange.py`); here those of eight do, each node of whose tree has two below it.
"""

from collections.abc import Iterator

import pytest
from helpers import membership
from helpers.membership import QUICK, history, undisturbed
from helpers.protocol import Fault
from helpers.torch_flesh import simulate

from raypar.plan import ParallelPlan, vote_tree

PLAN = ParallelPlan.mesh(pp=2, dp=4, layers=8)
SPEC = 1
STEPS = 3


@pytest.fixture(autouse=True)
def few_workers_are_many(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(vote_tree, "MOST_DIRECT", 2)
    monkeypatch.setattr(vote_tree, "FANOUT", 2)
    yield


def kill_at(points: range) -> tuple[int, int]:
    """A kill at each of these points, each in a run of its own: how often the step was applied late, how often it ran again."""
    work = membership.job(SPEC, STEPS)
    reference = undisturbed(SPEC, STEPS)
    late = again = 0
    for at in points:
        world, found = simulate(work, PLAN, [Fault(at, "kill")], **QUICK)
        assert found == reference, world.tell(f"a kill at {at}: {world.over.why}")
        applied_late = any("ApplyKeptGradients(" in line for line in world.story)
        late, again = late + applied_late, again + (not applied_late)
    return late, again


def end_of_a_step() -> range:
    """The points of the second step's last part, in which the workers vote and apply it."""
    plain, found = simulate(membership.job(SPEC, STEPS), PLAN, **QUICK)
    assert found == undisturbed(SPEC, STEPS), "the tree alone changes no bit"
    return range(plain.points // 2, plain.points // 2 + plain.points // STEPS)


@pytest.mark.ci
def test_a_kill_between_up_and_down_leaves_the_bits_and_some_steps_are_applied_late():
    late, again = kill_at(end_of_a_step()[::3])
    assert late > 0 and again > 0


@pytest.mark.full
def test_a_kill_at_any_point_of_a_step_leaves_the_bits():
    late, again = kill_at(end_of_a_step())
    assert late > 0 and again > 0


@pytest.mark.parametrize(
    "seeds",
    [
        pytest.param(range(300, 306), marks=pytest.mark.ci),
        pytest.param(range(306, 400), marks=pytest.mark.full),
    ],
)
def test_histories_of_joins_losses_and_hangs_leave_the_bits(seeds: range):
    for seed in seeds:
        case = history(seed)
        world, found, _ = membership.run(case)
        assert found == undisturbed(case.spec), world.tell(f"seed {seed}: other bits, {case}")
