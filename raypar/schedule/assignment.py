"""What each worker is told once per plan: the plan, its programs, and what crosses between stages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from raypar.plan import Crossing, Microbatches, ParallelPlan, Routing
from raypar.plan.shard_layout import ShardLayout
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
            layouts or {},
        )
        for rank, program in enumerate(programs)
    )
