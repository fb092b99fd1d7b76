"""The naive schedule, model parallelism without pipelining: one microbatch at a time goes through the whole pipeline."""

from __future__ import annotations

from collections.abc import Sequence

from raypar.plan import MicrobatchRouting
from raypar.schedule.instructions import Backward, Compute, Forward, Schedule


def naive_schedule(routing: MicrobatchRouting, warmup: Sequence[int] | None = None) -> Schedule:
    """Orders in which F and B of a microbatch end before the next starts: makespan m (p F + p B); one activation alive.

    Several stages of one worker run in ascending order in the forward pass and in descending order in the backward pass.
    """
    orders: list[tuple[Compute, ...]] = []
    for rank in range(routing.plan.world):
        mine = {stage: set(routing.microbatches_of_worker(stage, rank)) for stage in routing.plan.stages_of(rank)}
        order: list[Compute] = []
        for m in routing.entry_order:
            stages = [stage for stage, microbatches in mine.items() if m in microbatches]
            order += [Forward(stage, m) for stage in stages]
            order += [Backward(stage, m) for stage in reversed(stages)]
        orders.append(tuple(order))
    return tuple(orders)
