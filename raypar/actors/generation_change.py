"""Changes from one generation of workers to the next, as the run machine decides."""

from __future__ import annotations

import asyncio
import pickle
from dataclasses import dataclass
from typing import Any

from raypar.actors import membership_event_text
from raypar.actors.driver_parts import DriverParts
from raypar.actors.run_state_in_ray_kv import MembershipRecord
from raypar.elastic import actions as do
from raypar.elastic import events as on
from raypar.elastic.mirror import assign_buddies
from raypar.elastic.state_trust import InitialDigestCheck
from raypar.elastic.user_messages import plain_failure_text
from raypar.errors import WorkerLost
from raypar.plan import ParallelPlan
from raypar.plan.adopt_plan_command_to_worker import AdoptPlanCommand
from raypar.plan.ownership import same_state_keys
from raypar.record.events import GenerationStart, Recovery


@dataclass
class GenerationChange:
    """Claims a generation, releases the workers from the former one, and gives each its part of the new plan."""

    parts: DriverParts
    """The objects of the driver."""
    last_order: do.AdoptPlan | None = None
    """The action with which this driver's last generation began; None before the first."""
    first_step: int = -1
    """The first step of the present generation."""
    reported_schedule: str | None = None
    """The schedule of the last generation reported to the user."""
    reported_plan: ParallelPlan | None = None
    """The plan of that generation."""

    async def claim_generation(self, generation: int) -> None:
        """Claim `generation` in the journal; posts `GenerationClaimed`. Does not wait for callbacks, which may take long."""
        parts = self.parts
        try:
            ok = await asyncio.to_thread(parts.journal.claim, generation)
        except Exception as error:
            parts.tasks.post(on.CallFailed("error", error))
        else:
            parts.tasks.post(on.GenerationClaimed(generation, ok))

    def fence_worker(self, generation: int, number: int, reason: str) -> None:
        """Announce a new generation to a worker, which stops its step; ask for its status. Posts `WorkerStatusReported`."""
        parts = self.parts
        worker, keep_reports = parts.pool.workers[number], parts.reports.keep_reports_from_status
        parts.calls.call_until_answered(
            number, generation, lambda: worker.announce_generation.remote(generation, reason), lambda number, _: on.Tick()
        )
        parts.calls.call_until_answered(
            number,
            generation,
            lambda: worker.report_status.remote(generation),
            lambda _, status: on.WorkerStatusReported(generation, keep_reports(status)),
        )

    def apply_kept_gradients(self, order: do.ApplyKeptGradients) -> None:
        """Have workers that are a step behind apply the gradients they have kept. Posts `KeptGradientsApplied` for each."""
        parts = self.parts
        keep_reports = parts.reports.keep_reports_from_status
        for number in order.workers:
            ref = parts.pool.workers[number].apply_kept_gradients.remote(order.generation, order.step, order.vote_result)
            parts.calls.call(
                number, order.generation, ref, lambda _, status: on.KeptGradientsApplied(order.generation, keep_reports(status))
            )

    async def choose_plan(self, generation: int, workers: int) -> None:
        """Choose the plan for `workers` workers. Posts `PlanChosen`.

        A larger plan is lowered here already, while training continues, which shortens the pause of the move to it.
        """
        parts = self.parts
        now = parts.machine.membership.plan
        chosen = await asyncio.to_thread(parts.plans.choose, generation, workers, now)
        if chosen.plan is not None and now is not None and chosen.plan.world > now.world:
            await asyncio.to_thread(parts.plans.assignments, chosen.plan)
        parts.tasks.post(chosen)

    async def adopt_plan(self, order: do.AdoptPlan, reason: str) -> None:
        """Lower the plan; have every worker connect, exchange state and build its stages. Each posts `PlanAdopted`."""
        parts = self.parts
        request, plan = parts.request, order.plan
        parts.reports.drop_uncommitted()
        assignments = await asyncio.to_thread(parts.plans.assignments, plan)
        schedule = parts.plans.schedule(plan)
        if self.reported_schedule is None or self.reported_plan is None:
            self.reported_plan = parts.machine.membership.plan or request.plan
            self.reported_schedule = parts.plans.schedule(self.reported_plan)
        await asyncio.to_thread(parts.journal.record, MembershipRecord(order.generation, plan, order.members, schedule))
        workers = (*order.members, *order.seatless_sources)
        for number in workers:
            if number not in parts.pool.workers:
                parts.tasks.post(on.CallFailed("lost", WorkerLost(f"worker {number} is gone"), number))
                return
        ranks = {number: rank for rank, number in enumerate(workers)}
        addresses = [parts.registry.hellos[number].address for number in workers]
        nodes = [parts.registry.hellos[number].node for number in order.members]
        keepers = assign_buddies(nodes, same_state_keys(parts.machine.held_pieces(plan)))
        load = None
        if order.from_checkpoint and order.done:
            load = str(parts.recorder.last_checkpoint or request.resume)
        self.last_order = order
        parts.side_effects.aside(parts.recorder.note_generation, plan, [node[:8] for node in nodes])
        text = (
            f"generation {order.generation}: {membership_event_text.describe_generation(order)}; {plain_failure_text(reason)}"
        )
        parts.side_effects.note(Recovery(text=text, **membership_event_text.generation_facts(order, schedule)))
        initial = InitialDigestCheck()

        def adopted(number: int, described: dict[str, Any] | None) -> on.RunEvent:
            different = initial.add(number, described["initial"]) if described is not None else None
            not_kept = described["not_kept"] if described is not None else ""
            return (
                on.CallFailed("user", different)
                if different is not None
                else on.PlanAdopted(number, order.generation, not_kept)
            )

        for rank, number in enumerate(workers):
            seated = rank < plan.world
            part = AdoptPlanCommand(
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
            ref = parts.pool.workers[number].adopt.remote(
                order.generation, pickle.dumps(part), coordinate, addresses, request.start_deadline_s
            )
            parts.calls.call(number, order.generation, ref, adopted)

    def report_first_step(self, found: do.ReportFirstStepAfterRecovery) -> None:
        """Report the new generation to the user: its first step is committed."""
        parts = self.parts
        self.first_step = found.step
        order = self.last_order
        if order is None:
            return
        schedule = parts.plans.schedule(order.plan)
        text = membership_event_text.recovery_finished_text(order, found.seconds, found.steps_again)
        told: dict[str, Any] = {"text": text, "pause_s": found.seconds, "again": found.steps_again}
        if schedule != self.reported_schedule:
            told |= {"schedule_was": self.reported_schedule, "schedule_why": parts.plans.why(order.plan)}
            self.reported_schedule = schedule
        if self.reported_plan is not None and self.reported_plan.shards_by_layer != order.plan.shards_by_layer:
            told["shards_was"] = membership_event_text.format_shards(self.reported_plan)
        self.reported_plan = order.plan
        parts.side_effects.note(GenerationStart(**told, **membership_event_text.generation_facts(order, schedule)))
        parts.side_effects.aside(parts.recorder.write_plan_file, order.plan, schedule)
        parts.tasks.spawn(self._search_next_plan(len(order.members)))

    async def _search_next_plan(self, workers: int) -> None:
        """Search the plan for one worker less before it is needed."""
        if workers > 1:
            await asyncio.to_thread(self.parts.plans.prepare, workers - 1)
