"""Schedules and timelines as text, one row per worker."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from itertools import pairwise
from math import gcd, isclose

from raypar.schedule.instructions import Compute, Instruction, compute_instructions
from raypar.schedule.step_timeline import Timeline

MOST_ROWS = 32
"""The most workers whose grid is printed."""
_FINEST = 4
"""Most units per shortest instruction: a finer grid would be too wide, so its scale is then not exact."""


def order_grid(schedule: Sequence[Sequence[Instruction]]) -> str:
    """The compute instructions of each worker in order, without time: `F0 F1 B0 B1`, or `0F0 4F0` where workers have chunks."""
    orders = [compute_instructions(order) for order in schedule]
    chunked = any(len({i.stage for i in order}) > 1 for order in orders)
    return "\n".join(" ".join(str(i) if chunked else _without_stage(i) for i in order) for order in orders)


def text_grid(timeline: Timeline, width: int | None = None) -> str:
    """A timeline to scale: one row per worker, `.` for idle time, `-` while an instruction lasts, then the bubble.

    Instructions of a worker's second chunk, or role, are in lower case (of more than two: with their stage). Without `width`
    the scale is the smallest at which every label fits, and exact where the times have a common unit of at least a quarter of
    the shortest instruction. With `width` the grid is squeezed into at most that many characters, and all labels are cut to
    their letter if one does not fit.
    """
    rows = [[(i, start, end) for i, start, end in row if isinstance(i, Compute)] for row in timeline.spans]
    chunk_of = timeline.chunk_of
    chunks = max(chunk_of.values(), default=0) + 1

    def label(instruction: Compute) -> str:
        if chunks > 2:
            return str(instruction)
        text = _without_stage(instruction)
        return text.lower() if chunk_of[instruction.stage] else text

    def letter(instruction: Compute) -> str:
        text = _without_stage(instruction)[0]
        return text.lower() if chunk_of[instruction.stage] % 2 else text

    heads = _heads(rows, timeline.names)
    margin = max(map(len, heads)) + 2
    unit_ms, columns = _scale(rows, label)
    if width is not None:
        room = max(1, width - margin - len(_BUBBLE))
        fitting = int(room * unit_ms / timeline.makespan_ms) if timeline.makespan_ms else columns
        if fitting < 1:
            unit_ms, columns = timeline.makespan_ms / room, 1
        columns = min(columns, max(fitting, 1))
    per_ms = columns / unit_ms
    total = round(timeline.makespan_ms * per_ms)
    whole = all(round(end * per_ms) - round(start * per_ms) > len(label(i)) for row in rows for i, start, end in row)
    note = (
        ""
        if chunks == 1 or (whole and chunks > 2)
        else f"lower case: {'second' if chunks == 2 else 'odd'} {timeline.stage_noun}{'s' * (chunks > 2)}"
    )
    lines = [" " * margin + note.ljust(total) + _BUBBLE]
    for head, row, bubble in zip(heads, rows, timeline.bubbles, strict=True):
        cells = _cells(row, label if whole else letter, per_ms, total, columns)
        lines.append(f"{head:<{margin}}{cells}{bubble:{len(_BUBBLE)}.0%}")
    lines.append(" " * margin + _axis(timeline.makespan_ms, per_ms, total))
    return "\n".join(line.rstrip() for line in lines)


def timeline_text_for_width(timeline: Timeline, columns: int) -> str | None:
    """The step as a text grid: exact if that fits the terminal, else squeezed, else (an instruction has no column) None."""
    if len(timeline.spans) > MOST_ROWS or max(map(len, timeline.spans)) > columns:
        return None
    exact = text_grid(timeline)
    if max(map(len, exact.splitlines())) <= columns:
        return exact
    shortest = min((s.end_ms - s.start_ms for row in timeline.spans for s in row if s.end_ms > s.start_ms), default=0)
    room = columns - 32
    return text_grid(timeline, columns) if timeline.makespan_ms <= room * shortest else None


_BUBBLE = "  bubble"
_Timed = tuple[Compute, float, float]


def _without_stage(instruction: Compute) -> str:
    return str(instruction).lstrip("0123456789")


def _heads(rows: Sequence[Sequence[_Timed]], names: Sequence[str]) -> list[str]:
    """`worker 3`, with its stages where they are not simply number 3, or all of its name where there are shards."""
    if any(", shard " in name for name in names):
        return list(names)
    hosted = [sorted({i.stage for i, _, _ in row}) for row in rows]
    if all(stages == [rank] for rank, stages in enumerate(hosted)):
        return [f"worker {rank}" for rank in range(len(rows))]
    return [f"worker {rank} stage {','.join(map(str, stages)) or '-'}" for rank, stages in enumerate(hosted)]


def _scale(rows: Sequence[Sequence[_Timed]], label: Callable[[Compute], str]) -> tuple[float, int]:
    """(unit in ms, columns per unit): the largest unit of which all times are multiples, and the fewest columns that hold
    every label and the blank after it."""
    timed = [(label(i), start, end) for row in rows for i, start, end in row if end > start]
    if not timed:
        return 1.0, 1
    shortest = min(end - start for _, start, end in timed)
    unit = _common_unit({time for _, *both in timed for time in both}, shortest)
    columns = max(-(-(len(text) + 1) // max(1, round((end - start) / unit))) for text, start, end in timed)
    return unit, columns


def _common_unit(times: set[float], shortest: float) -> float:
    """The largest shortest/k (k <= 4) of which all times are multiples; `shortest` itself when there is none."""
    for parts in range(1, _FINEST + 1):
        ticks = [float(time) / shortest * parts for time in times]
        if all(isclose(tick, round(tick), rel_tol=1e-9, abs_tol=1e-6) for tick in ticks):
            return shortest / parts * (reduce(gcd, map(round, ticks)) or 1)
    return shortest


def _cells(row: Sequence[_Timed], label: Callable[[Compute], str], per_ms: float, total: int, columns: int) -> str:
    """One worker's line; idle units are a dot each, so that they can be counted."""
    cells = [" "] * total
    cells[::columns] = "." * len(cells[::columns])
    for instruction, start, end in row:
        first, last = round(start * per_ms), round(end * per_ms)
        size = last - first
        text = (label(instruction) + "-" * size)[: max(size - 1, 1)] + " "
        cells[first:last] = text[:size]
    return "".join(cells)


def _axis(makespan_ms: float, per_ms: float, total: int) -> str:
    """Round numbers under their columns, about one every twelve columns, the last one with its unit."""
    step = round_tick_step(makespan_ms, max(2, total // 12))
    line = ""
    count = int(makespan_ms / step + 1e-9)
    for tick in range(count + 1):
        text = f"{tick * step:g}" + (" ms" if tick == count else "")
        line = line.ljust(round(tick * step * per_ms)) + text
    return line


def format_milliseconds(time_ms: float) -> str:
    """`33 ms`, `101.25 ms`, `0.123 ms`: at most two decimals, three below 1 ms."""
    text = f"{time_ms:,.{2 if time_ms >= 1 else 3}f}"
    return (text.rstrip("0").rstrip(".") or "0") + " ms"


def format_activation_count(microbatches: float) -> str:
    """Activations held, in microbatches: `4`, `1.05`, `12.3`, `1234`; at most three significant digits below 1000."""
    return f"{microbatches:.3g}" if microbatches < 999.5 else f"{microbatches:.0f}"


def round_tick_step(extent: float, ticks: int) -> float:
    """The smallest of 1, 2, 5 x 10^k that cuts `extent` into at most `ticks` parts; 1 when there is no extent."""
    if extent <= 0:
        return 1.0
    power = 10.0 ** len(str(int(extent)))
    steps = [power * 10.0**-k * factor for k in range(12, -1, -1) for factor in (1, 2, 5)]
    found = next((b for a, b in pairwise([0.0, *steps]) if extent / b <= ticks), power)
    return float(f"{found:.6g}")
