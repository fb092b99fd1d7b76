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
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, RayActorError, RayError

from raypar.actors.journal import Journal
from raypar.actors.messages import Failed, Hello
from raypar.actors.pool import Pool, sweep
from raypar.actors.recorder import Recorder
from raypar.actors.request import RunRequest
from raypar.elastic import actions as do
from raypar.elastic import events as on
from raypar.elastic.holdings import WholeParameters
from raypar.elastic.machine import Phase, RunMachine
from raypar.elastic.member import Stand
from raypar.elastic.part import Part
from raypar.errors import ClusterError, PlanError, RayparError, UserCodeError, WorkerLost
from raypar.plan import ParallelPlan, Routing
from raypar.planner.search import search
from raypar.schedule import registry
from raypar.schedule.assignment import Assignment, assign

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
        self.machine = RunMachine(request.course, plan=self.plan, layout=WholeParameters(request.outline.elements))
        self.pool = Pool(request.run, self.plan)
        self.journal = Journal(request.run, generation=1)
        self.recorder = Recorder(request)
        self.queue: asyncio.Queue[on.Event] = asyncio.Queue()
        self.told: list[dict[str, Any]] = []
        self.news = asyncio.Condition()
        self.reports: dict[int, dict[int, dict[str, Any]]] = defaultdict(dict)
        """step -> rank -> report"""
        self.unseen: dict[int, dict[int, dict[str, Any]]] = {}
        """The same of steps that are being journalled and emitted."""
        self.schedules: dict[ParallelPlan, str] = {self.plan: request.schedule_name}
        self.outcomes: dict[int, tuple[float, float]] = {}
        """(loss, norm) of every step seen: what is executed again must give the same"""
        self.addresses: dict[int, str] = {}
        self.restored: str | None = request.resume
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
                for worker in self.pool.workers.values():
                    worker.ping.remote()

    def _carry_out(self, decision: do.Decision) -> None:
        generation = self.machine.generation
        match decision.action:
            case do.RunStep(step):
                trace = step in self.request.trace
                self.step_calls += len(self.machine.members)
                self._call_all(
                    lambda w: w.step.remote(generation, step, trace),
                    lambda number, report: self._stepped(number, generation, step, report),
                )
            case do.Journal(step):
                self.unseen[step] = self.reports.pop(step)
                self._effect(lambda: self.journal.commit(step), lambda _: on.Journalled(step))
            case do.Emit(step):
                reports = self.unseen.pop(step)
                self.outcomes[step] = outcome_of(reports)
                self._effect(lambda: self.recorder.step(step, reports), lambda stop: self._seen(on.Emitted(step, stop)))
            case do.Validate(done):
                self.validations = {}
                self._call_all(
                    lambda w: w.validate.remote(generation, done),
                    lambda number, report: self._validated(number, generation, done, report),
                )
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
            case do.Claim(number):
                self._note("recovering", text=decision.reason, generation=number)
                self._spawn(self._claim(number))
            case do.Fence(number, workers):
                for worker in workers:
                    self._fence(number, worker, decision.reason)
            case do.Settle(number, workers, step, outcome):
                for worker in workers:
                    ref = self.pool.workers[worker].settle.remote(number, step, outcome)
                    self._call(worker, number, ref, lambda _, stand: on.SettledLate(number, self._heard(stand)))
            case do.ChoosePlan(number, workers):
                self._spawn(self._choose(number, workers))
            case do.Adopt():
                self._spawn(self._adopt(decision.action, decision.reason))
            case do.CheckReplay(step):
                self._check_replay(step)
            case do.Evict(worker, why):
                self._note("warning", text=f"worker {worker} is given up: {why}")
                self.pool.dismiss(worker)
            case do.Teardown():
                self._spawn(self._end(decision.action))

    # -- calls to workers --------------------------------------------------------------------------------------------------

    def _call_all(self, call: Callable[[Any], Any], event: Callable[[int, Any], on.Event]) -> None:
        """One call to every member; each answer becomes an event."""
        for number in self.machine.members:
            self._call(number, self.machine.generation, call(self.pool.workers[number]), event)

    def _call(self, number: int, generation: int, ref: Any, event: Callable[[int, Any], on.Event]) -> None:
        task = self._spawn(self._answer(number, generation, ref, event))
        self.answered.add(task)
        task.add_done_callback(self.answered.discard)

    async def _answer(self, number: int, generation: int, ref: Any, event: Callable[[int, Any], on.Event]) -> None:
        answer = await self._ask(number, ref)
        if not isinstance(answer, Failed):
            self.queue.put_nowait(event(number, answer))
        else:
            of = None if answer.kind == "lost" else generation
            self.queue.put_nowait(on.CallFailed(answer.kind, answer.error, number, of))

    async def _ask(self, number: int, ref: Any) -> Any:
        """The answer of one worker, or `Failed`."""
        who = self._coordinate(number)
        try:
            return await ref
        except (RayActorError, ActorUnavailableError) as error:
            what = f"{who} was lost: {first_line(error)}"
            return Failed("lost", WorkerLost(what, cure="`raypar resume` goes on from the last checkpoint"))
        except RayError as error:
            return Failed("error", ClusterError(f"{who}: {error}", cure="look at Ray's logs"))
        except Exception as error:
            return Failed("error", error)

    def _coordinate(self, number: int) -> str:
        members = self.machine.members
        plan = self.machine.plan or self.plan
        return plan.coordinate(members.index(number)) if number in members else f"worker {number}"

    def _stepped(self, number: int, generation: int, step: int, report: dict[str, Any]) -> on.Event:
        if generation == self.machine.generation:
            self.reports[step][self.machine.members.index(number)] = report
        return on.StepReported(number, step, report["seconds"], generation)

    def _validated(self, number: int, generation: int, done: int, report: Any) -> on.Event:
        if generation == self.machine.generation:
            self.validations[number] = report
        return on.ValidationReported(number, done, generation)

    # -- from one generation to the next ---------------------------------------------------------------------------------------

    async def _claim(self, generation: int) -> None:
        """Not behind the callbacks: they may take long."""
        try:
            ok = await asyncio.to_thread(self.journal.claim, generation)
        except Exception as error:
            self.queue.put_nowait(on.CallFailed("error", error))
        else:
            self.queue.put_nowait(on.Claimed(generation, ok))

    def _fence(self, generation: int, number: int, reason: str) -> None:
        """First beside what the worker does, so that it stops; then behind it."""
        worker = self.pool.workers[number]
        self._call(number, generation, worker.hear.remote(generation, reason), lambda number, _: on.Tick())
        self._call(number, generation, worker.stand.remote(generation), lambda _, s: on.Stood(generation, self._heard(s)))

    def _heard(self, stand: Stand) -> Stand:
        """Steps that a worker has applied and nobody has reported to the end are committed by the machine; people see their
        loss."""
        for step, outcome in stand.outcomes.items():
            if step >= self.machine.journalled:
                self.reports[step] = {0: missed(outcome)}
        return stand

    async def _choose(self, generation: int, workers: int) -> None:
        def find() -> on.Event:
            try:
                choice = search(self.request.profile, workers, self.request.cut)
            except PlanError as error:
                return on.PlanChosen(generation, None, first_line(error))
            self.schedules[choice.plan] = choice.schedule
            return on.PlanChosen(generation, choice.plan)

        self.queue.put_nowait(await asyncio.to_thread(find))

    async def _adopt(self, order: do.Adopt, reason: str) -> None:
        """Lower the plan, and let everybody connect, hand over, take over and build."""
        request, plan = self.request, order.plan
        name = self._schedule_for(plan)
        self.reports = defaultdict(dict)  # of steps that never happened
        crossing = request.outline.crossing(plan)

        def lowered() -> tuple[Assignment, ...]:
            made = registry.build(name, Routing(plan, request.cut))
            return assign(made, plan, crossing, request.cut, request.validation_cut)

        assignments = await asyncio.to_thread(lowered)
        workers = (*order.members, *order.sources)
        ranks = {number: rank for rank, number in enumerate(workers)}
        addresses = [self.addresses[number] for number in workers]
        load = None
        if order.load:
            load = str(self.recorder.checkpoint_path or self.restored) if order.done else None
        moved = sum(move.piece.size for move in order.moves)
        text = f"{len(order.members)} workers, {plan.describe()}; {reason}; {moved:,} parameters and their optimizer state move"
        self._note("recovering", text=f"generation {order.generation}: {text}", generation=order.generation)
        self.recorder.replanned = True
        for number in workers:
            if number not in self.pool.workers:
                self.queue.put_nowait(on.CallFailed("lost", WorkerLost(f"worker {number} is gone"), number))
                return
        for rank, number in enumerate(workers):
            seated = rank < plan.world
            part = Part(
                assignments[rank] if seated else None, ranks, order.done, order.moves, load, fresh=order.load and not order.done
            )
            coordinate = plan.coordinate(rank) if seated else f"worker {number}"
            ref = self.pool.workers[number].adopt.remote(
                order.generation, pickle.dumps(part), coordinate, addresses, request.start_deadline_s
            )
            self._call(number, order.generation, ref, lambda n, _: on.Adopted(n, order.generation))

    def _schedule_for(self, plan: ParallelPlan) -> str:
        """The one the plan was chosen with, else the job's, where the plan has the stages for it."""
        for name in (self.schedules.get(plan), self.request.schedule_name, "1f1b"):
            if name is not None and registry.fits(name, plan):
                self.schedules[plan] = name
                return name
        return "interleaved"

    def _check_replay(self, step: int) -> None:
        found, before = outcome_of(self.reports.pop(step)), self.outcomes.get(step)
        if before is not None and repr(found) != repr(before):
            error = RayparError(
                f"step {step + 1} was executed again and gave (loss, norm) {found} instead of {before}",
                cure="the job is not reproducible: look for randomness of its own, or for workers that compute differently",
            )
            self.queue.put_nowait(on.CallFailed("error", error))

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
        self.addresses = {number: hello.address for number, hello in enumerate(hellos)}
        nodes = {h.node for h in hellos}
        self._tell(
            "started", text=f"{len(hellos)} workers on {len(nodes)} node(s), pids {', '.join(str(h.pid) for h in hellos)}"
        )
        for line in self.recorder.meet(hellos):
            self._tell("warning", text=line)
        addresses = [h.address for h in hellos]
        deadline_s, done = request.start_deadline_s, request.course.first
        ranks = {number: number for number in range(self.plan.world)}

        def part(rank: int) -> bytes:
            assignment = pickle.loads(request.assignments[rank])
            return pickle.dumps(Part(assignment, ranks, done, (), request.resume, fresh=request.resume is None))

        described = await self._everybody(
            lambda rank, w: w.adopt.remote(1, part(rank), self.plan.coordinate(rank), addresses, deadline_s),
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
        asking = [asyncio.ensure_future(self._ask(rank, call(rank, w))) for rank, w in self.pool.workers.items()]
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
        members = {n: self.pool.workers[n] for n in self.machine.members if n in self.pool.workers}
        asked = [self._ask(number, w.save.remote(str(folder))) for number, w in members.items()]
        taken = await asyncio.gather(*asked)
        if not any(isinstance(answer, Failed) for answer in taken):
            self.queue.put_nowait(on.SnapshotTaken(done))
            taken = await asyncio.gather(*(self._ask(n, w.save_result.remote()) for n, w in members.items()))
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
        await self._gather_quickly([w.abort.remote(why) for w in self.pool.workers.values()], 2.0)
        if self.answered:
            await asyncio.wait(set(self.answered), timeout=5.0)
        stand = await self._gather_quickly([w.ping.remote() for w in self.pool.workers.values()], 2.0)
        self.queue.put_nowait(on.Aborted(tuple(None if s is None else s[0] for s in stand)))

    async def _probe(self, ranks: tuple[int, ...]) -> None:
        self.queue.put_nowait(on.Probed(await self._stacks(list(ranks))))

    async def _stacks(self, ranks: list[int]) -> str:
        texts = await self._gather_quickly([self.pool.workers[r].stacks.remote() for r in ranks], STACKS_S)
        return "\n".join(
            f"--- {self._coordinate(rank)}\n{text or 'does not answer: it is stopped, dead or busy outside Python'}"
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
        if teardown.end == "deposed":  # another driver goes on with the workers, the journal and the run folder
            self._tell("end", end=teardown.end, why=teardown.why, done=teardown.done, error=None)
            return
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

    def _note(self, kind: str, **facts: Any) -> None:
        """Tell it, and keep it in the run folder."""
        self._tell(kind, **facts)
        self.effects.submit(self.recorder.note, {"kind": kind, **facts})

    def _tell(self, kind: str, **facts: Any) -> None:
        self.told.append({"kind": kind, "time": time.time(), **facts})
        asyncio.ensure_future(self._wake())  # noqa: RUF006 (ends at once)

    async def _wake(self) -> None:
        async with self.news:
            self.news.notify_all()


def outcome_of(reports: Mapping[int, Mapping[str, Any]]) -> tuple[float, float]:
    """(loss, norm): the same in all reports of a step."""
    report = next(iter(reports.values()))
    return report["loss"], report["norm"]


def missed(outcome: Any) -> dict[str, Any]:
    """What can be said of a step that was found applied, and whose reports went to nobody or are not whole."""
    known = {"loss": outcome.loss, "norm": outcome.norm, "count": outcome.count, "skipped": outcome.skipped}
    return {**known, "seconds": 0.0, "busy_seconds": 0.0, "peak_rss_bytes": 0, "spans": [], "ledger": {}}


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
