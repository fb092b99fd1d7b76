"""What a worker is predicted to hold in memory, and, where that was too much, which plans are predicted to hold less."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from raypar.errors import PlanError
from raypar.plan import Microbatches, MicrobatchRouting, ParallelPlan
from raypar.plan.ownership import STATE_KIND_NOUNS, StateKind
from raypar.planner.layer_partition import balanced_cuts
from raypar.planner.model_profile import ModelProfile
from raypar.planner.plan_search import format_mib, predict_step, state_bytes
from raypar.schedule import registry


@dataclass(frozen=True, slots=True)
class MemorySheet:
    """Bytes that one worker holds."""

    state: Mapping[StateKind, int]
    """Kind of state -> its bytes."""
    activations: int
    """Bytes of the activations at the peak of a step."""

    @property
    def total(self) -> int:
        """Bytes of all that is counted."""
        return sum(self.state.values()) + self.activations

    def __str__(self) -> str:
        state = ", ".join(f"{format_mib(nbytes)} of {STATE_KIND_NOUNS[kind]}" for kind, nbytes in self.state.items())
        return f"{state} and at most {format_mib(self.activations)} of activations: {format_mib(self.total)}"


def memory_sheet(
    profile: ModelProfile, plan: ParallelPlan, schedule: str, microbatches: Microbatches, rank: int, zero: int = 0
) -> MemorySheet:
    """What one rank of a plan is predicted to hold, under a ZeRO stage."""
    peak = predict_step(profile, plan, schedule, microbatches)[0].peak_bytes
    state = state_bytes(profile, MicrobatchRouting(plan, microbatches), zero)
    return MemorySheet({kind: by_rank[rank] for kind, by_rank in state.items()}, peak[rank] if peak else 0)


def out_of_memory_advice(
    profile: ModelProfile, plan: ParallelPlan, schedule: str, microbatches: Microbatches, rank: int
) -> tuple[str, str]:
    """(what a rank holds and may hold, which plans would fit): two sentences for the error of a worker without memory."""
    held = memory_sheet(profile, plan, schedule, microbatches, rank)
    stages = ", ".join(str(stage) for stage in plan.stages_of(rank))
    what = f"stage {stages} is predicted to hold {held}"
    # What is held did not fit, whatever memory was measured before: so only less than that may fit.
    limit = held.total
    if profile.memory_bytes is not None:
        what += f"; when the job was planned, a worker had {format_mib(profile.memory_bytes)}"
        limit = min(limit, profile.memory_bytes)
    ways = list(_smaller(profile, plan, schedule, microbatches, limit))
    if not ways:
        least = f"less than {format_mib(limit)} a worker"
        return what, f"no more stages, other schedule or smaller microbatches are predicted to take {least}: use larger workers"
    return what, f"predicted to fit: {'; or '.join(ways)}"


def _smaller(profile: ModelProfile, plan: ParallelPlan, schedule: str, microbatches: Microbatches, limit: int) -> Iterator[str]:
    """More stages, another schedule and more microbatches, the fewest whose largest worker stays below `limit` bytes."""
    layers, replicas = len(profile.layers), max(stage.replicas for stage in plan.stages)
    shards = max(stage.shards for stage in plan.stages)
    for stages in range(plan.positions + 1, layers + 1):
        cuts = balanced_cuts(profile.work_sums(), stages)
        most = _most(
            profile, ParallelPlan.mesh(dp=replicas, pp=stages, tp=shards, layers=layers, cuts=cuts), "1f1b", microbatches
        )
        if most is not None and most < limit:
            yield f"plan.stages={stages} under 1f1b ({format_mib(most)} a worker)"
            break
    if schedule != "1f1b" and registry.schedule_fits_plan("1f1b", plan):
        most = _most(profile, plan, "1f1b", microbatches)
        if most is not None and most < limit:
            yield f"schedule 1f1b instead of {schedule} ({format_mib(most)})"
    count = 2 * microbatches.count
    while count <= microbatches.batch_size:
        parts = tuple(replace(x, activation_bytes=x.activation_bytes * microbatches.count // count) for x in profile.layers)
        finer = Microbatches(count, microbatches.blocks, microbatches.batch_size)
        most = _most(replace(profile, layers=parts), plan, schedule, finer)
        if most is not None and most < limit:
            yield f"microbatches={count} instead of {microbatches.count} ({format_mib(most)}; another sum, so other bits)"
            break
        count *= 2


def _most(profile: ModelProfile, plan: ParallelPlan, schedule: str, microbatches: Microbatches) -> int | None:
    """Bytes of the largest worker; None where the schedule cannot run the plan."""
    try:
        return max(predict_step(profile, plan, schedule, microbatches)[1])
    except PlanError:
        return None
