"""Steps that are executed again with other shards than those with which people have seen them: their numbers may differ.

The number of shards of a layer decides the order of its sums, nothing else of a plan does (DESIGN 4.5, 4.11).
"""

from __future__ import annotations

from raypar.plan import ParallelPlan

Shards = tuple[int, ...]
"""Of every layer."""


def shards_of(plan: ParallelPlan) -> Shards:
    """By layer."""
    return tuple(stage.shards for stage in plan.stages for _ in range(stage.first, stage.last))


class Replay:
    """`shards`: those of the steps from `first` on; None: not known, so they count as others."""

    def __init__(self, first: int, shards: Shards | None) -> None:
        self._since: list[tuple[int, Shards | None]] = [(first, shards)]
        """(step, shards of the steps from there on), ascending: as they were executed last."""

    def begin(self, done: int, shards: Shards, seen: int) -> range:
        """A generation goes on after `done` steps. Returns those, up to the `seen`, that may come out otherwise: the first that
        was executed with other shards, and all after it."""
        ends = [*(start for start, _ in self._since[1:]), seen]
        others = (max(start, done) for (start, was), end in zip(self._since, ends, strict=True) if was != shards and end > done)
        first = next(others, seen)
        self._since = [part for part in self._since if part[0] < done]
        if not self._since or self._since[-1][1] != shards:
            self._since.append((done, shards))
        return range(min(first, seen), seen)
