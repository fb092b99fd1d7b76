"""What workers report of a step, and what is compared when it is executed again."""

import math
import pickle
import threading
from types import SimpleNamespace

import pytest

from raypar.actors import step_reports
from raypar.actors.messages import pickle_error_for_client
from raypar.actors.step_reports import StepReports, loss_and_grad_norm_of_step, merge_reports, reconstruct_lost_report
from raypar.elastic.generation_guard import WorkerStatus
from raypar.elastic.run_machine import RunMachine
from raypar.elastic.run_policy import RunPolicy
from raypar.errors import RayparError
from raypar.job.lr_schedule_metric import FollowedMetric
from raypar.plan import ParallelPlan
from raypar.plan.vote_result import VoteResult


def report(loss: float = 1.0) -> dict:
    return {"loss": loss, "norm": 2.0, "seconds": 0.3, "busy_seconds": 0.2, "mirror_seconds": 0.0, "digest": None}


@pytest.fixture
def reports() -> StepReports:
    plan = ParallelPlan.mesh(dp=2)
    machine = RunMachine(RunPolicy(workers=2, job_steps=10), plan=plan)
    machine.membership.generation = 1
    machine.membership.members = (5, 3)
    return StepReports(machine, SimpleNamespace(passes=lambda plan: (4, 0)))


def see(reports: StepReports, step: int, loss: float) -> dict:
    for number in (3, 5):
        reports.keep_step_reports(1, step, {number: report(loss)})
    reports.mark_committed(step)
    return reports.take_reports(step)


def test_reports_are_kept_by_rank_and_computing_is_counted_by_microbatch(reports):
    assert reports.keep_step_reports(1, 0, {5: report()}).busy_s == pytest.approx({5: 0.05})
    assert reports.keep_step_reports(1, 0, {3: report()}).busy_s == {}, "it has computed nothing"
    slow = report() | {"read_seconds": 0.04}
    assert reports.keep_step_reports(1, 0, {5: slow}).busy_s == pytest.approx({5: 0.06}), (
        "a worker that reads slowly is slow, too"
    )
    reports.mark_committed(0)
    assert sorted(reports.take_reports(0)) == [0, 1]
    assert reports.outcomes == {0: (1.0, 2.0)}


@pytest.mark.parametrize(("read", "share"), [((0.03, 0.15), 0.5), ((0.0, 0.0028), None), ((0.0, 0.0), None)])
def test_the_longest_wait_for_samples_is_a_share_of_the_step(read: tuple[float, float], share: float | None):
    both = {
        rank: report() | {"count": 8.0, "skipped": False, "peak_rss_bytes": 1, "read_seconds": seconds}
        for rank, seconds in enumerate(read)
    }
    assert merge_reports(both).get("data_wait") == share
    assert merge_reports({0: merge_reports(both)}).get("data_wait") == share, "also from the journal"


def test_the_value_that_the_learning_rates_follow_goes_with_the_step_after_its_validation(reports):
    def validate(done: int, loss: float) -> dict[int, float]:
        reports.validations = {5: {"losses": {0: (loss, 1.0)}, "metrics": {"near": 2.0}}, 3: {"losses": {1: (loss, 3.0)}}}
        return reports.follow_validation(done, None)

    assert validate(2, 1.0) == {} and reports.validated_before(2) is None, "most jobs follow none"
    reports.followed = FollowedMetric("validation_loss", 2)
    assert validate(2, 1.0) == {2: 0.5} and validate(4, 2.0) == {2: 0.5, 4: 1.0}
    assert validate(5, 9.0) == {2: 0.5, 4: 1.0}, "the one at the end of a run, which a longer run does not have"
    assert [reports.validated_before(step) for step in range(6)] == [None, None, 0.5, None, 1.0, None]
    assert reports.clause_on_learning_rates_after_wrong_step(4) == ""
    assert (
        "go on with the values of validation_loss that validations after it"
        in reports.clause_on_learning_rates_after_wrong_step(3)
    )
    reports.followed.values.pop(4)
    for step in (4, 5):  # both are called for at once: a worker that is not called for the first cannot do the second
        wanted = rf"learning rate of step {step + 1} follows validation_loss, .* after 4 steps was lost"
        with pytest.raises(RayparError, match=wanted):
            reports.validated_before(step)
    reports.machine.policy = RunPolicy(workers=2, job_steps=9, steps_before_run=5)
    assert reports.validated_before(5) is None, "a run that is resumed may have followed another metric until then"


def test_only_the_last_steps_are_kept_for_a_comparison(reports, monkeypatch):
    """A driver kept every step of a run of weeks."""
    monkeypatch.setattr(step_reports, "KEPT_OUTCOMES", 3)
    for step in range(8):
        see(reports, step, 1.0)
    assert sorted(reports.outcomes) == [5, 6, 7]
    for number in (3, 5):
        reports.keep_step_reports(1, 2, {number: report(9.0)})
    assert reports.replay_difference(2) is None, "nobody knows any more what it was"


def test_a_late_report_of_an_earlier_generation_is_an_event_and_nothing_else(reports):
    see(reports, 0, 1.0)
    reports.machine.membership.generation = 2
    assert reports.keep_step_reports(1, 1, {3: report()}).generation == 1
    with pytest.raises(KeyError):
        reports.mark_committed(1)


@pytest.mark.parametrize("seen, again, same", [(1.0, 1.0, True), (math.nan, math.nan, True), (1.0, 1.0 + 2**-52, False)])
def test_what_is_executed_again_has_to_give_the_same_to_the_last_bit(reports, seen, again, same):
    see(reports, 0, seen)
    reports.drop_uncommitted()
    for number in (3, 5):
        reports.keep_step_reports(1, 0, {number: report(again)})
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


@pytest.mark.parametrize("rates", [(0.25, None), (None, 0.25)])
def test_its_learning_rate_is_that_of_any_worker_that_knows_it(reports, rates):
    """A stage without trained parameters has none."""
    for number, lr in zip((3, 5), rates, strict=True):
        outcome = VoteResult(loss=0.5, norm=2.0, count=8.0, factor=0.125, skipped=False, lr=lr)
        reports.keep_reports_from_status(WorkerStatus(number, 1, vote_results={0: outcome}))
    reports.mark_committed(0)
    assert step_reports.merge_reports(reports.take_reports(0))["lr"] == 0.25


def test_an_error_that_cannot_be_pickled_reaches_the_client_as_its_text():
    assert pickle_error_for_client(None) is None
    assert pickle.loads(pickle_error_for_client(ValueError("x"))).args == ("x",)
    assert "ValueError" in str(pickle.loads(pickle_error_for_client(ValueError(threading.Lock()))))
