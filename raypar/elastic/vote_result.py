"""What a whole vote says."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class VoteResult:
    """What the whole vote says about a step; the same on every worker, bit for bit.

    loss = sum of the microbatches' sums / count; norm is of the scaled gradient, before clipping.
    """

    loss: float
    count: float
    norm: float
    factor: float
    skipped: bool
