"""One node's agent: it calls the workers of its node for the driver, and hands back their answers together.

A call is repeated for the workers whose answers have not come with it, so that no answer waits for a slow worker and none is
lost with a reply; a worker that is asked twice for a step answers both times (`GenerationGuard.step`). An agent decides
nothing: whom it cannot reach it names, and the driver calls those workers itself.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from raypar.actors.messages import CallFailure, GatheredAnswers, StepCall
from raypar.elastic.call_routes import CallRoute

if TYPE_CHECKING:
    from raypar.actors.actor_handle_types import AgentHandle, PendingAnswer, Ping, WorkerHandle
    from raypar.worker.worker_reports import Report

T = TypeVar("T")

LINGER_S = 0.2
"""How long the first answers wait for others, which then come in the same reply."""
FAILURE_LINGER_S = 0.02
"""The same after a failure: the driver has to know of it at once."""
LEVEL_SHARE = 0.8
"""Share of its own time that an agent leaves to those below it, so that it hears from them before its time is over."""
REPLY_S = 2.0
"""How much later than it was asked to the reply of an agent may come; after that the agent is given up."""
KEPT_STEPS = 2
"""Calls of so many steps before the last one are remembered: no more are open."""


@dataclass
class _Call:
    """A call to a worker or a further agent that is under way."""

    workers: tuple[int, ...]
    """The workers whose answers it brings."""
    answer: asyncio.Future[Any]
    """The answer: of a worker as it is, of an agent `GatheredAnswers`."""
    due_s: float = float("inf")
    """When an agent has to have replied, by the event loop's clock."""


class CallOfAgent(Protocol[T]):
    """A call of workers by way of an agent."""

    def __call__(self, agent: AgentHandle, part: CallRoute, within_s: float) -> PendingAnswer[GatheredAnswers[T]]:
        """Call those of `part`; the agent replies within `within_s`."""


class NodeAgent:
    """The agent of one node. Its calls run in one event loop, beside one another."""

    def __init__(self) -> None:
        self.workers: Mapping[int, WorkerHandle] = {}
        """The workers of this node."""
        self.agents: Mapping[str, AgentHandle] = {}
        """Node -> a further agent that this one calls."""
        self._calls: dict[tuple[Hashable, int | str], _Call] = {}
        """(What was asked, worker or node of an agent) -> the call, until its answer is handed back."""

    async def meet(self, workers: Mapping[int, WorkerHandle], agents: Mapping[str, AgentHandle]) -> None:
        """Get to know those whom this agent calls; all that it knew are forgotten."""
        self.workers, self.agents = workers, agents
        self._forget(lambda what, target: target not in workers and target not in agents)

    async def step(self, call: bytes, route: CallRoute, within_s: float) -> GatheredAnswers[Report | CallFailure]:
        """Call workers for a step; what they have answered within `within_s`."""
        asked = StepCall.from_bytes(call)
        oldest = (asked.generation, asked.step - KEPT_STEPS)
        self._forget(lambda what, target: isinstance(what, tuple) and what < oldest)
        return await self._gather(
            (asked.generation, asked.step),
            route,
            lambda worker: worker.step.remote(call),
            lambda agent, part, within_s: agent.step.remote(call, part, within_s),
            within_s,
        )

    async def ping(self, route: CallRoute, within_s: float) -> GatheredAnswers[Ping]:
        """Ping workers; what they have answered within `within_s`. Who still owes an answer is not pinged again."""
        return await self._gather(
            "ping",
            route,
            lambda worker: worker.ping.remote(),
            lambda agent, part, within_s: agent.ping.remote(part, within_s),
            within_s,
        )

    def _forget(self, over: Callable[[Hashable, int | str], bool]) -> None:
        """Forget calls whose answers nobody asks for any more."""
        for key in [key for key in self._calls if over(*key)]:
            self._calls.pop(key).answer.cancel()

    async def _gather(
        self,
        what: Hashable,
        route: CallRoute,
        ask: Callable[[WorkerHandle], Awaitable[T]],
        ask_agent: CallOfAgent[T],
        within_s: float,
    ) -> GatheredAnswers[T]:
        """Make the calls that are not under way yet, and wait until all are answered, or for a little after the first."""
        part_s, loop, keys = within_s * LEVEL_SHARE, asyncio.get_running_loop(), list[tuple[Hashable, int | str]]()
        for number in route.workers:
            keys.append((what, number))
            if keys[-1] not in self._calls:
                self._calls[keys[-1]] = _Call((number,), _future_of(ask, self.workers.get(number)))
        for node, part in route.below.items():
            keys.append((what, node))
            if keys[-1] not in self._calls:
                reply = _future_of(functools.partial(ask_agent, part=part, within_s=part_s), self.agents.get(node))
                self._calls[keys[-1]] = _Call(tuple(part), reply, loop.time() + part_s + REPLY_S)
        await self._wait([self._calls[key].answer for key in keys], within_s)
        answers, unreached, lost = dict[int, T](), set[int](), set[str]()
        for key in keys:
            call = self._calls.get(key)
            if call is None or not (call.answer.done() or loop.time() >= call.due_s):
                continue
            del self._calls[key]
            found = _gathered(call, key[1])
            answers |= found.answers
            unreached |= {*found.unreached}
            lost |= {*found.lost}
        return GatheredAnswers(answers, tuple(sorted(unreached - answers.keys())), tuple(sorted(lost)))

    async def _wait(self, waited: list[asyncio.Future[Any]], within_s: float) -> None:
        """Wait until all are there, `LINGER_S` longer than for the first, or `FAILURE_LINGER_S` longer than for a failure."""
        loop = asyncio.get_running_loop()
        until_s, left = loop.time() + within_s, set(waited)
        while left and (left_s := until_s - loop.time()) > 0:
            done, left = await asyncio.wait(left, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
            if done:
                linger_s = FAILURE_LINGER_S if any(map(_tells_of_failure, done)) else LINGER_S
                until_s = min(until_s, loop.time() + linger_s)


def _future_of(ask: Callable[[Any], Awaitable[Any]], target: Any) -> asyncio.Future[Any]:
    """The answer of `target`, who is asked now; `LookupError` if it is None, that is, unknown."""

    async def asked() -> Any:
        if target is None:
            raise LookupError("unknown")
        return await ask(target)

    answer = asyncio.ensure_future(asked())
    answer.add_done_callback(lambda over: over.cancelled() or over.exception())  # else asyncio prints those nobody asks for
    return answer


def _gathered(call: _Call, target: int | str) -> GatheredAnswers[Any]:
    """What a call to a worker, or to the agent of a node, has brought. It is over, or overdue.

    An agent that is not known, or not any more, is not lost: the driver has sent this one others to call.
    """
    answer = call.answer
    known = not answer.cancelled() and not (answer.done() and isinstance(answer.exception(), LookupError))
    if answer.done() and known and answer.exception() is None:
        found = answer.result()
        return found if isinstance(found, GatheredAnswers) else GatheredAnswers({call.workers[0]: found})
    answer.cancel()
    return GatheredAnswers({}, call.workers, (target,) if known and isinstance(target, str) else ())


def _tells_of_failure(answer: asyncio.Future[Any]) -> bool:
    """Whether an answer that is there says that something has failed; so does an agent that has none to hand on: it may have
    been told meanwhile that others call those whom it was asked for."""
    if answer.cancelled() or answer.exception() is not None:
        return True
    found = answer.result()
    if not isinstance(found, GatheredAnswers):
        return isinstance(found, CallFailure)
    return not found.answers or bool(found.unreached) or any(isinstance(one, CallFailure) for one in found.answers.values())
