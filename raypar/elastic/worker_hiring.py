"""The number of workers that the run wants now (`desired_capacity`), and the start of missing workers."""

from __future__ import annotations

from raypar.elastic import desired_capacity
from raypar.elastic.actions import StartWorker
from raypar.elastic.desired_capacity import CapacityInputs, DesiredCapacity
from raypar.elastic.run_state import RunState


def desired_capacity_of_run(m: RunState, available: int | None = None) -> DesiredCapacity:
    """The number of workers that the run should use, start and wait for now.

    `available`: workers that a new plan could use; by default all members and spares.
    """
    who, planned = m.membership, m.planned
    view = CapacityInputs(
        members=set(who.members) - who.gone - who.leaving,
        spares=who.spares,
        starting=m.hiring.starting,
        placed=m.hiring.placed,
        available=count_available_workers(m) if available is None else available,
        seats=len(who.members),
        start_after_s=m.hiring.retry_at_s,
        grow_at_s=planned.ask_at_s,
        may_grow=not planned.asking and planned.reason is None and m.step_times.known,
        stopping=m.stopping.request is not None,
    )
    return desired_capacity.compute_desired_capacity(view, m.policy.capacity, m.timer.now_s)


def count_available_workers(m: RunState) -> int:
    """Workers that a new plan could use while training goes on."""
    return len(m.membership.members) + len(m.membership.spares)


def start_missing_workers(m: RunState) -> None:
    """Start the workers that are missing. Called when the others train or wait: starting a process costs them time."""
    start_workers(m, desired_capacity_of_run(m))


def start_workers(m: RunState, decision: DesiredCapacity) -> None:
    """Start `decision.workers_to_start` workers."""
    limits = m.policy.capacity
    reason = f"{decision.workers_to_start} of {limits.wanted + limits.standbys} workers are missing"
    for _ in range(decision.workers_to_start):
        number = m.hiring.next_number
        m.hiring.next_number += 1
        m.hiring.starting.add(number)
        m.decide(StartWorker(number), reason)
