"""The steps of an all-reduce by recursive halving and doubling, over a group of 2^k ranks.

In step j = 0, 1, ..., k - 1 the i-th rank exchanges with the rank i ^ 2^j: each sends the half of its part that the other one
keeps, and adds what it gets, the lower rank's sum first. So after step j a sum is one over 2^(j+1) neighbouring ranks: the
additions are those of the tree over ranks (`plan/addition_tree.py`). Then everybody owns the total of one slice, and the same
messages go back the other way, the farthest partner first. Each rank sends 2k messages and, as in a ring, 2 (1 - 1/2^k) n
elements. (Thakur, Rabenseifner and Gropp 2005, section 4.5, begin with the farthest partner.)

What is halved is the set of owners: the lower rank of a pair keeps the slices of owners whose bit j is 0. The slices lie in the
order of the owners' bits reversed, so that each half is one contiguous message: the i-th rank owns the slice at the place that
has the bits of i in reverse.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class HalvingStep:
    """One exchange of a rank, in elements of the flat tensor."""

    partner: int
    """Index of the other rank in the group."""
    kept: slice
    """What this rank keeps and adds to; what it sends on the way back."""
    given: slice
    """What the partner keeps; what comes back from it."""

    def add(self, flat: Tensor, received: Tensor, own_index: int) -> None:
        """Add the partner's sums to those that are kept, the lower rank's first."""
        kept = flat[self.kept]
        lower, upper = (kept, received) if own_index < self.partner else (received, kept)
        torch.add(lower, upper, out=kept)


def halving_steps(slices: Sequence[tuple[int, int]], own_index: int) -> list[HalvingStep]:
    """The steps of one rank, nearest partner first. `slices`: (start, stop) of each, adjacent; one for each of 2^k ranks."""
    bounds = [start for start, _ in slices] + [slices[-1][1]]
    steps: list[HalvingStep] = []
    first, stop, bit = 0, len(slices), 1
    while bit < len(slices):
        middle = (first + stop) // 2
        low, high = slice(bounds[first], bounds[middle]), slice(bounds[middle], bounds[stop])
        keeps_low = not own_index & bit
        steps.append(HalvingStep(own_index ^ bit, *((low, high) if keeps_low else (high, low))))
        first, stop = (first, middle) if keeps_low else (middle, stop)
        bit *= 2
    return steps


def halving_partners(own_index: int, ranks: int) -> list[int]:
    """The ranks, as indices in the group, with which a rank of 2^k exchanges messages, the nearest first."""
    return [own_index ^ (1 << step) for step in range(ranks.bit_length() - 1)]


def halving_scratch(slices: Sequence[tuple[int, int]]) -> int:
    """Elements that a rank receives at most in one step."""
    middle = slices[len(slices) // 2][0]
    return max(middle, slices[-1][1] - middle)
