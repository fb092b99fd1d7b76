"""How long the steps of a run take, whatever its size has been."""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import dataclass, field

KEPT = 100
ENOUGH = 3
"""Steps after which their own median is believed: the first of a generation is longer."""


@dataclass
class StepTimes:
    """The last steps' seconds, each with the number of workers that did it. What was measured stays as it is, so that
    a run that shrinks and grows again and again expects after all of that what it did at the beginning."""

    _steps: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=KEPT))

    def add(self, seconds: float, workers: int) -> None:
        """One step that all of them have done."""
        self._steps.append((seconds, workers))

    @property
    def known(self) -> bool:
        """Some step has been measured."""
        return bool(self._steps)

    def longest_s(self, workers: int) -> float | None:
        """What so many workers may take for a step that is as long as the longest; None before the first. Fewer take longer;
        that more of them are faster is not relied on."""
        return max((seconds * max(1.0, had / workers) for seconds, had in self._steps), default=None)

    def usual_s(self, workers: int) -> float:
        """The median of those that so many have done, or of all, as longest_s has them; 0 before the first."""
        own = [seconds for seconds, had in self._steps if had == workers]
        found = own if len(own) >= ENOUGH else [seconds * max(1.0, had / workers) for seconds, had in self._steps]
        return statistics.median(found) if found else 0.0
