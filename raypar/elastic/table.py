"""The table of a run: (phase, event) -> rule. Every pair that may happen; any other is a mistake of ours and raises with the
story."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from raypar.elastic import draining, growth, recovery, rules, silence
from raypar.elastic.events import (
    Aborted,
    Adopted,
    CallFailed,
    Claimed,
    DrainAsked,
    Emitted,
    Event,
    Heard,
    HireFailed,
    Joined,
    Journalled,
    Placed,
    PlanChosen,
    Probed,
    Saved,
    SaveFailed,
    SettledLate,
    Silent,
    SnapshotTaken,
    StepReported,
    Stood,
    StopRequested,
    TakenOver,
    Tick,
    ValidationEmitted,
    ValidationReported,
    WorkersReady,
)
from raypar.elastic.phases import Phase

Rule = Callable[[Any, Event], None]
P = Phase
TABLE: dict[tuple[Phase, type], Rule] = {
    (P.STARTING, WorkersReady): rules.ready,
    (P.STARTING, CallFailed): rules.failed,
    (P.STARTING, StopRequested): rules.stop_starting,
    (P.STARTING, Tick): rules.tick_starting,
    **{
        (phase, kind): rule
        for phase in (P.RUNNING, P.FLUSHING)
        for kind, rule in {
            StepReported: rules.reported,
            Journalled: rules.journalled,
            Emitted: rules.emitted,
            Saved: rules.saved,
            SaveFailed: rules.save_failed,
            StopRequested: rules.stop_running,
            CallFailed: rules.failed,
            Probed: rules.probed,
            Tick: rules.tick_steps,
        }.items()
    },
    (P.VALIDATING, ValidationReported): rules.validated,
    (P.VALIDATING, ValidationEmitted): rules.validation_emitted,
    (P.VALIDATING, Saved): rules.saved,
    (P.VALIDATING, SaveFailed): rules.save_failed,
    (P.VALIDATING, StopRequested): rules.stop_settled,
    (P.VALIDATING, CallFailed): rules.failed,
    (P.VALIDATING, Probed): rules.ignore,
    (P.VALIDATING, Tick): rules.tick_waiting,
    **{
        (phase, kind): rules.ignore
        for phase in (P.SAVING, P.ENDING)
        for kind in (ValidationReported, ValidationEmitted, StepReported, Aborted)
    },
    (P.ENDING, SnapshotTaken): rules.ignore,  # of a copy that was asked for before a recovery
    (P.SAVING, SnapshotTaken): rules.snapshot_taken,
    (P.SAVING, Saved): rules.saved,
    (P.SAVING, SaveFailed): rules.save_failed,
    (P.SAVING, StopRequested): rules.stop_settled,
    (P.SAVING, CallFailed): rules.failed,
    (P.SAVING, Probed): rules.ignore,
    (P.SAVING, Tick): rules.tick_waiting,
    (P.ENDING, Saved): rules.saved,
    (P.ENDING, SaveFailed): rules.save_failed,
    (P.ENDING, StopRequested): rules.stop_settled,
    (P.ENDING, CallFailed): rules.failed_saving,
    (P.ENDING, Probed): rules.ignore,
    (P.ENDING, Tick): rules.tick_waiting,
    (P.ABORTING, Aborted): rules.aborted,
    (P.ABORTING, CallFailed): rules.failed_for_good,
    (P.ABORTING, Saved): rules.saved,
    (P.ABORTING, SaveFailed): rules.save_failed,
    (P.ABORTING, StopRequested): rules.ignore,
    (P.ABORTING, Tick): rules.tick_aborting,
    (P.ABORTING, StepReported): rules.reported,
    (P.ABORTING, Journalled): rules.journalled,
    (P.ABORTING, Emitted): rules.emitted_aborting,
    **{(P.ABORTING, kind): rules.ignore for kind in (ValidationReported, ValidationEmitted, Probed)},
    (P.FAILING, CallFailed): rules.failed_again,
    (P.FAILING, Saved): rules.saved,
    (P.FAILING, SaveFailed): rules.save_failed,
    (P.FAILING, Tick): rules.tick_failing,
    **{
        (P.FAILING, kind): rules.ignore
        for kind in (
            WorkersReady,
            StepReported,
            Journalled,
            Emitted,
            ValidationReported,
            ValidationEmitted,
            SnapshotTaken,
            StopRequested,
            Aborted,
            Probed,
        )
    },
    **{
        (P.OVER, kind): rules.ignore
        for kind in (
            WorkersReady,
            StepReported,
            CallFailed,
            Journalled,
            Emitted,
            ValidationReported,
            ValidationEmitted,
            SnapshotTaken,
            Saved,
            SaveFailed,
            StopRequested,
            Aborted,
            Probed,
            Tick,
        )
    },
}

RECOVERING = (P.CLAIMING, P.STANDING, P.SETTLING, P.PLANNING, P.ADOPTING, P.WAITING)
ANSWERS: dict[type, tuple[Phase, Rule]] = {
    Claimed: (P.CLAIMING, recovery.claimed),
    Stood: (P.STANDING, recovery.stood),
    SettledLate: (P.SETTLING, recovery.settled_late),
    PlanChosen: (P.PLANNING, recovery.plan_chosen),
    Adopted: (P.ADOPTING, recovery.adopted),
}
"""What each phase of a recovery waits for. Anywhere else it is of a generation that has been given up."""

for kind, (where, rule) in ANSWERS.items():
    TABLE |= {(phase, kind): rules.ignore for phase in P}
    TABLE[where, kind] = rule

ASIDE: dict[type, Rule] = {
    CallFailed: recovery.lost_recovering,
    Joined: growth.joined,
    HireFailed: growth.hire_failed,
    DrainAsked: draining.drain_recovering,
    StopRequested: recovery.stop_recovering,
    Journalled: rules.journalled,
    Emitted: recovery.emitted_aside,
    Saved: rules.saved,
    SaveFailed: recovery.save_failed_aside,
    ValidationEmitted: recovery.validation_emitted_aside,
    Tick: recovery.tick_recovering,
    **dict.fromkeys((WorkersReady, StepReported, ValidationReported, SnapshotTaken, Probed, Aborted), rules.ignore),
}
"""What may come at any time on the way to the next generation."""
TABLE |= {(phase, kind): rule for phase in RECOVERING for kind, rule in ASIDE.items()}

TABLE |= {(phase, kind): rule for phase in P for kind, rule in ((Silent, silence.silent), (Heard, silence.heard))}
TABLE |= {(phase, Placed): growth.placed for phase in P}
for phase in (P.RUNNING, P.FLUSHING, P.VALIDATING, P.SAVING):
    TABLE[phase, Joined] = growth.joined_running
    TABLE[phase, HireFailed] = growth.hire_failed
    TABLE[phase, DrainAsked] = draining.drain_running
    TABLE[phase, PlanChosen] = growth.growth_chosen
for phase in (P.STARTING, P.ABORTING, P.FAILING, P.OVER):
    TABLE[phase, Joined] = TABLE[phase, HireFailed] = TABLE[phase, DrainAsked] = rules.ignore
TABLE[P.STARTING, DrainAsked] = draining.drain_starting
# The last checkpoint may have to be written again, by a new generation: who is there for it must be known.
TABLE[P.ENDING, Joined] = growth.joined_ending
TABLE[P.ENDING, HireFailed] = growth.hire_failed_ending
TABLE[P.ENDING, DrainAsked] = draining.drain_recovering
TABLE[P.STARTING, TakenOver] = recovery.taken_over
# Late answers of a generation that was given up meet the phases of the next one.
TABLE |= {(phase, kind): rules.ignore for phase in (P.RUNNING, P.FLUSHING) for kind in (ValidationReported, SnapshotTaken)}
TABLE[P.VALIDATING, StepReported] = TABLE[P.VALIDATING, SnapshotTaken] = rules.ignore
# Its callbacks may take longer than a recovery that began meanwhile.
TABLE[P.RUNNING, ValidationEmitted] = TABLE[P.FLUSHING, ValidationEmitted] = rules.validation_emitted_late
