"""Workers that are asked to leave: they do so between two steps, when others hold what they held."""

from __future__ import annotations

from raypar.elastic.actions import KillWorker
from raypar.elastic.events import DrainRequested
from raypar.elastic.failure_budget import mark_worker_lost
from raypar.elastic.phases import Phase
from raypar.elastic.run_state import RunState
from raypar.elastic.step_flow import issue_steps


def drain_worker(m: RunState, event: DrainRequested) -> None:
    """Let a worker with a seat leave between two steps, and one without a seat at once."""
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
    """Let the worker leave before the first step."""
    m.membership.leaving.add(event.worker)


def drain_later(m: RunState, event: DrainRequested) -> None:
    """Let the worker leave with the next plan; if that is made already, once the new generation runs."""
    if event.worker not in m.membership.gone:
        m.membership.leaving.add(event.worker)
