"""Steps that nothing disturbs, for tests of `RunMachine`."""

from collections.abc import Sequence
from typing import Any

from raypar.elastic.actions import EmitStep, WriteJournal
from raypar.elastic.events import (
    FirstWorkersPlaced,
    GenerationClaimed,
    PlanAdopted,
    StepEmitted,
    StepJournalled,
    StepReported,
    WorkersReady,
    WorkerStatusReported,
)
from raypar.elastic.generation_guard import WorkerStatus
from raypar.elastic.run_machine import RunMachine
from raypar.plan import ParallelPlan


def do(machine: RunMachine, event: Any, now_s: float = 0.0) -> Sequence[Any]:
    """The actions that an event leads to."""
    return [decision.action for decision in machine.handle(event, now_s)]


def commit(machine: RunMachine, step: int, workers: int = 2, stop: str | None = None, seconds: float = 0.1) -> Sequence[Any]:
    """All events of one undisturbed step; returns the actions after the last."""
    for rank in range(workers):
        actions = do(machine, StepReported((rank,), step, seconds))
    assert actions == [WriteJournal(step)]
    assert do(machine, StepJournalled(step)) == [EmitStep(step)]
    return do(machine, StepEmitted(step, stop))


def first_generation(machine: RunMachine, first: FirstWorkersPlaced | None = None) -> list[Any]:
    """All events of a start that nothing disturbs, up to the first steps; with the members of `first`, or the machine's own.

    A machine without a plan gets one of as many replicas as it has workers.
    """
    plan, members = machine.membership.plan, machine.membership.members
    if first is None and plan is None:
        first = FirstWorkersPlaced(ParallelPlan.mesh(dp=len(members), layers=1), members)
    members = members if first is None else first.members
    standing = sorted({*members, *machine.membership.spares})
    return [
        *([first] if first is not None else []),
        WorkersReady(),
        GenerationClaimed(1, True),
        *(WorkerStatusReported(1, WorkerStatus(worker)) for worker in standing),
        *(PlanAdopted(worker, 1) for worker in members),
    ]


def begin(machine: RunMachine, now_s: float = 0.0) -> Sequence[Any]:
    """All of `first_generation`; returns the actions after the last event."""
    return [do(machine, event, now_s) for event in first_generation(machine)][-1]
