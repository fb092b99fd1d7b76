"""Histories of a driver that calls workers by way of agents, on a virtual clock: real `NodeAgent`s, `NodeAgents`, `WorkerCalls`
and `GenerationGuard`s; what Ray would do between them, and what workers compute, is played.
"""

from __future__ import annotations

import asyncio
import random
import selectors
from collections import Counter
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from contextvars import ContextVar
from types import SimpleNamespace
from typing import Any

from ray.exceptions import ActorDiedError

from raypar.actors import node_agents
from raypar.actors.background_tasks import BackgroundTasks
from raypar.actors.messages import CallFailure, StepCall
from raypar.actors.node_agent import NodeAgent
from raypar.actors.node_agents import NodeAgents
from raypar.actors.worker_calls import WorkerCalls
from raypar.actors.worker_failures import WorkerFailures
from raypar.elastic.generation_guard import GenerationGuard
from raypar.elastic.run_policy import RunPolicy
from raypar.errors import CommError

CALLER: ContextVar[Any] = ContextVar("caller", default=None)
"""Who makes calls: an agent, or None for the driver."""
STEPS, OPEN_STEPS, GENERATION = 6, 2, 1
STEP_S, UPDATE_S, LIMIT_S = 1.0, 0.4, 300.0


class VirtualSelector(selectors.DefaultSelector):
    """Waits in no time: where nothing is ready, the clock goes on."""

    now_s = 0.0

    def select(self, timeout=None):
        ready = super().select(0)
        if not ready and timeout:
            self.now_s += timeout
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock is `VirtualSelector`'s."""

    def time(self):
        return self._selector.now_s


def run_virtually(scene: Callable[[], Awaitable[Any]]) -> Any:
    """The result of a coroutine on a virtual clock, which it may not use for more than `LIMIT_S`."""
    loop = VirtualLoop(VirtualSelector())
    try:
        return loop.run_until_complete(asyncio.wait_for(scene(), LIMIT_S))
    finally:
        if left := asyncio.all_tasks(loop):
            for task in left:
                task.cancel()
            loop.run_until_complete(asyncio.wait(left))
        loop.close()


class Ref:
    """A call of an actor, as Ray gives it."""

    def __init__(self, answering: Awaitable[Any]) -> None:
        self.task = asyncio.ensure_future(answering)
        self.task.add_done_callback(lambda task: task.cancelled() or task.exception())

    def __await__(self):
        return asyncio.shield(self.task).__await__()

    def future(self) -> Future[Any]:
        found: Future[Any] = Future()

        def over(task: asyncio.Task[Any]) -> None:
            if found.cancelled() or task.cancelled():
                return
            error = task.exception()
            found.set_result(task.result()) if error is None else found.set_exception(error)

        self.task.add_done_callback(over)
        return found


class Actor:
    """A process that answers calls after a while on the network, until it is killed; a stopped one answers when it goes on."""

    in_order = True
    """Whether the calls of one caller arrive in their order."""

    def __init__(self, world: World) -> None:
        self.world, self.dead = world, world.loop.create_future()
        self.going = asyncio.Event()
        self.going.set()
        self.arrivals: dict[Any, float] = {}

    async def answer(self, call: Callable[[], Awaitable[Any]]) -> Any:
        now_s, caller = self.world.loop.time(), CALLER.get()
        after_s = self.arrivals.get(caller, 0.0) if self.in_order else 0.0
        arrives_s = max(after_s + 1e-6, now_s + self.world.chance.uniform(0.0005, 0.003))
        self.arrivals[caller] = arrives_s
        await asyncio.sleep(arrives_s - now_s)
        if not self.dead.done():
            task = asyncio.ensure_future(self._when_going(call))
            await asyncio.wait([task, self.dead], return_when=asyncio.FIRST_COMPLETED)
            if task.done() and not self.dead.done():
                return task.result()
            task.cancel()
        raise ActorDiedError()

    async def _when_going(self, call: Callable[[], Awaitable[Any]]) -> Any:
        await self.going.wait()
        found = await call()
        await self.going.wait()
        return found

    def kill(self) -> None:
        if not self.dead.done():
            self.dead.set_result(None)


class Agent(Actor):
    """A real `NodeAgent` in such a process. Ray keeps no order among the calls of an asyncio actor."""

    in_order = False

    def __init__(self, world: World, node: str) -> None:
        super().__init__(world)
        self.real, self.node = NodeAgent(), node
        for name in ("meet", "step", "ping"):
            method = getattr(self.real, name)
            setattr(self, name, SimpleNamespace(remote=lambda *given, method=method: self._called(method, given)))

    def _called(self, method: Any, given: Any) -> Ref:
        self.world.calls["agents"] += 1

        async def call() -> Any:
            CALLER.set(self)
            return await method(*given)

        return Ref(self.answer(call))


class Worker(Actor):
    """A real `GenerationGuard` in such a process; a step is over once all workers are in it, or one of them is dead."""

    def __init__(self, world: World, number: int) -> None:
        super().__init__(world)
        self.number, self.done, self.serial = number, 0, asyncio.Lock()
        self.guard = GenerationGuard(number, self, newest_generation=GENERATION, generation=GENERATION, seated=True)
        self.step = SimpleNamespace(remote=self._called)
        self.ping = SimpleNamespace(remote=lambda: Ref(self.answer(self._pong)))

    async def _pong(self) -> Any:
        return (self.done, "idle", False, 0.0, None)

    def _called(self, call: bytes) -> Ref:
        self.world.calls["workers"] += 1
        return Ref(self.answer(lambda: self._stepped(StepCall.from_bytes(call))))

    async def _stepped(self, asked: StepCall) -> Any:
        async with self.serial:
            self.world.asked[self.number, asked.step] += 1
            if asked.before is not None and asked.before.step >= self.done:
                await self._step(asked.before)
            return await self._step(asked)

    async def _step(self, asked: StepCall) -> Any:
        routine = self.guard.step(asked.generation, asked.step)
        try:
            while True:
                await next(routine)
        except StopIteration as stop:
            return stop.value
        except CommError as error:
            return CallFailure("aborted", error)

    def applied(self) -> int:
        return self.done

    def vote_result(self) -> None:
        return None

    def backend_step(self, step: int, into_mirror: bool) -> Any:
        yield self.world.barrier(step, self)
        if self.world.broken.is_set():
            raise CommError(f"worker {self.number}: a peer is gone")
        self.world.executed[self.number, step] += 1
        self.done += 1
        return {"worker": self.number, "step": step}


class Backend:
    """What the guard calls; `Worker.step` is the actor's method of the same name."""

    def __init__(self, worker: Worker) -> None:
        self.step, self.applied, self.vote_result = worker.backend_step, worker.applied, worker.vote_result


class World:
    """Nodes with workers and agents, and the driver's part that calls them."""

    def __init__(self, seed: int, monkeypatch: Any, most_direct: int = 0, fanout: int = 2) -> None:
        self.loop, self.chance = asyncio.get_running_loop(), random.Random(seed)
        self.calls, self.asked, self.executed = Counter[str](), Counter[tuple[int, int]](), Counter[tuple[int, int]]()
        self.broken, self.entered = asyncio.Event(), Counter[int]()
        self.over = [asyncio.Event() for _ in range(STEPS)]
        self.agents_made: list[Agent] = []
        self.nodes = {n: f"node{node}" for n, node in enumerate(self._places())}
        self.workers = {number: Worker(self, number) for number in self.nodes}
        for worker in self.workers.values():
            worker.guard.backend = Backend(worker)
        self.told: list[Any] = []
        self.posted: list[tuple[float, Any]] = []
        monkeypatch.setattr(WorkerCalls, "_answer_batch", self._answer_batch)
        monkeypatch.setattr(node_agents, "start_node_agent", self._start_agent)
        monkeypatch.setattr(node_agents, "kill_actor", lambda agent, no_restart: agent.kill())
        monkeypatch.setattr(node_agents, "MOST_DIRECT", most_direct)
        monkeypatch.setattr(node_agents, "time", SimpleNamespace(monotonic=self.loop.time))
        made = node_agents.make_call_routes
        monkeypatch.setattr(node_agents, "make_call_routes", lambda own: made(own, fanout, fanout))
        self.agents = NodeAgents(self.told.append)
        membership = SimpleNamespace(members=tuple(self.workers), plan=None, generation=GENERATION)
        self.machine = SimpleNamespace(membership=membership, policy=RunPolicy(workers=1, job_steps=9, elastic=True))
        pool = SimpleNamespace(workers=self.workers)
        tasks = BackgroundTasks(self.post)
        self.driver = WorkerCalls(self.machine, pool, WorkerFailures(self.machine, None, self.post), tasks, {0}, self.agents)

    def _places(self) -> list[int]:
        return sorted(node for node in range(self.chance.randint(1, 6)) for _ in range(self.chance.randint(1, 4)))

    async def _answer_batch(self, generation: int, refs: dict[int, Ref], event: Any) -> None:
        """Without a thread, which has another clock."""
        for number, ref in refs.items():
            self.driver.post_answer(number, generation, ref, lambda number, answer: event({number: answer}))

    def _start_agent(self, node: str) -> Agent:
        self.agents_made.append(Agent(self, node))
        return self.agents_made[-1]

    def post(self, event: Any) -> None:
        """Of answers that come together, each is posted by itself."""
        self.posted.extend((self.loop.time(), one) for one in (event if isinstance(event, list) else [event]))

    async def barrier(self, step: int, worker: Worker) -> None:
        self.entered[step] += 1
        if self.entered[step] == len(self.workers):
            self.loop.call_later(STEP_S, self.over[step].set)
        waiting = [asyncio.ensure_future(event.wait()) for event in (self.over[step], self.broken)]
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        for one in waiting:
            one.cancel()

    def kill_worker(self, number: int) -> None:
        self.workers[number].kill()
        self.loop.call_later(0.5, self.broken.set)  # its peers' connections break

    async def keep_agents(self) -> None:
        while True:
            self.agents.update(self.workers, self.nodes)
            await asyncio.sleep(UPDATE_S)

    def call_for(self, step: int) -> None:
        before = StepCall(GENERATION, step - 1, False, False) if step else None
        call = StepCall(GENERATION, step, False, False, before=before).to_bytes()
        self.driver.call_all(
            lambda worker: worker.step.remote(call),
            lambda reports: [(number, report["step"]) for number, report in reports.items()],
            lambda agent, part, within_s: agent.step.remote(call, part, within_s),
        )

    def answers(self, step: int) -> list[int]:
        return sorted(event[0] for _, event in self.posted if isinstance(event, tuple) and event[1] == step)

    async def train(self) -> None:
        """Have all steps executed, two of them open at a time; ends early when something has failed."""
        issued = 0
        for committed in range(STEPS):
            while issued < min(STEPS, committed + OPEN_STEPS):
                self.call_for(issued)
                issued += 1
            while len(self.answers(committed)) < len(self.workers):
                if any(not isinstance(event, tuple) for _, event in self.posted):
                    return
                await asyncio.sleep(0.001)
