"""Chooses whether the gradients of a plan that leaves it open are folded or scattered: the faster of the ways that fit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from raypar.errors import RayparError
from raypar.plan import Microbatches, MicrobatchRouting, ParallelPlan
from raypar.plan.gradient_pool import GradientPool
from raypar.planner.memory_sheet import memory_sheets
from raypar.planner.model_profile import ModelProfile
from raypar.planner.plan_search import format_mib
from raypar.planner.predicted_step import MakeSchedule, predict_step
from raypar.planner.ways_to_fit import ABOUT_AS_FAST
from raypar.schedule import registry
from raypar.schedule.instructions import Schedule
from raypar.schedule.program_assignment import check_programs_run

MakePool = Callable[[ParallelPlan], GradientPool]
"""Makes the memory of a stage for gradients that are on their way between replicas, for a plan."""


@dataclass(frozen=True, slots=True)
class PredictedPlan:
    """A plan with what is predicted of it."""

    plan: ParallelPlan
    ms: float
    """Its step."""
    largest_bytes: int
    """The memory of its largest worker."""

    def fits(self, limit: int | None) -> bool:
        """Whether no worker needs more than `limit` bytes; None: it is not known what there is."""
        return limit is None or self.largest_bytes <= limit


def choose_gradient_route(
    profile: ModelProfile,
    plan: ParallelPlan,
    schedule: str | MakeSchedule,
    microbatches: Microbatches,
    pool: MakePool,
    *,
    is_asked: bool = True,
) -> tuple[ParallelPlan, str]:
    """The plan with gradients that are folded or scattered, and why, a line; empty where nobody has to be told.

    Folding is kept where it fits and is about as fast: it sends fewer bytes. `pool`: of a plan. `is_asked`: the job says that
    it is to be chosen, so a line says what was; else one does where gradients are scattered.
    """
    folded, limit = plan.with_gradients("fold"), profile.memory_bytes
    if all(stage.replicas == 1 for stage in plan.stages):
        return folded, "plan.gradients=fold: no stage has replicas" if is_asked else ""
    fold = predict_plan(profile, folded, schedule, microbatches, pool)
    if fold is None or (not is_asked and fold.fits(limit) and _is_balanced(folded, microbatches)):
        return folded, ""
    scatter = predict_plan(profile, plan.with_gradients("scatter"), schedule, microbatches, pool)
    if scatter is not None and scatter.fits(limit):
        return _faster(fold, scatter, limit, is_asked=is_asked)
    why = "with this schedule gradients cannot be scattered" if scatter is None else "scattered, they do not fit either"
    return folded, f"plan.gradients=fold: {why}" if is_asked else ""


def _faster(fold: PredictedPlan, scatter: PredictedPlan, limit: int | None, *, is_asked: bool) -> tuple[ParallelPlan, str]:
    """The faster of the ways that fit, of which `scatter` is one, and a line."""
    if not fold.fits(limit):
        assert limit is not None
        return scatter.plan, (
            f"plan.gradients=scatter, which fits: the largest worker needs {format_mib(scatter.largest_bytes)} "
            f"({format_mib(fold.largest_bytes)} with plan.gradients=fold), a worker has {format_mib(limit)}"
        )
    if scatter.ms * (1 + ABOUT_AS_FAST) < fold.ms:
        return scatter.plan, f"plan.gradients=scatter: predicted {scatter.ms:.1f} ms a step, {fold.ms:.1f} with fold"
    told = f"plan.gradients=fold: predicted {fold.ms:.1f} ms a step, {scatter.ms:.1f} with scatter"
    return fold.plan, told if is_asked else ""


def predict_plan(
    profile: ModelProfile,
    plan: ParallelPlan,
    schedule: str | MakeSchedule,
    microbatches: Microbatches,
    pool: MakePool,
) -> PredictedPlan | None:
    """The plan's step; None if the schedule does not run with it."""
    routing, crossing = MicrobatchRouting(plan, microbatches), profile.crossing(plan)
    try:
        orders: Schedule
        if isinstance(schedule, str):
            orders = registry.build_schedule(schedule, routing, connections=crossing)
        else:
            orders = schedule(routing, crossing)
        if plan.gradients == "scatter":
            check_programs_run(orders, routing, crossing, pool(plan))
        timeline, _ = predict_step(profile, plan, orders, microbatches)
        largest = max(sheet.total for sheet in memory_sheets(profile, plan, orders, microbatches))
        return PredictedPlan(plan, timeline.makespan_ms, largest)
    except RayparError:
        return None


def _is_balanced(plan: ParallelPlan, microbatches: Microbatches) -> bool:
    """Whether replicas have as equal numbers of microbatches as there can be, without which nothing else is faster."""
    routing = MicrobatchRouting(plan, microbatches)
    return all(
        len(routing.microbatches_of_replica(index, replica)) <= -(-microbatches.count // stage.replicas)
        for index, stage in enumerate(plan.stages)
        for replica in range(stage.replicas if not stage.share else 0)
    )
