"""Calls workers. Each answer becomes an event; failures name the worker."""

from __future__ import annotations

import asyncio
import functools
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Container, Coroutine, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TypeAlias, TypeVar

from ray.exceptions import ActorUnavailableError, OutOfMemoryError, RayActorError, RayError

from raypar.actors.actor_handle_types import PendingAnswer, Ping, WorkerHandle
from raypar.actors.answer_batch import BATCH_WAIT_S, UNANSWERED, Raised, wait_for_answers
from raypar.actors.background_tasks import BackgroundTasks
from raypar.actors.messages import CallFailure
from raypar.actors.node_agent import CallOfAgent
from raypar.actors.node_agents import GATHER_S, NodeAgents
from raypar.actors.worker_failures import WorkerFailures, describe_seat_or_number
from raypar.actors.worker_pool import WorkerPool
from raypar.actors.worker_registry import gather_answers_within
from raypar.elastic import events as on
from raypar.elastic.call_routes import CallRoute
from raypar.elastic.run_machine import RunMachine
from raypar.elastic.step_flow_rules import MAX_OPEN_STEPS
from raypar.errors import ClusterError, CommError, error_first_line
from raypar.ray_compat.actor_errors import memory_monitor_kill_error

T = TypeVar("T")
EventOfAnswers: TypeAlias = Callable[[Mapping[int, T]], on.RunEvent]
"""Makes one event of the answers, by worker, that have come together: one for each would cost more than all that follows."""

STACKS_S = 5.0
REPEAT_CALL_S = 0.5
"""Pause before a call is repeated whose connection broke before its answer came."""
ABORTED_CALLS_S = 5.0
"""How long the calls in flight may take to return after an abort."""


class AnswerLost(CommError):
    """The connection to a worker broke before its answer came. The call may have been executed, and the worker may be alive.

    Ray reports this after a network break of a few seconds, for an actor that it does not know to be dead.
    """


class WorkerCalls:
    """Calls to the workers of a run: one per worker and step, whatever the number of microbatches."""

    def __init__(
        self,
        machine: RunMachine,
        pool: WorkerPool,
        failures: WorkerFailures,
        tasks: BackgroundTasks,
        started: Container[int],
        agents: NodeAgents | None = None,
    ) -> None:
        self.machine = machine
        """Knows the members and their seats."""
        self.pool = pool
        """Has the handles of the workers."""
        self.failures = failures
        """Posts the events of failed calls."""
        self.tasks = tasks
        """Awaits answers, and posts events to the run machine."""
        self.started = started
        """Workers that have started."""
        self.agents = agents or NodeAgents()
        """By way of which many workers are called."""
        self._asked: Counter[int] = Counter()
        """Worker -> number of its calls that are not answered yet."""
        self._pending: set[asyncio.Task[None]] = set()
        """The tasks that await answers."""
        self._batch_threads = ThreadPoolExecutor(MAX_OPEN_STEPS, "raypar-answers")
        """Threads in which the answers of all members to one call are awaited together."""

    def call_all(
        self,
        call: Callable[[WorkerHandle], PendingAnswer[T | CallFailure]],
        event: EventOfAnswers[T],
        by_agent: CallOfAgent[T | CallFailure] | None = None,
    ) -> None:
        """Call every member; answers that come together become one event.

        `by_agent`: the same call by way of an agent of a node, of which workers can be asked twice: who does not answer by way
        of an agent is called directly.
        """
        # Members that are not in the pool are lost, and the run machine has had an event about it.
        generation, members = self.machine.membership.generation, self.machine.membership.members
        direct = dict.fromkeys(number for number in members if number in self.pool.workers)
        if by_agent is not None:
            routes = self.agents.routes(direct)
            reached = set[int]().union(*routes.values())
            direct = dict.fromkeys(number for number in direct if number not in reached)
            for node, route in routes.items():
                self._await_in_background(self._answer_by_agent(node, route, generation, call, event, by_agent))
        refs = {number: call(self.pool.workers[number]) for number in direct}
        if refs:  # `ray.wait` takes no empty list
            self._await_in_background(self._answer_batch(generation, refs, event))

    async def _answer_by_agent(
        self,
        node: str,
        route: CallRoute,
        generation: int,
        call: Callable[[WorkerHandle], PendingAnswer[T | CallFailure]],
        event: EventOfAnswers[T],
        by_agent: CallOfAgent[T | CallFailure],
    ) -> None:
        """Post all answers that come by way of an agent, each once; call those directly whom it cannot reach."""
        left: CallRoute | None = route
        owed = {*route}
        self._asked.update(owed)
        while left is not None and self._lasts(generation):
            found = await self.agents.gather(node, GATHER_S, functools.partial(by_agent, part=left, within_s=GATHER_S))
            answers = found.answers if found is not None else {}
            direct = owed if found is None else owed & {*found.unreached}
            heard = owed & answers.keys()
            self._post_together({number: answers[number] for number in sorted(heard)}, generation, event)
            for number in sorted(direct):
                self._await_in_background(self._answer_directly(number, generation, call, event))
            self._asked.subtract(heard | direct)
            owed = owed - heard - direct
            left = left.only(owed) if owed else None
        self._asked.subtract(owed)

    async def _answer_directly(
        self,
        number: int,
        generation: int,
        call: Callable[[WorkerHandle], PendingAnswer[T | CallFailure]],
        event: EventOfAnswers[T],
    ) -> None:
        if number in self.pool.workers and self._lasts(generation):  # else it is lost, and the run machine has had an event
            await self._answer(number, generation, lambda: call(self.pool.workers[number]), _alone(event), repeats=True)

    def _lasts(self, generation: int) -> bool:
        """Whether a generation is the present one."""
        return generation == self.machine.membership.generation

    async def _answer_batch(
        self, generation: int, refs: Mapping[int, PendingAnswer[T | CallFailure]], event: EventOfAnswers[T]
    ) -> None:
        """Post all answers together. Answers that have not come after `BATCH_WAIT_S` are posted one by one.

        `refs`: worker -> its call. Why together: see `answer_batch`.
        """
        seats = self.failures.seats()
        self._asked.update(list(refs))
        try:
            answers = await asyncio.get_running_loop().run_in_executor(
                self._batch_threads, wait_for_answers, list(refs.values()), BATCH_WAIT_S
            )
        finally:
            self._asked.subtract(list(refs))
        there: dict[int, T | CallFailure] = {}
        for number, answer in zip(refs, answers, strict=True):
            if answer is UNANSWERED:
                self.post_answer(number, generation, refs[number], _alone(event))
            elif isinstance(answer, Raised):
                there[number] = self._failure(describe_seat_or_number(seats, number), answer.error)
            else:
                there[number] = answer
        self._post_together(there, generation, event)

    def post_answer(
        self, number: int, generation: int, ref: PendingAnswer[T | CallFailure], event: Callable[[int, T], on.RunEvent]
    ) -> None:
        """Post `event(number, answer)` when the call is answered, or `CallFailed` of that generation when it fails."""
        self._await_in_background(self._answer(number, generation, lambda: ref, event, repeats=False))

    def call_until_answered(
        self,
        number: int,
        generation: int,
        ask: Callable[[], PendingAnswer[T | CallFailure]],
        event: Callable[[int, T], on.RunEvent],
    ) -> None:
        """Like `post_answer`, but repeats the call while its answer is lost (`AnswerLost`). So it may be executed twice."""
        self._await_in_background(self._answer(number, generation, ask, event, repeats=True))

    def _await_in_background(self, answering: Coroutine[None, None, None]) -> None:
        task = self.tasks.spawn(answering)
        self._pending.add(task)
        task.add_done_callback(self._pending.discard)

    async def _answer(
        self,
        number: int,
        generation: int,
        ask: Callable[[], PendingAnswer[T | CallFailure]],
        event: Callable[[int, T], on.RunEvent],
        repeats: bool,
    ) -> None:
        answer = await self.ask(number, ask())
        while (
            repeats
            and isinstance(answer, CallFailure)
            and isinstance(answer.error, AnswerLost)
            and generation == self.machine.membership.generation
            and number in self.pool.workers
        ):
            await asyncio.sleep(REPEAT_CALL_S)
            answer = await self.ask(number, ask())
        self._post(number, generation, answer, event)

    def _post(self, number: int, generation: int, answer: T | CallFailure, event: Callable[[int, T], on.RunEvent]) -> None:
        """Post `event(number, answer)`; if `answer` is a `CallFailure`, post the event `CallFailed`."""
        self._post_together({number: answer}, generation, lambda answers: event(number, answers[number]))

    def _post_together(self, answers: Mapping[int, T | CallFailure], generation: int, event: EventOfAnswers[T]) -> None:
        """Post `event(answers)`, and the event `CallFailed` for each `CallFailure` among them."""
        good = {number: answer for number, answer in answers.items() if not isinstance(answer, CallFailure)}
        if good:
            self.tasks.post(event(good))
        for number, answer in answers.items():
            if isinstance(answer, CallFailure):
                self.failures.post(answer.kind, answer.error, number, None if answer.kind == "lost" else generation)

    @property
    def unanswered(self) -> set[int]:
        """Workers that have not answered a call."""
        return {number for number, calls in self._asked.items() if calls}

    async def ask(self, number: int, ref: Awaitable[T | CallFailure]) -> T | CallFailure:
        """The answer of a call to one worker, or a `CallFailure` that names the worker."""
        seats = self.failures.seats()
        self._asked[number] += 1
        try:
            return await ref
        except Exception as error:
            return self._failure(describe_seat_or_number(seats, number), error)
        finally:
            self._asked[number] -= 1

    def _failure(self, who: str, error: Exception) -> CallFailure:
        """The failure of a call that raised `error`. `who`: the called worker's seat in words."""
        if isinstance(error, ActorUnavailableError):
            what = f"{who}: the connection broke before its answer came: {error_first_line(error)}"
            return CallFailure("aborted", AnswerLost(what, cure="look at the network between its node and the driver's"))
        if isinstance(error, RayActorError):
            return CallFailure("lost", self.failures.lost_error(who, error))
        if isinstance(error, OutOfMemoryError):
            return CallFailure("lost", memory_monitor_kill_error(who, error))
        if isinstance(error, RayError):
            return CallFailure("error", ClusterError(f"{who}: {error}", cure="look at Ray's logs"))
        return CallFailure("error", error)

    def coordinate(self, number: int) -> str:
        """The worker's seat in words, or its number if it has no seat."""
        return self.failures.coordinate(number)

    async def abort(self, why: str) -> None:
        """Abort all transports, wait for the calls in flight to return, and post how many steps each member has done.

        Workers that have not started are left out: they have no transport and do not answer.
        """
        workers = {number: worker for number, worker in self.pool.workers.items() if number in self.started}
        await gather_answers_within([worker.abort.remote(why) for worker in workers.values()], 2.0)
        until_s = time.monotonic() + ABORTED_CALLS_S
        # More than one round: the task of a batch ends by starting a task for each answer that is late.
        while self._pending and (left_s := until_s - time.monotonic()) > 0:
            await asyncio.wait(set(self._pending), timeout=left_s)
            await asyncio.sleep(0)  # lets the event loop remove the tasks that have ended
        there = [number for number in self.machine.membership.members if number in workers]
        pings: list[PendingAnswer[Ping]] = [workers[n].ping.remote() for n in there]
        answers = dict(zip(there, await gather_answers_within(pings, 2.0), strict=True))
        self.tasks.post(
            on.GroupsAborted(tuple(s[0] if (s := answers.get(n)) else None for n in self.machine.membership.members))
        )

    async def probe(self, numbers: tuple[int, ...]) -> None:
        """Post the stacks of these workers."""
        self.tasks.post(on.StacksReported(await self.stacks(list(numbers))))

    async def stacks(self, numbers: list[int]) -> str:
        """The stacks of these workers as text."""
        texts = await gather_answers_within([self.pool.workers[n].stacks.remote() for n in numbers], STACKS_S)
        return "\n".join(
            f"--- {self.coordinate(number)}\n{text or 'does not answer: it is stopped, dead or busy outside Python'}"
            for number, text in zip(numbers, texts, strict=True)
        )


def _alone(event: EventOfAnswers[T]) -> Callable[[int, T], on.RunEvent]:
    """The event of an answer that comes alone."""
    return lambda number, answer: event({number: answer})
