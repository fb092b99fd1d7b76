"""Replayed steps whose shard count changed; their losses may differ from those already reported.

The number of shards of a layer decides the order of its sums. Nothing else of a plan changes the results.
"""

from __future__ import annotations

Shards = tuple[int, ...]
"""The number of shards of every layer (`ParallelPlan.shards_by_layer`)."""


class ShardCountHistory:
    """Remembers the number of shards of every layer with which each step was executed last."""

    def __init__(self, first: int, shards: Shards | None) -> None:
        """`shards`: numbers of shards for the steps from `first` on; None: not known, which counts as different from any."""
        self._since: list[tuple[int, Shards | None]] = [(first, shards)]
        """(step, shards of the steps from there on), in ascending order."""

    def begin(self, done: int, shards: Shards, seen: int) -> range:
        """Record that the run goes on after `done` steps with `shards`. Returns the steps whose results may change.

        They are the first replayed step that was executed with other shards, and all steps after it that were seen, up to
        step number `seen`.
        """
        ends = [*(start for start, _ in self._since[1:]), seen]
        others = (max(start, done) for (start, was), end in zip(self._since, ends, strict=True) if was != shards and end > done)
        first = next(others, seen)
        self._since = [part for part in self._since if part[0] < done]
        if not self._since or self._since[-1][1] != shards:
            self._since.append((done, shards))
        return range(min(first, seen), seen)
