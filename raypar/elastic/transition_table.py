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
    Event,
    GenerationClaimed,
    GroupsAborted,
    PlanAdopted,
    PlanChosen,
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

E = TypeVar("E", bound=Event)


@dataclass(frozen=True, slots=True)
class Row:
    """What happens to one kind of event in some phases."""

    phases: tuple[Phase, ...]
    """Where the run is when the event comes."""
    event: type[object]
    """The kind of event."""
    rule: str
    """The rule's name."""
    apply: Callable[[RunState, Event], None]
    """The rule itself."""
    to: frozenset[Phase]
    """The phases that the rule may lead to. It may always stay in the same phase."""


def on(event: type[E], phases: Iterable[Phase], rule: Callable[[RunState, E], None], to: Iterable[Phase] = ()) -> Row:
    """A row. The rule gets events of its own kind only."""

    def apply(state: RunState, happened: Event) -> None:
        assert isinstance(happened, event)
        rule(state, happened)

    return Row(tuple(phases), event, rule.__name__, apply, frozenset(to))


def ignore(phases: Iterable[Phase], *events: type[Event]) -> Iterable[Row]:
    """Rows of events that come too late to matter."""
    return [on(event, phases, running_rules.ignore_event) for event in events]


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


ROWS: tuple[Row, ...] = (
    # The start. A drained worker makes a new generation necessary at once; a job of no steps is only saved.
    on(WorkersReady, [P.STARTING], running_rules.start_training, [P.RUNNING, P.FLUSHING, P.SAVING, P.CLAIMING, P.OVER]),
    on(DriverTakenOver, [P.STARTING], recovery_rules.take_over_run, [P.CLAIMING]),
    on(CallFailed, [P.STARTING], running_rules.handle_failure, [P.CLAIMING, P.FAILING, P.OVER]),
    on(StopRequested, [P.STARTING], running_rules.stop_before_start, [P.OVER]),
    on(DrainAsked, [P.STARTING], drain_rules.drain_before_start),
    on(Tick, [P.STARTING], running_rules.check_start, [P.OVER]),
    # Steps.
    on(StepReported, [P.RUNNING], running_rules.count_report, [P.FLUSHING, P.CLAIMING, P.OVER]),
    on(StepReported, [P.FLUSHING], running_rules.count_report, SERVED),
    on(StepReported, [P.ABORTING], running_rules.count_report, [P.SAVING, P.ENDING, P.CLAIMING, P.OVER]),
    on(StepJournalled, [*TRAINING, P.ABORTING, *RECOVERING], running_rules.emit_step),
    on(StepEmitted, [P.RUNNING], running_rules.count_emitted_step, [P.FLUSHING]),
    on(StepEmitted, [P.FLUSHING], running_rules.count_emitted_step, [P.VALIDATING, P.SAVING, P.ENDING, P.CLAIMING, P.OVER]),
    on(CallFailed, [*TRAINING, P.VALIDATING, P.SAVING], running_rules.handle_failure, [P.CLAIMING, P.FAILING, P.OVER]),
    on(StacksReported, TRAINING, running_rules.fail_hung_workers, [P.FAILING, P.OVER]),
    on(StopRequested, TRAINING, running_rules.stop_after_open_steps, [P.FLUSHING]),
    on(ValidationEmitted, TRAINING, running_rules.finish_validation_late, [P.FLUSHING]),
    on(Tick, [P.RUNNING], running_rules.check_steps, [P.CLAIMING, P.FAILING, P.OVER]),
    on(Tick, [P.FLUSHING], running_rules.check_steps, [P.ABORTING, P.CLAIMING, P.FAILING, P.OVER]),
    # What is due between two steps.
    on(ValidationReported, [P.VALIDATING], running_rules.count_validation),
    on(ValidationEmitted, [P.VALIDATING], running_rules.finish_validation, SERVED),
    on(SnapshotTaken, [P.SAVING], running_rules.continue_after_snapshot, [*TRAINING, P.VALIDATING, P.ENDING, P.CLAIMING]),
    on(CheckpointSaved, others(P.STARTING, P.ENDING, P.FAILING, P.OVER), running_rules.record_checkpoint),
    on(CheckpointSaved, [P.ENDING, P.FAILING], running_rules.record_checkpoint, [P.OVER]),
    on(CheckpointFailed, [*TRAINING, P.VALIDATING, P.ABORTING], running_rules.report_failed_checkpoint),
    on(CheckpointFailed, [P.SAVING], running_rules.report_failed_checkpoint, [*TRAINING, P.VALIDATING, P.CLAIMING, P.OVER]),
    on(CheckpointFailed, [P.ENDING], running_rules.report_failed_checkpoint, [P.CLAIMING, P.OVER]),
    on(CheckpointFailed, [P.FAILING], running_rules.report_failed_checkpoint, [P.OVER]),
    on(StopRequested, [P.VALIDATING, P.SAVING, P.ENDING], running_rules.stop_when_served),
    on(CallFailed, [P.ENDING], running_rules.handle_failure_at_end, [P.CLAIMING, P.FAILING, P.OVER]),
    on(Tick, [P.VALIDATING], running_rules.check_pass, [P.ABORTING, P.CLAIMING, P.FAILING, P.OVER]),
    on(Tick, [P.SAVING, P.ENDING], running_rules.check_pass, [P.CLAIMING, P.FAILING, P.OVER]),
    # Aborted steps, and failure.
    on(GroupsAborted, [P.ABORTING], running_rules.note_aborted, [P.SAVING, P.ENDING, P.OVER]),
    on(StepEmitted, [P.ABORTING], running_rules.count_emitted_aborting, [P.SAVING, P.ENDING, P.OVER]),
    on(CallFailed, [P.ABORTING], running_rules.fail_for_good, [P.FAILING, P.OVER]),
    on(Tick, [P.ABORTING], running_rules.check_abort, [P.CLAIMING, P.OVER]),
    on(CallFailed, [P.FAILING], running_rules.add_failure, [P.OVER]),
    on(Tick, [P.FAILING], running_rules.check_failure, [P.OVER]),
    # From one generation to the next.
    on(GenerationClaimed, [P.CLAIMING], recovery_rules.fence_workers, [P.STANDING, P.WAITING, P.OVER]),
    on(WorkerStatusReported, [P.STANDING], recovery_rules.count_worker_status, [P.SETTLING, *PLANNED]),
    on(WorkerSettled, [P.SETTLING], recovery_rules.count_settled_worker, PLANNED),
    on(PlanChosen, [P.PLANNING], plan_rules.use_chosen_plan, PLANNED),
    on(PlanAdopted, [P.ADOPTING], plan_rules.count_adoption, SERVED),
    on(CallFailed, [P.CLAIMING], recovery_rules.handle_failure_recovering, [P.FAILING, P.OVER]),
    on(CallFailed, [P.STANDING], recovery_rules.handle_failure_recovering, [P.SETTLING, *PLANNED, P.FAILING]),
    on(CallFailed, RECOVERING[2:], recovery_rules.handle_failure_recovering, [P.CLAIMING, P.FAILING, P.OVER]),
    on(StopRequested, RECOVERING[:-1], recovery_rules.stop_after_recovery),
    on(StopRequested, [P.WAITING], recovery_rules.stop_after_recovery, [P.OVER]),
    on(StepEmitted, RECOVERING, recovery_rules.note_emitted_step),
    on(ValidationEmitted, RECOVERING, recovery_rules.note_validation),
    on(CheckpointFailed, RECOVERING, recovery_rules.note_failed_checkpoint),
    on(Tick, [P.CLAIMING, P.PLANNING, P.WAITING], recovery_rules.check_recovery, [P.OVER]),
    on(Tick, [P.STANDING, P.SETTLING, P.ADOPTING], recovery_rules.check_recovery, [P.CLAIMING, P.OVER]),
    # Workers that come, leave and fall silent.
    on(WorkerPlaced, EVERYWHERE, growth_rules.note_placed_worker),
    on(WorkerJoined, [*TRAINING, P.VALIDATING, P.SAVING], growth_rules.add_spare_running),
    on(WorkerJoined, RECOVERING[:-1], growth_rules.add_spare_recovering),
    on(WorkerJoined, [P.WAITING], growth_rules.add_spare_recovering, [P.CLAIMING]),
    on(WorkerJoined, [P.ENDING], growth_rules.add_spare),
    on(WorkerStartFailed, [*TRAINING, P.VALIDATING, P.SAVING, *RECOVERING], growth_rules.retry_start_later),
    on(WorkerStartFailed, [P.ENDING], growth_rules.forget_failed_start),
    on(PlanChosen, TRAINING, growth_rules.judge_larger_plan, [P.CLAIMING]),
    on(PlanChosen, [P.VALIDATING, P.SAVING], growth_rules.judge_larger_plan),
    on(DrainAsked, TRAINING, drain_rules.drain_worker, [P.CLAIMING]),
    on(DrainAsked, [P.VALIDATING, P.SAVING], drain_rules.drain_worker),
    on(DrainAsked, [P.ENDING, *RECOVERING], drain_rules.drain_later),
    on(WorkerSilent, EVERYWHERE, silent_worker_rules.wait_for_silent_worker),
    on(WorkerAnswered, EVERYWHERE, silent_worker_rules.end_wait_for_worker),
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


def index_rows(rows: Iterable[Row]) -> dict[tuple[Phase, type[object]], Row]:
    """(phase, kind of event) -> its row. Every pair has one row at most."""
    table: dict[tuple[Phase, type[object]], Row] = {}
    for row in rows:
        for phase in row.phases:
            assert (phase, row.event) not in table, f"two rows for {row.event.__name__} while {phase.value}"
            table[phase, row.event] = row
    return table


TABLE = index_rows(ROWS)
