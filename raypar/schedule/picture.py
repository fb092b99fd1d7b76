"""Schedules and timelines as text, one row per worker."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from itertools import pairwise
from math import gcd, isclose

from raypar.schedule.instructions import Instruction
from raypar.schedule.timeline import COMPUTE, Span, Timeline

_FINEST = 4
"""A unit below a quarter of the shortest instruction would only make the grid wide: then its scale is not exact."""


def order_grid(schedule: Sequence[Sequence[Instruction]]) -> str:
    """The compute instructions of each worker in order, without time: `F0 F1 B0 B1`, or `0F0 4F0` where workers have chunks."""
    short = _one_stage_each(schedule)
    return "\n".join(" ".join(_label(i, short) for i in order if isinstance(i, COMPUTE)) for order in schedule)


def text_grid(timeline: Timeline, width: int | None = None) -> str:
    """A timeline to scale: one row per worker, `.` for idle time, `-` while an instruction lasts, then the bubble.

    Without `width` the scale is the smallest at which every label fits, and exact where the times have a common unit of at
    least a quarter of the shortest instruction. With `width` the grid is squeezed into at most that many characters, and all
    labels are cut to their letter if one does not fit.
    """
    rows = [[span for span in row if isinstance(span.instruction, COMPUTE)] for row in timeline.spans]
    short = _one_stage_each([[span.instruction for span in row] for row in rows])
    heads = _heads(rows)
    margin = max(map(len, heads)) + 2
    unit_ms, columns = _scale(rows, short)
    if width is not None:
        room = max(1, width - margin - len(_BUBBLE))
        fitting = int(room * unit_ms / timeline.makespan_ms) if timeline.makespan_ms else columns
        if fitting < 1:
            unit_ms, columns = timeline.makespan_ms / room, 1
        columns = min(columns, max(fitting, 1))
    per_ms = columns / unit_ms
    total = round(timeline.makespan_ms * per_ms)
    whole = all(
        round(s.end_ms * per_ms) - round(s.start_ms * per_ms) > len(_label(s.instruction, short)) for row in rows for s in row
    )
    lines = [" " * (margin + total) + _BUBBLE]
    for head, row, bubble in zip(heads, rows, timeline.bubbles, strict=True):
        lines.append(f"{head:<{margin}}{_row(row, short, whole, per_ms, total, columns)}{bubble:{len(_BUBBLE)}.0%}")
    lines.append(" " * margin + _axis(timeline.makespan_ms, per_ms, total))
    return "\n".join(line.rstrip() for line in lines)


_BUBBLE = "  bubble"


def _one_stage_each(schedule: Sequence[Sequence[Instruction]]) -> bool:
    return all(len({i.stage for i in order if isinstance(i, COMPUTE)}) <= 1 for order in schedule)


def _label(instruction: Instruction, short: bool) -> str:
    text = str(instruction)
    return text.lstrip("0123456789") if short else text


def _heads(rows: Sequence[Sequence[Span]]) -> list[str]:
    """`worker 3`, with its stages where they are not simply number 3."""
    hosted = [sorted({s.instruction.stage for s in row if isinstance(s.instruction, COMPUTE)}) for row in rows]
    if all(stages == [rank] for rank, stages in enumerate(hosted)):
        return [f"worker {rank}" for rank in range(len(rows))]
    return [f"worker {rank} stage {','.join(map(str, stages)) or '-'}" for rank, stages in enumerate(hosted)]


def _scale(rows: Sequence[Sequence[Span]], short: bool) -> tuple[float, int]:
    """(unit in ms, columns per unit): the largest unit of which all times are multiples, and the fewest columns that hold
    every label and the blank after it."""
    spans = [span for row in rows for span in row if span.end_ms > span.start_ms]
    if not spans:
        return 1.0, 1
    shortest = min(span.end_ms - span.start_ms for span in spans)
    times = {time for span in spans for time in (span.start_ms, span.end_ms)}
    unit = _common_unit(times, shortest)
    columns = 1
    for span in spans:
        units = max(1, round((span.end_ms - span.start_ms) / unit))
        columns = max(columns, -(-(len(_label(span.instruction, short)) + 1) // units))
    return unit, columns


def _common_unit(times: set[float], shortest: float) -> float:
    """The largest shortest/k (k <= 4) of which all times are multiples; `shortest` itself when there is none."""
    for parts in range(1, _FINEST + 1):
        ticks = [float(time) / shortest * parts for time in times]
        if all(isclose(tick, round(tick), rel_tol=1e-9, abs_tol=1e-6) for tick in ticks):
            return shortest / parts * (reduce(gcd, map(round, ticks)) or 1)
    return shortest


def _row(row: Sequence[Span], short: bool, whole: bool, per_ms: float, total: int, columns: int) -> str:
    """Cells of one worker; idle units are a dot each, so that they can be counted. `whole`: labels with their numbers."""
    cells = [" "] * total
    cells[::columns] = "." * len(cells[::columns])
    for span in row:
        first, last = round(span.start_ms * per_ms), round(span.end_ms * per_ms)
        size = last - first
        label = _label(span.instruction, short) if whole else _label(span.instruction, short=True)[:1]
        text = (label + "-" * size)[: max(size - 1, 1)] + " "
        cells[first:last] = text[:size]
    return "".join(cells)


def _axis(makespan_ms: float, per_ms: float, total: int) -> str:
    """Round numbers under their columns, about one every twelve columns, the last one with its unit."""
    step = nice_step(makespan_ms, max(2, total // 12))
    line = ""
    count = int(makespan_ms / step + 1e-9)
    for tick in range(count + 1):
        text = f"{tick * step:g}" + (" ms" if tick == count else "")
        line = line.ljust(round(tick * step * per_ms)) + text
    return line


def milliseconds(time_ms: float) -> str:
    """`33 ms`, `101.25 ms`, `0.123 ms`: at most two decimals, three below 1 ms."""
    text = f"{time_ms:,.{2 if time_ms >= 1 else 3}f}"
    return (text.rstrip("0").rstrip(".") or "0") + " ms"


def nice_step(extent: float, ticks: int) -> float:
    """The smallest of 1, 2, 5 x 10^k that cuts `extent` into at most `ticks` parts; 1 when there is no extent."""
    if extent <= 0:
        return 1.0
    power = 10.0 ** len(str(int(extent)))
    steps = [power * 10.0**-k * factor for k in range(12, -1, -1) for factor in (1, 2, 5)]
    found = next((b for a, b in pairwise([0.0, *steps]) if extent / b <= ticks), power)
    return float(f"{found:.6g}")
