"""Workers' reports of steps and validations, kept until the user has seen them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from raypar.actors.plan_cache import PlanCache
from raypar.actors.stream_digest_journal import StreamDigestJournal
from raypar.elastic import events as on
from raypar.elastic.generation_guard import WorkerStatus
from raypar.elastic.run_machine import RunMachine
from raypar.errors import DataError, RayparError
from raypar.job.lr_schedule_metric import FollowedMetric
from raypar.plan import ParallelPlan
from raypar.plan.microbatches import Microbatches, mean_loss, mean_loss_by_set
from raypar.plan.vote_result import VoteResult
from raypar.plan.wording import after_steps
from raypar.record.metric_names import series_of_validation

if TYPE_CHECKING:
    from raypar.worker.worker_reports import Report


KEPT_OUTCOMES = 100_000
"""Number of the last steps whose results are kept to compare them with a replay; more would fill the driver's memory."""

LEAST_DATA_WAIT = 0.01
"""Shares of a step below this are not written down as waiting for samples."""


class StepReports:
    """The reports of workers, by step (from 0) and rank."""

    def __init__(
        self,
        machine: RunMachine,
        plans: PlanCache,
        samples: StreamDigestJournal | None = None,
        followed: FollowedMetric | None = None,
    ) -> None:
        self.samples = samples
        """The journal of the samples of streams; None for a map-style data set."""
        self.followed = followed
        """The metric that the learning rates follow, with its values; None: they follow none."""
        self.machine = machine
        """Knows the members and the plan."""
        self.plans = plans
        """Knows how many microbatches a worker computes."""
        self.outcomes: dict[int, tuple[float, float]] = {}
        """Step -> (loss, norm) as the user has seen them, of the last `KEPT_OUTCOMES` steps: a replay must give the same."""
        self.in_journal: dict[int, Report] = {}
        """Step -> its merged report in a former driver's journal, for steps that the user may not have seen."""
        self.validations: dict[int, Report] = {}
        """Worker -> its report of the present validation."""
        self.doubted: dict[int, float] = {}
        """Steps -> value that was forgotten by `forget_validations`, until that validation has run again."""
        self._open: dict[int, dict[int, Report]] = defaultdict(dict)
        """Step -> rank -> report, of steps that are not committed."""
        self._unseen: dict[int, dict[int, Report]] = {}
        """Step -> rank -> report, of committed steps that the user has not seen."""
        self._merged: dict[int, Report] = {}
        """Step -> its merged report, of those of these steps that were asked for."""
        self._seats: dict[int, tuple[int, int]] = {}
        """See `_seats_now`."""
        self._seats_of: tuple[ParallelPlan | None, tuple[int, ...]] = (None, ())
        """Plan and members whose seats these are."""
        self._warned: set[str] = set()
        """Keys of warnings that were shown: all workers run the same code, and each reports its warnings."""

    def keep_step_reports(self, generation: int, step: int, reports: Mapping[int, Report]) -> on.RunEvent:
        """Keep workers' reports of a step; the event for the run machine."""
        for report in reports.values():
            if (read := report.pop("streams", None)) is None or self.samples is None:
                continue
            if (different := self.samples.note(step, read)) is not None:
                return on.CallFailed("user", different)
        busy_s: dict[int, float] = {}
        if generation == self.machine.membership.generation:
            seats, kept = self._seats_now(), self._open[step]
            for number, report in reports.items():
                rank, microbatches = seats[number]
                kept[rank] = report
                if microbatches:  # A worker that reads slowly is slow, too: its disk, or its machine's other users.
                    busy_s[number] = (report["busy_seconds"] + report.get("read_seconds", 0.0)) / microbatches
        longest_s, cost_s = (max([r[key] for r in reports.values()]) for key in ("seconds", "mirror_seconds"))
        digests = {number: digest for number, report in reports.items() if (digest := report["digest"]) is not None}
        return on.StepReported(tuple(reports), step, longest_s, generation, cost_s, digests, busy_s)

    def _seats_now(self) -> Mapping[int, tuple[int, int]]:
        """Member -> (rank, its forward passes in a step); looked up once for each plan of a generation."""
        who = self.machine.membership
        if who.plan is not self._seats_of[0] or who.members != self._seats_of[1]:
            passes = self.plans.passes(who.plan) if who.plan is not None else (0,) * len(who.members)
            self._seats = {member: (rank, passes[rank]) for rank, member in enumerate(who.members)}
            self._seats_of = (who.plan, who.members)
        return self._seats

    def keep_validation_reports(self, generation: int, done: int, reports: Mapping[int, Report]) -> on.RunEvent:
        """Keep workers' reports of a validation; the event for the run machine."""
        if generation == self.machine.membership.generation:
            self.validations |= reports
        return on.ValidationReported(tuple(reports), done, generation)

    def validated_before(self, step: int) -> float | None:
        """The value of the metric that the learning rates follow, in the validation directly before a step; None if there was
        none, or they follow none. Raises `RayparError` if it is not known, and for the steps up to the next validation: after
        a step that was refused no worker may be called for a later one."""
        followed = self.followed
        if followed is None:
            return None
        last = step - step % followed.every
        if (last == step or last > self.machine.policy.steps_before_run) and followed.lacks(last):
            raise RayparError(
                f"the learning rate of step {step + 1} follows {followed.name}, and its value {after_steps(last)} was lost "
                "with a driver",
                cure="`raypar resume` goes on from the last checkpoint",
            )
        return followed.values.get(step)

    def follow_validation(self, done: int, batching: Microbatches | None) -> dict[int, float]:
        """Take the value that the learning rates follow from the reports of the validation after `done` steps; returns all
        values so far, and none if they follow none. Raises `ConfigError` if the validation has not measured it."""
        if self.followed is None:
            return {}
        *_, measured = merge_validation_reports(batching, self.validations.values())
        self.followed.add(done, measured)
        return dict(self.followed.values)

    def forget_validations(self, done: int) -> dict[int, float]:
        """Forget the values that the learning rates follow, of validations after `done` steps or more; returns the others."""
        assert self.followed is not None
        self.doubted |= {at: value for at, value in self.followed.values.items() if at >= done}
        for at in self.doubted.keys() & self.followed.values.keys():
            del self.followed.values[at]
        return dict(self.followed.values)

    def clause_on_learning_rates_after_wrong_step(self, step: int) -> str:
        """What becomes of validations after a step whose result was wrong, for its line; empty if the learning rates follow
        none of them."""
        if self.followed is None or max(self.followed.values, default=0) <= step:
            return ""
        return f"; the learning rates go on with the values of {self.followed.name} that validations after it have found"

    def new_warnings(self, reports: Mapping[int, Report]) -> list[tuple[int, str]]:
        """(Worker, warning) of the warnings in workers' reports that no worker has given before."""
        found = []
        for number, report in reports.items():
            if warned := report.get("warnings"):
                fresh = [(key, line) for key, line in warned if key not in self._warned]
                self._warned.update(key for key, _ in fresh)
                found += [(number, line) for _, line in fresh]
        return found

    def keep_reports_from_status(self, status: WorkerStatus) -> WorkerStatus:
        """Keep reports of steps that, by its status, a worker has applied; returns the status.

        The workers' own reports of these steps are not complete. The machine commits the steps, and the user sees their loss.
        """
        for step, vote_result in status.vote_results.items():
            if step >= self.machine.progress.journalled:
                known = [vote_result.lr, *(one.get("lr") for one in self._open.get(step, {}).values())]
                lr = next((rate for rate in known if rate is not None), None)
                self._open[step] = {0: {**reconstruct_lost_report(vote_result), "lr": lr}}
        return status

    def note_samples(self, status: WorkerStatus) -> DataError | None:
        """Take what a worker says of the samples of the last steps, which a former driver may not have written. The error for
        other samples than were read before."""
        return self.samples.note_digests(status.samples) if self.samples is not None else None

    def mark_committed(self, step: int) -> None:
        """Mark a step as committed and not yet seen.

        A former driver's report in the journal takes precedence: workers remember less of a step, and only the last steps.
        """
        if step in self.in_journal:
            self._open[step] = {0: {**self.in_journal[step], "spans": [], "ledger": {}}}
        self._unseen[step] = self._open.pop(step)

    def merged_report(self, step: int) -> Report:
        """The merged report of a committed step that has not been seen."""
        if step not in self._merged:
            self._merged[step] = merge_reports(self._unseen[step])
        return self._merged[step]

    def take_reports(self, step: int) -> dict[int, Report]:
        """The reports of a committed step by rank; marks the step as seen."""
        reports = self._unseen.pop(step)
        self._merged.pop(step, None)
        self.outcomes[step] = loss_and_grad_norm_of_step(reports)
        self.outcomes.pop(step - KEPT_OUTCOMES, None)
        return reports

    def replay_difference(self, step: int) -> tuple[tuple[float, float], tuple[float, float]] | None:
        """(loss, norm) of a replayed step at its first execution and now; None if they are equal or the first is not known."""
        found, before = loss_and_grad_norm_of_step(self._open.pop(step)), self.outcomes.get(step)
        return None if before is None or repr(found) == repr(before) else (before, found)  # NaN is equal to NaN here

    def drop_uncommitted(self) -> None:
        """Drop the reports of steps that are not committed."""
        self._open.clear()


def merge_validation_reports(batching: Microbatches | None, reports: Iterable[Report]) -> tuple[float, float, dict[str, float]]:
    """(loss, count of its terms, name -> value of all that was measured), from all workers' reports of a validation.

    The loss is the sum over the microbatches, in their order, divided by the count.
    """
    reports = list(reports)
    losses = {m: pair for report in reports for m, pair in report["losses"].items()}
    metrics = {name: value for report in reports for name, value in report.get("metrics", {}).items()}
    loss, count = mean_loss(losses)
    return loss, count, series_of_validation(loss, mean_loss_by_set(batching, losses), metrics)


def loss_and_grad_norm_of_step(reports: Mapping[int, Report]) -> tuple[float, float]:
    """(loss, norm) of a step, which are the same in the reports of all workers."""
    report = next(iter(reports.values()))
    return report["loss"], report["norm"]


def merge_reports(reports: Mapping[int, Report]) -> Report:
    """One report from all workers' reports of a step: the longest time of any, the work and memory of all."""
    one = next(iter(reports.values()))
    if "workers" in one:  # a report that this function has made
        one = one.copy()
        one.pop("spans", None)
        one.pop("ledger", None)
        return one
    by_rank = [reports[rank] for rank in sorted(reports)]
    longest = max([r["seconds"] for r in by_rank])
    metrics = {name: value for r in reports.values() if (own := r.get("metrics")) for name, value in own.items()}
    data_wait = round(max([r.get("read_seconds", 0.0) for r in by_rank]) / longest, 3) if longest else 0.0
    busy = [r["busy_seconds"] for r in by_rank]
    merged: Report = {
        "loss": one["loss"],
        "norm": one["norm"],
        "count": one["count"],
        "skipped": one["skipped"],
        "lr": next((lr for r in reports.values() if (lr := r.get("lr")) is not None), None),
        "seconds": longest,
        "busy_seconds": sum(busy),
        "busy_shares": [round(each / longest, 3) for each in busy] if longest else [],
        "peak_rss_bytes": [peak for r in by_rank if isinstance(peak := r["peak_rss_bytes"], int)],
        "workers": len(reports),
    }
    if (scale := one.get("loss_scale")) is not None:
        merged["loss_scale"] = scale
    if data_wait >= LEAST_DATA_WAIT:
        merged["data_wait"] = data_wait
    if metrics:
        merged["metrics"] = metrics
    return merged


def reconstruct_lost_report(outcome: VoteResult) -> Report:
    """A report of a step that a worker has applied and whose own reports were lost: loss, norm, count, learning rate only."""
    return {
        "loss": outcome.loss,
        "norm": outcome.norm,
        "count": outcome.count,
        "skipped": outcome.skipped,
        "loss_scale": outcome.loss_scale,
        "lr": outcome.lr,
        "seconds": 0.0,
        "busy_seconds": 0.0,
        "peak_rss_bytes": 0,
        "spans": [],
        "ledger": {},
    }
