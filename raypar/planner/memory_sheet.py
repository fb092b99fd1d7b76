"""What a worker holds in memory under its plan, and which plans would hold less; predicted from a profile."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from raypar.errors import PlanError
from raypar.plan import Microbatches, ParallelPlan, Routing
from raypar.planner.layer_partition import balanced_cuts
from raypar.planner.model_profile import ModelProfile
from raypar.planner.plan_search import format_mib, predict_step
from raypar.schedule import registry


@dataclass(frozen=True, slots=True)
class MemorySheet:
    """Bytes of one worker; `activations` at the peak of a step."""

    parameters: int
    gradients: int
    optimizer: int
    activations: int

    @property
    def total(self) -> int:
        """Bytes of everything."""
        return self.parameters + self.gradients + self.optimizer + self.activations

    def __str__(self) -> str:
        return (
            f"{format_mib(self.parameters)} of parameters, {format_mib(self.gradients)} of gradients, "
            f"{format_mib(self.optimizer)} of optimizer "
            f"state and at most {format_mib(self.activations)} of activations: {format_mib(self.total)}"
        )


def memory_sheet(
    profile: ModelProfile, plan: ParallelPlan, schedule: str, microbatches: Microbatches, rank: int
) -> MemorySheet:
    """The predicted memory of one rank of a plan. Gradients include the open sums of the canonical reduction."""
    routing = Routing(plan, microbatches)
    parameters = gradients = optimizer = 0
    for stage in plan.stages_of(rank):
        part = profile.stage(plan.stages[stage])
        blocks = len(routing.run(stage, plan.seats[rank].replica))
        parameters += part.parameter_bytes
        gradients += part.parameter_bytes * max(1, blocks.bit_length())
        optimizer += part.optimizer_bytes
    total = predict_step(profile, plan, schedule, microbatches)[1][rank]
    return MemorySheet(parameters, gradients, optimizer, total - parameters - gradients - optimizer)


def out_of_memory_advice(
    profile: ModelProfile, plan: ParallelPlan, schedule: str, microbatches: Microbatches, rank: int
) -> tuple[str, str]:
    """The two sentences of an error: (what the worker of that rank holds and may hold, what would fit)."""
    held = memory_sheet(profile, plan, schedule, microbatches, rank)
    stages = ", ".join(str(stage) for stage in plan.stages_of(rank))
    what = f"stage {stages} is predicted to hold {held}"
    # It did not fit, whatever was measured before: only less than that may.
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
    """In words, what would stay below `limit`: the next number of stages, another schedule, the next number of microbatches."""
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
    if schedule != "1f1b" and registry.can_run("1f1b", plan):
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
    """Bytes of the largest worker; None where the schedule cannot have that shape."""
    try:
        return max(predict_step(profile, plan, schedule, microbatches)[1])
    except PlanError:
        return None
