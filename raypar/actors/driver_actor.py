"""The driver of one run: an event loop around `elastic.machine`; it decides nothing and computes nothing by itself.

Every call to a worker is a task that ends in an event; every event goes through the machine; every decision is carried out
here. One call per worker and step, whatever the number of microbatches.
"""

from __future__ import annotations

import asyncio
import contextlib
import pickle
import threading
import time
import traceback
import warnings
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, OutOfMemoryError, RayActorError, RayError

from raypar.actors.journal import Deposed, Journal, Record
from raypar.actors.messages import Failed, Hello
from raypar.actors.news import News
from raypar.actors.plans import Plans
from raypar.actors.pool import Pool, sweep
from raypar.actors.recorder import Recorder
from raypar.actors.request import RunRequest
from raypar.actors.staff import Staff, first_line, killed_for_memory, quickly
from raypar.actors.status import Status
from raypar.elastic import actions as do
from raypar.elastic import events as on
from raypar.elastic.buddies import buddies
from raypar.elastic.holdings import WholeParameters
from raypar.elastic.machine import Phase, RunMachine
from raypar.elastic.member import Stand
from raypar.elastic.part import Part
from raypar.elastic.seating import spread
from raypar.errors import ClusterError, OutOfMemory, RayparError, UserCodeError, WorkerLost
from raypar.plan import ParallelPlan

TICK_S = 0.25
CLIENT_GONE_S = 60.0
"""How long the end of a run waits to be seen by the client."""
ABANDONED_S = 300.0
"""A run that no client has asked for news for so long is saved and ended."""
STACKS_S = 5.0
BEGIN_AGAIN_S = 60.0
AGAIN_S = 0.1


class DriverActor:
    """Async actor: `start` it, then poll `events` until one says that the run is over.

    Of an elastic run Ray starts it again when it dies: it then finds the run in the journal and starts by itself.
    """

    def __init__(self, run: str) -> None:
        self.run = run
        self.journal = Journal(run)
        self.news = News()
        self.queue: asyncio.Queue[on.Event] = asyncio.Queue()
        """From the very beginning: Ctrl-C may come before the request."""
        self.beginning = asyncio.Lock()
        self.begun = False
        self.finding = False
        """Taking over: who the members are is not known yet."""
        self.heard_s = time.monotonic()
        context = ray.get_runtime_context()
        with warnings.catch_warnings():  # Ray asks itself by a name that it has deprecated
            warnings.simplefilter("ignore", DeprecationWarning)
            again = context.was_current_actor_reconstructed
        if again:
            threading.Thread(target=self._call_itself, args=(context.current_actor,), daemon=True).start()

    def _call_itself(self, me: Any) -> None:
        """`begin_again`; as long as Ray's control store has not noted that this actor is alive, its calls to itself fail."""
        while not self.begun:
            try:
                me.begin_again.remote().future().result()  # `ray.get` would warn: this is an actor with an event loop
                return
            except RayError:
                time.sleep(AGAIN_S)

    def _set_up(self, request: RunRequest) -> None:
        self.request = request
        self.machine = RunMachine(request.course, plan=request.plan, layout=WholeParameters(request.outline.elements))
        self.plans = Plans(request)
        self.pool = Pool(request.run)
        self.staff = Staff(self.pool, self.journal, self.queue.put_nowait, self._note)
        self.machine.nodes = self.staff.where
        self.recorder = Recorder(request)
        self.status = Status(request)
        self.reports: dict[int, dict[int, dict[str, Any]]] = defaultdict(dict)
        """step -> rank -> report"""
        self.unseen: dict[int, dict[int, dict[str, Any]]] = {}
        """The same of steps that are being journalled and emitted."""
        self.outcomes: dict[int, tuple[float, float]] = {}
        """(loss, norm) of every step seen: what is executed again must give the same"""
        self.order: do.Adopt | None = None
        self.resumed_at = -1
        """The first step of the present generation."""
        self.validations: dict[int, Any] = {}
        self.answered: set[asyncio.Task[None]] = set()
        self.tasks: set[asyncio.Task[None]] = set()
        self.effects = ThreadPoolExecutor(1, "raypar-effects")
        self.disk = ThreadPoolExecutor(1, "raypar-disk")
        self.step_calls = 0

    # -- called by the client ----------------------------------------------------------------------------------------------

    async def start(self, request: RunRequest | None = None) -> None:
        """Begin, or, without a request, go on with the run that is in the journal; returns at once. When there is none, its
        driver died before it had kept the request: the client brings it again."""
        async with self.beginning:
            if self.begun:
                return
            if request is not None:
                await asyncio.to_thread(self._begin_journal, request)
            elif (request := await asyncio.to_thread(self.journal.request)) is None:
                return
            record = await asyncio.to_thread(self.journal.last_record)
            end = await asyncio.to_thread(self.journal.end)
            self._set_up(request)
            self.begun = True
        if end is not None:
            self._spawn(self._finish(end))
        elif record is not None:
            self.finding = True
            self._spawn(self._go_on(record))
        else:
            self._spawn(self._run())
            self._spawn(self._guarded(self._start()))

    async def begin_again(self) -> None:
        """`start` of a driver that Ray has started again. Nobody waits for its answer, so a store that does not answer is asked
        again for a while, and then the client is told."""
        deadline = time.monotonic() + BEGIN_AGAIN_S
        while True:
            try:
                await self.start()
                return
            except Exception as error:
                if time.monotonic() > deadline:
                    what = f"a new driver could not find run {self.run} in Ray's store within {BEGIN_AGAIN_S:.0f} s: {error}"
                    lost = ClusterError(what, cure="look at the head node; `raypar resume` goes on from the last checkpoint")
                    self._tell("end", end="failed", why=lost.what, done=0, error=pickled(lost))
                    return
            await asyncio.sleep(TICK_S)

    async def _go_on(self, record: Record) -> None:
        """What was told meanwhile (Ctrl-C, a worker that has started) is heard after where the run stands."""
        await self._guarded(self._take_over(record))
        told = [self.queue.get_nowait() for _ in range(self.queue.qsize())]
        for event in (told[-1], *told[:-1]):
            self.queue.put_nowait(event)
        self._spawn(self._run())

    def _begin_journal(self, request: RunRequest) -> None:
        self.journal.erase()
        self.journal.put_request(request)

    async def events(self, epoch: int, cursor: int, wait_s: float = 1.0) -> tuple[list[dict[str, Any]], int, int]:
        """See `News.after`."""
        self.heard_s = time.monotonic()
        return await self.news.after(epoch, cursor, wait_s)

    async def stop(self, reason: str, grace_s: float) -> None:
        """Ctrl-C: finish or void the steps in flight, save, end."""
        self.queue.put_nowait(on.StopRequested(reason, interrupt=True, grace_s=grace_s))

    # -- the loop ----------------------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        """Until the machine is over. A mistake in here must not leave actors behind either."""
        self._spawn(self._tick())
        self._spawn(self.staff.watch(self.request.silent_s, lambda: self.machine.phase is Phase.OVER))
        try:
            while self.machine.phase is not Phase.OVER:
                event = await self.queue.get()
                if isinstance(event, on.CallFailed) and event.worker is not None and isinstance(event.error, OutOfMemory):
                    event = replace(event, error=await asyncio.to_thread(self._explained, event.worker, event.error))
                if isinstance(event, on.CallFailed) and event.kind == "lost" and event.worker is not None:
                    event = replace(event, preempted=self.staff.preempted(event.worker, event.error))
                    self._lost(event.worker, first_line(event.error))
                for decision in self.machine.handle(event, time.monotonic()):
                    self._carry_out(decision)
                self._keep_status()
        except Exception as error:
            wrong = RayparError(f"the driver failed:\n{traceback.format_exc()}", cure="please report it with the lines above")
            wrong.__cause__ = error
            self._spawn(self._end(do.Teardown("failed", str(error), self.machine.emitted, wrong)))

    async def _tick(self) -> None:
        start = self.heard_s = time.monotonic()
        while self.machine.phase is not Phase.OVER:
            before = time.monotonic()
            await asyncio.sleep(TICK_S)
            now = time.monotonic()
            late_s = now - before - TICK_S
            if late_s > TICK_S:
                self.queue.put_nowait(on.Tick(stalled_s=late_s))
            else:
                self.queue.put_nowait(on.Tick(unheard=self.staff.unheard()))
            limit = self.request.max_time_s
            if limit is not None and now - start > limit:
                start = float("inf")
                self.queue.put_nowait(on.StopRequested(f"max_time of {limit:.0f} s is over"))
            if now - self.heard_s > ABANDONED_S:
                self.heard_s = now
                self.queue.put_nowait(on.StopRequested(f"no client has asked for news for {ABANDONED_S:.0f} s"))

    def _carry_out(self, decision: do.Decision) -> None:
        generation = self.machine.generation
        match decision.action:
            case do.RunStep(step, cut):
                trace = step in self.request.trace
                self.step_calls += len(self.machine.members)
                self._call_all(
                    lambda w: w.step.remote(generation, step, trace, cut),
                    lambda number, report: self._stepped(number, generation, step, report),
                )
            case do.Journal(step):
                self.unseen[step] = self.reports.pop(step)
                self._effect(lambda: self.journal.commit(step), lambda _: on.Journalled(step))
            case do.Emit(step):
                reports = self.unseen.pop(step)
                self.outcomes[step] = outcome_of(reports)
                fresh = step == self.resumed_at
                self._effect(
                    lambda: self.recorder.step(step, reports, fresh=fresh), lambda stop: self._seen(on.Emitted(step, stop))
                )
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
                self._note("waiting" if self.machine.phase is Phase.WAITING else "warning", text=text)
            case do.Note(text):
                self._note("note", text=text)
            case do.Straggles():
                self._straggles(decision.action)
            case do.Hire(worker):
                self._spawn(self._hire(worker))
            case do.Resumed(step, seconds, again):
                self.resumed_at = step
                self._resumed(seconds, again)
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
            case do.CheckReplay(step, doubted):
                self._check_replay(step, doubted)
                self._tell("replay", step=step + 1, until=self.machine.journalled)
            case do.Evict(worker, why):
                if why == "drained":
                    self._note("left", text=f"worker {worker} has left; its work is with the others", **self.staff.who(worker))
                    self.staff.dismiss(worker)
                else:
                    self.staff.suspect(worker)
                    self._lost(worker, why)
            case do.Teardown():
                self._spawn(self._end(decision.action))

    # -- calls to workers --------------------------------------------------------------------------------------------------

    def _call_all(self, call: Callable[[Any], Any], event: Callable[[int, Any], on.Event]) -> None:
        """One call to every member; each answer becomes an event."""
        for number in self.machine.members:
            if number in self.pool.workers:  # else the machine has been told that it is lost
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
        except OutOfMemoryError as error:
            return Failed("lost", killed_for_memory(who, error))
        except RayError as error:
            return Failed("error", ClusterError(f"{who}: {error}", cure="look at Ray's logs"))
        except Exception as error:
            return Failed("error", error)

    def _explained(self, number: int, error: Exception) -> Exception:
        """With what it holds and what would fit, where memory was lacking."""
        members, plan = self.machine.members, self.machine.plan or self.request.plan
        if not isinstance(error, OutOfMemory) or number not in members:
            return error
        held, fits = self.plans.memory(plan, members.index(number))
        return OutOfMemory(f"{error.what}\n{held}", fits)

    def _coordinate(self, number: int) -> str:
        members = self.machine.members
        plan = self.machine.plan or self.request.plan
        return plan.coordinate(members.index(number)) if number in members else f"worker {number}"

    def _stepped(self, number: int, generation: int, step: int, report: dict[str, Any]) -> on.Event:
        if generation == self.machine.generation:
            self.reports[step][self.machine.members.index(number)] = report
        cost, digest = report["mirror_seconds"], report["digest"]
        busy_s = None
        if generation == self.machine.generation and self.machine.plan is not None:
            microbatches = self.plans.passes(self.machine.plan)[self.machine.members.index(number)]
            busy_s = report["busy_seconds"] / microbatches if microbatches else None
        return on.StepReported(number, step, report["seconds"], generation, cost, digest, busy_s)

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
        now = self.machine.plan
        self.queue.put_nowait(await asyncio.to_thread(self.plans.choose, generation, workers, now))

    async def _adopt(self, order: do.Adopt, reason: str) -> None:
        """Lower the plan, and let everybody connect, hand over, take over and build."""
        request, plan = self.request, order.plan
        self.reports = defaultdict(dict)  # of steps that never happened
        assignments = await asyncio.to_thread(self.plans.assignments, plan)
        schedule = self.plans.schedule(plan)
        await asyncio.to_thread(self.journal.record, Record(order.generation, plan, order.members, schedule))
        workers = (*order.members, *order.sources)
        for number in workers:
            if number not in self.pool.workers:
                self.queue.put_nowait(on.CallFailed("lost", WorkerLost(f"worker {number} is gone"), number))
                return
        ranks = {number: rank for rank, number in enumerate(workers)}
        addresses = [self.staff.hellos[number].address for number in workers]
        keepers = buddies([self.staff.hellos[number].node for number in order.members], [seat.position for seat in plan.seats])
        load = None
        if order.load and order.done:
            load = str(self.recorder.checkpoint_path or request.resume)
        self.order = order
        self._seat(plan, order.members)
        self._note(
            "recovering", text=f"generation {order.generation}: {self._described(order)}; {reason}", **self._facts(order)
        )
        for rank, number in enumerate(workers):
            seated = rank < plan.world
            part = Part(
                assignments[rank] if seated else None,
                ranks,
                order.done,
                order.moves,
                load,
                fresh=order.load and not order.done,
                cut=order.cut,
                buddies=keepers,
            )
            coordinate = plan.coordinate(rank) if seated else f"worker {number}"
            ref = self.pool.workers[number].adopt.remote(
                order.generation, pickle.dumps(part), coordinate, addresses, request.start_deadline_s
            )
            self._call(number, order.generation, ref, lambda n, _: on.Adopted(n, order.generation))

    def _seat(self, plan: ParallelPlan, members: Iterable[int]) -> None:
        self.effects.submit(self.recorder.seat, plan, [self.staff.hellos[number].node[:8] for number in members])

    def _described(self, order: do.Adopt) -> str:
        moved = sum(move.piece.size for move in order.moves)
        state = f"{moved:,} parameters and their optimizer state move"
        if order.load:
            where = f"from the checkpoint after {order.done} steps" if order.done else "from the initial weights"
            state = f"no copy is left in memory, so all begin again {where}"
        elif order.cut:
            state = f"the last copy was lost, so all go back to the mirror's cut after {order.done} steps; {state}"
        return f"{len(order.members)} workers, {order.plan.describe()}; {state}"

    def _facts(self, order: do.Adopt) -> dict[str, Any]:
        return {
            "generation": order.generation,
            "workers": list(order.members),
            "plan": order.plan.describe(),
            "schedule": self.plans.schedule(order.plan),
            "step": order.done,
            "moved_elements": sum(move.piece.size for move in order.moves),
            "state": "checkpoint"
            if order.load and order.done
            else "beginning"
            if order.load
            else "cut"
            if order.cut
            else "live",
        }

    def _resumed(self, seconds: float, again: int) -> None:
        """The first step of a new generation is committed."""
        order = self.order
        if order is None:
            return
        text = f"training goes on with {len(order.members)} workers, {order.plan.describe()}, after {seconds:.2f} s"
        if again:
            text += f"; {again} steps are executed again"
        self._note("generation", text=text, pause_s=seconds, again=again, **self._facts(order))
        self.effects.submit(self.recorder.plan_changed, order.plan, self.plans.schedule(order.plan))
        self._spawn(self._prepare(len(order.members)))

    async def _prepare(self, workers: int) -> None:
        """Off the critical path: what would be done with one worker less."""
        if workers > 1:
            await asyncio.to_thread(self.plans.prepare, workers - 1)

    # -- workers that come and go --------------------------------------------------------------------------------------------

    async def _hire(self, number: int) -> None:
        request = self.request
        await asyncio.to_thread(self.journal.hired, number)
        self._note("hiring", text=f"a worker is wanted: worker {number} starts as soon as there is room", worker=number)
        await self.staff.hire(number, request.spec, request.host, request.orphan_timeout_s, request.start_deadline_s)

    def _lost(self, number: int, why: str) -> None:
        """Told once; what is left of it is removed."""
        if number not in self.pool.workers:
            return
        self._tell_lost(number, self._coordinate(number), why)
        self.staff.dismiss(number)

    def _tell_lost(self, number: int, who: str, why: str) -> None:
        where = self.staff.who(number)
        at = f" (worker {number}, node {where['node']}, pid {where['pid']})" if "pid" in where else f" (worker {number})"
        self._note("lost", text=f"{who}{at} is lost: {why}", coordinate=who, why=why, **where)

    def _straggles(self, found: do.Straggles) -> None:
        """Told in one line; the next worker is to be hired elsewhere when this one leaves."""
        number, who = found.worker, self.staff.who(found.worker)
        place = self._coordinate(number).partition("(")[2].rstrip(")")
        at = f"worker {number} ({place}, node {who.get('node', 'unknown')})"
        like = "in its first steps" if found.alone else "its replicas"
        text = f"{at} takes {found.times:.1f} times as long as {like} for {found.steps} steps"
        if found.over:
            text = f"{at} is as fast as {like} again"
        elif found.leaves:
            text += "; it is asked to leave"
            self.staff.slow(number)
        facts = {"times": round(found.times, 2), "steps": found.steps, "over": found.over, "leaves": found.leaves}
        self._note("straggler", text=text, coordinate=self._coordinate(number), **facts, **who)

    def _check_replay(self, step: int, doubted: bool) -> None:
        found, before = outcome_of(self.reports.pop(step)), self.outcomes.get(step)
        if before is None or repr(found) == repr(before):
            return
        if doubted:
            self._note("warning", text=f"step {step + 1}: (loss, norm) {before} was seen, {found} is right")
            self.outcomes[step] = found
        else:
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
        except Deposed:
            self.queue.put_nowait(on.Claimed(self.machine.generation, ok=False))
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

    async def _guarded(self, work: Awaitable[on.Event | None]) -> None:
        try:
            event = await work
        except RayparError as error:
            kind: on.Kind = "user" if isinstance(error, UserCodeError) else "error"
            event = on.CallFailed(kind, error)
        except Exception as error:
            event = on.CallFailed("error", error)
        if event is not None:
            self.queue.put_nowait(event)

    async def _start(self) -> on.Event | None:
        """Place and start the workers of the job's plan, and build their stages. None when one was lost on the way: the
        machine has been told, and an elastic run goes on with the others."""
        request, plan = self.request, self.request.plan
        swept = await asyncio.to_thread(sweep, request.run)
        if swept:
            self._tell("warning", text=f"removed {swept} placement groups that an earlier driver of this run had left")
        await self.pool.reserve(plan, request.wait_for_workers_s, lambda text: self._tell("waiting", text=text))
        await asyncio.to_thread(self.journal.hired, plan.world - 1)
        for number in range(plan.world):
            self.pool.hire(number, request.spec, request.host, request.orphan_timeout_s)
        hellos: dict[int, Hello] = await self._everybody(lambda number, w: w.hello.remote(), "start")
        for number, hello in hellos.items():
            self.staff.met(number, hello)
            await asyncio.to_thread(self.journal.met, number, hello)
        nodes = self.staff.nodes(hellos)
        members = spread(plan, nodes) if len(hellos) == plan.world else tuple(range(plan.world))
        self.machine.members = members
        pids = ", ".join(str(hellos[n].pid) for n in members if n in hellos)
        text = f"{len(hellos)} workers on {len(set(nodes.values()))} node(s), pids {pids}"
        self._note("started", text=text, workers=[self.staff.who(n) for n in members])
        self._seat(plan, [n for n in members if n in hellos])
        for line in self.recorder.meet(list(hellos.values())):
            self._note("warning", text=line)
        self._effect_now(self.recorder.begin)
        await asyncio.to_thread(self.journal.record, Record(1, plan, members, request.schedule_name))
        if len(hellos) < plan.world:
            return None
        addresses = [hellos[number].address for number in members]
        deadline_s, done = request.start_deadline_s, request.course.first
        ranks = {number: rank for rank, number in enumerate(members)}
        keepers = buddies([nodes[number] for number in members], [seat.position for seat in plan.seats])

        def part(rank: int) -> bytes:
            assignment = pickle.loads(request.assignments[rank])
            return pickle.dumps(
                Part(assignment, ranks, done, load=request.resume, fresh=request.resume is None, buddies=keepers)
            )

        described = await self._everybody(
            lambda number, w: w.adopt.remote(1, part(ranks[number]), plan.coordinate(ranks[number]), addresses, deadline_s),
            "build its stages",
        )
        if len(described) < plan.world:
            return None
        megabytes = ", ".join(f"{described[n]['bytes'] / 1e6:.1f}" for n in members)
        self._tell("built", text=f"stages built and connected; parameters by worker in MB: {megabytes}")
        self._effect_now(self.recorder.clock)
        return on.WorkersReady()

    async def _take_over(self, record: Record) -> on.Event:
        """Find the workers of a driver that is gone, and what people have seen of the run."""
        request = self.request
        await asyncio.to_thread(self.pool.find)
        workers = dict(self.pool.workers)
        for number, hello in (await asyncio.to_thread(self.journal.hellos)).items():
            if number in workers or number in record.members:
                self.staff.met(number, hello)
        starting = tuple(n for n in workers if n not in self.staff.hellos)
        for number in starting:
            self._spawn(self.staff.welcome(number, workers[number], request.start_deadline_s))
        self.plans.schedules[record.plan] = record.schedule
        seen = await asyncio.to_thread(self.recorder.take_over)
        self.outcomes = dict(seen.outcomes)
        for line in self.recorder.news():
            self._tell(**line)
        generation = await asyncio.to_thread(self.journal.claimed)
        hired = max(await asyncio.to_thread(self.journal.numbers), *(n + 1 for n in (*workers, *record.members)))
        found = len(workers) - len(starting)
        text = f"the driver was lost; a new one has found {found} workers and goes on after step {seen.steps}"
        self._note("driver", text=text, generation=generation, step=seen.steps)
        for rank, number in enumerate(record.members):
            if number not in workers and number not in seen.lost:
                self._tell_lost(number, record.plan.coordinate(rank), "it died while there was no driver")
        self.finding = False
        # Not waited for: what callbacks import may take seconds, and the workers can begin without them.
        self._effect(self.recorder.begin, lambda _: on.Tick())
        return on.TakenOver(
            tuple(workers),
            generation,
            seen.steps,
            record.plan,
            record.members,
            seen.validated,
            seen.saved,
            starting,
            hired,
            None if seen.last_s is None else max(0.0, time.time() - seen.last_s),
        )

    def _effect_now(self, call: Callable[[], Any]) -> None:
        self.effects.submit(call).result()

    async def _everybody(self, call: Callable[[int, Any], Any], what: str) -> dict[int, Any]:
        """All workers' answers by number; the most blameworthy failure of several is raised. Those of an elastic run that are
        lost are told to the machine, and left out."""
        numbers = list(self.pool.workers)
        asking = [asyncio.ensure_future(self._ask(n, call(n, self.pool.workers[n]))) for n in numbers]
        waiting, start_s = set(asking), time.monotonic()
        elastic = self.request.course.elastic
        while waiting and time.monotonic() - start_s < self.request.start_deadline_s:
            done, waiting = await asyncio.wait(waiting, timeout=1.0, return_when=asyncio.FIRST_COMPLETED)
            lost = any(isinstance(task.result(), Failed) and task.result().kind == "lost" for task in done)
            if lost and elastic and what != "start":
                break  # the others wait for it in vain: the next generation frees them
        answers = {n: task.result() for n, task in zip(numbers, asking, strict=True) if task.done()}
        failed = {n: a for n, a in answers.items() if isinstance(a, Failed)}
        blamed: list[on.Kind] = ["user", "error"]
        if not elastic:
            blamed += ["lost", "aborted"]
        for kind in blamed:
            for number, failure in failed.items():
                if failure.kind == kind:
                    raise await asyncio.to_thread(self._explained, number, failure.error)
        for number, failure in failed.items():  # of somebody who died when it had built already, the others know nothing else
            generation = None if failure.kind == "lost" else 1
            self.queue.put_nowait(on.CallFailed(failure.kind, failure.error, number, generation))
        if waiting and not failed and self.machine.generation == 1:
            silent = [n for n, task in zip(numbers, asking, strict=True) if task in waiting]
            raise ClusterError(
                f"worker(s) {silent} did not {what} within {self.request.start_deadline_s:.0f} s\n{await self._stacks(silent)}",
                cure="look at the stacks above and at Ray's logs on those nodes",
            )
        return {n: a for n, a in answers.items() if n not in failed}

    async def _save(self, done: int) -> None:
        """Snapshot on every worker, then, while training goes on, wait for the files and give the checkpoint its name."""
        generation = self.machine.generation
        try:
            folder = await asyncio.to_thread(self.recorder.checkpoint_begin, done)
        except RayparError as error:
            self.queue.put_nowait(on.SaveFailed(done, error))
            return
        members = {n: self.pool.workers[n] for n in self.machine.members if n in self.pool.workers}
        asked = [self._ask(number, w.save.remote(generation, done, str(folder))) for number, w in members.items()]
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
        """Abort all transports, wait for the calls in flight to come back, and say where the members stand. Who is still being
        started has no transport, and does not answer; who waits for a seat stands nowhere."""
        workers = {number: worker for number, worker in self.pool.workers.items() if number in self.staff.hellos}
        await quickly([worker.abort.remote(why) for worker in workers.values()], 2.0)
        if self.answered:
            await asyncio.wait(set(self.answered), timeout=5.0)
        there = [number for number in self.machine.members if number in workers]
        stand = dict(zip(there, await quickly([workers[n].ping.remote() for n in there], 2.0), strict=True))
        self.queue.put_nowait(on.Aborted(tuple(s[0] if (s := stand.get(n)) else None for n in self.machine.members)))

    async def _probe(self, ranks: tuple[int, ...]) -> None:
        self.queue.put_nowait(on.Probed(await self._stacks(list(ranks))))

    async def _stacks(self, ranks: list[int]) -> str:
        texts = await quickly([self.pool.workers[r].stacks.remote() for r in ranks], STACKS_S)
        return "\n".join(
            f"--- {self._coordinate(rank)}\n{text or 'does not answer: it is stopped, dead or busy outside Python'}"
            for rank, text in zip(ranks, texts, strict=True)
        )

    async def _end(self, teardown: do.Teardown) -> None:
        """Remove everything, then tell the client. The actor itself leaves when the client has seen it, or is gone."""
        facts = {"end": teardown.end, "why": teardown.why, "done": teardown.done, "error": pickled(teardown.error)}
        if teardown.end == "deposed":  # another driver goes on with the workers, the journal and the run folder
            self._tell("end", **facts)
            return
        with contextlib.suppress(Exception):
            await asyncio.to_thread(self.journal.end, facts)
        try:
            await self.pool.close()
        except Exception as error:
            self._tell("warning", text=f"not every worker could be removed: {error}")
        loop = asyncio.get_running_loop()
        try:
            await loop.run_in_executor(self.effects, self.recorder.end, teardown, self.step_calls)
        except Exception as error:
            self._tell("warning", text=f"the end of the run could not be recorded: {error}")
        self._keep_status()
        await loop.run_in_executor(self.effects, lambda: None)
        for line in self.recorder.news():
            self._tell(**line)
        await self._leave(facts)

    async def _finish(self, facts: dict[str, Any]) -> None:
        """A driver that was killed while it ended the run: what is left to do of that is done, whatever goes wrong in it."""
        self.machine.phase = Phase.OVER
        for work in (lambda: sweep(self.run), lambda: self.recorder.finish(facts)):
            try:
                await asyncio.to_thread(work)
            except Exception as error:
                self._tell("warning", text=f"the end of the run, which a former driver had begun: {error}")
        for line in self.recorder.news():
            self._tell(**line)
        await self._leave(facts)

    async def _leave(self, facts: dict[str, Any]) -> None:
        self._tell("end", **facts)
        self.heard_s = time.monotonic()
        while time.monotonic() - self.heard_s < CLIENT_GONE_S:
            await asyncio.sleep(1.0)
        with contextlib.suppress(Exception):
            await asyncio.to_thread(self.journal.erase)
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

    def _keep_status(self) -> None:
        """members.json, if anything in it has changed."""
        text = None if self.finding else self.status.changed(self.machine, self.staff.who, self.plans.schedule)
        if text is not None:
            self.effects.submit(self.recorder.keep_status, text)

    def _note(self, kind: str, **facts: Any) -> None:
        """Tell it, and keep it in the run folder."""
        self._tell(kind, **facts)
        self.effects.submit(self.recorder.note, {"kind": kind, **facts})

    def _tell(self, kind: str, **facts: Any) -> None:
        self.news.tell({"kind": kind, "time": time.time(), **facts})


def outcome_of(reports: Mapping[int, Mapping[str, Any]]) -> tuple[float, float]:
    """(loss, norm): the same in all reports of a step."""
    report = next(iter(reports.values()))
    return report["loss"], report["norm"]


def missed(outcome: Any) -> dict[str, Any]:
    """What can be said of a step that was found applied, and whose reports went to nobody or are not whole."""
    known = {"loss": outcome.loss, "norm": outcome.norm, "count": outcome.count, "skipped": outcome.skipped}
    return {**known, "seconds": 0.0, "busy_seconds": 0.0, "peak_rss_bytes": 0, "spans": [], "ledger": {}}


def pickled(error: Exception | None) -> bytes | None:
    """The error for the client, or its text when it cannot be pickled."""
    if error is None:
        return None
    try:
        return pickle.dumps(error)
    except Exception:
        return pickle.dumps(RayparError(f"{type(error).__name__}: {error}"))
