"""The values of a run's metrics: its totals, and the latest values of steps, workers and memory. Time is an argument."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypedDict

from raypar.plan import ParallelPlan
from raypar.record.events import Event, StepRecord
from raypar.record.fold import RunView
from raypar.record.totals import RunTotals

RECENT_WEIGHT = 0.1
"""Weight of the newest step in the means of the last steps (exponentially weighted): they cover about the last twenty steps."""


class WorkerMeasures(TypedDict, total=False):
    """What is read of a worker's report of a step."""

    memory: Mapping[str, int]
    ledger: Mapping[str, Mapping[str, int]]


Labels = tuple[tuple[str, str], ...]
"""(name, value) of each label of a metric, except `run`."""


class MetricValue(NamedTuple):
    """The value of one series of a metric; of a counter its total."""

    name: str
    labels: Labels
    value: float


@dataclass(frozen=True)
class WorkerCounts:
    """Numbers of workers of a run at one moment, by state."""

    seated: int = 0
    """Workers with a seat in the plan."""
    spare: int = 0
    """Workers that have started and wait for a seat."""
    starting: int = 0
    """Workers that are placed on a node, and load."""
    pending: int = 0
    """Workers for which the cluster has no room yet."""
    pending_replicas: int = 0
    """Placement groups of the pending workers: one for each replica of a stage, or for each worker that is asked for alone."""
    generation: int = 1
    """The present generation."""

    @property
    def held(self) -> int:
        """Workers that occupy a place in the cluster."""
        return self.seated + self.spare + self.starting


@dataclass
class RunTelemetry:
    """Gathers the values of a run's metrics from its steps and events.

    The recorder adds each committed step once; replayed steps are not added again.
    """

    view: RunView = field(default_factory=RunView)
    """What the steps and events of this driver say, with the totals of the run over all of its drivers."""
    counts: WorkerCounts = WorkerCounts()
    """The numbers of workers since the last `advance`."""
    plan: ParallelPlan | None = None
    """The plan of the present generation; None before it is known."""
    seated: ParallelPlan | None = None
    """The plan of the last step, to which `busy` and `memory` belong. A new generation replaces it with its first step."""
    busy: list[float] = field(default_factory=list)
    """By rank: mean share of the last steps' time in which the worker computed, since the generation began."""
    memory: dict[int, dict[str, float]] = field(default_factory=dict)
    """Rank -> kind of memory -> bytes, as last reported in the generation."""
    durations: list[float] = field(default_factory=list)
    """Seconds of the steps since the last `take_durations`."""
    _means: dict[str, float] = field(default_factory=dict)
    """Key of metrics.jsonl -> mean of its values over the last steps of the generation."""
    _first_step_due: bool = True
    """Whether the present generation has made no step yet."""
    _ledgers: dict[int, dict[str, int]] = field(default_factory=dict)
    """Rank -> operation -> bytes sent since the generation began, as last reported."""
    _advanced_s: float | None = None
    """Time of the last `advance`."""

    @property
    def totals(self) -> RunTotals:
        """Totals of the run over all of its drivers."""
        return self.view.totals

    def begin_generation(self, plan: ParallelPlan) -> None:
        """Note the plan of a new generation, whose workers count sent bytes from 0."""
        self.plan, self.view.workers = plan, plan.world
        self._first_step_due = True
        self._ledgers.clear()

    def advance(self, now_s: float, counts: WorkerCounts | None = None) -> None:
        """Count the worker time up to `now_s` (of any steady clock). `counts`: the workers from now on; None: unchanged."""
        if self._advanced_s is not None:
            self.totals.worker_s += max(0.0, now_s - self._advanced_s) * self.counts.held
        self._advanced_s = now_s
        if counts is not None:
            self.counts = counts
            self.totals.workers = counts.held

    def add_step(self, step: StepRecord, now_s: float, reports: Mapping[int, WorkerMeasures] | None = None) -> None:
        """Add a committed step, and the workers' reports by rank, if there are any."""
        self.advance(now_s)
        counted = self.totals.steps
        self.view.apply(step)
        if self.totals.steps == counted:
            return
        self.durations.append(step.seconds)
        if self._first_step_due:
            self._first_step_due = False
            self.memory.clear()
            self.busy.clear()
            self._means.clear()
        self._add_seats(step, reports or {})
        waited = step.data_wait or 0.0 if step.bubble is not None else None
        for key, value in (("bubble", step.bubble), ("data_wait", waited), ("seconds", step.seconds)):
            if value is not None:
                mean = self._means.get(key, value)
                self._means[key] = mean + RECENT_WEIGHT * (value - mean)

    def _add_seats(self, step: StepRecord, reports: Mapping[int, WorkerMeasures]) -> None:
        """Note each worker's computing time, memory and sent bytes."""
        shares = list(step.busy_shares or ())
        if self.plan is not None and len(shares) == self.plan.world:
            self.seated = self.plan
            same = self.busy if len(self.busy) == len(shares) else shares
            self.busy = [mean + RECENT_WEIGHT * (share - mean) for mean, share in zip(same, shares, strict=True)]
        for rank, peak in enumerate(step.peak_rss_bytes or ()):
            self.memory.setdefault(rank, {})["peak_rss"] = peak
        for rank, report in reports.items():
            if memory := report.get("memory"):
                self.memory.setdefault(rank, {}).update(memory)
            if ledger := report.get("ledger"):
                self._add_ledger(rank, ledger)

    def held_bytes(self, rank: int) -> dict[str, int]:
        """Kind of memory -> bytes that a worker has reported last, in this generation; empty if it has not."""
        return {kind: int(nbytes) for kind, nbytes in self.memory.get(rank, {}).items()}

    def _add_ledger(self, rank: int, ledger: Mapping[str, Mapping[str, int]]) -> None:
        """Count the bytes that a worker has sent since its last report. A ledger counts from the start of the generation."""
        sent = {operation: counts["sent"] for operation, counts in ledger.items() if counts.get("sent")}
        before = self._ledgers.get(rank, {})
        if any(sent.get(operation, 0) < count for operation, count in before.items()):
            before = {}  # its ledger began anew, for a generation that `begin_generation` was not told of
        for operation, count in sent.items():
            fresh = count - before.get(operation, 0)
            self.totals.sent_bytes[operation] = self.totals.sent_bytes.get(operation, 0) + fresh
        self._ledgers[rank] = sent

    def catch_up(self, steps: Iterable[StepRecord], events: Iterable[Event], now: float) -> None:
        """Count the steps and events that a former driver wrote after it had saved these totals. `now`: Unix time.

        The time since then is counted as worker time: the former driver's workers still exist.
        """
        saved = self.totals.time
        if saved:
            self.totals.worker_s += max(0.0, now - saved) * self.totals.workers
        for step in steps:
            self.totals.add_step(step, len(step.peak_rss_bytes or ()) or self.totals.workers)
        for event in events:
            if (event.time or 0.0) > saved:
                self.totals.add_event(event)

    def take_durations(self) -> list[float]:
        """The times of the steps since the last call."""
        found, self.durations = self.durations, []
        return found

    def values(self, job_steps: int, price: float | None) -> list[MetricValue]:
        """The values of all gauges and counters now. `price`: of one worker for an hour; None: there are no costs."""
        totals, counts = self.totals, self.counts
        found = {
            "raypar_committed_steps": totals.last_step,
            "raypar_job_steps": job_steps,
            "raypar_generation": counts.generation,
            "raypar_pending_replicas": counts.pending_replicas,
            "raypar_steps_total": totals.steps,
            "raypar_skipped_steps_total": totals.skipped_steps,
            "raypar_samples_total": totals.samples,
            "raypar_step_seconds_total": totals.step_s,
            "raypar_useful_worker_seconds_total": totals.useful_worker_s,
            "raypar_worker_seconds_total": totals.worker_s,
            "raypar_recoveries_total": totals.recoveries,
            "raypar_recovery_pause_seconds_total": totals.recovery_pause_s,
            "raypar_replayed_steps_total": totals.replayed_steps,
            "raypar_lost_workers_total": totals.lost_workers,
            "raypar_joined_workers_total": totals.joined_workers,
            "raypar_driver_failovers_total": totals.driver_failovers,
            **self._last_values(),
        }
        if totals.goodput is not None:
            found["raypar_goodput_ratio"] = totals.goodput
        if price is not None:
            found["raypar_cost_total"] = totals.cost(price)
            if totals.samples:
                found["raypar_cost_per_sample"] = totals.cost(price) / totals.samples
        states = {"seated": counts.seated, "spare": counts.spare, "starting": counts.starting, "pending": counts.pending}
        return [
            *(MetricValue(name, (), value) for name, value in found.items()),
            *(MetricValue("raypar_workers", (("state", state),), count) for state, count in states.items()),
            *(
                MetricValue("raypar_communication_bytes_total", (("kind", operation),), count)
                for operation, count in sorted(totals.sent_bytes.items())
            ),
            *(MetricValue("raypar_metric", (("metric", name),), one.last) for name, one in self.view.metrics.items()),
            *self._seat_values(),
        ]

    def _last_values(self) -> dict[str, float]:
        """Gauge of the whole run -> its last value."""
        step, validation, rates = self.view.last_step, self.view.last_validation, self.view.steps.learning_rates
        found = {}
        if step is not None:
            found = {
                "raypar_loss": float(step.loss),
                "raypar_gradient_norm": math.nan if step.norm is None else float(step.norm),
            }
        if step is not None and step.loss_scale is not None:
            found["raypar_loss_scale"] = step.loss_scale
        if step is not None and self._means.get("seconds"):
            found["raypar_samples_per_second"] = step.samples / self._means["seconds"]
        if "bubble" in self._means:
            found["raypar_bubble_ratio"] = self._means["bubble"]
            found["raypar_data_wait_ratio"] = self._means["data_wait"]
        if rates is not None:
            found["raypar_learning_rate"] = rates[-1]
        if validation is not None:
            found["raypar_validation_loss"] = validation.validation_loss
        return found

    def _seat_values(self) -> list[MetricValue]:
        """The values of the metrics of each seat, at the last step."""
        plan = self.seated
        if plan is None or len(self.busy) != plan.world:
            return []
        seats = [seat_labels(plan, rank) for rank in range(plan.world)]
        found = [MetricValue("raypar_worker_busy_ratio", seats[rank], share) for rank, share in enumerate(self.busy)]
        for rank, sizes in sorted(self.memory.items()):
            if rank < plan.world:
                named = (MetricValue("raypar_worker_memory_bytes", (*seats[rank], ("kind", k)), n) for k, n in sizes.items())
                found += named
        return found


def seat_labels(plan: ParallelPlan, rank: int) -> Labels:
    """The labels of a seat. The stages of a worker with several are joined: `0+4`; so are the numbers of several roles."""
    stages, roles = plan.stages_of(rank), plan.roles[rank]
    numbers = map(tuple, (stages, (role.replica for role in roles), (role.shard for role in roles)))
    return tuple((name, "+".join(map(str, each))) for name, each in zip(("stage", "replica", "shard"), numbers, strict=True))


def count_workers(
    *,
    members: Sequence[int],
    gone: Iterable[int],
    spares: Iterable[int],
    existing: Iterable[int],
    groups: Mapping[int, Hashable],
    generation: int,
) -> WorkerCounts:
    """The workers of a run by state.

    `existing`: workers that have an actor. `groups`: worker -> id of its placement group. A worker with a placement group but
    no actor is pending. At the start of a run no worker has an actor before there is room for all that the run begins with.
    """
    there = set(existing)
    seated = there & set(members) - set(gone)
    spare = there & set(spares) - seated
    waiting = [number for number in groups if number not in there]
    return WorkerCounts(
        seated=len(seated),
        spare=len(spare),
        starting=len(there - seated - spare),
        pending=len(waiting),
        pending_replicas=len({groups[number] for number in waiting}),
        generation=generation,
    )
