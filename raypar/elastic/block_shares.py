"""How the blocks of a step are shared out among replicas that are not equally fast. Pure.

A replica's share is a contiguous run of blocks, so shares are bounds between runs. The best ones minimise the time of the
slowest replica; of several such shares those are chosen whose bounds are nearest to the present ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise

from raypar.plan import ParallelPlan
from raypar.plan.microbatches import contiguous_part

Shares = tuple[int, ...]
"""By replica: its number of blocks."""
LEAST_GAIN = 1.05
"""Shares change if the slowest replica of a stage then needs less than its present time divided by this."""


def even_shares(replicas: int, blocks: int) -> Shares:
    """The shares of runs of nearly equal length, as a plan without shares has them."""
    return tuple(len(contiguous_part(replica, replicas, blocks)) for replica in range(replicas))


def slowest_replica_s(seconds: Sequence[float], work: Sequence[int], shares: Sequence[int]) -> float:
    """The longest time that a replica computes in a step. `seconds`: by replica, of a microbatch; `work`: microbatches of each
    block."""
    bounds = (0, *accumulate(shares))
    return max(each * sum(work[a:b]) for each, (a, b) in zip(seconds, pairwise(bounds), strict=True))


def choose_shares(seconds: Sequence[float], blocks: int, now: Sequence[int]) -> Shares:
    """The shares with which the slowest replica needs least time, at least one block each. All blocks count as equally long.

    `seconds`: by replica, of a microbatch; `now`: the present shares. There are at least as many blocks as replicas.
    """
    most = _most_blocks(seconds, max(max(seconds), _least_time_per_microbatch(seconds, blocks)))
    bounds, behind = [0], sum(most)
    for replica, wanted in enumerate(accumulate(now)):
        behind -= most[replica]  # the most blocks that the replicas behind this one may have
        least = max(bounds[-1] + 1, blocks - behind)
        last = min(bounds[-1] + most[replica], blocks - (len(seconds) - 1 - replica))
        bounds.append(min(max(wanted, least), last))
    return tuple(b - a for a, b in pairwise(bounds))


def _most_blocks(seconds: Sequence[float], limit_s: float) -> list[int]:
    """By replica: how many blocks it computes within a limit, at least one. `limit_s`: as if a block were one microbatch."""
    return [max(1, int(limit_s / each)) for each in seconds]


def _least_time_per_microbatch(seconds: Sequence[float], blocks: int) -> float:
    """The least `limit_s` of `_most_blocks` within which all blocks are computed: a multiple of some replica's time."""
    low, high = 0.0, max(seconds) * blocks
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if sum(_most_blocks(seconds, middle)) >= blocks else (middle, high)
    return high * (1 + 1e-9)  # rounded up: a replica that needs just as long has its last block too


def plan_with_shares(plan: ParallelPlan, chosen: Mapping[int, Shares], blocks: int) -> ParallelPlan:
    """The plan with these shares, by grid; even ones are those of a plan without shares."""
    return plan.with_shares({grid: () if each == even_shares(len(each), blocks) else each for grid, each in chosen.items()})


def share_out_by_slowdowns(plan: ParallelPlan, slowdowns: Sequence[float], work: Sequence[int]) -> ParallelPlan:
    """The plan with shares for workers of which some are known to be slow; even ones where others gain too little.

    `slowdowns`: by rank, how many times as long as others it takes. The slowest shard decides for its replica.
    """
    chosen: dict[int, Shares] = {}
    for number, grid in enumerate(plan.grids):
        seconds = [max(slowdowns[rank] for rank in replica) for replica in grid]
        if 1 < len(grid) <= len(work) and max(seconds) > 1:
            even = even_shares(len(grid), len(work))
            best = choose_shares(seconds, len(work), even)
            gains = slowest_replica_s(seconds, work, even) >= LEAST_GAIN * slowest_replica_s(seconds, work, best)
            chosen[number] = best if gains else even
    return plan_with_shares(plan, chosen, len(work))
