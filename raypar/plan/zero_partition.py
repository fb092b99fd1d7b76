"""The division of tensors among owners: few runs of elements for each owner, about equally many elements."""

from __future__ import annotations

import heapq
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

CANONICAL_PIECE = 32_768
"""Elements of a flattened tensor whose squares are summed in its own dtype, before float64 takes over (rule 7 of the numerics
contract, raypar/NUMERICS.md).

Owners' runs begin at multiples of it. So an owner computes whole terms of the norm, and an optimizer that works on
runs of elements, a fused one too, gives the same bits as one that works on the whole tensor.
"""


@dataclass(frozen=True)
class BalancedTensorShares:
    """Flattened tensors, divided among `owners` in canonical pieces: each piece goes to an owner with the fewest elements.

    Full pieces are given out first, tensor by tensor, and an owner's pieces of a tensor are adjacent. The shorter pieces at the
    ends of tensors follow, the longest first, and even out the numbers of elements.
    """

    sizes: tuple[int, ...]
    """Elements of each tensor."""
    owners: int
    """Number of owners."""

    def runs_of_owner(self, owner: int) -> Iterator[tuple[int, int, int]]:
        """The runs of one owner, ascending: (index of the tensor, first element, element behind the last)."""
        for index, size in enumerate(self.sizes):
            full = size // CANONICAL_PIECE
            each, more = divmod(full, self.owners)
            place = (owner - self._next_owner[index]) % self.owners
            first = place * each + min(place, more)
            start, stop = first * CANONICAL_PIECE, (first + each + (place < more)) * CANONICAL_PIECE
            last = self._owner_of_end.get(index) == owner
            if last and stop == full * CANONICAL_PIECE and start < stop:
                yield index, start, size
                continue
            if start < stop:
                yield index, start, stop
            if last:
                yield index, full * CANONICAL_PIECE, size

    @cached_property
    def _next_owner(self) -> tuple[int, ...]:
        """By tensor: the owner whose turn it is when the tensor's full pieces are given out."""
        counts = accumulate((size // CANONICAL_PIECE for size in self.sizes), initial=0)
        return tuple(count % self.owners for count in counts)

    @cached_property
    def _owner_of_end(self) -> dict[int, int]:
        """Tensor -> owner of the shorter piece at its end."""
        each, more = divmod(sum(size // CANONICAL_PIECE for size in self.sizes), self.owners)
        loads = [((each + (owner < more)) * CANONICAL_PIECE, owner) for owner in range(self.owners)]
        heapq.heapify(loads)
        ends = [(-(size % CANONICAL_PIECE), index) for index, size in enumerate(self.sizes) if size % CANONICAL_PIECE]
        found = {}
        for size, index in sorted(ends):
            load, owner = loads[0]
            heapq.heapreplace(loads, (load - size, owner))
            found[index] = owner
        return found


def consecutive_tensor_share(sizes: Sequence[int], owner: int, owners: int) -> slice:
    """The slice of tensors that belongs to one owner: owners get whole, consecutive tensors of about equal total size."""
    total = max(1, sum(sizes))
    before = accumulate(sizes[:-1], initial=0) if sizes else ()
    owner_of = [owners * start // total for start in before]  # beyond the last owner if only empty tensors follow
    return slice(bisect_left(owner_of, owner), len(owner_of) if owner == owners - 1 else bisect_right(owner_of, owner))
