"""Measured times and bytes of a model on a machine, and what its layers keep for the backward, as data for the planner.

`worker/measure_profile.py` measures them.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Literal, NamedTuple

from raypar.errors import PlanError
from raypar.plan import ModelOutline, ParallelPlan, StageConnections, StageEdge, StagePlan, offloading
from raypar.plan.shard_ranges import TensorCut, even_ranges_by_shard
from raypar.plan.stage_connections import owner_of
from raypar.plan.state_bytes import StateBytes
from raypar.schedule.instructions import ACTIVATIONS, FETCHED, KEPT_INPUTS, RESIDENT, STASH, UNOFFLOADED, WRITTEN

MirrorPlace = Literal["memory", "files"]
"""Where the mirror's copies lie: in workers' memory, or in files, which the system may write out."""

BATCH = -1
"""Stands for the producing layer of a field of the batch."""


@dataclass(frozen=True, slots=True)
class ReadStorage:
    """A storage that a layer (or the loss) reads."""

    storage: int
    """Its number."""
    producer: int
    """Index of the layer that writes it, or `BATCH`."""
    has_gradient: bool
    """Whether it is of a value that requires a gradient; a stage that receives such a value keeps it until the backward."""


@dataclass(frozen=True, slots=True)
class LayerStorages:
    """Numbers of the storages that a layer reads and keeps, without parameters and buffers; the last one with the loss."""

    saved: tuple[int, ...]
    """What autograd saves in its forward."""
    stash: tuple[int, ...]
    """What `BackwardInput` keeps for its weight gradients."""
    reads: tuple[ReadStorage, ...]
    """What its forward reads."""
    of_loss: tuple[int, ...] = ()
    """Those of `saved` that the loss saves: they stay in memory where the layer is offloaded."""
    of_loss_alone: tuple[int, ...] = ()
    """Those of `of_loss` that the layer itself does not save: they are not written either."""


@dataclass(frozen=True)
class KeptStorages:
    """What the layers of a model keep of a microbatch of one size."""

    samples: int
    """Samples of the microbatch."""
    sizes: tuple[int, ...]
    """Number of a storage -> its bytes."""
    layers: tuple[LayerStorages, ...]
    """By layer."""

    def bytes_by_kind(
        self, first: int, last: int, recomputed: Collection[int] = (), offloaded: Collection[int] = ()
    ) -> dict[str, int]:
        """Kind of kept memory -> bytes that a stage of layers [first, last) keeps for a microbatch.

        `recomputed`, `offloaded`: indices of its recomputed and offloaded layers.
        """
        here = range(first, last)
        received = self._received(here)
        again = [i for i in here if i in recomputed]
        inputs = received | {r.storage for i in again for r in self.layers[i].reads if r.producer not in again}
        kept = received.union(*(self.layers[i].saved for i in here if i not in recomputed))
        saved_again = {storage for i in again for storage in self.layers[i].saved}
        # A recomputed output is a new storage, and another layer may still keep the storage of the first forward: both count.
        found = {
            ACTIVATIONS: self._bytes(kept | (saved_again & inputs)) + self._bytes(saved_again - inputs),
            KEPT_INPUTS: self._bytes(kept | inputs),
            STASH: self._bytes({storage for i in here for storage in self.layers[i].stash}),
        }
        if offloaded:
            left = inputs.union(*(self._left_by(i, offloaded) for i in here if i not in recomputed))
            found[RESIDENT] = self._bytes(left)
        return found

    def bytes_when_offloaded(
        self, first: int, last: int, recomputed: Collection[int], offloaded: Collection[int], *, split: bool
    ) -> dict[str, int]:
        """The same of a microbatch of which activations are offloaded: what was read when its backward begins, and inside it.

        `split`: whether its backward is, so that what weight gradients need stays there.
        """
        here = range(first, last)
        again = [i for i in here if i in recomputed]
        inputs = {r.storage for i in again for r in self.layers[i].reads if r.producer not in again}
        saved_again = {storage for i in again for storage in self.layers[i].saved}
        received = self._received(here)
        left = received.union(*(self._left_by(i, offloaded) for i in here if i not in recomputed))
        base, beside = left | (saved_again & (inputs | received)), self._bytes(saved_again - inputs - received)
        read = {s: ends for s, ends in self._offloaded(here, offloaded).items() if s not in base}
        top = max(i for i in here if i in offloaded)
        there = base | {s for s, (_, last_user) in read.items() if last_user == top}
        at_begin = self._bytes(there) + beside
        most = at_begin
        for layer in here:
            following = max((i for i in here if i in offloaded and i < layer), default=layer)
            now = {s for s, (first_user, last_user) in read.items() if last_user >= following and first_user <= layer}
            put_off = {s for i in here if split and i > layer for s in self.layers[i].stash}
            most = max(most, self._bytes(base | now | put_off) + beside)
        found = self.bytes_by_kind(first, last, recomputed, offloaded)
        return {
            **found,
            ACTIVATIONS: at_begin,
            KEPT_INPUTS: self._bytes(there | inputs | received),
            FETCHED: most - at_begin,
            WRITTEN: self.offloaded_bytes(first, last, offloaded),
            UNOFFLOADED: found[ACTIVATIONS],
        }

    def offloaded_bytes(self, first: int, last: int, offloaded: Collection[int], *, is_pinned: bool = False) -> int:
        """What a stage of layers [first, last) writes out of memory for a microbatch. `offloaded`: indices of such layers.
        `is_pinned`: in pinned memory, of which PyTorch takes a power of two for each piece."""
        found = self._offloaded(range(first, last), offloaded)
        if is_pinned:
            return sum(1 << (self.sizes[storage] - 1).bit_length() for storage in found)
        return self._bytes(found)

    def bytes_written_by_layer(self, first: int, last: int, offloaded: Collection[int]) -> dict[int, int]:
        """Layer that is offloaded, first one first -> what is written as its forward leaves it."""
        ends = self._offloaded(range(first, last), offloaded)
        layers = [i for i in range(first, last) if i in offloaded]
        return {i: self._bytes(s for s, (first_user, _) in ends.items() if first_user == i) for i in layers}

    def bytes_read_by_layer(self, first: int, last: int, offloaded: Collection[int]) -> dict[int, int]:
        """Layer that is offloaded, last one first -> what is read for its backward."""
        here = range(first, last)
        kept = {s for i in here for s in (self.layers[i].of_loss if i in offloaded else self.layers[i].saved)}
        ends = {s: ends for s, ends in self._offloaded(here, offloaded).items() if s not in kept}
        layers = [i for i in reversed(here) if i in offloaded]
        return {i: self._bytes(s for s, (_, last_user) in ends.items() if last_user == i) for i in layers}

    def _offloaded(self, here: range, offloaded: Collection[int]) -> dict[int, tuple[int, int]]:
        """Storage that a stage of layers `here` writes out of memory -> the first and the last of its layers that save it."""
        received, found = self._received(here), dict[int, tuple[int, int]]()
        for i in here:
            for storage in set(self.layers[i].saved).difference(self.layers[i].of_loss_alone) if i in offloaded else ():
                if storage not in received and self._is_offloaded(storage):
                    found[storage] = found.get(storage, (i, i))[0], i
        return found

    @property
    def largest_storage(self) -> int:
        """Bytes of the largest storage."""
        return max(self.sizes, default=0)

    def _received(self, here: range) -> set[int]:
        """The storages of values from other stages that a stage of layers `here` keeps."""
        return {r.storage for i in here for r in self.layers[i].reads if r.has_gradient and r.producer not in here}

    def _left_by(self, layer: int, offloaded: Collection[int]) -> set[int]:
        """What of its saved storages a layer leaves in memory."""
        saved = self.layers[layer].saved
        if layer not in offloaded:
            return set(saved)
        return {s for s in saved if not self._is_offloaded(s)}.union(self.layers[layer].of_loss)

    def _is_offloaded(self, storage: int) -> bool:
        return self.sizes[storage] >= offloading.SMALLEST_OFFLOADED_BYTES

    def _bytes(self, storages: Iterable[int]) -> int:
        return sum(self.sizes[storage] for storage in storages)


@dataclass(frozen=True, slots=True)
class LayerProfile:
    """One layer on one worker, for one microbatch.

    Times in ms: forward; the whole backward; and the same backward split into input gradients and weight gradients.
    `optimizer_ms` is once a step. `activation_bytes` are kept from forward to backward, `output_bytes` go to the next layer.
    `parameter_bytes` (of the masters, where layers compute with copies) and `optimizer_bytes` are those of a stage that has
    this layer alone: a tie counts in each of its layers. `gradient_bytes` are those of its summed gradients, which replicas
    send each other, where these are smaller than the parameters; None: as many as of the parameters. `in_parts_ms`: forward and
    backward of all virtual shards of the job on one worker, `in_parts_keep`: what these keep, of what the whole layer keeps;
    None: it has none.
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
    gradient_bytes: int | None = None
    in_parts_ms: float | None = None
    in_parts_keep: float | None = None
    time_steps: int = 0
    """Time steps of its recurrent modules: where it is cut, shards wait for each other after each."""

    @property
    def reduced_bytes(self) -> int:
        """What replicas reduce."""
        return self.parameter_bytes if self.gradient_bytes is None else self.gradient_bytes


@dataclass(frozen=True, slots=True)
class LinkProfile:
    """A link between two workers: a message takes `latency_ms + bytes / bandwidth`; `bandwidth` in bytes per ms."""

    latency_ms: float = 0.0
    bandwidth: float = float("inf")

    def ms(self, nbytes: float) -> float:
        """Time of one message."""
        return self.latency_ms + nbytes / self.bandwidth


class ActivationEdge(NamedTuple):
    """A value that one layer writes and another reads."""

    producer: int
    """Index of the layer that writes it."""
    consumer: int
    """Index of the layer that reads it."""
    nbytes: int
    """Its bytes of one microbatch."""
    value: str = ""
    """Its name, which tells the values of one layer apart; empty: all that the layer writes, as one value."""


@dataclass(frozen=True)
class ModelProfile:
    """A model's layers, measured on one kind of worker.

    `memory_bytes`: what one worker may use; None when it is not known.
    `outputs`: the values that cross when their layers are cut apart, once for each layer that reads them, as
    `ActivationEdge` or as its fields in a tuple; by default each layer feeds the next. `step_ms`: what a step costs beyond
    compute, transfers and reduction (vote, call, data). `processors`: how many workers can compute at the same time, where
    all share one machine; None: all of them. `state`: what the model's tensors take; None: each layer is taken to have one
    tensor, of its bytes, cut evenly over shards. `kept`: what layers keep for the backward, by size of microbatch; empty:
    each layer's `activation_bytes` are used instead. `recomputable`: indices of the layers that passed the check for
    recomputation; the others failed it or were not checked. `most_stages`: how many stages a plan may have; None: any number (1
    for an optimizer that couples parameters). `lengths`: of which length the microbatches are that were measured, in
    words, where others are shorter: `microbatches of length 128`; empty: all are as the first one. `reduction_buffer_bytes`:
    most memory of the buckets in which a stage's replicas reduce gradients; 0: not counted.
    `mirror`: where workers keep the mirror's copies of their state; None: there are none. `most_zero`: the highest ZeRO stage
    that the planner may choose (an optimizer that couples parameters allows none). `zero_is_open`: whether it chooses one.
    """

    layers: tuple[LayerProfile, ...]
    link: LinkProfile = LinkProfile()
    memory_bytes: int | None = None
    step_ms: float = 0.0
    outputs: tuple[ActivationEdge | tuple[int, int, int] | tuple[int, int, int, str], ...] | None = None
    processors: int | None = None
    state: StateBytes | None = None
    kept: tuple[KeptStorages, ...] = ()
    recomputable: tuple[int, ...] = ()
    most_stages: int | None = None
    lengths: str = ""
    reduction_buffer_bytes: int = 0
    mirror: MirrorPlace | None = None
    most_zero: int = 1
    zero_is_open: bool = False
    scatter_is_open: bool = False
    """Whether the planner may have gradients scattered."""
    offloads_optimizer: bool = False
    """Whether what the optimizer keeps, masters and averages lie in files."""
    activations_place: str = "FOLDER"
    """What `plan.activations_in` may be for these workers: a folder, or `HOST`."""
    offload_bandwidth: float = float("inf")
    """Of the files of offloaded activations, to write and to read, in bytes per ms."""

    def __post_init__(self) -> None:
        if not self.layers:
            raise PlanError("the profile has no layers", cure="profile a model with at least one layer")

    @property
    def zero_levels(self) -> range:
        """The ZeRO stages that a plan may have."""
        return range(1 if self.most_stages == 1 else self.most_zero + 1)

    def work_sums(self, recompute: Collection[int] = ()) -> tuple[float, ...]:
        """Prefix sums [layers + 1] of the least time of each layer per microbatch, its backward whole or split.

        `recompute`: indices of layers whose forward runs twice.
        """
        work = [x.forward_ms + min(x.backward_ms, x.input_ms + x.weight_ms) for x in self.layers]
        for layer in recompute:
            work[layer] += self.layers[layer].forward_ms
        return (0.0, *itertools.accumulate(work))

    @property
    def is_chain(self) -> bool:
        """Whether every layer but the first needs a value of the layer before it."""
        if self.outputs is None:
            return True
        pairs = {(output.producer, output.consumer) for output in self._values_between_layers}
        return all((i, i + 1) in pairs for i in range(len(self.layers) - 1))

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
            gradient_bytes=None if part[0].gradient_bytes is None else sum(x.reduced_bytes for x in part),
        )

    def stage(self, place: StagePlan) -> LayerProfile:
        """The profile of the busiest shard of a stage.

        A shard computes its part of each layer (`work_shares`), or, if it has several virtual shards, so much of what all of
        them were measured to take; activations are divided evenly. A layer that is cut costs two
        all-reduces of its output forward and two backward, as a transformer's does (Shoeybi et al. 2019, section 3), each
        2 (t-1)/t of the bytes; overlap is not counted. Recurrent layers wait for a message after each time step, too.
        """
        whole, t = self.of(place.first, place.last), place.shards
        if place.virtual_shards == 1:
            return whole
        layers = self.layers[place.first : place.last]
        shares = self.work_shares(place)[place.first : place.last]
        most = max(map(len, place.runs))
        sums_ms = sum(
            2 * self.link.ms(2 * (t - 1) / t * layer.output_bytes)
            for layer, share in zip(layers, shares, strict=True)
            if share < most
        )
        if t > 1:
            cut = (layer for layer, share in zip(layers, shares, strict=True) if share < most)
            sums_ms += self.link.latency_ms * sum(layer.time_steps for layer in cut)
        if most > 1:
            shares = tuple(_timed_share(*each, most / place.virtual_shards) for each in zip(layers, shares, strict=True))
        parts = list(zip(layers, shares, strict=True))
        state = self.state_on_shards({place.virtual_shards})
        parameters = state.on_fullest_shard("master" if "master" in state.by_tensor else "parameter", place)
        return replace(
            whole,
            forward_ms=sum(share * layer.forward_ms for layer, share in parts) + sums_ms,
            backward_ms=sum(share * layer.backward_ms for layer, share in parts) + sums_ms,
            input_ms=sum(share * layer.input_ms for layer, share in parts) + sums_ms,
            weight_ms=sum(share * layer.weight_ms for layer, share in parts),
            activation_bytes=self._on_fullest_shard(whole.activation_bytes, place),
            parameter_bytes=parameters,
            optimizer_bytes=state.on_fullest_shard("optimizer", place),
            optimizer_ms=whole.optimizer_ms * (parameters / whole.parameter_bytes if whole.parameter_bytes else 1.0),
            gradient_bytes=None if whole.gradient_bytes is None else state.on_fullest_shard("gradient", place),
        )

    @property
    def price_of_virtual_shards(self) -> float | None:
        """What forward and backward of all virtual shards take on one worker, of what whole layers take; None: not timed."""
        timed = [layer for layer in self.layers if layer.in_parts_ms is not None]
        whole_ms = sum(layer.forward_ms + layer.backward_ms for layer in timed)
        return sum(layer.in_parts_ms or 0.0 for layer in timed) / whole_ms if whole_ms else None

    def work_shares(self, place: StagePlan) -> tuple[float, ...]:
        """By layer of the model: the share of its work that the busiest shard of such a stage computes. What is whole in a
        layer that is cut is computed once for each virtual shard. Where styles are not known all layers are cut."""
        outline = self.state.outline if self.state is not None else None
        if outline is None or place.virtual_shards not in outline.layouts:
            return (max(map(len, place.runs)) / place.virtual_shards,) * len(self.layers)
        key = place.virtual_shards, place.division
        if key not in self._work_shares:
            self._work_shares[key] = largest_work_shares(outline, place)
        return self._work_shares[key]

    @cached_property
    def _work_shares(self) -> dict[tuple[int, tuple[int, ...]], tuple[float, ...]]:
        """Cache of `work_shares`."""
        return {}

    def kept_bytes(
        self, plan: ParallelPlan, stage: int, samples: int, *, recompute: bool, offload: bool = False, split: bool = False
    ) -> dict[str, int]:
        """Kind of kept memory -> bytes that one shard of a stage keeps for a microbatch of so many samples.

        `recompute`: whether the stage runs a `CheckpointedForward`; else its recomputed layers keep everything too. `offload`:
        whether it runs an `OffloadedForward`; `split`: whether the microbatch's backward is split then.
        """
        place, recomputed = plan.stages[stage], plan.recomputed_layers(stage) if recompute else ()
        offloaded = plan.offloaded_layers(stage) if offload else ()
        if self.kept:
            near = min(self.kept, key=lambda kept: abs(kept.samples - samples))
            if offloaded:
                found = near.bytes_when_offloaded(place.first, place.last, recomputed, offloaded, split=split)
            else:
                found = near.bytes_by_kind(place.first, place.last, recomputed)
            if samples and near.samples != samples:
                found = {kind: nbytes * samples // near.samples for kind, nbytes in found.items()}
        else:
            found = self._kept_bytes_of_layers(place, recomputed, offloaded)
        return {kind: self._on_fullest_shard(nbytes, place) for kind, nbytes in found.items()}

    def offloaded_bytes(self, plan: ParallelPlan, stage: int, samples: int = 0, *, is_pinned: bool = False) -> int:
        """Bytes that one shard of a stage writes out of memory for a microbatch of so many samples; 0: as was measured.
        `is_pinned`: what they take in pinned memory."""
        place, offloaded = plan.stages[stage], plan.offloaded_layers(stage)
        if not offloaded:
            return 0
        if not self.kept:
            return self._on_fullest_shard(sum(self.layers[i].activation_bytes for i in offloaded), place)
        near = min(self.kept, key=lambda kept: abs(kept.samples - samples)) if samples else self.kept[0]
        found = near.offloaded_bytes(place.first, place.last, offloaded, is_pinned=is_pinned)
        return self._on_fullest_shard(found * samples // near.samples if samples else found, place)

    def bytes_written_by_layer(self, plan: ParallelPlan, stage: int) -> dict[int, int]:
        """Layer of a stage that is offloaded, first one first -> what one shard writes of the largest microbatch as its
        forward leaves it."""
        place, offloaded = plan.stages[stage], plan.offloaded_layers(stage)
        if self.kept:
            largest = max(self.kept, key=lambda kept: kept.samples)
            found = largest.bytes_written_by_layer(place.first, place.last, offloaded)
        else:
            found = {i: self.layers[i].activation_bytes for i in offloaded}
        return {layer: self._on_fullest_shard(nbytes, place) for layer, nbytes in found.items()}

    def bytes_read_by_layer(self, plan: ParallelPlan, stage: int) -> dict[int, int]:
        """Layer of a stage that is offloaded, last one first -> what one shard reads for its backward."""
        place, offloaded = plan.stages[stage], plan.offloaded_layers(stage)
        if self.kept:
            found = self.kept[0].bytes_read_by_layer(place.first, place.last, offloaded)
        else:
            found = {i: self.layers[i].activation_bytes for i in reversed(offloaded)}
        return {layer: self._on_fullest_shard(nbytes, place) for layer, nbytes in found.items()}

    def _on_fullest_shard(self, nbytes: int, place: StagePlan) -> int:
        """Bytes that one shard keeps where whole layers keep `nbytes`: an even part, or, if a shard has several virtual shards,
        its part of what all of these were measured to keep."""
        most, layers = max(map(len, place.runs)), self.layers[place.first : place.last]
        if most == 1 or any(layer.in_parts_keep is None for layer in layers):
            return nbytes // place.shards
        weights = [max(1, layer.activation_bytes) for layer in layers]
        of_all = sum(w * (layer.in_parts_keep or 0.0) for w, layer in zip(weights, layers, strict=True)) / sum(weights)
        return int(nbytes * of_all * most / place.virtual_shards)

    def _kept_bytes_of_layers(
        self, place: StagePlan, recomputed: tuple[int, ...], offloaded: tuple[int, ...] = ()
    ) -> dict[str, int]:
        """`kept_bytes` from `activation_bytes` alone; of adjacent recomputed layers only the first one's inputs are kept."""
        here = range(place.first, place.last)
        every = sum(self.layers[i].activation_bytes for i in here)
        kept = sum(self.layers[i].activation_bytes for i in here if i not in recomputed)
        read = {
            (output.producer, output.value): output.nbytes
            for output in self._values_between_layers
            if output.consumer in recomputed and (output.producer not in recomputed or output.producer < place.first)
        }
        inputs = kept + sum(read.values())
        found = {ACTIVATIONS: every, KEPT_INPUTS: inputs, STASH: every}
        if offloaded:
            sizes = [self.layers[i].activation_bytes for i in reversed(offloaded)]
            two = max(map(sum, zip(sizes, [*sizes[1:], 0], strict=True)))
            found |= {ACTIVATIONS: every - sum(sizes[1:]), KEPT_INPUTS: inputs - sum(sizes[1:])}
            found |= {RESIDENT: inputs - sum(sizes), FETCHED: two - sizes[0], WRITTEN: sum(sizes), UNOFFLOADED: every}
        return found

    @cached_property
    def _values_between_layers(self) -> tuple[ActivationEdge, ...]:
        """The values that pass between layers, once for each layer that reads them."""
        if self.outputs is not None:
            return tuple(ActivationEdge(*output) for output in self.outputs)
        return tuple(ActivationEdge(i, i + 1, layer.output_bytes) for i, layer in enumerate(self.layers[:-1]))

    def state_on_shards(self, shards: Collection[int]) -> StateBytes:
        """What the model's tensors take, cut over these numbers of shards."""
        return self.state if self.state is not None else _state_of_layers(self.layers, frozenset(shards))

    def with_undivided(self, names: frozenset[str]) -> ModelProfile:
        """The same profile, in which one owner keeps whole what an optimizer keeps for each of these parameters."""
        return self if self.state is None else self.with_outline(replace(self.state.outline, undivided=names))

    def with_outline(self, outline: ModelOutline) -> ModelProfile:
        """The same profile; `outline` says how the model's tensors are cut over shards."""
        return self if self.state is None else replace(self, state=replace(self.state, outline=outline))

    def stages(self, plan: ParallelPlan) -> tuple[LayerProfile, ...]:
        """The profile of one shard of each stage of a plan."""
        return tuple(self.stage(place) for place in plan.stages)

    def crossing(self, plan: ParallelPlan) -> StageConnections:
        """What crosses between the plan's stages, with bytes of one microbatch."""
        stage_of = {i: s for s, stage in enumerate(plan.stages) for i in range(stage.first, stage.last)}
        edges: dict[tuple[int, int], dict[str, tuple[int, int]]] = {}
        for producer, consumer, nbytes, value in self._values_between_layers:
            src, dst, name = stage_of[producer], stage_of[consumer], value or f"of layer {producer}"
            if src != dst:
                # A value crosses once to each consuming stage, however many of its layers read it.
                sizes = edges.setdefault((src, dst), {})
                sizes[name] = nbytes, sizes.get(name, (0, 0))[1] + 1
        return StageConnections(tuple(_edge_of(src, dst, sizes) for (src, dst), sizes in sorted(edges.items())))


def _timed_share(layer: LayerProfile, share: float, of_all: float) -> float:
    """The share of a whole layer's time that a shard takes which computes `of_all` of its virtual shards; `share` of its work
    where they were not timed."""
    whole_ms = layer.forward_ms + layer.backward_ms
    return of_all * layer.in_parts_ms / whole_ms if layer.in_parts_ms is not None and whole_ms else share


def _edge_of(src: int, dst: int, values: Mapping[str, tuple[int, int]]) -> StageEdge:
    """`values`: value -> (bytes, number of layers of `dst` that read it)."""
    sizes, readers = (tuple(numbers) for numbers in zip(*values.values(), strict=True))
    return StageEdge(src, dst, tuple(values), sum(sizes), value_bytes=sizes, readers=readers if max(readers) > 1 else ())


def largest_work_shares(outline: ModelOutline, place: StagePlan) -> tuple[float, ...]:
    """By layer of the model: the share of its work that the busiest shard of such a stage computes; 1 for a layer that is
    computed whole on every shard, and more for what is whole in a cut layer if a shard has several virtual shards.

    A module's work is assumed to be proportional to its number of elements, as for linear layers.
    """
    shards = place.virtual_shards
    layout, layers = outline.layouts[shards], len(outline.elements)
    costs, once = layout.costs, layout.computed_once(0, layers, layers)
    aliases = {names[0]: names for names in outline.ties}
    found = []
    for index, elements in enumerate(outline.elements):
        if index in once:
            found.append(1.0)
            continue
        on_shard, total = [0.0] * shards, 0
        for parameter, size in elements.items():
            if parameter in outline.buffers:
                continue
            # A tie stands under its first name, which may be that of another layer.
            here = next((n for n in aliases.get(parameter, ()) if outline.layer_of(n) == index), parameter)
            cost = costs.get(owner_of(here))
            on_shard = [work + size * (cost[t].compute if cost else 1.0) for t, work in enumerate(on_shard)]
            total += size
        busiest = max(sum(on_shard[v] for v in run) for run in place.runs)
        found.append(busiest / total if total else float(max(map(len, place.runs))))
    return tuple(found)


@lru_cache(maxsize=16)
def _state_of_layers(layers: tuple[LayerProfile, ...], shards: frozenset[int]) -> StateBytes:
    """What layers take of which nothing but their bytes is known: each is one tensor with an element for every byte."""
    names = [str(index) for index in range(len(layers))]
    parameters = {name: layer.parameter_bytes for name, layer in zip(names, layers, strict=True)}
    cuts = {t: {name: TensorCut(0, size, even_ranges_by_shard(size, t)) for name, size in parameters.items()} for t in shards}
    outline = ModelOutline((), elements=tuple({name: size} for name, size in parameters.items()), shardings=cuts)
    optimizer = {name: layer.optimizer_bytes for name, layer in zip(names, layers, strict=True)}
    return StateBytes(outline, {"parameter": parameters, "gradient": parameters, "optimizer": optimizer})
