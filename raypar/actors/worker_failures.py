"""Makes the events about workers that have failed, with whether a death was to be expected."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from raypar.actors.plan_cache import PlanCache
from raypar.elastic import events as on
from raypar.elastic.run_machine import RunMachine
from raypar.errors import NodeLost, OutOfMemory, WorkerLost
from raypar.plan import ParallelPlan
from raypar.ray_compat.actor_errors import worker_lost_error

Seats = tuple[ParallelPlan | None, Sequence[int]]
"""A plan, and by rank the worker in each seat."""


def describe_seat_or_number(seats: Seats, number: int) -> str:
    """The worker's seat in words, or its number if it has none."""
    plan, members = seats
    return plan.coordinate(members.index(number)) if plan is not None and number in members else f"worker {number}"


PostedEvent = on.RunEvent | asyncio.Future[on.RunEvent]
"""An event for the run machine, or one that is being made: it keeps its place among the others."""


class WorkerFailures:
    """Posts `CallFailed` for workers whose call has failed, or that have died."""

    def __init__(self, machine: RunMachine, plans: PlanCache, post: Callable[[PostedEvent], None]) -> None:
        self.machine = machine
        """Knows the members and their seats."""
        self.plans = plans
        """Knows what a worker that is out of memory holds."""
        self.post_event = post
        """Gives an event to the run machine."""
        self.leaving: set[int] = set()
        """Workers that were asked to leave; `WorkerRegistry` adds them."""

    def seats(self) -> Seats:
        """The current plan and the members by rank."""
        return self.machine.membership.plan, self.machine.membership.members

    def coordinate(self, number: int) -> str:
        """The worker's seat in words, or its number if it has no seat."""
        return describe_seat_or_number(self.seats(), number)

    def lost_error(self, who: str, error: Exception) -> WorkerLost:
        """The error for a worker (`who`: its seat in words) whose call or ping ended with Ray's `RayActorError`."""
        cure = "`raypar resume` goes on from the last checkpoint, if there is one"
        if not self.machine.policy.elastic:
            cure = f"with `elastic: true` lost workers are replaced; {cure}"
        return worker_lost_error(who, error, cure)

    def post(self, kind: on.FailureKind, error: Exception, worker: int, generation: int | None = None) -> None:
        """Post the event, whole. Where memory was short, that is looked into first; later events wait for it."""
        # A death is no fault if the worker was asked to leave, or died with its node.
        preempted = kind == "lost" and (worker in self.leaving or isinstance(error, NodeLost))
        event = on.CallFailed(kind, error, worker, generation, preempted)
        self.post_event(asyncio.ensure_future(self._explained(event, worker)) if isinstance(error, OutOfMemory) else event)

    async def _explained(self, event: on.CallFailed, worker: int) -> on.RunEvent:
        error = await asyncio.to_thread(self.explain_out_of_memory, worker, event.error)
        return on.CallFailed(event.kind, error, worker, event.generation, event.preempted)

    def explain_out_of_memory(self, number: int, error: Exception) -> Exception:
        """The error, if it is out of memory with what the worker holds and what would fit. Slow: call it in a thread."""
        members, plan = self.machine.membership.members, self.machine.membership.plan
        if not isinstance(error, OutOfMemory) or plan is None or number not in members:
            return error
        held, fits = self.plans.memory(plan, members.index(number))
        if "\n" in error.what:  # with the user's traceback
            return OutOfMemory(f"{error.what}\n{held}", fits)
        return OutOfMemory(f"{error.what}; {held}", f"{fits}; else {error.cure}")
