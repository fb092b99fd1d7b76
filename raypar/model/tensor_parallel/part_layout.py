"""Which part of a value one shard has, and what the cut dim means."""

from __future__ import annotations

from dataclasses import dataclass

from raypar.plan.shard_ranges import IndexRanges, even_range

SEQUENCE = "sequence"
"""The axis that sequence parallelism cuts. Others are named by the styles: features, heads, vocabulary."""


@dataclass(frozen=True, slots=True)
class PartLayout:
    """This shard has the indices `ranges` of dim `dim` (counted from the left), which is `size` long in the whole value."""

    dim: int
    size: int
    ranges: IndexRanges
    axis: str
    """What the cut dim counts. Operations move and reshape the dim; its meaning stays the one it was made with."""

    def at(self, dim: int) -> PartLayout:
        """The same part after an operation that has moved the cut dim to `dim`."""
        return PartLayout(dim, self.size, self.ranges, self.axis)

    def narrowed_to(self, ranges: IndexRanges) -> PartLayout:
        """The part with these indices of the same dim."""
        return PartLayout(self.dim, self.size, ranges, self.axis)


def sequence_part(size: int, shard: int, shards: int) -> PartLayout:
    """A shard's part of [batch, sequence, ...] under sequence parallelism, the sequence being `size` long."""
    return PartLayout(1, size, even_range(size, shards)[shard], SEQUENCE)
