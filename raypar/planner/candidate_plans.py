"""The uniform plans that could be chosen for a number of workers: (replicas, stages) x schedules x chunks, layers balanced.

Layers are cut into consecutive stages so that the slowest stage is as fast as possible.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace

from raypar.errors import PlanError
from raypar.plan import Microbatches, ParallelPlan
from raypar.plan.microbatches import contiguous_part
from raypar.planner.model_profile import ModelProfile
from raypar.planner.zero_options import WHOLE, ZeroOption
from raypar.schedule import registry


def balanced_cuts(sums: Sequence[float], stages: int) -> tuple[int, ...]:
    """First layers of stages 1, 2, ... of the contiguous partition whose most expensive stage costs least.

    `sums` [layers + 1] are prefix sums of non-negative layer costs. Exact, by dynamic programming over (stages, layers):
    best(s, i) = min over j of max(best(s - 1, j), cost of [j, i)); the first grows with j, the second shrinks, so the
    crossing is found by bisection: O(stages * layers * log layers). Raises `PlanError` when a stage would be empty.
    """
    layers = len(sums) - 1
    if not 1 <= stages <= layers:
        raise PlanError(f"{layers} layers cannot fill {stages} stages", cure=f"set plan.stages between 1 and {layers}")
    best = list(sums)
    last_cut: list[list[int]] = []
    for stage in range(2, stages + 1):
        row, cut = [float("inf")] * (layers + 1), [0] * (layers + 1)
        for end in range(stage, layers + 1):
            places = range(stage - 1, end)
            crossing = bisect_left(places, True, key=lambda j: best[j] >= sums[end] - sums[j])
            for j in places[max(0, crossing - 1) : crossing + 1]:
                cost = max(best[j], sums[end] - sums[j])
                if cost < row[end]:
                    row[end], cut[end] = cost, j
        last_cut.append(cut)
        best = row
    cuts: list[int] = []
    end = layers
    for cut in reversed(last_cut):
        end = cut[end]
        cuts.append(end)
    return tuple(reversed(cuts))


SCHEDULES: dict[str, tuple[int, ...]] = {"gpipe": (1,), "1f1b": (1,), "interleaved": (2, 3, 4), "zb-h1": (1,), "zb-v": (2,)}
"""Schedule -> numbers of chunks that a worker may have under it. `naive` is left out: it is never better than GPipe. A pipeline
of one stage gets 1F1B, which keeps one activation."""


@dataclass(frozen=True)
class PlanCandidate:
    """One plan with its schedule.

    `bound_ms`: a lower bound of a step: the compute of its busiest worker, or of all workers on the processors they share.
    """

    replicas: int
    stages: int
    schedule: str
    chunks: int
    plan: ParallelPlan
    bound_ms: float
    shards: int = 1

    @property
    def is_yardstick(self) -> bool:
        """Whether this is one of the plans with which people compare others: one worker, or two replicas of all layers."""
        return self.stages == 1 and self.replicas <= 2 and self.shards == 1


def enumerate_candidates(
    profile: ModelProfile,
    workers: int,
    cut: Microbatches,
    shards: int = 1,
    recompute: Collection[int] = (),
    virtual_shards: int = 0,
    zero: ZeroOption = WHOLE,
    zero_holders: int = 1,
) -> Iterator[PlanCandidate]:
    """Every uniform plan on at most `workers` workers in which each worker has work. `shards`: how many each stage has; 0: any
    divisor of `virtual_shards`, the job's, which is 0 where none are given. `zero`: how the replicas of all divide state,
    `zero_holders`: how many of them hold each part.

    So there are no more replicas than blocks or microbatches, no more stages than layers, or than
    the optimizer allows. Layers are cut so that the slowest stage is as fast as possible.
    """
    if not shards:
        counts = [count for count in range(1, min(workers, virtual_shards) + 1) if virtual_shards % count == 0]
        for count in counts:
            yield from enumerate_candidates(profile, workers, cut, count, recompute, virtual_shards, zero, zero_holders)
        return
    layers, seats = len(profile.layers), workers // shards
    for stages in range(1, min(seats, layers, profile.most_stages or layers) + 1):
        for replicas in range(1, min(seats // stages, cut.blocks, cut.count) + 1):
            for schedule in SCHEDULES if stages > 1 else ("1f1b",):
                for chunks in SCHEDULES[schedule]:
                    if stages * chunks <= layers:
                        made = _candidate(profile, replicas, stages, shards, schedule, chunks, cut, recompute)
                        made = replace(made, plan=zero.of(made.plan, zero_holders)) if zero.level else made
                        yield replace(made, plan=made.plan.with_virtual_shards(virtual_shards)) if virtual_shards else made


def _candidate(
    profile: ModelProfile,
    replicas: int,
    stages: int,
    shards: int,
    schedule: str,
    chunks: int,
    cut: Microbatches,
    recompute: Collection[int],
) -> PlanCandidate:
    sums = profile.work_sums()
    cuts = balanced_cuts(sums, stages * chunks)
    plan = ParallelPlan.mesh(
        dp=replicas,
        pp=stages,
        tp=shards,
        layers=len(profile.layers),
        chunks=chunks,
        placement=registry.placement_of_schedule(schedule),
        cuts=cuts,
        recompute=recompute,
    )
    busiest = max(
        sum(sums[plan.stages[s].last] - sums[plan.stages[s].first] for s in chunks_here) for chunks_here in plan.stages_of_grid
    )
    most = max(
        sum(len(cut.microbatches_of_block(b)) for b in contiguous_part(r, replicas, cut.blocks)) for r in range(replicas)
    )
    bound = busiest * most / shards
    if profile.processors is not None:
        bound = max(bound, sums[-1] * cut.count / profile.processors)
    return PlanCandidate(replicas, stages, schedule, chunks, plan, bound, shards)
