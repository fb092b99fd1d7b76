"""What each worker is told once per plan: the plan, its programs, and what crosses between stages."""

from __future__ import annotations

from dataclasses import dataclass

from raypar.plan import Crossing, Microbatches, ParallelPlan, Routing
from raypar.schedule.instructions import Program, Schedule, splits_backward
from raypar.schedule.lower import lower, lower_forward
from raypar.schedule.validate import validate


@dataclass(frozen=True)
class Assignment:
    """One worker's part of a plan.

    `splits_backward`: whether its stages must be able to put weight gradients off. `validation_cut`: how the samples of a whole
    validation pass are cut into microbatches; None without validation.
    """

    plan: ParallelPlan
    crossing: Crossing
    program: Program
    splits_backward: bool
    validation_cut: Microbatches | None = None
    validation_program: Program = ()


def assign(
    schedule: Schedule, plan: ParallelPlan, crossing: Crossing, cut: Microbatches, validation_cut: Microbatches | None = None
) -> tuple[Assignment, ...]:
    """One assignment per rank, with the programs of a schedule. Raises `ScheduleError` when they would not run."""
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
            splits_backward(program),
            validation_cut,
            forward[rank],
        )
        for rank, program in enumerate(programs)
    )
