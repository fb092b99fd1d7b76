"""GPipe, or AFAB: all forwards, then all backwards (Huang et al. 2019, arXiv:1811.06965, section 2.3)."""

from __future__ import annotations

from collections.abc import Sequence

from raypar.plan import MicrobatchRouting
from raypar.schedule.instructions import Backward, Forward, Schedule


def gpipe(routing: MicrobatchRouting, warmup: Sequence[int] | None = None) -> Schedule:
    """GPipe orders: makespan (m + p - 1)(F + B); the activations of all microbatches are alive at once.

    Backwards come in index order (rule 6 of the contract), not in reverse.
    """
    orders = []
    for rank in range(routing.plan.world):
        mine = [(stage, routing.microbatches_of_worker(stage, rank)) for stage in routing.plan.stages_of(rank)]
        forwards = tuple(Forward(stage, m) for stage, microbatches in mine for m in microbatches)
        orders.append(forwards + tuple(Backward(stage, m) for stage, microbatches in reversed(mine) for m in microbatches))
    return tuple(orders)
