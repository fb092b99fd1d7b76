"""Workers' reports of steps and validations, kept until the user has seen them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from raypar.actors.plan_cache import PlanCache
from raypar.actors.sample_journal import SampleJournal
from raypar.elastic import events as on
from raypar.elastic.run_machine import RunMachine
from raypar.elastic.worker_protocol import WorkerStatus
from raypar.plan.microbatches import VoteResult

Report = dict[str, Any]
"""A worker's report of one step: loss, norm, count, seconds and costs."""


KEPT_OUTCOMES = 100_000
"""Number of the last steps whose results are kept to compare them with a replay; more would fill the driver's memory."""


class StepReports:
    """The reports of workers, by step (from 0) and rank."""

    def __init__(self, machine: RunMachine, plans: PlanCache, samples: SampleJournal | None = None) -> None:
        self.samples = samples
        """The journal of the samples of streams; None for a map-style data set."""
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
        self._open: dict[int, dict[int, Report]] = defaultdict(dict)
        """Step -> rank -> report, of steps that are not committed."""
        self._unseen: dict[int, dict[int, Report]] = {}
        """Step -> rank -> report, of committed steps that the user has not seen."""
        self._warned: set[str] = set()
        """Keys of warnings that were shown: all workers run the same code, and each reports its warnings."""

    def keep_step_report(self, number: int, generation: int, step: int, report: Report) -> on.RunEvent:
        """Keep a worker's report of a step; the event for the run machine."""
        machine, busy_s = self.machine, None
        read = report.pop("streams", None)
        if self.samples is not None and read is not None and (different := self.samples.note(step, read)) is not None:
            return on.CallFailed("user", different)
        if generation == machine.membership.generation:
            rank = machine.membership.members.index(number)
            self._open[step][rank] = report
            microbatches = self.plans.passes(machine.membership.plan)[rank] if machine.membership.plan is not None else 0
            busy_s = report["busy_seconds"] / microbatches if microbatches else None
        cost, digest = report["mirror_seconds"], report["digest"]
        return on.StepReported(number, step, report["seconds"], generation, cost, digest, busy_s)

    def keep_validation_report(self, number: int, generation: int, done: int, report: Report) -> on.RunEvent:
        """Keep a worker's report of a validation; the event for the run machine."""
        if generation == self.machine.membership.generation:
            self.validations[number] = report
        return on.ValidationReported(number, done, generation)

    def new_warnings(self, report: Report) -> list[str]:
        """The warnings in a worker's report that no worker has given before."""
        fresh = [(key, line) for key, line in report.get("warnings", ()) if key not in self._warned]
        self._warned.update(key for key, _ in fresh)
        return [line for _, line in fresh]

    def keep_reports_from_status(self, status: WorkerStatus) -> WorkerStatus:
        """Keep reports of steps that, by its status, a worker has applied; returns the status.

        The workers' own reports of these steps are not complete. The machine commits the steps, and the user sees their loss.
        """
        for step, vote_result in status.vote_results.items():
            if step >= self.machine.progress.journalled:
                self._open[step] = {0: reconstruct_lost_report(vote_result)}
        return status

    def mark_committed(self, step: int) -> None:
        """Mark a step as committed and not yet seen.

        A former driver's report in the journal takes precedence: workers remember less of a step, and only the last steps.
        """
        if step in self.in_journal:
            self._open[step] = {0: {**self.in_journal[step], "spans": [], "ledger": {}}}
        self._unseen[step] = self._open.pop(step)

    def merged_report(self, step: int) -> Report:
        """The merged report of a committed step that has not been seen."""
        return merge_reports(self._unseen[step])

    def take_reports(self, step: int) -> dict[int, Report]:
        """The reports of a committed step by rank; marks the step as seen."""
        reports = self._unseen.pop(step)
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


def loss_and_grad_norm_of_step(reports: Mapping[int, Report]) -> tuple[float, float]:
    """(loss, norm) of a step, which are the same in the reports of all workers."""
    report = next(iter(reports.values()))
    return report["loss"], report["norm"]


def merge_reports(reports: Mapping[int, Report]) -> Report:
    """One report from all workers' reports of a step: the longest time of any, the work and memory of all."""
    one = next(iter(reports.values()))
    if "workers" in one:  # a report that this function has made
        return {key: value for key, value in one.items() if key not in ("spans", "ledger")}
    longest = max(r["seconds"] for r in reports.values())
    metrics = {name: value for r in reports.values() for name, value in r.get("metrics", {}).items()}
    return {
        **{key: one[key] for key in ("loss", "norm", "count", "skipped")},
        "lr": next((lr for r in reports.values() if (lr := r.get("lr")) is not None), None),
        "seconds": longest,
        "busy_seconds": sum(r["busy_seconds"] for r in reports.values()),
        "busy_shares": [round(reports[rank]["busy_seconds"] / longest, 3) for rank in sorted(reports)] if longest else [],
        "peak_rss_bytes": [reports[rank]["peak_rss_bytes"] for rank in sorted(reports)],
        "workers": len(reports),
        **({"metrics": metrics} if metrics else {}),
    }


def reconstruct_lost_report(outcome: VoteResult) -> Report:
    """A report of a step that a worker has applied and whose own reports were lost: loss, norm and count only."""
    known = {"loss": outcome.loss, "norm": outcome.norm, "count": outcome.count, "skipped": outcome.skipped}
    return {**known, "seconds": 0.0, "busy_seconds": 0.0, "peak_rss_bytes": 0, "spans": [], "ledger": {}}
