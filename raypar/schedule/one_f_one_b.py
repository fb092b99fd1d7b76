"""The 1F1B schedule: warmup, steady phase, cooldown (Narayanan et al. 2021, arXiv:2104.04473, section 2.2.1)."""

from __future__ import annotations

from collections.abc import Sequence

from raypar.errors import ScheduleError
from raypar.plan import MicrobatchRouting, ParallelPlan
from raypar.schedule.instructions import Backward, Compute, Forward, Schedule


def replicas_by_position(plan: ParallelPlan) -> tuple[int, ...]:
    """The number of replicas of each position."""
    counts = [1] * plan.positions
    for stage in plan.stages:
        counts[stage.position] = stage.replicas
    return tuple(counts)


def default_warmups(plan: ParallelPlan) -> tuple[int, ...]:
    """By position, the forwards of a replica before its first backward: enough to keep every later stage busy.

    w of the last stage is 1; w_s = 1 + ceil(w_(s+1) R_(s+1) / R_s), which is p - s when all stages have as many replicas.
    """
    replicas = replicas_by_position(plan)
    counts = [1]
    for own, after in zip(replicas[-2::-1], replicas[:0:-1], strict=True):
        counts.append(1 - -counts[-1] * after // own)
    return tuple(reversed(counts))


def resolve_warmups(plan: ParallelPlan, given: Sequence[int] | None) -> tuple[int, ...]:
    """By position, the forwards before the first backward: `given` once checked, or `default_warmups` if it is None."""
    if given is None:
        return default_warmups(plan)
    if len(given) != plan.positions or min(given) < 1:
        raise ScheduleError(
            f"warmup {list(given)} for {plan.positions} stages",
            cure="give one number >= 1 per stage: forwards before the first B",
        )
    return tuple(given)


def one_f_one_b(routing: MicrobatchRouting, warmup: Sequence[int] | None = None) -> Schedule:
    """1F1B orders: at most `warmup` activations alive (p - s by default); bubble (p-1)/m of the ideal time."""
    plan = routing.plan
    depths = resolve_warmups(plan, warmup)
    orders: list[tuple[Compute, ...]] = []
    for rank, seat in enumerate(plan.seats):
        (stage,) = plan.stages_of(rank)
        mine = routing.microbatches_of_replica(stage, seat.replica)
        ahead = min(depths[seat.position], len(mine)) - 1 if mine else 0
        order: list[Compute] = [Forward(stage, m) for m in mine[:ahead]]
        for m, behind in zip(mine[ahead:], mine, strict=False):
            order += [Forward(stage, m), Backward(stage, behind)]
        order += [Backward(stage, m) for m in mine[len(mine) - ahead :]]
        orders.append(tuple(order))
    return tuple(orders)
