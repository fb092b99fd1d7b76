"""Stragglers: workers that compute much slower than they should, for long. Reported; replaced where the job says so.

What is compared is the time a worker computes (waiting does not count) per microbatch: with the other replicas of the same
place in the plan, shard by shard, who compute the same; where a worker is the only one, with its own first steps of the
generation.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

LEAST_S = 1e-3
"""Per microbatch: what is slower by less costs nobody anything and is noise as often as not."""


@dataclass(frozen=True, slots=True)
class StragglerFinding:
    """`worker` has taken `times` as long as it should for `steps` steps in a row; or, when `over`, it does no longer.

    `alone`: it was compared with its own first steps, because nobody else does what it does.
    """

    worker: int
    times: float
    steps: int
    alone: bool
    over: bool = False


@dataclass
class _Record:
    """Of one worker in this generation. `ratios`: of its last steps to what they should have been."""

    peers: tuple[int, ...]
    ratios: deque[float]
    first: list[float] = field(default_factory=list)


class StragglerWatch:
    """Finds stragglers from each step's compute times.

    `times`: a step that took more than this multiple of the expected time is slow. `steps`: so many slow steps in a row make a
    straggler, and so many in a row that are not slow end it.
    """

    def __init__(self, times: float, steps: int) -> None:
        self.times, self.steps = times, steps
        self.told: set[int] = set()
        """Stragglers, as far as people know."""
        self._records: dict[int, _Record] = {}

    def begin(self, places: Sequence[Sequence[int]]) -> None:
        """A generation begins. `places`: the workers that do the same, for each place of the plan."""
        self._records = {
            worker: _Record(tuple(w for w in place if w != worker), deque(maxlen=self.steps))
            for place in places
            for worker in place
        }
        # Who has nobody to be compared with any more is measured anew.
        self.told = {worker for worker in self.told if worker in self._records and self._records[worker].peers}

    def step(self, busy: Mapping[int, float]) -> list[StragglerFinding]:
        """A step is done. `busy`: seconds that each worker computed for a microbatch. Returns what is new."""
        found = []
        for worker in sorted(busy):
            record = self._records.get(worker)
            should_s = self._should_s(record, busy, busy[worker]) if record is not None else None
            if record is None or should_s is None:
                continue
            late_s = busy[worker] - should_s
            record.ratios.append(busy[worker] / should_s if late_s >= LEAST_S and should_s > 0 else 1.0)
            slow = [ratio > self.times for ratio in record.ratios]
            if len(slow) < self.steps:
                continue
            if all(slow) and worker not in self.told:
                self.told.add(worker)
                found.append(self._finding(worker))
            elif not any(slow) and worker in self.told:
                self.told.discard(worker)
                found.append(self._finding(worker, over=True))
        return found

    def _should_s(self, record: _Record, busy: Mapping[int, float], own_s: float) -> float | None:
        if record.peers:
            known = [busy[peer] for peer in record.peers if peer in busy]
            return statistics.median(known) if known else None
        if len(record.first) < self.steps:
            record.first.append(own_s)
            return None
        return statistics.median(record.first)

    def _finding(self, worker: int, over: bool = False) -> StragglerFinding:
        record = self._records[worker]
        return StragglerFinding(worker, statistics.median(record.ratios), self.steps, not record.peers, over)

    def now(self) -> list[StragglerFinding]:
        """Those that have been too slow in every one of the last steps of this generation, the slowest first."""
        slow = [
            self._finding(worker)
            for worker in self.told
            if len(self._records[worker].ratios) == self.steps and min(self._records[worker].ratios) > self.times
        ]
        return sorted(slow, key=lambda finding: (-finding.times, finding.worker))
