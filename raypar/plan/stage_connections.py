"""The connections between a model's stages: values along edges, gradients on the way back, tied parameters; their limits."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from raypar.errors import PlanError
from raypar.plan.parallel_plan import ParallelPlan

LATER_USE = "@"
"""In the name of a parameter that a layer of a captured model uses after others: `<qualified name>@<layer name>`."""


def owner_of(parameter: str) -> str:
    """Qualified name of the module that has a parameter or buffer."""
    name, later, layer = parameter.partition(LATER_USE)
    return name.rpartition(".")[0] + later + layer


def parameter_of(owner: str, key: str) -> str:
    """Qualified name of a module's parameter `key`: the inverse of `owner_of`."""
    name, later, layer = owner.partition(LATER_USE)
    return (f"{name}.{key}" if name else key) + later + layer


@dataclass(frozen=True, slots=True)
class StageEdge:
    """All values that one stage produces and another uses: one message a microbatch, straight to the consumer."""

    src: int
    """The stage that produces the values."""
    dst: int
    """The stage that uses them."""
    values: tuple[str, ...] = ("x",)
    """Names of the values."""
    nbytes: int = 0
    """Bytes of the values of one microbatch, for the simulator; 0 if unknown."""
    differentiable: bool = True
    """Whether gradients of the values are sent back."""
    value_bytes: tuple[int, ...] = ()
    """Bytes of each value; empty: only their sum is known, and each is taken to have an even share of it."""
    without_gradient: tuple[str, ...] = ()
    """Those of the values that never have a gradient: fields of the batch."""
    readers: tuple[int, ...] = ()
    """How many layers of `dst` read each value, for the simulator; empty: one each."""

    @property
    def values_with_gradient(self) -> tuple[str, ...]:
        """The values whose gradients are sent back."""
        return tuple(value for value in self.values if value not in self.without_gradient) if self.differentiable else ()

    def bytes_of(self, values: Sequence[str]) -> int:
        """Bytes of some of the edge's values."""
        if self.value_bytes:
            return sum(size for value, size in zip(self.values, self.value_bytes, strict=True) if value in values)
        return self.nbytes * len(values) // len(self.values)

    def bytes_of_uses(self, values: Sequence[str]) -> int:
        """Bytes of the gradients of some of the values, if each layer that reads one sends a gradient of its own."""
        count = dict(zip(self.values, self.readers, strict=True)) if self.readers else {}
        return sum(self.bytes_of((value,)) * count.get(value, 1) for value in values)


@dataclass(frozen=True, slots=True)
class GradientRelay:
    """Gradients that one stage hands to an earlier one: one message a microbatch.

    A value's gradients are added as autograd adds them, the newest use first, in whichever stages its consumers are. They go
    by relay, from the last consuming stage to the one before it: each adds its own to the sum that it gets, and hands the new
    sum on. That costs no time where a consumer needs the one before it, whose backward comes later anyway. From the first
    consumer on whose successor does not need it, consumers do not wait for each other: the sum goes to the producer, and so
    does, apart from it, the gradient of every older use, which the producer adds to the sum, newest first. Two branches A and B
    of two stages each: ((gB2 + gB1) + gA2) + gA1.
    """

    src: int
    """The stage that has the gradients: a consumer of the values."""
    dst: int
    """The earlier stage that gets them: a consumer before `src`, or the producer."""
    values: tuple[str, ...] = ("x",)
    """Names of the values whose gradients travel."""
    nbytes: int = 0
    """Bytes of the gradients of one microbatch, for the simulator; 0 if unknown."""
    apart: frozenset[str] = frozenset()
    """Those of `values` of which the gradients of all uses in `src` travel apart, and not their sum: autograd adds each to the
    sum of all newer ones, which `src` does not have, and (sum + g2) + g1 has other bits than sum + (g2 + g1)."""


@dataclass(frozen=True, slots=True)
class TiedParameter:
    """A parameter that layers of several stages use."""

    name: str
    """Its first qualified name."""
    stages: tuple[int, ...]
    """The stages that use it, ascending."""


@dataclass(frozen=True, slots=True)
class StageConnections:
    """Everything that connects the stages of one plan of one model."""

    edges: tuple[StageEdge, ...]
    """Values that are sent from stage to stage."""
    ties: tuple[TiedParameter, ...] = ()
    """Parameters that several stages use."""
    exchanges_buffers: tuple[int, ...] = ()
    """The stages of several replicas whose forward writes buffers: replicas exchange what they have written."""
    relays: tuple[GradientRelay, ...] = field(init=False)
    """Gradients of the values on their way back, which follow from the edges; in order of the stages that get them."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "relays", _relays_of(self.edges))

    @staticmethod
    def chain(stages: int, nbytes: Sequence[int] | int = 0) -> StageConnections:
        """The connections of a sequential model: each stage feeds the next. `nbytes`: one number, or one for each edge."""
        sizes = [nbytes] * (stages - 1) if isinstance(nbytes, int) else list(nbytes)
        return StageConnections(tuple(StageEdge(s, s + 1, nbytes=sizes[s]) for s in range(stages - 1)))

    def into(self, stage: int) -> tuple[StageEdge, ...]:
        """The edges whose values the stage uses, in order of their sources."""
        return tuple(e for e in self.edges if e.dst == stage)

    def out_of(self, stage: int) -> tuple[StageEdge, ...]:
        """The edges whose values the stage produces, in order of their destinations."""
        return tuple(e for e in self.edges if e.src == stage)

    def relays_to(self, stage: int) -> tuple[GradientRelay, ...]:
        """The relays that bring gradients to the stage, in order of their sources."""
        return tuple(r for r in self.relays if r.dst == stage)

    def relays_from(self, stage: int) -> tuple[GradientRelay, ...]:
        """The relays by which the stage hands gradients on, in order of their destinations."""
        return tuple(r for r in self.relays if r.src == stage)


def _relays_of(edges: Sequence[StageEdge]) -> tuple[GradientRelay, ...]:
    """The relays of the gradients of all values that have some."""
    needed = _needed_stages(edges)
    consumers: dict[tuple[int, str], list[int]] = {}
    for edge in edges:
        for value in edge.values_with_gradient:
            consumers.setdefault((edge.src, value), []).append(edge.dst)
    ways = {place: _ways_back(place[0], stages, needed) for place, stages in consumers.items()}
    found: dict[tuple[int, int], tuple[list[str], int, set[str]]] = {}
    for edge in edges:
        takers: dict[tuple[int, bool], list[str]] = {}
        for value in edge.values_with_gradient:
            takers.setdefault(ways[edge.src, value][edge.dst], []).append(value)
        for (taker, apart), values in takers.items():
            names, nbytes, alone = found.get((taker, edge.dst), ([], 0, set()))
            nbytes += edge.bytes_of_uses(values) if apart else edge.bytes_of(values)
            found[taker, edge.dst] = ([*names, *values], nbytes, alone.union(values) if apart else alone)
    return tuple(
        GradientRelay(src, dst, tuple(names), nbytes, frozenset(apart))
        for (dst, src), (names, nbytes, apart) in sorted(found.items())
    )


def _needed_stages(edges: Sequence[StageEdge]) -> dict[int, int]:
    """Stage -> the earlier stages that it needs, as bits: a path of values with gradients leads from each of them to it, so
    their backward passes come after its own."""
    needed: dict[int, int] = {}
    for edge in sorted(edges, key=lambda edge: edge.dst):
        if edge.values_with_gradient:
            needed[edge.dst] = needed.get(edge.dst, 0) | needed.get(edge.src, 0) | 1 << edge.src
    return needed


def _ways_back(producer: int, consumers: Sequence[int], needed: Mapping[int, int]) -> dict[int, tuple[int, bool]]:
    """Consuming stage -> (the stage that gets its gradients of a value, whether its uses travel apart). See `GradientRelay`."""
    found: dict[int, tuple[int, bool]] = {}
    apart = False
    newest_first = [*sorted(consumers, reverse=True), producer]
    for stage, before in itertools.pairwise(newest_first):
        relays = not apart and bool(needed[stage] >> before & 1)
        found[stage] = (before if relays else producer, apart)
        apart = not relays
    return found


# Message tags number stages, microbatches and values in a fixed number of bits (`worker/step/message_tags.py`).
STAGE_BITS = 10
MICROBATCH_BITS = 17
VALUE_BITS = 10
MAX_STAGES = 1 << STAGE_BITS
MAX_MICROBATCHES = 1 << MICROBATCH_BITS
MAX_VALUES_OF_MESSAGE = 1 << VALUE_BITS
"""The most values that one stage may send another for one microbatch."""

_FEWER_VALUES = (
    "choose other split points (plan.cuts) or fewer stages, so that fewer values pass between stages; or let layers pass fewer "
    "values: stack or concatenate them, or make the module around both layers a unit (model.units)"
)


def find_oversized_message(connections: StageConnections) -> str | None:
    """The first edge or relay of more values than a message tag can number, in words; None if there is none."""
    for edge in connections.edges:
        if len(edge.values) > MAX_VALUES_OF_MESSAGE:
            return f"{len(edge.values)} values pass from stage {edge.src} to stage {edge.dst}"
    for relay in connections.relays:
        if len(relay.values) > MAX_VALUES_OF_MESSAGE:
            return f"gradients of {len(relay.values)} values pass from stage {relay.src} to stage {relay.dst}"
    return None


def check_message_limits(connections: StageConnections, stages: int, microbatches: int) -> None:
    """Raises `PlanError` for a plan some of whose messages no tag could name."""
    if stages > MAX_STAGES:
        raise PlanError(f"the plan has {stages} stages, and {MAX_STAGES} is the most", cure="choose fewer stages")
    if microbatches > MAX_MICROBATCHES:
        raise PlanError(
            f"a step or validation pass has {microbatches} microbatches, and {MAX_MICROBATCHES} is the most",
            cure="choose fewer microbatches, or fewer samples for validation",
        )
    found = find_oversized_message(connections)
    if found is not None:
        raise PlanError(f"{found} for each microbatch, and {MAX_VALUES_OF_MESSAGE} is the most", cure=_FEWER_VALUES)


def check_ties_are_cut_alike(plan: ParallelPlan, ties: Sequence[TiedParameter]) -> None:
    """Raise `PlanError` if a worker has several stages that use one parameter and would have different parts of it there."""
    if plan.one_role_each:
        return
    for tie in ties:
        for rank in range(plan.world):
            here = [stage for stage in tie.stages if stage in plan.stages_of(rank)]
            counts = {plan.stages[stage].virtual_shards for stage in here}
            runs = {plan.stages[stage].run_of(plan.role_in(rank, stage).shard) for stage in here}
            parts = [f"{a} to {b}" if a < b else str(a) for a, b in sorted((run.start, run.stop - 1) for run in runs)]
            if len(counts) == 1 and len(parts) > 1:
                raise PlanError(
                    f"stages {' and '.join(map(str, here))} share the parameter {tie.name}, and worker {rank} would have it as "
                    f"shards {' and '.join(parts)}",
                    cure="let each worker be the same shard of the layers that share a parameter (plan.placements)",
                )
            if len(counts) > 1:
                stages, shards = (" and ".join(map(str, numbers)) for numbers in (here, sorted(counts)))
                raise PlanError(
                    f"stages {stages} share the parameter {tie.name}, and worker {rank} would have it cut over {shards} shards",
                    cure="give the layers that share a parameter as many shards, or workers of their own (plan.placements)",
                )
