"""Rules for workers that are asked to leave: they go between two steps, once others hold their state."""

from __future__ import annotations

from raypar.elastic.actions import KillWorker
from raypar.elastic.events import DrainRequested
from raypar.elastic.failure_budget import mark_worker_lost
from raypar.elastic.phases import Phase
from raypar.elastic.run_state import RunState
from raypar.elastic.step_flow import issue_steps


def drain_worker(m: RunState, event: DrainRequested) -> None:
    """Have a worker with a seat leave between two steps; kill a worker without a seat at once."""
    who = m.membership
    if event.worker in who.spares | m.hiring.starting:
        mark_worker_lost(m, event.worker)
        m.decide(KillWorker(event.worker, "drained"), "it had no work")
    elif event.worker in who.members and event.worker not in who.gone:
        who.leaving.add(event.worker)
        m.planned.reason = f"worker {event.worker} leaves: {event.why}"
        if m.phase in (Phase.RUNNING, Phase.FLUSHING):
            issue_steps(m)


def drain_before_start(m: RunState, event: DrainRequested) -> None:
    """Mark the worker as leaving: a new generation without it begins before the first step. Kill one without a seat at once."""
    if event.worker in m.membership.members:
        m.membership.leaving.add(event.worker)
    else:
        drain_worker(m, event)


def drain_later(m: RunState, event: DrainRequested) -> None:
    """Mark the worker as leaving: the next plan is made without it, or a plan after the one that is being adopted."""
    if event.worker not in m.membership.gone:
        m.membership.leaving.add(event.worker)
