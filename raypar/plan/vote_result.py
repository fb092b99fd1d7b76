"""What the workers' votes on a step add up to: its loss, the gradient's norm, and whether it is applied."""

from __future__ import annotations

from dataclasses import dataclass, field


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
    """Factor by which every gradient is multiplied once: 1 / (`count` x `loss_scale`), or less if the norm is clipped."""
    skipped: bool
    """Whether the step is skipped because the loss or the norm is not finite."""
    defined: int = 0
    """See `Ballot.defined`."""
    loss_scale: float | None = None
    """The scale from which the backward pass started, which loss and norm are without; None: nothing is scaled."""
    lr: float | None = field(default=None, compare=False)
    """The learning rate with which a worker has applied the step, if it knows one: no part of the vote."""
