"""A plan as data: what each worker holds and does, what shards cut, the predicted step and memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from raypar.files.json_type import Json
from raypar.plan import GradientRelay, Microbatches, MicrobatchRouting, ParallelPlan, Role, StageConnections, StageEdge
from raypar.plan.bundle_parts import network_bytes, node_of_each_replica
from raypar.plan.layer_patterns import describe_layers
from raypar.plan.stage_plan import GATHER_SPANS
from raypar.plan.wording import count_noun

if TYPE_CHECKING:
    from torch import Tensor

    from raypar.job import Job
    from raypar.launch.plan_to_show import ShownPlan
    from raypar.model.graph import Graph
    from raypar.model.layer_skeletons import LayerSize
    from raypar.planner.branch_advice import BranchAdvice
    from raypar.planner.memory_sheet import HoldersSheet
    from raypar.planner.model_profile import ModelProfile
    from raypar.schedule.instructions import Schedule


def shown_plan_as_dict(shown: ShownPlan, job: Job, graph: Graph) -> dict[str, Json]:
    """All that `raypar plan` says of a plan, as data for `--json`; `graph`: of the job's model."""
    import torch

    from raypar.model.layer_skeletons import layer_sizes
    from raypar.planner.branch_advice import advise_on_branches
    from raypar.planner.plan_report import plan_report_as_dict, stage_balance_as_dict

    plan, sizes = shown.plan, layer_sizes(graph, getattr(torch, job.dtype))
    held = layer_sizes_by_shard(graph, job, plan, sizes)
    found = plan_as_dict(plan, shown.name, job.batching, sizes, shown.profile, shown.schedule, held, graph.crossing(plan))
    found |= shards_as_dict(graph, job, plan, sizes, shown.batch)
    found["workers_share_caches"] = workers_share_caches(job.device, shown.profile, plan.world)
    if shown.balance is not None:
        found["stage_balance"] = stage_balance_as_dict(shown.balance)
    if shown.why:
        found["why_zero"] = shown.why
    if shown.notes:
        found["about_saving"] = list(shown.notes)
    if shown.profile is not None and any(stage.replicas > 1 for stage in plan.stages):
        found["gradient_bytes"] = gradient_bytes_as_dict(shown.profile, plan, job.batching)
    if shown.choice is not None:
        found["choice"] = plan_report_as_dict(shown.choice)
    if shown.profile is not None:
        workers = plan.world if shown.choice is None else shown.choice.workers
        advice = advise_on_branches(shown.profile, plan, found["predicted_ms"], job.batching, workers)
        if advice is not None:
            found["branches"] = branch_advice_as_dict(advice, [layer.name for layer in graph.layers])
    return found


def gradient_bytes_as_dict(profile: ModelProfile, plan: ParallelPlan, microbatches: Microbatches) -> dict[str, Json]:
    """What replicas send each other of gradients in a step: the plan's way, and the bytes of either."""
    from raypar.plan.gradient_traffic import gradient_traffic
    from raypar.plan.ownership import Ownership

    state = profile.state_on_shards(plan.virtual_shard_counts)
    found = gradient_traffic(Ownership(plan, state.outline), microbatches, state.by_tensor["gradient"])
    return {"route": plan.gradients, "fold": found.fold, "scatter": found.scatter}


def workers_share_caches(device: str, profile: ModelProfile | None, workers: int) -> bool:
    """Whether a step is predicted of workers that compute at once on the CPUs of one machine. `profile`: None if of none."""
    return device == "cpu" and workers > 1 and profile is not None and (profile.processors or 1) > 1


def branch_advice_as_dict(advice: BranchAdvice, layers: Sequence[str]) -> dict[str, Json]:
    """What is said of a model's parallel branches as data. `layers`: their names."""
    placements: list[Json] = [
        {"layers": list(layers[stage.first : stage.last]), "workers": [list(row) for row in stage.workers]}
        for stage in advice.plan.stages
    ]
    return {
        "branches_ms": advice.branches_ms,
        "replicas_ms": advice.replicas_ms,
        "plan_ms": advice.plan_ms,
        "is_placed": advice.is_placed,
        "replicas_win": advice.replicas_win,
        "workers": advice.workers,
        "microbatches": advice.microbatches,
        "placements": placements,
    }


def plan_as_dict(
    plan: ParallelPlan,
    name: str,
    cut: Microbatches,
    sizes: tuple[LayerSize, ...],
    profile: ModelProfile | None,
    schedule: Schedule | None = None,
    held: Mapping[tuple[int, int], tuple[LayerSize, ...]] | None = None,
    connections: StageConnections | None = None,
) -> dict[str, Any]:
    """The plan as data, under the schedule called `name` or the user's own `schedule`.

    `sizes`: of each layer; `held`: what a worker holds of each layer, by (number of shards, shard).
    """
    from raypar.schedule import registry

    routing = MicrobatchRouting(plan, cut)
    orders = registry.build_schedule(name, routing, connections=connections) if schedule is None else schedule
    workers = [worker_part_as_dict(plan, routing, rank, sizes, held) for rank in range(plan.world)]
    found: dict[str, Any] = {
        "plan": f"{count_noun(plan.world, 'worker')} = {plan.describe()}",
        "schedule": name,
        "microbatches": cut.count,
        "virtual_replicas": cut.blocks,
        "virtual_shards": max(plan.virtual_shard_counts),
        "parameters": sum(layer.parameters for layer in sizes),
        **activations_as_dict(plan, orders, [layer.name for layer in sizes]),
        "workers": workers,
        "imbalance": max(role["share"] for worker in workers for role in worker["roles"]) - 1,
    }
    if profile is not None:
        found |= prediction_as_dict(profile, routing, name if schedule is None else schedule, orders)
    return found


def prediction_as_dict(
    profile: ModelProfile, routing: MicrobatchRouting, schedule: str | Schedule, orders: Schedule
) -> dict[str, Any]:
    """The predicted step of a plan and its memory as data. `schedule`: its name, or its `orders`."""
    from raypar.planner.memory_sheet import describe_changes_that_fit, memory_sheets, sheets_by_holders
    from raypar.planner.offload_advice import lines_about_activations
    from raypar.planner.plan_report import processors_of_prediction
    from raypar.planner.predicted_step import predict_step

    plan, cut = routing.plan, routing.microbatches
    timeline, memory = predict_step(profile, plan, schedule, cut)
    sheets = memory_sheets(profile, plan, schedule, cut)
    found: dict[str, Any] = {
        "between_stages": stage_messages_as_dicts(routing, profile.crossing(plan)),
        "memory_sheet": [sheet.by_kind for sheet in sheets],
        "mirror_file_bytes": [sheet.mirror_files for sheet in sheets],
        "activation_file_bytes": [sheet.activation_files for sheet in sheets],
        "activation_host_bytes": [sheet.activation_host for sheet in sheets],
        "about_offloading": list(lines_about_activations(profile, plan, orders, cut, sheets)),
        "optimizer_file_bytes": [sheet.optimizer_files for sheet in sheets],
        "gathers": gathers_as_dicts(profile, plan, orders),
        "holders": [holders_as_dict(each) for each in sheets_by_holders(profile, plan, schedule, cut)],
        "predicted_ms": timeline.makespan_ms,
        "predicted_for": processors_of_prediction(profile.processors, plan.world, profile.lengths),
        "price_of_virtual_shards": profile.price_of_virtual_shards,
        "bubble_of_ideal": timeline.bubble_of_ideal,
        "bubble_of_total": timeline.bubble_of_total,
        "memory_bytes": list(memory),
        "latency_ms": profile.link.latency_ms,
        "bandwidth_bytes_per_ms": profile.link.bandwidth,
    }
    if profile.memory_bytes is not None and max(memory) > profile.memory_bytes:
        advice = describe_changes_that_fit(profile, plan, schedule, cut, profile.memory_bytes)
        found["does_not_fit"] = {"worker_bytes": profile.memory_bytes, "advice": advice}
    return found


def gathers_as_dicts(profile: ModelProfile, plan: ParallelPlan, orders: Schedule) -> list[dict[str, Json]]:
    """By rank, what its gathers of parameters send in a step, and what they would send once a step; empty where no replicas
    divide parameters."""
    from raypar.planner.gathered_parameters import gather_traffic

    spans = {span for stage in plan.stages if (span := stage.gather_in_effect) is not None}
    if not spans:
        return []
    by_span, by_step = (gather_traffic(profile, each, orders) for each in (plan, plan.with_gather("step")))
    return [
        {
            "spans": sorted(spans, key=GATHER_SPANS.index),
            "gathers": now.gathers,
            "received_bytes": now.received,
            "sent_bytes": now.sent,
            "received_once_bytes": once.received,
        }
        for now, once in zip(by_span, by_step, strict=True)
    ]


def activations_as_dict(plan: ParallelPlan, schedule: Schedule, names: Sequence[str]) -> dict[str, Json]:
    """Which layers a plan recomputes and offloads, and which stages do not under a schedule, as data. `names`: of layers."""
    from raypar.schedule.offloading import stages_not_worth_offloading
    from raypar.schedule.recomputation import stages_not_worth_recomputing

    return {
        "recompute": list(plan.recompute),
        "recomputed": describe_layers(plan.recompute, names),
        "stages_that_keep_activations": list(stages_not_worth_recomputing(schedule, plan)),
        "offload": list(plan.offload),
        "offloaded": describe_layers(plan.offload, names),
        "stages_that_offload_nothing": list(stages_not_worth_offloading(schedule, plan)),
    }


def holders_as_dict(found: HoldersSheet) -> dict[str, Json]:
    """What the largest worker holds with some number of holders of each part of divided state, as data."""
    return {
        "holders": found.holders,
        "mirror": found.is_mirrored,
        "divided_bytes": found.divided_bytes,
        "mirror_bytes": found.sheet.mirror + found.sheet.mirror_files,
        "memory_bytes": found.sheet.total,
    }


def stage_messages_as_dicts(routing: MicrobatchRouting, connections: StageConnections) -> list[dict[str, Json]]:
    """What one stage gives another, with its bytes for one microbatch, and how often it goes to another worker in a step.

    `network_bytes`: what goes from node to node in a step, if each replica is on a node of its own, and whether in parts.
    """
    values: list[tuple[str, StageEdge | GradientRelay]] = [("values", edge) for edge in connections.edges]
    found = list[dict[str, Json]]()
    for what, carrier in values + [("gradients", relay) for relay in connections.relays]:
        nbytes, in_parts = network_bytes(routing, carrier, node_of_each_replica(routing.plan))
        row: dict[str, Json] = {"what": what, "from": carrier.src, "to": carrier.dst, "bytes": carrier.nbytes}
        row |= {"messages": routing.messages(carrier.src, carrier.dst), "network_bytes": nbytes, "in_parts": in_parts}
        found.append(row)
    return found


def worker_part_as_dict(
    plan: ParallelPlan,
    routing: MicrobatchRouting,
    rank: int,
    sizes: tuple[LayerSize, ...],
    held: Mapping[tuple[int, int], tuple[LayerSize, ...]] | None,
) -> dict[str, Any]:
    """One worker's part of the plan as data, with what it is in its first grid; `roles` has all."""
    roles, stages = plan.roles[rank], plan.stages_of(rank)
    chunks = []
    for place, role in ((plan.stages[s], plan.role_in(rank, s)) for s in stages):
        runs = [held[place.virtual_shards, v] for v in place.run_of(role.shard)] if held is not None else [sizes]
        chunks.append(add_sizes([of_virtual_shard[place.first : place.last] for of_virtual_shard in runs]))
    layers = [layer for chunk in chunks for layer in chunk]
    return {
        "rank": rank,
        "roles": [role_as_dict(plan, routing, role) for role in roles],
        "layers": [[layer.name for layer in chunk] for chunk in chunks],
        "parameters": sum(layer.parameters for layer in layers),
        "parameter_bytes": sum(layer.nbytes for layer in layers),
        **role_as_dict(plan, routing, roles[0]),
        "stages": list(stages),
    }


def add_sizes(parts: Sequence[Sequence[LayerSize]]) -> list[LayerSize]:
    """By layer: what several virtual shards hold of it together."""
    if len(parts) == 1:
        return list(parts[0])
    return [
        replace(each[0], parameters=sum(one.parameters for one in each), nbytes=sum(one.nbytes for one in each))
        for each in zip(*parts, strict=True)
    ]


def role_as_dict(plan: ParallelPlan, routing: MicrobatchRouting, role: Role) -> dict[str, Any]:
    """What a worker is in one grid. `share`: its microbatches over the mean of the grid's replicas."""
    stage, grid = plan.stages_of_grid[role.grid][0], plan.grids[role.grid]
    mine = len(routing.microbatches_of_replica(stage, role.replica))
    return {
        "stages": list(plan.stages_of_grid[role.grid]),
        "position": role.grid,
        "replica": role.replica,
        "shard": role.shard,
        "shards": len(grid[0]),
        "virtual_shards": list(plan.stages[stage].run_of(role.shard)),
        "blocks": None if routing.scatters(stage) else len(routing.blocks_of_replica(stage, role.replica)),
        "microbatches": mine,
        "share": mine * len(grid) / routing.microbatches.count,
    }


def shards_as_dict(
    graph: Graph, spec: Job, plan: ParallelPlan, sizes: Sequence[LayerSize], batch: Mapping[str, Tensor] | None
) -> dict[str, Json]:
    """What is cut over shards, what travels, what is whole on each of them, why, and the bytes of all parameters."""
    from raypar.model.tensor_parallel.infer_styles_by_structure import reasons_for_whole

    cut = shard_style_by_layer(graph, spec, plan)
    return {
        "divides_samples": max(plan.virtual_shard_counts) > 1 and dict(spec.layout).get("samples") == "shards",
        "cut": cut,
        "travels": traffic_as_dicts(graph, spec, plan, batch),
        "whole_on_every_shard": whole_bytes_on_shards(graph, spec, plan),
        "why_whole": reasons_for_whole(graph),
        "parameter_bytes": sum(size.nbytes for size in sizes),
    }


def shard_style_by_layer(graph: Graph, spec: Job, plan: ParallelPlan) -> dict[str, str]:
    """Layer name -> style, for layers in stages with shards."""
    from raypar.model.tensor_parallel.compute_shard_layout import compute_shard_layout

    most = max(plan.virtual_shard_counts)
    if most == 1:
        return {}
    is_on_shards = layers_on_shards(graph, plan)
    styles = compute_shard_layout(graph, most, dict(spec.styles), dict(spec.layout)).styles
    return {name: str(style) for name, style in styles.items() if is_on_shards(name)}


def layers_on_shards(graph: Graph, plan: ParallelPlan) -> Callable[[str], bool]:
    """A function of a module's name: whether its stage has shards."""
    sharded = {graph.layers[i].name for s in plan.stages if s.virtual_shards > 1 for i in range(s.first, s.last)}
    names = sorted((layer.name for layer in graph.layers), key=len, reverse=True)  # a block may hold layers, and be one
    return lambda name: next((owner for owner in names if name == owner or name.startswith(f"{owner}.")), "") in sharded


def traffic_as_dicts(graph: Graph, spec: Job, plan: ParallelPlan, batch: Mapping[str, Tensor] | None) -> list[dict[str, Json]]:
    """What layers of stages with shards send over them for each microbatch. Bytes are known where all is computed in one dtype,
    and those of statistics."""
    import torch

    from raypar.model.tensor_parallel.compute_shard_layout import compute_shard_layout
    from raypar.model.tensor_parallel.shard_traffic import layer_traffic

    if max(plan.virtual_shard_counts) == 1:
        return []
    is_on_shards = layers_on_shards(graph, plan)
    layout = compute_shard_layout(graph, max(plan.virtual_shard_counts), dict(spec.styles), dict(spec.layout))
    rows = layer_traffic(graph, layout, batch, sequence=spec.sequence_parallel, dtype=getattr(torch, spec.dtype))
    return [
        {
            "layers": list(row.layers),
            "dimension": row.dimension,
            "operation": row.collective.operation,
            "direction": row.collective.direction,
            "value": row.collective.value,
            "formula": row.collective.formula,
            "numbers": row.numbers,
            "bytes": row.nbytes if spec.precision is None or row.collective.value == "statistics" else None,
        }
        for row in rows
        if is_on_shards(row.layers[0])
    ]


def layer_sizes_by_shard(
    graph: Graph, spec: Job, plan: ParallelPlan, sizes: tuple[LayerSize, ...]
) -> dict[tuple[int, int], tuple[LayerSize, ...]]:
    """What is held of each layer, by (number of virtual shards, virtual shard). Raises `PlanError` for styles that do not
    fit."""
    from raypar.model.tensor_parallel.compute_shard_layout import compute_shard_layout, held_elements_by_layer

    found = {(1, 0): sizes}
    for shards in plan.virtual_shard_counts - {1}:
        layout = compute_shard_layout(graph, shards, dict(spec.styles), dict(spec.layout))
        for shard in range(shards):
            counts = held_elements_by_layer(graph, layout, shard)
            found[shards, shard] = tuple(
                replace(whole, parameters=count, nbytes=whole.nbytes // max(1, whole.parameters) * count)
                for whole, count in zip(sizes, counts, strict=True)
            )
    return found


def whole_bytes_on_shards(graph: Graph, spec: Job, plan: ParallelPlan) -> dict[str, int]:
    """Layer -> bytes of its parameters that every shard holds whole, for stages with shards, the most bytes first.

    Of a layer that is cut in part, and of the model itself, the parameters are named: `block0.down.bias`.
    """
    import torch

    from raypar.model.layer_skeletons import parameter_shapes
    from raypar.model.tensor_parallel.compute_shard_layout import compute_shard_layout
    from raypar.plan.stage_connections import owner_of

    most = max(plan.virtual_shard_counts)
    if most == 1:
        return {}
    layout = compute_shard_layout(graph, most, dict(spec.styles), dict(spec.layout))
    itemsize = getattr(torch, spec.dtype).itemsize
    cut_layers = {owner_of(name) for name in layout.cuts}
    found: dict[str, int] = {}
    seen: set[str] = set()
    for stage in plan.stages:
        shapes = parameter_shapes(graph, stage.first, stage.last) if stage.virtual_shards > 1 else {}
        for name in shapes.keys() - layout.cuts.keys() - seen:
            seen.add(name)
            owner = owner_of(name)
            shown = name if owner in cut_layers or not owner else owner
            found[shown] = found.get(shown, 0) + shapes[name].numel() * itemsize
    return dict(sorted(found.items(), key=lambda item: (-item[1], item[0])))
