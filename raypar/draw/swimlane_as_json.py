"""The swimlane of steps as JSON: a run writes it into `trace.json`, a report checks it and draws it again.

It lies in `otherData` of that file, in the run's folder, which is not trusted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from raypar.draw.swimlane_svg import swimlanes_svg
from raypar.errors import ScheduleError
from raypar.files.json_type import Json
from raypar.schedule.data_flow import MessageRoute
from raypar.schedule.step_timeline import Timeline

MOST_SPANS = 200_000
"""Of steps with more instructions there are no data."""
MOST_WORKERS, MOST_PANELS, MOST_ROUTES, MOST_COUNT = 4096, 4, 100_000, 2**31
"""Data with more are not drawn."""
MOST_COMPARED = 5_000_000
"""Arrows take the time of so many comparisons at most; else there are none."""
LABEL_CHARACTERS = 24
"""Longer labels are of no instruction."""
MOST_MS = 1e9
"""Times of a step are at most so long: eleven days."""


def swimlane_data(
    panels: Sequence[tuple[str, Timeline]], *, title: str, routes: Sequence[MessageRoute]
) -> dict[str, Json] | None:
    """What `swimlanes_svg` is given, as JSON data, without messages and frees; None if it is too much."""
    if sum(len(row) for _, timeline in panels for row in timeline.spans) > MOST_SPANS:
        return None
    return {
        "title": title,
        "panels": [
            {
                "heading": heading,
                "names": list(timeline.names),
                "rows": [[[str(i), a, b] for i, a, b in row if i.drawing is not None] for row in timeline.spans],
                "busy_ms": list(timeline.busy_ms),
                "peak_activations": list(timeline.peak_activations),
                "makespan_ms": timeline.makespan_ms,
            }
            for heading, timeline in panels
        ],
        "routes": [list(route) for route in routes],
    }


def draw_step_of_trace(trace: Mapping[str, Json], clean: Callable[[str], str]) -> str | None:
    """The drawing of a step from the content of a trace.json; None if there are no data. `clean`: see `draw_swimlane_data`.

    In older traces are only the measured step, and neither messages nor a title; the heading says where the prediction is.
    """
    other = trace.get("otherData")
    if isinstance(other, dict) and "swimlane" in other:
        return draw_swimlane_data(other["swimlane"], clean)
    try:
        events = _list(trace["traceEvents"], 4 * MOST_SPANS)
        names = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
        spans = [(_count(one["args"]["rank"], MOST_WORKERS), one) for one in events if one["ph"] == "X"]
        rows: list[list[Json]] = [[] for _ in range(1 + max(rank for rank, _ in spans))]
        for rank, span in spans:
            start = span["ts"] / 1000
            rows[rank].append([span["name"], start, start + span["dur"] / 1000])
        workers = [names[2 * rank] for rank in range(len(rows))]
        panel = {"heading": "measured (the prediction: see swimlane.svg)", "names": workers, "rows": rows}
    except (ArithmeticError, LookupError, TypeError, ValueError):
        return None
    return draw_swimlane_data({"title": "", "panels": [panel], "routes": []}, clean)


def draw_swimlane_data(found: Json, clean: Callable[[str], str]) -> str | None:
    """The drawing of data made by `swimlane_data`; None if they are not such data.

    `clean` is applied to every text.
    """
    if not isinstance(found, dict):
        return None
    try:
        panels = [(clean(_text(one["heading"])), _timeline(one, clean)) for one in _list(found["panels"], MOST_PANELS)]
        given = _list(found["routes"], MOST_ROUTES)
        routes = [(_text(what), _count(a, MOST_COUNT), _count(b, MOST_COUNT)) for what, a, b in given]
        spans = sum(len(row) for _, timeline in panels for row in timeline.spans)
        if not panels or spans > MOST_SPANS:
            return None
        if spans * len(routes) > MOST_COMPARED:
            routes = []
        return swimlanes_svg(panels, title=clean(_text(found["title"])), routes=routes)
    except (ScheduleError, ArithmeticError, LookupError, TypeError, ValueError):
        return None


def _timeline(found: Mapping[str, Json], clean: Callable[[str], str]) -> Timeline:
    """The timeline of one panel. Raises `ValueError`, `LookupError`, `TypeError` or `ScheduleError` for other data."""
    rows = [
        [(_label(label), _ms(a), _ms(b)) for label, a, b in _list(row, MOST_SPANS)]
        for row in _list(found["rows"], MOST_WORKERS)
    ]
    names = [clean(_text(name)) for name in _list(found["names"], len(rows))]
    if not rows or len(rows) != len(names) or any(a > b for row in rows for _, a, b in row):
        raise ValueError("its workers differ in number, or time runs back")
    made = Timeline.from_spans(rows, names)
    if "busy_ms" not in found:
        return made
    busy, peaks = (tuple(_ms(one) for one in _list(found[key], len(rows))) for key in ("busy_ms", "peak_activations"))
    if not len(rows) == len(busy) == len(peaks):
        raise ValueError("its workers differ in number")
    return replace(made, busy_ms=busy, peak_activations=peaks, makespan_ms=max(made.makespan_ms, _ms(found["makespan_ms"])))


def _list(value: Json, most: int) -> list[Any]:
    if not isinstance(value, list) or len(value) > most:
        raise ValueError("no list, or a long one")
    return value


def _text(value: Json) -> str:
    if not isinstance(value, str) or len(value) > 2000:
        raise ValueError("no text, or a long one")
    return value


def _label(value: Json) -> str:
    if not isinstance(value, str) or len(value) > LABEL_CHARACTERS:
        raise ValueError("no label of an instruction")
    return value


def _count(value: Json, most: int) -> int:
    if type(value) is not int or not 0 <= value < most:
        raise ValueError("no count")
    return value


def _ms(value: Json) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or not 0 <= value <= MOST_MS:
        raise ValueError("no time")
    return float(value)
