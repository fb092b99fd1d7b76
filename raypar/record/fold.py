"""The state of a run, folded from its events: the only code that interprets them. Pure; time is an argument.

`RunView.apply` takes one event in constant time, and a view's memory is bounded however long the run. `raypar status`, `top`,
`report`, `runs` and the end of `train` show a view and the documents of the run folder.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import merge
from itertools import islice
from typing import NamedTuple

from raypar.files.printable_text import shorten
from raypar.plan.wording import count_noun
from raypar.record.document_fields import MembersDocument
from raypar.record.events import (
    EndOfRun,
    Event,
    GenerationStart,
    NodeLoss,
    Note,
    Resumption,
    RunStart,
    StepRecord,
    UnknownEvent,
    UnreadableLines,
    ValidationRecord,
    WorkerDrain,
    WorkerLoss,
)
from raypar.record.field_types import is_finite_number
from raypar.record.history import HistoryFold
from raypar.record.series import MetricSeries, PointSeries, ValueSample
from raypar.record.story import Story
from raypar.record.totals import RunTotals
from raypar.record.value_text import short_node_id

RECENT_STEPS = 20
"""Number of last steps over which speed is measured."""
SHOWN_DATA_WAIT = 0.05
"""From this share of a step on people are told that workers wait for samples."""
ACTIVE_PHASES = ("starting", "running", "recovering", "waiting")
"""Phases of a run that has not ended."""
MOST_UNKNOWN_FIELDS = 20
"""Number of unknown fields that are reported, at most."""
MOST_METRICS = 64
"""Number of metrics whose values are kept, at most."""
MOST_NODES = 4096
"""Number of drained nodes that are remembered; a run with more of them may count one twice."""


@dataclass
class StepStatistics:
    """Sums and extremes over steps."""

    count: int = 0
    """Number of steps."""
    skipped: int = 0
    """Steps that changed nothing."""
    overflows: int = 0
    """Those of them whose gradients were not finite with the scale that the loss had."""
    non_finite: int = 0
    """Steps whose loss is NaN or infinite."""
    seconds: float = 0.0
    """Sum of their durations."""
    samples: float = 0.0
    """Sum of their samples."""
    counted: float = 0.0
    """Sum of `StepRecord.count`: samples or tokens."""
    first_loss: float | None = None
    """The first finite loss."""
    last_loss: float | None = None
    """The last finite loss."""
    bubble_s: float = 0.0
    """Sum of bubble x duration over the steps that report a bubble."""
    bubble_seconds: float = 0.0
    """Sum of the durations of these steps."""
    with_bubble: int = 0
    """Number of these steps."""
    data_wait_s: float = 0.0
    """Sum of `StepRecord.data_wait` x duration."""
    learning_rates: tuple[float, float, float, float] | None = None
    """(first, least, largest, last) learning rate."""
    step_seconds: ValueSample = field(default_factory=ValueSample)
    """Times of steps."""

    def add(self, step: StepRecord) -> None:
        """Add a step."""
        self.count += 1
        self.skipped += bool(step.skipped)
        self.overflows += step.overflows
        self.seconds += step.seconds
        self.samples += step.samples
        if is_finite_number(step.count):
            self.counted += step.count or 0.0
        self.step_seconds.add(step.seconds)
        if is_finite_number(step.loss):
            self.last_loss = float(step.loss)
            self.first_loss = self.last_loss if self.first_loss is None else self.first_loss
        else:
            self.non_finite += 1
        if step.bubble is not None and is_finite_number(step.bubble):
            self.bubble_s += step.bubble * step.seconds
            self.bubble_seconds += step.seconds
            self.with_bubble += 1
        if step.data_wait is not None and is_finite_number(step.data_wait):
            self.data_wait_s += step.data_wait * step.seconds
        if step.lr is not None and is_finite_number(step.lr):
            first, least, largest, _ = self.learning_rates or (step.lr,) * 4
            self.learning_rates = (first, min(least, step.lr), max(largest, step.lr), step.lr)

    @property
    def median_step_s(self) -> float:
        """The median time of a step. There must be one."""
        return statistics.median(self.step_seconds.values)


class RecentSpeed(NamedTuple):
    """The speed of the last steps; None before the first step."""

    samples_per_s: float | None = None
    """Their samples over the sum of their times."""
    mean_s: float | None = None
    """The mean of their times."""
    median_s: float | None = None
    """The median of their times."""
    steps: int = 0
    """Number of these steps."""
    data_wait: float = 0.0
    """Share of their times in which a worker waited for samples (`StepRecord.data_wait`)."""

    @property
    def waits_for_data(self) -> bool:
        """Whether that share is worth a word."""
        return self.data_wait >= SHOWN_DATA_WAIT


class RunView:
    """The state of a run after the events so far: those of metrics.jsonl and events.jsonl in order of time (`timeline`)."""

    def __init__(self, totals: RunTotals | None = None) -> None:
        """`totals`: the totals of earlier drivers, to which this view adds."""
        self.steps = StepStatistics()
        """All steps, each once."""
        self.recent: deque[StepRecord] = deque(maxlen=RECENT_STEPS)
        """The last steps. A step that comes again, in a resumed run, replaces itself and those after it."""
        self.validation: ValidationRecord | StepRecord | None = None
        """The last validation with a finite loss."""
        self.last_validation: ValidationRecord | None = None
        """The last validation."""
        self.best_validation: ValidationRecord | StepRecord | None = None
        """The one with the least loss."""
        self.metrics: dict[str, MetricSeries] = {}
        """Name -> values of what steps and validations have measured beside the loss, of the first `MOST_METRICS` names."""
        self.peaks: tuple[PointSeries, PointSeries] = PointSeries(), PointSeries()
        """(step, bytes) of the largest and of the smallest worker's peak memory."""
        self.several_workers = False
        """Whether a step reports the memory of several workers."""
        self.totals = totals or RunTotals()
        """Totals of the events. Only the driver knows the time for which workers were held (totals.json)."""
        self.workers = 0
        """Number of workers, for steps that do not report memory by rank."""
        self.story = Story()
        """The events as lines."""
        self.history = HistoryFold()
        """Steps, losses, workers and faults over time."""
        self.start: RunStart | None = None
        """The last start."""
        self.started_s: float | None = None
        """When the run was started first."""
        self.lost_since_start: set[int] = set()
        """Workers lost since the last start, at which worker numbers begin again."""
        self.generation: GenerationStart | None = None
        """The last generation that replaced another one."""
        self.generation_s = 0.0
        """When it began to train."""
        self.boundary = ""
        """Kind of the last event that starts, changes or ends the run: started, resumed, generation or end."""
        self.end: EndOfRun | None = None
        """How the run has ended, unless it was started again since; see `ended`."""
        self.last_s: float | None = None
        """The time of the newest event."""
        self.lost_nodes = 0
        """Nodes that were lost with all of their workers."""
        self.drained_nodes: dict[str, None] = {}
        """Nodes whose workers were asked to leave (a text with the worker's number if the node is unknown). An ordered set."""
        self.timed_changes = 0
        """Changes of workers or plan whose pause is known."""
        self.broken_off = 0
        """Number of resumptions after the whole run was killed."""
        self.resumed_s: float | None = None
        """When the last resumption was asked for; identifies it."""
        self.unknown_fields: set[str] = set()
        """Fields that this release does not know, as `kind.field`."""
        self._validation_s: float | None = None
        """The time of the last line of metrics, if that is a validation."""

    @staticmethod
    def of(events: Iterable[Event]) -> RunView:
        """The view of these events."""
        view = RunView()
        for event in events:
            view.apply(event)
        return view

    def apply(self, event: Event) -> None:
        """Take the next event."""
        match event:
            case StepRecord():
                if not self._add_step(event):
                    return
            case ValidationRecord():
                if self._is_known(event):
                    return
                self._validation_s, self.last_validation = event.time, event
                self._add_validation(event)
                self._add_metrics(event.step, event.metrics)
            case UnreadableLines():
                self.story.add(event)
                return
            case _:
                self._add_event(event)
        self.history.apply(event)
        if event.time:
            self.last_s = event.time if self.last_s is None else max(self.last_s, event.time)

    # -- steps ---------------------------------------------------------------------------------------------------------------

    @property
    def last_step(self) -> StepRecord | None:
        """The last step."""
        return self.recent[-1] if self.recent else None

    def _is_known(self, event: StepRecord | ValidationRecord) -> bool:
        """Whether this line was applied before: a file that is rewritten contains it again."""
        last = self.last_step
        if last is None or event.step > last.step or (event.step == last.step and isinstance(event, ValidationRecord)):
            return False
        return (event.time or 0.0) <= (last.time or 0.0)

    def _add_step(self, step: StepRecord) -> bool:
        """Add a step; False if this line was applied before. A step that a resumed run executes again is not counted again."""
        if self._is_known(step):
            return False
        while self.recent and self.recent[-1].step >= step.step:
            self.recent.pop()
        self.recent.append(step)
        self._validation_s = None
        sizes = peak_sizes(step)
        if self.totals.add_step(step, len(step.peak_rss_bytes or ()) or self.workers):
            self.steps.add(step)
            if sizes:
                self.several_workers = self.several_workers or len(sizes) > 1
                for series, size in zip(self.peaks, (max(sizes), min(sizes)), strict=True):
                    series.add((float(step.step), size))
        if step.validation_loss is not None:
            self._add_validation(step)
        if step.more:
            self._add_metrics(step.step, step.metrics)
        return True

    def _add_validation(self, event: ValidationRecord | StepRecord) -> None:
        if event.validation_loss is None or not is_finite_number(event.validation_loss):
            return
        self.validation = event
        best = self.best_validation.validation_loss if self.best_validation is not None else None
        if best is None or event.validation_loss < best:
            self.best_validation = event

    def _add_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            if name in self.metrics or len(self.metrics) < MOST_METRICS:
                self.metrics.setdefault(name, MetricSeries()).add(step, value)

    def recent_speed(self, now: float) -> RecentSpeed:
        """The speed of the last steps of the present generation. `now`: Unix time, for steps without one."""
        recent = [step for step in self.recent if (now if step.time is None else step.time) - step.seconds >= self.generation_s]
        return speed_of(recent or list(self.recent)[-1:])

    # -- other events --------------------------------------------------------------------------------------------------------

    def _add_event(self, event: Event) -> None:
        self.story.add(event)
        self.totals.add_event(event)
        if event.more and not isinstance(event, UnknownEvent):
            self._report_unknown_fields(event)
        match event:
            case RunStart():
                self.start, self.end = event, None
                self.started_s = (event.time or None) if self.started_s is None else self.started_s
                self.lost_since_start.clear()
            case GenerationStart():
                self.generation, self.end = event, None
                self.generation_s = max(self.generation_s, event.time or 0.0)
                self.timed_changes += event.pause_s is not None
            case WorkerLoss():
                self.lost_since_start.add(event.worker)
            case NodeLoss():
                self.lost_nodes += 1
            case WorkerDrain():
                self.drained_nodes[event.node if event.node is not None else f"that of worker {event.worker}"] = None
                if len(self.drained_nodes) > MOST_NODES:
                    del self.drained_nodes[next(iter(self.drained_nodes))]
            case Resumption():
                self.broken_off += bool(event.lost)
                self.resumed_s = event.resumed_s
            case EndOfRun():
                self.end = event
        if isinstance(event, (RunStart, Resumption, GenerationStart, EndOfRun)):
            self.boundary = event.kind

    def _report_unknown_fields(self, event: Event) -> None:
        """Add a line about fields that this release does not know: once for each, and `MOST_UNKNOWN_FIELDS` at most."""
        new = (f"{event.kind}.{name}" for name in event.more if f"{event.kind}.{name}" not in self.unknown_fields)
        names = list(islice(new, MOST_UNKNOWN_FIELDS))
        if names and len(self.unknown_fields) < MOST_UNKNOWN_FIELDS:
            self.unknown_fields.update(names)
            text = f"events have fields that this release of raypar does not know: {shorten(', '.join(names))}"
            self.story.add(Note(text=text, time=event.time))

    def ended(self, members: MembersDocument | None = None) -> EndOfRun | None:
        """How the run has ended; None if it has not, or has been resumed since. `members`: members.json."""
        if self.end is None:
            return None
        told: MembersDocument = members or {}
        at = self.end.time or 0.0
        stepped = self._validation_s if self._validation_s is not None else self.last_step.time if self.last_step else None
        under_way = told.get("phase") in ACTIVE_PHASES and told.get("time", 0.0) > at
        return None if under_way or (stepped or 0.0) > at else self.end

    def is_leaving(self, node: str) -> bool:
        """Whether the workers of a node were asked to leave."""
        return short_node_id(node) in map(short_node_id, self.drained_nodes)

    @property
    def faults(self) -> str | None:
        """The faults that the run has survived, as one line; None if there were none.

        `2 workers (1 whole node) and the driver lost, 1 node drained, 3 workers joined; 11.0 s of pauses in all, 0 steps
        executed again`.
        """
        totals = self.totals
        lost, drivers, nodes = totals.lost_workers, totals.driver_failovers, len(self.drained_nodes)
        parts = []
        if self.broken_off:
            times = f" {self.broken_off} times" * (self.broken_off > 1)
            parts.append(f"the whole run lost and resumed{times} (the time in which nothing ran is not counted)")
        whole = f" ({count_noun(self.lost_nodes, 'whole node')})" * (self.lost_nodes > 0)
        if lost or drivers == 1:
            named = [count_noun(lost, "worker") + whole] * (lost > 0) + ["the driver"] * (drivers == 1)
            parts.append(" and ".join(named) + " lost")
        if drivers > 1:
            parts.append(f"the driver lost {drivers} times")
        if nodes:
            parts.append(f"{count_noun(nodes, 'node')} drained")
        if totals.joined_workers:
            parts.append(f"{count_noun(totals.joined_workers, 'worker')} joined")
        if not parts and not self.timed_changes and not totals.replayed_steps:
            return None
        pauses = f"{totals.recovery_pause_s:.1f} s of pauses in all, {count_noun(totals.replayed_steps, 'step')} executed again"
        return f"{', '.join(parts)}; {pauses}" if parts else pauses


def speed_of(steps: Sequence[StepRecord]) -> RecentSpeed:
    """The speed of these steps."""
    if not steps:
        return RecentSpeed()
    seconds = sum(step.seconds for step in steps)
    speed = sum(step.samples for step in steps) / seconds if seconds else None
    waits = [
        (step.data_wait, step.seconds) for step in steps if step.data_wait is not None and is_finite_number(step.data_wait)
    ]
    waited = sum(share * each for share, each in waits) / seconds if seconds else 0.0
    return RecentSpeed(speed, seconds / len(steps), statistics.median(step.seconds for step in steps), len(steps), waited)


def peak_sizes(step: StepRecord | None) -> list[float]:
    """Peak resident memory by rank, in bytes; empty if that of any rank is unknown."""
    found = (step.peak_rss_bytes if step is not None else None) or ()
    sizes = [float(size) for size in found if is_finite_number(size) and size > 0]
    return sizes if len(sizes) == len(found) else []


def timeline(metrics: Iterable[Event], events: Iterable[Event]) -> Iterator[Event]:
    """The events of both files in the order of time; those of each file keep their order."""

    def timed(lines: Iterable[Event]) -> Iterator[tuple[float, Event]]:
        last = 0.0
        for event in lines:
            last = max(last, event.time or 0.0)
            yield last, event

    return (event for _, event in merge(timed(metrics), timed(events), key=lambda one: one[0]))
