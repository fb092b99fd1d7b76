"""Measured step times, scaled to the present number of workers."""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import dataclass, field

KEPT_STEPS = 100
"""Steps that are remembered."""
MIN_OWN_STEPS = 3
"""Least steps with the present number of workers whose median is used alone: a generation's first step is longer."""


@dataclass
class StepTimes:
    """The seconds of the last steps, each with the number of workers that executed it.

    Measured times are kept unscaled. So a run that shrinks and grows again expects the times of its beginning.
    """

    _steps: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=KEPT_STEPS))
    """(seconds, number of workers) of each step."""

    def add(self, seconds: float, workers: int) -> None:
        """Add a step that `workers` workers have executed."""
        self._steps.append((seconds, workers))

    @property
    def known(self) -> bool:
        """Whether a step has been measured."""
        return bool(self._steps)

    def longest_s(self, workers: int) -> float | None:
        """The longest step, scaled to `workers` workers; None before the first step.

        Fewer workers are taken to need more time in proportion; more workers are not taken to be faster.
        """
        return max((self._scaled_s(seconds, had, workers) for seconds, had in self._steps), default=None)

    def usual_s(self, workers: int) -> float:
        """The median of the steps of so many workers, or of all steps scaled to that number; 0 before the first step."""
        own = [seconds for seconds, had in self._steps if had == workers]
        found = own if len(own) >= MIN_OWN_STEPS else [self._scaled_s(s, had, workers) for s, had in self._steps]
        return statistics.median(found) if found else 0.0

    @staticmethod
    def _scaled_s(seconds: float, had: int, workers: int) -> float:
        return seconds * max(1.0, had / workers)
