"""The loss over all microbatches, and the result of a step's vote."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass


def mean_loss(losses: Mapping[int, tuple[float, float]]) -> tuple[float, float]:
    """(mean, count) of microbatch -> (sum, count), added in microbatch order (rule 8 of the numerics contract); the mean is
    NaN where no term counts."""
    total = count = 0.0
    for microbatch in sorted(losses):
        total += losses[microbatch][0]
        count += losses[microbatch][1]
    return total / count if count else math.nan, count


@dataclass(frozen=True, slots=True)
class VoteResult:
    """The combined votes of all workers on a step; the same on every worker, bit for bit."""

    loss: float
    """Sum of the microbatches' loss sums, divided by `count`."""
    count: float
    """Sum of the microbatches' counts, over which the loss is a mean."""
    norm: float
    """Norm of the gradient, divided by `count`, before clipping."""
    factor: float
    """Factor by which every gradient is multiplied once: 1 / `count`, or less if the norm is clipped."""
    skipped: bool
    """Whether the step is skipped because the loss or the norm is not finite."""
