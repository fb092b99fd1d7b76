"""The driver of one run: an event loop around `elastic.machine`; it decides nothing and computes nothing by itself.

Every call to a worker is a task that ends in an event; every event goes through the machine; every decision is carried out
here. One call per worker and step, whatever the number of microbatches.
"""

from __future__ import annotations

import asyncio
import contextlib
import pickle
import time
import traceback
from collections import defaultdict
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError

from raypar.actors.journal import Journal
from raypar.actors.messages import Failed, Hello
from raypar.actors.pool import Pool, sweep
from raypar.actors.recorder import Recorder
from raypar.actors.request import RunRequest
from raypar.elastic import actions as do
from raypar.elastic import events as on
from raypar.elastic.machine import Phase, RunMachine
from raypar.errors import ClusterError, RayparError, UserCodeError, WorkerLost

TICK_S = 0.25
PING_S = 1.0
CLIENT_GONE_S = 60.0
STACKS_S = 5.0
KEPT_EVENTS = 10_000


class DriverActor:
    """Async actor: `start` it, then poll `events` until one says that the run is over."""

    def __init__(self, request: RunRequest) -> None:
        self.request = request
        self.plan = request.plan
        self.machine = RunMachine(request.course)
        self.pool = Pool(request.run, self.plan)
        self.journal = Journal(request.run, generation=1)
        self.recorder = Recorder(request)
        self.queue: asyncio.Queue[on.Event] = asyncio.Queue()
        self.told: list[dict[str, Any]] = []
        self.news = asyncio.Condition()
        self.reports: dict[int, dict[int, dict[str, Any]]] = defaultdict(dict)
        self.validations: dict[int, Any] = {}
        self.answered: set[asyncio.Task[None]] = set()
        self.tasks: set[asyncio.Task[None]] = set()
        self.effects = ThreadPoolExecutor(1, "raypar-effects")
        self.disk = ThreadPoolExecutor(1, "raypar-disk")
        self.heard_s = time.monotonic()
        self.step_calls = 0

    # -- called by the client ----------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Begin; returns at once."""
        self._spawn(self._run())
        self._spawn(self._start_workers())

    async def events(self, cursor: int, wait_s: float = 1.0) -> tuple[list[dict[str, Any]], int]:
        """What happened after `cursor`, waiting up to `wait_s` for news; and the next cursor."""
        self.heard_s = time.monotonic()
        async with self.news:
            if cursor >= len(self.told):
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(self.news.wait(), wait_s)
            return self.told[cursor:], len(self.told)

    async def stop(self, reason: str, grace_s: float) -> None:
        """Ctrl-C: finish or void the steps in flight, save, end."""
        self.queue.put_nowait(on.StopRequested(reason, interrupt=True, grace_s=grace_s))

    # -- the loop ----------------------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        """Until the machine is over. A mistake in here must not leave actors behind either."""
        self._spawn(self._tick())
        try:
            while self.machine.phase is not Phase.OVER:
                event = await self.queue.get()
                for decision in self.machine.handle(event, time.monotonic()):
                    self._carry_out(decision)
        except Exception as error:
            wrong = RayparError(f"the driver failed:\n{traceback.format_exc()}", cure="please report it with the lines above")
            wrong.__cause__ = error
            self._spawn(self._end(do.Teardown("failed", str(error), self.machine.emitted, wrong)))

    async def _tick(self) -> None:
        start = pinged = time.monotonic()
        while self.machine.phase is not Phase.OVER:
            await asyncio.sleep(TICK_S)
            now = time.monotonic()
            self.queue.put_nowait(on.Tick())
            limit = self.request.max_time_s
            if limit is not None and now - start > limit:
                start = float("inf")
                self.queue.put_nowait(on.StopRequested(f"max_time of {limit:.0f} s is over"))
            if now - pinged > PING_S:
                pinged = now
                for worker in self.pool.workers:
                    worker.ping.remote()

    def _carry_out(self, decision: do.Decision) -> None:
        match decision.action:
            case do.RunStep(step):
                trace = step in self.request.trace
                self.step_calls += len(self.pool.workers)
                self._call_all(lambda w: w.step.remote(step, trace), lambda rank, report: self._stepped(rank, step, report))
            case do.Journal(step):
                self._effect(lambda: self.journal.commit(step), lambda _: on.Journalled(step))
            case do.Emit(step):
                reports = self.reports.pop(step)
                self._effect(lambda: self.recorder.step(step, reports), lambda stop: self._seen(on.Emitted(step, stop)))
            case do.Validate(done):
                self.validations = {}
                self._call_all(lambda w: w.validate.remote(done), lambda rank, report: self._validated(rank, done, report))
            case do.EmitValidation(done):
                found = list(self.validations.values())
                self._effect(
                    lambda: self.recorder.validation(done, found), lambda stop: self._seen(on.ValidationEmitted(done, stop))
                )
            case do.Snapshot(done):
                self._spawn(self._save(done))
            case do.AbortGroups(why):
                self._spawn(self._abort(why))
            case do.Probe(ranks):
                self._spawn(self._probe(ranks))
            case do.Warn(text):
                self._tell("warning", text=text)
            case do.Teardown():
                self._spawn(self._end(decision.action))

    # -- calls to workers --------------------------------------------------------------------------------------------------

    def _call_all(self, call: Callable[[Any], Any], event: Callable[[int, Any], on.Event]) -> None:
        """One call to every worker; each answer becomes an event."""
        for rank, worker in enumerate(self.pool.workers):
            task = self._spawn(self._answer(rank, call(worker), event))
            self.answered.add(task)
            task.add_done_callback(self.answered.discard)

    async def _answer(self, rank: int, ref: Any, event: Callable[[int, Any], on.Event]) -> None:
        answer = await self._ask(rank, ref)
        self.queue.put_nowait(
            on.CallFailed(answer.kind, answer.error, rank) if isinstance(answer, Failed) else event(rank, answer)
        )

    async def _ask(self, rank: int, ref: Any) -> Any:
        """The answer of one worker, or `Failed`."""
        who = self.plan.coordinate(rank)
        try:
            return await ref
        except RayActorError as error:
            what = f"{who} was lost: {first_line(error)}"
            return Failed("lost", WorkerLost(what, cure="`raypar resume` goes on from the last checkpoint"))
        except RayError as error:
            return Failed("error", ClusterError(f"{who}: {error}", cure="look at Ray's logs"))
        except Exception as error:
            return Failed("error", error)

    def _stepped(self, rank: int, step: int, report: dict[str, Any]) -> on.Event:
        self.reports[step][rank] = report
        return on.StepReported(rank, step, report["seconds"])

    def _validated(self, rank: int, done: int, report: Any) -> on.Event:
        self.validations[rank] = report
        return on.ValidationReported(rank, done)

    # -- side effects: one after the other, off the loop ---------------------------------------------------------------------

    def _effect(self, call: Callable[[], Any], event: Callable[[Any], on.Event]) -> None:
        self._spawn(self._perform(call, event))

    async def _perform(self, call: Callable[[], Any], event: Callable[[Any], on.Event]) -> None:
        try:
            result = await asyncio.get_running_loop().run_in_executor(self.effects, call)
        except UserCodeError as error:
            self.queue.put_nowait(on.CallFailed("user", error))
        except Exception as error:
            self.queue.put_nowait(on.CallFailed("error", error))
        else:
            self.queue.put_nowait(event(result))

    def _seen(self, event: on.Event) -> on.Event:
        for line in self.recorder.news():
            self._tell(**line)
        return event

    # -- start, save, abort, probe, end --------------------------------------------------------------------------------------

    async def _start_workers(self) -> None:
        try:
            self.queue.put_nowait(await self._start())
        except RayparError as error:
            kind: on.Kind = "user" if isinstance(error, UserCodeError) else "error"
            self.queue.put_nowait(on.CallFailed(kind, error))
        except Exception as error:
            self.queue.put_nowait(on.CallFailed("error", error))

    async def _start(self) -> on.Event:
        request = self.request
        swept = await asyncio.to_thread(sweep, request.run)
        await asyncio.to_thread(self.journal.erase)
        if swept:
            self._tell("warning", text=f"removed {swept} placement groups that an earlier driver of this run had left")
        places = await self.pool.reserve(request.wait_for_workers_s, lambda text: self._tell("waiting", text=text))
        self.pool.hire(places, request.spec, request.host, request.orphan_timeout_s)
        hellos: list[Hello] = await self._everybody(lambda rank, w: w.hello.remote(), "start")
        nodes = {h.node for h in hellos}
        self._tell(
            "started", text=f"{len(hellos)} workers on {len(nodes)} node(s), pids {', '.join(str(h.pid) for h in hellos)}"
        )
        for line in self.recorder.meet(hellos):
            self._tell("warning", text=line)
        addresses = [h.address for h in hellos]
        deadline_s, done = request.start_deadline_s, request.course.first
        described = await self._everybody(
            lambda rank, w: w.adopt.remote(request.assignments[rank], addresses, 1, request.resume, done, deadline_s),
            "build its stages",
        )
        megabytes = ", ".join(f"{d['bytes'] / 1e6:.1f}" for d in described)
        self._tell("built", text=f"stages built and connected; parameters by worker in MB: {megabytes}")
        self._effect_now(self.recorder.begin)
        return on.WorkersReady()

    def _effect_now(self, call: Callable[[], Any]) -> None:
        self.effects.submit(call).result()

    async def _everybody(self, call: Callable[[int, Any], Any], what: str) -> list[Any]:
        """All workers' answers; the most blameworthy failure of several is raised."""
        asking = [asyncio.ensure_future(self._ask(rank, call(rank, w))) for rank, w in enumerate(self.pool.workers)]
        _, pending = await asyncio.wait(asking, timeout=self.request.start_deadline_s)
        if pending:
            ranks = [rank for rank, task in enumerate(asking) if task in pending]
            raise ClusterError(
                f"worker(s) {ranks} did not {what} within {self.request.start_deadline_s:.0f} s\n{await self._stacks(ranks)}",
                cure="look at the stacks above and at Ray's logs on those nodes",
            )
        answers = [task.result() for task in asking]
        failed = [a for a in answers if isinstance(a, Failed)]
        for kind in ("user", "error", "lost", "aborted"):
            for failure in failed:
                if failure.kind == kind:
                    raise failure.error
        return answers

    async def _save(self, done: int) -> None:
        """Snapshot on every worker, then, while training goes on, wait for the files and give the checkpoint its name."""
        try:
            folder = await asyncio.to_thread(self.recorder.checkpoint_begin, done)
        except RayparError as error:
            self.queue.put_nowait(on.SaveFailed(done, error))
            return
        asked = [self._ask(rank, w.save.remote(str(folder))) for rank, w in enumerate(self.pool.workers)]
        taken = await asyncio.gather(*asked)
        if not any(isinstance(answer, Failed) for answer in taken):
            self.queue.put_nowait(on.SnapshotTaken(done))
            taken = await asyncio.gather(*(self._ask(r, w.save_result.remote()) for r, w in enumerate(self.pool.workers)))
        failed = [answer for answer in taken if isinstance(answer, Failed)]
        if failed:
            await asyncio.to_thread(self.recorder.checkpoint_drop, folder)
            self.queue.put_nowait(on.SaveFailed(done, failed[0].error))
            return
        try:
            await asyncio.get_running_loop().run_in_executor(self.disk, self.recorder.checkpoint_end, done, folder, taken)
        except Exception as error:
            self.queue.put_nowait(on.SaveFailed(done, error))
            return
        self._effect(lambda: self.recorder.checkpoint_seen(done), lambda _: self._seen(on.Saved(done)))

    async def _abort(self, why: str) -> None:
        """Abort all transports, wait for the calls in flight to come back, and say where the workers stand."""
        await self._gather_quickly([w.abort.remote(why) for w in self.pool.workers], 2.0)
        if self.answered:
            await asyncio.wait(set(self.answered), timeout=5.0)
        stand = await self._gather_quickly([w.ping.remote() for w in self.pool.workers], 2.0)
        self.queue.put_nowait(on.Aborted(tuple(None if s is None else s[0] for s in stand)))

    async def _probe(self, ranks: tuple[int, ...]) -> None:
        self.queue.put_nowait(on.Probed(await self._stacks(list(ranks))))

    async def _stacks(self, ranks: list[int]) -> str:
        texts = await self._gather_quickly([self.pool.workers[r].stacks.remote() for r in ranks], STACKS_S)
        return "\n".join(
            f"--- {self.plan.coordinate(rank)}\n{text or 'does not answer: it is stopped, dead or busy outside Python'}"
            for rank, text in zip(ranks, texts, strict=True)
        )

    async def _gather_quickly(self, refs: list[Any], timeout_s: float) -> list[Any]:
        """Answers that come within the time; None for the others and for failures."""

        async def one(ref: Any) -> Any:
            try:
                return await asyncio.wait_for(asyncio.wrap_future(ref.future()), timeout_s)
            except Exception:
                return None

        return list(await asyncio.gather(*(one(ref) for ref in refs)))

    async def _end(self, teardown: do.Teardown) -> None:
        """Remove everything, then tell the client. The actor itself leaves when the client has seen it, or is gone."""
        try:
            await self.pool.close()
        except Exception as error:
            self._tell("warning", text=f"not every worker could be removed: {error}")
        with contextlib.suppress(Exception):
            await asyncio.to_thread(self.journal.erase)
        loop = asyncio.get_running_loop()
        try:
            await loop.run_in_executor(self.effects, self.recorder.end, teardown, self.step_calls)
        except Exception as error:
            self._tell("warning", text=f"the end of the run could not be recorded: {error}")
        for line in self.recorder.news():
            self._tell(**line)
        self._tell("end", end=teardown.end, why=teardown.why, done=teardown.done, error=pickled(teardown.error))
        self.heard_s = time.monotonic()
        while time.monotonic() - self.heard_s < CLIENT_GONE_S:
            await asyncio.sleep(1.0)
        ray.actor.exit_actor()

    # -- parts -------------------------------------------------------------------------------------------------------------

    def _spawn(self, work: Awaitable[None]) -> asyncio.Task[None]:
        task: asyncio.Task[None] = asyncio.ensure_future(work)  # type: ignore[assignment]
        self.tasks.add(task)
        task.add_done_callback(self._settled)
        return task

    def _settled(self, task: asyncio.Task[None]) -> None:
        """A task that raised is a mistake of ours; it must end the run, not leave it waiting for an event that never comes."""
        self.tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            text = "".join(traceback.format_exception(error)).rstrip()
            wrong = RayparError(f"the driver failed:\n{text}", cure="please report it with the lines above")
            self.queue.put_nowait(on.CallFailed("error", wrong))

    def _tell(self, kind: str, **facts: Any) -> None:
        self.told.append({"kind": kind, "time": time.time(), **facts})
        asyncio.ensure_future(self._wake())  # noqa: RUF006 (ends at once)

    async def _wake(self) -> None:
        async with self.news:
            self.news.notify_all()


def first_line(error: Exception) -> str:
    """Ray's messages have many lines; the first says it."""
    return str(error).strip().splitlines()[0]


def pickled(error: Exception | None) -> bytes | None:
    """The error for the client, or its text when it cannot be pickled."""
    if error is None:
        return None
    try:
        return pickle.dumps(error)
    except Exception:
        return pickle.dumps(RayparError(f"{type(error).__name__}: {error}"))
