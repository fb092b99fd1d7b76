"""Histories of a fleet of spot instances: read, generated in the same shape, and scaled to what one machine can play."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class History:
    """`changes`: (seconds since the start, instances from then on), in order of time."""

    name: str
    changes: tuple[tuple[float, int], ...]

    @property
    def seconds(self) -> float:
        """Until the last change."""
        return self.changes[-1][0]

    def scaled(self, faster: float, most: int) -> History:
        """Time runs `faster` times as fast, the largest fleet is `most` instances, and none that was there rounds to none.

        What lies before the first instance is left out.
        """
        largest = max(count for _, count in self.changes)
        there = [(s, n) for s, n in self.changes]
        while there and there[0][1] == 0:
            there.pop(0)
        scaled: list[tuple[float, int]] = []
        for seconds, count in there:
            instances = max(1, round(count * most / largest)) if count else 0
            if not scaled or scaled[-1][1] != instances:
                scaled.append(((seconds - there[0][0]) / faster, instances))
        return History(self.name, tuple(scaled))

    def at(self, seconds: float) -> int:
        """Instances at a time."""
        return next((count for since, count in reversed(self.changes) if since <= seconds), 0)


def read(path: Path) -> History:
    """Two columns, no header: seconds, instances alive; each change stands as two rows, with the count before and after."""
    rows = [line.split(",") for line in path.read_text().split()]
    changes: list[tuple[float, int]] = []
    for seconds, count in rows:
        if changes and changes[-1][0] == float(seconds):
            changes.pop()
        changes.append((float(seconds), int(count)))
    kept = [change for i, change in enumerate(changes) if i == 0 or change[1] != changes[i - 1][1]]
    return History(path.stem, tuple(kept))


def generated(seed: int, hours: float = 18.0, fleet: int = 12) -> History:
    """Storms, in which instances go and come within minutes, between hours of calm: what the recorded histories look like."""
    chance = random.Random(seed)
    seconds, alive = 0.0, fleet
    changes = [(seconds, alive)]
    while seconds < hours * 3600:
        seconds += chance.expovariate(1 / 5000.0)  # calm
        for _ in range(chance.randint(2, 8)):  # a storm
            seconds += chance.expovariate(1 / 200.0)
            gone = alive > 2 and chance.random() < 0.6
            alive = max(2, alive - chance.randint(1, 6)) if gone else min(fleet, alive + chance.randint(1, fleet))
            changes.append((round(seconds), alive))
    return History(f"generated, seed {seed}", tuple(changes))
