"""The lines of a run folder as a history that can be drawn: when which step ran, who trained, what befell the run. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from raypar.commands._story import short
from raypar.schedule.throughput import KINDS, History, Mark

Line = Mapping[str, Any]

MANY = 10
"""With more marks than this their labels are short."""
SAME = 0.004
"""Marks of one kind that lie closer than this share of the time are one mark: a node takes several workers with it."""


def history(metrics: Sequence[Line], events: Sequence[Line]) -> History:
    """From metrics.jsonl and events.jsonl, since the last start of the run. Time 0 is the start of the first step there."""
    since = max((e["time"] for e in events if e["kind"] == "started" and "time" in e), default=float("-inf"))
    done = [line for line in metrics if "samples_per_s" in line and line.get("time", since) > since]
    if not done:
        return History((), (), (), (), 0.0)
    origin = done[0]["time"] - done[0]["seconds"]
    last = max(done[-1]["time"], *(e["time"] for e in events if e["kind"] in KINDS and "time" in e), origin) - origin
    told = [{**event, "at": event["time"] - origin} for event in events if event.get("time", since) >= max(since, origin)]
    early = [event for event in events if since <= event.get("time", since) < origin]
    pauses = [(max(0.0, e["at"] - e["pause_s"]), e["at"]) for e in told if e.get("pause_s")]
    return History(tuple(steps(done, origin)), crew(done[0], early, told), marks(told, last), tuple(pauses), last)


def steps(done: Sequence[Line], origin: float) -> Iterator[tuple[float, float, float]]:
    """(start, end, samples). A step has its own seconds, also the first one after a pause, which lies at the pause's end."""
    free = 0.0
    for line in done:
        end = line["time"] - origin
        start = max(free, end - line["seconds"])
        yield min(start, end), end, line["samples_per_s"] * line["seconds"]
        free = max(free, end)


def crew(first: Line, early: Sequence[Line], told: Sequence[Line]) -> tuple[tuple[float, int], ...]:
    """(since when, workers that train): one less with every loss, and as many as each generation says."""
    count = len(first.get("peak_rss_bytes", ()))
    found = [(0.0, count)]
    for event in (*early, *told):
        if event["kind"] == "lost":
            count = max(0, count - 1)
        elif event["kind"] == "generation" and "workers" in event:
            count = len(event["workers"])
        if "at" not in event:
            found = [(0.0, count)]
        elif count != found[-1][1]:
            found.append((event["at"], count))
    return tuple(found)


def marks(told: Sequence[Line], extent: float) -> tuple[Mark, ...]:
    """One for each loss, join, drain and death of a driver; those of a kind at one moment together."""
    groups: list[tuple[float, str, list[Line]]] = []
    for event in told:
        if event["kind"] not in KINDS:
            continue
        near = next((g for g in groups if g[1] == event["kind"] and event["at"] - g[0] < SAME * extent), None)
        if near is not None:
            near[2].append(event)
        else:
            groups.append((event["at"], event["kind"], [event]))
    return tuple(Mark(at, kind, label(kind, among, len(groups) > MANY)) for at, kind, among in groups)


def label(kind: str, events: Sequence[Line], brief: bool) -> str:
    """`workers 2, 3 lost`; briefly `2, 3`."""
    if kind == "driver":
        return "driver" if brief else "driver lost"
    if kind == "draining":
        nodes = list(dict.fromkeys(short(e["node"])[:4] if brief else short(e["node"]) for e in events if e.get("node")))
        return ", ".join(nodes) if brief else f"node{'s' * (len(nodes) > 1)} {', '.join(nodes)} will leave"
    numbers = ", ".join(str(event["worker"]) for event in events)
    return numbers if brief else f"worker{'s' * (len(events) > 1)} {numbers} {kind}"
