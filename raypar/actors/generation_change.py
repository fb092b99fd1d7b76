"""Carries out the change from one generation of workers to the next, as the run machine decides it."""

from __future__ import annotations

import asyncio
import pickle
from dataclasses import dataclass
from typing import Any

from raypar.actors import membership_event_text
from raypar.actors.driver_parts import DriverParts
from raypar.actors.journal import MembershipRecord
from raypar.elastic import actions as do
from raypar.elastic import events as on
from raypar.elastic.buddies import assign_buddies
from raypar.elastic.digest_check import InitialDigestCheck
from raypar.errors import WorkerLost
from raypar.plan import ParallelPlan
from raypar.plan.adopt_order import AdoptOrder
from raypar.plan.ownership import same_state_keys


@dataclass
class GenerationChange:
    """Claims a generation, releases the workers from the former one, and gives each its part of the new plan."""

    parts: DriverParts
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
        parts = self.parts
        try:
            ok = await asyncio.to_thread(parts.journal.claim, generation)
        except Exception as error:
            parts.tasks.post(on.CallFailed("error", error))
        else:
            parts.tasks.post(on.GenerationClaimed(generation, ok))

    def fence(self, generation: int, number: int, reason: str) -> None:
        """Tell a worker of a new generation while its step runs, so that it stops; then ask for its status once it has."""
        parts = self.parts
        worker, heard = parts.pool.workers[number], parts.reports.heard
        parts.calls.call(number, generation, worker.hear.remote(generation, reason), lambda number, _: on.Tick())
        parts.calls.call(
            number, generation, worker.stand.remote(generation), lambda _, s: on.WorkerStatusReported(generation, heard(s))
        )

    def settle(self, order: do.ApplyKeptGradients) -> None:
        """Have the workers that are a step behind apply the gradients they have kept."""
        parts = self.parts
        heard = parts.reports.heard
        for number in order.workers:
            ref = parts.pool.workers[number].settle.remote(order.generation, order.step, order.outcome)
            parts.calls.call(
                number, order.generation, ref, lambda _, stand: on.KeptGradientsApplied(order.generation, heard(stand))
            )

    async def choose(self, generation: int, workers: int) -> None:
        """Choose the plan for so many workers."""
        parts = self.parts
        now = parts.machine.membership.plan
        parts.tasks.post(await asyncio.to_thread(parts.plans.choose, generation, workers, now))

    async def adopt(self, order: do.AdoptPlan, reason: str) -> None:
        """Lower the plan; have every worker connect, exchange state and build its stages."""
        parts = self.parts
        request, plan = parts.request, order.plan
        parts.reports.forget()
        assignments = await asyncio.to_thread(parts.plans.assignments, plan)
        schedule = parts.plans.schedule(plan)
        if self.schedule is None or self.plan is None:
            self.plan = parts.machine.membership.plan or request.plan
            self.schedule = parts.plans.schedule(self.plan)
        await asyncio.to_thread(parts.journal.record, MembershipRecord(order.generation, plan, order.members, schedule))
        workers = (*order.members, *order.sources)
        for number in workers:
            if number not in parts.pool.workers:
                parts.tasks.post(on.CallFailed("lost", WorkerLost(f"worker {number} is gone"), number))
                return
        ranks = {number: rank for rank, number in enumerate(workers)}
        addresses = [parts.registry.hellos[number].address for number in workers]
        nodes = [parts.registry.hellos[number].node for number in order.members]
        keepers = assign_buddies(nodes, same_state_keys(parts.machine.layout(plan)))
        load = None
        if order.load and order.done:
            load = str(parts.recorder.checkpoint_path or request.resume)
        self.order = order
        parts.side_effects.aside(parts.recorder.seat, plan, [node[:8] for node in nodes])
        text = f"generation {order.generation}: {membership_event_text.describe_generation(order)}; {reason}"
        parts.side_effects.note("recovering", text=text, **membership_event_text.generation_facts(order, schedule))
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
            ref = parts.pool.workers[number].adopt.remote(
                order.generation, pickle.dumps(part), coordinate, addresses, request.start_deadline_s
            )
            parts.calls.call(number, order.generation, ref, adopted)

    def resumed(self, found: do.ReportFirstStepAfterRecovery) -> None:
        """Report the new generation to the user: its first step is committed."""
        parts = self.parts
        self.resumed_at = found.step
        order = self.order
        if order is None:
            return
        schedule = parts.plans.schedule(order.plan)
        text = membership_event_text.recovery_finished_text(order, found.seconds, found.again)
        told: dict[str, Any] = {"text": text, "pause_s": found.seconds, "again": found.again}
        if schedule != self.schedule:
            told |= {"schedule_was": self.schedule, "schedule_why": parts.plans.why(order.plan)}
            self.schedule = schedule
        if self.plan is not None and membership_event_text.shard_count_by_layer(
            self.plan
        ) != membership_event_text.shard_count_by_layer(order.plan):
            told["shards_was"] = membership_event_text.format_shards(self.plan)
        self.plan = order.plan
        parts.side_effects.note("generation", **told, **membership_event_text.generation_facts(order, schedule))
        parts.side_effects.aside(parts.recorder.plan_changed, order.plan, schedule)
        parts.tasks.spawn(self._prepare(len(order.members)))

    async def _prepare(self, workers: int) -> None:
        """Find the plan for one worker less before it is needed."""
        if workers > 1:
            await asyncio.to_thread(self.parts.plans.prepare, workers - 1)
