"""Which transitions of the run machine have happened: (phase before, kind of event, phase after)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from raypar.elastic.phases import Phase
from raypar.elastic.run_machine import RunMachine
from raypar.elastic.transition_table import ROWS

Transition = tuple[Phase, str, Phase]


def declared_transitions() -> set[Transition]:
    """All changes of phase that the table's rows allow."""
    return {(phase, row.event.__name__, to) for row in ROWS for phase in row.phases for to in row.to if to is not phase}


@contextmanager
def record_transitions() -> Iterator[set[Transition]]:
    """The changes of phase of all machines, as long as the context lasts."""
    found: set[Transition] = set()
    apply = RunMachine._apply

    def recorded(machine: RunMachine, event: object) -> None:
        before = machine.phase
        apply(machine, event)
        if machine.phase is not before:
            found.add((before, type(event).__name__, machine.phase))

    RunMachine._apply = recorded
    try:
        yield found
    finally:
        RunMachine._apply = apply
