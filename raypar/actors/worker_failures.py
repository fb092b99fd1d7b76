"""Makes the events about workers that have failed, with whether a death was to be expected; recognises the loss of a node."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence

from raypar.actors.plan_cache import PlanCache
from raypar.elastic import events as on
from raypar.elastic.run_machine import RunMachine
from raypar.errors import NodeLost, OutOfMemory, WorkerLost
from raypar.plan import ParallelPlan
from raypar.plan.wording import format_worker_numbers
from raypar.ray_compat.actor_errors import worker_lost_error
from raypar.record.events import NodeLoss

TOGETHER_S = 10.0
"""Losses within this time count as one event: of some workers only silence shows that they are lost."""
NOTICED_S = 90.0
"""How long after a worker its node may be reported dead: Ray takes up to a minute to notice that."""


class NodeLossTracker:
    """Collects the losses of workers by node."""

    def __init__(self) -> None:
        self._lost: dict[str, dict[int, float]] = {}
        """Node -> worker -> time of its loss, for nodes whose loss has not been reported."""

    def lost(self, worker: int, node: str, left: Collection[int], with_node: bool, now_s: float) -> NodeLoss | None:
        """The node-lost event, if this was the node's last worker and the node is gone with it.

        `left`: the node's workers that are still there; `with_node`: Ray says that the node has died. If Ray does not say so,
        several workers must have been lost together: a single one may have died alone.
        """
        lost = self._lost.setdefault(node, {})
        lost[worker] = now_s
        together = sorted(number for number, at_s in lost.items() if now_s - at_s < TOGETHER_S)
        if left or not (with_node or len(together) > 1):
            return None
        del self._lost[node]
        if with_node:
            return node_loss_event(node, f"node {node[:8]} is lost, with {format_worker_numbers(together)}", together)
        return node_loss_event(
            node, f"no worker is left on node {node[:8]}: {format_worker_numbers(together)} were lost together", together
        )

    def died(self, node: str, now_s: float) -> NodeLoss | None:
        """The node-lost event of a node that Ray's node table lists as dead, often long after its workers were lost.

        None if no worker was lost with the node, or if its loss was reported before.
        """
        with_it = sorted(number for number, at_s in self._lost.pop(node, {}).items() if now_s - at_s < NOTICED_S)
        if not with_it:
            return None
        return node_loss_event(node, f"node {node[:8]} is lost, with {format_worker_numbers(with_it)}", with_it)


def node_loss_event(node: str, text: str, workers: Collection[int]) -> NodeLoss:
    """The node-lost event, with its text and facts."""
    return NodeLoss(text=text, node=node[:8], workers=list(workers))


Seats = tuple[ParallelPlan | None, Sequence[int]]
"""A plan, and by rank the worker in each seat."""


def describe_seat(seats: Seats, number: int) -> str:
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
        return describe_seat(self.seats(), number)

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
