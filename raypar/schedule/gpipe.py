"""GPipe, or AFAB: all forwards, then all backwards (Huang et al. 2019, arXiv:1811.06965, section 2.3)."""

from __future__ import annotations

from collections.abc import Sequence

from raypar.plan import MicrobatchRouting
from raypar.schedule.instructions import Backward, Compute, Forward, Schedule


def gpipe(routing: MicrobatchRouting, warmup: Sequence[int] | None = None) -> Schedule:
    """GPipe orders: makespan (m + p - 1)(F + B); the activations of all microbatches are alive at once.

    Backwards come in index order (rule 6 of the contract), not in reverse.
    """
    orders: list[tuple[Compute, ...]] = []
    for rank, seat in enumerate(routing.plan.seats):
        stages = routing.plan.stages_of(rank)
        mine = routing.microbatches_of_replica(stages[0], seat.replica)
        orders.append(
            tuple(Forward(s, m) for s in stages for m in mine) + tuple(Backward(s, m) for s in reversed(stages) for m in mine)
        )
    return tuple(orders)
