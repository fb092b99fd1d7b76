"""What the members of a run report of steps and validations, kept until people have seen it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from raypar.actors.plan_cache import PlanCache
from raypar.elastic import events as on
from raypar.elastic.member import WorkerStatus
from raypar.elastic.run_machine import RunMachine

Report = dict[str, Any]
"""What a worker says of one step: loss, norm, count, seconds and what it cost."""


class StepReports:
    """By step (from 0), then by rank."""

    def __init__(self, machine: RunMachine, plans: PlanCache) -> None:
        self.machine, self.plans = machine, plans
        self.outcomes: dict[int, tuple[float, float]] = {}
        """(loss, norm) of every step seen: what is executed again must give the same."""
        self.journalled: dict[int, Report] = {}
        """Step -> what a former driver has put into the journal (`merge_reports`), for steps that people may not have seen."""
        self.validations: dict[int, Any] = {}
        """worker -> its part of the validation that is under way"""
        self._open: dict[int, dict[int, Report]] = defaultdict(dict)
        self._unseen: dict[int, dict[int, Report]] = {}
        """Of steps that are being journalled and emitted."""
        self._warned: set[str] = set()
        """Keys of warnings that were shown: workers run the same code, and each reports them."""

    def stepped(self, number: int, generation: int, step: int, report: Report) -> on.RunEvent:
        """A worker's report of a step; the event that it is."""
        machine, busy_s = self.machine, None
        if generation == machine.membership.generation:
            rank = machine.membership.members.index(number)
            self._open[step][rank] = report
            microbatches = self.plans.passes(machine.membership.plan)[rank] if machine.membership.plan is not None else 0
            busy_s = report["busy_seconds"] / microbatches if microbatches else None
        cost, digest = report["mirror_seconds"], report["digest"]
        return on.StepReported(number, step, report["seconds"], generation, cost, digest, busy_s)

    def validated(self, number: int, generation: int, done: int, report: Any) -> on.RunEvent:
        """A worker's part of a validation; the event that it is."""
        if generation == self.machine.membership.generation:
            self.validations[number] = report
        return on.ValidationReported(number, done, generation)

    def warnings(self, report: Report) -> list[str]:
        """The warnings in a worker's report of a step or a validation that no worker has given before."""
        fresh = [(key, line) for key, line in report.get("warnings", ()) if key not in self._warned]
        self._warned.update(key for key, _ in fresh)
        return [line for _, line in fresh]

    def heard(self, stand: WorkerStatus) -> WorkerStatus:
        """Steps that a worker has applied and nobody has reported to the end are committed by the machine; people see their
        loss."""
        for step, outcome in stand.outcomes.items():
            if step >= self.machine.progress.journalled:
                self._open[step] = {0: reconstruct_report(outcome)}
        return stand

    def commit(self, step: int) -> None:
        """Mark a step as committed and not seen yet.

        What a former driver has put into the journal is preferred: workers remember less of a step, and the last steps only.
        """
        if step in self.journalled:
            self._open[step] = {0: {**self.journalled[step], "spans": [], "ledger": {}}}
        self._unseen[step] = self._open.pop(step)

    def brief(self, step: int) -> Report:
        """A step that is committed and not seen yet, as `merge_reports` gives it."""
        return merge_reports(self._unseen[step])

    def emit(self, step: int) -> dict[int, Report]:
        """What people are to see of it, by rank."""
        reports = self._unseen.pop(step)
        self.outcomes[step] = loss_and_norm(reports)
        return reports

    def changed(self, step: int) -> tuple[tuple[float, float], tuple[float, float]] | None:
        """(loss, norm) that was seen and that was found now that the step was executed again; None where these are the same."""
        found, before = loss_and_norm(self._open.pop(step)), self.outcomes.get(step)
        return None if before is None or repr(found) == repr(before) else (before, found)  # NaN is equal to NaN here

    def forget(self) -> None:
        """Steps that are not committed never happened."""
        self._open.clear()


def loss_and_norm(reports: Mapping[int, Mapping[str, Any]]) -> tuple[float, float]:
    """(loss, norm): the same in all reports of a step."""
    report = next(iter(reports.values()))
    return report["loss"], report["norm"]


def merge_reports(reports: Mapping[int, Mapping[str, Any]]) -> Report:
    """One report for all workers' reports of a step: the longest time of any, the work and the memory of all."""
    one = next(iter(reports.values()))
    if "workers" in one:  # made by this function already
        return {key: value for key, value in one.items() if key not in ("spans", "ledger")}
    return {
        **{key: one[key] for key in ("loss", "norm", "count", "skipped")},
        "seconds": max(r["seconds"] for r in reports.values()),
        "busy_seconds": sum(r["busy_seconds"] for r in reports.values()),
        "peak_rss_bytes": [reports[rank]["peak_rss_bytes"] for rank in sorted(reports)],
        "workers": len(reports),
    }


def reconstruct_report(outcome: Any) -> Report:
    """What can be said of a step that was found applied, and whose reports went to nobody or are not whole."""
    known = {"loss": outcome.loss, "norm": outcome.norm, "count": outcome.count, "skipped": outcome.skipped}
    return {**known, "seconds": 0.0, "busy_seconds": 0.0, "peak_rss_bytes": 0, "spans": [], "ledger": {}}
