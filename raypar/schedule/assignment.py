"""What each worker is told once per plan: the plan, its programs, and what crosses between stages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from raypar.plan import Crossing, Microbatches, ParallelPlan, Routing
from raypar.plan.shard_layout import ShardLayout
from raypar.schedule.instructions import BackwardInput, Program, Schedule
from raypar.schedule.lower import lower, lower_forward
from raypar.schedule.validate import validate


@dataclass(frozen=True)
class Assignment:
    """One worker's part of a plan. `validation_cut` is the cut of one whole validation pass, if there is one."""

    plan: ParallelPlan
    crossing: Crossing
    program: Program
    splits_backward: bool
    validation_cut: Microbatches | None = None
    validation_program: Program = ()
    layouts: Mapping[int, ShardLayout] = field(default_factory=dict)
    """Number of shards -> how the model is cut over so many: of all numbers that the job may come to. Empty without shards."""


def assign(
    schedule: Schedule,
    plan: ParallelPlan,
    crossing: Crossing,
    cut: Microbatches,
    validation_cut: Microbatches | None = None,
    *,
    layouts: Mapping[int, ShardLayout] | None = None,
) -> tuple[Assignment, ...]:
    """Lower a schedule to one assignment per rank. Raises `ScheduleError` when the result would not run."""
    routing = Routing(plan, cut)
    programs = lower(schedule, routing, crossing)
    validate(programs, routing, crossing)
    forward: tuple[Program, ...] = ((),) * plan.world
    if validation_cut is not None:
        forward = lower_forward(Routing(plan, validation_cut), crossing)
    return tuple(
        Assignment(
            plan,
            crossing,
            program,
            any(isinstance(i, BackwardInput) for i in program),
            validation_cut,
            forward[rank],
            layouts or {},
        )
        for rank, program in enumerate(programs)
    )
