"""The workers of a run as people: who they are, whether they still answer, who is hired and who leaves. Knows no plan.

All that happens is told to the machine as events; nothing is decided here.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from ray.exceptions import OutOfMemoryError, RayActorError

from raypar.actors.cluster_info import dead_nodes, draining_nodes
from raypar.actors.journal import Journal
from raypar.actors.lifeline import Lifelines
from raypar.actors.node_loss import NodeLossTracker
from raypar.actors.worker_messages import CallFailure, WorkerHello
from raypar.actors.worker_pool import WorkerPool
from raypar.elastic import events as on
from raypar.elastic.cpu_contention import CpuContention
from raypar.errors import ClusterError, OutOfMemory, WorkerLost, first_line

PING_S = 0.4
UNHEARD_S = 1.2
DRAIN_POLL_S = 1.0


class WorkerRegistry:
    """`post`: gives an event to the machine; `note`: tells people and keeps it (kind, facts); `works`: whether a worker has a
    seat."""

    def __init__(
        self,
        pool: WorkerPool,
        journal: Journal,
        post: Callable[[on.RunEvent], None],
        note: Callable[..., None],
        works: Callable[[int], bool],
    ) -> None:
        self.pool, self.journal, self.post, self.note, self.works = pool, journal, post, note, works
        self.fallen = NodeLossTracker()
        self.lifelines = Lifelines()
        self.crowding = CpuContention()
        """How long the workers wait for processors, as their pings say."""
        self.hellos: dict[int, WorkerHello] = {}
        self.suspects: set[str] = set()
        """Nodes whose workers were lost or hung: nobody is hired there before Ray's node table has had time to notice."""
        self.slow_nodes: set[str] = set()
        """Nodes whose worker was a straggler: nobody is hired there while another node has room."""
        self.where: dict[int, str] = {}
        """worker -> node, of all that have ever started."""
        self._answered_s: dict[int, float] = {}
        self._leaving: set[int] = set()
        self._drained: set[str] = set()
        """Nodes that leave because they were asked to."""
        self._told: set[int] = set()
        """Whose silence has been told."""
        self._asked: dict[int, asyncio.Task[None]] = {}
        self._dismissing: set[asyncio.Task[None]] = set()

    def met(self, number: int, hello: WorkerHello) -> None:
        """A worker has started."""
        self.hellos[number] = hello
        self.where[number] = hello.node
        self._answered_s[number] = time.monotonic()
        self.lifelines.hold(number, hello.lifeline)

    def nodes(self, numbers: Iterable[int]) -> dict[int, str]:
        """worker -> node, of those that have started."""
        return {n: self.hellos[n].node for n in numbers if n in self.hellos}

    def who(self, number: int) -> dict[str, Any]:
        """For people: worker, node, pid, host."""
        hello = self.hellos.get(number)
        facts: dict[str, Any] = {"worker": number}
        if hello is not None:
            facts |= {"node": hello.node[:8], "pid": hello.pid, "host": hello.address.rpartition(":")[0]}
        return facts

    # -- hiring and dismissing -----------------------------------------------------------------------------------------------

    async def hire(self, number: int, spec: bytes, host: str | None, orphan_timeout_s: float, start_s: float) -> None:
        """Start one more worker in the background: place, process, torch, model code. Ends in
        `WorkerJoined` or `WorkerStartFailed`."""
        try:
            await self.pool.reserve_one(number, self.suspects, self.slow_nodes)
            if number not in self.pool.groups:
                return  # dismissed while it waited for its place
            worker = self.pool.hire(number, spec, host, orphan_timeout_s)
            self.post(on.WorkerPlaced(number))
            await self.welcome(number, worker, start_s)
        except Exception as error:
            self.failed(number, error)

    async def welcome(self, number: int, worker: Any, start_s: float) -> None:
        """Wait until it has loaded everything."""
        try:
            hello = await asyncio.wait_for(asyncio.wrap_future(worker.hello.remote(joining=True).future()), start_s)
        except asyncio.TimeoutError:
            self.failed(number, ClusterError(f"it did not start within {start_s:.0f} s", cure="look at Ray's logs on its node"))
            return
        except Exception as error:
            self.failed(number, error)
            return
        if isinstance(hello, CallFailure):
            self.failed(number, hello.error)
            return
        await asyncio.to_thread(self.journal.met, number, hello)
        self.met(number, hello)
        self.note("joined", text=f"worker {number} has started on node {hello.node[:8]} (pid {hello.pid})", **self.who(number))
        self.post(on.WorkerJoined(number))

    def failed(self, number: int, error: Exception) -> None:
        """It did not start."""
        self.dismiss(number)
        self.post(on.WorkerStartFailed(number, error))

    def dismiss(self, number: int) -> None:
        """Kill it and return its CPU, without waiting for that."""
        self._answered_s.pop(number, None)
        self.lifelines.drop(number)
        task = asyncio.ensure_future(asyncio.to_thread(self.pool.dismiss(number)))
        self._dismissing.add(task)
        task.add_done_callback(self._dismissing.discard)

    def preempted(self, number: int, error: Exception) -> bool:
        """Whether it died because it was asked to leave, or with its machine."""
        return number in self._leaving or died_with_node(error)

    def fell(self, number: int, with_node: bool) -> dict[str, Any] | None:
        """It is lost and dismissed: what is to be told of its node, if that has lost them all."""
        if number not in self.where:
            return None
        node = self.where[number]
        left = [n for n in self.pool.workers if self.where.get(n) == node]
        return self.fallen.lost(number, node, left, with_node, time.monotonic())

    def suspect(self, number: int) -> None:
        """It does not answer, or died with its node: nobody is sent there for a while."""
        if self._alone_there(number):
            self.suspects.add(self.where[number])

    def slow(self, number: int) -> None:
        """It computes too slowly, and leaves: the next one is sent elsewhere, if there is room."""
        if self._alone_there(number):
            self.slow_nodes.add(self.where[number])

    def _alone_there(self, number: int) -> bool:
        """Where others of the run are well on its node, it is not the node's fault."""
        others = [n for n in self.pool.workers if n != number and n in self.where]
        return number in self.where and all(self.where[n] != self.where[number] for n in others)

    def unheard(self) -> frozenset[int]:
        """Who should have answered a ping by now."""
        now = time.monotonic()
        return frozenset(n for n, s in self._answered_s.items() if n in self.pool.workers and now - s > UNHEARD_S)

    def ended(self) -> frozenset[int]:
        """Of those, whose process or machine is gone."""
        return self.unheard() & self.lifelines.ended

    # -- watching --------------------------------------------------------------------------------------------------------------

    async def watch(self, silent_s: float, over: Callable[[], bool]) -> None:
        """Ask every worker twice a second whether it is there; a silence of `silent_s` is told once."""
        polled_s = 0.0
        polling: asyncio.Task[None] | None = None
        while not over():
            for number, worker in list(self.pool.workers.items()):
                if number in self.hellos and number not in self._asked:
                    task = asyncio.ensure_future(self._ask(number, worker))
                    self._asked[number] = task
                    task.add_done_callback(lambda _, n=number: self._asked.pop(n, None))
            now = time.monotonic()
            for number in [n for n, s in self._answered_s.items() if n in self.pool.workers and now - s > silent_s]:
                if number in self._told:
                    continue
                self._told.add(number)
                self.post(on.WorkerSilent(number, silent_s))
            if now - polled_s > DRAIN_POLL_S and (polling is None or polling.done()):
                polled_s = now  # beside the pings: without a head it blocks for as long as there is none
                polling = asyncio.ensure_future(self._look_at_nodes())
            before = time.monotonic()
            await asyncio.sleep(PING_S)
            now = time.monotonic()
            late_s = now - before - PING_S
            # Where this process stood still, what they said meanwhile is still to be heard; or processors are short.
            excused_s = late_s if late_s > PING_S else self.crowding.uncounted_s(now, before)
            if excused_s:
                self._answered_s = {number: min(now, s + excused_s) for number, s in self._answered_s.items()}

    async def _ask(self, number: int, worker: Any) -> None:
        try:
            _, _, leaving, waited_s = await asyncio.wait_for(asyncio.wrap_future(worker.ping.remote().future()), 30.0)
        except OutOfMemoryError as error:
            if number in self.pool.workers:
                self.post(on.CallFailed("lost", killed_for_memory(f"worker {number}", error), number))
        except RayActorError as error:
            if number in self.pool.workers:
                self.post(on.CallFailed("lost", WorkerLost(f"worker {number} was lost: {first_line(error)}"), number))
        except Exception:
            return  # it is silent; `watch` counts the seconds
        else:
            now = self._answered_s[number] = time.monotonic()
            self.crowding.report(number, waited_s, now)
            if number in self._told:
                self._told.remove(number)
                self.post(on.WorkerAnswered(number))
            if leaving:
                self.leaves(number, "its process was asked to end (SIGTERM)")

    async def _look_at_nodes(self) -> None:
        try:
            draining, dead = await asyncio.to_thread(lambda: (draining_nodes(), dead_nodes()))
        except Exception:
            return  # the head does not answer; whatever needs it says so
        for number in list(self.pool.workers):
            hello = self.hellos.get(number)
            if hello is not None and hello.node in draining:
                self.leaves(number, f"node {hello.node[:8]} is being drained")
        self._drained |= set(draining)
        for node in dead - self._drained:
            told = self.fallen.died(node, time.monotonic())
            if told is not None:
                self.note("node", **told)

    def leaves(self, number: int, why: str) -> None:
        """Told once."""
        if number not in self._leaving:
            self._leaving.add(number)
            self.note(
                "draining", text=f"worker {number} has to leave: {why}", why=why, works=self.works(number), **self.who(number)
            )
            self.post(on.DrainAsked(number, why))


def died_with_node(error: Exception) -> bool:
    """Whether Ray says of a worker that it was lost with its node."""
    return "its node has died" in str(error)


def killed_for_memory(who: str, error: Exception) -> OutOfMemory:
    """Ray's memory monitor has chosen it, because its node had nearly none left."""
    return OutOfMemory(f"{who} was killed because its node ran out of memory: {error}", cure="use workers with more memory")


async def answers_within(refs: Iterable[Any], timeout_s: float) -> list[Any]:
    """Answers that come within the time; None for the others and for failures."""

    async def one(ref: Any) -> Any:
        with contextlib.suppress(Exception):
            return await asyncio.wait_for(asyncio.wrap_future(ref.future()), timeout_s)
        return None

    asked: list[Awaitable[Any]] = [one(ref) for ref in refs]
    return list(await asyncio.gather(*asked))
