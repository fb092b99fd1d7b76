"""The driver of one run: an event loop around `elastic.run_machine`, which makes all decisions.

Every event goes to the run machine. The driver carries out the machine's decisions with the objects of `DriverParts`, and
their outcomes are events again.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
import traceback
import warnings
from dataclasses import replace
from typing import Any

import ray

# Pickles hold these: callbacks, and workers' answers. A later import may meet Ray replacing the job's folder.
import raypar.callbacks
import raypar.plan.global_loss_and_norm  # noqa: F401
from raypar.actors import membership_event_text
from raypar.actors.background_tasks import BackgroundTasks
from raypar.actors.checkpoint_task import CheckpointTask
from raypar.actors.driver_parts import DriverParts
from raypar.actors.driver_shutdown import DriverShutdown, record_and_exit
from raypar.actors.driver_startup import DriverStartup
from raypar.actors.driver_storage_session import DriverStorageSession
from raypar.actors.event_feed import EventFeed
from raypar.actors.generation_change import GenerationChange
from raypar.actors.hello_and_failure_messages import StepCall, pickle_error_for_client
from raypar.actors.kernel_oom_kills import KernelOomKills
from raypar.actors.members_file import MembersFileText
from raypar.actors.metrics_publisher import MetricsPublisher
from raypar.actors.metrics_publishing_loop import MetricsPublishingLoop
from raypar.actors.plan_cache import PlanCache
from raypar.actors.run_recorder import RunRecorder
from raypar.actors.run_request import RunRequest
from raypar.actors.run_state_in_ray_kv import Journal, MembershipRecord
from raypar.actors.side_effect_thread import SideEffectThread
from raypar.actors.step_reports import Report, StepReports
from raypar.actors.wait_reporter import WaitReporter
from raypar.actors.worker_calls import WorkerCalls
from raypar.actors.worker_pool import WorkerPool
from raypar.actors.worker_registry import WorkerRegistry
from raypar.comm.tcp.handshake import RunCredential
from raypar.elastic import actions as do
from raypar.elastic import events as on
from raypar.elastic.phases import Phase
from raypar.elastic.placement_constraints import SUSPECT_S
from raypar.elastic.run_machine import RunMachine
from raypar.elastic.user_messages import plain_failure_text
from raypar.errors import ClusterError, NodeLost, OutOfMemory, RayparError, error_first_line
from raypar.fences.fence import send_warnings_to
from raypar.plan.ownership import Ownership
from raypar.plan.wording import format_worker_numbers, word_form
from raypar.ray_compat.settings import BLOCKING_GET_VARIABLE
from raypar.record.events import (
    EndOfRun,
    Note,
    Recovery,
    ReplayProgress,
    RunWarning,
    Straggler,
    Wait,
    WorkerLeave,
    WorkerRelease,
    WorkerRequest,
)
from raypar.storage.filesystems import register_pickled_filesystems
from raypar.worker.process.thread_cpu_wait import thread_cpu_wait_s

TICK_S = 0.25
"""Time from one `Tick` event to the next."""
ABANDONED_S = 300.0
"""Time without a client after which the run is saved and ended."""
BEGIN_AGAIN_S = 60.0
"""How long a restarted driver tries to find the run in Ray's store."""
ASK_AGAIN_S = 0.25
"""Time from one try to the next of a restarted driver to call itself."""


class DriverActor:
    """The driver of a run as an async actor: call `start`, then poll `events` until an event says that the run is over.

    Ray restarts the driver of an elastic run when it dies. The new driver finds the run in the journal and starts by itself.
    """

    def __init__(self, run: str) -> None:
        self.run = run
        """The run's name."""
        self.journal = Journal(run)
        """The state of the run that outlives this driver."""
        self.feed = EventFeed()
        """What the client is told."""
        self.queue: asyncio.Queue[on.RunEvent] = asyncio.Queue()
        """Events for the run machine. Made before the request is known: Ctrl-C may come first."""
        self.tasks = BackgroundTasks(self.queue.put_nowait)
        """Work beside the event loop."""
        self.starting = asyncio.Lock()
        """Held by `start`: a client and a restarted driver may call it at the same time."""
        self.begin_again_called = False
        """Whether `begin_again` has been called."""
        self.has_request = False
        """Whether `start` has found or been given a request."""
        self.taking_over = False
        """Whether this driver is taking over from a former driver and does not know the members yet."""
        self.step_calls = 0
        """Calls to workers for steps, for the report at the end."""
        self.parts: DriverParts
        """The objects of this driver. `_set_up` sets them and the five attributes below, once the request is known."""
        self.members_text: MembersFileText
        """The content of members.json."""
        self.startup: DriverStartup
        """Starts the workers, or takes over those of a former driver."""
        self.generations: GenerationChange
        """Changes from one generation of workers to the next."""
        self.checkpoint_task: CheckpointTask
        """Saves checkpoints while training continues."""
        self.shutdown: DriverShutdown
        """Ends the run and this actor."""
        os.environ[BLOCKING_GET_VARIABLE] = "0"  # only threads block (`worker_calls`), never the event loop
        context = ray.get_runtime_context()
        with warnings.catch_warnings():  # Ray's own code uses a name that it has deprecated
            warnings.simplefilter("ignore", DeprecationWarning)
            again = context.was_current_actor_reconstructed
        if again:
            threading.Thread(target=self._ask_to_begin, args=(context.current_actor,), name="raypar-begin", daemon=True).start()

    def _ask_to_begin(self, itself: Any) -> None:
        """Call this actor's own `begin_again` until a call arrives.

        Ray drops the actor's calls to itself ("The actor is restarting"), whatever the number of retries, until its own process
        knows that the actor is back.
        """
        while not self.begin_again_called:
            with contextlib.suppress(Exception):  # not `ray.get`, which would warn: this is an actor with an event loop
                itself.begin_again.remote().future().result(ASK_AGAIN_S)

    def _set_up(self, request: RunRequest, credential: RunCredential) -> None:
        """Make the run machine and the objects that carry out what it decides; the request is known now."""
        journal, feed, tasks = self.journal, self.feed, self.tasks
        machine = RunMachine(request.policy, plan=request.plan, held_pieces=lambda plan: Ownership(plan, request.outline).held)
        plans = PlanCache(request)
        register_pickled_filesystems(request.filesystems)
        storage_session = DriverStorageSession(request) if request.storage else None
        pool = WorkerPool(credential, request.placement, request.environment, request.filesystems)
        publisher = MetricsPublisher(request.run, request.policy.job_steps, request.price_per_worker_hour)
        recorder = RunRecorder(request, journal, storage_session, publisher)
        side_effects = SideEffectThread(recorder, machine, feed, tasks)
        registry = WorkerRegistry(
            pool, journal, tasks.post, side_effects.note, lambda number: number in machine.membership.members
        )
        machine.membership.nodes, machine.membership.zones = registry.node_of_worker, registry.zone_of_node
        self.parts = parts = DriverParts(
            request=request,
            machine=machine,
            journal=journal,
            plans=plans,
            pool=pool,
            registry=registry,
            recorder=recorder,
            side_effects=side_effects,
            reports=StepReports(machine, plans),
            calls=WorkerCalls(machine, pool, plans, tasks, registry.hellos),
            tasks=tasks,
            feed=feed,
            storage_session=storage_session,
        )
        loop = asyncio.get_running_loop()

        def warn(line: str) -> None:  # in whichever thread misses an API
            loop.call_soon_threadsafe(lambda: side_effects.note(RunWarning(text=line)))

        send_warnings_to(warn)
        self.memory_kills = KernelOomKills()
        self.members_text = MembersFileText(request)
        self.startup = DriverStartup(parts)
        self.generations = GenerationChange(parts)
        self.checkpoint_task = CheckpointTask(parts)
        self.shutdown = DriverShutdown(parts, self._write_members_file)

    # -- called by the client ----------------------------------------------------------------------------------------------

    async def start(self, request: RunRequest | None = None) -> None:
        """Begin the run of `request`, or continue the run in the journal; returns at once.

        Without a request and without a run in the journal nothing happens: the former driver died before it had stored the
        request, and the client sends it again.
        """
        async with self.starting:
            if self.has_request:
                return
            if request is not None:
                await asyncio.to_thread(self._begin_journal, request)
            elif (request := await asyncio.to_thread(self.journal.request)) is None:
                return
            record = await asyncio.to_thread(self.journal.last_record)
            end = await asyncio.to_thread(self.journal.end)
            self._set_up(request, await asyncio.to_thread(self.journal.credential))
            if self.parts.storage_session is not None:
                await asyncio.to_thread(self.parts.storage_session.begin)
            self.has_request = True
        if end is not None:
            self.parts.machine.phase = Phase.OVER
            self.tasks.spawn(self.shutdown.finish_former_end(end))
        elif record is not None:
            self.taking_over = True
            self.tasks.spawn(self._continue_run(record))
        else:
            self.tasks.spawn(self._run())
            self.tasks.spawn(self.tasks.guarded(self.startup.start()))

    async def begin_again(self) -> None:
        """Continue the run after Ray has restarted this driver.

        Nobody awaits this call, so it retries for `BEGIN_AGAIN_S` if Ray's store does not answer, and then tells the client.
        """
        if self.begin_again_called:
            return
        self.begin_again_called = True
        deadline = time.monotonic() + BEGIN_AGAIN_S
        while True:
            try:
                await self.start()
                return
            except Exception as error:
                if time.monotonic() > deadline:
                    what = f"a new driver could not find run {self.run} in Ray's store within {BEGIN_AGAIN_S:.0f} s: {error}"
                    lost = ClusterError(what, cure="look at the head node; `raypar resume` goes on from the last checkpoint")
                    self.feed.tell(EndOfRun(end="failed", why=lost.what, done=0, error=pickle_error_for_client(lost)))
                    return
            await asyncio.sleep(TICK_S)

    async def _continue_run(self, record: MembershipRecord) -> None:
        """Take over the run, then start the loop. Events that came meanwhile are handled after the event of the takeover."""
        await self.tasks.guarded(self._take_over(record))
        told = [self.queue.get_nowait() for _ in range(self.queue.qsize())]
        for event in (told[-1], *told[:-1]):
            self.queue.put_nowait(event)
        self.tasks.spawn(self._run())

    async def _take_over(self, record: MembershipRecord) -> on.RunEvent:
        """Take over the run of a former driver; returns the event for the run machine."""
        event = await self.startup.take_over(record)
        self.taking_over = False
        return event

    def _begin_journal(self, request: RunRequest) -> None:
        """Start the run's journal anew, with the request and a new credential."""
        self.journal.erase()
        self.journal.put_credential(RunCredential.fresh(request.run))
        self.journal.put_request(request)
        self.journal.began(time.time())

    async def events(self, epoch: int, cursor: int, wait_s: float = 1.0) -> tuple[list[dict[str, Any]], int, int]:
        """See `EventFeed.after`."""
        return await self.feed.after(epoch, cursor, wait_s)

    async def alone_s(self) -> float:
        """Seconds since a client last polled."""
        return time.monotonic() - self.feed.heard_s

    async def stop(self, reason: str, grace_s: float) -> None:
        """End the run on a Ctrl-C: finish the steps in flight within `grace_s`, or void them; then save."""
        self.queue.put_nowait(on.StopRequested(reason, interrupt=True, grace_s=grace_s))

    async def leave_without_control_store(self, why: str) -> None:
        """Record in the run folder that the run has failed, and exit: the client has given up Ray's control store."""
        record = self.shutdown.record_lost_control_store if self.has_request else lambda why: None
        threading.Thread(target=record_and_exit, args=(lambda: record(why),), name="raypar-leave", daemon=True).start()

    # -- the loop ----------------------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        """Handle events until the run is over. Even after a bug in this loop the run's actors are removed."""
        parts = self.parts
        self.tasks.spawn(self._tick())
        self.tasks.spawn(WaitReporter(parts).watch())
        if parts.storage_session is not None:
            self.tasks.spawn(parts.storage_session.watch(self._is_over, parts.side_effects.note, parts.tasks.post))
        self.tasks.spawn(MetricsPublishingLoop(parts).watch())
        self.tasks.spawn(parts.registry.watch(parts.request.silent_s, self._is_over))
        try:
            while parts.machine.phase is not Phase.OVER:
                event = await self.queue.get()
                if isinstance(event, on.CallFailed) and event.worker is not None and isinstance(event.error, OutOfMemory):
                    event = replace(
                        event, error=await asyncio.to_thread(parts.calls.explain_out_of_memory, event.worker, event.error)
                    )
                if isinstance(event, on.CallFailed) and event.kind == "lost" and (lost := event.worker) is not None:
                    event = replace(event, preempted=parts.registry.preempted(lost, event.error))
                    self._report_lost_worker(lost, error_first_line(event.error), isinstance(event.error, NodeLost))
                    self._look_for_memory_kills()
                for decision in parts.machine.handle(event, time.monotonic()):
                    self._carry_out(decision)
                self._write_members_file()
        except Exception as error:
            wrong = RayparError(f"the driver failed:\n{traceback.format_exc()}", cure="please report it with the lines above")
            wrong.__cause__ = error
            self.tasks.spawn(
                self.shutdown.end_run(do.Teardown("failed", str(error), parts.machine.progress.emitted, wrong), self.step_calls)
            )

    def _is_over(self) -> bool:
        """Whether the run is over."""
        return self.parts.machine.phase is Phase.OVER

    async def _tick(self) -> None:
        """Post a `Tick` four times a second; stop the run after its maximal time, or when no client polls any more."""
        parts = self.parts
        self.feed.heard_s = time.monotonic()
        start = self.feed.heard_s - parts.recorder.age_s
        while parts.machine.phase is not Phase.OVER:
            before = time.monotonic()
            await asyncio.sleep(TICK_S)
            now = time.monotonic()
            late_s = now - before - TICK_S
            cpu_wait = parts.registry.cpu_wait
            cpu_wait.report("driver", thread_cpu_wait_s(threading.get_native_id()), now)
            if late_s > TICK_S:
                self.queue.put_nowait(on.Tick(stalled_s=late_s))
            else:
                registry = parts.registry
                self.queue.put_nowait(
                    on.Tick(
                        cpu_wait.uncounted_s(now, before),
                        registry.unheard_workers(),
                        registry.ended_workers(),
                        registry.reading_workers(),
                    )
                )
            limit = parts.request.max_time_s
            if limit is not None and now - start > limit:
                start = float("inf")
                self.queue.put_nowait(on.StopRequested(f"max_time of {limit:.0f} s is over"))
            if now - self.feed.heard_s > ABANDONED_S:
                self.feed.heard_s = now
                self.queue.put_nowait(on.StopRequested(f"no client has asked for news for {ABANDONED_S:.0f} s"))

    def _carry_out(self, decision: do.ActionWithReason) -> None:
        """Begin what the machine has decided about steps, and show what it tells the user. Outcomes become events."""
        parts = self.parts
        generation, seen = parts.machine.membership.generation, parts.side_effects.seen
        match decision.action:
            case do.RunStep(step, into_mirror):
                call = StepCall(generation, step, step in parts.request.traced_steps, into_mirror).to_bytes()
                self.step_calls += len(parts.machine.membership.members)
                parts.calls.call_all(
                    lambda w: w.step.remote(call),
                    lambda number, report: parts.reports.keep_step_report(
                        number, generation, step, self._show_warnings(number, report)
                    ),
                )
            case do.WriteJournal(step):
                parts.reports.mark_committed(step)
                facts = {"time": time.time(), **parts.reports.merged_report(step)}
                parts.side_effects.perform(lambda: self.journal.commit(step, facts), lambda _: on.StepJournalled(step))
            case do.EmitStep(step):
                reports, fresh = parts.reports.take_reports(step), step == self.generations.first_step
                parts.side_effects.perform(
                    lambda: parts.recorder.record_step(step, reports, fresh=fresh),
                    lambda stop: seen(on.StepEmitted(step, stop)),
                )
            case do.Validate(done):
                parts.reports.validations = {}
                parts.calls.call_all(
                    lambda w: w.validate.remote(generation, done),
                    lambda number, report: parts.reports.keep_validation_report(
                        number, generation, done, self._show_warnings(number, report)
                    ),
                )
            case do.EmitValidation(done):
                found = list(parts.reports.validations.values())
                parts.side_effects.perform(
                    lambda: parts.recorder.record_validation(done, found), lambda stop: seen(on.ValidationEmitted(done, stop))
                )
            case do.StartCheckpoint(done):
                self.tasks.spawn(self.checkpoint_task.save(done))
            case do.AbortGroups(why):
                self.tasks.spawn(parts.calls.abort(why))
            case do.RequestStacks(ranks):
                self.tasks.spawn(parts.calls.probe(ranks))
            case do.WarnUser(text):
                parts.side_effects.note(Wait(text=text) if parts.machine.waits else RunWarning(text=text))
            case do.TellUser(text):
                parts.side_effects.note(Note(text=text))
            case do.ReportStraggler():
                self._report_straggler(decision.action)
            case _:
                self._change_membership(decision)

    def _change_membership(self, decision: do.ActionWithReason) -> None:
        """Begin what the machine has decided about workers, the next generation, and the end of the run."""
        parts = self.parts
        match decision.action:
            case do.StartWorkers(workers, on_demand):
                self.tasks.spawn(self._start_workers(workers, on_demand))
            case do.ReleaseWorkers(workers):
                self._release_workers(workers, decision.reason)
            case do.StoreUsefulWorkers(useful):
                parts.side_effects.perform(lambda: self.journal.store_useful_workers(useful), lambda _: on.Tick())
            case do.ReportFirstStepAfterRecovery():
                self.generations.report_first_step(decision.action)
            case do.ClaimGeneration(number):
                parts.side_effects.note(Recovery(text=plain_failure_text(decision.reason), generation=number))
                self.tasks.spawn(self.generations.claim_generation(number))
            case do.FenceWorkers(number, workers):
                for worker in workers:
                    self.generations.fence_worker(number, worker, decision.reason)
            case do.ApplyKeptGradients():
                self.generations.apply_kept_gradients(decision.action)
            case do.ChoosePlan(number, workers):
                self.tasks.spawn(self.generations.choose_plan(number, workers))
            case do.AdoptPlan():
                self.tasks.spawn(self.generations.adopt_plan(decision.action, decision.reason))
            case do.CompareReplayedStep(step, doubted):
                self._check_replay(step, doubted)
                self.feed.tell(ReplayProgress(step=step + 1, until=parts.machine.progress.journalled))
            case do.KillWorker(worker, why):
                if why == "drained":
                    text = f"worker {worker} has left: {decision.reason}"
                    parts.side_effects.note(WorkerLeave(text=text, **parts.registry.worker_facts(worker)))
                    parts.registry.dismiss(worker)
                else:
                    parts.registry.avoid_suspect_node_of(worker)
                    self._report_lost_worker(worker, membership_event_text.describe_why_worker_given_up(why))
            case do.Teardown():
                self.tasks.spawn(self.shutdown.end_run(decision.action, self.step_calls))
            case _:
                raise TypeError(f"the driver cannot carry out {decision.action!r}")

    # -- workers that come and go --------------------------------------------------------------------------------------------

    async def _start_workers(self, numbers: tuple[int, ...], on_demand: bool) -> None:
        """Start further workers under `numbers`, which no other workers ever get."""
        parts = self.parts
        await asyncio.to_thread(parts.journal.store_worker_number, numbers[-1])
        if on_demand:
            await asyncio.to_thread(parts.journal.store_on_demand_workers, numbers)
        starts = word_form(numbers, "a worker is wanted: worker %s starts", "a replica is wanted: workers %s start")
        text = f"{starts % ', '.join(map(str, numbers))} as soon as there is room"
        parts.side_effects.note(WorkerRequest(text=text, worker=numbers[0], workers=list(numbers)))
        await parts.registry.start_workers(numbers, parts.request, on_demand=on_demand)

    def _release_workers(self, numbers: tuple[int, ...], reason: str) -> None:
        """Withdraw the demand for workers, and end those that run."""
        parts = self.parts
        text = f"{format_worker_numbers(numbers)} {word_form(numbers, 'is', 'are')} given back: {reason}"
        parts.side_effects.note(WorkerRelease(text=text, workers=list(numbers)))
        for number in numbers:
            parts.registry.dismiss(number)

    def _report_lost_worker(self, number: int, why: str, with_node: bool = False) -> None:
        """Report a lost worker, and its node if the node is lost too; remove what is left of the worker. Idempotent."""
        parts = self.parts
        if number not in parts.pool.workers:
            return
        coordinate, who = parts.calls.coordinate(number), parts.registry.worker_facts(number)
        parts.side_effects.note(membership_event_text.worker_lost_event(coordinate, who, why))
        parts.registry.dismiss(number)
        node = parts.registry.note_lost_worker(number, with_node)
        if node is not None:
            parts.side_effects.note(node)

    def _look_for_memory_kills(self) -> None:
        """After a loss in a local cluster: if the kernel has ended processes for lack of memory, start no worker for a while.

        Its memory would be taken from those that still live, of which one may have the last copy of some state.
        """
        parts = self.parts
        if not parts.request.on_one_machine or not (killed := self.memory_kills.new()):
            return
        parts.registry.avoid_nodes({*parts.registry.node_of_worker.values(), ray.get_runtime_context().get_node_id()})
        processes = "a process" if killed == 1 else f"{killed} processes"
        parts.side_effects.note(
            RunWarning(
                text=f"the kernel has ended {processes} of this machine because memory is short: no worker is started for "
                f"{SUSPECT_S:.0f} s or more\n  cure: give this machine or container more memory, or have fewer workers "
                "(plan, elastic.max_workers)",
            )
        )

    def _report_straggler(self, found: do.ReportStraggler) -> None:
        """Report a straggler. If it has to leave, the worker in its place is started on another node."""
        parts = self.parts
        coordinate, who = parts.calls.coordinate(found.worker), parts.registry.worker_facts(found.worker)
        if found.leaves and not found.recovered:
            parts.registry.avoid_slow_node_of(found.worker)
        text = membership_event_text.straggler_text(found, coordinate, who)
        event = Straggler(
            text=text,
            coordinate=coordinate,
            times=round(found.slowdown, 2),
            steps=found.steps,
            over=found.recovered,
            leaves=found.leaves,
            **who,
        )
        parts.side_effects.note(event)

    # -- what the user sees ----------------------------------------------------------------------------------------------------

    def _show_warnings(self, number: int, report: Report) -> Report:
        """Show the warnings in a worker's report that no other worker has given; returns the report."""
        parts = self.parts
        for line in parts.reports.new_warnings(report):
            parts.side_effects.note(RunWarning(text=f"{parts.calls.coordinate(number)}: {line}"))
        return report

    def _check_replay(self, step: int, doubted: bool) -> None:
        """Compare a replayed step with its first execution; `doubted`: the first one may have been wrong, so only warn."""
        parts = self.parts
        difference = parts.reports.replay_difference(step)
        if difference is None:
            return
        before, found = difference
        if doubted:
            parts.side_effects.note(
                RunWarning(text=f"step {step + 1}: (loss, norm) {before} was seen, {found} is right from now on")
            )
            parts.reports.outcomes[step] = found
        else:
            error = RayparError(
                f"step {step + 1} was executed again and gave (loss, norm) {found} instead of {before}",
                cure="the job is not reproducible: look for randomness of its own, or for workers that compute differently",
            )
            self.queue.put_nowait(on.CallFailed("error", error))

    def _write_members_file(self) -> None:
        """Write members.json if anything in it has changed."""
        parts = self.parts
        text = (
            None
            if self.taking_over
            else self.members_text.text_if_changed(
                parts.machine, parts.registry.worker_facts, parts.plans.schedule, len(parts.registry.hellos)
            )
        )
        if text is not None:
            parts.side_effects.aside(parts.recorder.write_members_file, text)
