"""The plans of a run: what is chosen for how many workers, under which schedule, and what each worker is told of it."""

from __future__ import annotations

import threading

from raypar.actors.run_request import RunRequest
from raypar.elastic import events as on
from raypar.errors import PlanError
from raypar.plan import ParallelPlan, Routing
from raypar.planner.memory_sheet import out_of_memory_advice
from raypar.planner.plan_search import possible_shards, predict_step, search_plans
from raypar.schedule import registry
from raypar.schedule.assignment import Assignment, assign


class PlanCache:
    """Called from any thread; what has been computed once is kept."""

    def __init__(self, request: RunRequest) -> None:
        self.request = request
        self.schedules: dict[ParallelPlan, str] = {request.plan: request.schedule_name}
        self._found: dict[int, ParallelPlan | PlanError] = {request.plan.world: request.plan}
        """By workers; as many as the job asks for have the job's own plan."""
        self._passes: dict[ParallelPlan, tuple[int, ...]] = {}
        self._lock = threading.Lock()

    def choose(self, generation: int, workers: int, now: ParallelPlan | None) -> on.PlanChosen:
        """The best plan for up to that many workers, and how long its steps take beside those of `now`."""
        found = self._for(workers)
        if isinstance(found, PlanError):
            return on.PlanChosen(generation, None, found.what)
        return on.PlanChosen(generation, found, "", self._step_s(found), self._step_s(now) if now is not None else 0.0)

    def prepare(self, workers: int) -> None:
        """Find the plan for that many workers before it is needed."""
        self._for(workers)

    def _for(self, workers: int) -> ParallelPlan | PlanError:
        with self._lock:
            found = self._found.get(workers)
            if found is None:
                found = self._searched(workers)
                self._found[workers] = found
            return found

    def _searched(self, workers: int) -> ParallelPlan | PlanError:
        """With as many shards as the job asks for, as long as there are workers for them: with fewer the bits are others."""
        most = max(stage.shards for stage in self.request.plan.stages)
        shards = next(n for n in possible_shards(self.request.plan) if most % n == 0 and n <= max(1, workers))
        try:
            choice = search_plans(self.request.profile, workers, self.request.cut, shards)
        except PlanError as error:
            return error
        self.schedules.setdefault(choice.plan, choice.schedule)
        return choice.plan

    def schedule(self, plan: ParallelPlan) -> str:
        """The one the plan was chosen with, else the job's, where the plan has the stages for it."""
        for name in (self.schedules.get(plan), self.request.schedule_name, "1f1b"):
            if name is not None and registry.can_run(name, plan):
                self.schedules[plan] = name
                return name
        return "interleaved"

    def why(self, plan: ParallelPlan) -> str:
        """Why `schedule` is that one, in a few words."""
        if self.schedule(plan) == self.request.schedule_name:
            return "the job's own"
        if plan in list(self._found.values()):
            return f"predicted to be the fastest with {plan.world} worker{'s' * (plan.world > 1)}"
        return "the job's own does not fit this plan"

    def assignments(self, plan: ParallelPlan) -> tuple[Assignment, ...]:
        """By rank."""
        request = self.request
        made = registry.build_schedule(self.schedule(plan), Routing(plan, request.cut))
        outline = request.outline
        return assign(made, plan, outline.crossing(plan), request.cut, request.validation_cut, layouts=outline.layouts)

    def memory(self, plan: ParallelPlan, rank: int) -> tuple[str, str]:
        """What a worker holds, and what would fit where it does not."""
        return out_of_memory_advice(self.request.profile, plan, self.schedule(plan), self.request.cut, rank)

    def passes(self, plan: ParallelPlan) -> tuple[int, ...]:
        """By rank: how many microbatches it takes through its stages in a step, those of each chunk counted."""
        if plan not in self._passes:
            routing = Routing(plan, self.request.cut)
            self._passes[plan] = tuple(
                sum(len(routing.of_replica(stage, seat.replica)) for stage in plan.stages_of(rank))
                for rank, seat in enumerate(plan.seats)
            )
        return self._passes[plan]

    def _step_s(self, plan: ParallelPlan) -> float:
        request = self.request
        made = registry.build_schedule(self.schedule(plan), Routing(plan, request.cut))
        timeline, _ = predict_step(request.profile, plan, made, request.cut)
        return timeline.makespan_ms / 1000
