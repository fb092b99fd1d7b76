"""The transition table of the run machine: (phase, kind of event) -> the rule, and the phases that it may lead to.

A rule returns the next phase, or None to stay; `ON_ENTER` names what starts the work of a phase, which may lead on at once. An
event without a row for the present phase is a bug in raypar.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from raypar.elastic import (
    failures,
    find_and_adopt_plan_rules,
    membership_rules,
    rebalance_rules,
    recovery_rules,
    running_rules,
    step_flow_rules,
    wait_for_last_copies,
)
from raypar.elastic.events import (
    AllWorkersCopiedState,
    CallFailed,
    CheckpointFailed,
    CheckpointSaved,
    DrainRequested,
    DriverFailover,
    FirstWorkersPlaced,
    GenerationClaimed,
    GroupsAborted,
    KeptGradientsApplied,
    PlanAdopted,
    PlanChosen,
    RunEvent,
    SharesAdopted,
    SharesPrepared,
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
    """The rule for one kind of event in some phases."""

    phases: tuple[Phase, ...]
    """The phases in which the rule applies."""
    event: type[object]
    """The kind of event."""
    rule: str
    """The rule's name."""
    apply: Callable[[RunState, RunEvent], Phase | None]
    """The rule itself: it returns the next phase, or None to stay in the present one."""
    to: frozenset[Phase]
    """The phases that the rule may lead to. It may always stay in the same phase."""


def make_transition_row(
    event: type[EventKind],
    phases: Iterable[Phase],
    rule: Callable[[RunState, EventKind], Phase | None],
    to: Iterable[Phase] = (),
) -> TransitionRow:
    """A row of the table; its rule gets events of the given kind only."""

    def apply(state: RunState, happened: RunEvent) -> Phase | None:
        assert isinstance(happened, event)
        return rule(state, happened)

    return TransitionRow(tuple(phases), event, rule.__name__, apply, frozenset(to))


def make_ignored_rows(phases: Iterable[Phase], *events: type[RunEvent]) -> Iterable[TransitionRow]:
    """Rows that ignore events which come too late to matter."""
    return [make_transition_row(event, phases, running_rules.ignore_event) for event in events]


TRAINING = (P.RUNNING, P.FLUSHING)
RECOVERING = (P.CLAIMING, P.STANDING, P.SETTLING, P.PLANNING, P.ADOPTING, P.WAITING)
EVERYWHERE = tuple(P)
SERVED = (*TRAINING, P.VALIDATING, P.SAVING, P.ENDING, P.CLAIMING, P.OVER)
"""Phases that may follow once a flush point is reached, or the work due there is done."""
PLANNED = (P.PLANNING, P.ADOPTING, P.WAITING, P.CLAIMING, P.OVER)
"""Phases that may follow in a recovery once all workers have applied the same steps."""


def all_phases_except(*phases: Phase) -> tuple[Phase, ...]:
    """All phases but these."""
    return tuple(phase for phase in P if phase not in phases)


ROWS: tuple[TransitionRow, ...] = (
    # The start. The first generation begins as every later one does; a job of no steps is then only saved, or validated.
    make_transition_row(FirstWorkersPlaced, [P.STARTING], running_rules.note_first_workers),
    make_transition_row(WorkersReady, [P.STARTING], running_rules.begin_first_generation, [P.CLAIMING]),
    make_transition_row(DriverFailover, [P.STARTING], recovery_rules.take_over_run, [P.CLAIMING]),
    make_transition_row(CallFailed, [P.STARTING], failures.handle_failure, [P.CLAIMING, P.FAILING, P.OVER]),
    make_transition_row(StopRequested, [P.STARTING], running_rules.stop_before_start, [P.OVER]),
    make_transition_row(Tick, [P.STARTING], running_rules.check_silent_workers_at_start, [P.OVER]),
    # Steps.
    make_transition_row(
        StepReported, [P.RUNNING], running_rules.count_step_report, [P.FLUSHING, P.REBALANCING, P.CLAIMING, P.OVER]
    ),
    make_transition_row(StepReported, [P.FLUSHING], running_rules.count_step_report, [*SERVED, P.REBALANCING]),
    make_transition_row(StepReported, [P.ABORTING], running_rules.count_step_report, [P.SAVING, P.ENDING, P.CLAIMING, P.OVER]),
    make_transition_row(StepJournalled, [*TRAINING, P.REBALANCING, P.ABORTING, *RECOVERING], running_rules.emit_step),
    make_transition_row(StepEmitted, [P.RUNNING], running_rules.count_emitted_step, [P.FLUSHING]),
    # To `RUNNING`: a new driver may find a checkpoint of a step that people have not seen yet; then nothing is due after it.
    make_transition_row(
        StepEmitted,
        [P.FLUSHING],
        running_rules.count_emitted_step,
        [P.RUNNING, P.VALIDATING, P.SAVING, P.ENDING, P.CLAIMING, P.OVER],
    ),
    make_transition_row(
        CallFailed,
        [*TRAINING, P.VALIDATING, P.SAVING, P.REBALANCING],
        failures.handle_failure,
        [P.CLAIMING, P.FAILING, P.OVER],
    ),
    make_transition_row(StacksReported, TRAINING, running_rules.fail_run_on_hung_workers, [P.FAILING, P.OVER]),
    make_transition_row(StopRequested, TRAINING, running_rules.stop_after_open_steps, [P.FLUSHING]),
    make_transition_row(ValidationEmitted, TRAINING, running_rules.apply_late_validation_stop, [P.FLUSHING]),
    make_transition_row(Tick, [P.RUNNING], running_rules.check_step_deadlines, [P.CLAIMING, P.FAILING, P.OVER]),
    make_transition_row(Tick, [P.FLUSHING], running_rules.check_step_deadlines, [P.ABORTING, P.CLAIMING, P.FAILING, P.OVER]),
    # What is due between two steps.
    make_transition_row(ValidationReported, [P.VALIDATING], running_rules.count_validation),
    make_transition_row(ValidationEmitted, [P.VALIDATING], running_rules.finish_validation, SERVED),
    make_transition_row(
        AllWorkersCopiedState,
        [P.SAVING],
        running_rules.continue_after_snapshot,
        [*TRAINING, P.VALIDATING, P.ENDING, P.CLAIMING],
    ),
    make_transition_row(
        CheckpointSaved, all_phases_except(P.STARTING, P.ENDING, P.FAILING, P.OVER), running_rules.record_checkpoint
    ),
    make_transition_row(CheckpointSaved, [P.ENDING, P.FAILING], running_rules.record_checkpoint, [P.OVER]),
    make_transition_row(
        CheckpointFailed, [*TRAINING, P.VALIDATING, P.REBALANCING, P.ABORTING], running_rules.report_failed_checkpoint
    ),
    make_transition_row(
        CheckpointFailed,
        [P.SAVING],
        running_rules.report_failed_checkpoint,
        [*TRAINING, P.VALIDATING, P.ENDING, P.CLAIMING, P.OVER],
    ),
    make_transition_row(CheckpointFailed, [P.ENDING], running_rules.report_failed_checkpoint, [P.CLAIMING, P.OVER]),
    make_transition_row(CheckpointFailed, [P.FAILING], running_rules.report_failed_checkpoint, [P.OVER]),
    make_transition_row(StopRequested, [P.VALIDATING, P.SAVING, P.ENDING], running_rules.stop_after_save_or_validation),
    make_transition_row(CallFailed, [P.ENDING], failures.handle_failure_at_end, [P.CLAIMING, P.FAILING, P.OVER]),
    make_transition_row(
        Tick, [P.VALIDATING], running_rules.check_save_or_validation_deadline, [P.ABORTING, P.CLAIMING, P.FAILING, P.OVER]
    ),
    make_transition_row(Tick, [P.SAVING], running_rules.check_save_or_validation_deadline, [P.CLAIMING, P.FAILING, P.OVER]),
    make_transition_row(  # to `SAVING`: the last checkpoint, which could not be written, is tried again
        Tick, [P.ENDING], running_rules.check_save_or_validation_deadline, [P.SAVING, P.CLAIMING, P.FAILING, P.OVER]
    ),
    # Other shares of the blocks.
    make_transition_row(SharesPrepared, TRAINING, rebalance_rules.take_prepared_shares, [P.REBALANCING]),
    make_transition_row(SharesAdopted, [P.REBALANCING], rebalance_rules.count_adopted_shares, SERVED),
    make_transition_row(StopRequested, [P.REBALANCING], rebalance_rules.stop_after_rebalancing),
    make_transition_row(StepEmitted, [P.REBALANCING], recovery_rules.note_emitted_step),
    make_transition_row(ValidationEmitted, [P.REBALANCING], recovery_rules.note_validation_stop_request),
    make_transition_row(Tick, [P.REBALANCING], rebalance_rules.check_rebalancing_deadline, [P.CLAIMING, P.OVER]),
    # Aborted steps, and failure.
    make_transition_row(GroupsAborted, [P.ABORTING], running_rules.note_applied_steps, [P.SAVING, P.ENDING, P.OVER]),
    make_transition_row(
        StepEmitted, [P.ABORTING], running_rules.count_emitted_step_while_aborting, [P.SAVING, P.ENDING, P.OVER]
    ),
    make_transition_row(CallFailed, [P.ABORTING], failures.fail_run_while_aborting, [P.FAILING, P.OVER]),
    make_transition_row(Tick, [P.ABORTING], running_rules.check_abort_deadline, [P.CLAIMING, P.OVER]),
    make_transition_row(CallFailed, [P.FAILING], failures.note_further_failure, [P.OVER]),
    make_transition_row(Tick, [P.FAILING], failures.check_failure_deadline, [P.OVER]),
    # From one generation to the next.
    make_transition_row(GenerationClaimed, [P.CLAIMING], recovery_rules.handle_claim, [P.STANDING, P.WAITING, P.OVER]),
    make_transition_row(
        GenerationClaimed,
        all_phases_except(P.STARTING, P.CLAIMING, P.FAILING, P.OVER),
        recovery_rules.handle_claim,
        [P.OVER],
    ),
    make_transition_row(WorkerStatusReported, [P.STANDING], recovery_rules.count_worker_status, [P.SETTLING, *PLANNED]),
    make_transition_row(KeptGradientsApplied, [P.SETTLING], recovery_rules.count_applied_kept_gradients, PLANNED),
    make_transition_row(PlanChosen, [P.PLANNING], find_and_adopt_plan_rules.use_chosen_plan, PLANNED),
    make_transition_row(PlanAdopted, [P.ADOPTING], find_and_adopt_plan_rules.count_adoption, SERVED),
    make_transition_row(CallFailed, [P.CLAIMING], recovery_rules.handle_failure_while_recovering, [P.FAILING, P.OVER]),
    make_transition_row(
        CallFailed, [P.STANDING], recovery_rules.handle_failure_while_recovering, [P.SETTLING, *PLANNED, P.FAILING]
    ),
    make_transition_row(
        CallFailed, RECOVERING[2:], recovery_rules.handle_failure_while_recovering, [P.CLAIMING, P.FAILING, P.OVER]
    ),
    make_transition_row(StopRequested, [P.SETTLING], recovery_rules.stop_after_recovery),
    make_transition_row(
        StopRequested,
        [P.CLAIMING, P.STANDING, P.PLANNING, P.ADOPTING, P.WAITING],
        recovery_rules.stop_after_recovery,
        [P.OVER],
    ),
    make_transition_row(StepEmitted, RECOVERING, recovery_rules.note_emitted_step),
    make_transition_row(ValidationEmitted, RECOVERING, recovery_rules.note_validation_stop_request),
    make_transition_row(CheckpointFailed, RECOVERING, recovery_rules.note_failed_checkpoint),
    make_transition_row(Tick, [P.CLAIMING, P.PLANNING, P.WAITING], recovery_rules.check_recovery_deadlines, [P.OVER]),
    make_transition_row(
        Tick, [P.STANDING, P.SETTLING, P.ADOPTING], recovery_rules.check_recovery_deadlines, [P.CLAIMING, P.OVER]
    ),
    make_transition_row(StacksReported, [P.STANDING, P.ADOPTING], recovery_rules.fail_start_on_hung_workers, [P.OVER]),
    # Workers that come, leave and fall silent.
    make_transition_row(WorkerPlaced, EVERYWHERE, membership_rules.note_placed_worker),
    make_transition_row(
        WorkerJoined, [*TRAINING, P.VALIDATING, P.SAVING, P.REBALANCING], membership_rules.add_spare_while_running
    ),
    make_transition_row(WorkerJoined, RECOVERING[:-1], membership_rules.add_spare_while_recovering),
    make_transition_row(WorkerJoined, [P.WAITING], membership_rules.add_spare_while_recovering, [P.CLAIMING]),
    make_transition_row(WorkerJoined, [P.STARTING, P.ENDING], membership_rules.add_spare_only),
    make_transition_row(
        WorkerStartFailed,
        [P.STARTING, *TRAINING, P.VALIDATING, P.SAVING, P.REBALANCING, *RECOVERING],
        membership_rules.retry_start_later,
    ),
    make_transition_row(WorkerStartFailed, [P.ENDING], membership_rules.forget_failed_start),
    make_transition_row(PlanChosen, TRAINING, membership_rules.judge_larger_plan, [P.CLAIMING]),
    make_transition_row(PlanChosen, [P.VALIDATING, P.SAVING, P.REBALANCING], membership_rules.judge_larger_plan),
    make_transition_row(DrainRequested, TRAINING, membership_rules.drain_worker, [P.CLAIMING]),
    make_transition_row(DrainRequested, [P.STARTING, P.VALIDATING, P.SAVING, P.REBALANCING], membership_rules.drain_worker),
    make_transition_row(DrainRequested, [P.ENDING, *RECOVERING], membership_rules.drain_later),
    make_transition_row(WorkerSilent, EVERYWHERE, wait_for_last_copies.wait_for_silent_worker),
    make_transition_row(WorkerAnswered, EVERYWHERE, wait_for_last_copies.note_answer_of_silent_worker),
    # Answers to a generation that has been given up, and whatever comes after the end.
    *make_ignored_rows([P.STARTING, P.FAILING, P.OVER], GenerationClaimed),
    *make_ignored_rows(all_phases_except(P.STANDING), WorkerStatusReported),
    *make_ignored_rows(all_phases_except(P.SETTLING), KeptGradientsApplied),
    *make_ignored_rows(all_phases_except(P.ADOPTING), PlanAdopted),
    *make_ignored_rows(
        [P.STARTING, P.CLAIMING, P.STANDING, P.SETTLING, P.ADOPTING, P.WAITING, P.ENDING, P.ABORTING], PlanChosen
    ),
    make_transition_row(SharesPrepared, all_phases_except(*TRAINING), rebalance_rules.forget_prepared_shares),
    *make_ignored_rows(all_phases_except(P.REBALANCING), SharesAdopted),
    *make_ignored_rows([P.VALIDATING, P.SAVING, P.REBALANCING, P.ENDING, P.FAILING, P.OVER, *RECOVERING], StepReported),
    *make_ignored_rows(
        [P.SAVING, P.REBALANCING, P.ENDING, P.ABORTING, P.FAILING, P.OVER, *TRAINING, *RECOVERING], ValidationReported
    ),
    *make_ignored_rows([P.SAVING, P.ENDING, P.ABORTING, P.FAILING, P.OVER], ValidationEmitted),
    *make_ignored_rows(
        [P.VALIDATING, P.REBALANCING, P.ENDING, P.FAILING, P.OVER, *TRAINING, *RECOVERING], AllWorkersCopiedState
    ),
    *make_ignored_rows([P.SAVING, P.REBALANCING, P.ENDING, P.FAILING, P.OVER, *RECOVERING], GroupsAborted),
    *make_ignored_rows(all_phases_except(P.STARTING, *TRAINING, P.STANDING, P.ADOPTING), StacksReported),
    *make_ignored_rows([P.FAILING, P.OVER], StepJournalled, StepEmitted, StopRequested, PlanChosen),
    *make_ignored_rows([P.FAILING, P.OVER, *RECOVERING], WorkersReady),
    *make_ignored_rows([P.OVER], CallFailed, CheckpointSaved, CheckpointFailed, Tick),
    *make_ignored_rows([P.ABORTING, P.FAILING, P.OVER], WorkerJoined, WorkerStartFailed),
    *make_ignored_rows([P.FAILING, P.OVER], FirstWorkersPlaced),
    *make_ignored_rows([P.ABORTING, P.FAILING, P.OVER], DrainRequested),
    *make_ignored_rows([P.ABORTING], StopRequested),
)


def index_transition_rows(rows: Iterable[TransitionRow]) -> dict[tuple[Phase, type[object]], TransitionRow]:
    """(phase, kind of event) -> its row. Every pair has one row at most."""
    table: dict[tuple[Phase, type[object]], TransitionRow] = {}
    for row in rows:
        for phase in row.phases:
            assert (phase, row.event) not in table, f"two rows for {row.event.__name__} while {phase.value}"
            table[phase, row.event] = row
    return table


TABLE = index_transition_rows(ROWS)

ON_ENTER: Mapping[Phase, Callable[[RunState], Phase | None]] = {
    P.RUNNING: step_flow_rules.issue_steps,
    P.FLUSHING: step_flow_rules.let_open_steps_end,
    P.VALIDATING: step_flow_rules.begin_validation,
    P.SAVING: step_flow_rules.begin_due_checkpoint,
    P.REBALANCING: rebalance_rules.adopt_shares,
    P.ENDING: step_flow_rules.wait_for_last_checkpoint,
    P.ABORTING: running_rules.abort_open_work,
    P.FAILING: failures.look_for_cause,
    P.OVER: failures.tear_down,
    P.CLAIMING: failures.claim_generation,
    P.STANDING: recovery_rules.fence_workers,
    P.SETTLING: recovery_rules.apply_kept_gradients,
    P.PLANNING: find_and_adopt_plan_rules.request_plan,
    P.ADOPTING: find_and_adopt_plan_rules.adopt_plan,
    P.WAITING: find_and_adopt_plan_rules.wait_for_workers,
}
"""Phase -> what starts its work when it is entered, and sets its time limit.

It returns the phase that follows at once, or None. No row for `STARTING`: the run begins in it."""
