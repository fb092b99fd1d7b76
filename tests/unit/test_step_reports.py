"""What workers report of a step, and what is compared when it is executed again."""

import math
import pickle
import threading
from types import SimpleNamespace

import pytest

from raypar.actors import step_reports
from raypar.actors.messages import pickle_error_for_client
from raypar.actors.step_reports import StepReports, loss_and_grad_norm_of_step, reconstruct_lost_report
from raypar.elastic.run_machine import RunMachine
from raypar.elastic.run_policy import RunPolicy
from raypar.elastic.worker_protocol import WorkerStatus
from raypar.plan import ParallelPlan
from raypar.plan.microbatches import VoteResult


def report(loss: float = 1.0) -> dict:
    return {"loss": loss, "norm": 2.0, "seconds": 0.3, "busy_seconds": 0.2, "mirror_seconds": 0.0, "digest": None}


@pytest.fixture
def reports() -> StepReports:
    plan = ParallelPlan.mesh(dp=2)
    machine = RunMachine(RunPolicy(workers=2, job_steps=10), plan=plan)
    machine.membership.members = (5, 3)
    return StepReports(machine, SimpleNamespace(passes=lambda plan: (4, 0)))


def see(reports: StepReports, step: int, loss: float) -> dict:
    for number in (3, 5):
        reports.keep_step_report(number, 1, step, report(loss))
    reports.mark_committed(step)
    return reports.take_reports(step)


def test_reports_are_kept_by_rank_and_computing_is_counted_by_microbatch(reports):
    assert reports.keep_step_report(5, 1, 0, report()).busy_s == pytest.approx(0.05)
    assert reports.keep_step_report(3, 1, 0, report()).busy_s is None, "it has computed nothing"
    reports.mark_committed(0)
    assert sorted(reports.take_reports(0)) == [0, 1]
    assert reports.outcomes == {0: (1.0, 2.0)}


def test_only_the_last_steps_are_kept_for_a_comparison(reports, monkeypatch):
    """A driver kept every step of a run of weeks."""
    monkeypatch.setattr(step_reports, "KEPT_OUTCOMES", 3)
    for step in range(8):
        see(reports, step, 1.0)
    assert sorted(reports.outcomes) == [5, 6, 7]
    for number in (3, 5):
        reports.keep_step_report(number, 1, 2, report(9.0))
    assert reports.replay_difference(2) is None, "nobody knows any more what it was"


def test_a_late_report_of_an_earlier_generation_is_an_event_and_nothing_else(reports):
    see(reports, 0, 1.0)
    reports.machine.membership.generation = 2
    assert reports.keep_step_report(3, 1, 1, report()).generation == 1
    with pytest.raises(KeyError):
        reports.mark_committed(1)


@pytest.mark.parametrize("seen, again, same", [(1.0, 1.0, True), (math.nan, math.nan, True), (1.0, 1.0 + 2**-52, False)])
def test_what_is_executed_again_has_to_give_the_same_to_the_last_bit(reports, seen, again, same):
    see(reports, 0, seen)
    reports.drop_uncommitted()
    for number in (3, 5):
        reports.keep_step_report(number, 1, 0, report(again))
    changed = reports.replay_difference(0)
    assert (changed is None) if same else changed == ((seen, 2.0), (again, 2.0))


def test_a_step_that_was_found_applied_is_seen_with_its_loss_and_no_time(reports):
    outcome = VoteResult(loss=0.5, norm=2.0, count=8.0, factor=0.125, skipped=False)
    reports.machine.progress.journalled = 4
    reports.keep_reports_from_status(WorkerStatus(3, 5, vote_results={3: outcome, 4: outcome}))
    reports.mark_committed(4)
    assert reports.take_reports(4) == {0: reconstruct_lost_report(outcome)}
    assert reconstruct_lost_report(outcome)["seconds"] == 0.0 and loss_and_grad_norm_of_step(
        {0: reconstruct_lost_report(outcome)}
    ) == (0.5, 2.0)
    with pytest.raises(KeyError):
        reports.mark_committed(3)


def test_an_error_that_cannot_be_pickled_reaches_the_client_as_its_text():
    assert pickle_error_for_client(None) is None
    assert pickle.loads(pickle_error_for_client(ValueError("x"))).args == ("x",)
    assert "ValueError" in str(pickle.loads(pickle_error_for_client(ValueError(threading.Lock()))))
