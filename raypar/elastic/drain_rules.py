"""Workers that are asked to leave: they do so between two steps, when others have what they held."""

from __future__ import annotations

from typing import TYPE_CHECKING

from raypar.elastic.actions import KillWorker
from raypar.elastic.events import DrainAsked, Event
from raypar.elastic.failure_budget import mark_lost
from raypar.elastic.phases import Phase

if TYPE_CHECKING:
    from raypar.elastic.run_machine import RunMachine


def drain_running(m: RunMachine, event: Event) -> None:
    """It leaves between two steps."""
    assert isinstance(event, DrainAsked)
    if event.worker in m.spares | m.hiring:
        mark_lost(m, event.worker)
        m.decide(KillWorker(event.worker, "drained"), "it had no work")
    elif event.worker in m.members and event.worker not in m.gone:
        m.leaving.add(event.worker)
        m.pause_for = f"worker {event.worker} leaves: {event.why}"
        if m.phase in (Phase.RUNNING, Phase.FLUSHING):
            m.advance()


def drain_starting(m: RunMachine, event: Event) -> None:
    """It leaves before the first step."""
    assert isinstance(event, DrainAsked)
    m.leaving.add(event.worker)


def drain_recovering(m: RunMachine, event: Event) -> None:
    """It is looked at when a plan is made; if that is over, once the new generation runs."""
    assert isinstance(event, DrainAsked)
    if event.worker in m.gone:
        return
    m.leaving.add(event.worker)
