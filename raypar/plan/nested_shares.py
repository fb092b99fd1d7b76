"""How owners divide tensors, so that few elements change hands when an owner comes or goes."""

from __future__ import annotations

import heapq
import math
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from operator import itemgetter

GOLDEN = 2_654_435_769
"""2^32 divided by the golden ratio: multiples of it, modulo 2^32, are spread evenly, however many of them are taken."""


@dataclass
class _Share:
    """What one owner has, while owners are added."""

    load: int = 0
    """Elements."""
    segments: list[tuple[int, int, int]] = field(default_factory=list)
    """Full pieces: (pieces, negative, first, behind the last) of intervals of the sequence of all of them. A heap, but for the
    first one, from which the share gives."""
    loose: list[tuple[int, tuple[int, ...]]] = field(default_factory=list)
    """Ascending: (elements, tensors) of each bundle of what is no full piece: ends of tensors, or a tensor with one owner."""

    def take_loose(self, giver: _Share, place: int) -> None:
        """Take over a bundle that another owner has."""
        bundle = giver.loose.pop(place)
        self.loose.append(bundle)
        self.load += bundle[0]
        giver.load -= bundle[0]

    def take_pieces(self, giver: _Share, count: int, piece: int) -> None:
        """Take over pieces from the end of the giver's first segment, as many as are there."""
        _, start, stop = giver.segments[0]
        cut = max(start, stop - count)
        self.segments.append((cut - stop, cut, stop))
        if start < cut:
            giver.segments[0] = start - cut, start, cut
        else:
            heapq.heappop(giver.segments)
        self.load += (stop - cut) * piece
        giver.load -= (stop - cut) * piece


@dataclass(frozen=True)
class NestedTensorShares:
    """Flattened tensors, divided among `owners` in pieces: equally, and so that another number of owners moves little.

    One owner has everything. Each further owner gets an equal part of what every other one has, who keeps the rest. So when an
    owner comes, only what it gets moves, which is the least; when the last one goes, only what it had. When another one goes,
    the last one takes its place, and what either had moves, nearly. Parts of all elements that move, with the 124 million
    elements in 148 tensors of a GPT-2 (equal parts: of each tensor, one owner's beside the other's):

    | owners before one goes | 3 | 4 | 5 | 6 | 7 | 8 |
    |---|---|---|---|---|---|---|
    | the least, and when the last one goes | 0.333 | 0.250 | 0.200 | 0.167 | 0.143 | 0.125 |
    | when another one goes: (2n - 3) / n (n - 1) | 0.500 | 0.417 | 0.350 | 0.300 | 0.262 | 0.232 |
    | equal parts, the first one goes | 0.730 | 0.685 | 0.706 | 0.725 | 0.750 | 0.758 |

    What an owner gives is one interval of the sequence of all full pieces: the end of the longest that it has. So an owner has
    n - 1 intervals at most, and no more runs than there are tensors, and 2n. Tensors stand in the sequence so that each part of
    it has tensors from all over the model: each owner adds up some of each bucket of gradients.

    The loads of two owners differ by at most a piece, or the largest tensor that is not divided. Why: a new owner takes from
    the one that has most, as long as that one has more afterwards than the new one had before; and more than one item at once
    only as far as neither crosses the mean.
    """

    sizes: tuple[int, ...]
    """Elements of each tensor."""
    owners: int
    """Number of owners."""
    piece: int
    """Runs begin at multiples of so many elements of a tensor."""
    undivided: frozenset[int] = frozenset()
    """Indices of tensors that go to one owner each, whole."""

    def runs_of_owner(self, owner: int) -> Iterator[tuple[int, int, int]]:
        """The runs of one owner, ascending: (index of the tensor, first element, element behind the last)."""
        share, runs = self._shares[owner], []
        for _, start, stop in share.segments:
            place = bisect_right(self._starts, start) - 1
            while start < stop:
                before, behind = self._starts[place], min(stop, self._starts[place + 1])
                runs.append((self._sequence[place], (start - before) * self.piece, (behind - before) * self.piece))
                start, place = behind, place + 1
        for _, tensors in share.loose:
            runs += [(tensor, self._full[tensor] * self.piece, self.sizes[tensor]) for tensor in tensors]
        last = None
        for run in sorted(runs):
            if last is not None and (last[0], last[2]) == run[:2]:
                last = (*last[:2], run[2])
                continue
            if last is not None:
                yield last
            last = run
        if last is not None:
            yield last

    @cached_property
    def _full(self) -> tuple[int, ...]:
        """By tensor: its full pieces, which are given out one by one."""
        return tuple(0 if i in self.undivided else size // self.piece for i, size in enumerate(self.sizes))

    @cached_property
    def _sequence(self) -> tuple[int, ...]:
        """The tensors with full pieces, as they stand in the sequence of these."""
        divided = [index for index, full in enumerate(self._full) if full]
        places = sorted(range(len(divided)), key=lambda place: place * GOLDEN % 2**32)
        return tuple(divided[place] for place in places)

    @cached_property
    def _starts(self) -> tuple[int, ...]:
        """By place in the sequence: the full pieces before the tensor there; and the number of all."""
        return tuple(accumulate((self._full[tensor] for tensor in self._sequence), initial=0))

    @cached_property
    def _shares(self) -> tuple[_Share, ...]:
        """By owner."""
        total = sum(self.sizes)
        shares = [_Share(total, [(-self._starts[-1], 0, self._starts[-1])] if self._sequence else [], sorted(self._bundles()))]
        for count in range(2, self.owners + 1):
            shares.append(self._share_of_new_owner(shares, -(-total // count)))
        return tuple(shares)

    def _bundles(self) -> Iterator[tuple[int, tuple[int, ...]]]:
        """(elements, tensors) of what is no full piece. Ends are put together to about a piece, the smallest are not: they even
        out the rest."""
        left = [size - full * self.piece for size, full in zip(self.sizes, self._full, strict=True)]
        small = self.piece // 16
        yield from ((size, (index,)) for index, size in enumerate(left) if 0 < size < small or size > self.piece)
        ends = sorted((size, index) for index, size in enumerate(left) if small <= size <= self.piece and size)
        while ends:
            size, index = ends.pop()
            bundle = [index]
            while place := bisect_right(ends, (self.piece - size, len(left))):
                more, index = ends.pop(place - 1)
                size += more
                bundle.append(index)
            yield size, tuple(bundle)

    def _share_of_new_owner(self, shares: list[_Share], mean: int) -> _Share:
        """What a new owner takes from the others. `mean`: the elements of an owner then, rounded up."""
        new = _Share()
        for share in shares:
            if share.segments:  # the longest first
                heapq.heapreplace(share.segments, share.segments[0])
        fullest = [(-share.load, number) for number, share in enumerate(shares)]
        heapq.heapify(fullest)
        while fullest and self._take(new, shares[fullest[0][1]], mean):
            number = fullest[0][1]
            heapq.heapreplace(fullest, (-shares[number].load, number))
        new.loose.sort()
        new.segments = _merged(new.segments)
        return new

    def _take(self, new: _Share, giver: _Share, mean: int) -> bool:
        """Let a new owner take something from the one that has most; False if nothing makes their difference smaller."""
        space = min(giver.load - mean, mean - new.load)
        fits = bisect_right(giver.loose, (space, (len(self.sizes),))) - 1
        count = space // self.piece if giver.segments else 0
        if fits >= 0 and (count <= 0 or giver.loose[fits][0] > self.piece):
            new.take_loose(giver, fits)
            return True
        if count <= 0:
            smallest = giver.loose[0][0] if giver.loose else math.inf
            if new.load + min(smallest, self.piece if giver.segments else math.inf) >= giver.load:
                return False
            if not giver.segments or smallest < self.piece:
                new.take_loose(giver, 0)
                return True
        new.take_pieces(giver, max(1, count), self.piece)
        return True


def _merged(segments: list[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """The same segments, those that touch put together, the longest first."""
    found: list[tuple[int, int]] = []
    for _, start, stop in sorted(segments, key=itemgetter(1)):
        if found and found[-1][1] == start:
            found[-1] = found[-1][0], stop
        else:
            found.append((start, stop))
    return sorted((start - stop, start, stop) for start, stop in found)
