"""The naive schedule, model parallelism without pipelining: one microbatch at a time goes through the whole pipeline."""

from __future__ import annotations

from collections.abc import Sequence

from raypar.plan import MicrobatchRouting
from raypar.schedule.instructions import Backward, Compute, Forward, Schedule


def naive_schedule(routing: MicrobatchRouting, warmup: Sequence[int] | None = None) -> Schedule:
    """Orders in which F and B of a microbatch end before the next starts: makespan m (p F + p B); one activation alive.

    Several stages of one worker run in ascending order in the forward pass and in descending order in the backward pass.
    """
    orders: list[list[Compute]] = [[] for _ in routing.plan.seats]
    for rank, seat in enumerate(routing.plan.seats):
        stages = routing.plan.stages_of(rank)
        for m in routing.microbatches_of_replica(stages[0], seat.replica):
            orders[rank] += [Forward(s, m) for s in stages]
            orders[rank] += [Backward(s, m) for s in reversed(stages)]
    return tuple(tuple(order) for order in orders)
