"""What gathered parameters take where replicas divide them: memory while they are whole, bytes on their way, and time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from raypar.plan import ParallelPlan, StagePlan
from raypar.plan.state_bytes import StateBytes
from raypar.planner.model_profile import ModelProfile
from raypar.schedule.gathering import gathers_of_order, owners, readers, stages_gathered
from raypar.schedule.instructions import INPUT_GRADIENTS, KEPT_INPUTS, Compute, Schedule

Group = tuple[int, int]
"""(stage, layer) whose parameters come and go together."""


class GatherTraffic(NamedTuple):
    """What a worker gathers in a step."""

    gathers: int
    """How often it asks for the parameters of a stage, or of a layer."""
    received: int
    """Bytes that it gets from other replicas."""
    sent: int
    """Bytes that it gives to other replicas."""


def gathered_bytes(profile: ModelProfile, plan: ParallelPlan, orders: Schedule) -> tuple[int, ...]:
    """By rank: bytes of whole parameters with which layers compute, beside the parts that a worker keeps, when they are most.

    By step it is what other replicas keep: the worker's parts lie in the whole. By microbatch and by layer the whole comes and
    goes, and parts lie apart: it is the stages that are there together, or the two layers.
    """
    state = profile.state_on_shards(plan.virtual_shard_counts)
    by_step = state.gathered(plan)
    return tuple(
        nbytes + _most_by_microbatch(state, plan, rank, orders[rank]) + _most_by_layer(state, plan, rank, orders[rank])
        for rank, nbytes in enumerate(by_step)
    )


def gather_traffic(profile: ModelProfile, plan: ParallelPlan, orders: Schedule) -> tuple[GatherTraffic, ...]:
    """By rank: what the gathers of a training step send, where replicas divide parameters.

    A gather brings what the worker does not hold, from its owners: of n replicas that hold N bytes together each gets
    (n - 1) / n N. By step that is once a step (behind it), by microbatch once for each `Gather` in the program, and by layer,
    each layer by itself, once for each time that it comes (`_Layers`).
    """
    state = profile.state_on_shards(plan.virtual_shard_counts)
    gathers, received, sent = ([0] * plan.world for _ in range(3))
    by_rank = [_gathers_of_rank(state, plan, rank, orders[rank]) for rank in range(plan.world)]
    for stage, place in enumerate(plan.stages):
        if place.gather_in_effect is None:
            continue
        ranks = [rank for row in place.workers for rank in row]
        owned = {rank: state.owned_by_layer(plan, stage, rank) for rank in ranks}
        for rank in ranks:
            count_of = {layers: count for (of, layers), count in by_rank[rank].items() if of == stage}
            gathers[rank] += sum(count_of.values())
            for owner in owners(plan, stage, rank):
                here = owned[owner]
                nbytes = sum(n * _union(here[i - place.first] for i in layers) for layers, n in count_of.items())
                received[rank] += nbytes
                sent[owner] += nbytes
    return tuple(map(GatherTraffic, gathers, received, sent))


def _gathers_of_rank(state: StateBytes, plan: ParallelPlan, rank: int, order: Sequence[Compute]) -> Counter[tuple[int, range]]:
    """(stage, the layers that come together) -> how often a rank asks for them in a step."""
    found: Counter[tuple[int, range]] = Counter()
    for stage in stages_gathered(plan, rank, "step"):
        found[stage, range(plan.stages[stage].first, plan.stages[stage].last)] = 1
    for stages in gathers_of_order(order, stages_gathered(plan, rank, "microbatch")).before:
        for stage in stages:
            found[stage, range(plan.stages[stage].first, plan.stages[stage].last)] += 1
    for (stage, layer), count in _Layers(state, plan, rank).through(order).items():
        found[stage, range(layer, layer + 1)] += count
    return found


def _most_by_microbatch(state: StateBytes, plan: ParallelPlan, rank: int, order: Sequence[Compute]) -> int:
    """Bytes of the stages that are there together by microbatch, when they are most."""
    stages = stages_gathered(plan, rank, "microbatch")
    if not stages:
        return 0
    whole = {stage: sum(map(_union, state.gathered_by_layer(plan, stage, rank))) for stage in stages}
    there = most = 0
    for before, after in zip(*gathers_of_order(order, stages), strict=True):
        there += sum(whole[stage] for stage in before)
        most = max(most, there)
        there -= sum(whole[stage] for stage in after)
    return most


def _most_by_layer(state: StateBytes, plan: ParallelPlan, rank: int, order: Sequence[Compute]) -> int:
    """Bytes of the layers that are there together by layer, when they are most."""
    layers = _Layers(state, plan, rank)
    layers.through(order)
    return layers.most


def _union(layers: Iterable[Mapping[str, int]]) -> int:
    """Bytes of the parameters of some layers of a stage, a tied one once."""
    return sum({name: nbytes for layer in layers for name, nbytes in layer.items()}.values())


class _Layers:
    """The layers of a worker whose parameters come and go one by one, in a pass.

    While a layer computes the next one arrives: of the same instruction, or the first one of the next instruction. What an
    instruction begins with is there if the one before it ended with it, as a backward after its forward does.
    """

    def __init__(self, state: StateBytes, plan: ParallelPlan, rank: int) -> None:
        self._plan = plan
        self._stages = stages_gathered(plan, rank, "layer")
        self._by_layer = {stage: state.gathered_by_layer(plan, stage, rank) for stage in self._stages}
        """Stage -> by virtual shard, by layer, bytes of the parameters that come and go."""
        self._steps: dict[tuple[frozenset[Group], tuple[Group, ...], Group | None], tuple[list[Group], frozenset[Group]]] = {}
        """(what is there, groups of an instruction, first group of the next) -> (groups it asks for, what is there then)."""
        self.most = 0
        """Bytes of what was there together, when it was most."""

    def through(self, order: Sequence[Compute]) -> Counter[Group]:
        """Group -> how often it is asked for."""
        uses = [groups for i in order if i.needs_weights and i.stage in self._stages and (groups := self._groups(i))]
        asked: Counter[Group] = Counter()
        there: frozenset[Group] = frozenset()
        for groups, following in zip(uses, [*uses[1:], ()], strict=False):
            key = there, groups, following[0] if following else None
            if key not in self._steps:
                self._steps[key] = self._compute(*key)
            new, there = self._steps[key]
            asked.update(new)
        return asked

    def _groups(self, i: Compute) -> tuple[Group, ...]:
        """The layers that an instruction goes through, in order: those of which something comes and goes."""
        place = self._plan.stages[i.stage]
        layers: Sequence[int] = range(place.first, place.last)
        if KEPT_INPUTS in i.frees:
            layers = self._plan.recomputed_layers(i.stage)
        elif INPUT_GRADIENTS in i.makes:
            layers = layers[::-1]
        return tuple((i.stage, n) for n in layers if any(of[n - place.first] for of in self._by_layer[i.stage]))

    def _compute(
        self, there: frozenset[Group], groups: tuple[Group, ...], following: Group | None
    ) -> tuple[list[Group], frozenset[Group]]:
        stage, now = groups[0][0], set(there)
        asked: list[Group] = []

        def keep(*kept: Group | None) -> None:
            now.difference_update([group for group in now if group[0] == stage and group not in kept])

        keep(groups[0])
        for group, after in zip(groups, [*groups[1:], following], strict=True):
            keep(group, after)
            new = [each for each in dict.fromkeys((group, after)) if each is not None and each not in now]
            asked += new
            now.update(new)
            self.most = max(self.most, self._bytes(now))
        keep(following)
        return asked, frozenset(now)

    def _bytes(self, there: Iterable[Group]) -> int:
        """Bytes of groups that are there together."""
        found = 0
        for stage in {stage for stage, _ in there}:
            first = self._plan.stages[stage].first
            here = [layer - first for of, layer in there if of == stage]
            found += sum(_union(of[at] for at in here) for of in self._by_layer[stage])
        return found


IN_PLACE_BYTES = 128 << 10
"""What is owned of a parameter travels from and to where it lies from this size on; smaller parts travel together."""


def bytes_that_travel_together(profile: ModelProfile, plan: ParallelPlan, stage: int, rank: int) -> int:
    """Bytes of the messages in which small parts of what a stage gathers at once by microbatch or layer travel: those that a
    rank gets, and those that it gives to each of the others."""
    state = profile.state_on_shards(plan.virtual_shard_counts)
    given, from_owners = len(readers(plan, stage, rank)), owners(plan, stage, rank)
    times = dict.fromkeys(from_owners, 1) | {rank: given}
    small = {
        owner: [
            {name: of for name, of in layer.items() if of < IN_PLACE_BYTES}
            for layer in state.owned_by_layer(plan, stage, owner)
        ]
        for owner in times
    }
    if plan.stages[stage].gather_in_effect == "microbatch":
        return sum(count * _union(small[owner]) for owner, count in times.items())
    layers = range(plan.stages[stage].last - plan.stages[stage].first)
    return max(sum(count * _union([small[owner][at]]) for owner, count in times.items()) for at in layers)


# -- time -------------------------------------------------------------------------------------------------------------------


def gather_ms(profile: ModelProfile, place: StagePlan) -> float:
    """Time of one gather of a stage's parameters, whichever layers it has: a request, and what other replicas keep."""
    nbytes = profile.state_on_shards({place.virtual_shards}).computed_with(place)
    if not nbytes or place.gather_in_effect is None:
        return 0.0
    others = nbytes * (place.replicas - place.zero_holders) / place.replicas
    return profile.link.latency_ms + profile.link.ms(others)


def ms_with_gathers(profile: ModelProfile, place: StagePlan, ms_of_layer: Mapping[int, float], *, backward: bool) -> float:
    """Time in which a stage that gathers by layer goes through layers, each of which arrives while the one before it computes,
    the first one while the worker computes something else. `ms_of_layer`: index of the layer -> its time alone."""
    runs: list[list[float]] = [[0.0, 0.0]]  # [gather, compute] of a layer and those without parameters that follow it
    for layer in sorted(ms_of_layer, reverse=backward):
        arrives_ms = gather_ms(profile, replace(place, first=layer, last=layer + 1))
        if arrives_ms:
            runs.append([arrives_ms, 0.0])
        runs[-1][1] += ms_of_layer[layer]
    first = 0 if runs[0][1] else 1
    following = [*(arrives_ms for arrives_ms, _ in runs[first + 1 :]), 0.0]
    return sum(max(ms, arrives_ms) for (_, ms), arrives_ms in zip(runs[first:], following, strict=True))
