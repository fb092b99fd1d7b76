"""Which indices of one dim each shard holds (DESIGN 4.9: state is addressed by name and slice of the unsharded tensor)."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod

from raypar.plan.microbatches import part

Span = tuple[int, int]
"""Indices `[start, stop)`."""
Spans = tuple[Span, ...]
"""Ascending, not empty, neighbours joined: equal sets of indices are equal tuples."""


def joined(spans: Iterable[Span]) -> Spans:
    """The same indices in the fewest spans."""
    found: list[Span] = []
    for start, stop in sorted(s for s in spans if s[0] < s[1]):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(stop, found[-1][1]))
        else:
            found.append((start, stop))
    return tuple(found)


def count(spans: Spans) -> int:
    """Number of indices."""
    return sum(stop - start for start, stop in spans)


def even(total: int, shards: int) -> tuple[Spans, ...]:
    """`total` indices over shards, contiguous, sizes differing by one at most (7 over 2: 3 and 4)."""
    return tuple(joined([(p.start, p.stop)]) for p in (part(i, shards, total) for i in range(shards)))


def scaled(spans: Spans, unit: int) -> Spans:
    """Every index stands for `unit` consecutive ones (heads -> features)."""
    return tuple((start * unit, stop * unit) for start, stop in spans)


def shifted(spans: Spans, by: int) -> Spans:
    """All indices moved up by `by`."""
    return tuple((start + by, stop + by) for start, stop in spans)


def repeated(spans: Spans, period: int, times: int) -> Spans:
    """The same indices in each of `times` consecutive parts of `period` indices."""
    return joined(s for i in range(times) for s in shifted(spans, i * period))


def within(spans: Spans, start: int, stop: int) -> Spans:
    """Those in `[start, stop)`, counted from `start`."""
    return joined((max(a, start) - start, min(b, stop) - start) for a, b in spans)


def common(first: Spans, second: Spans) -> Spans:
    """Indices in both."""
    return joined((max(a, c), min(b, d)) for a, b in first for c, d in second)


def without(first: Spans, second: Spans) -> Spans:
    """Indices of `first` that are not in `second`."""
    left: list[Span] = []
    for start, stop in first:
        for a, b in second:
            if b <= start or a >= stop:
                continue
            left.append((start, a))
            start = max(start, b)
        left.append((start, stop))
    return joined(left)


@lru_cache(maxsize=1024)
def places(held: Spans, wanted: Spans) -> Spans:
    """Where the `wanted` indices lie among the `held` ones, of which they must be a part."""
    found, before = [], 0
    for start, stop in held:
        found += [(before + a - start, before + b - start) for a, b in common(((start, stop),), wanted)]
        before += stop - start
    assert count(joined(found)) == count(wanted), f"{wanted} is not a part of {held}"
    return joined(found)


def factor(spans: Spans, sizes: Sequence[int]) -> tuple[int, Spans] | None:
    """Indices of a dim that is viewed as several dims of `sizes`: (which of these is cut, the indices held of it).

    None when they are no such product: all of the other dims times some of one.
    """
    whole = ((0, prod(sizes)),)
    for place, size in enumerate(sizes):
        inner = prod(sizes[place + 1 :])
        if size == 1 and (len(sizes) > 1 and spans != whole):
            continue
        first = within(spans, 0, size * inner)
        if any(start % inner or stop % inner for start, stop in first):
            continue
        if repeated(first, size * inner, prod(sizes[:place])) == spans:
            return place, joined((start // inner, stop // inner) for start, stop in first)
    return None


@dataclass(frozen=True, slots=True)
class Cut:
    """How one parameter is cut: along `dim`, `size` long when whole, shard t holding the indices `held[t]`.

    Shards may hold the same indices (fewer key heads than shards); the first that does *owns* them.
    """

    dim: int
    size: int
    held: tuple[Spans, ...]

    def owned(self, shard: int) -> Spans:
        """Indices that this shard counts in the norm and writes to checkpoints: every index has one owner."""
        return without(self.held[shard], joined(s for spans in self.held[:shard] for s in spans))

    @property
    def shared(self) -> Spans:
        """Indices that more than one shard holds; their gradients are partial sums."""
        pairs = itertools.combinations(self.held, 2)
        return joined(s for one, other in pairs for s in common(one, other))

    def pieces(self, spans: Spans, elements: int) -> Spans:
        """Which of the whole parameter's `elements`, numbered with `dim` as the slowest, lie at these indices.

        In this numbering, which no plan changes, what a shard holds of a dim is few runs of elements, whichever dim it is.
        """
        return scaled(spans, elements // self.size)
