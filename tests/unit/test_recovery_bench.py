"""What the recovery bench reads out of the lines that its contenders write."""

import signal
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "jobs" / "bench"))

before = signal.getsignal(signal.SIGTERM)
from recovery import Outcome, measure, row  # noqa: E402
from recovery_runs import Commit, RunSettings, Seen  # noqa: E402

signal.signal(signal.SIGTERM, before)  # a bench ends its contenders on SIGTERM; a test run does not


class Written(Seen):
    """A run of which only the lines are there."""

    def __init__(self, *steps: tuple[float, int, int, int]) -> None:
        self.workers, self.settings = 4, RunSettings(steps=max(step for _, step, _, _ in steps))
        self._commits = [Commit(*step) for step in steps]

    def commits(self) -> list[Commit]:
        return self._commits

    def lines(self) -> list[dict]:
        return [{"kind": "end", "weights_sha256": "same"}]


def measured(*steps: tuple[float, int, int, int], at_s: float, fault: str = "worker") -> Outcome:
    outcome = Outcome("written", fault, 0)
    measure(Written(*steps), at_s, outcome)
    return outcome


def test_steps_that_are_done_again_are_not_new():
    outcome = measured((1, 1, 4, 24), (2, 2, 4, 24), (9, 2, 4, 24), (10, 3, 4, 24), (11, 4, 4, 24), at_s=2.5)
    assert (outcome.recovery_s, outcome.standstill_s, outcome.repeated, outcome.samples_lost) == (7.5, 8, 1, 0)


def test_what_is_in_nobodys_gradient_is_lost():
    outcome = measured((1, 1, 4, 24), (2, 2, 4, 24), (7, 3, 3, 18), (8, 4, 4, 24), at_s=2.5)
    assert (outcome.recovery_s, outcome.repeated, outcome.samples_lost) == (4.5, 0, 6)


def test_two_workers_that_write_of_a_step_at_nearly_the_same_time_did_it_once():
    assert measured((1, 1, 4, 24), (2, 2, 4, 24), (2.01, 2, 4, 24), (3, 3, 4, 24), at_s=2.5).repeated == 0


def test_a_join_is_over_when_more_workers_compute_a_step():
    outcome = measured((1, 1, 4, 24), (2, 2, 4, 24), (3, 3, 4, 24), (8, 4, 6, 24), (9, 5, 6, 24), at_s=1.5, fault="join")
    assert (outcome.joined_s, outcome.standstill_s) == (6.5, 5)


@pytest.mark.parametrize(
    "undisturbed, told", [({"same"}, "1 of 1"), ({"other"}, "0 of 1"), ({"a", "b"}, "differ without a fault")]
)
def test_weights_are_compared_with_those_of_runs_without_a_fault(undisturbed, told):
    outcome = measured((1, 1, 4, 24), (2, 2, 4, 24), at_s=1.5)
    assert row([outcome], undisturbed)[-1] == told
    assert row([SimpleNamespace(contender="x", fault="node", failed="no")], undisturbed)[1] == "0 of 1"
