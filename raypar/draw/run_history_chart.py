"""A chart (SVG) of a run over time: samples a second, loss, workers, pauses, faults.

It is beside the other pictures of time because it shares their colours and measures; like them it reads no file.
"""

from __future__ import annotations

import statistics
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from html import escape
from itertools import accumulate, pairwise

from raypar.draw.line_chart import LARGEST, ChartSeries, ValueAxis, downsample_min_max, draw_series, format_value
from raypar.draw.svg_style import INK, LINE, QUIET, estimate_text_width, mix_with_white
from raypar.draw.text_grid import round_tick_step
from raypar.plan.wording import count_noun

MARK_KINDS = {
    "lost": ("#C8372D", "worker lost"),
    "driver": ("#7A4FA3", "driver lost"),
    "draining": ("#D9861A", "node drains"),
    "joined": ("#2FA584", "worker joined"),
    "started": ("#6B7480", "run resumed"),
}
"""Kind of a mark -> (colour, its name in the legend)."""

_RATE_COLOUR, _WORKERS_COLOUR, _PAUSE_COLOUR = "#2B7BBA", "#4D4D4D", "#F6E4E1"
_LOSS_COLOUR, _VALIDATION_COLOUR = "#3B4CA0", "#B8336A"
_RATE_HEIGHT, _LOSS_HEIGHT, _WORKERS_HEIGHT, _ROW_HEIGHT, _LABEL = 260.0, 150.0, 74.0, 17.0, 12.0
_GAP = 26.0
_MOST_ROWS = 6
_BINS = 320
_MOST_PAUSES = 400
_MOST_LINES = 120


@dataclass(frozen=True)
class ChartMark:
    """An event of a run, drawn as a line with a label."""

    at_s: float
    """Seconds from the start of the run."""
    kind: str
    """One of `MARK_KINDS`."""
    label: str
    """The text beside the line."""
    brief: str = ""
    """A shorter text for crowded pictures; empty: there is none."""

    @property
    def shown(self) -> str:
        """The text that is drawn: `brief` if there is one."""
        return self.brief or self.label


@dataclass(frozen=True)
class RunHistory:
    """The history of a run, for the chart. Times are in seconds from its start."""

    steps: Sequence[tuple[float, float, float]]
    """(start, end, samples) of every committed step, in order."""
    workers: Sequence[tuple[float, int]]
    """(time, number of workers from then on)."""
    marks: Sequence[ChartMark]
    """The events that are drawn."""
    pauses: Sequence[tuple[float, float]]
    """(from, to): from the last step before a pause to the end of the first step after it."""
    end_s: float
    """Time at which the drawing ends."""
    losses: Sequence[tuple[float, float]] = ()
    """(end of the step, loss) of every committed step with a finite loss, in order."""
    validation_losses: Sequence[tuple[float, float]] = ()
    """(time, validation loss) of every validation with a finite loss, in order."""
    between_starts_s: Sequence[float] = ()
    """Seconds in which the run did not run before each later start. All times of this record leave them out."""


def throughput_svg(history: RunHistory, *, title: str, width: int = 1280) -> str:
    """The history as a complete SVG document: samples/s above, the loss below, then workers as a step line, on one time axis.

    Samples/s are means over a 320th of the time, or over two median steps where those are longer. Labels of marks that are
    close to each other stand in several rows; those for which there is no room are left out (their tooltips are not). Of very
    many marks only the beginnings of their lines are drawn, above the plot, so that they do not cover it. Without
    `title` the drawing begins with its legend. Its size is bounded, however many steps, pauses and workers there were.
    """
    extent = max(history.end_s, 1e-3) if history.end_s else 1.0  # rates over shorter times may overflow
    late = [estimate_text_width(mark.shown, _LABEL) for mark in history.marks if mark.at_s > 0.75 * extent]
    sheet = _Sheet(extent, width, left=76.0, right=28.0 + max(late, default=0.0))
    crowded = len(history.marks) > _MOST_LINES
    rows = [None] * len(history.marks) if crowded else _rows(history.marks, sheet)
    head = 0.0 if title else 44.0
    top = 92.0 - head + _ROW_HEIGHT * (1 + max((row for row in rows if row is not None), default=0))
    middle = top + _RATE_HEIGHT
    losses = _loss_series(history)
    workers_top = middle + _GAP + (_LOSS_HEIGHT + _GAP if losses else 0.0)
    bottom = workers_top + _WORKERS_HEIGHT
    height = round(bottom + 48)
    body = [
        *([f'<text x="24" y="44" font-size="22" font-weight="600">{escape(title)}</text>'] if title else []),
        *_draw_legend(history, 74 - head),
        *_draw_pauses(history.pauses, sheet, top, bottom),
        *_draw_time_axis(sheet, top, bottom),
        *_draw_rates(history.steps, sheet, top, middle),
        *_draw_losses(losses, sheet, middle + _GAP, middle + _GAP + _LOSS_HEIGHT),
        *_draw_workers(history.workers, sheet, workers_top, bottom),
    ]
    for mark, row in zip(history.marks, rows, strict=True):
        body += _draw_mark(mark, row, sheet, top, top if crowded else bottom)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f"font-family=\"Inter, 'Helvetica Neue', Helvetica, Arial, 'DejaVu Sans', sans-serif\" fill=\"{INK}\">\n"
        f"<title>{escape(title or 'throughput')}</title>\n"
        f'<rect width="{width}" height="{height}" fill="#FFFFFF"/>\n' + "\n".join(body) + "\n</svg>\n"
    )


@dataclass(frozen=True)
class _Sheet:
    """The scale of the time axis, in pixels."""

    extent: float
    width: int
    left: float
    right: float

    @property
    def end(self) -> float:
        return self.width - self.right

    def x(self, at_s: float) -> float:
        return self.left + at_s / self.extent * (self.end - self.left)


def throughput_bins(steps: Sequence[tuple[float, float, float]], extent: float) -> list[tuple[float, float, float]]:
    """(from, to, samples/s) of equal bins over the whole time; within a step samples come evenly, between steps none do."""
    if not steps:
        return []
    window = max(extent / _BINS, 2 * statistics.median(end - start for start, end, _ in steps))
    count = max(1, int(extent / window))
    starts = [start for start, _, _ in steps]
    before = [0.0, *accumulate(samples for _, _, samples in steps)]

    def total(at: float) -> float:
        i = bisect_right(starts, at) - 1
        if i < 0:
            return 0.0
        start, end, samples = steps[i]
        return before[i] + samples * (min(1.0, (at - start) / (end - start)) if end > start else 1.0)

    edges = [extent * i / count for i in range(count + 1)]
    return [(a, b, (total(b) - total(a)) / (b - a)) for a, b in pairwise(edges)]


def _rows(marks: Sequence[ChartMark], sheet: _Sheet) -> list[int | None]:
    """The row of each mark's label, counted from the plot upwards; None where there is no room.

    A label stands to the right of its line, above all lines that it would cross: so it is placed after those to its right.
    """
    rows: list[int | None] = [None] * len(marks)
    placed: list[tuple[float, int]] = []
    for index in sorted(range(len(marks)), key=lambda i: -marks[i].at_s):
        x = sheet.x(marks[index].at_s)
        end = x + 12 + estimate_text_width(marks[index].shown, _LABEL)
        row = 1 + max((row for at, row in placed if at <= end), default=-1)
        if row < _MOST_ROWS:
            rows[index] = row
            placed.append((x, row))
    return rows


def _draw_mark(mark: ChartMark, row: int | None, sheet: _Sheet, top: float, bottom: float) -> list[str]:
    x, colour = sheet.x(mark.at_s), MARK_KINDS[mark.kind][0]
    y = top if row is None else top - 6 - _ROW_HEIGHT * row
    label = "" if row is None else f'<text x="{x + 5:.2f}" y="{y - 2:g}" font-size="{_LABEL:g}">{escape(mark.shown)}</text>'
    start = y if row is None and bottom > top else y - 11
    return [
        f'<g fill="{colour}"><title>{escape(mark.label)}, at {mark.at_s:.1f} s</title>'
        f'<path d="M{x:.2f} {start:g}V{bottom:g}" stroke="{colour}" stroke-width="1.4" stroke-dasharray="5 3"/>{label}</g>'
    ]


def _draw_pauses(pauses: Sequence[tuple[float, float]], sheet: _Sheet, top: float, bottom: float) -> list[str]:
    return [
        f'<rect x="{sheet.x(start):.2f}" y="{top:g}" width="{max(1.0, sheet.x(end) - sheet.x(start)):.2f}" '
        f'height="{bottom - top:g}" fill="{_PAUSE_COLOUR}"><title>{text}</title></rect>'
        for start, end, text in _visible_pauses(pauses, sheet)
    ]


def _visible_pauses(pauses: Sequence[tuple[float, float]], sheet: _Sheet) -> list[tuple[float, float, str]]:
    """(from, to, tooltip); of more pauses than can be told apart, those less than a pixel from each other are one."""
    near = sheet.extent / max(1.0, sheet.end - sheet.left) if len(pauses) > _MOST_PAUSES else -1.0
    groups: list[list[tuple[float, float]]] = []
    for pause in pauses:
        if groups and pause[0] - groups[-1][-1][1] <= near:
            groups[-1].append(pause)
        else:
            groups.append([pause])
    return [
        (
            group[0][0],
            max(end for _, end in group),
            f"{len(group)} pauses of " * (len(group) > 1)
            + "pause of " * (len(group) == 1)
            + f"{sum(end - start for start, end in group):.2f} s"
            + " in all" * (len(group) > 1),
        )
        for group in groups
    ]


def _draw_time_axis(sheet: _Sheet, top: float, bottom: float) -> list[str]:
    step = round_tick_step(sheet.extent, max(2, int((sheet.end - sheet.left) / 90)))
    out = []
    for tick in range(int(sheet.extent / step + 1e-9) + 1):
        x = sheet.x(tick * step)
        out.append(
            f'<path d="M{x:.2f} {top:g}V{bottom + 4:g}" stroke="{LINE}"/>'
            f'<text x="{x:.2f}" y="{bottom + 18:g}" font-size="11" text-anchor="middle" fill="{QUIET}">{tick * step:g}</text>'
        )
    return [
        *out,
        f'<text x="{(sheet.left + sheet.end) / 2:.2f}" y="{bottom + 36:g}" font-size="11" text-anchor="middle" fill="{QUIET}">'
        "time, s</text>",
    ]


def _draw_rates(steps: Sequence[tuple[float, float, float]], sheet: _Sheet, top: float, bottom: float) -> list[str]:
    bins = throughput_bins(steps, sheet.extent)
    most = max((rate for _, _, rate in bins), default=1.0) or 1.0
    out = _draw_value_axis("samples/s", most, 5, sheet, top, bottom)
    if bins:
        y = _scale(most, top, bottom)
        line = "".join(f"{'L' if i else 'M'}{sheet.x(a):.2f} {y(r):.2f}H{sheet.x(b):.2f}" for i, (a, b, r) in enumerate(bins))
        area = f"M{sheet.x(0):.2f} {bottom:g}L{line[1:]}V{bottom:g}z"
        out.append(f'<path d="{area}" fill="{mix_with_white(_RATE_COLOUR, 0.75)}" fill-opacity="0.7"/>')
        out.append(f'<path d="{line}" fill="none" stroke="{_RATE_COLOUR}" stroke-width="1.6" stroke-linejoin="round"/>')
    return out


def _loss_series(history: RunHistory) -> list[ChartSeries]:
    """The lines of the loss's panel; empty if there is no loss to draw."""
    given = (
        ChartSeries("loss", _LOSS_COLOUR, history.losses, noisy=True),
        ChartSeries("validation", _VALIDATION_COLOUR, history.validation_losses, dots=True),
    )
    shown = (replace(one, points=[p for p in one.points if abs(p[1]) <= LARGEST]) for one in given)
    return [one for one in shown if one.points]


def _draw_losses(series: Sequence[ChartSeries], sheet: _Sheet, top: float, bottom: float) -> list[str]:
    """The panel of the loss: as in `line_chart`, a faint line for all steps and a line for their mean; over time, not steps."""
    if not series:
        return []
    axis = ValueAxis.of([value for one in series for _, value in one.points], zero=False)

    def y(value: float) -> float:
        return bottom - (bottom - top) * axis.share(value)

    out = [
        f'<text transform="translate(20 {(top + bottom) / 2:g}) rotate(-90)" font-size="12" text-anchor="middle" '
        f'fill="{QUIET}">loss{" (log)" * axis.log}</text>'
    ]
    out += [
        f'<path d="M{sheet.left:g} {y(value):.2f}H{sheet.end:.2f}" stroke="{LINE}"/>'
        f'<text x="{sheet.left - 8:g}" y="{y(value) + 4:.2f}" font-size="11" text-anchor="end" fill="{QUIET}">'
        f"{format_value(value)}</text>"
        for value in axis.ticks()
    ]
    for one in series:
        out += draw_series(one, one.points, sheet.x, y, x_text="at {:,.1f} s")
    if len(series) > 1:
        out.append(
            f'<text x="{sheet.end - 6:.2f}" y="{top + 14:g}" font-size="12" text-anchor="end">'
            + " ".join(f'<tspan fill="{one.colour}">{one.name}</tspan>' for one in series)
            + "</text>"
        )
    return out


def _draw_workers(workers: Sequence[tuple[float, int]], sheet: _Sheet, top: float, bottom: float) -> list[str]:
    most = max((count for _, count in workers), default=1) or 1
    out = _draw_value_axis("workers", most, 4, sheet, top, bottom, least=1.0)
    if workers:
        workers = [(at, round(count)) for at, count in downsample_min_max(workers, 2 * _BINS)]
        y = _scale(most, top, bottom)
        ends = [*(at for at, _ in workers[1:]), sheet.extent]
        line = f"M{sheet.x(workers[0][0]):.2f} {y(workers[0][1]):.2f}"
        line += "".join(f"V{y(count):.2f}H{sheet.x(end):.2f}" for (_, count), end in zip(workers, ends, strict=True))
        out.append(f'<path d="{line}" fill="none" stroke="{_WORKERS_COLOUR}" stroke-width="2"/>')
    return out


def _scale(most: float, top: float, bottom: float) -> Callable[[float], float]:
    return lambda value: bottom - (bottom - top) * value / (1.06 * most)


def _draw_value_axis(
    name: str, most: float, ticks: int, sheet: _Sheet, top: float, bottom: float, least: float = 0.0
) -> list[str]:
    step = max(round_tick_step(most, ticks), least)
    y = _scale(most, top, bottom)
    out = [
        f'<text transform="translate(20 {(top + bottom) / 2:g}) rotate(-90)" font-size="12" text-anchor="middle" '
        f'fill="{QUIET}">{name}</text>'
    ]
    for tick in range(int(most / step + 1e-9) + 1):
        at = y(tick * step)
        out.append(
            f'<path d="M{sheet.left:g} {at:.2f}H{sheet.end:.2f}" stroke="{LINE}"/>'
            f'<text x="{sheet.left - 8:g}" y="{at + 4:.2f}" font-size="11" text-anchor="end" fill="{QUIET}">'
            f"{tick * step:,g}</text>"
        )
    return out


def _draw_legend(history: RunHistory, y: float) -> list[str]:
    there = {mark.kind for mark in history.marks}
    out, x = [f'<g font-size="13" fill="{QUIET}">'], 24.0
    for colour, text in (MARK_KINDS[kind] for kind in MARK_KINDS if kind in there):
        out.append(
            f'<path d="M{x:.0f} {y - 5:g}h16" stroke="{colour}" stroke-width="2" stroke-dasharray="5 3"/>'
            f'<text x="{x + 22:.0f}" y="{y:g}">{text}</text>'
        )
        x += 22 + estimate_text_width(text, 13) + 26
    if history.pauses:
        total = sum(end - start for start, end in history.pauses)
        number = len(history.pauses)
        text = f"{count_noun(number, 'pause')}, {total:.2f} of {history.end_s:.1f} s"
        out.append(
            f'<rect x="{x:.0f}" y="{y - 11:g}" width="16" height="13" rx="2.5" fill="{_PAUSE_COLOUR}" stroke="{LINE}"/>'
            f'<text x="{x + 22:.0f}" y="{y:g}">{text}</text>'
        )
        x += 22 + estimate_text_width(text, 13) + 26
    if any(mark.brief for mark in history.marks):
        nodes = "; beside a drain: beginnings of nodes' ids" * ("draining" in there)
        out.append(f'<text x="{x:.0f}" y="{y:g}">numbers: workers{nodes}</text>')
    out.append("</g>")
    return out
