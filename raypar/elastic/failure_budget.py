"""Deaths of workers that the step itself may have caused, and the errors that end the run after too many of them."""

from __future__ import annotations

import re

from raypar.elastic.events import CallFailed
from raypar.elastic.phases import Phase
from raypar.elastic.run_state import RunState
from raypar.elastic.unreachable_workers import describe_unreachable_workers
from raypar.errors import OutOfMemory, WorkerLost, error_first_line


def record_death(m: RunState, event: CallFailed) -> bool:
    """Mark the worker lost. True if the step itself may be to blame.

    The step is not to blame if the worker had been asked to leave, or its machine was taken away.
    """
    assert event.worker is not None
    who = m.membership
    innocent = event.preempted or event.worker in who.leaving
    if event.worker in who.members and event.worker not in who.gone and not innocent:
        m.health.deaths.append(event)
    mark_worker_lost(m, event.worker)
    return not innocent


def mark_worker_lost(m: RunState, worker: int) -> None:
    """Mark the worker lost for good: its number is never used again."""
    m.membership.mark_lost(worker)
    m.hiring.forget(worker)


def end_run_on_repeated_out_of_memory(m: RunState, event: CallFailed) -> bool:
    """End the run if memory was short for the second time at the same position of the same plan. True if it has ended."""
    order = m.recovery.order if m.phase is Phase.ADOPTING else None
    plan, members = (m.membership.plan, m.membership.members) if order is None else (order.plan, order.members)
    if not isinstance(event.error, OutOfMemory) or plan is None or event.worker not in members:
        return False
    place = plan, plan.seats[members.index(event.worker)].position
    if place in m.health.out_of_memory_at:
        m.end_run("failed", error_first_line(event.error), event.error)
        return True
    m.health.out_of_memory_at.add(place)
    return False


def make_repeated_failure_error(m: RunState) -> WorkerLost:
    """The error of a run that has used up its attempts at a step."""
    deaths, failures = m.health.deaths, m.health.failures
    step, most = max(m.progress.committed, m.progress.journalled) + 1, m.policy.max_attempts
    signatures = {failure_signature(event.error) for event in deaths[-most:]}
    if len(deaths) >= most and len(signatures) == 1:
        who = ", ".join(str(event.worker) for event in deaths[-most:])
        return WorkerLost(
            f"{len(deaths)} workers have died in step {step}, one after the other and all in the same way "
            f"(the last were {who}): {error_first_line(deaths[-1].error)}",
            cure=f"something in step {step} (its samples, a library) ends the process: look at the workers' logs, and run it "
            "in one process; `raypar resume` goes on from the last checkpoint",
        )
    last = "\n".join(str(f.error) for f in failures[-most:])
    if pairs := describe_unreachable_workers(m):
        return WorkerLost(
            f"{m.health.attempts} recoveries in a row did not get beyond step {step}: {pairs} cannot reach each other, and "
            f"none of them can be done without; the last failures:\n{last}",
            cure="look at the network between their nodes (`raypar doctor`, routes, firewalls); `raypar resume` goes on from "
            "the last checkpoint",
        )
    return WorkerLost(
        f"{m.health.attempts} recoveries in a row did not get beyond step {step}; the last failures:\n{last}",
        cure="what kills the workers is probably in this step: look at their logs; `raypar resume` goes on",
    )


def failure_signature(error: Exception) -> str:
    """The text of a worker's death without numbers, ids and addresses, so that equal causes give equal texts."""
    return re.sub(r"\b[0-9a-f]{6,}\b|\d+", "", error_first_line(error).rpartition(" was lost: ")[2])
