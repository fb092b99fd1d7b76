"""The assignments that workers get once per plan: the plan, their programs, and the connections between stages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from raypar.errors import ScheduleError
from raypar.plan import Microbatches, MicrobatchRouting, ParallelPlan, StageConnections
from raypar.plan.gradient_pool import GradientPool
from raypar.plan.stage_connections import check_message_limits, check_ties_are_cut_alike
from raypar.plan.tensor_parallel_layout import TensorParallelLayout
from raypar.plan.wording import count_noun
from raypar.schedule.instructions import Program, Schedule, splits_backward
from raypar.schedule.lower import lower_schedule, lower_validation_pass
from raypar.schedule.offloading import check_offloaded_stages
from raypar.schedule.recomputation import check_recomputed_stages
from raypar.schedule.validate import Lists, find_schedule_problems, validate_schedule


@dataclass(frozen=True)
class ProgramAssignment:
    """One worker's part of a plan."""

    plan: ParallelPlan
    """The whole plan."""
    crossing: StageConnections
    """The connections between the plan's stages."""
    program: Program
    """The worker's instructions for a training step."""
    splits_backward: bool
    """Whether the worker's stages must be able to put weight gradients off."""
    validation_microbatches: Microbatches | None = None
    """The microbatches of a whole validation pass; None without validation."""
    validation_program: Program = ()
    """The worker's instructions for a validation pass."""
    layouts: Mapping[int, TensorParallelLayout] = field(default_factory=dict)
    """Number of shards -> the layout for them, for all numbers that the job may use. Empty without shards."""


def assign_programs_to_ranks(
    schedule: Schedule,
    plan: ParallelPlan,
    crossing: StageConnections,
    microbatches: Microbatches,
    validation_microbatches: Microbatches | None = None,
    *,
    layouts: Mapping[int, TensorParallelLayout] | None = None,
    pool: GradientPool | None = None,
) -> tuple[ProgramAssignment, ...]:
    """One assignment per rank, with the programs of a schedule. `pool`: of gradients that are scattered; None: it has
    room for none.

    Raises `ScheduleError` if they would not run, `PlanError` if a stage would send another more values than messages can have,
    or a worker would have a tied parameter cut in two ways.
    """
    counts = [cut.count for cut in (microbatches, validation_microbatches) if cut is not None]
    check_message_limits(crossing, len(plan.stages), max(counts))
    check_ties_are_cut_alike(plan, crossing.ties)
    routing = MicrobatchRouting(plan, microbatches)
    check_recomputed_stages(schedule, plan)
    check_offloaded_stages(schedule, plan)
    try:
        programs = lower_schedule(schedule, routing, crossing)
    except ScheduleError:
        validate_schedule(schedule, routing, crossing)  # says more where instructions are missing
        raise
    check_programs_run(programs, routing, crossing, pool)
    forward: tuple[Program, ...] = ((),) * plan.world
    if validation_microbatches is not None:
        forward = lower_validation_pass(MicrobatchRouting(plan, validation_microbatches, forward_only=True), crossing)
    return tuple(
        ProgramAssignment(
            plan,
            crossing,
            program,
            splits_backward(program),
            validation_microbatches,
            forward[rank],
            layouts or {},
        )
        for rank, program in enumerate(programs)
    )


def check_programs_run(
    lists: Lists, routing: MicrobatchRouting, crossing: StageConnections, pool: GradientPool | None = None
) -> None:
    """Raise `ScheduleError` if orders, or programs, would not run; with a `pool` of scattered gradients that is too small for
    them, the error names the size that works."""

    def stops(ahead: int) -> bool:
        return any(p.rule == "deadlock-free" for p in find_schedule_problems(lists, routing, crossing, ahead=ahead))

    scattered = [stage for stage in range(len(routing.plan.stages)) if routing.scatters(stage)]
    most = routing.microbatches.count
    if not scattered or not stops(0) or stops(most):
        validate_schedule(lists, routing, crossing)
        return
    needed = next(ahead for ahead in range(1, most + 1) if not stops(ahead))
    if pool is not None and pool.microbatches(routing.plan, scattered) >= needed:
        validate_schedule(lists, routing, crossing, ahead=needed)
        return
    room = f": in {pool.limit >> 20} MiB they do not" if pool is not None else ""
    larger = f"plan.reduction_buffer_mib: {pool.least_mib(routing.plan, scattered, needed)}" if pool is not None else ""
    raise ScheduleError(
        f"with plan.gradients: scatter this schedule has a replica wait for others that wait for it, unless the gradients of "
        f"{count_noun(needed, 'microbatch', 'microbatches')} find room on their way{room}",
        cure=f"set {larger or 'a larger plan.reduction_buffer_mib'}, or use another schedule, or set plan.gradients: fold",
    )
