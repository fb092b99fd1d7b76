"""Changes from one generation of workers to the next, as the run machine decides."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from raypar.actors import worker_and_generation_events
from raypar.actors.actor_handle_types import PendingAnswer, WorkerHandle
from raypar.actors.background_tasks import BackgroundTasks
from raypar.actors.events_for_client import EventFeed
from raypar.actors.messages import CallFailure, RunRequest
from raypar.actors.plan_cache import PlanCache
from raypar.actors.run_recorder import RunRecorder
from raypar.actors.run_state_in_ray_kv import Journal, MembershipRecord
from raypar.actors.shared_pickles import SharedPickles
from raypar.actors.side_effect_thread import SideEffectThread
from raypar.actors.step_reports import StepReports
from raypar.actors.worker_calls import WorkerCalls
from raypar.actors.worker_failures import WorkerFailures
from raypar.actors.worker_pool import WorkerPool
from raypar.actors.worker_registry import WorkerRegistry
from raypar.elastic import actions as do
from raypar.elastic import events as on
from raypar.elastic.generation_guard import WorkerStatus
from raypar.elastic.mirror_schedule_and_buddies import assign_buddies
from raypar.elastic.replica_digests import InitialDigestCheck
from raypar.elastic.run_machine import RunMachine
from raypar.elastic.seating import plans_after_one_loss
from raypar.elastic.user_messages import plain_failure_text
from raypar.errors import PlanError, RayparError, WorkerLost
from raypar.plan import ParallelPlan
from raypar.plan.ownership import first_rank_with_same_state
from raypar.plan.pieces import AdoptedStages, AdoptPlanCommand, may_move_directly, moves_by_worker
from raypar.record.events import GenerationStart, Recovery, RunWarning, ShareChange, StagesBuilt
from raypar.schedule.program_assignment import ProgramAssignment


@dataclass
class GenerationChange:
    """Claims a generation, releases the workers from the former one, and gives each its part of the new plan."""

    request: RunRequest
    """What the client sent: everything about the run."""
    machine: RunMachine
    """Makes all decisions of the run."""
    journal: Journal
    """The state of the run that outlives this driver."""
    plans: PlanCache
    """The plan for each number of workers, with its schedule, assignments and predicted memory."""
    pool: WorkerPool
    """Placement groups and actors of the workers."""
    registry: WorkerRegistry
    """Which workers have started, are silent, have to leave or are lost."""
    recorder: RunRecorder
    """Writes the run folder and calls the callbacks."""
    side_effects: SideEffectThread
    """The thread in which the recorder runs."""
    reports: StepReports
    """Workers' reports of steps that the user has not seen."""
    failures: WorkerFailures
    """Makes the events about workers that have failed."""
    calls: WorkerCalls
    """Calls to workers, whose answers become events."""
    tasks: BackgroundTasks
    """Work beside the event loop."""
    feed: EventFeed
    """What the client is told."""
    last_order: do.AdoptPlan | None = None
    """The action with which this driver's last generation began; None before the first."""
    first_step: int = -1
    """The first step of the present generation."""
    reported_schedule: str | None = None
    """The schedule of the last generation reported to the user."""
    reported_plan: ParallelPlan | None = None
    """The plan of that generation."""
    prepared: int = 0
    """The newest generation for whose losses plans have been prepared."""

    def claim_generation(self, action: do.ClaimGeneration, reason: str) -> None:
        """Claim a generation in the journal; posts `GenerationClaimed`. Does not wait for callbacks, which may take long."""
        if not self.machine.begins:
            self.side_effects.note(Recovery(text=plain_failure_text(reason), generation=action.generation))
        self.tasks.spawn(self._claim_generation(action.generation))

    async def _claim_generation(self, generation: int) -> None:
        first, followed = self.journal.generation == 0, self.reports.followed
        try:
            ok = await asyncio.to_thread(self.journal.claim, generation)
            if ok and first and followed is not None:  # from now on a former driver calls for no step that follows more values
                followed.values |= await asyncio.to_thread(self.journal.validated)
        except Exception as error:
            self.tasks.post(on.CallFailed("error", error))
        else:
            self.tasks.post(on.GenerationClaimed(generation, ok))

    def fence_workers(self, action: do.FenceWorkers, reason: str) -> None:
        """Announce a new generation to workers, and ask for their status. Posts `WorkerStatusReported` of each."""
        for worker in action.workers:
            self._fence_worker(action.generation, worker, reason)

    def _fence_worker(self, generation: int, number: int, reason: str) -> None:
        """Announce a new generation to a worker, which stops its step; ask for its status."""
        worker = self.pool.workers[number]

        def reported(_: int, status: WorkerStatus) -> on.RunEvent:
            different = self.reports.note_samples(status)
            if different is not None:
                return on.CallFailed("user", different)
            return on.WorkerStatusReported(generation, self.reports.keep_reports_from_status(status))

        self.calls.call_until_answered(
            number, generation, lambda: worker.announce_generation.remote(generation, reason), lambda number, _: on.Tick()
        )
        self.calls.call_until_answered(
            number,
            generation,
            lambda: worker.report_status.remote(generation),
            reported,
        )

    def apply_kept_gradients(self, order: do.ApplyKeptGradients, reason: str) -> None:
        """Have workers that are a step behind apply the gradients they have kept. Posts `KeptGradientsApplied` for each."""
        keep_reports = self.reports.keep_reports_from_status
        for number in order.workers:
            ref = self.pool.workers[number].apply_kept_gradients.remote(order.generation, order.step, order.vote_result)
            self.calls.post_answer(
                number, order.generation, ref, lambda _, status: on.KeptGradientsApplied(order.generation, keep_reports(status))
            )

    def choose_plan(self, action: do.ChoosePlan, reason: str) -> None:
        """Choose the plan for so many workers. Posts `PlanChosen`."""
        self.tasks.spawn(self._choose_plan(action.generation, action.workers))

    async def _choose_plan(self, generation: int, workers: int) -> None:
        self.tasks.post(await asyncio.to_thread(self._chosen_plan, generation, workers, self.machine.membership.plan))

    def _chosen_plan(self, generation: int, workers: int, now: ParallelPlan | None) -> on.PlanChosen:
        """The best plan for up to `workers` workers, with the predicted step times of this plan and of `now`. Slow.

        A larger plan is lowered here already, while training continues, which shortens the pause of the move to it.
        """
        plans, found = self.plans, self.plans.find(workers)
        if isinstance(found, PlanError):
            return on.PlanChosen(generation, None, found.what)
        # Predictions take all workers as equally fast, so the present plan is compared as it is with even shares.
        now_s = plans.predicted_step_s(now.with_even_shares()) if now is not None else 0.0
        if now is not None and found.world > now.world:
            plans.assignments(found)
        return on.PlanChosen(generation, found, "", plans.predicted_step_s(found), now_s)

    def adopt_plan(self, order: do.AdoptPlan, reason: str) -> None:
        """Lower the plan; have every worker connect, exchange state and build its stages. Posts `PlanAdopted` of each."""
        self.tasks.spawn(self._adopt_plan(order, reason, self.machine.begins))

    async def _adopt_plan(self, order: do.AdoptPlan, reason: str, begins: bool) -> None:
        request, plan = self.request, order.plan
        self.reports.drop_uncommitted()
        assignments = await asyncio.to_thread(self.plans.assignments, plan)
        schedule = self.plans.schedule_name(plan)
        if self.reported_schedule is None or self.reported_plan is None:
            self.reported_plan = self.machine.membership.plan or request.plan
            self.reported_schedule = self.plans.schedule_name(self.reported_plan)
        await asyncio.to_thread(self.journal.record, MembershipRecord(order.generation, plan, order.members, schedule))
        workers = (*order.members, *order.seatless_sources)
        for number in workers:
            if number not in self.pool.workers:
                self.failures.post("lost", WorkerLost(f"worker {number} is gone"), number)
                return
        self.last_order = order
        self.side_effects.aside(
            self.recorder.note_generation, plan, [self.registry.hellos[number].node[:8] for number in order.members]
        )
        if not begins:
            made = worker_and_generation_events.describe_generation(order)
            text = f"generation {order.generation}: {made}; {plain_failure_text(reason)}"
            self.side_effects.note(Recovery(text=text, **worker_and_generation_events.generation_facts(order, schedule)))
        initial, built = InitialDigestCheck(), dict[int, int]()

        def adopted(number: int, described: AdoptedStages | None) -> on.RunEvent:
            if described is None:
                return on.PlanAdopted(number, order.generation, "")
            if (different := initial.add(number, described)) is not None:
                return on.CallFailed("user", different)
            built[number] = described["bytes"]
            if begins and len(built) == plan.world:
                self._tell_that_stages_are_built([built[number] for number in order.members])
            return on.PlanAdopted(number, order.generation, described["not_kept"])

        call = self.make_adopt_call(order, assignments)
        for number in workers:
            self.calls.post_answer(number, order.generation, call(number, self.pool.workers[number]), adopted)

    def _tell_that_stages_are_built(self, sizes: Sequence[int]) -> None:
        """Tell the client that the run's first steps follow; their time begins now. `sizes`: by rank, bytes of parameters."""
        megabytes = ", ".join(f"{size / 1e6:.1f}" for size in sizes)
        self.feed.tell(StagesBuilt(text=f"stages built and connected; parameters by worker in MB: {megabytes}"))
        self.side_effects.aside(self.recorder.restart_step_timer)

    def make_adopt_call(
        self, order: do.AdoptPlan, assignments: Sequence[ProgramAssignment]
    ) -> Callable[[int, WorkerHandle], PendingAnswer[AdoptedStages | CallFailure | None]]:
        """The call with which a worker adopts its part of `order`: of the first plan of a run, as of any later one.

        `assignments`: by rank. The state is initial, or comes from a checkpoint or from memory (`order.moves`).
        """
        plan, workers = order.plan, (*order.members, *order.seatless_sources)
        addresses = [self.registry.hellos[number].address for number in workers]
        samples, deadline_s = self.reports.samples, self.request.start_deadline_s
        if samples is not None and order.from_checkpoint and order.done:
            line = samples.line_about_places(order.done, plan.stages[0].replicas)
            if line is not None:
                self.side_effects.note(RunWarning(text=line))
        command, ranks = self._part_of_every_worker(order, assignments), {number: rank for rank, number in enumerate(workers)}

        def call(number: int, worker: WorkerHandle) -> PendingAnswer[AdoptedStages | CallFailure | None]:
            coordinate = plan.coordinate(ranks[number]) if ranks[number] < plan.world else f"worker {number}"
            return worker.adopt.remote(order.generation, command(number), coordinate, addresses, deadline_s)

        return call

    def _part_of_every_worker(self, order: do.AdoptPlan, assignments: Sequence[ProgramAssignment]) -> Callable[[int], bytes]:
        """Makes each worker's pickled `AdoptPlanCommand`. `assignments`: by rank."""
        request, plan = self.request, order.plan
        ranks = {number: rank for rank, number in enumerate((*order.members, *order.seatless_sources))}
        nodes = [self.registry.hellos[number].node for number in order.members]
        keepers = assign_buddies(nodes, first_rank_with_same_state(self.machine.held_pieces(plan)))
        own_moves, direct = moves_by_worker(order.moves), may_move_directly(order.moves)
        load = None
        if order.from_checkpoint and (order.done or request.resume is not None):
            load = str(self.recorder.checkpoints.last or request.resume)
        samples = self.reports.samples
        epochs = samples.known_epochs() if samples is not None else {}
        cursors = samples.known_cursors() if samples is not None else {}
        digests = samples.digests(order.done) if samples is not None else {}
        validated = self.reports.followed.values if self.reports.followed is not None else {}
        of_plan = (assignments[0].plan, assignments[0].crossing, assignments[0].layouts)
        number_of_node = {node: number for number, node in enumerate(dict.fromkeys(nodes))}
        numbers = tuple(number_of_node[node] for node in nodes)
        pickles = SharedPickles([*of_plan, ranks, keepers, numbers, epochs, cursors, digests, validated])

        def command(number: int) -> bytes:
            rank = ranks[number]
            part = AdoptPlanCommand(
                assignments[rank] if rank < plan.world else None,
                ranks,
                order.done,
                own_moves.get(number, ()),
                load,
                direct=direct,
                only_weights=bool(request.policy.forward_passes),
                run_begins=order.from_checkpoint and load is None,
                from_mirror=order.from_mirror,
                mirror_keepers=keepers,
                nodes=numbers,
                epochs=epochs,
                cursors=cursors,
                digests=digests,
                validated=validated,
                skipped_steps=order.skipped_steps,
            )
            return pickles.dumps(part)

        return command

    def prepare_shares(self, action: do.PrepareShares, reason: str) -> None:
        """Lower the plan with other shares, while training goes on. Posts `SharesPrepared`."""
        self.tasks.spawn(self._prepare_shares(action))

    async def _prepare_shares(self, action: do.PrepareShares) -> None:
        now, why = self.machine.membership.plan, ""
        try:
            await asyncio.to_thread(self.plans.lower_shares, action.plan, now)
        except RayparError as error:
            why = error.what
        self.tasks.post(on.SharesPrepared(action.generation, action.plan, why))

    def adopt_shares(self, action: do.AdoptShares, reason: str) -> None:
        """Have every member take its blocks of the plan. Posts `SharesAdopted` of each."""
        self.tasks.spawn(self._adopt_shares(action))

    async def _adopt_shares(self, action: do.AdoptShares) -> None:
        plan, members = action.plan, self.machine.membership.members
        assignments, schedule = await asyncio.to_thread(self.plans.assignments, plan), self.plans.schedule_name(plan)
        record = MembershipRecord(action.generation, plan, members, schedule)
        await asyncio.to_thread(self.journal.record, record)
        order = do.AdoptPlan(action.generation, plan, members, (), action.done, ())
        command = self._part_of_every_worker(order, assignments)
        for number in members:
            if number not in self.pool.workers:
                self.failures.post("lost", WorkerLost(f"worker {number} is gone"), number)
                return
            ref = self.pool.workers[number].share_out_anew.remote(action.generation, command(number))
            self.calls.post_answer(
                number, action.generation, ref, lambda number, fits: on.SharesAdopted(number, action.generation, fits)
            )

    def report_shares(self, done: do.ReportShares, reason: str) -> None:
        """Report the new shares to the user; what the loss of a worker would need now is computed after the next step."""
        self.reported_plan, self.prepared = done.plan, 0
        text = f"{done.text}; the change took {done.seconds:.2f} s"
        self.side_effects.note(ShareChange(text=text, plan=done.plan.describe(), pause_s=done.seconds, step=done.step))
        nodes = [self.registry.hellos[number].node[:8] for number in self.machine.membership.members]
        self.side_effects.aside(self.recorder.note_generation, done.plan, nodes)
        self.side_effects.aside(self.recorder.write_plan_file, done.plan, self.plans.schedule_name(done.plan))

    def report_first_step(self, found: do.ReportFirstStepAfterRecovery, reason: str) -> None:
        """Report the new generation to the user: its first step is committed."""
        self.first_step = found.step
        self.registry.node_losses.note_recovery(time.monotonic())
        order = self.last_order
        if order is None:
            return
        schedule = self.plans.schedule_name(order.plan)
        text = worker_and_generation_events.recovery_finished_text(order, found.seconds, found.steps_again)
        told: dict[str, Any] = {"text": text, "pause_s": found.seconds, "again": found.steps_again}
        if schedule != self.reported_schedule:
            told |= {"schedule_was": self.reported_schedule, "schedule_why": self.plans.why(order.plan)}
            self.reported_schedule = schedule
        if self.reported_plan is not None and self.reported_plan.shards_by_layer != order.plan.shards_by_layer:
            told["shards_was"] = worker_and_generation_events.format_shards(self.reported_plan)
        self.reported_plan = order.plan
        self.side_effects.note(GenerationStart(**told, **worker_and_generation_events.generation_facts(order, schedule)))
        self.side_effects.aside(self.recorder.write_plan_file, order.plan, schedule)

    def prepare_for_loss(self) -> None:
        """Compute in the background what the loss of one worker would need, once in a generation: a recovery waits for it."""
        who = self.machine.membership
        if self.request.policy.elastic and self.prepared != who.generation and who.plan is not None and who.plan.world > 1:
            self.prepared = who.generation
            self.tasks.spawn(asyncio.to_thread(self.plans.prepare, who.plan, plans_after_one_loss(self.machine)))
