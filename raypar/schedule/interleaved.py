"""Interleaved 1F1B: every worker hosts v chunks (Narayanan et al. 2021, arXiv:2104.04473, section 2.2.2)."""

from __future__ import annotations

from collections.abc import Sequence

from raypar.plan import MicrobatchRouting
from raypar.plan.microbatches import contiguous_part
from raypar.schedule.instructions import Backward, Compute, Forward, Schedule
from raypar.schedule.list_scheduling import OpenMicrobatchLimits, build_list_schedule, open_limits_per_replica
from raypar.schedule.one_f_one_b import has_parallel_pipelines, replicas_by_position, resolve_warmups


def interleaved_1f1b(routing: MicrobatchRouting, warmup: Sequence[int] | None = None) -> Schedule:
    """Interleaved orders: bubble (p-1)/(v m) of the ideal time; at most 2(p-s-1) + (v-1)p + 1 chunk activations alive.

    Microbatches go round in groups of p; where m is no multiple of p the groups are larger, as even as can be (a smaller
    one would leave chunks waiting for a round that never fills), and where m < p there is one group of m. `warmup`:
    forwards (of chunks) before the first backward, per position. Positions with different replica counts or shares are
    list-scheduled.
    """
    plan = routing.plan
    pp, replicas = len(plan.grids), replicas_by_position(plan)
    chunks = len(plan.stages) // pp
    ahead = resolve_warmups(plan, warmup) if warmup is not None else None
    if not has_parallel_pipelines(plan):
        depth = ahead or open_limits_per_replica(replicas, [2 * (pp - s - 1) + (chunks - 1) * pp + 1 for s in range(pp)])
        return build_list_schedule(routing, OpenMicrobatchLimits(depth, depth, group=pp * max(replicas)), split=False)
    orders: list[tuple[Compute, ...]] = []
    for rank in range(plan.world):
        role, stages = plan.only_role(rank), plan.stages_of(rank)
        mine = routing.microbatches_of_worker(stages[0], rank)
        rounds = max(1, len(mine) // pp)
        groups = [[mine[i] for i in contiguous_part(n, rounds, len(mine))] for n in range(rounds)]
        size = max(len(group) for group in groups)
        forwards: list[Compute] = [Forward(s, m) for group in groups for s in stages for m in group]
        backwards: list[Compute] = [Backward(s, m) for group in groups for s in reversed(stages) for m in group]
        depth_here = 2 * (pp - role.grid - 1) + (len(stages) - 1) * size if ahead is None else ahead[role.grid] - 1
        first = min(depth_here, len(forwards))
        order = forwards[:first]
        for f, b in zip(forwards[first:], backwards, strict=False):
            order += [f, b]
        orders.append(tuple(order + backwards[len(forwards) - first :]))
    return tuple(orders)
