"""Series of values of bounded size, for charts and medians of runs of any length. Pure."""

from __future__ import annotations

import math

from raypar.draw.line_chart import downsample_min_max

MOST_POINTS = 8192
"""Number of points beyond which a series is thinned, to at least half as many."""

Point = tuple[float, ...]
"""(x, y, ...), with increasing x."""


class PointSeries:
    """Points of a line chart. When thinned, it keeps the lowest and the highest point of each section of the x axis."""

    def __init__(self, most: int = MOST_POINTS) -> None:
        self.most = most
        """The number of points beyond which the series is thinned."""
        self.points: list[Point] = []
        """The points, in order."""

    def add(self, point: Point) -> None:
        """Add the next point."""
        self.points.append(point)
        if len(self.points) > self.most:
            self.points = downsample_min_max(self.points, self.most // 4)


class MetricSeries:
    """The values of one metric over steps."""

    def __init__(self) -> None:
        self.last = math.nan
        """The last value, which may be NaN."""
        self.last_step = 0
        """The step of the last value."""
        self.least: tuple[float, int] | None = None
        """(the least finite value, its first step)."""
        self.largest: tuple[float, int] | None = None
        """(the largest finite value, its first step)."""
        self.finite = PointSeries()
        """(step, value) of every finite value."""

    def add(self, step: int, value: float) -> None:
        """Add the next value."""
        self.last, self.last_step = value, step
        if math.isfinite(value):
            self.finite.add((float(step), value))
            self.least = (value, step) if self.least is None or value < self.least[0] else self.least
            self.largest = (value, step) if self.largest is None or value > self.largest[0] else self.largest


class ValueSample:
    """Every n-th value of a sequence, for medians. n doubles whenever there are more than `most` values."""

    def __init__(self, most: int = MOST_POINTS) -> None:
        self.most = most
        """The number of values beyond which every other one is dropped."""
        self.values: list[float] = []
        """Every `stride`-th value."""
        self.stride = 1
        """n: one of this many values is kept."""
        self._count = 0

    def add(self, value: float) -> None:
        """Add the next value."""
        if self._count % self.stride == 0:
            self.values.append(value)
            if len(self.values) > self.most:
                self.values, self.stride = self.values[::2], 2 * self.stride
        self._count += 1


class IntervalSeries:
    """(start, end, amount) of consecutive intervals; when there are too many, pairs of neighbours are merged."""

    def __init__(self, most: int | None = MOST_POINTS) -> None:
        self.most = most
        """The number of intervals beyond which pairs are merged; None: all are kept."""
        self.intervals: list[tuple[float, float, float]] = []
        """The intervals, in order."""
        self._stride = 1
        """Number of added intervals that are merged into one."""
        self._in_last = 0
        """Number of added intervals in the last one."""

    def add(self, start: float, end: float, amount: float) -> None:
        """Add the next interval."""
        if self.intervals and self._in_last < self._stride:
            first, _, before = self.intervals[-1]
            self.intervals[-1] = (first, end, before + amount)
            self._in_last += 1
            return
        self.intervals.append((start, end, amount))
        self._in_last = 1
        if self.most is not None and len(self.intervals) > self.most:
            pairs = [self.intervals[i : i + 2] for i in range(0, len(self.intervals), 2)]
            self._in_last = self._stride * (len(pairs[-1]) - 1) + self._in_last
            self.intervals = [(pair[0][0], pair[-1][1], sum(one[2] for one in pair)) for pair in pairs]
            self._stride *= 2
