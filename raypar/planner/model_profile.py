"""Measured times and bytes of a model on a machine, as data for the planner. `worker/measure_profile.py` measures them."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from raypar.errors import PlanError
from raypar.plan import ModelOutline, ParallelPlan, StageConnections, StageEdge, StagePlan
from raypar.plan.shard_ranges import TensorCut, even_ranges_by_shard
from raypar.plan.state_bytes import StateBytes


@dataclass(frozen=True, slots=True)
class LayerProfile:
    """One layer on one worker, for one microbatch.

    Times in ms: forward; the whole backward; and the same backward split into input gradients and weight gradients.
    `optimizer_ms` is once a step. `activation_bytes` are kept from forward to backward, `output_bytes` go to the next layer.
    `parameter_bytes` and `optimizer_bytes` are those of a stage that has this layer alone: a tie counts in each of its layers.
    """

    name: str
    forward_ms: float
    backward_ms: float
    input_ms: float
    weight_ms: float
    activation_bytes: int = 0
    output_bytes: int = 0
    parameter_bytes: int = 0
    optimizer_bytes: int = 0
    optimizer_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class LinkProfile:
    """A link between two workers: a message takes `latency_ms + bytes / bandwidth`; `bandwidth` in bytes per ms."""

    latency_ms: float = 0.0
    bandwidth: float = float("inf")

    def ms(self, nbytes: float) -> float:
        """Time of one message."""
        return self.latency_ms + nbytes / self.bandwidth


@dataclass(frozen=True)
class ModelProfile:
    """A model's layers, measured on one kind of worker.

    `memory_bytes`: what one worker may use; None when it is not known.
    `outputs`: (producer, consumer) layer pairs whose values cross when they are cut apart, with bytes; by default each
    layer feeds the next. `step_ms`: what a step costs beyond compute, transfers and reduction (vote, call, data).
    `processors`: how many workers can compute at the same time, where all share one machine; None: all of them.
    `state`: what the model's tensors take; None: each layer is taken to have one tensor, of its bytes, cut evenly over shards.
    """

    layers: tuple[LayerProfile, ...]
    link: LinkProfile = LinkProfile()
    memory_bytes: int | None = None
    step_ms: float = 0.0
    outputs: tuple[tuple[int, int, int], ...] | None = None
    processors: int | None = None
    state: StateBytes | None = None

    def __post_init__(self) -> None:
        if not self.layers:
            raise PlanError("the profile has no layers", cure="profile a model with at least one layer")

    def work_sums(self) -> tuple[float, ...]:
        """Prefix sums [layers + 1] of the least time of each layer per microbatch, its backward whole or split."""
        return (0.0, *itertools.accumulate(x.forward_ms + min(x.backward_ms, x.input_ms + x.weight_ms) for x in self.layers))

    def of(self, first: int, last: int) -> LayerProfile:
        """The profile of layers [first, last) as one stage."""
        part = self.layers[first:last]
        return LayerProfile(
            name=f"{part[0].name}..{part[-1].name}" if len(part) > 1 else part[0].name,
            forward_ms=sum(x.forward_ms for x in part),
            backward_ms=sum(x.backward_ms for x in part),
            input_ms=sum(x.input_ms for x in part),
            weight_ms=sum(x.weight_ms for x in part),
            activation_bytes=sum(x.activation_bytes for x in part),
            output_bytes=part[-1].output_bytes,
            parameter_bytes=sum(x.parameter_bytes for x in part),
            optimizer_bytes=sum(x.optimizer_bytes for x in part),
            optimizer_ms=sum(x.optimizer_ms for x in part),
        )

    def stage(self, place: StagePlan) -> LayerProfile:
        """The profile of one shard of a stage.

        Work is divided evenly, activations too. A layer costs two all-reduces of its output forward and two backward, as a
        transformer's does (Shoeybi et al. 2019, section 3), each 2 (t-1)/t of the bytes; overlap is not counted.
        """
        whole, t = self.of(place.first, place.last), place.shards
        if t == 1:
            return whole
        layers = self.layers[place.first : place.last]
        sums_ms = sum(2 * self.link.ms(2 * (t - 1) / t * layer.output_bytes) for layer in layers)
        state = self.state_on_shards({t})
        parameters = state.on_fullest_shard("parameter", place)
        return replace(
            whole,
            forward_ms=whole.forward_ms / t + sums_ms,
            backward_ms=whole.backward_ms / t + sums_ms,
            input_ms=whole.input_ms / t + sums_ms,
            weight_ms=whole.weight_ms / t,
            activation_bytes=whole.activation_bytes // t,
            parameter_bytes=parameters,
            optimizer_bytes=state.on_fullest_shard("optimizer", place),
            optimizer_ms=whole.optimizer_ms * (parameters / whole.parameter_bytes if whole.parameter_bytes else 1.0),
        )

    def state_on_shards(self, shards: Collection[int]) -> StateBytes:
        """What the model's tensors take, cut over these numbers of shards."""
        return self.state if self.state is not None else _state_of_layers(self.layers, frozenset(shards))

    def with_outline(self, outline: ModelOutline) -> ModelProfile:
        """The same profile; `outline` says how the model's tensors are cut over shards."""
        return self if self.state is None else replace(self, state=replace(self.state, outline=outline))

    def stages(self, plan: ParallelPlan) -> tuple[LayerProfile, ...]:
        """The profile of one shard of each stage of a plan."""
        return tuple(self.stage(place) for place in plan.stages)

    def crossing(self, plan: ParallelPlan) -> StageConnections:
        """What crosses between the plan's stages, with bytes of one microbatch."""
        pairs: Sequence[tuple[int, int, int]]
        if self.outputs is not None:
            pairs = self.outputs
        else:
            pairs = [(i, i + 1, layer.output_bytes) for i, layer in enumerate(self.layers[:-1])]
        stage_of = {i: s for s, stage in enumerate(plan.stages) for i in range(stage.first, stage.last)}
        # A producer's value crosses once to each consuming stage, however many of its layers read it.
        sizes = {(producer, stage_of[consumer]): nbytes for producer, consumer, nbytes in pairs}
        edges: dict[tuple[int, int], int] = {}
        for (producer, dst), nbytes in sizes.items():
            if stage_of[producer] != dst:
                edges[stage_of[producer], dst] = edges.get((stage_of[producer], dst), 0) + nbytes
        return StageConnections(tuple(StageEdge(src, dst, nbytes=n) for (src, dst), n in sorted(edges.items())))


@lru_cache(maxsize=16)
def _state_of_layers(layers: tuple[LayerProfile, ...], shards: frozenset[int]) -> StateBytes:
    """What layers take of which nothing but their bytes is known: each is one tensor with an element for every byte."""
    names = [str(index) for index in range(len(layers))]
    parameters = {name: layer.parameter_bytes for name, layer in zip(names, layers, strict=True)}
    cuts = {t: {name: TensorCut(0, size, even_ranges_by_shard(size, t)) for name, size in parameters.items()} for t in shards}
    outline = ModelOutline((), elements=tuple({name: size} for name, size in parameters.items()), cuts=cuts)
    optimizer = {name: layer.optimizer_bytes for name, layer in zip(names, layers, strict=True)}
    return StateBytes(outline, {"parameter": parameters, "gradient": parameters, "optimizer": optimizer})
