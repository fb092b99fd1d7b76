"""`raypar plan JOB`: shows the plan of a job without training: placement, memory, predicted step, the planner's reasons."""

from __future__ import annotations

import argparse
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from raypar.errors import ConfigError
from raypar.plan import Microbatches, MicrobatchRouting, ParallelPlan, StageConnections
from raypar.plan.recomputation import describe_recomputed_layers
from raypar.plan.wording import count_noun

if TYPE_CHECKING:
    from raypar.job import Job
    from raypar.model.graph import Graph
    from raypar.model.layer_skeletons import LayerSize
    from raypar.planner.model_profile import ModelProfile
    from raypar.planner.plan_search import PlanChoice
    from raypar.planner.stage_balance import StageBalance
    from raypar.schedule.instructions import Schedule
    from raypar.schedule.step_timeline import Timeline

MOST_WHOLE_GROUPS = 8
"""Groups of layers that the line on what shards hold whole names; it says how many more there are."""
MOST_REASONS = 3
"""Most lines on why layers stay whole."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `raypar plan`."""
    parser.add_argument("job", help="job file (YAML)")
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="a.b=c", help="override a job key")
    parser.add_argument("--workers", type=int, help="choose a plan for at most so many workers, whatever the job's plan says")
    parser.add_argument("--no-profile", action="store_true", help="do not time the layers: sizes only, at once")
    parser.add_argument(
        "--memory", type=float, metavar="MIB", help="what a worker has, in MiB, in place of this machine's free memory"
    )
    parser.add_argument("--svg", metavar="F", type=Path, help="draw the predicted step as a swimlane")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Print stages, layers, replicas, sizes per worker, the imbalance of blocks and the predicted step; exit code 0."""
    from raypar.console.json_stdout import json_stdout

    with json_stdout(args.json) as out:
        return show_plan(args, out)


def show_plan(args: argparse.Namespace, out: TextIO) -> int:
    """See `run`; prints to `out`."""
    from raypar.job.read_job import load_job
    from raypar.model.layer_skeletons import layer_sizes
    from raypar.planner.plan_search import predict_step
    from raypar.user_code.user_code_errors import make_importable
    from raypar.worker.worker_assignments import make_layer_graph, make_layer_graph_without_values

    check_numbers_of_arguments(args)
    job = load_job(args.job, args.overrides)
    make_importable(job.source_dir)
    spec = job
    graph = make_layer_graph_without_values(spec) if args.no_profile else make_layer_graph(spec)
    choose = args.workers is not None or job.plan_is_auto
    if args.no_profile:
        refuse_no_profile(choose, args.svg, args.memory)
    import torch

    sizes = layer_sizes(graph, getattr(torch, spec.dtype))
    shown = (
        choose_plan_to_show(job, spec, graph, args.workers, args.memory)
        if choose
        else job_plan_to_show(job, spec, graph, not args.no_profile, args.memory)
    )
    plan, name, profile = shown.plan, shown.name, shown.profile
    found = plan_as_dict(
        plan, name, spec.batching, sizes, profile, shown.schedule, layer_sizes_by_shard(graph, spec, plan, sizes)
    )
    found |= shards_as_dict(graph, spec, plan, sizes)
    parts = [plan_as_text(found), spec.precision_in_words or ""]
    if profile is not None:
        timeline, _ = predict_step(profile, plan, shown.schedule or name, spec.batching)
        parts.append(predicted_step_text(timeline))
        if args.svg is not None:
            write_predicted_step_svg(
                args.svg, f"{job.name}: {found['plan']}, schedule {name}", timeline, profile.crossing(plan)
            )
    if shown.balance is not None:
        from raypar.planner.plan_report import stage_balance_as_dict, stage_balance_text

        found["stage_balance"] = stage_balance_as_dict(shown.balance)
        parts.append(stage_balance_text(shown.balance))
    elif args.no_profile and job.leaves_cuts_open and plan.has_movable_split_points:
        parts.append("stages cut by number of layers; without --no-profile, and in a run, measured times decide")
    if shown.choice is not None:
        from raypar.planner.plan_report import plan_report, plan_report_as_dict

        found["choice"] = plan_report_as_dict(shown.choice)
        parts.append(plan_report(shown.choice))
    if args.json:
        print(json.dumps(found), file=out, flush=True)
        return 0
    print("\n\n".join(part for part in parts if part), flush=True)
    if args.svg is not None:
        print(f"wrote {args.svg}")
    return 0


def check_numbers_of_arguments(args: argparse.Namespace) -> None:
    """Raise `ConfigError` for a number of workers or MiB that none can have."""
    if args.workers is not None and args.workers < 1:
        raise ConfigError(f"--workers {args.workers}", cure="give 1 worker or more")
    if args.memory is not None and not 0 < args.memory < math.inf:
        raise ConfigError(f"--memory {args.memory:g}", cure="give what a worker has, in MiB")


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


def choose_plan_to_show(job: Job, spec: Job, graph: Graph, workers: int | None, memory_mib: float | None = None) -> ShownPlan:
    """The planner's choice for `workers` workers (None: the job's number). Raises `ConfigError` for fewer than its shards.

    `memory_mib`: what a worker has; None: its part of this machine's free memory.
    """
    from raypar.plan.recomputation import resolve_recomputed_layers
    from raypar.planner.plan_search import search_plans
    from raypar.worker.job_preflight import try_optimizer_of_job
    from raypar.worker.measure_profile import profile_job

    workers, shards = workers or job.workers, _shards_of(job)
    if workers < shards:
        raise ConfigError(
            f"{count_noun(workers, 'worker')} for a job whose layers are cut over {shards} shards",
            cure=f"give --workers {shards} or more",
        )
    recompute = resolve_recomputed_layers(job.recompute, [layer.name for layer in graph.layers])
    profile = profile_job(spec, workers=workers, graph=graph, shards={shards}, recompute=recompute or None)
    trial = try_optimizer_of_job(spec, graph)
    profile = replace(with_memory(profile, memory_mib), most_stages=trial.most_stages if trial is not None else None)
    choice = search_plans(profile, workers, spec.batching, shards, recompute)
    return ShownPlan(choice.plan, choice.schedule, profile, choice=choice)


def with_memory(profile: ModelProfile, memory_mib: float | None) -> ModelProfile:
    """The profile for workers with so much memory; None: as it was measured."""
    return profile if memory_mib is None else replace(profile, memory_bytes=round(memory_mib * 2**20))


def job_plan_to_show(job: Job, spec: Job, graph: Graph, with_profile: bool, memory_mib: float | None = None) -> ShownPlan:
    """The plan that the job gives, with its layers cut as a run cuts them if they are timed (`with_profile`).

    `memory_mib`: what a worker has; None: its part of this machine's free memory. Raises `PlanError` if layers cannot be cut
    over its shards.
    """
    from raypar.launch.chosen_plan import make_custom_schedule_builder
    from raypar.plan.recomputation import apply_recompute_policy
    from raypar.planner.plan_search import balance_stages
    from raypar.schedule.validate import validate_schedule
    from raypar.worker.job_preflight import check_model_can_shard, preflight, try_optimizer_of_job
    from raypar.worker.measure_profile import profile_job

    plan = apply_recompute_policy(job.to_plan(len(graph.layers)), job.recompute, [layer.name for layer in graph.layers])
    build = make_custom_schedule_builder(job)
    profile, counts = None, {stage.shards for stage in plan.stages}
    schedule, routing = None, MicrobatchRouting(plan, spec.batching)
    if build is not None:
        schedule = build(routing)
        validate_schedule(schedule, routing, graph.crossing(plan))
    if with_profile:
        if (trial := try_optimizer_of_job(spec, graph)) is not None:
            trial.check_plan(plan)
        if max(counts) > 1 or spec.styles:
            check_model_can_shard(spec, preflight(spec), plan)
        profile = profile_job(spec, workers=plan.world, graph=graph, shards=counts, recompute=plan.recompute)
        profile = with_memory(profile, memory_mib)
        if job.leaves_cuts_open and plan.has_movable_split_points:
            balance = balance_stages(profile, plan, build or job.schedule_name, spec.batching)
            schedule = build(MicrobatchRouting(balance.plan, spec.batching)) if build is not None else None
            return ShownPlan(balance.plan, job.schedule_name, profile, schedule, balance=balance)
    return ShownPlan(plan, job.schedule_name, profile, schedule)


def _shards_of(job: Job) -> int:
    """The job's number of shards, which the planner keeps because results depend on it."""
    from raypar.job import PlanConfig

    return max(job.plan.shards_per_stage) if isinstance(job.plan, PlanConfig) else 1


def predicted_step_text(timeline: Timeline) -> str:
    """The predicted step as text, a row per worker; empty if the terminal is too narrow."""
    import shutil

    from raypar.commands.simulate import timeline_text_for_width

    return timeline_text_for_width(timeline, shutil.get_terminal_size((120, 24)).columns) or ""


def write_predicted_step_svg(file: Path, title: str, timeline: Timeline, crossing: StageConnections) -> None:
    """Draw the predicted step as an SVG with a lane per worker. Raises `ConfigError` if the file cannot be written."""
    from raypar.draw.swimlane_svg import swimlane_svg
    from raypar.files.atomic_write import write_text_atomically
    from raypar.schedule.data_flow import message_routes

    routes = message_routes(crossing)
    write_text_atomically(file, swimlane_svg(timeline, title=title, subtitle="predicted", routes=routes))


def shard_style_by_layer(graph: Graph, spec: Job, plan: ParallelPlan) -> dict[str, str]:
    """Layer name -> style, for layers in stages with shards."""
    from raypar.model.tensor_parallel.layout import compute_shard_layout

    most = max(stage.shards for stage in plan.stages)
    if most == 1:
        return {}
    sharded = {graph.layers[i].name for s in plan.stages if s.shards > 1 for i in range(s.first, s.last)}
    styles = compute_shard_layout(graph, most, dict(spec.styles)).styles
    return {name: str(style) for name, style in styles.items() if any(name == o or name.startswith(f"{o}.") for o in sharded)}


def layer_sizes_by_shard(
    graph: Graph, spec: Job, plan: ParallelPlan, sizes: tuple[LayerSize, ...]
) -> dict[tuple[int, int], tuple[LayerSize, ...]]:
    """What a worker holds of each layer, by (number of shards, shard). Raises `PlanError` for styles that do not fit."""
    from raypar.model.tensor_parallel.layout import compute_shard_layout, held_elements_by_layer

    found = {(1, 0): sizes}
    for shards in {stage.shards for stage in plan.stages} - {1}:
        layout = compute_shard_layout(graph, shards, dict(spec.styles))
        for shard in range(shards):
            counts = held_elements_by_layer(graph, layout, shard)
            found[shards, shard] = tuple(
                replace(whole, parameters=count, nbytes=whole.nbytes // max(1, whole.parameters) * count)
                for whole, count in zip(sizes, counts, strict=True)
            )
    return found


def plan_as_dict(
    plan: ParallelPlan,
    name: str,
    cut: Microbatches,
    sizes: tuple[LayerSize, ...],
    profile: ModelProfile | None,
    schedule: Schedule | None = None,
    held: Mapping[tuple[int, int], tuple[LayerSize, ...]] | None = None,
) -> dict[str, Any]:
    """The plan as data, under the schedule called `name` or the user's own `schedule`.

    `sizes`: of each layer; `held`: what a worker holds of each layer, by (number of shards, shard).
    """
    from raypar.schedule import registry
    from raypar.schedule.recomputation import stages_not_worth_recomputing

    routing = MicrobatchRouting(plan, cut)
    orders = registry.build_schedule(name, routing) if schedule is None else schedule
    workers = [worker_part_as_dict(plan, routing, rank, sizes, held) for rank in range(plan.world)]
    found: dict[str, Any] = {
        "plan": f"{count_noun(plan.world, 'worker')} = {plan.describe()}",
        "schedule": name,
        "microbatches": cut.count,
        "virtual_replicas": cut.blocks,
        "parameters": sum(layer.parameters for layer in sizes),
        "recompute": list(plan.recompute),
        "recomputed": describe_recomputed_layers(plan.recompute, [layer.name for layer in sizes]),
        "stages_that_keep_activations": list(stages_not_worth_recomputing(orders, plan)),
        "workers": workers,
        "imbalance": max(w["share"] for w in workers) - 1,
    }
    if profile is not None:
        from raypar.planner.memory_sheet import describe_changes_that_fit, memory_sheets
        from raypar.planner.plan_report import processors_of_prediction
        from raypar.planner.plan_search import predict_step

        timeline, memory = predict_step(profile, plan, schedule or name, cut)
        predicted_for = processors_of_prediction(profile.processors, plan.world)
        sheets = memory_sheets(profile, plan, schedule or name, cut)
        if profile.memory_bytes is not None and max(memory) > profile.memory_bytes:
            advice = describe_changes_that_fit(profile, plan, schedule or name, cut, profile.memory_bytes)
            found["does_not_fit"] = {"worker_bytes": profile.memory_bytes, "advice": advice}
        found |= {
            "memory_sheet": [{**sheet.state, **sheet.kept} for sheet in sheets],
            "predicted_ms": timeline.makespan_ms,
            "predicted_for": predicted_for,
            "bubble_of_ideal": timeline.bubble_of_ideal,
            "bubble_of_total": timeline.bubble_of_total,
            "memory_bytes": list(memory),
            "latency_ms": profile.link.latency_ms,
            "bandwidth_bytes_per_ms": profile.link.bandwidth,
        }
    return found


def worker_part_as_dict(
    plan: ParallelPlan,
    routing: MicrobatchRouting,
    rank: int,
    sizes: tuple[LayerSize, ...],
    held: Mapping[tuple[int, int], tuple[LayerSize, ...]] | None,
) -> dict[str, Any]:
    """One worker's part of the plan as data. `share`: its microbatches over the mean of its position's replicas."""
    seat, stages = plan.seats[rank], plan.stages_of(rank)
    mine_of = held[plan.stages[stages[0]].shards, seat.shard] if held is not None else sizes
    chunks = [mine_of[plan.stages[s].first : plan.stages[s].last] for s in stages]
    layers = [layer for chunk in chunks for layer in chunk]
    mine = len(routing.microbatches_of_replica(stages[0], seat.replica))
    return {
        "rank": rank,
        "position": seat.position,
        "replica": seat.replica,
        "shard": seat.shard,
        "shards": plan.stages[stages[0]].shards,
        "stages": list(stages),
        "layers": [[layer.name for layer in chunk] for chunk in chunks],
        "parameters": sum(layer.parameters for layer in layers),
        "parameter_bytes": sum(layer.nbytes for layer in layers),
        "blocks": len(routing.blocks_of_replica(stages[0], seat.replica)),
        "microbatches": mine,
        "share": mine * plan.stages[stages[0]].replicas / routing.microbatches.count,
    }


def group_similar_layers(styles: Mapping[str, str]) -> list[str]:
    """Layers with their styles; names that differ only in numbers are grouped: `block*.fc1 column (4)`."""
    groups: dict[tuple[str, str], list[str]] = {}
    for name, style in styles.items():
        groups.setdefault((re.sub(r"[0-9]+", "*", name), style), []).append(name)
    return [
        f"{_common_pattern(names)} {style}".rstrip() + (f" ({len(names)})" if len(names) > 1 else "")
        for (_, style), names in groups.items()
    ]


def _common_pattern(names: Sequence[str]) -> str:
    """The names with `*` for each number in which they differ: `block*.fc1` for `block0.fc1` and `block1.fc1`."""
    texts, numbers = re.split(r"[0-9]+", names[0]), [re.findall(r"[0-9]+", name) for name in names]
    common = [found[0] if len(set(found)) == 1 else "*" for found in zip(*numbers, strict=True)]
    return "".join(part for pair in zip_longest(texts, common, fillvalue="") for part in pair)


def whole_bytes_on_shards(graph: Graph, spec: Job, plan: ParallelPlan) -> dict[str, int]:
    """Layer -> bytes of its parameters that every shard holds whole, for stages with shards, the most bytes first.

    Of a layer that is cut in part, and of the model itself, the parameters are named: `block0.down.bias`.
    """
    import torch

    from raypar.model.layer_skeletons import parameter_shapes
    from raypar.model.tensor_parallel.layout import compute_shard_layout
    from raypar.plan.stage_connections import owner_of

    most = max(stage.shards for stage in plan.stages)
    if most == 1:
        return {}
    layout, itemsize = compute_shard_layout(graph, most, dict(spec.styles)), getattr(torch, spec.dtype).itemsize
    cut_layers = {owner_of(name) for name in layout.cuts}
    found: dict[str, int] = {}
    seen: set[str] = set()
    for stage in plan.stages:
        shapes = parameter_shapes(graph, stage.first, stage.last) if stage.shards > 1 else {}
        for name in shapes.keys() - layout.cuts.keys() - seen:
            seen.add(name)
            owner = owner_of(name)
            shown = name if owner in cut_layers or not owner else owner
            found[shown] = found.get(shown, 0) + shapes[name].numel() * itemsize
    return dict(sorted(found.items(), key=lambda item: (-item[1], item[0])))


def shards_as_dict(graph: Graph, spec: Job, plan: ParallelPlan, sizes: Sequence[LayerSize]) -> dict[str, Any]:
    """What is cut over shards, what is whole on each of them, why, and the bytes of all parameters."""
    from raypar.model.tensor_parallel.infer_styles_by_structure import reasons_for_whole

    return {
        "cut": shard_style_by_layer(graph, spec, plan),
        "whole_on_every_shard": whole_bytes_on_shards(graph, spec, plan),
        "why_whole": reasons_for_whole(graph),
        "parameter_bytes": sum(size.nbytes for size in sizes),
    }


def whole_on_shards_line(whole: Mapping[str, int], parameter_bytes: int) -> str:
    """The largest layers of `whole_bytes_on_shards`, the MiB of all, and their share of the model's parameters."""
    groups = group_similar_layers(dict.fromkeys(whole, ""))
    more = f" and {len(groups) - MOST_WHOLE_GROUPS} more" if len(groups) > MOST_WHOLE_GROUPS else ""
    mib = sum(whole.values()) / 2**20
    return (
        f"whole on every shard: {', '.join(groups[:MOST_WHOLE_GROUPS])}{more}; {mib:.{1 if mib >= 10 else 3}f} MiB in all, "
        f"{100 * sum(whole.values()) / max(1, parameter_bytes):.1f} % of the parameters"
    )


def why_whole_lines(whole: Mapping[str, int], reasons: Mapping[str, str]) -> list[str]:
    """A line for each reason why layers of `whole_bytes_on_shards` stay whole, with these layers; at most `MOST_REASONS`."""
    known = {name: reasons[name] for name in whole if name in reasons}
    alike: dict[str, list[str]] = {}
    for name, why in known.items():
        alike.setdefault(why, []).append(name)
    return [
        f"  {', '.join(group_similar_layers(dict.fromkeys(names, '')))}: {why}"
        for why, names in list(alike.items())[:MOST_REASONS]
    ]


def plan_as_text(found: dict[str, Any]) -> str:
    """The plan as text for the terminal. `found`: from `plan_as_dict`."""
    workers = found["workers"]
    lines = [
        f"{found['plan']}, schedule {found['schedule']}, {found['microbatches']} microbatches in "
        f"{found['virtual_replicas']} blocks, {found['parameters']:,} parameters"
    ]
    rows: list[tuple[str, ...]] = [
        ("worker", "stages", "replica", "shard", "layers", "parameters", "MiB", "microbatches", "memory MiB")
    ]
    for worker in workers:
        layers = " + ".join(c[0] if len(c) == 1 else f"{c[0]} .. {c[-1]} ({len(c)})" for c in worker["layers"])
        memory = f"{found['memory_bytes'][worker['rank']] / 2**20:.1f}" if "memory_bytes" in found else ""
        rows.append(
            (
                str(worker["rank"]),
                ",".join(map(str, worker["stages"])),
                str(worker["replica"]),
                f"{worker['shard']} of {worker['shards']}" if worker["shards"] > 1 else "",
                layers,
                f"{worker['parameters']:,}",
                f"{worker['parameter_bytes'] / 2**20:.1f}",
                str(worker["microbatches"]),
                memory,
            )
        )
    if all(worker["shards"] == 1 for worker in workers):
        rows = [row[:3] + row[4:] for row in rows]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines += ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows]
    if found.get("cut"):
        lines.append(f"cut over shards (tensor parallel): {', '.join(group_similar_layers(found['cut']))}")
    if found.get("whole_on_every_shard"):
        lines.append(whole_on_shards_line(found["whole_on_every_shard"], found["parameter_bytes"]))
        lines += why_whole_lines(found["whole_on_every_shard"], found["why_whole"])
    lines += recomputation_lines(found)
    if found["imbalance"] > 0.005:
        lines.append(
            f"the busiest worker has {100 * found['imbalance']:.0f} % more microbatches than its replicas have on average: "
            "let replicas divide microbatches and virtual_replicas"
        )
    idle = sum(worker["microbatches"] == 0 for worker in workers)
    if idle:
        lines.append(
            f"{idle} workers have no block: there are more replicas than virtual_replicas ({found['virtual_replicas']})"
        )
    if "predicted_ms" in found:
        lines.append(
            f"predicted step {found['predicted_ms']:.1f} ms, bubble {100 * found['bubble_of_total']:.1f} % of all time "
            f"(for {found['predicted_for']}; layers timed on this machine; {found['latency_ms']:.2f} ms and "
            f"{found['bandwidth_bytes_per_ms'] / 1e6:.2f} GB/s between workers)"
        )
        lines += ["", *memory_sheet_lines(found)]
    return "\n".join(lines)


def recomputation_lines(found: dict[str, Any]) -> list[str]:
    """The line that says what is recomputed; none without recomputation. `found`: from `plan_as_dict`."""
    from raypar.schedule.recomputation import describe_stages_not_worth_recomputing

    if not found["recomputed"]:
        return []
    kept = describe_stages_not_worth_recomputing(found["stages_that_keep_activations"])
    return [f"plan.recompute names {found['recomputed']}{f'; {kept}' if kept else ''}"]


def memory_sheet_lines(found: dict[str, Any]) -> list[str]:
    """The memory sheet as a table, a line per worker; then what would fit, if the plan does not. `found`: from
    `plan_as_dict`."""
    from raypar.plan.ownership import STATE_KIND_NOUNS
    from raypar.planner.memory_sheet import KEPT_NOUNS

    nouns: dict[str, str] = {**{str(kind): noun for kind, noun in STATE_KIND_NOUNS.items()}, **KEPT_NOUNS}
    sheets: list[dict[str, int]] = found["memory_sheet"]
    kinds = [kind for kind in sheets[0] if any(sheet[kind] for sheet in sheets)]
    rows = [("memory in MiB", *(nouns[kind] for kind in kinds), "in all")]
    for rank, sheet in enumerate(sheets):
        numbers = (*(sheet[kind] for kind in kinds), sum(sheet.values()))
        rows.append((f"worker {rank}", *(f"{nbytes / 2**20:.1f}" for nbytes in numbers)))
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [
        "  ".join(cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True)))
        for row in rows
    ]
    if "does_not_fit" in found:
        most, has = max(found["memory_bytes"]), found["does_not_fit"]["worker_bytes"]
        lines.append(
            f"this plan does not fit: worker {found['memory_bytes'].index(most)} needs {most / 2**20:,.1f} MiB, a worker has "
            f"{has / 2**20:,.1f} MiB; {found['does_not_fit']['advice']}"
        )
    return lines
