"""Steps that nothing disturbs, for tests of `RunMachine`."""

from collections.abc import Sequence
from typing import Any

from raypar.elastic.actions import EmitStep, WriteJournal
from raypar.elastic.events import StepEmitted, StepJournalled, StepReported
from raypar.elastic.run_machine import RunMachine


def do(machine: RunMachine, event: Any, now_s: float = 0.0) -> Sequence[Any]:
    """The actions that an event leads to."""
    return [decision.action for decision in machine.handle(event, now_s)]


def commit(machine: RunMachine, step: int, workers: int = 2, stop: str | None = None) -> Sequence[Any]:
    """All events of one undisturbed step of 0.1 s; returns the actions after the last."""
    for rank in range(workers):
        actions = do(machine, StepReported(rank, step, 0.1))
    assert actions == [WriteJournal(step)]
    assert do(machine, StepJournalled(step)) == [EmitStep(step)]
    return do(machine, StepEmitted(step, stop))
