"""The driver of one run: an event loop around `elastic.run_machine`, which makes all decisions.

Every event goes to the run machine. Its decisions are carried out as `make_action_table` says; their outcomes are events again.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import ray

# Pickles hold these: callbacks, and workers' answers. A later import may meet Ray replacing the job's folder.
import raypar.callbacks
import raypar.plan.microbatches  # noqa: F401
from raypar.actors.actor_handle_types import Polled
from raypar.actors.background_tasks import BackgroundTasks
from raypar.actors.checkpoint_task import CheckpointTask
from raypar.actors.driver_shutdown import DriverShutdown, record_and_exit
from raypar.actors.driver_startup import DriverStartup
from raypar.actors.driver_storage_session import DriverStorageSession
from raypar.actors.events_for_client import EventFeed
from raypar.actors.generation_change import GenerationChange
from raypar.actors.members_file_text import MembersFileText
from raypar.actors.membership_actions import KernelOomKills, MembershipActions
from raypar.actors.messages import RunRequest, pickle_error_for_client
from raypar.actors.metrics_publisher import MetricsPublisher
from raypar.actors.metrics_publishing_loop import MetricsPublishingLoop
from raypar.actors.node_agents import NodeAgents
from raypar.actors.plan_cache import PlanCache
from raypar.actors.run_recorder import RunRecorder
from raypar.actors.run_state_in_ray_kv import Journal, MembershipRecord
from raypar.actors.side_effect_thread import SideEffectThread
from raypar.actors.step_actions import StepActions
from raypar.actors.step_reports import StepReports
from raypar.actors.stream_digest_journal import StreamDigestJournal
from raypar.actors.wait_reporter import WaitReporter
from raypar.actors.worker_calls import WorkerCalls
from raypar.actors.worker_failures import PostedEvent, WorkerFailures
from raypar.actors.worker_pool import WorkerPool
from raypar.actors.worker_registry import WorkerRegistry
from raypar.comm.tcp.handshake import RunCredential
from raypar.elastic import actions as do
from raypar.elastic import events as on
from raypar.elastic.phases import Phase
from raypar.elastic.run_machine import RunMachine
from raypar.errors import ClusterError, RayparError
from raypar.fences.private_api_fence import send_warnings_to
from raypar.ray_compat.settings import BLOCKING_GET_VARIABLE
from raypar.record.events import (
    EndOfRun,
    RunWarning,
)
from raypar.storage.filesystems import register_pickled_filesystems
from raypar.worker.process.thread_activity import thread_cpu_wait_s

ActionTable = Mapping[type[do.Action], Callable[[Any, str], None]]
"""Kind of action -> what carries it out: it takes the action and its reason."""


def make_action_table(
    steps: StepActions,
    checkpoints: CheckpointTask,
    members: MembershipActions,
    generations: GenerationChange,
    shutdown: DriverShutdown,
) -> ActionTable:
    """The table of one driver. A test says that it has every kind of action."""
    return {
        do.RunStep: steps.run_step,
        do.WriteJournal: steps.write_journal,
        do.EmitStep: steps.emit_step,
        do.Validate: steps.validate,
        do.EmitValidation: steps.emit_validation,
        do.ForgetValidations: steps.forget_validations,
        do.StartCheckpoint: checkpoints.start_checkpoint,
        do.AbortGroups: steps.abort_groups,
        do.RequestStacks: steps.request_stacks,
        do.WarnUser: steps.warn_user,
        do.TellUser: steps.tell_user,
        do.CompareReplayedStep: steps.compare_replayed_step,
        do.StartWorkers: members.start_workers,
        do.ReleaseWorkers: members.release_workers,
        do.StoreUsefulWorkers: members.store_useful_workers,
        do.KillWorker: members.kill_worker,
        do.ReportStraggler: members.report_straggler,
        do.ClaimGeneration: generations.claim_generation,
        do.FenceWorkers: generations.fence_workers,
        do.ApplyKeptGradients: generations.apply_kept_gradients,
        do.ChoosePlan: generations.choose_plan,
        do.AdoptPlan: generations.adopt_plan,
        do.PrepareShares: generations.prepare_shares,
        do.AdoptShares: generations.adopt_shares,
        do.ReportShares: generations.report_shares,
        do.ReportFirstStepAfterRecovery: generations.report_first_step,
        do.Teardown: shutdown.tear_down,
    }


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
        self.queue: asyncio.Queue[PostedEvent] = asyncio.Queue()
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
        self.loop: asyncio.AbstractEventLoop
        """The event loop. `_set_up` sets what follows, once the request is known."""
        self.request: RunRequest
        """What the client sent: everything about the run."""
        self.machine: RunMachine
        """Makes all decisions of the run."""
        self.plans: PlanCache
        """The plan for each number of workers."""
        self.storage_session: DriverStorageSession | None
        """Lease and upload of a run on shared storage; None for one in a folder."""
        self.pool: WorkerPool
        """Placement groups and actors of the workers."""
        self.recorder: RunRecorder
        """Writes the run folder and calls the callbacks."""
        self.side_effects: SideEffectThread
        """The thread in which the recorder runs."""
        self.failures: WorkerFailures
        """Makes the events about workers that have failed."""
        self.registry: WorkerRegistry
        """Which workers have started, are silent, have to leave or are lost."""
        self.calls: WorkerCalls
        """Calls to workers, whose answers become events."""
        self.members_text: MembersFileText
        """The content of members.json."""
        self.startup: DriverStartup
        """Starts the workers, or takes over those of a former driver."""
        self.steps: StepActions
        """Carries out what the machine decides about steps."""
        self.members: MembershipActions
        """Carries out what the machine decides about single workers."""
        self.shutdown: DriverShutdown
        """Ends the run and this actor."""
        self.actions: ActionTable
        """Kind of action -> what carries it out."""
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
        self.loop, self.request = asyncio.get_running_loop(), request
        self.plans = plans = PlanCache(request)
        self.machine = machine = RunMachine(request.policy, request.plan, plans.held_pieces, plans.memory_lacking)
        register_pickled_filesystems(request.filesystems)
        self.storage_session = DriverStorageSession(request) if request.storage else None
        self.pool = pool = WorkerPool(credential, request.placement, request.environment, request.filesystems)
        publisher = MetricsPublisher(request.run, request.policy.job_steps, request.job.price_per_worker_hour)
        self.recorder = recorder = RunRecorder(request, journal, self.storage_session, publisher, request.followed)
        self.side_effects = side_effects = SideEffectThread(recorder, machine, feed, tasks)
        self.failures = failures = WorkerFailures(machine, plans, self.queue.put_nowait)
        agents = NodeAgents(side_effects.note)
        self.registry = registry = WorkerRegistry(
            pool, journal, tasks.post, side_effects.note, lambda number: number in machine.membership.members, failures, agents
        )
        machine.membership.nodes, machine.membership.zones = registry.node_of_worker, registry.zone_of_node
        self.calls = WorkerCalls(machine, pool, failures, tasks, registry.hellos, agents)
        send_warnings_to(self._show_warning)
        self.members_text = MembersFileText(request)
        self._make_actions()

    def _make_actions(self) -> None:
        """Make the objects that carry out the machine's decisions, and the table that says which one does what."""
        request, machine, journal, plans = self.request, self.machine, self.journal, self.plans
        pool, registry, recorder, side_effects = self.pool, self.registry, self.recorder, self.side_effects
        failures, calls, tasks, feed = self.failures, self.calls, self.tasks, self.feed
        samples = StreamDigestJournal.of_run(request, recorder.run_folder, self._show_warning)  # which it calls from any thread
        reports = StepReports(machine, plans, samples, request.followed)
        generations = GenerationChange(
            request, machine, journal, plans, pool, registry, recorder, side_effects, reports, failures, calls, tasks, feed
        )
        self.startup = DriverStartup(
            request,
            machine,
            journal,
            plans,
            pool,
            registry,
            recorder,
            side_effects,
            reports,
            failures,
            calls,
            tasks,
            feed,
        )
        self.steps = StepActions(
            machine, calls, reports, journal, recorder, side_effects, tasks, feed, generations, request.traced_steps
        )
        memory_kills = KernelOomKills() if request.on_one_machine else None
        self.members = MembershipActions(request, pool, registry, journal, calls, side_effects, tasks, memory_kills)
        self.shutdown = DriverShutdown(
            machine,
            journal,
            pool,
            recorder,
            side_effects,
            tasks,
            feed,
            self.storage_session,
            self._write_members_file,
            lambda: self.steps.step_calls,
        )
        checkpoints = CheckpointTask(machine, pool, recorder, side_effects, calls, tasks)
        self.actions = make_action_table(self.steps, checkpoints, self.members, generations, self.shutdown)

    def _show_warning(self, line: str) -> None:
        """Show a warning, from whichever thread."""
        self.loop.call_soon_threadsafe(lambda: self.side_effects.note(RunWarning(text=line)))

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
            if self.storage_session is not None:
                await asyncio.to_thread(self.storage_session.begin)
            self.has_request = True
        if end is not None:
            self.machine.phase = Phase.OVER
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

    async def events(self, epoch: int, cursor: int, wait_s: float = 1.0) -> Polled:
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
        gc.freeze()  # modules stay, and each full collection would look at them again; one now would take 0.3 s of the start
        self.tasks.spawn(self._tick())
        self.tasks.spawn(WaitReporter(self.request, self.machine, self.pool, self.registry, self.calls, self.feed).watch())
        if self.storage_session is not None:
            self.tasks.spawn(self.storage_session.watch(self._is_over, self.side_effects.note, self.tasks.post))
        self.tasks.spawn(MetricsPublishingLoop(self.machine, self.pool, self.recorder, self.side_effects).watch())
        self.tasks.spawn(self.registry.watch(self.request.silent_s, self._is_over))
        try:
            while self.machine.phase is not Phase.OVER:
                posted = await self.queue.get()
                event = await posted if isinstance(posted, asyncio.Future) else posted
                self.members.note_event(event)
                for decision in self.machine.handle(event, time.monotonic()):
                    self.actions[type(decision.action)](decision.action, decision.reason)
                if self.queue.empty():  # of all workers' reports of a step together, which would tell the same
                    self._write_members_file()
        except Exception as error:
            wrong = RayparError(f"the driver failed:\n{traceback.format_exc()}", cure="please report it with the lines above")
            wrong.__cause__ = error
            end = do.Teardown("failed", str(error), self.machine.progress.emitted, wrong)
            self.shutdown.tear_down(end, end.why)

    def _is_over(self) -> bool:
        """Whether the run is over."""
        return self.machine.phase is Phase.OVER

    async def _tick(self) -> None:
        """Post a `Tick` four times a second; stop the run after its maximal time, or when no client polls any more."""
        self.feed.heard_s = time.monotonic()
        start = self.feed.heard_s - self.recorder.age_s
        while self.machine.phase is not Phase.OVER:
            before = time.monotonic()
            await asyncio.sleep(TICK_S)
            now = time.monotonic()
            late_s = now - before - TICK_S
            cpu_wait = self.registry.cpu_wait
            cpu_wait.report("driver", thread_cpu_wait_s(threading.get_native_id()), now)
            if late_s > TICK_S:
                self.queue.put_nowait(on.Tick(stalled_s=late_s))
            else:
                registry = self.registry
                self.queue.put_nowait(
                    on.Tick(
                        cpu_wait.uncounted_s(now, before),
                        registry.unheard_workers(),
                        registry.ended_workers(),
                        registry.reading_workers(),
                        registry.searching_workers(),
                    )
                )
            limit = self.request.job.max_time_s
            if limit is not None and now - start > limit:
                start = float("inf")
                self.queue.put_nowait(on.StopRequested(f"max_time of {limit:.0f} s is over"))
            if now - self.feed.heard_s > ABANDONED_S:
                self.feed.heard_s = now
                self.queue.put_nowait(on.StopRequested(f"no client has asked for news for {ABANDONED_S:.0f} s"))

    def _write_members_file(self) -> None:
        """Write members.json if anything in it has changed."""
        text = (
            None
            if self.taking_over
            else self.members_text.text_if_changed(
                self.machine, self.registry.worker_facts, self.plans.schedule_name, len(self.registry.hellos)
            )
        )
        if text is not None:
            self.side_effects.aside(self.recorder.write_members_file, text)
