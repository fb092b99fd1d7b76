"""Zero-bubble schedules: the backward pass split into input (I) and weight gradients (W), W filling what would be bubble.

ZB-H1: Qi et al. 2024, arXiv:2401.10241, section 2.3. ZB-V: Qi et al. 2024, arXiv:2405.15362 (controllable memory), section 4.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from raypar.plan import MicrobatchRouting
from raypar.schedule.instructions import BackwardInput, BackwardWeight, Compute, Forward, Schedule
from raypar.schedule.list_scheduling import OpenMicrobatchLimits, build_list_schedule, open_limits_per_replica
from raypar.schedule.one_f_one_b import has_parallel_pipelines, replicas_by_position, resolve_warmups


def zb_h1(routing: MicrobatchRouting, warmup: Sequence[int] | None = None) -> Schedule:
    """ZB-H1 orders: bubble (p-1)(F + I - W) while W <= min(F, I), a third of that of 1F1B when all are equal.

    For larger W the bubble is (p-1) max(F, I). Every worker keeps as many activations as the first worker of 1F1B: min(p, m).
    Positions with different replica counts or shares are list-scheduled.
    """
    plan = routing.plan
    depth, replicas = resolve_warmups(plan, warmup), replicas_by_position(plan)
    if not has_parallel_pipelines(plan):
        alive = tuple(max(own, -(-depth[0] * replicas[0] // r)) for own, r in zip(depth, replicas, strict=True))
        return build_list_schedule(routing, OpenMicrobatchLimits(depth, alive, group=1), split=True)
    orders: list[tuple[Compute, ...]] = []
    for rank in range(plan.world):
        role = plan.only_role(rank)
        (stage,) = plan.stages_of(rank)
        mine = routing.microbatches_of_worker(stage, rank)
        late = max(depth) - depth[role.grid]  # W of a microbatch follows I of the `late`-th after it
        ahead = min(depth[role.grid], len(mine)) - 1 if mine else 0
        order: list[Compute] = [Forward(stage, m) for m in mine[:ahead]]
        for at, m in enumerate(mine):
            order += [Forward(stage, f) for f in mine[ahead + at : ahead + at + 1]]
            order.append(BackwardInput(stage, m))
            if at >= late:
                order.append(BackwardWeight(stage, mine[at - late]))
        order += [BackwardWeight(stage, m) for m in mine[max(0, len(mine) - late) :]]
        orders.append(tuple(order))
    return tuple(orders)


def zb_v(routing: MicrobatchRouting, warmup: Sequence[int] | None = None) -> Schedule:
    """ZB-V orders: two chunks a worker in a V, so that the first worker also computes the loss.

    With F = I = W and m >= 2p - 1 the bubble is (p-1) F / 2, F of both chunks together; min(p, m) activations on every worker.
    Positions with different replica counts or shares, or a given `warmup` (forwards of chunks), are list-scheduled.
    """
    plan = routing.plan
    replicas = replicas_by_position(plan)
    if warmup is not None or not has_parallel_pipelines(plan):
        given = resolve_warmups(plan, warmup) if warmup is not None else None
        depth = given or open_limits_per_replica(replicas, [2 * len(plan.grids)] * len(plan.grids))
        return build_list_schedule(routing, OpenMicrobatchLimits(depth, depth, group=1), split=True)
    orders: list[tuple[Compute, ...]] = []
    for rank in range(plan.world):
        role = plan.only_role(rank)
        down, up = plan.stages_of(rank)
        mine = routing.microbatches_of_replica(down, role.replica)
        orders.append(tuple(_v_order(len(plan.grids), role.grid, down, up, mine)))
    return tuple(orders)


def _v_order(pp: int, position: int, down: int, up: int, mine: Sequence[int]) -> list[Compute]:
    """One worker's order: the phases of the paper's figure 4 for at least 2p - 1 microbatches, less those that do not exist."""
    size = max(2 * pp - 1, len(mine))
    order: list[Compute] = []
    count: Counter[tuple[type[Compute], int]] = Counter()

    def add(stage: int, *kinds: type[Compute]) -> None:
        for kind in kinds:
            at = count[kind, stage]
            count[kind, stage] += 1
            if at < len(mine):
                order.append(kind(stage, mine[at]))

    for _ in range(2 * (pp - position) - 1):
        add(down, Forward)
    for _ in range(position):
        add(up, Forward)
        add(down, Forward)
    for _ in range(pp - position):
        add(up, Forward, BackwardInput, BackwardWeight)
    while count[Forward, up] < count[Forward, down] or count[Forward, down] < size:
        if count[Forward, down] < size:
            add(down, Forward)
        add(down, BackwardInput, BackwardWeight)
        add(up, Forward, BackwardInput, BackwardWeight)
    for _ in range(position):
        add(down, BackwardInput)
        add(up, BackwardInput)
    for _ in range(pp - position):
        add(down, BackwardInput, BackwardWeight)
    for stage in (up, down):
        while count[BackwardWeight, stage] < count[BackwardInput, stage]:
            add(stage, BackwardWeight)
    return order
