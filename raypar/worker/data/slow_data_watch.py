"""Tells when a worker's steps are long because its samples are read slowly."""

from __future__ import annotations

from collections import deque

from raypar.job import DataConfig

STEPS = 20
"""Over how many steps waiting for samples is added up."""
SHARE, SECONDS = 0.2, 0.01
"""From this share of a step on, if that is so long, workers are said to wait for samples."""


class SlowDataWatch:
    """Adds up how long a worker's last steps waited for samples."""

    def __init__(self, data: DataConfig) -> None:
        self._data = data
        self._steps: deque[tuple[float, float]] = deque(maxlen=STEPS)
        """(seconds of waiting, seconds of the step)."""

    def add(self, waited_s: float, seconds: float) -> str | None:
        """Add a step; a line for the user if the last steps have waited for long."""
        self._steps.append((waited_s, seconds))
        if len(self._steps) < STEPS:
            return None
        waited_s, seconds = (sum(times) / STEPS for times in zip(*self._steps, strict=True))
        if waited_s < max(SHARE * seconds, SECONDS):
            return None
        processes = self._data.processes
        cure = f"set data.processes: {2 * processes or 2}, whose processes read ahead, or make a sample cheaper to read"
        if self._data.streams is not None:
            cure = "let the data set read ahead in a thread of its own, or make its samples cheaper to read"
        return (
            f"it waits for samples of data set {self._data.label}, {100 * waited_s / seconds:.0f} % of a step "
            f"({1000 * waited_s:,.0f} of {1000 * seconds:,.0f} ms)\n  cure: {cure}"
        )
