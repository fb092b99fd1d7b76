"""What a death says against the step it was in, and when there have been enough of them."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from raypar.elastic.events import CallFailed
from raypar.elastic.phases import Phase
from raypar.errors import OutOfMemory, WorkerLost, first_line

if TYPE_CHECKING:
    from raypar.elastic.run_machine import RunMachine


def record_death(m: RunMachine, event: CallFailed) -> bool:
    """It is gone; whether that says anything against the step it was in: not when it had been asked to leave, or its machine
    was taken away."""
    assert event.worker is not None
    innocent = event.preempted or event.worker in m.leaving
    if event.worker in m.members and event.worker not in m.gone and not innocent:
        m.worker_deaths.append(event)
    mark_lost(m, event.worker)
    return not innocent


def mark_lost(m: RunMachine, worker: int) -> None:
    """It is gone and never comes back under this number."""
    m.gone.add(worker)
    m.spares.discard(worker)
    m.leaving.discard(worker)
    m.hiring.discard(worker)
    m.placed.discard(worker)


def repeated_out_of_memory(m: RunMachine, event: CallFailed) -> bool:
    """It was killed because memory was lacking, like one at its place in the same plan before: it would happen a third time."""
    order = m.recovery.order if m.phase is Phase.ADOPTING else None
    plan, members = (m.plan, m.members) if order is None else (order.plan, order.members)
    if not isinstance(event.error, OutOfMemory) or plan is None or event.worker not in members:
        return False
    place = plan, plan.seats[members.index(event.worker)].position
    if place in m.starved:
        m.over("failed", first_line(event.error), event.error)
        return True
    m.starved.add(place)
    return False


def step_failed_too_often(m: RunMachine) -> WorkerLost:
    """The same step has failed again and again."""
    step, most = max(m.committed, m.journalled) + 1, m.policy.max_attempts
    alike = {failure_signature(event.error) for event in m.worker_deaths[-most:]}
    if len(m.worker_deaths) >= most and len(alike) == 1:
        who = ", ".join(str(event.worker) for event in m.worker_deaths[-most:])
        return WorkerLost(
            f"{len(m.worker_deaths)} workers have died in step {step}, one after the other and all in the same way "
            f"(the last were {who}): {first_line(m.worker_deaths[-1].error)}",
            cure=f"something in step {step} (its samples, a library) ends the process: look at the workers' logs, and run it "
            "in one process; `raypar resume` goes on from the last checkpoint",
        )
    last = "\n".join(str(f.error) for f in m.failures[-most:])
    return WorkerLost(
        f"{m.attempts} recoveries in a row did not get beyond step {step}; the last failures:\n{last}",
        cure="what kills the workers is probably in this step: look at their logs; `raypar resume` goes on",
    )


def failure_signature(error: Exception) -> str:
    """How somebody died, without who it was: numbers, ids and places are left out."""
    return re.sub(r"\b[0-9a-f]{6,}\b|\d+", "", first_line(error).rpartition(" was lost: ")[2])
