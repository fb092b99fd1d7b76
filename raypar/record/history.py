"""The history of a run over time, for its charts: steps, losses, number of workers, faults. Pure.

Its clock excludes the time in which the run was not running: from the last line before a later start to that start.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import TypeVar

from raypar.draw.run_history_chart import MARK_KINDS, ChartMark, RunHistory
from raypar.plan.wording import word_form
from raypar.record.events import (
    Event,
    GenerationStart,
    Resumption,
    RunStart,
    StepRecord,
    ValidationRecord,
    WorkerDrain,
    WorkerJoin,
    WorkerLoss,
)
from raypar.record.field_types import is_finite_number
from raypar.record.series import MOST_POINTS, IntervalSeries, PointSeries
from raypar.record.value_text import format_duration, short_node_id

SHORT_LABELS_ABOVE = 10
"""With more marks than this, labels are short."""
MOST_MARKS = 4096
"""Number of marks, of pauses and of changes of the worker count that are kept, at most; older ones are dropped."""
SAME_MARK_SHARE = 0.004
"""Marks of one kind are merged if they are closer than this share of the whole time, such as the workers of a lost node."""
WHOLE_RUN_LABELS = {"driver": ("driver", "driver lost"), "started": ("resumed", "run resumed")}
"""Kind of event that concerns the whole run -> its short and its long label."""


_T = TypeVar("_T")


@dataclass(frozen=True)
class _Mark:
    """An event that is drawn."""

    at: float
    event: Event
    idle_s: float = 0.0


class HistoryFold:
    """Collects the history from a run's events, given in order of time. Its times are seconds of the history's clock."""

    def __init__(self, most_points: int | None = MOST_POINTS) -> None:
        self.steps = IntervalSeries(most_points)
        """(start, end, samples) of every step. A step after a pause begins when the pause ends."""
        self.losses = PointSeries()
        """(step, loss, time) of every step with a finite loss."""
        self.validations = PointSeries()
        """(step, loss, time) of every finite validation loss; the time is NaN if it is not known."""
        self.step_s = 0.0
        """Time in steps."""
        self._begun = False
        """Whether there was a step."""
        self._origin = 0.0
        """Unix time of the start of the first step, less the time in which the run was not running; 0 before that step."""
        self._end = 0.0
        """End of the last step."""
        self._marks: list[_Mark] = []
        self._pauses: list[tuple[float, float]] = []
        self._workers: list[tuple[float, int]] = []
        self._seated: set[int] | None = None
        """Workers that the last start or generation names, without those lost since; None before one names them."""
        self._lost_before: set[int] = set()
        """Workers that were lost before any were named."""
        self._first_workers = 0
        """Number of workers that the first step names."""
        self._idle_s = 0.0
        """Total time in which the run was not running."""
        self._idle: list[tuple[float, float]] = []
        """(time of the clock, length) of each such interval."""
        self._started = False
        self._written_s: float | None = None
        """Unix time of the last step or event."""
        self._alive_s: float | None = None
        """Unix time at which the run last wrote something before a resumption; None once the resumed run has started."""

    def apply(self, event: Event) -> None:
        """Add the next event. One without a time only adds its loss."""
        if isinstance(event, StepRecord) and not self._begun and event.time is not None:
            self._begin(event, event.time)
        at = math.nan if event.time is None else self._clock(event.time)
        validation = event.validation_loss if isinstance(event, (StepRecord, ValidationRecord)) else None
        if isinstance(event, (StepRecord, ValidationRecord)) and validation is not None and is_finite_number(validation):
            self.validations.add((float(event.step), float(validation), at))
        if isinstance(event, StepRecord) and is_finite_number(event.loss):
            self.losses.add((float(event.step), float(event.loss), at))
        if event.time is None or isinstance(event, ValidationRecord):
            return
        if isinstance(event, StepRecord):
            start = min(max(self._end, at - event.seconds), at)
            self._end = max(self._end, at)
            self.steps.add(start, at, event.samples)
            self.step_s += at - start
        else:
            self._add_event(event, event.time)
        self._written_s = event.time if self._written_s is None else max(self._written_s, event.time)

    def _clock(self, time_s: float) -> float:
        """Unix time -> time of the history's clock: seconds since the start of the first step."""
        return time_s - self._idle_s - self._origin

    def _begin(self, step: StepRecord, time_s: float) -> None:
        """Set time 0 to the start of the first step; earlier entries get negative times."""
        self._begun, self._origin = True, self._clock(time_s) - step.seconds
        self._marks = [replace(mark, at=mark.at - self._origin) for mark in self._marks]
        self._workers = [(at - self._origin, count) for at, count in self._workers]
        self._pauses = [(start - self._origin, end - self._origin) for start, end in self._pauses]
        self._idle = [(end - self._origin, length) for end, length in self._idle]
        self._first_workers = len(step.peak_rss_bytes or ())
        if self._seated is None:
            self._seated = set(range(self._first_workers)) - self._lost_before

    def _add_event(self, event: Event, time_s: float) -> None:
        idle_s = 0.0
        match event:
            case Resumption() if self._alive_s is None:
                self._alive_s = time_s if self._written_s is None else self._written_s
                if event.former_end_s is not None:
                    self._alive_s = max(self._alive_s, event.former_end_s)
            case RunStart():
                idle_s = self._exclude_idle_time(time_s)
            case _:
                pass
        at = self._clock(time_s)
        self._count_workers(event, at)
        if event.kind in MARK_KINDS:
            _keep(self._marks, _Mark(at, event, idle_s))
        if isinstance(event, GenerationStart) and event.pause_s:
            _keep(self._pauses, (at - event.pause_s, at))

    def _exclude_idle_time(self, start: float) -> float:
        """Exclude the time without a run before a start from the clock; returns its length in seconds."""
        last = self._alive_s if self._alive_s is not None else self._written_s
        again, self._started, self._alive_s = self._started, True, None
        if not again:
            return 0.0
        idle_s = start - min(start if last is None else last, start)
        self._idle_s += idle_s
        stop = self._clock(start)
        self._idle.append((stop, idle_s))
        # Entries from within the excluded time move to the time at which the clock was stopped.
        for number in _later(self._marks, stop, lambda mark: mark.at):
            self._marks[number] = replace(self._marks[number], at=stop)
        for number in _later(self._workers, stop, lambda change: change[0]):
            self._workers[number] = (stop, self._workers[number][1])
        points = self.validations.points
        for number in _later(points, stop, lambda point: point[2]):
            points[number] = (*points[number][:2], stop)
        del self._idle[:-MOST_MARKS]
        return idle_s

    def _count_workers(self, event: Event, at: float) -> None:
        seated = self._seated
        match event:
            case WorkerLoss() if seated is None:
                self._lost_before.add(event.worker)
                return
            case WorkerLoss() if seated is not None:
                seated.discard(event.worker)
            case GenerationStart():
                seated = set(event.workers)
            case RunStart() if event.workers is not None:
                seated = {one["worker"] for one in event.workers}
            case _:
                return
        self._seated = seated
        _keep(self._workers, (at, len(seated or ())))

    # -- for charts and reports ----------------------------------------------------------------------------------------------

    @property
    def end_s(self) -> float:
        """Time from the start of the first step to the last step or mark; 0 before the first step."""
        return max([self._end, *(mark.at for mark in self._marks), 0.0]) if self._begun else 0.0

    @property
    def goodput(self) -> float | None:
        """The share of the time since the first step that was spent in committed steps; None before the first step.

        A step that was executed again counts once; pauses, replays and waits do not count.
        """
        return min(1.0, self.step_s / self.end_s) if self.end_s else None

    def history(self, *, with_losses: bool = True) -> RunHistory:
        """The history in the form of the chart. Time 0 is the start of the first step; earlier entries are left out."""
        if not self._begun:
            return RunHistory((), (), (), (), 0.0)
        end_s = self.end_s
        validated = [(min(end_s, at), loss) for _, loss, at in self.validations.points]  # the last one may be later
        return RunHistory(
            tuple(self.steps.intervals),
            self._worker_counts(),
            make_history_marks([(one.at, one.event, one.idle_s) for one in self._marks if one.at >= 0], end_s),
            tuple((max(0.0, start), end) for start, end in self._pauses if end >= 0),
            end_s,
            tuple((at, loss) for _, loss, at in self.losses.points if not math.isnan(at)) if with_losses else (),
            tuple((at, loss) for at, loss in validated if at >= 0) if with_losses else (),
            tuple(length for end, length in self._idle if end > 0),
        )

    def _worker_counts(self) -> tuple[tuple[float, int], ...]:
        """(time, number of workers from then on)."""
        found = [(0.0, self._first_workers)]
        for at, count in self._workers:
            if at < 0:
                found = [(0.0, count)]
            elif count != found[-1][1]:
                found.append((at, count))
        return tuple(found)


def _later(entries: Sequence[_T], at: float, time_of: Callable[[_T], float]) -> Iterator[int]:
    """Indices, from the last one back, of the entries later than `at`. `entries`: in order of time."""
    return takewhile(lambda number: time_of(entries[number]) > at, range(len(entries) - 1, -1, -1))


def _keep(kept: list[_T], one: _T) -> None:
    """Append an entry; if there are more than `MOST_MARKS`, drop the older half."""
    kept.append(one)
    if len(kept) > MOST_MARKS:
        del kept[: MOST_MARKS // 2]


def make_history_marks(told: Sequence[tuple[float, Event, float]], extent: float) -> tuple[ChartMark, ...]:
    """A mark for each event, given as (time, event, time without a run before it); events of one kind at one moment share one.

    `extent`: the time of the whole history.
    """
    groups: list[tuple[float, str, list[Event], float]] = []
    last: dict[str, int] = {}
    for at, event, idle_s in told:
        number = last.get(event.kind)
        if number is not None and at - groups[number][0] < SAME_MARK_SHARE * extent:
            start, kind, among, idle = groups[number]
            groups[number] = (start, kind, [*among, event], idle + idle_s)
        else:
            last[event.kind] = len(groups)
            groups.append((at, event.kind, [event], idle_s))
    crowded = len(groups) > SHORT_LABELS_ABOVE
    return tuple(
        ChartMark(at, kind, mark_label(kind, among, idle), mark_label(kind, among, idle, brief=True) if crowded else "")
        for at, kind, among, idle in groups
    )


def mark_label(kind: str, events: Sequence[Event], idle_s: float, *, brief: bool = False) -> str:
    """The label of a mark: `workers 2, 3 lost`; briefly `2, 3`. `idle_s`: the time without a run before it."""
    if kind in WHOLE_RUN_LABELS:
        later = f", {format_duration(idle_s)} later" if kind == "started" and idle_s >= 1 and not brief else ""
        return WHOLE_RUN_LABELS[kind][0 if brief else 1] + later
    if kind == "draining":
        named = [short_node_id(one.node) for one in events if isinstance(one, WorkerDrain) and one.node]
        nodes = list(dict.fromkeys(node[:4] if brief else node for node in named))
        return ", ".join(nodes) if brief else f"{word_form(nodes, 'node', 'nodes')} {', '.join(nodes)} will leave"
    numbers = ", ".join(str(one.worker) for one in events if isinstance(one, (WorkerLoss, WorkerJoin)))
    return numbers if brief else f"{word_form(events, 'worker', 'workers')} {numbers} {kind}"
