"""Knows which of a run's worker processes have started, are silent, lost or draining; starts and dismisses workers.

It knows no plan and decides nothing: whatever happens is posted to the run machine as an event.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol, TypeVar

from ray.exceptions import ActorUnavailableError, OutOfMemoryError, RayActorError

from raypar.actors.actor_handle_types import PendingAnswer, Ping, WorkerHandle
from raypar.actors.answer_batch import BATCH_WAIT_S, UNANSWERED, Raised, Unanswered, wait_for_answers
from raypar.actors.cluster_info import (
    list_live_and_dead_nodes,
    list_live_node_resources,
    node_accepts_connections,
    zones_of_nodes,
)
from raypar.actors.liveness_connection import LivenessConnections
from raypar.actors.messages import CallFailure, WorkerHello
from raypar.actors.node_agents import NodeAgents
from raypar.actors.node_loss import NodeLossTracker
from raypar.actors.run_state_in_ray_kv import Journal
from raypar.actors.worker_failures import WorkerFailures
from raypar.actors.worker_pool import WorkerPool
from raypar.elastic import events as on
from raypar.elastic.call_routes import CallRoute
from raypar.elastic.deadlines import CpuWaitDeadlineExtension
from raypar.elastic.suspect_nodes import FlappingNodes, SuspectNodes
from raypar.errors import ClusterError
from raypar.ray_compat.actor_errors import keep_death_reasons, memory_monitor_kill_error
from raypar.ray_compat.nodes import list_draining_nodes
from raypar.record.events import Event, NodeLoss, RunWarning, WorkerDrain, WorkerJoin
from raypar.record.field_types import WorkerFacts

T = TypeVar("T")

PING_S = 0.4
"""Time from one ping to the next."""
AGENT_PINGS = 3
"""By way of agents workers are pinged at so many times that distance, and `UNHEARD_S` is so many times as long."""
UNHEARD_S = 1.2
"""Time without an answer after which a worker may be lost."""
LATE_PING_S = 30.0
"""How long the answer to a ping is awaited beyond `BATCH_WAIT_S`. The worker is not pinged again meanwhile."""
NODE_ENDS_S = 0.5
"""How long after the last of its workers a node that dies may still accept connections."""
DRAIN_POLL_S = 1.0
"""Time from one look at Ray's node table to the next."""


class WorkerStartSettings(Protocol):
    """The settings of a `RunRequest` with which workers are started."""

    @property
    def spec(self) -> bytes: ...

    @property
    def listen_host(self) -> str | None: ...

    @property
    def orphan_timeout_s(self) -> float: ...

    @property
    def start_deadline_s(self) -> float: ...


class WorkerRegistry:
    """The worker processes of a run, by worker number."""

    def __init__(
        self,
        pool: WorkerPool,
        journal: Journal,
        post: Callable[[on.RunEvent], None],
        note: Callable[[Event], None],
        has_seat: Callable[[int], bool],
        failures: WorkerFailures,
        agents: NodeAgents | None = None,
    ) -> None:
        keep_death_reasons()
        self.pool = pool
        """Places, starts and kills the worker actors."""
        self.journal = journal
        """Keeps hellos and numbers of workers for a new driver."""
        self.post = post
        """Gives an event to the run machine."""
        self.note = note
        """Shows an event (kind, facts) and writes it to events.jsonl."""
        self.has_seat = has_seat
        """Whether a worker has a seat."""
        self.failures = failures
        """Posts the events of workers that have died; knows which were asked to leave."""
        self.agents = agents or NodeAgents()
        """By way of which many workers are pinged."""
        self._by_agent: set[int] = set()
        """Workers that are pinged by way of an agent."""
        self.node_losses = NodeLossTracker()
        """Recognises that a whole node was lost."""
        self.liveness = LivenessConnections()
        """Connections that show the end of a worker's process."""
        self.cpu_wait = CpuWaitDeadlineExtension()
        """How long the workers wait for processors."""
        self.hellos: dict[int, WorkerHello] = {}
        """Worker -> its hello, of all workers that have started."""
        self.suspect_nodes = SuspectNodes()
        """Nodes whose workers were lost or hung: no worker is started there, as Ray may not have noticed a dead node yet."""
        self.flapping_nodes = FlappingNodes()
        """Which nodes are too young, while nodes join and are lost soon after."""
        self.told_age_s = 0.0
        """The age of new nodes that people were last told."""
        self.dead_nodes: set[str] = set()
        """Nodes whose death has been noticed."""
        self.slow_nodes: set[str] = set()
        """Nodes whose worker was a straggler: no worker is started there while another node has room."""
        self.node_of_worker: dict[int, str] = {}
        """Worker -> node, of all workers that have ever started."""
        self.zone_of_node: dict[str, str] = {}
        """Node -> its availability zone, of nodes with such a label."""
        self._answered_s: dict[int, float] = {}
        """Worker -> time of its last answer, of workers that have not been dismissed."""
        self._reading: dict[int, int] = {}
        """Workers that were reading samples when they last answered -> samples of streams read to find a place."""
        self._searching: set[int] = set()
        """Those that had read more of these than at the answer before."""
        self._drained: set[str] = set()
        """Nodes that were being drained: their death is expected."""
        self._reported_silent: set[int] = set()
        """Workers whose silence has been reported."""
        self._unanswered_pings: set[int] = set()
        """Workers whose answer to their last ping is still awaited."""
        self._ping_tasks: set[asyncio.Task[None]] = set()
        """The running calls of `_ping`."""
        self._ping_thread = ThreadPoolExecutor(1, "raypar-pings")
        """The thread in which answers to pings are awaited. Not shared: other threads may block while Ray's head is silent."""
        self._background: set[asyncio.Task[None]] = set()
        """Dismissals, and looks whether a node lives, that are under way."""

    def add_started_worker(self, number: int, hello: WorkerHello) -> None:
        """Store the hello of a started worker, and connect to the worker to notice its end."""
        self.hellos[number] = hello
        self.node_of_worker[number] = hello.node
        self._answered_s[number] = time.monotonic()
        self.liveness.hold(number, hello.liveness_address)

    async def admit(self, number: int, hello: WorkerHello) -> None:
        """Add a worker that has started, a first one or a later one, and store its hello for a new driver."""
        await asyncio.to_thread(self.journal.store_hello, number, hello)
        self.add_started_worker(number, hello)

    def nodes_of_workers(self, numbers: Iterable[int]) -> dict[int, str]:
        """Worker -> node, of those workers that have started."""
        return {n: self.hellos[n].node for n in numbers if n in self.hellos}

    def worker_facts(self, number: int) -> WorkerFacts:
        """Facts of a worker for events: worker, node, pid, host."""
        hello = self.hellos.get(number)
        if hello is not None:
            host = hello.address.rpartition(":")[0]
            return {"worker": number, "node": hello.node[:8], "pid": hello.pid, "host": host}
        return {"worker": number}

    # -- hiring and dismissing -----------------------------------------------------------------------------------------------

    async def start_workers(
        self, numbers: tuple[int, ...], begin: WorkerStartSettings, *, on_demand: bool = False, requested: bool = False
    ) -> None:
        """Start further workers: placement, processes, torch, model code.

        Posts `WorkerPlaced`, then `WorkerJoined` or `WorkerStartFailed` of each.

        `requested`: their placement group was requested already.
        """
        suspect, slow = (frozenset[str], set[str]()) if requested else (self.suspect_nodes_now, set(self.slow_nodes))
        try:
            if not requested:
                await asyncio.to_thread(self.pool.request_group, numbers, {*suspect(), *slow}, on_demand=on_demand)
            if not await self.pool.wait_until_placed(
                numbers, suspect, slow, on_demand=on_demand, note_node=self.note_live_node
            ):
                return
            there = [number for number in numbers if number in self.pool.groups]
            workers = {n: self.pool.start_worker(n, begin.spec, begin.listen_host, begin.orphan_timeout_s) for n in there}
        except Exception as error:
            for number in numbers:
                self.give_up_start(number, error)
            return
        for number in there:
            self.post(on.WorkerPlaced(number))
        await self.update_zones()
        await asyncio.gather(*(self.await_hello(number, workers[number], begin.start_deadline_s) for number in there))

    async def update_zones(self) -> None:
        """Read the zones of all live nodes. If Ray does not answer, the known zones are kept."""
        try:
            self.zone_of_node.update(zones_of_nodes(await asyncio.to_thread(list_live_node_resources)))
        except Exception:
            return  # seats are then spread over nodes only

    async def await_hello(self, number: int, worker: WorkerHandle, start_s: float) -> None:
        """Wait until a new worker has loaded everything. Posts `WorkerJoined` or `WorkerStartFailed`."""
        try:
            hello = await asyncio.wait_for(asyncio.wrap_future(worker.hello.remote(True).future()), start_s)
        except asyncio.TimeoutError:
            self.give_up_start(
                number, ClusterError(f"it did not start within {start_s:.0f} s", cure="look at Ray's logs on its node")
            )
            return
        except Exception as error:
            self.give_up_start(number, error)
            return
        if isinstance(hello, CallFailure):
            self.give_up_start(number, hello.error)
            return
        await self.admit(number, hello)
        self.note(
            WorkerJoin(
                text=f"worker {number} has started on node {hello.node[:8]} (pid {hello.pid})",
                **self.worker_facts(number),
            )
        )
        self.post(on.WorkerJoined(number))

    def give_up_start(self, number: int, error: Exception) -> None:
        """Dismiss a worker that did not start; posts `WorkerStartFailed`."""
        self.dismiss(number)
        self.post(on.WorkerStartFailed(number, error))

    def dismiss(self, number: int) -> None:
        """Kill a worker and return its CPU, in the background."""
        self._answered_s.pop(number, None)
        self._note_reading(number, None)
        self.liveness.drop(number)
        task = asyncio.ensure_future(asyncio.to_thread(self.pool.dismiss(number)))
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    def note_lost_worker(self, number: int, with_node: bool) -> None:
        """Report the loss of a node, if this lost worker was its last one and the node is gone with it.

        Where Ray does not say so yet, the node is asked first: its workers may all have died while it lives.
        """
        if number not in self.node_of_worker:
            return
        node = self.node_of_worker[number]
        left = [n for n in self.pool.workers if self.node_of_worker.get(n) == node]
        told = self.node_losses.lost(number, node, left, with_node, time.monotonic())
        if told is not None and with_node:
            self.note(told)
        elif told is not None:
            task = asyncio.ensure_future(self._report_node_if_it_is_gone(node, told))
            self._background.add(task)
            task.add_done_callback(self._background.discard)

    async def _report_node_if_it_is_gone(self, node: str, told: NodeLoss) -> None:
        """Report the loss of a node if nothing there accepts connections a moment after its last worker was lost."""
        await asyncio.sleep(NODE_ENDS_S)
        if not await asyncio.to_thread(node_accepts_connections, node):
            self.note(told)

    def avoid_suspect_node_of(self, number: int) -> None:
        """Start no worker on this worker's node for a while: it does not answer, or has died with its node."""
        if self._alone_there(number):
            self.suspect_nodes.suspect(self.node_of_worker[number], time.monotonic())

    def avoid_nodes(self, nodes: Iterable[str]) -> None:
        """Start no worker on these nodes for a while: their memory is short."""
        for node in nodes:
            self.suspect_nodes.suspect(node, time.monotonic())

    def suspect_nodes_now(self) -> frozenset[str]:
        """The nodes on which no worker is started at present."""
        now = time.monotonic()
        return self.suspect_nodes.at(now) | self.flapping_nodes.at(now)

    def note_live_node(self, node: str) -> None:
        """Note a node, which may have joined since the last look at all nodes."""
        self.flapping_nodes.see([node], time.monotonic())

    def avoid_slow_node_of(self, number: int) -> None:
        """Prefer other nodes to this worker's node for new workers: it computes too slowly there."""
        if self._alone_there(number):
            self.slow_nodes.add(self.node_of_worker[number])

    def _alone_there(self, number: int) -> bool:
        """Whether this worker is alone on its node: a node whose other workers are well is not at fault."""
        others = [n for n in self.pool.workers if n != number and n in self.node_of_worker]
        return number in self.node_of_worker and all(self.node_of_worker[n] != self.node_of_worker[number] for n in others)

    def unheard_workers(self) -> frozenset[int]:
        """Workers that should have answered a ping by now."""
        now = time.monotonic()
        late = [(n, now - s) for n, s in self._answered_s.items() if now - s > UNHEARD_S and n in self.pool.workers]
        return frozenset([n for n, silent_s in late if n not in self._by_agent or silent_s > UNHEARD_S * AGENT_PINGS])

    def reading_workers(self) -> frozenset[int]:
        """Workers that were reading samples when they last answered a ping."""
        return frozenset(self._reading)

    def searching_workers(self) -> frozenset[int]:
        """Those of them that read streams to find a place, and had come further since the answer before."""
        return frozenset(self._searching)

    def _note_reading(self, number: int, skipped: int | None) -> None:
        """Keep whether a worker reads samples, and whether it comes further in finding a place."""
        before = self._reading.pop(number, None)
        if skipped is not None:
            self._reading[number] = skipped
        further = skipped is not None and before is not None and skipped > before
        (self._searching.add if further else self._searching.discard)(number)

    def ended_workers(self) -> frozenset[int]:
        """Workers among `unheard_workers` whose process or machine is gone."""
        return self.unheard_workers() & self.liveness.ended if self.liveness.ended else frozenset()

    # -- watching --------------------------------------------------------------------------------------------------------------

    async def watch(self, silent_s: float, over: Callable[[], bool]) -> None:
        """Ping every worker each `PING_S` until the run is over; post `WorkerSilent` for a worker silent for `silent_s`."""
        polled_s, turn = 0.0, 0
        polling: asyncio.Task[None] | None = None
        while not over():
            self._ping_all(turn)
            turn += 1
            now = time.monotonic()
            for number in [n for n, s in self._answered_s.items() if now - s > silent_s and n in self.pool.workers]:
                if number in self._reported_silent:
                    continue
                self._reported_silent.add(number)
                self.post(on.WorkerSilent(number, silent_s))
            if now - polled_s > DRAIN_POLL_S and (polling is None or polling.done()):
                polled_s = now  # in a task, because it blocks while Ray's head does not answer
                polling = asyncio.ensure_future(self._look_at_nodes())
            before = time.monotonic()
            await asyncio.sleep(PING_S)
            now = time.monotonic()
            late_s = now - before - PING_S
            # No worker is to blame for time in which this process stood still, or in which processors were short.
            excused_s = late_s if late_s > PING_S else self.cpu_wait.uncounted_s(now, before)
            if excused_s:
                self._answered_s = {number: min(now, s + excused_s) for number, s in self._answered_s.items()}
        self.agents.close()

    def _ping_all(self, turn: int) -> None:
        """Ping all workers that owe no answer, in the background: directly, or each `AGENT_PINGS`th time by way of agents."""
        started = {n: w for n, w in self.pool.workers.items() if n in self.hellos}
        self.agents.update(started, self.node_of_worker)
        to_ping = {n: w for n, w in started.items() if n not in self._unanswered_pings}
        routes = self.agents.routes(started)
        self._by_agent = set[int]().union(*routes.values())
        for node, route in routes.items() if turn % AGENT_PINGS == 0 else ():
            part = route.only(to_ping) if self._unanswered_pings else route
            if part is not None:
                self._spawn_ping(self._ping_by_agent(node, part))
        direct = {n: w for n, w in to_ping.items() if n not in self._by_agent}
        if direct:
            self._spawn_ping(self._ping(direct))

    def _spawn_ping(self, pinging: Coroutine[None, None, None]) -> None:
        task = asyncio.ensure_future(pinging)
        self._ping_tasks.add(task)
        task.add_done_callback(self._ping_tasks.discard)

    async def _ping_by_agent(self, node: str, route: CallRoute) -> None:
        """Ping workers by way of an agent; those whom it cannot reach directly, which says what has become of them."""
        self._unanswered_pings.update(route)
        found = await self.agents.gather(node, BATCH_WAIT_S, lambda agent: agent.ping.remote(route, BATCH_WAIT_S))
        self._unanswered_pings.difference_update(route)
        self._handle_ping_answers(found.answers if found is not None else {})
        unreached = found.unreached if found is not None else route
        direct = {number: self.pool.workers[number] for number in unreached if number in self.pool.workers}
        if direct:
            await self._ping(direct)

    async def _ping(self, workers: Mapping[int, WorkerHandle]) -> None:
        """Ping these workers together. Answers that have not come after `BATCH_WAIT_S` are awaited one by one."""
        self._unanswered_pings.update(workers)
        refs: dict[int, PendingAnswer[Ping]] = {}
        for number, worker in workers.items():
            with contextlib.suppress(Exception):  # this worker counts as silent; the others are pinged
                refs[number] = worker.ping.remote()
        answers: list[Ping | Raised | Unanswered] = []
        with contextlib.suppress(Exception):  # Ray does not answer: all workers count as silent
            answers = await asyncio.get_running_loop().run_in_executor(
                self._ping_thread, wait_for_answers, list(refs.values()), BATCH_WAIT_S
            )
        by_worker = dict(zip(refs, answers, strict=False))
        late = {number: refs[number] for number, answer in by_worker.items() if answer is UNANSWERED}
        self._unanswered_pings.difference_update(workers.keys() - late.keys())
        self._handle_ping_answers({number: answer for number, answer in by_worker.items() if answer is not UNANSWERED})
        await asyncio.gather(*(self._await_late_ping(number, ref) for number, ref in late.items()))

    async def _await_late_ping(self, number: int, ref: PendingAnswer[Ping]) -> None:
        """Wait for an answer to a ping that has not come with the others, for up to `LATE_PING_S`."""
        answer: Ping | Raised
        try:
            answer = await asyncio.wait_for(asyncio.wrap_future(ref.future()), LATE_PING_S)
        except asyncio.TimeoutError:
            return  # the worker is silent; `watch` counts the seconds
        except Exception as error:
            answer = Raised(error)
        finally:
            self._unanswered_pings.discard(number)
        self._handle_ping_answers({number: answer})

    def _handle_ping_answers(self, answers: Mapping[int, Ping | Raised]) -> None:
        """Note workers' answers to pings. Posts `WorkerAnswered` for workers that were reported silent."""
        now = time.monotonic()
        for number, answer in answers.items():
            if number not in self.pool.workers:
                continue  # it was dismissed meanwhile
            if isinstance(answer, Raised):
                self._report_failed_ping(number, answer.error)
                continue
            _, _, leaving, waited_s, skipped = answer
            if skipped is not None or number in self._reading:
                self._note_reading(number, skipped)
            self._answered_s[number] = now
            self.cpu_wait.report(number, waited_s, now)
            if number in self._reported_silent:
                self._reported_silent.remove(number)
                self.post(on.WorkerAnswered(number))
            if leaving:
                self.report_leaving_worker(number, "its process was asked to end (SIGTERM)")

    def _report_failed_ping(self, number: int, error: Exception) -> None:
        """Post `CallFailed` if the error says that the worker is dead; in the words of a call, which may fail later.

        After any other error the worker counts as silent; so after `ActorUnavailableError`, a broken connection, because the
        worker may live.
        """
        if isinstance(error, OutOfMemoryError):
            self.failures.post("lost", memory_monitor_kill_error(self.failures.coordinate(number), error), number)
        elif isinstance(error, RayActorError) and not isinstance(error, ActorUnavailableError):
            self.failures.post("lost", self.failures.lost_error(self.failures.coordinate(number), error), number)

    async def _look_at_nodes(self) -> None:
        """Ask Ray which nodes are draining or dead; report workers that have to leave, and nodes that are lost."""
        try:
            draining, (live, dead) = await asyncio.to_thread(lambda: (list_draining_nodes(), list_live_and_dead_nodes()))
        except Exception:
            return  # the head does not answer; calls that need it will report that
        for number in list(self.pool.workers):
            hello = self.hellos.get(number)
            if hello is not None and hello.node in draining:
                self.report_leaving_worker(number, f"node {hello.node[:8]} is being drained")
        self._drained |= set(draining)
        self._look_for_flapping_nodes(live, dead)
        for node in dead - self._drained:
            told = self.node_losses.died(node, time.monotonic())
            if told is not None:
                self.note(told)

    def _look_for_flapping_nodes(self, live: set[str], dead: set[str]) -> None:
        """Have new nodes wait for workers while nodes join and are lost soon after, and say so."""
        now = time.monotonic()
        lost, self.dead_nodes = dead - self.dead_nodes, dead
        for node in sorted(lost - self._drained):
            least_age_s = self.flapping_nodes.lose(node, now)
            if least_age_s is not None and least_age_s != self.told_age_s:
                self.told_age_s = least_age_s
                text = f"node {node[:8]} was lost soon after it had joined: a new node gets no worker before it is "
                text += f"{least_age_s:.0f} s old\n  cure: look at that machine and its network"
                self.note(RunWarning(text=text))
        self.flapping_nodes.see(live, now)

    def report_leaving_worker(self, number: int, why: str) -> None:
        """Report that a worker has to leave; posts `DrainRequested`. Idempotent."""
        if number not in self.failures.leaving:
            self.failures.leaving.add(number)
            self.note(
                WorkerDrain(
                    text=f"worker {number} has to leave: {why}",
                    why=why,
                    works=self.has_seat(number),
                    **self.worker_facts(number),
                )
            )
            self.post(on.DrainRequested(number, why))


async def gather_answers_within(refs: Iterable[PendingAnswer[T]], timeout_s: float) -> list[T | None]:
    """The answers that arrive in time; None for the others and for failures."""

    async def one(ref: PendingAnswer[T]) -> T | None:
        with contextlib.suppress(Exception):
            return await asyncio.wait_for(asyncio.wrap_future(ref.future()), timeout_s)
        return None

    return list(await asyncio.gather(*map(one, refs)))
