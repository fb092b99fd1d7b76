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

Group = tuple[int, int, int]
"""(stage, virtual shard of those that the worker has of it, layer) whose parameters come and go together."""


class _Pass(NamedTuple):
    """What an instruction goes through."""

    stage: int
    layers: tuple[tuple[int, ...], ...]
    """By virtual shard: the layers of which something comes and goes, in order."""

    @property
    def first_groups(self) -> list[Group]:
        """What it begins with."""
        return [(self.stage, number, layers[0]) for number, layers in enumerate(self.layers) if layers]


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
    asked = [_asked_by(state, plan, rank, orders[rank]) for rank in range(plan.world)]
    for stage, place in enumerate(plan.stages):
        if place.gather_in_effect is None:
            continue
        ranks = [rank for row in place.workers for rank in row]
        owned = {rank: state.owned_by_layer(plan, stage, rank) for rank in ranks}
        for rank in ranks:
            of_stage = {key[1:]: count for key, count in asked[rank].items() if key[0] == stage}
            gathers[rank] += sum(of_stage.values())
            for owner in owners(plan, stage, rank):
                here = owned[owner]
                nbytes = sum(n * _union(here[v][i - place.first] for i in layers) for (v, layers), n in of_stage.items())
                received[rank] += nbytes
                sent[owner] += nbytes
    return tuple(map(GatherTraffic, gathers, received, sent))


def _asked_by(state: StateBytes, plan: ParallelPlan, rank: int, order: Sequence[Compute]) -> Counter[tuple[int, int, range]]:
    """(stage, virtual shard, the layers that come together) -> how often a rank asks for them in a step."""
    found: Counter[tuple[int, int, range]] = Counter()
    times = Counter(dict.fromkeys(stages_gathered(plan, rank, "step"), 1))
    for stages in gathers_of_order(order, stages_gathered(plan, rank, "microbatch")).before:
        times.update(stages)
    for stage, count in times.items():
        place = plan.stages[stage]
        for number in range(len(place.run_of(plan.role_in(rank, stage).shard))):
            found[stage, number, range(place.first, place.last)] = count
    for (stage, number, layer), count in _Layers(state, plan, rank).through(order).items():
        found[stage, number, range(layer, layer + 1)] = count
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
        self._known: dict[tuple[frozenset[Group], _Pass, _Pass | None], tuple[list[Group], frozenset[Group]]] = {}
        """(what is there, what an instruction goes through, what the next one does) -> (what is asked for, what is there
        then)."""
        self.most = 0
        """Bytes of what was there together, when it was most; of virtual shards, which take turns, as if all had most at
        once."""

    def through(self, order: Sequence[Compute]) -> Counter[Group]:
        """Group -> how often it is asked for."""
        uses = [self._pass_of(i) for i in order if i.needs_weights and i.stage in self._stages]
        uses = [use for use in uses if any(use.layers)]
        asked: Counter[Group] = Counter()
        there: frozenset[Group] = frozenset()
        for use, following in zip(uses, [*uses[1:], None], strict=False):
            if (key := (there, use, following)) not in self._known:
                self._known[key] = self._compute(*key)
            new, there = self._known[key]
            asked.update(new)
        return asked

    def _pass_of(self, i: Compute) -> _Pass:
        place = self._plan.stages[i.stage]
        layers: Sequence[int] = range(place.first, place.last)
        if KEPT_INPUTS in i.frees:
            layers = self._plan.recomputed_layers(i.stage)
        elif INPUT_GRADIENTS in i.makes:
            layers = layers[::-1]
        return _Pass(
            i.stage, tuple(tuple(n for n in layers if of_shard[n - place.first]) for of_shard in self._by_layer[i.stage])
        )

    def _compute(self, there: frozenset[Group], use: _Pass, following: _Pass | None) -> tuple[list[Group], frozenset[Group]]:
        stage = use.stage
        after = following.first_groups if following is not None else []
        elsewhere = [group for group in after if group[0] != stage]
        asked: list[Group] = []
        left = {group for group in there if group[0] != stage}
        at_once = self._bytes(left)
        for number, layers in enumerate(use.layers):
            own_next = [group for group in after if group[:2] == (stage, number)]
            groups = [(stage, number, layer) for layer in layers]
            now = {group for group in there if group[:2] == (stage, number)} & {*(groups[:1] or own_next)}
            most = self._bytes(now)
            for place, group in enumerate(groups):
                beside = groups[place + 1 : place + 2] or own_next
                new = [each for each in dict.fromkeys((group, *beside)) if each not in now]
                now = (now & {group, *beside}) | {*new}
                is_last = place + 1 == len(groups) and number == 0
                most = max(most, self._bytes(now) + is_last * self._bytes(elsewhere))
                asked += new
            at_once += most
            left |= now & {*own_next}
        self.most = max(self.most, at_once)
        asked += [group for group in elsewhere if group not in left]
        return asked, frozenset({*left, *elsewhere})

    def _bytes(self, there: Iterable[Group]) -> int:
        """Bytes of groups that are there together."""
        layers: dict[tuple[int, int], list[int]] = {}
        for stage, number, layer in there:
            layers.setdefault((stage, number), []).append(layer - self._plan.stages[stage].first)
        return sum(_union(self._by_layer[stage][number][at] for at in of) for (stage, number), of in layers.items())


IN_PLACE_BYTES = 128 << 10
"""What is owned of a parameter travels from and to where it lies from this size on; smaller parts travel together."""


def bytes_that_travel_together(profile: ModelProfile, plan: ParallelPlan, stage: int, rank: int) -> int:
    """Bytes of the messages in which small parts of what a stage gathers at once by microbatch or layer travel: those that a
    rank gets, and those that it gives to each of the others."""
    state = profile.state_on_shards(plan.virtual_shard_counts)
    times = dict.fromkeys(owners(plan, stage, rank), 1) | {rank: len(readers(plan, stage, rank))}
    small = {owner: [list(map(_small, of)) for of in state.owned_by_layer(plan, stage, owner)] for owner in times}
    shards = range(len(small[rank]))
    if plan.stages[stage].gather_in_effect == "microbatch":
        return sum(count * _union(small[owner][number]) for owner, count in times.items() for number in shards)
    layers = range(plan.stages[stage].last - plan.stages[stage].first)
    return sum(
        max(sum(count * _union([small[owner][number][at]]) for owner, count in times.items()) for at in layers)
        for number in shards
    )


def _small(layer: Mapping[str, int]) -> dict[str, int]:
    return {name: nbytes for name, nbytes in layer.items() if nbytes < IN_PLACE_BYTES}


# -- time -------------------------------------------------------------------------------------------------------------------


def gather_ms(profile: ModelProfile, place: StagePlan) -> float:
    """Time of one gather of a stage's parameters, whichever layers it has: a request, and what other replicas keep."""
    nbytes = profile.state_on_shards({place.virtual_shards}).computed_with(place)
    if not nbytes or place.gather_in_effect is None:
        return 0.0
    others = nbytes * (place.replicas - place.zero_holders) / place.replicas
    return profile.link.latency_ms + profile.link.ms(others)


def first_gather_ms(profile: ModelProfile, place: StagePlan) -> float:
    """Time in which a step waits for the first layer of a stage that gathers by layer: nothing computes before it."""
    if place.gather_in_effect != "layer":
        return 0.0
    layers = (gather_ms(profile, replace(place, first=i, last=i + 1)) for i in range(place.first, place.last))
    return next(filter(None, layers), 0.0)


def ms_with_gathers(profile: ModelProfile, place: StagePlan, ms_of_layer: Mapping[int, float], *, backward: bool) -> float:
    """Time in which a stage that gathers by layer goes through layers, each of which arrives while the one before it computes,
    the first one while the worker computes something else. `ms_of_layer`: index of the layer -> its time alone."""
    runs: list[list[float]] = [[0.0, 0.0]]  # [gather, compute] of a layer and those without parameters that follow it
    for layer in sorted(ms_of_layer, reverse=backward):
        arrives_ms = gather_ms(profile, replace(place, first=layer, last=layer + 1))
        if arrives_ms:
            runs.append([arrives_ms, 0.0])
        runs[-1][1] += ms_of_layer[layer]
    first = 0 if runs[0][1] or len(runs) == 1 else 1
    following = [*(arrives_ms for arrives_ms, _ in runs[first + 1 :]), 0.0]
    return sum(max(ms, arrives_ms) for (_, ms), arrives_ms in zip(runs[first:], following, strict=True))
