"""What a worker is predicted to hold in memory, and, where that was too much, which plans are predicted to hold less."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from raypar.errors import PlanError
from raypar.plan import Microbatches, MicrobatchRouting, ParallelPlan
from raypar.plan.ownership import STATE_KIND_NOUNS, StateKind
from raypar.planner.candidate_plans import balanced_cuts
from raypar.planner.model_profile import ModelProfile
from raypar.planner.plan_search import format_mib
from raypar.planner.predicted_step import bucket_bytes, kept_bytes_by_kind, state_bytes
from raypar.schedule import registry
from raypar.schedule.instructions import ACTIVATIONS, KEPT_INPUTS, STASH, Schedule
from raypar.schedule.step_timeline import peak_kept_bytes

BUCKETS = "buckets"
"""The kind of memory in which gradients are on their way between replicas."""
KEPT_NOUNS: dict[str, str] = {
    BUCKETS: "buckets of gradients",
    ACTIVATIONS: "activations",
    KEPT_INPUTS: "inputs of recomputed layers",
    STASH: "stash for weight gradients",
}
"""Kind of memory beside the state -> its name in sheets."""


@dataclass(frozen=True, slots=True)
class MemorySheet:
    """Bytes that one worker holds."""

    state: Mapping[StateKind, int]
    """Kind of state -> its bytes."""
    kept: Mapping[str, int]
    """Kind of memory kept for backward passes -> its bytes at the moment of the step when all kinds together take most."""
    buckets: int = 0
    """Buckets of gradients that are on their way between replicas."""

    @property
    def by_kind(self) -> dict[str, int]:
        """All kinds -> their bytes, as data."""
        return {str(kind): nbytes for kind, nbytes in (*self.state.items(), (BUCKETS, self.buckets), *self.kept.items())}

    @property
    def total(self) -> int:
        """Bytes of all that is counted."""
        return sum(self.by_kind.values())

    def __str__(self) -> str:
        state = ", ".join(
            f"{format_mib(nbytes)} of {STATE_KIND_NOUNS[kind]}"
            for kind, nbytes in self.state.items()
            if nbytes or kind != "widened"
        )
        buckets = f", {format_mib(self.buckets)} of {KEPT_NOUNS[BUCKETS]}" if self.buckets else ""
        parts = [(kind, nbytes) for kind, nbytes in self.kept.items() if nbytes or kind == ACTIVATIONS]
        kept = ", ".join(f"{format_mib(nbytes)} of {KEPT_NOUNS[kind]}" for kind, nbytes in parts)
        return f"{state}{buckets} and at most {kept}: {format_mib(self.total)}"


def memory_sheets(
    profile: ModelProfile, plan: ParallelPlan, schedule: str | Schedule, microbatches: Microbatches
) -> tuple[MemorySheet, ...]:
    """By rank, the predicted memory of a plan's workers under a schedule (its name, or its orders)."""
    routing = MicrobatchRouting(plan, microbatches)
    crossing = profile.crossing(plan)
    orders = registry.build_schedule(schedule, routing, connections=crossing) if isinstance(schedule, str) else schedule
    sizes = kept_bytes_by_kind(profile, routing, orders)
    kept = [peak_kept_bytes(order, sizes) for order in orders]
    state = state_bytes(profile, routing, [sum(peak.values()) for peak in kept])
    return tuple(
        MemorySheet({kind: by_rank[rank] for kind, by_rank in state.items()}, peak, buckets)
        for rank, (peak, buckets) in enumerate(zip(kept, bucket_bytes(profile, routing), strict=True))
    )


def out_of_memory_advice(
    profile: ModelProfile, plan: ParallelPlan, schedule: str, microbatches: Microbatches, rank: int
) -> tuple[str, str]:
    """(what a rank holds and may hold, which plans would fit): two sentences for the error of a worker without memory."""
    held = memory_sheets(profile, plan, schedule, microbatches)[rank]
    stages = ", ".join(str(stage) for stage in plan.stages_of(rank))
    what = f"stage {stages} is predicted to hold {held}"
    # What is held did not fit, whatever memory was measured before: so only less than that may fit.
    limit = held.total
    if profile.memory_bytes is not None:
        what += f"; when the job was planned, a worker had {format_mib(profile.memory_bytes)}"
        limit = min(limit, profile.memory_bytes)
    return what, describe_changes_that_fit(profile, plan, schedule, microbatches, limit)


def describe_changes_that_fit(
    profile: ModelProfile, plan: ParallelPlan, schedule: str | Schedule, microbatches: Microbatches, limit: int
) -> str:
    """A sentence with changes to a plan that bring its largest worker below `limit` bytes, the smallest change first."""
    ways = list(_changes_that_fit(profile, plan, schedule, microbatches, limit))
    if not ways:
        least = f"less than {format_mib(limit)} a worker"
        return (
            f"neither recomputation nor more stages, another schedule or smaller microbatches are predicted to take {least}: "
            "use larger workers"
        )
    return f"predicted to fit: {'; or '.join(ways)}"


def _changes_that_fit(
    profile: ModelProfile, plan: ParallelPlan, schedule: str | Schedule, microbatches: Microbatches, limit: int
) -> Iterator[str]:
    """Each change that fits, as text: full recomputation first, then other changes, the smallest of each kind.

    The other changes are combined with full recomputation only if nothing fits without.
    """
    found = False
    every = tuple(range(len(profile.layers)))
    if plan.recompute != every and isinstance(schedule, str):
        most = _largest_worker_bytes(profile, replace(plan, recompute=every), schedule, microbatches)
        if most is not None and most < limit:
            found = True
            yield f"plan.recompute=full ({format_mib(most)} a worker, the same results)"
    if plan.with_zero(1).most_zero and not plan.most_zero:
        most = _largest_worker_bytes(profile, plan.with_zero(1), schedule, microbatches)
        if most is not None and most < limit:
            found = True
            yield f"plan.zero=1 ({format_mib(most)} a worker, the same results)"
    for recompute in dict.fromkeys((plan.recompute, every)):
        beside = "" if recompute == plan.recompute else " with plan.recompute=full"
        for way in _other_changes_that_fit(profile, replace(plan, recompute=recompute), schedule, microbatches, limit, beside):
            found = True
            yield way
        if found:
            return


def _other_changes_that_fit(
    profile: ModelProfile, plan: ParallelPlan, schedule: str | Schedule, microbatches: Microbatches, limit: int, beside: str
) -> Iterator[str]:
    """Each change that fits beside recomputation: the fewest more stages, 1F1B, and the fewest more microbatches.

    `beside`: what else is changed, for the text.
    """
    layers, replicas = len(profile.layers), max(stage.replicas for stage in plan.stages)
    shards = max(stage.shards for stage in plan.stages)
    for stages in range(len(plan.grids) + 1, layers + 1):
        cuts = balanced_cuts(profile.work_sums(plan.recompute), stages)
        deeper = ParallelPlan.mesh(dp=replicas, pp=stages, tp=shards, layers=layers, cuts=cuts, recompute=plan.recompute)
        deeper = deeper.with_zero(max(plan.zero_levels), plan.zero_holders)
        most = _largest_worker_bytes(profile, deeper, "1f1b", microbatches)
        if most is not None and most < limit:
            yield f"plan.stages={stages} under 1f1b{beside} ({format_mib(most)} a worker)"
            break
    if schedule != "1f1b" and registry.schedule_fits_plan("1f1b", plan):
        most = _largest_worker_bytes(profile, plan, "1f1b", microbatches)
        if most is not None and most < limit:
            named = schedule if isinstance(schedule, str) else "the file's"
            yield f"schedule 1f1b instead of {named}{beside} ({format_mib(most)})"
    count = 2 * microbatches.count
    while count <= microbatches.batch_size and isinstance(schedule, str):
        parts = tuple(replace(x, activation_bytes=x.activation_bytes * microbatches.count // count) for x in profile.layers)
        finer = Microbatches(count, microbatches.blocks, microbatches.batch_size)
        most = _largest_worker_bytes(replace(profile, layers=parts), plan, schedule, finer)
        if most is not None and most < limit:
            yield (
                f"microbatches={count} instead of {microbatches.count}{beside} ({format_mib(most)}; another sum, so other bits)"
            )
            break
        count *= 2


def _largest_worker_bytes(
    profile: ModelProfile, plan: ParallelPlan, schedule: str | Schedule, microbatches: Microbatches
) -> int | None:
    """Predicted memory of the largest worker in bytes; None if the schedule cannot run the plan."""
    try:
        return max(sheet.total for sheet in memory_sheets(profile, plan, schedule, microbatches))
    except PlanError:
        return None
