"""What each worker is told once per plan: the plan, its programs, and what crosses between stages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from raypar.plan import Microbatches, MicrobatchRouting, ParallelPlan, StageConnections
from raypar.plan.tensor_parallel_layout import TensorParallelLayout
from raypar.schedule.instructions import Program, Schedule, splits_backward
from raypar.schedule.lower import lower_schedule, lower_validation_pass
from raypar.schedule.validate import validate_schedule


@dataclass(frozen=True)
class ProgramAssignment:
    """One worker's part of a plan.

    `splits_backward`: whether its stages must be able to put weight gradients off. `validation_cut`: how the samples of a whole
    validation pass are cut into microbatches; None without validation.
    """

    plan: ParallelPlan
    crossing: StageConnections
    program: Program
    splits_backward: bool
    validation_microbatches: Microbatches | None = None
    validation_program: Program = ()
    layouts: Mapping[int, TensorParallelLayout] = field(default_factory=dict)
    """Number of shards -> how the model is cut over so many: of all numbers that the job may come to. Empty without shards."""


def assign_programs_to_ranks(
    schedule: Schedule,
    plan: ParallelPlan,
    crossing: StageConnections,
    cut: Microbatches,
    validation_cut: Microbatches | None = None,
    *,
    layouts: Mapping[int, TensorParallelLayout] | None = None,
) -> tuple[ProgramAssignment, ...]:
    """One assignment per rank, with the programs of a schedule. Raises `ScheduleError` when they would not run."""
    routing = MicrobatchRouting(plan, cut)
    programs = lower_schedule(schedule, routing, crossing)
    validate_schedule(programs, routing, crossing)
    forward: tuple[Program, ...] = ((),) * plan.world
    if validation_cut is not None:
        forward = lower_validation_pass(MicrobatchRouting(plan, validation_cut), crossing)
    return tuple(
        ProgramAssignment(
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
