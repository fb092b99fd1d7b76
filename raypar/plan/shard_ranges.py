"""Ranges of indices of one dim of a tensor, and the ranges that each shard holds."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod

from raypar.plan.microbatches import contiguous_part

IndexRange = tuple[int, int]
"""Indices `[start, stop)`."""
IndexRanges = tuple[IndexRange, ...]
"""Ascending, nonempty ranges, adjacent ones joined; so equal sets of indices are equal tuples."""


def merge_ranges(spans: Iterable[IndexRange]) -> IndexRanges:
    """The same indices in as few ranges as possible."""
    found: list[IndexRange] = []
    for start, stop in sorted(s for s in spans if s[0] < s[1]):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(stop, found[-1][1]))
        else:
            found.append((start, stop))
    return tuple(found)


def count_indices(spans: IndexRanges) -> int:
    """Number of indices."""
    return sum(stop - start for start, stop in spans)


def even_ranges_by_shard(total: int, shards: int) -> tuple[IndexRanges, ...]:
    """By shard: its contiguous range of `total` indices; sizes differ by one at most (7 over 2: 3 and 4)."""
    return tuple(merge_ranges([(p.start, p.stop)]) for p in (contiguous_part(i, shards, total) for i in range(shards)))


def scale_ranges(spans: IndexRanges, unit: int) -> IndexRanges:
    """The ranges in which each index has become `unit` consecutive ones (heads -> features)."""
    return tuple((start * unit, stop * unit) for start, stop in spans)


def shift_ranges(spans: IndexRanges, by: int) -> IndexRanges:
    """All indices moved up by `by`."""
    return tuple((start + by, stop + by) for start, stop in spans)


def repeat_ranges(spans: IndexRanges, period: int, times: int) -> IndexRanges:
    """The same indices in each of `times` consecutive parts of `period` indices."""
    return merge_ranges(s for i in range(times) for s in shift_ranges(spans, i * period))


def ranges_within(spans: IndexRanges, start: int, stop: int) -> IndexRanges:
    """The indices in `[start, stop)`, counted from `start`."""
    return merge_ranges((max(a, start) - start, min(b, stop) - start) for a, b in spans)


def intersect_ranges(first: IndexRanges, second: IndexRanges) -> IndexRanges:
    """Indices in both."""
    return merge_ranges((max(a, c), min(b, d)) for a, b in first for c, d in second)


def subtract_ranges(first: IndexRanges, second: IndexRanges) -> IndexRanges:
    """Indices of `first` that are not in `second`."""
    left: list[IndexRange] = []
    for start, stop in first:
        for a, b in second:
            if b <= start or a >= stop:
                continue
            left.append((start, a))
            start = max(start, b)
        left.append((start, stop))
    return merge_ranges(left)


@lru_cache(maxsize=1024)
def positions_of_indices(held: IndexRanges, wanted: IndexRanges) -> IndexRanges:
    """Positions of the `wanted` indices among the `held` ones, which must contain them."""
    found, before = [], 0
    for start, stop in held:
        found += [(before + a - start, before + b - start) for a, b in intersect_ranges(((start, stop),), wanted)]
        before += stop - start
    assert count_indices(merge_ranges(found)) == count_indices(wanted), f"{wanted} is not a part of {held}"
    return merge_ranges(found)


def indices_at_positions(held: IndexRanges, start: int, stop: int) -> IndexRanges:
    """The indices at the positions `[start, stop)` among the `held` ones: the inverse of `positions_of_indices`."""
    found, before = [], 0
    for first, last in held:
        found.append((first + max(start - before, 0), min(last, first + stop - before)))
        before += last - first
    return merge_ranges(found)


def matched_ranges(first: IndexRanges, second: IndexRanges) -> list[tuple[IndexRange, IndexRange]]:
    """Pairs of runs of equal length that cover both sides, which list equally many indices in the same order."""
    found = []
    left, right = [list(s) for s in first], [list(s) for s in second]
    while left:
        n = min(left[0][1] - left[0][0], right[0][1] - right[0][0])
        found.append(((left[0][0], left[0][0] + n), (right[0][0], right[0][0] + n)))
        for side in (left, right):
            side[0][0] += n
            if side[0][0] == side[0][1]:
                side.pop(0)
    return found


def view_ranges_as_dims(spans: IndexRanges, sizes: Sequence[int]) -> tuple[int, IndexRanges] | None:
    """(dim, indices in it) for the same elements when the dim is viewed as several dims of `sizes`.

    None if they are not some indices of one of the new dims, with all indices of the others.
    """
    whole = ((0, prod(sizes)),)
    for place, size in enumerate(sizes):
        inner = prod(sizes[place + 1 :])
        if size == 1 and (len(sizes) > 1 and spans != whole):
            continue
        first = ranges_within(spans, 0, size * inner)
        if any(start % inner or stop % inner for start, stop in first):
            continue
        if repeat_ranges(first, size * inner, prod(sizes[:place])) == spans:
            return place, merge_ranges((start // inner, stop // inner) for start, stop in first)
    return None


@dataclass(frozen=True, slots=True)
class TensorCut:
    """How one parameter is cut over shards, along one dim.

    Several shards may hold the same indices (fewer key heads than shards); the first of these shards *owns* them.
    """

    dim: int
    """The dim along which the parameter is cut."""
    whole_size: int
    """Length of that dim in the unsharded parameter."""
    indices_by_shard: tuple[IndexRanges, ...]
    """By shard: the indices of that dim that it holds."""

    def owned(self, shard: int) -> IndexRanges:
        """The indices that this shard counts in the norm and writes to checkpoints. Every index has one owner."""
        return subtract_ranges(
            self.indices_by_shard[shard], merge_ranges(s for spans in self.indices_by_shard[:shard] for s in spans)
        )

    def over_runs(self, runs: Sequence[range]) -> TensorCut:
        """The same cut for shards that hold a run of these shards each."""
        held = (merge_ranges(s for shard in run for s in self.indices_by_shard[shard]) for run in runs)
        return TensorCut(self.dim, self.whole_size, tuple(held))

    @property
    def overlaps(self) -> bool:
        """Whether several shards hold the same indices."""
        return sum(map(count_indices, self.indices_by_shard)) > count_indices(
            merge_ranges(span for spans in self.indices_by_shard for span in spans)
        )

    @property
    def shared(self) -> IndexRanges:
        """Indices that more than one shard holds; each of these shards has a partial sum of their gradient."""
        pairs = itertools.combinations(self.indices_by_shard, 2)
        return merge_ranges(s for one, other in pairs for s in intersect_ranges(one, other))

    def element_ranges(self, spans: IndexRanges, elements: int) -> IndexRanges:
        """The ranges of elements at the indices `spans`, of a whole parameter with so many `elements`.

        Elements are numbered with `dim` as the slowest dim, alike under every plan. So a shard's slice is a few ranges of
        elements, whichever dim is cut.
        """
        return scale_ranges(spans, elements // self.whole_size)
