"""How owners share out tensors: few runs each, equally many elements."""

from __future__ import annotations

import heapq
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

CANONICAL_PIECE = 32_768
"""Elements of a flattened tensor whose squares are summed in its own dtype, before float64 takes over (rule 7 of the numerics
contract in raypar/README.md).

Owners' runs begin at multiples of it. So an owner computes whole terms of the norm, and optimizers on runs of elements,
fused ones too, have the bits of the whole tensor.
"""


@dataclass(frozen=True)
class BalancedTensorShares:
    """Flattened tensors, shared out over `owners` in canonical pieces: each piece goes to an owner with least elements so far.

    Full pieces come first, tensor by tensor, and an owner's pieces of a tensor lie side by side. The shorter pieces at
    the tensors' ends follow, the longest first; they even out what the full ones leave.
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
    """Which of the tensors of these sizes one owner has, where owners have whole consecutive ones of about equal size."""
    total = max(1, sum(sizes))
    before = accumulate(sizes[:-1], initial=0) if sizes else ()
    owner_of = [owners * start // total for start in before]  # beyond the last where nothing but empty ones follow
    return slice(bisect_left(owner_of, owner), len(owner_of) if owner == owners - 1 else bisect_right(owner_of, owner))
