"""What one plan's step takes: its time by simulation, the bytes that are kept, the bytes of the state."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from raypar.plan import Microbatches, MicrobatchRouting, ParallelPlan, StageConnections, StagePlan
from raypar.plan.addition_tree import covering_nodes
from raypar.plan.gradient_exchange import buffer_elements
from raypar.plan.ownership import SHARED_OUT_FROM, StateKind
from raypar.planner.gathered_parameters import (
    bytes_that_travel_together,
    first_gather_ms,
    gather_ms,
    gathered_bytes,
    ms_with_gathers,
)
from raypar.planner.model_profile import LayerProfile, LinkProfile, ModelProfile
from raypar.planner.offloaded_activations import offload_times, offloaded_keys, unwritten_limits
from raypar.planner.open_gradient_sums import open_sums
from raypar.schedule import registry
from raypar.schedule.instructions import (
    ACTIVATIONS,
    FETCHED,
    KEPT_INPUTS,
    KEPT_SIZE,
    RESIDENT,
    STASH,
    UNOFFLOADED,
    WRITTEN,
    Schedule,
    splits_backward,
)
from raypar.schedule.simulate import SimulationCosts, simulate_schedule
from raypar.schedule.step_timeline import KeptBytes, Timeline

MakeSchedule = Callable[[MicrobatchRouting, StageConnections], Schedule]
"""Makes the orders of a plan's workers, of its routing and the connections between its stages."""


def predict_step(
    profile: ModelProfile,
    plan: ParallelPlan,
    schedule: str | Schedule,
    microbatches: Microbatches,
    *,
    nodes: Sequence[int] = (),
) -> tuple[Timeline, tuple[int, ...]]:
    """The predicted step of a plan under a schedule (a name, or orders): its timeline, and bytes of memory by worker.

    `nodes`: by rank, the number of its node, if `profile.link` joins nodes: what is sent in parts between them; empty: all
    workers are taken to be on one.
    """
    routing = MicrobatchRouting(plan, microbatches)
    crossing = profile.crossing(plan)
    orders = registry.build_schedule(schedule, routing, connections=crossing) if isinstance(schedule, str) else schedule
    split = any(map(splits_backward, orders))
    costs = replace(simulation_costs(profile, plan, split=split), nodes=tuple(nodes))
    costs = replace(costs, kept_bytes=kept_bytes_by_kind(profile, routing, orders))
    timeline = simulate_schedule(orders, routing, crossing, costs)
    if profile.processors is not None:
        needed_ms = sum(timeline.busy_ms) / profile.processors
        if needed_ms > timeline.makespan_ms:
            # Workers take turns on the processors: everything is slower by the same factor.
            slower = simulation_costs(profile, plan, split=split, factor=needed_ms / timeline.makespan_ms)
            slower = replace(slower, nodes=costs.nodes, kept_bytes=costs.kept_bytes)
            timeline = simulate_schedule(orders, routing, crossing, slower)
    activations = timeline.peak_bytes or (0,) * plan.world
    gathers = (gather_bytes(profile, plan), gathered_bytes(profile, plan, orders))
    beside = (bucket_bytes(profile, routing), *gathers, mirror_bytes(profile, plan).in_memory)
    state = state_bytes(profile, routing, orders, activations).values()
    return timeline, tuple(map(sum, zip(activations, *beside, *state, strict=True)))


def simulation_costs(profile: ModelProfile, plan: ParallelPlan, *, split: bool, factor: float = 1.0) -> SimulationCosts:
    """What a plan's step costs on this profile, all times multiplied by `factor`.

    `split`: whether the schedule splits backward passes; whole ones cost what was measured of them whole.
    """
    stages = [_while_gathering(profile, place, stage) for place, stage in zip(plan.stages, profile.stages(plan), strict=True)]
    scatters = plan.gradients == "scatter"
    optimizer_ms = max(sum(stages[s].optimizer_ms for s in plan.stages_of(rank)) for rank in range(plan.world))
    gathers_ms = [gather_ms(profile, p) if p.gather_in_effect == "microbatch" else 0.0 for p in plan.stages]
    offload = offload_times(profile, plan, lambda layer: layer.input_ms if split else layer.backward_ms)
    return SimulationCosts(
        forward_ms=tuple(factor * s.forward_ms for s in stages),
        input_ms=tuple(factor * (s.input_ms if split else s.backward_ms) for s in stages),
        weight_ms=tuple(factor * s.weight_ms if split else 0.0 for s in stages),
        latency_ms=factor * profile.link.latency_ms,
        bandwidth_bytes_per_ms=profile.link.bandwidth / factor,
        reduce_ms=tuple(
            factor * ((after_scatter_ms if scatters else reduction_ms)(s, p, profile.link) + first_gather_ms(profile, p))
            for s, p in zip(stages, plan.stages, strict=True)
        ),
        scatter_ms=tuple(
            factor * profile.link.ms(scattered_bytes(s, p)) if scatters and p.replicas > 1 else 0.0
            for s, p in zip(stages, plan.stages, strict=True)
        ),
        step_ms=factor * (profile.step_ms + optimizer_ms),
        recompute_ms=tuple(factor * _recompute_ms(profile, plan, s) for s in range(len(stages))),
        gather_ms=tuple(factor * ms for ms in gathers_ms) if any(gathers_ms) else (),
        offload_ms=offload.offload_ms,
        first_read_ms=offload.first_read_ms,
        read_wait_ms=offload.read_wait_ms,
        most_unwritten=unwritten_limits(profile, plan) if plan.offload else (),
    )


def _while_gathering(profile: ModelProfile, place: StagePlan, stage: LayerProfile) -> LayerProfile:
    """A stage's profile with the time for which its layers wait for parameters, where these are gathered by layer."""
    if place.gather_in_effect != "layer":
        return stage
    layers = {i: profile.stage(replace(place, first=i, last=i + 1)) for i in range(place.first, place.last)}

    def through(ms_of: Callable[[LayerProfile], float], *, backward: bool) -> float:
        return ms_with_gathers(profile, place, {i: ms_of(layer) for i, layer in layers.items()}, backward=backward)

    return replace(
        stage,
        forward_ms=through(lambda layer: layer.forward_ms, backward=False),
        backward_ms=through(lambda layer: layer.backward_ms, backward=True),
        input_ms=through(lambda layer: layer.input_ms, backward=True),
    )


def _recompute_ms(profile: ModelProfile, plan: ParallelPlan, stage: int) -> float:
    """Time that one shard of a stage takes to recompute the dropped activations of one microbatch."""
    place = plan.stages[stage]
    alone = {i: profile.stage(replace(place, first=i, last=i + 1)).forward_ms for i in plan.recomputed_layers(stage)}
    if place.gather_in_effect == "layer" and alone:
        return ms_with_gathers(profile, place, alone, backward=False)
    return sum(alone.values())


def kept_bytes_by_kind(profile: ModelProfile, routing: MicrobatchRouting, orders: Schedule) -> KeptBytes:
    """Kind of kept memory -> by stage and microbatch, bytes that one shard of the stage keeps under this schedule."""
    cut, stages = routing.microbatches, range(len(routing.plan.stages))
    checkpointed = {(i.stage, i.microbatch) for order in orders for i in order if KEPT_INPUTS in i.allocates}
    split = {(i.stage, i.microbatch) for order in orders for i in order if STASH in i.allocates}
    offloaded = offloaded_keys(orders)
    known: dict[tuple[int, int, bool, bool, bool], dict[str, int]] = {}

    def sizes(s: int, m: int) -> dict[str, int]:
        key = (s, len(cut.samples(m)), (s, m) in checkpointed, (s, m) in offloaded, (s, m) in split)
        if key not in known:
            known[key] = profile.kept_bytes(routing.plan, *key[:2], recompute=key[2], offload=key[3], split=key[4])
            known[key].setdefault(UNOFFLOADED, known[key][ACTIVATIONS])
        return known[key]

    of_offloading = (RESIDENT, FETCHED, WRITTEN, UNOFFLOADED)
    kinds = [kind for kind in (*KEPT_SIZE, WRITTEN, UNOFFLOADED) if kind not in of_offloading or routing.plan.offload]
    return {kind: [[sizes(s, m).get(kind, 0) for m in range(cut.count)] for s in stages] for kind in kinds}


def reduction_ms(stage: LayerProfile, place: StagePlan, link: LinkProfile) -> float:
    """Time of one reduction: all-to-all of subtree sums, then all-gather; or halving, then doubling.

    Each moves 2 (n-1)/n of the bytes, as a ring does (Patarasuk and Yuan 2009). Which one it is (`plan/gradient_exchange.py`),
    and in how many messages, is left out. Where replicas divide state, the first of the two ends at the holders of a part, and
    its owner sends parameters in the second; parameters that come and go more often are no part of it.
    """
    replicas = place.replicas
    if replicas == 1:
        return 0.0
    times, holders = 2 * (replicas - 1) / replicas, place.zero_holders
    if place.zero_in_effect:
        once_a_step = place.gather_in_effect in (None, "step")
        times = once_a_step * (replicas - holders) / replicas + holders * times / 2
    return link.ms(times * stage.reduced_bytes)


def scattered_bytes(stage: LayerProfile, place: StagePlan) -> float:
    """What one shard of a replica sends of one microbatch's gradients, where these are scattered."""
    holders = place.zero_holders if place.zero_in_effect else 1
    return holders * (place.replicas - 1) * stage.reduced_bytes / place.replicas


def after_scatter_ms(stage: LayerProfile, place: StagePlan, link: LinkProfile) -> float:
    """What comes after scattered gradients: parameters go from their owners to the others, or, where replicas divide nothing,
    the totals of gradients do."""
    if place.replicas == 1 or place.gather_in_effect in ("microbatch", "layer"):
        return 0.0
    holders = place.zero_holders if place.zero_in_effect else 1
    return link.ms((place.replicas - holders) / place.replicas * stage.reduced_bytes)


def bucket_bytes(profile: ModelProfile, routing: MicrobatchRouting) -> tuple[int, ...]:
    """By rank: bytes of the buckets in which its stages' gradients are on their way between replicas, those that others send
    included."""
    plan, limit = routing.plan, profile.reduction_buffer_bytes
    found = [0] * plan.world
    for stage, place in enumerate(plan.stages):
        if place.replicas == 1 or limit == 0:
            continue
        nbytes = profile.stage(place).reduced_bytes
        if routing.scatters(stage):
            needed = _scattered_on_their_way(routing, stage, nbytes, limit)
        else:
            blocks = [routing.blocks_of_replica(stage, replica) for replica in range(place.replicas)]
            subtrees = [len(covering_nodes(run, routing.microbatches.blocks)) for run in blocks]
            share = nbytes * place.zero_holders // place.replicas
            needed = buffer_elements(nbytes, subtrees, [share] * place.replicas if place.zero_in_effect else None)
        for row in place.workers:
            for rank in row:
                found[rank] += min(limit, needed)
    return tuple(found)


def _scattered_on_their_way(routing: MicrobatchRouting, stage: int, nbytes: int, limit: int) -> int:
    """Bytes of the slots in which gradients of whole microbatches are on their way to their owners, as many as find room: a
    replica's own, and of each other one the part that it adds up; all of `limit` where not one finds room whole."""
    place = routing.plan.stages[stage]
    holders = place.zero_holders if place.zero_in_effect else 1
    own = Counter(routing.replica_for(stage, microbatch) for microbatch in range(routing.microbatches.count))
    one = holders * (nbytes + (place.replicas - 1) * nbytes // place.replicas)
    if not one:
        return 0
    return min(limit // one, max(own.values())) * one or limit


OFFLOADED: tuple[StateKind, ...] = ("optimizer", "master", "average")
"""The kinds of state that lie in files where the optimizer's state is offloaded."""
OFFLOAD_WINDOW_BYTES = 8 << 20
"""Parameters that are stepped together then, of which the last one may be larger: their state may be in memory before it is in
files."""


def offloaded_bytes(profile: ModelProfile, plan: ParallelPlan) -> tuple[int, ...]:
    """By rank: bytes of the state that lies in files, whose pages the system may write out; zeros where none does."""
    if not profile.offloads_optimizer:
        return (0,) * plan.world
    state = profile.state_on_shards(plan.virtual_shard_counts).of_plan(plan)
    return tuple(map(sum, zip(*(state[kind] for kind in OFFLOADED if kind in state), strict=True)))


def _left_in_memory(
    profile: ModelProfile, plan: ParallelPlan, state: Mapping[StateKind, tuple[int, ...]]
) -> dict[StateKind, tuple[int, ...]]:
    """What of the offloaded kinds is in memory at most: the state of the parameters that are stepped together."""
    by_tensor = profile.state_on_shards(plan.virtual_shard_counts).by_tensor
    parameters, kept = by_tensor["parameter"], by_tensor["optimizer"]
    most = max((kept.get(name, 0) / nbytes for name, nbytes in parameters.items() if nbytes), default=0.0)
    window = int(most * (OFFLOAD_WINDOW_BYTES + max(parameters.values(), default=0)))
    found: dict[StateKind, tuple[int, ...]] = {kind: (0,) * plan.world for kind in OFFLOADED if kind in state}
    return {**found, "optimizer": tuple(min(nbytes, window) for nbytes in state["optimizer"])}


GATHER_BYTES = 8 << 20
"""Most memory of the messages with which a stage's replicas get the parameters that they do not own."""


def gather_bytes(profile: ModelProfile, plan: ParallelPlan) -> tuple[int, ...]:
    """By rank: bytes of the parameters that are on their way from their owners, at most. None where buckets are not counted."""
    found = [0] * plan.world
    for stage, place in enumerate(plan.stages) if profile.reduction_buffer_bytes != 0 else ():
        if not place.zero_in_effect:
            continue
        others = profile.stage(place).parameter_bytes * (place.replicas - place.zero_holders) // place.replicas
        for rank in (rank for row in place.workers for rank in row):
            if place.gather_in_effect in (None, "step"):
                found[rank] += min(GATHER_BYTES, others)
            else:
                found[rank] += bytes_that_travel_together(profile, plan, stage, rank)
    return tuple(found)


class MirrorBytes(NamedTuple):
    """What the mirror's copies take, by rank."""

    in_memory: tuple[int, ...]
    in_files: tuple[int, ...]
    """What they take in files instead, whose pages the system may write out."""


def mirror_bytes(profile: ModelProfile, plan: ParallelPlan) -> MirrorBytes:
    """Bytes of the mirror's copies when they are most: a worker has those of the last complete snapshot and those of the next
    one, and of each its own state's and that of another worker, whichever that is. A worker without others has none."""
    none = (0,) * plan.world
    if profile.mirror is None or plan.world == 1:
        return MirrorBytes(none, none)
    owned = profile.state_on_shards(plan.virtual_shard_counts).owned_by(plan)
    second, most = sorted(owned)[-2:]
    copies = tuple(2 * (own + (second if own == most else most)) for own in owned)
    return MirrorBytes(none, copies) if profile.mirror == "files" else MirrorBytes(copies, none)


def _open_sums_by_rank(routing: MicrobatchRouting, orders: Schedule) -> list[int]:
    plan = routing.plan
    return [max(open_sums(routing, stage, rank, orders[rank]) for stage in plan.stages_of(rank)) for rank in range(plan.world)]


GRADIENTS: tuple[StateKind, ...] = ("gradient", "widened")
"""The kinds of state that gradients are."""


def _scattered_state(
    profile: ModelProfile, routing: MicrobatchRouting, orders: Schedule, state: Mapping[StateKind, tuple[int, ...]]
) -> dict[StateKind, tuple[int, ...]]:
    """The gradients where these are scattered: the open sums of what a rank owns, whatever the ZeRO stage. Where replicas
    divide nothing, in the end the totals of all, beside its own ones. `state`: of the plan itself."""
    plan = routing.plan
    of_plan = profile.state_on_shards(plan.virtual_shard_counts).of_plan
    levels = [max(SHARED_OUT_FROM["gradient"], level) for level in plan.zero_levels]
    owned, alone = of_plan(plan.with_zero(levels)), of_plan(plan.with_zero(levels, 1))
    found: dict[StateKind, list[int]] = {kind: [] for kind in GRADIENTS if kind in state}
    for rank, sums in enumerate(_open_sums_by_rank(routing, orders)):
        stages = plan.stages_of(rank)
        gathers = any(routing.scatters(stage) and not plan.divides_state(stage) for stage in stages)
        own = (alone if gathers else owned)["gradient"][rank]
        found["gradient"].append(max(sums * own, own + state["gradient"][rank] if gathers else 0))
        if "widened" in found:
            found["widened"].append((state if gathers else owned)["widened"][rank])
    return {kind: tuple(of) for kind, of in found.items()}


def state_bytes(
    profile: ModelProfile, routing: MicrobatchRouting, orders: Schedule, kept: Sequence[int] | None = None
) -> dict[StateKind, tuple[int, ...]]:
    """Kind of state -> by rank, its bytes in memory. `orders`: the workers' instructions.

    Gradients are the sums that are open at once (`open_sums`); where gradients are scattered, those at the owners, of what
    these own. `kept`: by rank, what is kept for backward passes when that is most; None: nothing. When gradients are widened
    for the optimizer it is gone, so of these only what takes more memory counts.
    """
    plan = routing.plan
    state = profile.state_on_shards(plan.virtual_shard_counts).of_plan(plan)
    if plan.gradients == "scatter":
        found = {**state, **_scattered_state(profile, routing, orders, state)}
    else:
        if plan.most_zero > 1:  # each replica has whole gradients of its blocks until they are reduced
            whole = plan.with_zero([min(1, level) for level in plan.zero_levels])
            of_whole = profile.state_on_shards(plan.virtual_shard_counts).of_plan(whole)
            state |= {kind: of_whole[kind] for kind in GRADIENTS if kind in of_whole}
        gradients = zip(state["gradient"], _open_sums_by_rank(routing, orders), strict=True)
        found = {**state, "gradient": tuple(nbytes * count for nbytes, count in gradients)}
    if profile.offloads_optimizer:
        found |= _left_in_memory(profile, plan, state)
    if "widened" in state:
        found["widened"] = tuple(
            max(0, nbytes - freed) for nbytes, freed in zip(state["widened"], kept or (0,) * plan.world, strict=True)
        )
    return found
