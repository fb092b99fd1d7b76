"""The agents of a run's nodes as the driver has them: it calls many workers by way of a few agents, and few directly.

Agents are no part of a run: workers are called directly until their node's agent is there, and again when it is not.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeVar

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raypar.actors.actor_handle_types import AgentHandle, PendingAnswer, WorkerHandle, kill_actor
from raypar.actors.messages import GatheredAnswers
from raypar.actors.node_agent import REPLY_S, NodeAgent
from raypar.elastic.call_routes import CallRoute, agents_below, make_call_routes
from raypar.errors import error_first_line
from raypar.record.events import Event, RunWarning

T = TypeVar("T")

MOST_DIRECT = 32
"""The most workers that the driver calls directly: a call and its answer take Ray some 0.6 ms of a slow processor."""
GATHER_S = 5.0
"""How long an agent waits for the first answer to a step call before it replies without any, and is asked again."""
START_S = 60.0
"""How long an agent may take to start."""
RESTART_S = 10.0
"""Time from the loss of an agent to the start of another one on its node."""


def start_node_agent(node: str) -> AgentHandle:
    """Start an agent on a node. It ends with the process that calls this function, and on no account runs elsewhere."""
    made: Any = ray.remote(num_cpus=0, max_restarts=0)(NodeAgent)
    agent: AgentHandle = made.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)).remote()
    return agent


class NodeAgents:
    """One agent on each node with workers of the run, as long as the run has more than `MOST_DIRECT` workers."""

    def __init__(self, note: Callable[[Event], None] = lambda event: None) -> None:
        self.note = note
        """Shows an event and writes it to events.jsonl."""
        self._agents: dict[str, AgentHandle] = {}
        """Node -> its agent, which may be starting."""
        self._started: set[str] = set()
        """Nodes whose agent has started."""
        self._routes: dict[str, CallRoute] = {}
        """Node of an agent that the driver calls -> all workers that it reaches."""
        self._told: dict[str, tuple[object, ...]] = {}
        """Node -> whom its agent was last told that it calls."""
        self._lost_s: dict[str, float] = {}
        """Node -> when its last agent was lost (monotonic)."""
        self._reached: frozenset[int] = frozenset()
        """Workers on these routes."""
        self._up_to_date: object = None
        """Workers and started agents that the routes are made of; None: an agent is to be started."""
        self._starting: set[asyncio.Task[None]] = set()
        """Agents that are waited for."""

    # -- calling -----------------------------------------------------------------------------------------------------------

    def routes(self, numbers: Collection[int]) -> dict[str, CallRoute]:
        """Node of an agent -> the route to those of `numbers` that are called by way of it; all others are called directly."""
        wanted = frozenset(numbers)
        if self._reached <= wanted:  # as nearly always
            return dict(self._routes)
        found = {node: route.only(wanted) for node, route in self._routes.items()}
        return {node: route for node, route in found.items() if route is not None}

    async def gather(
        self, node: str, within_s: float, ask: Callable[[AgentHandle], PendingAnswer[GatheredAnswers[T]]]
    ) -> GatheredAnswers[T] | None:
        """The reply of the agent of a node; None if there is none within `within_s` and a little: that agent is given up."""
        agent = self._agents.get(node)
        if agent is None:
            return None
        try:
            reply: GatheredAnswers[T] = await asyncio.wait_for(asyncio.wrap_future(ask(agent).future()), within_s + REPLY_S)
        except asyncio.TimeoutError:
            self._give_up(node, agent, f"has not replied within {within_s + REPLY_S:.1f} s")
            return None
        except Exception as error:
            self._give_up(node, agent, f"was lost: {error_first_line(error)}")
            return None
        for lost in reply.lost:
            if lost in self._agents:
                self._give_up(lost, self._agents[lost], "has not replied to another agent")
        return reply

    # -- starting and ending -----------------------------------------------------------------------------------------------

    def update(self, workers: Mapping[int, WorkerHandle], node_of_worker: Mapping[int, str]) -> None:
        """Start and end agents, so that each node with workers has one. `workers`: all that can be called."""
        now = (tuple(workers), frozenset(self._started))
        if now == self._up_to_date:
            return
        on_node: dict[str, list[int]] = defaultdict(list)
        for number in sorted(workers) if len(workers) > MOST_DIRECT else ():
            on_node[node_of_worker[number]].append(number)
        for node in self._agents.keys() - on_node.keys():
            self._end(node)
        now_s = time.monotonic()
        for node in on_node.keys() - self._agents.keys():
            if now_s - self._lost_s.get(node, -RESTART_S) >= RESTART_S:
                self._start(node)
        own = {node: tuple(on_node[node]) for node in sorted(on_node) if node in self._started}
        self._set_routes(make_call_routes(own))
        self._up_to_date = now if self._agents.keys() == on_node.keys() else None
        for node, below in agents_below(self._routes).items():
            agents = {other: self._agents[other] for other in below}
            if self._told.get(node) != (own[node], agents):
                self._told[node] = (own[node], agents)
                with contextlib.suppress(Exception):  # the next call to it fails, too, and says why
                    self._agents[node].meet.remote({number: workers[number] for number in own[node]}, agents)

    def _start(self, node: str) -> None:
        """Start the agent of a node in the background; workers there are called by way of it once it has replied."""
        try:
            agent = self._agents[node] = start_node_agent(node)
        except Exception as error:
            self._lost_s[node] = time.monotonic()
            self._warn(node, f"could not be started: {error_first_line(error)}")
            return
        task = asyncio.ensure_future(self._await_start(node, agent))
        self._starting.add(task)
        task.add_done_callback(self._starting.discard)

    async def _await_start(self, node: str, agent: AgentHandle) -> None:
        try:
            await asyncio.wait_for(asyncio.wrap_future(agent.meet.remote({}, {}).future()), START_S)
        except asyncio.TimeoutError:
            self._give_up(node, agent, f"did not start within {START_S:.0f} s")
        except Exception as error:
            self._give_up(node, agent, f"did not start: {error_first_line(error)}")
        else:
            if self._agents.get(node) is agent:
                self._started.add(node)  # the next `update` tells it whom it calls, before anybody calls it

    def _give_up(self, node: str, agent: AgentHandle, why: str) -> None:
        """End an agent that is lost; its workers are called directly. Idempotent."""
        if self._agents.get(node) is not agent:
            return
        self._lost_s[node] = time.monotonic()
        self._end(node)
        self._warn(node, why)

    def _warn(self, node: str, why: str) -> None:
        text = f"the agent of node {node[:8]} {why}: its workers are called directly until another one is there"
        self.note(RunWarning(text=f"{text}\n  cure: if it happens again, look at that node's memory and at Ray's logs there"))

    def _end(self, node: str) -> None:
        """End the agent of a node, and call nobody by way of it any more."""
        agent = self._agents.pop(node)
        self._started.discard(node)
        self._told.pop(node, None)
        self._up_to_date = None
        self._set_routes(
            {top: route for top, route in self._routes.items() if top != node and node not in agents_below({top: route})}
        )
        with contextlib.suppress(Exception):
            kill_actor(agent, no_restart=True)

    def _set_routes(self, routes: dict[str, CallRoute]) -> None:
        self._routes, self._reached = routes, frozenset[int]().union(*routes.values())

    def close(self) -> None:
        """End all agents. Idempotent."""
        for node in list(self._agents):
            self._end(node)
