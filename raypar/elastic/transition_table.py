"""The table of a run: (phase, event) -> rule. Every pair that may happen; any other is a mistake of ours and raises with the
story."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from raypar.elastic import drain_rules, growth_rules, recovery_rules, running_rules, silent_worker_rules
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

Rule = Callable[[Any, Event], None]
P = Phase
TABLE: dict[tuple[Phase, type], Rule] = {
    (P.STARTING, WorkersReady): running_rules.ready,
    (P.STARTING, CallFailed): running_rules.failed,
    (P.STARTING, StopRequested): running_rules.stop_starting,
    (P.STARTING, Tick): running_rules.tick_starting,
    **{
        (phase, kind): rule
        for phase in (P.RUNNING, P.FLUSHING)
        for kind, rule in {
            StepReported: running_rules.reported,
            StepJournalled: running_rules.journalled,
            StepEmitted: running_rules.emitted,
            CheckpointSaved: running_rules.saved,
            CheckpointFailed: running_rules.save_failed,
            StopRequested: running_rules.stop_running,
            CallFailed: running_rules.failed,
            StacksReported: running_rules.probed,
            Tick: running_rules.tick_steps,
        }.items()
    },
    (P.VALIDATING, ValidationReported): running_rules.validated,
    (P.VALIDATING, ValidationEmitted): running_rules.validation_emitted,
    (P.VALIDATING, CheckpointSaved): running_rules.saved,
    (P.VALIDATING, CheckpointFailed): running_rules.save_failed,
    (P.VALIDATING, StopRequested): running_rules.stop_settled,
    (P.VALIDATING, CallFailed): running_rules.failed,
    (P.VALIDATING, StacksReported): running_rules.ignore,
    (P.VALIDATING, Tick): running_rules.tick_waiting,
    **{
        (phase, kind): running_rules.ignore
        for phase in (P.SAVING, P.ENDING)
        for kind in (ValidationReported, ValidationEmitted, StepReported, GroupsAborted)
    },
    (P.ENDING, SnapshotTaken): running_rules.ignore,  # of a copy that was asked for before a recovery
    (P.SAVING, SnapshotTaken): running_rules.snapshot_taken,
    (P.SAVING, CheckpointSaved): running_rules.saved,
    (P.SAVING, CheckpointFailed): running_rules.save_failed,
    (P.SAVING, StopRequested): running_rules.stop_settled,
    (P.SAVING, CallFailed): running_rules.failed,
    (P.SAVING, StacksReported): running_rules.ignore,
    (P.SAVING, Tick): running_rules.tick_waiting,
    (P.ENDING, CheckpointSaved): running_rules.saved,
    (P.ENDING, CheckpointFailed): running_rules.save_failed,
    (P.ENDING, StopRequested): running_rules.stop_settled,
    (P.ENDING, CallFailed): running_rules.failed_saving,
    (P.ENDING, StacksReported): running_rules.ignore,
    (P.ENDING, Tick): running_rules.tick_waiting,
    (P.ABORTING, GroupsAborted): running_rules.aborted,
    (P.ABORTING, CallFailed): running_rules.failed_for_good,
    (P.ABORTING, CheckpointSaved): running_rules.saved,
    (P.ABORTING, CheckpointFailed): running_rules.save_failed,
    (P.ABORTING, StopRequested): running_rules.ignore,
    (P.ABORTING, Tick): running_rules.tick_aborting,
    (P.ABORTING, StepReported): running_rules.reported,
    (P.ABORTING, StepJournalled): running_rules.journalled,
    (P.ABORTING, StepEmitted): running_rules.emitted_aborting,
    **{(P.ABORTING, kind): running_rules.ignore for kind in (ValidationReported, ValidationEmitted, StacksReported)},
    (P.FAILING, CallFailed): running_rules.failed_again,
    (P.FAILING, CheckpointSaved): running_rules.saved,
    (P.FAILING, CheckpointFailed): running_rules.save_failed,
    (P.FAILING, Tick): running_rules.tick_failing,
    **{
        (P.FAILING, kind): running_rules.ignore
        for kind in (
            WorkersReady,
            StepReported,
            StepJournalled,
            StepEmitted,
            ValidationReported,
            ValidationEmitted,
            SnapshotTaken,
            StopRequested,
            GroupsAborted,
            StacksReported,
        )
    },
    **{
        (P.OVER, kind): running_rules.ignore
        for kind in (
            WorkersReady,
            StepReported,
            CallFailed,
            StepJournalled,
            StepEmitted,
            ValidationReported,
            ValidationEmitted,
            SnapshotTaken,
            CheckpointSaved,
            CheckpointFailed,
            StopRequested,
            GroupsAborted,
            StacksReported,
            Tick,
        )
    },
}

RECOVERING = (P.CLAIMING, P.STANDING, P.SETTLING, P.PLANNING, P.ADOPTING, P.WAITING)
ANSWERS: dict[type, tuple[Phase, Rule]] = {
    GenerationClaimed: (P.CLAIMING, recovery_rules.claimed),
    WorkerStatusReported: (P.STANDING, recovery_rules.stood),
    WorkerSettled: (P.SETTLING, recovery_rules.settled_late),
    PlanChosen: (P.PLANNING, recovery_rules.plan_chosen),
    PlanAdopted: (P.ADOPTING, recovery_rules.adopted),
}
"""What each phase of a recovery waits for. Anywhere else it is of a generation that has been given up."""

for kind, (where, rule) in ANSWERS.items():
    TABLE |= {(phase, kind): running_rules.ignore for phase in P}
    TABLE[where, kind] = rule

ASIDE: dict[type, Rule] = {
    CallFailed: recovery_rules.lost_recovering,
    WorkerJoined: growth_rules.joined,
    WorkerStartFailed: growth_rules.hire_failed,
    DrainAsked: drain_rules.drain_recovering,
    StopRequested: recovery_rules.stop_recovering,
    StepJournalled: running_rules.journalled,
    StepEmitted: recovery_rules.emitted_aside,
    CheckpointSaved: running_rules.saved,
    CheckpointFailed: recovery_rules.save_failed_aside,
    ValidationEmitted: recovery_rules.validation_emitted_aside,
    Tick: recovery_rules.tick_recovering,
    **dict.fromkeys(
        (WorkersReady, StepReported, ValidationReported, SnapshotTaken, StacksReported, GroupsAborted), running_rules.ignore
    ),
}
"""What may come at any time on the way to the next generation."""
TABLE |= {(phase, kind): rule for phase in RECOVERING for kind, rule in ASIDE.items()}

TABLE |= {
    (phase, kind): rule
    for phase in P
    for kind, rule in ((WorkerSilent, silent_worker_rules.silent), (WorkerAnswered, silent_worker_rules.heard))
}
TABLE |= {(phase, WorkerPlaced): growth_rules.placed for phase in P}
for phase in (P.RUNNING, P.FLUSHING, P.VALIDATING, P.SAVING):
    TABLE[phase, WorkerJoined] = growth_rules.joined_running
    TABLE[phase, WorkerStartFailed] = growth_rules.hire_failed
    TABLE[phase, DrainAsked] = drain_rules.drain_running
    TABLE[phase, PlanChosen] = growth_rules.growth_chosen
for phase in (P.STARTING, P.ABORTING, P.FAILING, P.OVER):
    TABLE[phase, WorkerJoined] = TABLE[phase, WorkerStartFailed] = TABLE[phase, DrainAsked] = running_rules.ignore
TABLE[P.STARTING, DrainAsked] = drain_rules.drain_starting
# The last checkpoint may have to be written again, by a new generation: who is there for it must be known.
TABLE[P.ENDING, WorkerJoined] = growth_rules.joined_ending
TABLE[P.ENDING, WorkerStartFailed] = growth_rules.hire_failed_ending
TABLE[P.ENDING, DrainAsked] = drain_rules.drain_recovering
TABLE[P.STARTING, DriverTakenOver] = recovery_rules.taken_over
# Late answers of a generation that was given up meet the phases of the next one.
TABLE |= {
    (phase, kind): running_rules.ignore for phase in (P.RUNNING, P.FLUSHING) for kind in (ValidationReported, SnapshotTaken)
}
TABLE[P.VALIDATING, StepReported] = TABLE[P.VALIDATING, SnapshotTaken] = running_rules.ignore
# Its callbacks may take longer than a recovery that began meanwhile.
TABLE[P.RUNNING, ValidationEmitted] = TABLE[P.FLUSHING, ValidationEmitted] = running_rules.validation_emitted_late
