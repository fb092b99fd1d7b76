"""The table of a run: (phase, event) -> the rule, and the phases that it may lead to. A pair without a row is a mistake of
ours."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeVar

from raypar.elastic import (
    drain_rules,
    growth_rules,
    plan_rules,
    recovery_rules,
    running_rules,
    silent_worker_rules,
)
from raypar.elastic.events import (
    CallFailed,
    CheckpointFailed,
    CheckpointSaved,
    DrainAsked,
    DriverTakenOver,
    GenerationClaimed,
    GroupsAborted,
    PlanAdopted,
    PlanChosen,
    RunEvent,
    SnapshotTaken,
    StacksReported,
    StepEmitted,
    StepJournalled,
    StepReported,
    StopRequested,
    Tick,
    ValidationEmitted,
    ValidationReported,
    WorkerAnswered,
    WorkerJoined,
    WorkerPlaced,
    WorkerSettled,
    WorkerSilent,
    WorkersReady,
    WorkerStartFailed,
    WorkerStatusReported,
)
from raypar.elastic.phases import Phase
from raypar.elastic.phases import Phase as P
from raypar.elastic.run_state import RunState

EventKind = TypeVar("EventKind", bound=RunEvent)


@dataclass(frozen=True, slots=True)
class TransitionRow:
    """What happens to one kind of event in some phases."""

    phases: tuple[Phase, ...]
    """Where the run is when the event comes."""
    event: type[object]
    """The kind of event."""
    rule: str
    """The rule's name."""
    apply: Callable[[RunState, RunEvent], None]
    """The rule itself."""
    to: frozenset[Phase]
    """The phases that the rule may lead to. It may always stay in the same phase."""


def row(
    event: type[EventKind],
    phases: Iterable[Phase],
    rule: Callable[[RunState, EventKind], None],
    to: Iterable[Phase] = (),
) -> TransitionRow:
    """A row. The rule gets events of its own kind only."""

    def apply(state: RunState, happened: RunEvent) -> None:
        assert isinstance(happened, event)
        rule(state, happened)

    return TransitionRow(tuple(phases), event, rule.__name__, apply, frozenset(to))


def ignore(phases: Iterable[Phase], *events: type[RunEvent]) -> Iterable[TransitionRow]:
    """Rows of events that come too late to matter."""
    return [row(event, phases, running_rules.ignore_event) for event in events]


TRAINING = (P.RUNNING, P.FLUSHING)
RECOVERING = (P.CLAIMING, P.STANDING, P.SETTLING, P.PLANNING, P.ADOPTING, P.WAITING)
EVERYWHERE = tuple(P)
SERVED = (*TRAINING, P.VALIDATING, P.SAVING, P.ENDING, P.CLAIMING, P.OVER)
"""Where the run may be once a flush point is reached, or what is due there has been served."""
PLANNED = (P.PLANNING, P.ADOPTING, P.WAITING, P.CLAIMING, P.OVER)
"""Where a recovery may be once all workers stand at one step."""


def others(*phases: Phase) -> tuple[Phase, ...]:
    """All phases but these."""
    return tuple(phase for phase in P if phase not in phases)


ROWS: tuple[TransitionRow, ...] = (
    # The start. A drained worker makes a new generation necessary at once; a job of no steps is only saved.
    row(WorkersReady, [P.STARTING], running_rules.start_training, [P.RUNNING, P.FLUSHING, P.SAVING, P.CLAIMING, P.OVER]),
    row(DriverTakenOver, [P.STARTING], recovery_rules.take_over_run, [P.CLAIMING]),
    row(CallFailed, [P.STARTING], running_rules.handle_failure, [P.CLAIMING, P.FAILING, P.OVER]),
    row(StopRequested, [P.STARTING], running_rules.stop_before_start, [P.OVER]),
    row(DrainAsked, [P.STARTING], drain_rules.drain_before_start),
    row(Tick, [P.STARTING], running_rules.check_start, [P.OVER]),
    # Steps.
    row(StepReported, [P.RUNNING], running_rules.count_report, [P.FLUSHING, P.CLAIMING, P.OVER]),
    row(StepReported, [P.FLUSHING], running_rules.count_report, SERVED),
    row(StepReported, [P.ABORTING], running_rules.count_report, [P.SAVING, P.ENDING, P.CLAIMING, P.OVER]),
    row(StepJournalled, [*TRAINING, P.ABORTING, *RECOVERING], running_rules.emit_step),
    row(StepEmitted, [P.RUNNING], running_rules.count_emitted_step, [P.FLUSHING]),
    row(StepEmitted, [P.FLUSHING], running_rules.count_emitted_step, [P.VALIDATING, P.SAVING, P.ENDING, P.CLAIMING, P.OVER]),
    row(CallFailed, [*TRAINING, P.VALIDATING, P.SAVING], running_rules.handle_failure, [P.CLAIMING, P.FAILING, P.OVER]),
    row(StacksReported, TRAINING, running_rules.fail_hung_workers, [P.FAILING, P.OVER]),
    row(StopRequested, TRAINING, running_rules.stop_after_open_steps, [P.FLUSHING]),
    row(ValidationEmitted, TRAINING, running_rules.finish_validation_late, [P.FLUSHING]),
    row(Tick, [P.RUNNING], running_rules.check_steps, [P.CLAIMING, P.FAILING, P.OVER]),
    row(Tick, [P.FLUSHING], running_rules.check_steps, [P.ABORTING, P.CLAIMING, P.FAILING, P.OVER]),
    # What is due between two steps.
    row(ValidationReported, [P.VALIDATING], running_rules.count_validation),
    row(ValidationEmitted, [P.VALIDATING], running_rules.finish_validation, SERVED),
    row(SnapshotTaken, [P.SAVING], running_rules.continue_after_snapshot, [*TRAINING, P.VALIDATING, P.ENDING, P.CLAIMING]),
    row(CheckpointSaved, others(P.STARTING, P.ENDING, P.FAILING, P.OVER), running_rules.record_checkpoint),
    row(CheckpointSaved, [P.ENDING, P.FAILING], running_rules.record_checkpoint, [P.OVER]),
    row(CheckpointFailed, [*TRAINING, P.VALIDATING, P.ABORTING], running_rules.report_failed_checkpoint),
    row(CheckpointFailed, [P.SAVING], running_rules.report_failed_checkpoint, [*TRAINING, P.VALIDATING, P.CLAIMING, P.OVER]),
    row(CheckpointFailed, [P.ENDING], running_rules.report_failed_checkpoint, [P.CLAIMING, P.OVER]),
    row(CheckpointFailed, [P.FAILING], running_rules.report_failed_checkpoint, [P.OVER]),
    row(StopRequested, [P.VALIDATING, P.SAVING, P.ENDING], running_rules.stop_when_served),
    row(CallFailed, [P.ENDING], running_rules.handle_failure_at_end, [P.CLAIMING, P.FAILING, P.OVER]),
    row(Tick, [P.VALIDATING], running_rules.check_pass, [P.ABORTING, P.CLAIMING, P.FAILING, P.OVER]),
    row(Tick, [P.SAVING, P.ENDING], running_rules.check_pass, [P.CLAIMING, P.FAILING, P.OVER]),
    # Aborted steps, and failure.
    row(GroupsAborted, [P.ABORTING], running_rules.note_aborted, [P.SAVING, P.ENDING, P.OVER]),
    row(StepEmitted, [P.ABORTING], running_rules.count_emitted_aborting, [P.SAVING, P.ENDING, P.OVER]),
    row(CallFailed, [P.ABORTING], running_rules.fail_for_good, [P.FAILING, P.OVER]),
    row(Tick, [P.ABORTING], running_rules.check_abort, [P.CLAIMING, P.OVER]),
    row(CallFailed, [P.FAILING], running_rules.add_failure, [P.OVER]),
    row(Tick, [P.FAILING], running_rules.check_failure, [P.OVER]),
    # From one generation to the next.
    row(GenerationClaimed, [P.CLAIMING], recovery_rules.fence_workers, [P.STANDING, P.WAITING, P.OVER]),
    row(WorkerStatusReported, [P.STANDING], recovery_rules.count_worker_status, [P.SETTLING, *PLANNED]),
    row(WorkerSettled, [P.SETTLING], recovery_rules.count_settled_worker, PLANNED),
    row(PlanChosen, [P.PLANNING], plan_rules.use_chosen_plan, PLANNED),
    row(PlanAdopted, [P.ADOPTING], plan_rules.count_adoption, SERVED),
    row(CallFailed, [P.CLAIMING], recovery_rules.handle_failure_recovering, [P.FAILING, P.OVER]),
    row(CallFailed, [P.STANDING], recovery_rules.handle_failure_recovering, [P.SETTLING, *PLANNED, P.FAILING]),
    row(CallFailed, RECOVERING[2:], recovery_rules.handle_failure_recovering, [P.CLAIMING, P.FAILING, P.OVER]),
    row(StopRequested, RECOVERING[:-1], recovery_rules.stop_after_recovery),
    row(StopRequested, [P.WAITING], recovery_rules.stop_after_recovery, [P.OVER]),
    row(StepEmitted, RECOVERING, recovery_rules.note_emitted_step),
    row(ValidationEmitted, RECOVERING, recovery_rules.note_validation),
    row(CheckpointFailed, RECOVERING, recovery_rules.note_failed_checkpoint),
    row(Tick, [P.CLAIMING, P.PLANNING, P.WAITING], recovery_rules.check_recovery, [P.OVER]),
    row(Tick, [P.STANDING, P.SETTLING, P.ADOPTING], recovery_rules.check_recovery, [P.CLAIMING, P.OVER]),
    # Workers that come, leave and fall silent.
    row(WorkerPlaced, EVERYWHERE, growth_rules.note_placed_worker),
    row(WorkerJoined, [*TRAINING, P.VALIDATING, P.SAVING], growth_rules.add_spare_running),
    row(WorkerJoined, RECOVERING[:-1], growth_rules.add_spare_recovering),
    row(WorkerJoined, [P.WAITING], growth_rules.add_spare_recovering, [P.CLAIMING]),
    row(WorkerJoined, [P.ENDING], growth_rules.add_spare),
    row(WorkerStartFailed, [*TRAINING, P.VALIDATING, P.SAVING, *RECOVERING], growth_rules.retry_start_later),
    row(WorkerStartFailed, [P.ENDING], growth_rules.forget_failed_start),
    row(PlanChosen, TRAINING, growth_rules.judge_larger_plan, [P.CLAIMING]),
    row(PlanChosen, [P.VALIDATING, P.SAVING], growth_rules.judge_larger_plan),
    row(DrainAsked, TRAINING, drain_rules.drain_worker, [P.CLAIMING]),
    row(DrainAsked, [P.VALIDATING, P.SAVING], drain_rules.drain_worker),
    row(DrainAsked, [P.ENDING, *RECOVERING], drain_rules.drain_later),
    row(WorkerSilent, EVERYWHERE, silent_worker_rules.wait_for_silent_worker),
    row(WorkerAnswered, EVERYWHERE, silent_worker_rules.end_wait_for_worker),
    # Answers to a generation that has been given up, and whatever comes after the end.
    *ignore(others(P.CLAIMING), GenerationClaimed),
    *ignore(others(P.STANDING), WorkerStatusReported),
    *ignore(others(P.SETTLING), WorkerSettled),
    *ignore(others(P.ADOPTING), PlanAdopted),
    *ignore([P.STARTING, P.CLAIMING, P.STANDING, P.SETTLING, P.ADOPTING, P.WAITING, P.ENDING, P.ABORTING], PlanChosen),
    *ignore([P.VALIDATING, P.SAVING, P.ENDING, P.FAILING, P.OVER, *RECOVERING], StepReported),
    *ignore([P.SAVING, P.ENDING, P.ABORTING, P.FAILING, P.OVER, *TRAINING, *RECOVERING], ValidationReported),
    *ignore([P.SAVING, P.ENDING, P.ABORTING, P.FAILING, P.OVER], ValidationEmitted),
    *ignore([P.VALIDATING, P.ENDING, P.FAILING, P.OVER, *TRAINING, *RECOVERING], SnapshotTaken),
    *ignore([P.SAVING, P.ENDING, P.FAILING, P.OVER, *RECOVERING], GroupsAborted),
    *ignore([P.VALIDATING, P.SAVING, P.ENDING, P.ABORTING, P.FAILING, P.OVER, *RECOVERING], StacksReported),
    *ignore([P.FAILING, P.OVER], StepJournalled, StepEmitted, StopRequested, PlanChosen),
    *ignore([P.FAILING, P.OVER, *RECOVERING], WorkersReady),
    *ignore([P.OVER], CallFailed, CheckpointSaved, CheckpointFailed, Tick),
    *ignore([P.STARTING, P.ABORTING, P.FAILING, P.OVER], WorkerJoined, WorkerStartFailed),
    *ignore([P.ABORTING, P.FAILING, P.OVER], DrainAsked),
    *ignore([P.ABORTING], StopRequested),
)


def index_rows(rows: Iterable[TransitionRow]) -> dict[tuple[Phase, type[object]], TransitionRow]:
    """(phase, kind of event) -> its row. Every pair has one row at most."""
    table: dict[tuple[Phase, type[object]], TransitionRow] = {}
    for row in rows:
        for phase in row.phases:
            assert (phase, row.event) not in table, f"two rows for {row.event.__name__} while {phase.value}"
            table[phase, row.event] = row
    return table


TABLE = index_rows(ROWS)
