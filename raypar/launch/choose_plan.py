"""Chooses the plan that a run starts with, for a checked job; describes it in words and as `plan.json`."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from raypar.errors import PlanError
from raypar.files.json_type import Json
from raypar.job import Job
from raypar.plan import MicrobatchRouting, ParallelPlan
from raypar.plan.offloading import apply_offload_policy
from raypar.plan.recomputation import RecomputePolicy, apply_recompute_policy
from raypar.plan.wording import count_noun
from raypar.record.stages_of_plan import stages_as_data
from raypar.schedule.gathering import MOST_STAGES_TOGETHER

if TYPE_CHECKING:
    from raypar.job import Job, PlanConfig
    from raypar.model.graph import Graph
    from raypar.plan import Microbatches, StageConnections
    from raypar.planner.memory_sheet import MemorySheet
    from raypar.planner.model_profile import ModelProfile
    from raypar.planner.plan_search import PlanChoice
    from raypar.planner.predicted_step import MakeSchedule
    from raypar.planner.stage_balance import StageBalance
    from raypar.schedule.instructions import Schedule
    from raypar.schedule.step_timeline import Timeline
    from raypar.worker.job_preflight import PreflightResult


@dataclass(frozen=True)
class ChosenPlan:
    """A plan with its schedule, its predicted step, and why it was chosen."""

    plan: ParallelPlan
    """Which worker holds which layers."""
    schedule_name: str
    """The schedule's name, for messages; `schedule_instructions` is what runs."""
    schedule_instructions: Schedule
    """The instructions of every worker, in order."""
    predicted: Timeline
    """The step as the simulator predicts it."""
    profile: ModelProfile
    """Times and sizes of the layers, from which the step was predicted."""
    why: str = ""
    """The planner's reasons, one or more lines; empty for a plan that was given with its split points."""
    balance: StageBalance | None = None
    """Which split points were chosen, and why; None for a plan that gives them itself."""
    memory: tuple[MemorySheet, ...] = ()
    """By rank: the memory that the worker is predicted to hold; empty if it cannot be predicted."""
    warnings: tuple[str, ...] = ()
    """Lines for the user: checks of the plan that could compare nothing."""
    choice: PlanChoice | None = None
    """All plans that the planner has compared; None for a plan that was given."""


SHORT_STEP_MS = 20.0
"""Predicted step below which the planner's reasons are two lines: plans of a tiny model differ by a few ms."""


PlanChooser = Callable[["PreflightResult"], ChosenPlan]
"""Chooses the plan of a job whose model and data have been checked."""


def plan_of_job(job: Job, graph: Graph) -> ParallelPlan:
    """The plan that a job gives, with the layers that are recomputed, and those that are offloaded."""
    names = [layer.name for layer in graph.layers]
    plan = apply_recompute_policy(job.to_plan(names), job.recompute, names)
    return _with_offloaded_layers(plan, job, names)


def _with_offloaded_layers(plan: ParallelPlan, job: Job, names: Sequence[str]) -> ParallelPlan:
    """The plan with the layers that the job offloads. Raises `PlanError` for a plan with such layers, without a place."""
    plan = apply_offload_policy(plan, job.offload, names)
    if plan.offload and job.activations_in is None:
        raise PlanError(
            f"the plan offloads the activations of {count_noun(len(plan.offload), 'layer')}, and plan.activations_in is not "
            "given: they have no place",
            cure="give a folder on a local disk, in the section plan of a job; patterns of layers are plan.offload",
        )
    return plan


def choose_plan(
    spec: Job,
    checked: PreflightResult,
    plan: Callable[[Sequence[str]], ParallelPlan] | None,
    schedule: str,
    workers: int,
    make_schedule: MakeSchedule | None = None,
    recompute: RecomputePolicy = "none",
    *,
    balanced: bool = False,
) -> ChosenPlan:
    """The given plan with its predicted step; without `plan`, the planner's choice for `workers` workers, with its reasons.

    `plan`: makes the plan from the names of the layers. `make_schedule`: makes the schedule, where
    the name alone is not enough (a file, a warmup). `recompute`: layers of the given plan to recompute; `none`: those
    that the plan has itself. `balanced`: the plan gives no split points, so measured times decide them.
    """
    from raypar.planner.offload_advice import lines_about_activations
    from raypar.planner.plan_report import stage_balance_text
    from raypar.planner.plan_search import balance_stages
    from raypar.planner.predicted_step import predict_step
    from raypar.worker.check_model_can_shard import check_model_can_shard

    spec = checked.job
    fixed = plan([layer.name for layer in checked.graph.layers]) if plan is not None else None
    warnings: tuple[str, ...] = ()
    if fixed is None and spec.virtual_shards > 1:
        any_plan = ParallelPlan.mesh(layers=len(checked.graph.layers)).with_virtual_shards(spec.virtual_shards)
        warnings = check_model_can_shard(spec, checked, any_plan)
    if fixed is not None:
        names = [layer.name for layer in checked.graph.layers]
        fixed = _with_offloaded_layers(apply_recompute_policy(fixed, recompute, names), spec, names)
        warnings = check_model_can_shard(spec, checked, fixed)
    profile = _profile(spec, checked, fixed, workers)
    if fixed is None:
        return _planners_choice(spec, profile, workers, warnings)
    why: list[str] = []
    balance = None
    if balanced and fixed.has_movable_split_points:
        balance = balance_stages(profile, fixed, make_schedule or schedule, spec.batching)
        fixed = balance.plan
        why.append(stage_balance_text(balance))
    fixed, line = choose_what_is_open(spec, checked.graph, profile, fixed, make_schedule or schedule)
    why += [line] if line else []
    made = _make_schedule(spec, checked.graph, make_schedule or schedule, fixed)
    timeline, _ = predict_step(profile, fixed, made, spec.batching)
    memory = predict_memory(profile, fixed, made, spec.batching)
    by_name = schedule if make_custom_schedule_builder(spec) is None else made
    warnings += (
        *lines_about_saving(fixed, spec),
        *lines_about_activations(profile, fixed, made, spec.batching, memory),
        *check_memory(profile, fixed, by_name, spec, memory),
    )
    return ChosenPlan(fixed, schedule, made, timeline, profile, "\n".join(why), balance, memory, warnings)


def _make_schedule(spec: Job, graph: Graph, schedule: str | MakeSchedule, plan: ParallelPlan) -> Schedule:
    from raypar.schedule import registry

    routing, crossing = MicrobatchRouting(plan, spec.batching), graph.crossing(plan)
    return (
        registry.build_schedule(schedule, routing, connections=crossing)
        if isinstance(schedule, str)
        else schedule(routing, crossing)
    )


def choose_what_is_open(
    spec: Job, graph: Graph, profile: ModelProfile, plan: ParallelPlan, schedule: str | MakeSchedule
) -> tuple[ParallelPlan, str]:
    """The job's plan with what its section leaves to the planner (ZeRO stage, gathers, recomputation, gradients), and why, in
    lines; empty where nobody has to be told."""
    from raypar.planner.fit_to_memory import fit_to_memory
    from raypar.planner.gradient_route import choose_gradient_route
    from raypar.worker.make_worker_assignments import gradient_pool

    pool, is_asked = partial(gradient_pool, spec, graph), spec.asks_for_gradients
    if spec.leaves_zero_open:
        return fit_to_memory(
            profile,
            plan,
            schedule,
            spec.batching,
            pool,
            scatter_is_open=spec.leaves_gradients_open,
            recompute_is_open=spec.leaves_recompute_open,
            is_asked=is_asked,
        )
    if spec.leaves_gradients_open:
        return choose_gradient_route(profile, plan, schedule, spec.batching, pool, is_asked=is_asked)
    return plan, ""


def _profile(spec: Job, checked: PreflightResult, fixed: ParallelPlan | None, workers: int) -> ModelProfile:
    """The job's profile for its plan; None: for any that the planner may choose for `workers` workers."""
    from raypar.worker.measure_profile import profile_job

    profile = profile_job(
        spec,
        workers=fixed.world if fixed is not None else workers,
        graph=checked.graph,
        shards=fixed.virtual_shard_counts if fixed is not None else {spec.virtual_shards or 1},
        recompute=fixed.recompute if fixed is not None and not spec.leaves_recompute_open else None,
    )
    if checked.optimizer is None:
        return profile
    profile = replace(profile, most_stages=checked.optimizer.most_stages)
    divides = spec.leaves_zero_open or (fixed is not None and fixed.most_zero)
    return profile.with_undivided(checked.optimizer.undivided) if divides else profile


def check_memory(
    profile: ModelProfile, plan: ParallelPlan, schedule: str | Schedule, spec: Job, memory: Sequence[MemorySheet]
) -> tuple[str, ...]:
    """A line where the largest worker of a plan is predicted to hold more than its part of this machine's free memory; none
    where it fits. `memory`: the plan's sheets.

    Raises `PlanError` where it is more than the job says that a worker may use.
    """
    from raypar.planner.memory_sheet import describe_changes_that_fit
    from raypar.planner.plan_search import format_mib

    limit = profile.memory_bytes
    largest = max(range(len(memory)), key=lambda rank: memory[rank].total, default=None)
    if limit is None or largest is None or memory[largest].total <= limit:
        return ()
    what = f"the plan does not fit: {plan.coordinate(largest)} is predicted to hold {memory[largest]}"
    advice = describe_changes_that_fit(profile, plan, schedule, spec.batching, limit)
    if spec.worker_memory_bytes is not None:
        raise PlanError(f"{what}; placement.worker_memory_mib is {spec.placement.worker_memory_mib:,g}", cure=advice)
    return (f"{what}; each worker's part of this machine's free memory is {format_mib(limit)}\n  cure: {advice}",)


def lines_about_saving(plan: ParallelPlan, spec: Job) -> tuple[str, ...]:
    """Lines about keys with which a plan saves less memory than they are there for."""
    return (*lines_about_zero(plan, spec), *lines_about_gather(plan), *lines_about_gradients(plan))


def lines_about_zero(plan: ParallelPlan, spec: Job) -> tuple[str, ...]:
    """A line for a plan whose ZeRO stage has nothing to divide, or whose parts of state have no second copy; none otherwise."""
    level, holders = max(plan.zero_levels), plan.zero_holders
    if level and holders > 1 and any(1 < stage.replicas <= holders for stage in plan.stages if stage.zero):
        return (
            f"plan.zero_holders is {holders}, and a stage has {holders} replicas: each holds everything, and nothing is saved "
            f"(of {holders + 1} replicas each would hold {holders} parts of {holders + 1})",
        )
    if plan.most_zero and holders == 1 and spec.elastic is not None and spec.elastic.mirror == "off":
        return (
            f"plan.zero is {level}, and elastic.mirror is off: each replica's part of the state has no other copy, so the loss "
            "of any worker takes all back to the last checkpoint",
        )
    if not level or plan.most_zero:
        return ()
    return (f"plan.zero is {level}, and no stage has replicas to divide state: each worker keeps all of its own",)


def lines_about_gradients(plan: ParallelPlan) -> tuple[str, ...]:
    """A line for a plan that scatters gradients where no stage has replicas; none otherwise."""
    if plan.gradients == "fold" or any(stage.replicas > 1 for stage in plan.stages):
        return ()
    return ("plan.gradients is scatter, and no stage has replicas: each worker adds up all gradients of its own, as with fold",)


def lines_about_gather(plan: ParallelPlan) -> tuple[str, ...]:
    """A line for a plan whose parameters come and go by microbatch where no worker has so many stages that some are gone; none
    otherwise."""
    counts = [
        sum(plan.stages[stage].gather_in_effect == "microbatch" for stage in plan.stages_of(rank)) for rank in range(plan.world)
    ]
    most = max(counts)
    if not 0 < most <= MOST_STAGES_TOGETHER:
        return ()
    have = "each worker has one stage, whose" if most == 1 else f"no worker has more than {most} stages, whose"
    return (
        f"plan.gather is microbatch, and {have} parameters are whole together: it needs no less memory than step (layer does, "
        "or more plan.chunks)",
    )


def _planners_choice(spec: Job, profile: ModelProfile, workers: int, warnings: tuple[str, ...]) -> ChosenPlan:
    """The planner's choice for `workers` workers, with its reasons."""
    from raypar.planner.plan_report import plan_report, short_plan_report
    from raypar.planner.plan_search import search_plans
    from raypar.planner.predicted_step import predict_step
    from raypar.schedule import registry

    shards = 0 if spec.virtual_shards else 1  # any, or none
    choice = search_plans(profile, workers, spec.batching, shards, virtual_shards=spec.virtual_shards, zero=None)
    warnings += lines_about_zero(choice.plan, spec)
    timeline, _ = predict_step(profile, choice.plan, choice.schedule, spec.batching)
    routing, crossing = MicrobatchRouting(choice.plan, spec.batching), profile.crossing(choice.plan)
    made = registry.build_schedule(choice.schedule, routing, connections=crossing)
    memory = predict_memory(profile, choice.plan, made, spec.batching)
    why = short_plan_report(choice) if timeline.makespan_ms < SHORT_STEP_MS else plan_report(choice)
    return ChosenPlan(choice.plan, choice.schedule, made, timeline, profile, why, None, memory, warnings, choice)


def predict_memory(
    profile: ModelProfile, plan: ParallelPlan, schedule: Schedule, batching: Microbatches
) -> tuple[MemorySheet, ...]:
    """By rank: the memory that a worker is predicted to hold; empty if the profile does not suffice for a prediction."""
    from raypar.errors import RayparError
    from raypar.planner.memory_sheet import memory_sheets

    try:
        return memory_sheets(profile, plan, schedule, batching)
    except RayparError:
        return ()


def make_plan_chooser(job: Job, workers: int | None = None) -> PlanChooser:
    """A function that chooses the plan as a job asks for it. `workers`: the most that the planner may use; None: the job's."""
    from raypar.job import PlanConfig

    config = job.plan
    if not isinstance(config, PlanConfig):
        return lambda checked: choose_plan(job, checked, None, "", workers or job.workers)
    name, make_schedule = config.schedule_file or config.schedule, make_schedule_builder(config)
    balanced = config.cuts is None and not config.placements
    return lambda checked: choose_plan(
        job, checked, job.to_plan, name, job.workers, make_schedule, job.recompute, balanced=balanced
    )


def make_custom_schedule_builder(job: Job) -> MakeSchedule | None:
    """Makes the job's schedule, if its name alone does not determine it (a file, a warmup); else None."""
    from raypar.job import PlanConfig

    if not isinstance(job.plan, PlanConfig) or (job.plan.schedule_file is None and job.plan.warmup is None):
        return None
    return make_schedule_builder(job.plan)


def make_schedule_builder(config: PlanConfig) -> MakeSchedule:
    """A function that makes the schedule of a plan section: from a file, which is read at once, or by name and warmup."""
    from raypar.files.untrusted_files import SCHEDULE_BYTES, read_limited_text
    from raypar.schedule.offloading import insert_offloading
    from raypar.schedule.recomputation import insert_recomputation
    from raypar.schedule.schedule_csv import parse_schedule_csv

    if config.schedule_file is not None:
        cure = "name a schedule file; `raypar simulate --csv F` writes one"
        schedule = parse_schedule_csv(
            read_limited_text(Path(config.schedule_file), follow=True, limit=SCHEDULE_BYTES, cure=cure)
        )
        return lambda routing, crossing: insert_offloading(insert_recomputation(schedule, routing.plan), routing.plan)
    return partial(_build_by_name, config)


def _build_by_name(config: PlanConfig, routing: MicrobatchRouting, crossing: StageConnections) -> Schedule:
    from raypar.schedule import registry

    return registry.build_schedule(config.schedule, routing, warmup=config.warmup, connections=crossing)


def describe_chosen_plan(chosen: ChosenPlan) -> str:
    """The plan in words, with the planner's reasons below.

    `4 workers = 2 stages x 2 replicas, schedule 1f1b; predicted step 85 ms, bubble 11 %`
    """
    plan = chosen.plan
    bubble = 100 * chosen.predicted.bubble_of_total
    text = (
        f"{count_noun(plan.world, 'worker')} = {plan.describe()}, schedule {chosen.schedule_name}"
        f"{describe_recomputation(plan, chosen.schedule_instructions)}"
        f"{describe_offloading(plan, chosen.schedule_instructions)}; "
        f"predicted step {chosen.predicted.makespan_ms:.0f} ms, bubble {bubble:.0f} %"
        + (f" ({chosen.profile.lengths})" if chosen.profile.lengths else "")
    )
    return f"{text}\n{chosen.why}" if chosen.why else text


def idle_replicas_text(plan: ParallelPlan, batching: Microbatches) -> str | None:
    """A warning, with its cure, about replicas that get no microbatches in any step; None if every replica gets some."""
    takes_turns = plan.gradients == "scatter"  # replicas take microbatches, whatever the blocks
    most = max(stage.replicas for stage in plan.stages)
    blocks = batching.count if takes_turns else min(batching.blocks, batching.count)
    if most <= blocks:
        return None
    idle = sum(max(0, stage.replicas - blocks) * stage.shards for stage in plan.stages)
    one_each = takes_turns or batching.blocks >= batching.count
    in_blocks = f"{batching.count} microbatches in {count_noun(blocks, 'block')} (virtual_replicas)"
    parts = count_noun(blocks, "microbatch", "microbatches") if one_each else in_blocks
    return (
        f"plan.replicas is {most}, and a step has {parts}: {idle} of {count_noun(plan.world, 'worker')} get none and compute "
        f"nothing\n  cure: set plan.replicas <= {blocks}, or {'microbatches' if one_each else 'virtual_replicas'} >= {most} "
        "(which changes the results)"
    )


def describe_recomputation(plan: ParallelPlan, schedule: Schedule) -> str:
    """What a plan recomputes under a schedule, as text to append to its description; empty if it recomputes nothing."""
    from raypar.schedule.recomputation import describe_stages_not_worth_recomputing, stages_not_worth_recomputing

    kept = stages_not_worth_recomputing(schedule, plan)
    here = sum(len(plan.recomputed_layers(stage)) for stage in kept)
    return _describe_layers(", recomputing", plan.recompute, here, plan, describe_stages_not_worth_recomputing(kept))


def describe_offloading(plan: ParallelPlan, schedule: Schedule) -> str:
    """What a plan offloads under a schedule, as text to append to its description; empty if it offloads nothing."""
    from raypar.schedule.offloading import describe_stages_not_worth_offloading, stages_not_worth_offloading

    kept = stages_not_worth_offloading(schedule, plan)
    here = sum(len(plan.offloaded_layers(stage)) for stage in kept)
    return _describe_layers(", offloading activations of", plan.offload, here, plan, describe_stages_not_worth_offloading(kept))


def _describe_layers(what: str, layers: Sequence[int], kept: int, plan: ParallelPlan, why_kept: str) -> str:
    """How many layers of a plan something is done with, as text; empty for none. `kept`: how many of `layers` are left out, and
    `why_kept`, if any."""
    beside = f" ({why_kept})" if kept else ""
    return f"{what} {len(layers) - kept} of {plan.stages[-1].last} layers{beside}" if layers else ""


def plan_json(chosen: ChosenPlan) -> str:
    """The text of a run folder's plan.json: schedule, stages, workers, layers, and the predicted step and memory."""
    from raypar.planner.plan_report import (
        layers_as_dicts,
        plan_report_as_dict,
        processors_of_prediction,
        stage_balance_as_dict,
    )

    facts: dict[str, Json] = {
        "schedule": chosen.schedule_name,
        "stages": stages_as_data(chosen.plan),
        "workers": [chosen.plan.coordinate(rank) for rank in range(chosen.plan.world)],
    }
    if chosen.plan.recompute:
        facts["recompute"] = list(chosen.plan.recompute)
    if chosen.plan.offload:
        facts["offload"] = list(chosen.plan.offload)
    facts["layers"] = layers_as_dicts(chosen.profile)
    facts |= {"predicted_ms": chosen.predicted.makespan_ms, "predicted_bubble": chosen.predicted.bubble_of_total}
    facts["predicted_for"] = processors_of_prediction(chosen.profile.processors, chosen.plan.world, chosen.profile.lengths)
    if chosen.memory:
        facts["predicted_memory_bytes"] = [sheet.by_kind for sheet in chosen.memory]
    if chosen.balance is not None:
        facts["stage_balance"] = stage_balance_as_dict(chosen.balance)
    if chosen.choice is not None:
        facts["candidates"] = plan_report_as_dict(chosen.choice)["candidates"]
    return json.dumps(facts, indent=1) + "\n"
