"""Replayed steps whose shard count changed; their losses may differ from those that people have seen.

The number of shards of a layer decides the order of its sums. Nothing else of a plan changes the numbers.
"""

from __future__ import annotations

from raypar.plan import ParallelPlan

Shards = tuple[int, ...]
"""The number of shards of every layer."""


def count_shards_per_layer(plan: ParallelPlan) -> Shards:
    """The number of shards of every layer of `plan`."""
    return tuple(stage.shards for stage in plan.stages for _ in range(stage.first, stage.last))


class ShardCountHistory:
    """Remembers with how many shards each step was executed last."""

    def __init__(self, first: int, shards: Shards | None) -> None:
        """`shards`: of the steps from `first` on. None: not known, so that any number of shards counts as another one."""
        self._since: list[tuple[int, Shards | None]] = [(first, shards)]
        """(step, shards of the steps from there on), in ascending order."""

    def begin(self, done: int, shards: Shards, seen: int) -> range:
        """Go on after `done` steps with `shards`. Returns those of the `seen` steps whose numbers may change.

        These are the first replayed step that was executed with other shards, and all after it.
        """
        ends = [*(start for start, _ in self._since[1:]), seen]
        others = (max(start, done) for (start, was), end in zip(self._since, ends, strict=True) if was != shards and end > done)
        first = next(others, seen)
        self._since = [part for part in self._since if part[0] < done]
        if not self._since or self._since[-1][1] != shards:
            self._since.append((done, shards))
        return range(min(first, seen), seen)
