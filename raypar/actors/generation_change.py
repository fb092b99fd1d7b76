"""Carries out the change from one generation of workers to the next, as the run machine decides it."""

from __future__ import annotations

import asyncio
import pickle
from dataclasses import dataclass
from typing import Any

from raypar.actors import membership_event_text
from raypar.actors.background_tasks import BackgroundTasks
from raypar.actors.journal import Journal, MembershipRecord
from raypar.actors.plan_cache import PlanCache
from raypar.actors.run_recorder import RunRecorder
from raypar.actors.run_request import RunRequest
from raypar.actors.side_effect_thread import SideEffectThread
from raypar.actors.step_reports import StepReports
from raypar.actors.worker_calls import WorkerCalls
from raypar.actors.worker_pool import WorkerPool
from raypar.actors.worker_registry import WorkerRegistry
from raypar.elastic import actions as do
from raypar.elastic import events as on
from raypar.elastic.buddies import assign_buddies
from raypar.elastic.digest_check import InitialDigestCheck
from raypar.elastic.run_machine import RunMachine
from raypar.errors import WorkerLost
from raypar.plan import ParallelPlan
from raypar.plan.adopt_order import AdoptOrder
from raypar.plan.ownership import same_state_keys


@dataclass
class GenerationChange:
    """Claims a generation, releases the workers from the former one, and gives each its part of the new plan."""

    request: RunRequest
    machine: RunMachine
    journal: Journal
    plans: PlanCache
    pool: WorkerPool
    registry: WorkerRegistry
    recorder: RunRecorder
    side_effects: SideEffectThread
    reports: StepReports
    calls: WorkerCalls
    tasks: BackgroundTasks
    order: do.AdoptPlan | None = None
    """The order of this driver's last generation."""
    resumed_at: int = -1
    """The first step of the present generation."""
    schedule: str | None = None
    """The schedule of the last generation reported to the user."""
    plan: ParallelPlan | None = None
    """The plan of that generation."""

    async def claim(self, generation: int) -> None:
        """Claim `generation` in the journal; not in the thread of the callbacks, which may take long."""
        try:
            ok = await asyncio.to_thread(self.journal.claim, generation)
        except Exception as error:
            self.tasks.post(on.CallFailed("error", error))
        else:
            self.tasks.post(on.GenerationClaimed(generation, ok))

    def fence(self, generation: int, number: int, reason: str) -> None:
        """Tell a worker of a new generation while its step runs, so that it stops; then ask for its status once it has."""
        worker, keep = self.pool.workers[number], self.reports.keep_missing_reports
        self.calls.call(number, generation, worker.enter_generation.remote(generation, reason), lambda number, _: on.Tick())
        self.calls.call(
            number,
            generation,
            worker.report_status.remote(generation),
            lambda _, s: on.WorkerStatusReported(generation, keep(s)),
        )

    def settle(self, order: do.ApplyKeptGradients) -> None:
        """Have the workers that are a step behind apply the gradients they have kept."""
        keep = self.reports.keep_missing_reports
        for number in order.workers:
            ref = self.pool.workers[number].apply_kept_gradients.remote(order.generation, order.step, order.vote_result)
            self.calls.call(
                number, order.generation, ref, lambda _, status: on.KeptGradientsApplied(order.generation, keep(status))
            )

    async def choose(self, generation: int, workers: int) -> None:
        """Choose the plan for so many workers."""
        now = self.machine.membership.plan
        self.tasks.post(await asyncio.to_thread(self.plans.choose, generation, workers, now))

    async def adopt(self, order: do.AdoptPlan, reason: str) -> None:
        """Lower the plan; have every worker connect, exchange state and build its stages."""
        request, plan = self.request, order.plan
        self.reports.forget()
        assignments = await asyncio.to_thread(self.plans.assignments, plan)
        schedule = self.plans.schedule(plan)
        if self.schedule is None or self.plan is None:
            self.plan = self.machine.membership.plan or request.plan
            self.schedule = self.plans.schedule(self.plan)
        await asyncio.to_thread(self.journal.record, MembershipRecord(order.generation, plan, order.members, schedule))
        workers = (*order.members, *order.seatless_sources)
        for number in workers:
            if number not in self.pool.workers:
                self.tasks.post(on.CallFailed("lost", WorkerLost(f"worker {number} is gone"), number))
                return
        ranks = {number: rank for rank, number in enumerate(workers)}
        addresses = [self.registry.hellos[number].address for number in workers]
        nodes = [self.registry.hellos[number].node for number in order.members]
        keepers = assign_buddies(nodes, same_state_keys(self.machine.layout(plan)))
        load = None
        if order.from_checkpoint and order.done:
            load = str(self.recorder.checkpoint_path or request.resume)
        self.order = order
        self.side_effects.aside(self.recorder.seat, plan, [node[:8] for node in nodes])
        text = f"generation {order.generation}: {membership_event_text.describe_generation(order)}; {reason}"
        self.side_effects.note("recovering", text=text, **membership_event_text.generation_facts(order, schedule))
        initial = InitialDigestCheck()

        def adopted(number: int, described: dict[str, Any] | None) -> on.RunEvent:
            different = initial.add(number, described["initial"]) if described is not None else None
            return on.CallFailed("user", different) if different is not None else on.PlanAdopted(number, order.generation)

        for rank, number in enumerate(workers):
            seated = rank < plan.world
            part = AdoptOrder(
                assignments[rank] if seated else None,
                ranks,
                order.done,
                order.moves,
                load,
                run_begins=order.from_checkpoint and not order.done,
                from_mirror=order.from_mirror,
                mirror_keepers=keepers,
            )
            coordinate = plan.coordinate(rank) if seated else f"worker {number}"
            ref = self.pool.workers[number].adopt.remote(
                order.generation, pickle.dumps(part), coordinate, addresses, request.start_deadline_s
            )
            self.calls.call(number, order.generation, ref, adopted)

    def resumed(self, found: do.ReportFirstStepAfterRecovery) -> None:
        """Report the new generation to the user: its first step is committed."""
        self.resumed_at = found.step
        order = self.order
        if order is None:
            return
        schedule = self.plans.schedule(order.plan)
        text = membership_event_text.recovery_finished_text(order, found.seconds, found.steps_again)
        told: dict[str, Any] = {"text": text, "pause_s": found.seconds, "again": found.steps_again}
        if schedule != self.schedule:
            told |= {"schedule_was": self.schedule, "schedule_why": self.plans.why(order.plan)}
            self.schedule = schedule
        if self.plan is not None and self.plan.shards_by_layer != order.plan.shards_by_layer:
            told["shards_was"] = membership_event_text.format_shards(self.plan)
        self.plan = order.plan
        self.side_effects.note("generation", **told, **membership_event_text.generation_facts(order, schedule))
        self.side_effects.aside(self.recorder.plan_changed, order.plan, schedule)
        self.tasks.spawn(self._prepare(len(order.members)))

    async def _prepare(self, workers: int) -> None:
        """Find the plan for one worker less before it is needed."""
        if workers > 1:
            await asyncio.to_thread(self.plans.prepare, workers - 1)
