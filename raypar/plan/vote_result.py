"""The result of a step's vote."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class VoteResult:
    """What the votes of all workers on a step add up to; the same on every worker, bit for bit."""

    loss: float
    """Sum of the microbatches' loss sums, divided by `count`."""
    count: float
    """Sum of the microbatches' counts: what the loss is a mean over."""
    norm: float
    """Norm of the gradient, divided by `count`, before clipping."""
    factor: float
    """Every gradient is multiplied by it once: 1 / `count`, and less where the norm is clipped."""
    skipped: bool
    """Whether the loss or the norm is not finite; then nothing is applied."""
