"""The plans of a run, each computed once, with their schedules, assignments, pieces of state and predicted times.

What the loss of one worker needs is computed while all is well (`PlanCache.prepare`), so that a recovery looks it up.
"""

from __future__ import annotations

import contextlib
import pickle
import threading
from collections.abc import Sequence
from dataclasses import replace

from raypar.actors.messages import RunRequest
from raypar.errors import PlanError, RayparError
from raypar.plan import MicrobatchRouting, ParallelPlan
from raypar.plan.gradient_pool import GradientPool
from raypar.plan.ownership import Ownership
from raypar.plan.pieces import Piece
from raypar.plan.placements import plan_for_fewer_workers
from raypar.plan.stage_connections import check_ties_are_cut_alike
from raypar.plan.stage_plan import shortest_span
from raypar.plan.wording import count_noun
from raypar.planner.memory_sheet import out_of_memory_advice
from raypar.planner.model_profile import ModelProfile
from raypar.planner.plan_search import format_mib, reachable_shard_counts, search_plans
from raypar.planner.predicted_step import predict_step
from raypar.schedule import registry
from raypar.schedule.program_assignment import ProgramAssignment, assign_programs_to_ranks


class PlanCache:
    """Plan by number of workers, and what follows from a plan. Methods may be called from any thread."""

    def __init__(self, request: RunRequest) -> None:
        self.request = request
        """The run's request: its first plan, model outline and profile."""
        self.schedules: dict[ParallelPlan, str] = {request.plan: request.schedule_name}
        """Plan -> name of the schedule it was chosen with."""
        self._found: dict[int, ParallelPlan | PlanError] = {request.plan.world: request.plan}
        """Number of workers -> plan, or why there is none; the job's own number has the job's own plan."""
        self._assignments: dict[ParallelPlan, tuple[ProgramAssignment, ...]] = {}
        """Plan -> its assignments; `prepare` drops those that neither the present plan nor the loss of one worker needs."""
        self._held: dict[ParallelPlan, tuple[tuple[Piece, ...], ...]] = {}
        """Plan -> `held_pieces`, of the same plans."""
        self._step_s: dict[ParallelPlan, float] = {}
        """Plan -> `predicted_step_s`."""
        self._lacking: dict[ParallelPlan, str] = {}
        """Plan -> `memory_lacking`."""
        self._passes: dict[ParallelPlan, tuple[int, ...]] = {}
        """Plan -> `passes`."""
        self._lock = threading.Lock()
        """Held while a plan is looked up or searched."""

    def first(self, workers: int, memory_bytes: int | None) -> ParallelPlan | None:
        """The plan with which a run begins on `workers` workers with `memory_bytes` of memory each; None if none fits.

        It has the job's number of shards, because results depend on that number. It may use fewer than `workers` workers.
        """
        request = self.request
        if workers >= request.plan.world:
            return request.plan
        found = self._searched(workers, memory_bytes)
        if isinstance(found, PlanError) or found.shards_by_layer != request.plan.shards_by_layer:
            return None
        return found

    def prepare(self, now: ParallelPlan, after_loss: Sequence[ParallelPlan]) -> None:
        """Compute what a run under `now` needs once it loses a worker: the plan for one worker less, and programs and pieces.

        `after_loss`: the plans with which the run would go on without a search. A plan that cannot be made is left to the
        recovery that needs it, which reports why.
        """
        for plan in after_loss:
            self.schedule_name(plan)  # before the search, which may choose another one for the same plan
        found = self.find(now.world - 1)
        plans = [*after_loss] if isinstance(found, PlanError) else [*after_loss, found]
        for plan in plans:
            with contextlib.suppress(RayparError):
                self.assignments(plan)
                self.held_pieces(plan)
                self.memory_lacking(plan)
        for plan in (now, *plans[len(after_loss) :]):
            with contextlib.suppress(RayparError):
                self.predicted_step_s(plan)
        needed = (now, *plans)
        self._assignments = {plan: self._assignments[plan] for plan in needed if plan in self._assignments}
        self._held = {plan: self._held[plan] for plan in needed if plan in self._held}

    def find(self, workers: int) -> ParallelPlan | PlanError:
        """The best plan for up to `workers` workers, or why there is none."""
        with self._lock:
            found = self._found.get(workers)
            if found is None:
                found = self._searched(workers)
                self._found[workers] = found
            return found

    def _searched(self, workers: int, memory_bytes: int | None = None) -> ParallelPlan | PlanError:
        """The best plan for `workers` workers with the job's number of shards, if they are enough for it.

        `memory_bytes`: of each worker, where it is known.
        """
        known = [limit for limit in (self.request.profile.memory_bytes, memory_bytes) if limit is not None]
        profile = replace(self.request.profile, memory_bytes=min(known, default=None))
        if not self.request.plan.one_role_each:
            return self._of_placements(profile, workers)
        most = max(stage.shards for stage in self.request.plan.stages)
        shards = next(n for n in reachable_shard_counts(self.request.plan) if most % n == 0 and n <= max(1, workers))
        batching, recompute = self.request.batching, self.request.plan.recompute
        try:
            virtual = self.request.job.virtual_shards
            zero = None if profile.zero_is_open else max(self.request.plan.zero_levels)
            holders, gather = self.request.plan.zero_holders, shortest_span(self.request.plan.gather_spans)
            offload = self.request.plan.offload
            choice = search_plans(profile, workers, batching, shards, recompute, virtual, zero, holders, gather, offload)
        except PlanError as error:
            return error
        plan = choice.plan if choice.plan.gradients == "scatter" else choice.plan.with_gradients(self.request.plan.gradients)
        self.schedules.setdefault(plan, choice.schedule)
        return plan

    def _of_placements(self, profile: ModelProfile, workers: int) -> ParallelPlan | PlanError:
        """What is left of the job's placements with fewer workers, if that fits into their memory."""
        try:
            plan = plan_for_fewer_workers(self.request.plan, workers, self.request.job.virtual_shards)
            check_ties_are_cut_alike(plan, self.request.outline.crossing(plan).ties)
        except PlanError as error:
            return error
        _, memory = predict_step(profile, plan, self.schedule_name(plan), self.request.batching)
        if profile.memory_bytes is not None and max(memory) > profile.memory_bytes:
            return PlanError(
                f"on {count_noun(plan.world, 'worker')} the placements need {format_mib(max(memory))} of a worker, and it has "
                f"{format_mib(profile.memory_bytes)}",
                cure="add workers, or divide more layers in plan.placements",
            )
        return plan

    def schedule_name(self, plan: ParallelPlan) -> str:
        """The plan's schedule: the one it was chosen with, else the job's own if it can run on the plan's stages."""
        for name in (self.schedules.get(plan), self.request.schedule_name, "1f1b"):
            if name is not None and registry.schedule_fits_plan(name, plan):
                self.schedules[plan] = name
                return name
        return "interleaved"

    def why(self, plan: ParallelPlan) -> str:
        """Why the plan has its schedule, in a few words."""
        if self.schedule_name(plan) == self.request.schedule_name:
            return "the job's own"
        if plan in list(self._found.values()):
            return f"predicted to be the fastest with {count_noun(plan.world, 'worker')}"
        return "the job's own does not fit this plan"

    def assignments(self, plan: ParallelPlan) -> tuple[ProgramAssignment, ...]:
        """Every worker's assignment under the plan, by rank."""
        found = self._assignments.get(plan)
        if found is None:
            given = plan == self.request.plan and self.schedule_name(plan) == self.request.schedule_name
            found = self._assignments[plan] = pickle.loads(self.request.assignments) if given else self._lowered(plan)
        return found

    def lower_shares(self, plan: ParallelPlan, now: ParallelPlan | None) -> None:
        """Compute the assignments of a plan that differs from the present one in its shares, under the same schedule.

        Raises `PlanError` if some worker is predicted to have too little memory for more blocks.
        """
        if now is not None:
            self.schedules.setdefault(plan, self.schedule_name(now))
        self.assignments(plan)
        if lacking := self.memory_lacking(plan):
            raise PlanError(lacking, cure="set plan.recompute, or use workers with more memory")
        self.passes(plan)

    def memory_lacking(self, plan: ParallelPlan) -> str:
        """Which worker of the plan is predicted to need more memory than a worker has, as text; empty if none is."""
        request, limit = self.request, self.request.profile.memory_bytes
        if limit is None:
            return ""
        if plan not in self._lacking:
            _, memory = predict_step(request.profile, plan, self.schedule_name(plan), request.batching)
            most = max(memory)
            worker, needs, has = plan.coordinate(memory.index(most)), most / 2**20, limit / 2**20
            text = f"{worker} would need {needs:,.1f} MiB for its blocks, and a worker has {has:,.1f} MiB"
            self._lacking[plan] = text if most > limit else ""
        return self._lacking[plan]

    def held_pieces(self, plan: ParallelPlan) -> tuple[tuple[Piece, ...], ...]:
        """By rank: the pieces of state that a worker holds under the plan."""
        found = self._held.get(plan)
        if found is None:
            found = self._held[plan] = tuple(Ownership(plan, self.request.outline).held)
        return found

    def _lowered(self, plan: ParallelPlan) -> tuple[ProgramAssignment, ...]:
        request = self.request
        outline, routing = request.outline, MicrobatchRouting(plan, request.batching)
        crossing = outline.crossing(plan)
        made = registry.build_schedule(self.schedule_name(plan), routing, connections=crossing)
        return assign_programs_to_ranks(
            made, plan, crossing, request.batching, request.validation_batching, layouts=outline.layouts, pool=self._pool
        )

    @property
    def _pool(self) -> GradientPool:
        """The memory of a stage for gradients that are scattered."""
        profile, outline = self.request.profile, self.request.outline
        sizes = zip(profile.layers, outline.elements, strict=False)
        itemsize = 8 if any(layer.reduced_bytes > 4 * sum(own.values()) for layer, own in sizes) else 4
        return GradientPool(profile.reduction_buffer_bytes, outline, itemsize)

    def memory(self, plan: ParallelPlan, rank: int) -> tuple[str, str]:
        """Two texts about a worker that ran out of memory: what it holds, and which plan would fit."""
        return out_of_memory_advice(self.request.profile, plan, self.schedule_name(plan), self.request.batching, rank)

    def passes(self, plan: ParallelPlan) -> tuple[int, ...]:
        """By rank: the forward passes of a worker in a step, one for each microbatch and chunk."""
        if plan not in self._passes:
            routing = MicrobatchRouting(plan, self.request.batching)
            self._passes[plan] = tuple(
                sum(len(routing.microbatches_of_worker(stage, rank)) for stage in plan.stages_of(rank))
                for rank in range(plan.world)
            )
        return self._passes[plan]

    def predicted_step_s(self, plan: ParallelPlan) -> float:
        """The predicted time of a step under the plan."""
        if plan not in self._step_s:
            request = self.request
            timeline, _ = predict_step(request.profile, plan, self.schedule_name(plan), request.batching)
            self._step_s[plan] = timeline.makespan_ms / 1000
        return self._step_s[plan]
