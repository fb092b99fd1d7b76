"""From one generation of a run to the next: what the machine decides there is carried out, and told."""

from __future__ import annotations

import asyncio
import pickle
from dataclasses import dataclass
from typing import Any

from raypar.actors import event_text
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
from raypar.elastic.adopt_order import AdoptOrder
from raypar.elastic.buddies import assign_buddies
from raypar.elastic.digest_check import InitialDigestCheck
from raypar.elastic.run_machine import RunMachine
from raypar.errors import WorkerLost
from raypar.plan import ParallelPlan


@dataclass
class GenerationChange:
    """Claims them, frees the workers from the last one, and gives each its part of the next."""

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
    """The last one, of this driver."""
    resumed_at: int = -1
    """The first step of the present generation."""
    schedule: str | None = None
    """That of the last generation that people have been told of."""
    plan: ParallelPlan | None = None
    """Likewise."""

    async def claim(self, generation: int) -> None:
        """Not behind the callbacks: they may take long."""
        try:
            ok = await asyncio.to_thread(self.journal.claim, generation)
        except Exception as error:
            self.tasks.post(on.CallFailed("error", error))
        else:
            self.tasks.post(on.GenerationClaimed(generation, ok))

    def fence(self, generation: int, number: int, reason: str) -> None:
        """First beside what the worker does, so that it stops; then behind it."""
        worker, heard = self.pool.workers[number], self.reports.heard
        self.calls.call(number, generation, worker.hear.remote(generation, reason), lambda number, _: on.Tick())
        self.calls.call(
            number, generation, worker.stand.remote(generation), lambda _, s: on.WorkerStatusReported(generation, heard(s))
        )

    def settle(self, order: do.ApplyKeptGradients) -> None:
        """Those that are a step behind apply it."""
        heard = self.reports.heard
        for number in order.workers:
            ref = self.pool.workers[number].settle.remote(order.generation, order.step, order.outcome)
            self.calls.call(number, order.generation, ref, lambda _, stand: on.WorkerSettled(order.generation, heard(stand)))

    async def choose(self, generation: int, workers: int) -> None:
        """The planner's plan for so many."""
        now = self.machine.membership.plan
        self.tasks.post(await asyncio.to_thread(self.plans.choose, generation, workers, now))

    async def adopt(self, order: do.AdoptPlan, reason: str) -> None:
        """Lower the plan, and let everybody connect, hand over, take over and build."""
        request, plan = self.request, order.plan
        self.reports.forget()
        assignments = await asyncio.to_thread(self.plans.assignments, plan)
        schedule = self.plans.schedule(plan)
        if self.schedule is None or self.plan is None:
            self.plan = self.machine.membership.plan or request.plan
            self.schedule = self.plans.schedule(self.plan)
        await asyncio.to_thread(self.journal.record, MembershipRecord(order.generation, plan, order.members, schedule))
        workers = (*order.members, *order.sources)
        for number in workers:
            if number not in self.pool.workers:
                self.tasks.post(on.CallFailed("lost", WorkerLost(f"worker {number} is gone"), number))
                return
        ranks = {number: rank for rank, number in enumerate(workers)}
        addresses = [self.registry.hellos[number].address for number in workers]
        keepers = assign_buddies([self.registry.hellos[number].node for number in order.members], plan.copies)
        load = None
        if order.load and order.done:
            load = str(self.recorder.checkpoint_path or request.resume)
        self.order = order
        nodes = [self.registry.hellos[number].node[:8] for number in order.members]
        self.side_effects.aside(self.recorder.seat, plan, nodes)
        text = f"generation {order.generation}: {event_text.describe_generation(order)}; {reason}"
        self.side_effects.note("recovering", text=text, **event_text.generation_facts(order, schedule))
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
                fresh=order.load and not order.done,
                cut=order.cut,
                buddies=keepers,
            )
            coordinate = plan.coordinate(rank) if seated else f"worker {number}"
            ref = self.pool.workers[number].adopt.remote(
                order.generation, pickle.dumps(part), coordinate, addresses, request.start_deadline_s
            )
            self.calls.call(number, order.generation, ref, adopted)

    def resumed(self, found: do.FirstStepAfterRecovery) -> None:
        """The first step of a new generation is committed."""
        self.resumed_at = found.step
        order = self.order
        if order is None:
            return
        schedule = self.plans.schedule(order.plan)
        text = event_text.resumed_text(order, found.seconds, found.again)
        told: dict[str, Any] = {"text": text, "pause_s": found.seconds, "again": found.again}
        if schedule != self.schedule:
            told |= {"schedule_was": self.schedule, "schedule_why": self.plans.why(order.plan)}
            self.schedule = schedule
        if self.plan is not None and event_text.shards_by_layer(self.plan) != event_text.shards_by_layer(order.plan):
            told["shards_was"] = event_text.format_shards(self.plan)
        self.plan = order.plan
        self.side_effects.note("generation", **told, **event_text.generation_facts(order, schedule))
        self.side_effects.aside(self.recorder.plan_changed, order.plan, schedule)
        self.tasks.spawn(self._prepare(len(order.members)))

    async def _prepare(self, workers: int) -> None:
        """Off the critical path: what would be done with one worker less."""
        if workers > 1:
            await asyncio.to_thread(self.plans.prepare, workers - 1)
