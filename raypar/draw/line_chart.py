"""A line chart (SVG) of values over steps: the loss with its validation, memory. However long the run, its size is bounded.

It is beside the other pictures because it shares their colours and measures; like them it reads no file.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from typing import TypeVar

from raypar.draw.svg_style import INK, LINE, QUIET, estimate_text_width
from raypar.draw.text_grid import round_tick_step

Point = tuple[float, float]
"""(step, value)."""
AnyPoint = TypeVar("AnyPoint", bound=tuple[float, ...])
"""(step, value), perhaps with more."""

MOST_BUCKETS = 400
"""A drawn line has at most so many points for its means, and twice as many for its least and largest values."""
LOG_FROM = 20.0
"""The value axis is logarithmic if the largest value is so many times the least one, and all are positive."""
LARGEST = 1e300
"""The largest absolute value that is drawn: differences of larger ones may overflow."""
SMOOTH_BUCKETS = 80
"""The mean line of a noisy series has at most so many points."""

_PLOT_HEIGHT, _LEFT, _FONT = 280.0, 76.0, 12.0


@dataclass(frozen=True)
class ChartSeries:
    """One line of a chart."""

    name: str
    """Its name in the legend."""
    colour: str
    """Its colour, as `#2B7BBA`."""
    points: Sequence[Point]
    """Its points by ascending step; values that are not finite, or beyond `LARGEST`, are left out."""
    noisy: bool = False
    """Whether its points are drawn faintly, with their mean as the line."""
    dots: bool = False
    """Whether its points are marked, where they are few."""


def downsample_min_max(points: Sequence[AnyPoint], buckets: int) -> list[AnyPoint]:
    """At most 2 points of each of `buckets` equal parts of the x axis: the first least and the first largest value, in order.

    So peaks stay where they are. Points that are few enough are returned as they are.
    """
    if len(points) <= 2 * buckets:
        return list(points)
    found: list[AnyPoint] = []
    for part in _parts(points, buckets):
        low, high = min(part, key=lambda p: p[1]), max(part, key=lambda p: p[1])
        found += [low] if low == high else sorted((low, high))
    return found


def bucket_means(points: Sequence[Point], buckets: int) -> list[Point]:
    """The mean point of each of `buckets` equal parts of the x axis that has points."""
    if len(points) <= buckets:
        return list(points)
    return [(sum(x for x, _ in part) / len(part), sum(y for _, y in part) / len(part)) for part in _parts(points, buckets)]


def _parts(points: Sequence[AnyPoint], buckets: int) -> list[list[AnyPoint]]:
    """The points in equal parts of the x axis; parts without points are left out."""
    first, extent = points[0][0], points[-1][0] - points[0][0] or 1.0
    parts: list[list[AnyPoint]] = [[] for _ in range(buckets)]
    for point in points:
        parts[max(0, min(buckets - 1, int((point[0] - first) / extent * buckets)))].append(point)
    return [part for part in parts if part]


def line_chart_svg(
    series: Sequence[ChartSeries], *, title: str, x_name: str, y_name: str, width: int = 1280, zero: bool = False
) -> str:
    """The series as a complete SVG document. `zero`: whether the value axis begins at 0; else it fits the values.

    Of a noisy series the range of its values is drawn faintly and their mean as a line. The value at its end stands beside
    each line.
    """
    shown = [(one, [p for p in one.points if abs(p[1]) <= LARGEST]) for one in series]
    shown = [(one, points) for one, points in shown if points]
    values = [value for _, points in shown for _, value in points]
    steps = [step for _, points in shown for step, _ in points]
    ends = [_line_end(one, points) for one, points in shown]
    labels = [_end_label(value) for value in ends]
    right = 28.0 + max((estimate_text_width(text, _FONT) for text in labels), default=0.0)
    axis = ValueAxis.of(values, zero)
    top, bottom = 40.0, 40.0 + _PLOT_HEIGHT
    first, last = (min(steps), max(steps)) if steps else (0.0, 1.0)

    def x(step: float) -> float:
        return _LEFT + (step - first) / ((last - first) or 1.0) * (width - right - _LEFT)

    def y(value: float) -> float:
        return bottom - (bottom - top) * axis.share(value)

    body = _draw_legend([one for one, _ in shown], 20.0)
    body += _draw_axes(axis, (first, last), x, y, (top, bottom), width - right, (x_name, y_name))
    for one, points in shown:
        body += draw_series(one, points, x, y)
    body += _draw_end_labels(list(zip([one.colour for one, _ in shown], ends, labels, strict=True)), width - right + 8, y)
    height = round(bottom + 46)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f"font-family=\"Inter, 'Helvetica Neue', Helvetica, Arial, 'DejaVu Sans', sans-serif\" fill=\"{INK}\">\n"
        f"<title>{escape(title)}</title>\n"
        f'<rect width="{width}" height="{height}" fill="#FFFFFF"/>\n' + "\n".join(body) + "\n</svg>\n"
    )


@dataclass(frozen=True)
class ValueAxis:
    """The scale of the value axis, linear or logarithmic."""

    low: float
    high: float
    log: bool

    @staticmethod
    def of(values: Sequence[float], zero: bool) -> ValueAxis:
        """An axis for the values, with a margin; one that holds a single value has room around it."""
        if not values:
            return ValueAxis(0.0, 1.0, False)
        low, high = min(values), max(values)
        if not zero and low > 0 and high / low >= LOG_FROM:
            return ValueAxis(low / 1.15, high * 1.15, True)
        low = min(0.0, low) if zero else low
        room = 0.06 * (high - low) or 0.1 * abs(high) or 1.0
        return ValueAxis(low if zero else low - room, high + room, False)

    def share(self, value: float) -> float:
        """Where a value stands between the axis's ends: 0 to 1."""
        if self.log:
            return (math.log(value) - math.log(self.low)) / (
                math.log(self.high) - math.log(self.low)
            )  # a quotient may overflow
        return (value - self.low) / (self.high - self.low)

    def ticks(self) -> list[float]:
        """Round values to label."""
        if self.log:
            decades = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
            few = (1, 2, 5) if len(decades) <= 4 else (1,)
            every = max(1, len(decades) // 8)
            found = [factor * 10.0**k for k in decades[::every] for factor in few]
            return [tick for tick in found if self.low <= tick <= self.high]
        step = _tick_step(self.high - self.low)
        if not math.isfinite(step):
            return []
        return [k * step for k in range(math.ceil(self.low / step), math.floor(self.high / step) + 1)]


def _tick_step(extent: float) -> float:
    """A round step that divides `extent` into at most 6 parts, however small or large it is."""
    power = 10.0 ** math.floor(math.log10(extent)) if 0 < extent < 1e300 else math.inf
    return power / 100 * round_tick_step(extent / power * 100, 6) if 0 < power < math.inf else math.inf


def format_value(value: float) -> str:
    """A value as text of a few characters."""
    return f"{value:,.4g}" if 1e-3 <= abs(value) < 1e6 or value == 0 else f"{value:.3g}"


def _is_smoothed(series: ChartSeries, points: Sequence[Point]) -> bool:
    """Whether the mean of a series is drawn, and not its every point."""
    return series.noisy and len(points) > SMOOTH_BUCKETS


def _line_end(series: ChartSeries, points: Sequence[Point]) -> float:
    """The value at which the line of a series ends: its last one, or the last mean."""
    return bucket_means(points, SMOOTH_BUCKETS)[-1][1] if _is_smoothed(series, points) else points[-1][1]


def _end_label(value: float) -> str:
    """The value at the end of a line, with zeros at its end: the values of several lines are compared."""
    return f"{value:#.4g}".rstrip(".") if 1e-3 <= abs(value) < 1e4 else format_value(value)


def _draw_legend(series: Sequence[ChartSeries], y: float) -> list[str]:
    out, x = [f'<g font-size="13" fill="{QUIET}">'], _LEFT
    for one in series:
        out.append(
            f'<path d="M{x:.0f} {y - 5:g}h16" stroke="{one.colour}" stroke-width="2.4"/>'
            f'<text x="{x + 22:.0f}" y="{y:g}">{escape(one.name)}</text>'
        )
        x += 22 + estimate_text_width(one.name, 13) + 26
    return [*out, "</g>"]


def _draw_axes(
    axis: ValueAxis,
    steps: tuple[float, float],
    x: Callable[[float], float],
    y: Callable[[float], float],
    plot: tuple[float, float],
    end: float,
    names: tuple[str, str],
) -> list[str]:
    """Grid lines with their labels. `steps`: first and last; `plot`: its top and bottom; `end`: its right side."""
    top, bottom = plot
    kind = " (log)" if axis.log else ""
    out = [
        f'<text transform="translate(20 {(top + bottom) / 2:g}) rotate(-90)" font-size="{_FONT:g}" text-anchor="middle" '
        f'fill="{QUIET}">{escape(names[1])}{kind}</text>',
        f'<text x="{(_LEFT + end) / 2:.2f}" y="{bottom + 36:g}" font-size="11" text-anchor="middle" fill="{QUIET}">'
        f"{escape(names[0])}</text>",
    ]
    out += [
        f'<path d="M{_LEFT:g} {y(value):.2f}H{end:.2f}" stroke="{LINE}"/>'
        f'<text x="{_LEFT - 8:g}" y="{y(value) + 4:.2f}" font-size="11" text-anchor="end" fill="{QUIET}">'
        f"{format_value(value)}</text>"
        for value in axis.ticks()
    ]
    step = max(1.0, round_tick_step(steps[1] - steps[0], 10))
    tick = math.ceil(steps[0] / step) * step
    while tick <= steps[1]:
        out.append(
            f'<path d="M{x(tick):.2f} {bottom:g}v4" stroke="{LINE}"/>'
            f'<text x="{x(tick):.2f}" y="{bottom + 18:g}" font-size="11" text-anchor="middle" fill="{QUIET}">{tick:,.0f}</text>'
        )
        tick += step
    return out


def draw_series(
    series: ChartSeries,
    points: Sequence[Point],
    x: Callable[[float], float],
    y: Callable[[float], float],
    x_text: str = "step {:,.0f}",
) -> list[str]:
    """The line of a series; of a noisy one its range too; dots where there are few, whose tooltips say `x_text` of their x."""
    smooth = _is_smoothed(series, points)

    def path(of: Sequence[Point]) -> str:
        return "M" + "L".join(f"{x(step):.1f} {y(value):.1f}" for step, value in of)

    out = []
    if smooth:
        all_of_it = path(downsample_min_max(points, MOST_BUCKETS))
        out.append(
            f'<path d="{all_of_it}" fill="none" stroke="{series.colour}" stroke-width="1" opacity="0.35" '
            'stroke-linejoin="round"/>'
        )
    line = bucket_means(points, SMOOTH_BUCKETS) if smooth else downsample_min_max(points, MOST_BUCKETS)
    if smooth:
        line = [points[0], *line, (points[-1][0], line[-1][1])]
    out.append(f'<path d="{path(line)}" fill="none" stroke="{series.colour}" stroke-width="2" stroke-linejoin="round"/>')
    if len(points) == 1 or (series.dots and len(points) <= SMOOTH_BUCKETS):
        out += [
            f'<circle cx="{x(step):.1f}" cy="{y(value):.1f}" r="3.2" fill="{series.colour}">'
            f"<title>{escape(series.name)}, {x_text.format(step)}: {format_value(value)}</title></circle>"
            for step, value in points
        ]
    return out


def _draw_end_labels(ends: Sequence[tuple[str, float, str]], x: float, y: Callable[[float], float]) -> list[str]:
    """(colour, value, text) of the ends of lines: the texts beside the plot, moved apart where they would overlap."""
    out, free = [], -math.inf
    for at, colour, label in sorted((y(value), colour, label) for colour, value, label in ends):
        at = max(at, free)
        free = at + _FONT + 3
        out.append(f'<text x="{x:.1f}" y="{at + 4:.1f}" font-size="{_FONT:g}" font-weight="600" fill="{colour}">{label}</text>')
    return out
