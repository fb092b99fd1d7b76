"""Finds the plan that `raypar plan` shows: the job's own, or the one that the planner chooses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from raypar.errors import ConfigError
from raypar.launch.choose_plan import (
    choose_what_is_open,
    lines_about_saving,
    make_custom_schedule_builder,
    plan_of_job,
)
from raypar.launch.unspoken_end_of_checks import spoken_for
from raypar.plan import MicrobatchRouting, ParallelPlan
from raypar.plan.offloading import resolve_offloaded_layers
from raypar.plan.recomputation import resolve_recomputed_layers
from raypar.plan.stage_plan import GatherSpan, shortest_span
from raypar.plan.wording import count_noun

if TYPE_CHECKING:
    from torch import Tensor

    from raypar.job import Job
    from raypar.model.graph import Graph
    from raypar.planner.model_profile import ModelProfile
    from raypar.planner.plan_search import PlanChoice
    from raypar.planner.stage_balance import StageBalance
    from raypar.schedule.instructions import Schedule


@dataclass(frozen=True)
class ShownPlan:
    """The plan to show, from the job or from the planner."""

    plan: ParallelPlan
    name: str
    """The schedule's name."""
    profile: ModelProfile | None
    """Times and sizes of the layers; None with `--no-profile`."""
    schedule: Schedule | None = None
    """The schedule itself, where its name alone does not say it."""
    choice: PlanChoice | None = None
    """What the planner weighed up; None for the job's own plan."""
    balance: StageBalance | None = None
    """Where the layers of a plan without `cuts` were cut, and why; None for other plans."""
    batch: Mapping[str, Tensor] | None = None
    """The first microbatch, where layers are cut over shards and a profile was made."""
    why: str = ""
    """Why it has its ZeRO stage, and its way of gradients, where the job leaves that open."""
    notes: tuple[str, ...] = ()
    """Lines about keys with which the plan saves less memory than they are there for."""


def refuse_no_profile(choose: bool, svg: Path | None, memory: float | None = None) -> None:
    """Raise `ConfigError` if `--no-profile` is given with something that needs a profile."""
    if choose:
        raise ConfigError(
            "a plan cannot be chosen without a profile", cure="leave out --no-profile, or name stages and replicas"
        )
    if svg is not None:
        raise ConfigError("a step cannot be predicted without a profile", cure="leave out --no-profile, or --svg")
    if memory is not None:
        raise ConfigError("memory cannot be predicted without a profile", cure="leave out --no-profile, or --memory")


def find_plan_to_show(
    job: Job, workers: int | None, memory_mib: float | None, svg: Path | None, *, with_profile: bool
) -> tuple[ShownPlan, Graph]:
    """The plan to show, and the layer graph of the job's model.

    `workers`: for which the planner chooses; None: it does only if the job says so. `memory_mib`: what a worker has; None: its
    part of this machine's free memory. `svg`: where the step shall be drawn. Raises `ConfigError` for what needs a profile
    where there is none, `PlanError` if layers cannot be cut over the shards.
    """
    from raypar.user_code.user_code_errors import make_importable
    from raypar.worker.layer_graph_of_job import make_layer_graph, make_layer_graph_without_values

    make_importable(job.source_dir)
    with spoken_for(f"the model {job.model.label}") as now_checking:
        graph = make_layer_graph(job) if with_profile else make_layer_graph_without_values(job)
        choose = workers is not None or job.plan_is_auto
        if not with_profile:
            refuse_no_profile(choose, svg, memory_mib)
        now_checking(f"how long the layers of {job.model.label} take, for the plan")
        if choose:
            return choose_plan_to_show(job, graph, workers, memory_mib), graph
        return job_plan_to_show(job, graph, with_profile, memory_mib), graph


def choose_plan_to_show(job: Job, graph: Graph, workers: int | None, memory_mib: float | None = None) -> ShownPlan:
    """The planner's choice for `workers` workers (None: the job's number). Raises `ConfigError` for fewer than its shards.

    `memory_mib`: what a worker has; None: its part of this machine's free memory.
    """
    from raypar.planner.plan_search import search_plans
    from raypar.worker.job_preflight import preflight
    from raypar.worker.measure_profile import profile_job
    from raypar.worker.try_optimizer_of_job import try_optimizer_of_job

    workers, shards = workers or job.workers, _shards_of(job)
    if workers < shards and not job.virtual_shards:
        raise ConfigError(
            f"{count_noun(workers, 'worker')} for a job whose layers are cut over {shards} shards",
            cure=f"give --workers {shards} or more",
        )
    names = [layer.name for layer in graph.layers]
    recompute = resolve_recomputed_layers(job.recompute, names)
    offload = resolve_offloaded_layers(job.offload, names, recompute)
    cut_into = job.virtual_shards or shards
    profile = profile_job(job, workers=workers, graph=graph, shards={cut_into}, recompute=recompute or None)
    trial = try_optimizer_of_job(job, graph)
    profile = replace(profile_with_memory(profile, memory_mib), most_stages=trial.most_stages if trial is not None else None)
    any_shards = 0 if job.virtual_shards else shards
    zero, holders, gather = given_zero_of(job)
    if trial is not None:
        profile = profile.with_undivided(trial.undivided)
    virtual = job.virtual_shards
    choice = search_plans(profile, workers, job.batching, any_shards, recompute, virtual, zero, holders, gather, offload)
    batch = preflight(job).batch if max(choice.plan.virtual_shard_counts) > 1 else None
    return ShownPlan(choice.plan, choice.schedule, profile, choice=choice, batch=batch)


def profile_with_memory(profile: ModelProfile, memory_mib: float | None) -> ModelProfile:
    """The profile for workers with so much memory; None: as it was measured."""
    return profile if memory_mib is None else replace(profile, memory_bytes=round(memory_mib * 2**20))


def job_plan_to_show(job: Job, graph: Graph, with_profile: bool, memory_mib: float | None = None) -> ShownPlan:
    """The plan that the job gives, with its layers cut as a run cuts them if they are timed (`with_profile`).

    `memory_mib`: what a worker has; None: its part of this machine's free memory. Raises `PlanError` if layers cannot be cut
    over its shards.
    """
    from raypar.planner.plan_search import balance_stages
    from raypar.schedule.program_assignment import check_programs_run
    from raypar.worker.check_model_can_shard import check_model_can_shard
    from raypar.worker.job_preflight import preflight
    from raypar.worker.make_worker_assignments import gradient_pool
    from raypar.worker.measure_profile import profile_job
    from raypar.worker.try_optimizer_of_job import try_optimizer_of_job

    plan = plan_of_job(job, graph)
    build = make_custom_schedule_builder(job)
    profile, batch, counts = None, None, plan.virtual_shard_counts
    schedule, routing = None, MicrobatchRouting(plan, job.batching)
    if build is not None:
        schedule = build(routing, graph.crossing(plan))
        check_programs_run(schedule, routing, graph.crossing(plan), gradient_pool(job, graph, plan))
    if with_profile:
        if (trial := try_optimizer_of_job(job, graph)) is not None:
            trial.check_plan(plan)
            if job.optimizer_in is not None:
                trial.check_steps_in_windows()
        if max(counts) > 1 or job.styles or job.layout:
            checked = preflight(job)
            check_model_can_shard(job, checked, plan)
            batch = checked.batch
        recompute = None if job.leaves_recompute_open else plan.recompute
        profile = profile_job(job, workers=plan.world, graph=graph, shards=counts, recompute=recompute)
        profile = profile_with_memory(profile, memory_mib)
        if trial is not None:
            profile = replace(profile, most_stages=trial.most_stages)
            if plan.most_zero or job.leaves_zero_open:
                profile = profile.with_undivided(trial.undivided)
        balance = None
        if job.leaves_cuts_open and plan.has_movable_split_points:
            balance = balance_stages(profile, plan, build or job.schedule_name, job.batching)
            plan = balance.plan
            if build is not None:
                schedule = build(MicrobatchRouting(plan, job.batching), graph.crossing(plan))
        plan, why = choose_what_is_open(job, graph, profile, plan, build or job.schedule_name)
        if build is not None:
            schedule = build(MicrobatchRouting(plan, job.batching), graph.crossing(plan))
        notes = lines_about_saving(plan, job)
        return ShownPlan(plan, job.schedule_name, profile, schedule, balance=balance, batch=batch, why=why, notes=notes)
    return ShownPlan(plan, job.schedule_name, profile, schedule, batch=batch)


def given_zero_of(job: Job) -> tuple[int | None, int, GatherSpan]:
    """(the highest ZeRO stage that the job gives, or None: the planner chooses it; the number of holders of each part; for how
    long parameters are whole)."""
    from raypar.job import PlanConfig

    if not isinstance(job.plan, PlanConfig):
        return None, 1, "step"
    level, spans = job.plan.given_zero, job.plan.given_gather
    highest = max(level if isinstance(level, tuple) else (level,))
    return highest or None, job.plan.zero_holders, shortest_span(spans if isinstance(spans, tuple) else (spans,))


def _shards_of(job: Job) -> int:
    """The job's number of shards, which the planner keeps because results depend on it."""
    from raypar.job import PlanConfig

    return max(job.plan.shards_per_stage) if isinstance(job.plan, PlanConfig) else 1
