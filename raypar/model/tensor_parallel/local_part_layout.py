"""Describes which part of an activation (not of a parameter) one shard has, and what the cut dim counts."""

from __future__ import annotations

from dataclasses import dataclass

from raypar.plan.shard_ranges import IndexRanges, even_ranges_by_shard

SEQUENCE = "sequence"
"""The axis that sequence parallelism cuts. Others are named by the styles: heads, vocabulary."""
SAMPLES = "samples"
"""The axis that a layout divides which has `samples: shards`."""
FEATURES = "features"
"""The axis of what column layers make."""
SPATIAL = "rows"
"""The axis of values that are cut along a spatial dim. Parts are even, unless an operation has moved or reshaped the dim."""


@dataclass(frozen=True, slots=True)
class LocalPartLayout:
    """This shard has the indices `ranges` of dim `dim` (counted from the left), which is `size` long in the whole value."""

    dim: int
    size: int
    ranges: IndexRanges
    axis: str
    """What the cut dim counts. Operations move and reshape the dim; its meaning stays the one it was made with."""

    def moved_to(self, dim: int) -> LocalPartLayout:
        """The same part after an operation that has moved the cut dim to `dim`."""
        return LocalPartLayout(dim, self.size, self.ranges, self.axis)

    def narrowed_to(self, ranges: IndexRanges) -> LocalPartLayout:
        """The part with these indices of the same dim."""
        return LocalPartLayout(self.dim, self.size, ranges, self.axis)


def sequence_part_layout(size: int, shard: int, shards: int) -> LocalPartLayout:
    """A shard's part of [batch, sequence, ...] under sequence parallelism, the sequence being `size` long."""
    return LocalPartLayout(1, size, even_ranges_by_shard(size, shards)[shard], SEQUENCE)


def samples_part_layout(size: int, shard: int, shards: int) -> LocalPartLayout:
    """A shard's part of [samples, ...] where a layout divides the samples, of which there are `size`."""
    return LocalPartLayout(0, size, even_ranges_by_shard(size, shards)[shard], SAMPLES)
