"""Starts the workers that the run lacks and gives back those that it cannot use, as `desired_capacity.py` decides."""

from __future__ import annotations

from raypar.elastic.actions import ReleaseWorkers, StartWorkers
from raypar.elastic.desired_capacity import CapacityInputs, DesiredCapacity, compute_desired_capacity
from raypar.elastic.failures import mark_worker_lost
from raypar.elastic.phases import Phase
from raypar.elastic.run_state import RunState
from raypar.plan.wording import count_noun


def desired_capacity_of_run(m: RunState, available: int | None = None) -> DesiredCapacity:
    """The number of workers that the run should use, start, wait for and give back now.

    `available`: workers that a new plan could use; by default all members, and the spares whose replica is complete.
    """
    who, planned, hiring = m.membership, m.planned, m.hiring
    unchanged = not planned.asking and planned.reason is None
    view = CapacityInputs(
        members=set(who.members) - who.gone - who.leaving,
        spares=who.spares,
        starting=hiring.starting,
        placed=hiring.placed,
        available=count_available_workers(m) if available is None else available,
        seats=len(who.members),
        start_after_s=hiring.retry_at_s,
        grow_at_s=planned.ask_at_s,
        may_grow=unchanged and m.step_times.known and m.timer.now_s >= planned.not_before_s,
        stopping=m.stopping.request is not None,
        useful=hiring.useful,
        may_release=unchanged and _trains_undisturbed(m),
        needed_spares=spares_with_mirror_copies(m),
        asked_together=hiring.asked_together,
        on_demand=hiring.on_demand,
    )
    return compute_desired_capacity(view, m.policy.capacity, m.timer.now_s)


def _trains_undisturbed(m: RunState) -> bool:
    """Whether nobody but the members is needed now: no recovery, no worker that leaves, no checkpoint that is being written."""
    undisturbed = m.health.disturbed_at_s is None and not m.membership.leaving
    return m.phase is Phase.RUNNING and undisturbed and m.progress.saving is None


def spares_with_mirror_copies(m: RunState) -> set[int]:
    """Spares that had a seat in an earlier generation and may keep the only mirror snapshot that is complete.

    They are needed until this generation has a complete snapshot of its own.
    """
    needed = m.mirror.enabled and not m.mirror.complete_in_generation
    return m.membership.spares & m.membership.had_seat if needed else set()


def spares_of_complete_replicas(m: RunState) -> set[int]:
    """Spares whose replica is complete: no other shard of it is still starting. Only a complete replica can get seats."""
    together, starting = m.hiring.asked_together, m.hiring.starting
    return {worker for worker in m.membership.spares if not together.get(worker, set()) & starting}


def count_available_workers(m: RunState) -> int:
    """Workers that a new plan could use while training goes on."""
    return len(m.membership.members) + len(spares_of_complete_replicas(m))


def start_missing_workers(m: RunState) -> None:
    """Start the workers that are missing. Called when the others train or wait: starting a process costs them time."""
    start_workers(m, desired_capacity_of_run(m))


def start_workers(m: RunState, decision: DesiredCapacity) -> None:
    """Start the workers of `decision.groups_to_start`."""
    limits = m.policy.capacity
    reason = f"{decision.workers_to_start} of {limits.wanted + limits.standbys} workers are missing"
    for group in decision.groups_to_start:
        first = m.hiring.next_number
        numbers = tuple(range(first, first + group.workers))
        m.hiring.ask_for(numbers, on_demand=group.on_demand)
        m.decide(StartWorkers(numbers, group.on_demand), reason)


def release_workers(m: RunState, decision: DesiredCapacity) -> None:
    """Give back the workers of `decision.workers_to_release`; their numbers are not used again."""
    released = decision.workers_to_release
    if not released:
        return
    wanted = m.policy.capacity.wanted if m.hiring.useful is None else m.hiring.useful
    for worker in released:
        mark_worker_lost(m, worker)
    standbys = f", with {m.policy.standbys} in reserve" * bool(m.policy.standbys)
    m.decide(ReleaseWorkers(released), f"{count_noun(wanted, 'worker suffices', 'workers suffice')}{standbys}")
