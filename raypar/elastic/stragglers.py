"""Detection of stragglers: workers that compute much more slowly than expected for many steps.

The time that a worker computes for a microbatch (without waiting) is compared with that of the workers that compute the same:
the other replicas of its stage, shard by shard. A worker without such peers is compared with its own first steps of the
generation.
"""

from __future__ import annotations

import statistics
from bisect import bisect_left
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

LEAST_S = 1e-3
"""Least seconds for a microbatch above the expected time that count as slow; smaller differences are often noise."""


@dataclass(frozen=True, slots=True)
class StragglerFinding:
    """A worker that has become a straggler, or has recovered."""

    worker: int
    """The worker."""
    slowdown: float
    """Its computing time divided by the expected time: the median of its last steps."""
    steps: int
    """The number of steps in that median."""
    alone: bool
    """Whether it was compared with its own first steps."""
    recovered: bool = False
    """Whether it was a straggler and is fast again."""


@dataclass
class _Record:
    """The steps of one worker in this generation."""

    place: tuple[int, ...]
    """Workers that compute the same, including this one; their records share this tuple."""
    ratios: deque[float]
    """Time of each of the last steps, divided by the expected time."""
    seconds: deque[float]
    """Time of each of the last steps, for a microbatch."""
    in_row: int = 0
    """How many of the last steps in a row were slow; below 0: how many were not."""
    first: list[float] = field(default_factory=list)
    """Times of the first steps, of a worker without peers."""

    @property
    def has_peers(self) -> bool:
        """Whether other workers compute the same."""
        return len(self.place) > 1


class StragglerWatch:
    """Finds stragglers from each step's compute times."""

    def __init__(self, times: float, steps: int) -> None:
        self.times = times
        """A step that took more than this multiple of the expected time is slow."""
        self.steps = steps
        """Number of slow steps in a row that make a straggler; as many in a row that are not slow end it."""
        self.told: set[int] = set()
        """Stragglers that have been reported."""
        self._slowdowns: dict[int, float] = {}
        """Straggler -> its slowdown when it was last found, or a generation ended."""
        self._records: dict[int, _Record] = {}
        """Worker -> its steps in this generation."""
        self._places: list[tuple[int, ...]] = []
        """For each place of the plan, the workers that compute the same."""

    def begin(self, places: Sequence[Sequence[int]]) -> None:
        """Start a new generation. `places`: for each place of the plan, the workers that compute the same."""
        for worker in self.told:
            self._slowdowns[worker] = self.slowdown(worker)
        self._places = [tuple(place) for place in places]
        self._records = {worker: _Record(place, *self._no_steps()) for place in self._places for worker in place}
        # A worker that has lost its peers is measured anew.
        self.told = {worker for worker in self.told if worker in self._records and self._records[worker].has_peers}

    def _no_steps(self) -> tuple[deque[float], deque[float]]:
        return deque(maxlen=self.steps), deque(maxlen=self.steps)

    def step(self, busy: Mapping[int, float]) -> list[StragglerFinding]:
        """Take a committed step and return new stragglers and recovered ones.

        `busy`: worker -> seconds that it computed for a microbatch.
        """
        found = []
        for place in self._places:
            there = [worker for worker in place if worker in busy]
            times = sorted([busy[worker] for worker in there])
            # No median of others is below the lower one of all: then none of many replicas needs its own.
            usual = len(times) > 1 and times[-1] - times[len(times) // 2 - 1] < LEAST_S
            for worker in there:
                record = self._records[worker]
                ratio = 1.0 if usual else self._ratio(record, times, busy[worker])
                if ratio is None:
                    continue
                record.ratios.append(ratio)
                record.seconds.append(busy[worker])
                record.in_row = max(record.in_row, 0) + 1 if ratio > self.times else min(record.in_row, 0) - 1
                if record.in_row >= self.steps and worker not in self.told:
                    self.told.add(worker)
                    found.append(self._finding(worker))
                elif record.in_row <= -self.steps and worker in self.told:
                    self.told.discard(worker)
                    found.append(self._finding(worker, recovered=True))
        return sorted(found, key=lambda finding: finding.worker)

    def _ratio(self, record: _Record, times: Sequence[float], own_s: float) -> float | None:
        """A worker's time divided by the expected one; 1 if it is not late, None if the expected time is not known.

        `times`: those of all workers of its place, sorted.
        """
        should_s = self._should_s(record, times, own_s)
        if should_s is None:
            return None
        return own_s / should_s if own_s - should_s >= LEAST_S and should_s > 0 else 1.0

    def _should_s(self, record: _Record, times: Sequence[float], own_s: float) -> float | None:
        """The time that a worker is expected to need; None if that is not known."""
        if record.has_peers:
            return median_of_others(times, own_s)
        if len(record.first) < self.steps:
            record.first.append(own_s)
            return None
        return statistics.median(record.first)

    def usual_s(self, worker: int) -> float | None:
        """The median of the worker's times in the last steps; None if this generation has had fewer than make a finding."""
        record = self._records.get(worker)
        return statistics.median(record.seconds) if record is not None and len(record.seconds) == self.steps else None

    def slowdown(self, worker: int) -> float:
        """A straggler's computing time divided by the expected one, as far as it is known; 1 of a worker that is none."""
        record = self._records.get(worker)
        if worker not in self.told:
            return 1.0
        if record is None or len(record.ratios) < self.steps:
            return self._slowdowns.get(worker, 1.0)
        return statistics.median(record.ratios)

    def _finding(self, worker: int, recovered: bool = False) -> StragglerFinding:
        record = self._records[worker]
        return StragglerFinding(worker, statistics.median(record.ratios), self.steps, not record.has_peers, recovered)

    def now(self) -> list[StragglerFinding]:
        """The stragglers that were slow in every one of the last steps of this generation, the slowest first."""
        slow = [self._finding(worker) for worker in self.told if self._records[worker].in_row >= self.steps]
        return sorted(slow, key=lambda finding: (-finding.slowdown, finding.worker))


def median_of_others(ordered: Sequence[float], own: float) -> float | None:
    """The median of `ordered` (sorted) after removing one element equal to `own`; None if nothing is left."""
    count, place = len(ordered) - 1, bisect_left(ordered, own)
    if count < 1:
        return None
    lower, upper = (ordered[k + (k >= place)] for k in ((count - 1) // 2, count // 2))
    return lower if count % 2 else (lower + upper) / 2
