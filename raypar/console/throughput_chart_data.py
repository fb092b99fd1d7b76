"""Builds the history of a run for its throughput chart: times of steps, losses, number of workers, faults. Pure."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

from raypar.console.event_lines import short_node_id
from raypar.console.event_printer import format_duration
from raypar.schedule.throughput_chart import MARK_KINDS, ChartMark, RunHistory

Line = Mapping[str, Any]
"""A line of metrics.jsonl or events.jsonl, or another record of a run's files."""

MANY = 10
"""More marks than this get short labels."""
SAME = 0.004
"""Marks of one kind that lie closer than this share of the time are one mark: a node takes several workers with it."""
WHOLE = {"driver": ("driver", "driver lost"), "started": ("resumed", "run resumed")}
"""Kind of event that concerns the whole run -> its short and its long label."""


def build_run_history(metrics: Sequence[Line], events: Sequence[Line]) -> RunHistory:
    """The history from the lines of metrics.jsonl and events.jsonl. Time 0 is the start of the first step.

    Times in which the run did not run are left out (`idle_times_between_starts`).
    """
    done = [line for line in metrics if "samples_per_s" in line and "time" in line]
    if not done:
        return RunHistory((), (), (), (), 0.0)
    idle = idle_times_between_starts(done, events)
    clock = make_clock_without_idle_times(idle)
    done = [{**line, "at": clock(line["time"])} for line in done]
    origin = done[0]["at"] - done[0]["seconds"]
    before = {end: end - start for start, end in idle}
    told = [
        {**event, "at": clock(event["time"]) - origin, "idle_s": before.get(event["time"], 0.0)}
        for event in events
        if "time" in event
    ]
    done = [{**line, "at": line["at"] - origin} for line in done]
    shown = [event for event in told if event["at"] >= 0]
    last = max(done[-1]["at"], *(event["at"] for event in shown if event["kind"] in MARK_KINDS), 0.0)
    pauses = [(max(0.0, e["at"] - e["pause_s"]), e["at"]) for e in shown if e.get("pause_s")]
    validated = [
        {**line, "at": min(last, clock(line["time"]) - origin)}  # the one at the end comes after the last step
        for line in metrics
        if "validation_loss" in line and "time" in line
    ]
    return RunHistory(
        tuple(step_intervals(done)),
        worker_count_history(done[0], told),
        make_history_marks(shown, last),
        tuple(pauses),
        last,
        finite_values_over_time(done, "loss"),
        finite_values_over_time([line for line in validated if line["at"] >= 0], "validation_loss"),
        tuple(end - start for start, end in idle if clock(end) > origin),
    )


def finite_values_over_time(lines: Sequence[Line], key: str) -> tuple[tuple[float, float], ...]:
    """(time, value) of the lines whose value is a finite number."""
    return tuple((line["at"], float(line[key])) for line in lines if is_finite_number(line.get(key)))


def is_finite_number(value: Any) -> bool:
    """Whether a value can be drawn: JSON has null for NaN and infinities, and Python reads `NaN` too."""
    return type(value) in (int, float) and math.isfinite(value)


def goodput_of_history(history: RunHistory) -> float | None:
    """The share of the time since the first step that went into steps that count; None before the first step.

    Steps that are executed again come once; pauses, replays and waits are what is missing.
    """
    if not history.end_s or not history.steps:
        return None
    return min(1.0, sum(end - start for start, end, _ in history.steps) / history.end_s)


def idle_times_between_starts(done: Sequence[Line], events: Sequence[Line]) -> list[tuple[float, float]]:
    """(beginning, end) of each time in which the run did not run, in order: from the last sign of life to the next start.

    The last sign of life is in the event `resumed`, because steps after the checkpoint have no lines any more. Without such an
    event, or where it is earlier, it is the last line that was written before.
    """
    timed = sorted((event for event in events if "time" in event), key=lambda event: event["time"])
    starts = [event["time"] for event in timed if event["kind"] == "started"]
    resumptions = [event for event in timed if event["kind"] == "resumed"]
    resumed_at = [event["time"] for event in resumptions]
    written = sorted(line["time"] for line in (*done, *timed) if "time" in line)
    idle = []
    for before, start in pairwise(starts):
        number = bisect_left(resumed_at, before)
        resumed = resumptions[number] if number < len(resumptions) and resumed_at[number] <= start else None
        until = bisect_left(written, resumed["time"] if resumed is not None else start)
        last = written[until - 1] if until else start
        if resumed is not None and is_finite_number(resumed.get("former_end_s")):
            last = max(last, resumed["former_end_s"])
        idle.append((min(last, start), start))
    return idle


def make_clock_without_idle_times(idle: Sequence[tuple[float, float]]) -> Callable[[float], float]:
    """A function from Unix time to time that stands still in the idle times, which are in order and do not overlap."""
    begun = [start for start, _ in idle]
    total = [0.0, *accumulate(end - start for start, end in idle)]

    def clock(at: float) -> float:
        number = bisect_left(begun, at)
        return at - total[number] + (max(0.0, idle[number - 1][1] - at) if number else 0.0)

    return clock


def step_intervals(done: Sequence[Line]) -> Iterator[tuple[float, float, float]]:
    """(start, end, samples) of every step. A step after a pause begins when the pause ends."""
    free = 0.0
    for line in done:
        start = max(free, line["at"] - line["seconds"])
        yield min(start, line["at"]), line["at"], line["samples_per_s"] * line["seconds"]
        free = max(free, line["at"])


def worker_count_history(first: Line, told: Sequence[Line]) -> tuple[tuple[float, int], ...]:
    """(time, number of workers from then on): the workers that a start or generation names, without those lost since."""
    seated = set(range(len(first.get("peak_rss_bytes", ()))))
    found = [(0.0, len(seated))]
    for event in told:
        if event["kind"] == "lost":
            seated.discard(event["worker"])
        elif event["kind"] == "generation" and "workers" in event:
            seated = set(event["workers"])
        elif event["kind"] == "started" and "workers" in event:
            seated = {one["worker"] for one in event["workers"]}
        if event["at"] < 0:
            found = [(0.0, len(seated))]
        elif len(seated) != found[-1][1]:
            found.append((event["at"], len(seated)))
    return tuple(found)


def make_history_marks(told: Sequence[Line], extent: float) -> tuple[ChartMark, ...]:
    """A mark for each loss, join, drain, driver loss and resumption; events of one kind at one moment share a mark."""
    groups: list[tuple[float, str, list[Line]]] = []
    for event in told:
        if event["kind"] not in MARK_KINDS:
            continue
        near = next((g for g in groups if g[1] == event["kind"] and event["at"] - g[0] < SAME * extent), None)
        if near is not None:
            near[2].append(event)
        else:
            groups.append((event["at"], event["kind"], [event]))
    crowded = len(groups) > MANY
    return tuple(
        ChartMark(at, kind, history_mark_label(kind, among), history_mark_label(kind, among, brief=True) if crowded else "")
        for at, kind, among in groups
    )


def history_mark_label(kind: str, events: Sequence[Line], *, brief: bool = False) -> str:
    """The label of a mark: `workers 2, 3 lost`; briefly `2, 3`."""
    if kind in WHOLE:
        idle_s = sum(event.get("idle_s", 0.0) for event in events)
        later = f", {format_duration(idle_s)} later" if kind == "started" and idle_s >= 1 and not brief else ""
        return WHOLE[kind][0 if brief else 1] + later
    if kind == "draining":
        nodes = list(
            dict.fromkeys(short_node_id(e["node"])[:4] if brief else short_node_id(e["node"]) for e in events if e.get("node"))
        )
        return ", ".join(nodes) if brief else f"node{'s' * (len(nodes) > 1)} {', '.join(nodes)} will leave"
    numbers = ", ".join(str(event["worker"]) for event in events)
    return numbers if brief else f"worker{'s' * (len(events) > 1)} {numbers} {kind}"
