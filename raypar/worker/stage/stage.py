"""One replica of one stage: its layers, run forward and backward a microbatch at a time by the numerics contract.

`worker/stage_builder.py` makes stages.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from raypar.comm.buffer_pool import CPU
from raypar.comm.sent_tensor_layout import copy_as_it_lies
from raypar.errors import RayparError, UserCodeError
from raypar.model.graph import Graph, Layer
from raypar.model.split_backward import DeferredWeightGradient, Stash
from raypar.model.tensor_parallel.local_part_layout import LocalPartLayout
from raypar.model.tensor_parallel.weight_gradient_memory_reuse import GradientReusePolicy
from raypar.plan import MicrobatchRouting
from raypar.torch_compat.autograd import has_gradient_hooks, hooks_of_node, share_hooks
from raypar.user_code.user_code_errors import USER_CODE_ERRORS
from raypar.worker.metrics.stage_metrics import StageMetrics
from raypar.worker.process.seed_generators import HostGenerators
from raypar.worker.process.seeded_calls import SeededCalls
from raypar.worker.process.torch_state_guard import TorchStateGuard
from raypar.worker.stage.activation_offloading import OffloadedActivations, StageOffload
from raypar.worker.stage.backward import (
    DeferredGradients,
    LayerBackwardHooks,
    run_autograd_backward,
    sum_deferred_gradients,
    take_by_layer,
    take_uses_apart,
)
from raypar.worker.stage.buffer_updates import BufferUpdates, apply_buffer_updates
from raypar.worker.stage.gradient_accumulator import GradientAccumulator, Ready
from raypar.worker.stage.layer_call import LayerFunction, PassContext, training_pass_context, validation_pass_context
from raypar.worker.stage.layer_tensors import (
    Hooks,
    LayerPass,
    ParameterUse,
    StageTensors,
    alias_received,
    make_alias,
    memory_begin,
    own_tensors,
    read_inputs,
)
from raypar.worker.stage.loss import LossCall
from raypar.worker.stage.recomputation import NO_RECOMPUTATION, StageRecomputation
from raypar.worker.stage.running_statistics import make_stand_ins
from raypar.worker.stage.saved_tensors import SavedTensors
from raypar.worker.stage.stage_coordinate_in_errors import StageCoordinate
from raypar.worker.stage.stage_shard import StageShard
from raypar.worker.stage.whole_layers import BEFORE_ALL, PassKind, WholeLayers

Batch = Mapping[str, Tensor]
"""The fields of one microbatch, collated."""
HandedBack = Tensor | tuple[Tensor, ...] | None
"""A received value's gradients: their sum from here on, None where there is none; of a value of `StageValues.apart` those of
each use here, newest first."""


def fold_gradients(gradients: Sequence[Tensor | None]) -> Tensor | None:
    """The sum of the defined gradients in the order given, ((g1 + g2) + g3); a single one is returned as it is."""
    total: Tensor | None = None
    for gradient in gradients:
        if gradient is not None:
            total = gradient if total is None else total + gradient
    return total


def _without_graph(value: Tensor) -> Tensor:
    """The value, as a tensor that requires a gradient if the value does, and refers to no graph."""
    return value.detach().requires_grad_() if value.requires_grad else value.detach()


@dataclass
class StageLayer:
    """One layer in a stage's forward pass: read the inputs, call the layer, name the outputs."""

    layer: Layer
    """The layer, with the names of what it reads and returns."""
    call: LayerFunction
    """Runs the layer: a `LayerCall`, or what wraps one."""
    hooks: Hooks
    """Hooks of the values that the layer returns."""
    shared: tuple[str, ...]
    """What the layer reads and others read too (or the loss)."""

    def read(self, values: Mapping[str, Tensor]) -> list[Tensor]:
        """The layer's arguments."""
        return read_inputs(values, self.layer.inputs, self.layer.name)

    @contextlib.contextmanager
    def refusing_hooks(self, values: Mapping[str, Tensor]) -> Iterator[None]:
        """A context for the layer's call. Raises `UserCodeError` if it has registered a hook on a value that others read too,
        or on the node behind that.

        It would be called with the sum of the gradients of all readers in this stage: another sum under another plan.
        """
        nodes = [(name, values[name].grad_fn) for name in self.shared]
        before = [(name, kept, len(kept)) for name, node in nodes if node is not None for kept in hooks_of_node(node)]
        yield
        on_values = [f"its input {name!r}" for name in self.shared if has_gradient_hooks(values[name])]
        on_nodes = [f"the grad_fn of its input {name!r}" for name, kept, count in before if len(kept) != count]
        refused = on_values + on_nodes
        if refused:
            raise UserCodeError(
                f"layer {self.layer.name!r} registers a hook on {refused[0]}, which others read too: which of their gradients "
                "the hook is called with would depend on the plan",
                cure="register the hook on a view of the input, which the layer then computes with: x = x.view_as(x)",
            )


@dataclass(frozen=True)
class StageValues:
    """The values that enter and leave a stage."""

    batch_fields: tuple[str, ...]
    """Fields of the batch that the stage's layers and the loss read."""
    received: tuple[str, ...]
    """Values from other stages that the stage's layers and the loss read."""
    relayed: frozenset[str]
    """Those of `received` of which a later reader sends the sum of gradients here: it goes on with this stage's added."""
    apart: frozenset[str]
    """Those of `received` of which the gradient of each use here goes to the producer by itself (`GradientRelay.apart`)."""
    outgoing: tuple[str, ...]
    """Values written here that layers of other stages, or the loss there, read."""


@dataclass
class _Microbatch:
    """What is kept of one microbatch between its forward and its backward pass."""

    entries: dict[str, GradientEdge] = field(default_factory=dict)
    """Outgoing or relayed value that has a graph -> where the gradient from later stages enters the graph."""
    apart: dict[str, GradientEdge] = field(default_factory=dict)
    """Received value that has a graph and whose uses' gradients go back apart -> where these gradients leave the graph."""
    loss: Tensor | None = None
    """The loss's sum with its graph, where the stage has the last layer."""
    stash: Stash = field(default_factory=list)
    """Weight gradients that layers with a split backward have put off."""
    kept_inputs: dict[str, Tensor] = field(default_factory=dict)
    """Value -> the tensor that `recompute` will read; empty where nothing was dropped."""
    dropped: list[SavedTensors] = field(default_factory=list)
    """The dropped tensors of each recomputed layer in order, then of the loss if it is recomputed."""
    offloaded: OffloadedActivations | None = None
    """What is offloaded; None: nothing."""
    value_layouts: dict[str, LocalPartLayout] = field(default_factory=dict)
    """Value between layers -> how it is cut over shards, for `recompute`."""

    def drop(self, saved: SavedTensors | None) -> None:
        """Drop what a recomputed call has saved. None: a call that is not recomputed."""
        if saved is not None:
            saved.drop()
            self.dropped.append(saved)

    def release_offloaded(self) -> None:
        """Forget what is offloaded: the backward pass has run, or will not."""
        if self.offloaded is not None:
            self.offloaded.release()
        self.offloaded = None


@dataclass(eq=False)
class Stage:
    """The layers of one stage on one replica (and shard): forward and backward of microbatches."""

    graph: Graph
    """The whole model."""
    index: int
    """Number of the stage in the plan."""
    coordinate: StageCoordinate
    """The stage's place in the plan, for messages."""
    seed: int
    """The job's seed."""
    routing: MicrobatchRouting
    """Which replica runs a microbatch, and the blocks of microbatches."""
    shard: StageShard | None
    """Which shard of the stage this is; None if the stage is not cut."""
    guard: TorchStateGuard
    """Restores process state that users' code leaves changed."""
    weights: StageTensors
    """The tensors that the layers compute with."""
    layers: list[StageLayer]
    """The layers in order."""
    loss: LossCall | None
    """Computes the loss where the stage has the last layer, else None."""
    values: StageValues
    """The values that enter and leave the stage."""
    gradients: GradientAccumulator
    """Adds up gradients of the parameters' uses over microbatches and blocks."""
    hooks: LayerBackwardHooks
    """Called when a backward pass has completed the gradient of a value."""
    deferred: DeferredGradients
    """Weight gradients that layers with a split backward put off."""
    gradient_reuse_policy: GradientReusePolicy
    """Keeps the memory of the weight gradients of sharded Linears from step to step."""
    recomputation: StageRecomputation
    """The layers whose activations `checkpointed_forward` drops."""
    evaluation_calls: Sequence[SeededCalls]
    """By layer: how it is called in evaluation mode."""
    buffer_updates: Mapping[str, BufferUpdates]
    """Layer name -> what forward has written into its buffers in the step under way; layers that write none are left out."""

    offload: StageOffload | None = None
    """Which layers' activations `offloaded_forward` writes out of memory, and where to; None: no layer's."""
    gives: WholeLayers | None = None
    """The whole layers that the stage calls for other virtual shards of the worker, too; None: it calls them for itself."""
    takes: WholeLayers | None = None
    """The whole layers that another virtual shard calls, of which this one has nothing; None: it calls all of its layers."""
    place_in_set: Callable[[int], tuple[str, int]] = field(default=lambda microbatch: ("", microbatch))
    """Microbatch of the present pass over validation data -> (data set, its number in it)."""
    gradient_wait_ns: Callable[[], int] | None = None
    """How long gradients have waited, inside the backward passes of the step under way, to be handed over."""
    metrics: StageMetrics | None = None
    """Measures microbatches where the stage has the last layer and the job has metrics."""
    step: int = -1
    """The step under way, from 0; -1 before the first."""
    loss_scale: float | None = None
    """The gradient from which the backward pass of the loss starts in the step under way; None: 1, and nothing is scaled."""
    losses: dict[int, tuple[Tensor | float, Tensor | float]] = field(default_factory=dict)
    """Microbatch -> (sum, count) of its loss, in the last step or validation pass."""
    _live: dict[int, _Microbatch] = field(default_factory=dict)
    """What each microbatch under way keeps."""
    _made_training: list[tuple[nn.Module, bool]] = field(init=False)
    """Every module and its training mode as made: what a constructor has put into evaluation mode stays in it."""
    _training: bool = True
    """Whether the modules are in training mode now."""

    _read_last: tuple[tuple[str, ...], ...] = field(init=False)
    """By layer: what nothing here reads after it in evaluation mode."""

    def __post_init__(self) -> None:
        self._made_training = [(part, part.training) for module in self.modules.values() for part in module.modules()]
        self._read_last = self._find_last_reads()
        self._uses_of_layers = [self.weights.of_layer(position).uses for position in range(len(self.layers))]

    # -- what others read ----------------------------------------------------------------------------------------------

    @property
    def modules(self) -> Mapping[str, nn.Module]:
        """Layer name -> module."""
        return self.weights.modules

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """Canonical name -> parameter, frozen ones too."""
        return self.weights.parameters

    @property
    def uses(self) -> list[ParameterUse]:
        """(qualified name, shape, dtype) of every trainable use of a parameter, in layer order."""
        return self.weights.uses

    @property
    def buffers(self) -> dict[str, Tensor]:
        """Qualified name -> buffer as it was given, whatever forward has put in its place since."""
        return self.weights.buffers

    @property
    def persistent(self) -> frozenset[str]:
        """Names of the buffers that exports contain."""
        return self.weights.persistent

    @property
    def buffer_device(self) -> torch.device:
        """Where the stage's buffers lie."""
        return next((buffer.device for buffer in self.buffers.values()), CPU)

    @property
    def batch_fields(self) -> tuple[str, ...]:
        """Fields of the batch that the stage reads."""
        return self.values.batch_fields

    @property
    def has_no_layers(self) -> bool:
        """Whether another virtual shard of the worker calls all of its layers: there is nothing to run here."""
        return self.takes is not None and len(self.takes.positions) == len(self.layers)

    @cached_property
    def values_read(self) -> frozenset[str]:
        """What the layers that are called here read, and the loss."""
        taken = () if self.takes is None else self.takes.positions
        read = {name for at, layer in enumerate(self.layers) if at not in taken for name in layer.layer.inputs}
        return frozenset(read | {*(self.loss.inputs + self.loss.fields if self.loss is not None else ())})

    @property
    def on_ready(self) -> Ready | None:
        """Called when the subtree sums of some uses are final, once for each use and step; where possible from inside the last
        backward pass."""
        return self.gradients.on_ready

    @on_ready.setter
    def on_ready(self, call: Ready | None) -> None:
        self.gradients.on_ready = call

    @property
    def waited_ns(self) -> int:
        """How long layers have waited in this step for other shards, their parameters and offloaded activations, and gradients
        for room on their way to their owners."""
        waited_ns = 0 if self.gradient_wait_ns is None else self.gradient_wait_ns()
        waited_ns += 0 if self.weights.gathers is None else self.weights.gathers.waited_ns
        waited_ns += 0 if self.offload is None else self.offload.waited_ns
        return waited_ns if self.shard is None else waited_ns + self.shard.group.waited_ns

    def stash_of(self, microbatch: int) -> Sequence[DeferredWeightGradient]:
        """The weight gradients of a microbatch that are still to be computed."""
        return tuple(self._live[microbatch].stash)

    def partial_uses(self) -> tuple[int, ...]:
        """Indices of uses whose gradient is only a part of a sum: of parameters that every shard has whole but that met parts
        of values."""
        return () if self.shard is None else self.weights.uses_of(tuple(self.shard.group.partially_used_parameters))

    # -- life of a stage -----------------------------------------------------------------------------------------------

    def begin_step(self, step: int) -> None:
        """Begin a step: forget the last one. Gradients of parameters (`.grad`) are no longer valid."""
        self.step = step
        self.losses.clear()
        if self.metrics is not None:
            self.metrics.begin()
        for live in self._live.values():
            live.release_offloaded()
        self._live.clear()
        if self.offload is not None:
            self.offload.waited_ns = 0
        for updates in self.buffer_updates.values():
            updates.begin_step()
        if self.shard is not None:
            self.shard.group.waited_ns = 0
        self.gradient_reuse_policy.begin_step()
        self.gradients.begin()
        if self.gives is not None:
            self.gives.begin_step()
        if self.weights.gathers is not None:
            self.weights.gathers.waited_ns = 0
        self._train(True)

    def apply_buffer_updates(self) -> None:
        """Change the buffers by what forward has written in the step under way, in all replicas."""
        apply_buffer_updates(self.buffer_updates.values())

    def free(self, microbatch: int) -> None:
        """Drop the activations of a microbatch, which have had their last use."""
        live = self._live.pop(microbatch, None)
        if live is not None:
            live.release_offloaded()

    def release(self) -> None:
        """Break the reference circles of modules, their forwards and hooks; the stage cannot be used any more."""
        for module in self.modules.values():
            for part in module.modules():
                vars(part).pop("forward", None)
                vars(part).pop("stash", None)
        self.hooks.release()
        self.weights.gathers = None
        vars(self).clear()

    def _train(self, mode: bool) -> None:
        if mode != self._training:
            self._training = mode
            for part, made in self._made_training:
                part.training = mode and made

    # -- forward -------------------------------------------------------------------------------------------------------

    def forward(self, microbatch: int, received: Mapping[str, Tensor], batch: Batch) -> dict[str, Tensor]:
        """Run the layers on a microbatch in training; returns the values that other stages read.

        `received`: values from other stages; `batch`: fields of this microbatch.
        """
        return self._run_forward(microbatch, received, batch, NO_RECOMPUTATION)

    def checkpointed_forward(self, microbatch: int, received: Mapping[str, Tensor], batch: Batch) -> dict[str, Tensor]:
        """As `forward`, but drops the activations of each recomputed layer as soon as it has run.

        `recompute` must run before the backward pass.
        """
        return self._run_forward(microbatch, received, batch, self.recomputation)

    def offloaded_forward(self, microbatch: int, received: Mapping[str, Tensor], batch: Batch) -> dict[str, Tensor]:
        """As `forward`, but begins to write the activations of each offloaded layer as soon as it has run.

        `fetch` must run before the backward pass.
        """
        return self._run_forward(microbatch, received, batch, NO_RECOMPUTATION, self.offload)

    def offloaded_checkpointed_forward(
        self, microbatch: int, received: Mapping[str, Tensor], batch: Batch
    ) -> dict[str, Tensor]:
        """As `offloaded_forward`, but drops the activations of each recomputed layer.

        `fetch`, then `recompute` must run before the backward pass.
        """
        return self._run_forward(microbatch, received, batch, self.recomputation, self.offload)

    def fetch(self, microbatch: int) -> None:
        """Begin to read what the backward pass needs first of all that `offloaded_forward` has written. It reads the rest
        itself, layer by layer."""
        offloaded = self._live[microbatch].offloaded
        if offloaded is not None:
            offloaded.fetch()

    def _run_forward(
        self,
        microbatch: int,
        received: Mapping[str, Tensor],
        batch: Batch,
        recomputation: StageRecomputation,
        offload: StageOffload | None = None,
    ) -> dict[str, Tensor]:
        """`recomputation`: the layers whose activations are dropped; `offload`: those whose activations are offloaded."""
        self.gradient_reuse_policy.before_forward()
        live = self._live[microbatch] = _Microbatch()
        if offload is not None:
            live.offloaded = OffloadedActivations(offload, f"of microbatch {microbatch} on stage {self.index}")
        self.deferred.stash = live.stash
        values: dict[str, Tensor] = {**self._read_received(live, received), **batch}
        known = set(map(id, values.values()))
        forward_pass = training_pass_context(self.seed, self.step, microbatch, self.weights.layer_names)
        make_stand_ins(norm for updates in self.buffer_updates.values() for norm in updates.recorders)
        self._begin_layers("forward")
        for position, layer in enumerate(self.layers):
            is_offloaded = offload is not None and position in offload.positions
            saved = self._new_saved_tensors(position) if is_offloaded or position in recomputation.positions else None
            inputs = layer.read(values)
            given = self._alias_inputs(position, inputs)
            with layer.refusing_hooks(values) if layer.shared else contextlib.nullcontext():
                outputs = self._call_layer("forward", position, forward_pass.with_saved_tensors(saved), given)
            if saved is not None and is_offloaded and live.offloaded is not None:
                saved.offload(live.offloaded, position, self._memory_that_stays(position, values))
            else:
                live.drop(saved)
            outputs = own_tensors(outputs, known if given is inputs else known.union(map(id, given)))
            for output in outputs:
                if output.requires_grad:
                    share_hooks(output, layer.hooks)
            known.update(map(id, outputs))
            values.update(zip(layer.layer.outputs, outputs, strict=True))
            self._give("forward", position, microbatch, inputs, outputs)
            if offload is not None:  # else all values would be in memory until the last layer has run
                gone = [name for name in self._read_last[position] if name not in recomputation.inputs]
                known.difference_update([id(values.pop(name)) for name in gone])
        self._end_layers()
        if self.loss is not None:
            saved = SavedTensors("the loss") if recomputation.with_loss else None
            live.loss, count = self.loss(forward_pass.with_saved_tensors(saved), values)
            live.drop(saved)
            self.losses[microbatch] = (live.loss.detach(), count)
            if self.metrics is not None and self.metrics.are_due(self.step):
                with torch.no_grad():
                    self.metrics.measure(forward_pass, values, self._fields(values, batch))
        of_batch = {name for name in recomputation.inputs if values[name] is batch.get(name)}
        live.kept_inputs = {n: batch[n] if n in of_batch else _without_graph(values[n]) for n in recomputation.inputs}
        if self.shard is not None and recomputation.positions:
            live.value_layouts = dict(self.shard.group.value_layouts)
        return self._leave(live, values)

    def _memory_that_stays(self, position: int, values: Mapping[str, Tensor]) -> set[int]:
        """Addresses of memory that a layer's backward may need and that is no activation of its own: parameters, buffers, and
        values of other stages, which the graph keeps."""
        module = self.weights.of_layer(position).module
        received = (values[name] for name in self.values.received if values[name].requires_grad)
        return {memory_begin(tensor) for tensor in (*module.parameters(), *module.buffers(), *received)}

    def _call_layer(
        self, kind: PassKind, position: int, forward_pass: PassContext, inputs: Sequence[Tensor]
    ) -> tuple[Tensor, ...]:
        """What a layer returns, to this virtual shard or to the one that calls it for all of the worker."""
        self.hooks.check_alive()
        layer = self.layers[position]
        if self.takes is not None and position in self.takes.positions:
            return self.takes.take(kind, forward_pass.microbatch, position, f"layer {layer.layer.name!r}", inputs)
        return self.weights.outlasting(layer.call(forward_pass, self.weights.enter_layer(position), inputs))

    def _begin_layers(self, kind: LayerPass) -> None:
        """A computation that goes through the layers begins."""
        if self.weights.gathers is not None:
            self.weights.gathers.begin(kind)

    def _end_layers(self) -> None:
        """It is over."""
        if self.weights.gathers is not None:
            self.weights.gathers.end()

    def _alias_inputs(self, position: int, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        """What the layer at `position` is called with in `forward`."""
        layer = self.layers[position]
        if self.gives is None:
            return inputs
        return self.gives.alias_inputs(position, layer.layer.inputs, inputs, layer.shared)

    def _give(
        self, kind: PassKind, position: int, microbatch: int, inputs: Sequence[Tensor], outputs: Sequence[Tensor]
    ) -> None:
        """Let other virtual shards of the worker have what a whole layer has returned."""
        if self.gives is not None:
            self.gives.give(kind, microbatch, position, f"layer {self.weights.layer_names[position]!r}", inputs, outputs)

    def _read_received(self, live: _Microbatch, received: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The values from other stages as layers read them. Those that require no gradient there require none here either:
        kernels, reentrant checkpoints and users' code ask whether an input does."""
        found = dict(received)
        for name in self.values.received:
            value = received[name]
            if value.requires_grad:
                found[name] = alias = alias_received(value, self.hooks.of_received[name])
                if name in self.values.relayed:
                    live.entries[name] = get_gradient_edge(alias)
                elif name in self.values.apart:
                    live.apart[name] = get_gradient_edge(alias)
        return found

    def _leave(self, live: _Microbatch, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The values that other stages read. Of their graph only the edges are kept, not the values themselves."""
        outgoing = {name: values[name] for name in self.values.outgoing}
        live.entries.update((name, get_gradient_edge(value)) for name, value in outgoing.items() if value.requires_grad)
        return {name: self._lasting(_without_graph(value)) for name, value in outgoing.items()}

    def _lasting(self, value: Tensor) -> Tensor:
        """The value, or a copy of a parameter (or of a view of one) whose memory is freed before all have read it."""
        return copy_as_it_lies(value) if self.weights.is_temporary(value) else value

    def recompute(self, microbatch: int) -> None:
        """Recompute the activations that `checkpointed_forward` has dropped, by the same calls. Losses are not counted again.

        Raises `UserCodeError` for a layer that does not compute the same again.
        """
        self.gradient_reuse_policy.before_forward()
        live = self._live[microbatch]
        self.deferred.stash = live.stash
        if self.shard is not None:  # other microbatches have run since
            self.shard.group.value_layouts = live.value_layouts
        # Aliases, as in the first forward: of a leaf itself autocast would keep one cast for several readers.
        values = {name: make_alias(value) if value.requires_grad else value for name, value in live.kept_inputs.items()}
        forward_pass = training_pass_context(self.seed, self.step, microbatch, self.weights.layer_names)
        again_called = [self.buffer_updates.get(self.weights.layer_names[i]) for i in self.recomputation.positions]
        make_stand_ins(norm for updates in again_called if updates is not None for norm in updates.recorders)
        dropped, known = iter(live.dropped), set(map(id, values.values()))
        self._begin_layers("recompute")
        for position in self.recomputation.positions:
            layer, again = self.layers[position], self._new_saved_tensors(position)
            call, inputs = forward_pass.with_saved_tensors(again, is_first=False), layer.read(values)
            outputs = own_tensors(self._call_layer("recompute", position, call, inputs), known)
            known.update(map(id, outputs))
            next(dropped).refill(again)
            self._give("recompute", position, microbatch, inputs, outputs)
            values.update(zip(layer.layer.outputs, outputs, strict=True))
        self._end_layers()
        if self.loss is not None and self.recomputation.with_loss:
            again = SavedTensors("the loss")
            self.loss(forward_pass.with_saved_tensors(again), values)
            next(dropped).refill(again)
        live.kept_inputs, live.value_layouts = {}, {}

    def _new_saved_tensors(self, position: int) -> SavedTensors:
        return SavedTensors(f"layer {self.weights.layer_names[position]!r}")

    def evaluate(self, microbatch: int, received: Mapping[str, Tensor], batch: Batch) -> dict[str, Tensor]:
        """As `forward`, but in evaluation mode; keeps the losses only. A layer's outputs go when nothing here reads them."""
        self._train(False)
        data_set, number = self.place_in_set(microbatch)
        forward_pass = validation_pass_context(self.seed, self.step, number, self.weights.layer_names, data_set)
        self._begin_layers("forward")
        with torch.no_grad():

            def call_layers() -> dict[str, Tensor]:
                return self._evaluate_layers(forward_pass, {**batch, **received})

            if self.shard is None:
                code = self.weights.layer_names
                who, resting = f"a layer of stage {self.index}", self._generators_that_rest()
                values = self.guard.compare_once(call_layers, who, code, evaluating=True, generators=resting)
            else:  # other shards, which wait for this one's layers, would not run theirs again
                values = call_layers()
            self._end_layers()
            if self.loss is not None:
                self.losses[microbatch] = self.loss(forward_pass, values)
            if self.metrics is not None:
                self.metrics.measure(forward_pass, values, self._fields(values, batch))
        return {name: self._lasting(values[name].detach()) for name in self.values.outgoing}

    def _generators_that_rest(self) -> HostGenerators | None:
        """Python's and NumPy's generators, if no layer here is known to draw from them in evaluation mode."""
        resting = [calls.generators_that_rest for calls in self.evaluation_calls]
        return resting[0] if None not in resting else None

    def _evaluate_layers(self, forward_pass: PassContext, values: dict[str, Tensor]) -> dict[str, Tensor]:
        """`values` after the layers: with what they return, without what nothing here reads any more."""
        known = set(map(id, values.values()))
        for position, layer in enumerate(self.layers):
            inputs = layer.read(values)
            outputs = own_tensors(self._call_layer("evaluate", position, forward_pass, inputs), known)
            known.update(map(id, outputs))
            self._give("evaluate", position, forward_pass.microbatch, inputs, outputs)
            values.update(zip(layer.layer.outputs, outputs, strict=True))
            known.difference_update([id(values.pop(name)) for name in self._read_last[position]])
        return values

    def _find_last_reads(self) -> tuple[tuple[str, ...], ...]:
        """By layer: the outputs of layers here that nothing reads after it, where nothing is differentiated."""
        kept = {*self.values.outgoing, *self.graph.loss_inputs, *self.graph.handed_on}
        if self.loss is not None:
            kept.update(self.loss.fields)
        last: dict[str, int] = {}
        for position, layer in enumerate(self.layers):
            last |= dict.fromkeys((*(n for n in layer.layer.inputs if n in last), *layer.layer.outputs), position)
        places = range(len(self.layers))
        return tuple(tuple(n for n, at in last.items() if at == place and n not in kept) for place in places)

    def _fields(self, values: Mapping[str, Tensor], batch: Batch) -> Batch:
        """The fields of the batch that metrics get: those that the first stage has handed on, where it does."""
        handed_on = {name: values[name] for name in self.graph.handed_on if name in values}
        return handed_on if self.graph.handed_on else batch

    # -- backward ------------------------------------------------------------------------------------------------------

    def backward(self, microbatch: int, gradients: Mapping[str, Tensor | None]) -> dict[str, HandedBack]:
        """Run the whole backward pass of a microbatch.

        `gradients`: outgoing or relayed value -> the sum of its gradients in later stages, None where there is none. Returns
        for each received value what is handed back.
        """
        return self._backward(microbatch, gradients, halves=2)

    def backward_input(self, microbatch: int, gradients: Mapping[str, Tensor | None]) -> dict[str, HandedBack]:
        """As `backward`, but the weight gradients of layers with a split backward are left to `backward_weight`."""
        return self._backward(microbatch, gradients, halves=1)

    def backward_weight(self, microbatch: int) -> None:
        """Compute the weight gradients that `backward_input` put off. Where the reduction may have them, it gets those of one
        layer before those of the next one exist."""
        block, stash = self._block_of(microbatch), self._live[microbatch].stash
        if self.gradients.settles_inside_weight_half(block):
            self.gradients.switch_to_block(block)
            for uses, of_layer in take_by_layer(stash, self.weights, self._uses_of_layers):
                self.gradients.add_deferred(block, sum_deferred_gradients(of_layer, self.weights))
                of_layer.clear()
                with torch.no_grad():
                    self.gradients.settle(block, uses[::-1])
        else:
            self._add_deferred(microbatch, block)
        self.gradients.record_finished_halves(block, 1)

    def _block_of(self, microbatch: int) -> int:
        """The block of a microbatch; itself, where its gradients are handed over by themselves."""
        return microbatch if self.gradients.scatters else self.routing.microbatches.block_of(microbatch)

    def _backward(self, microbatch: int, gradients: Mapping[str, Tensor | None], *, halves: int) -> dict[str, HandedBack]:
        """`halves`: 2 for the whole backward pass, 1 for its input half."""
        self.gradient_reuse_policy.before_backward()
        live = self._live[microbatch]
        self.deferred.stash = live.stash  # activation checkpointing inside a layer runs its forward again in here
        block = self._block_of(microbatch)
        self.gradients.switch_to_block(block, join=halves == 2 and not self.deferred.parameters)
        roots, starts = self._roots(live, gradients)
        uses = take_uses_apart(roots, live.apart) if live.apart else {}
        self._run_autograd(
            microbatch, block if halves == 2 and self.gradients.settles_inside_backward(block) else None, roots, starts
        )
        if halves == 2 and live.stash:
            self._add_deferred(microbatch, block)
        sums = {name: self.hooks.received_gradients.pop(name, None) for name in self.values.received}
        returned: dict[str, HandedBack] = {**sums, **{name: tuple(uses.get(name, ())) for name in self.values.apart}}
        live.entries.clear()
        live.apart.clear()
        live.loss = None
        live.dropped.clear()
        live.release_offloaded()
        self.gradients.record_finished_halves(block, halves)
        return returned

    def _roots(
        self, live: _Microbatch, gradients: Mapping[str, Tensor | None]
    ) -> tuple[list[Tensor | GradientEdge], list[Tensor | None]]:
        """Where the backward pass starts, and the gradient of each (None: 1, of the loss).

        Autograd adds what it computes to the gradient of a root, so a relayed sum comes before what is added here.
        """
        roots: list[Tensor | GradientEdge] = []
        starts: list[Tensor | None] = []
        for name, edge in live.entries.items():
            gradient = gradients.get(name)
            if gradient is not None:
                roots.append(edge)
                starts.append(gradient)
        if live.loss is not None and live.loss.requires_grad:
            roots.append(live.loss)
            starts.append(None if self.loss_scale is None else torch.full_like(live.loss, self.loss_scale))
        return roots, starts

    def _run_autograd(
        self, microbatch: int, closes: int | None, roots: Sequence[Tensor | GradientEdge], starts: Sequence[Tensor | None]
    ) -> None:
        """`closes`: the block that this pass closes, if finished gradients are to be handed over inside the pass."""
        self.hooks.begin(closes)
        self._begin_layers("backward")
        if self.offload is not None:
            self.offload.backward_of = self._live[microbatch].offloaded
        if self.gives is not None:
            self.gives.begin_backward(microbatch)
        try:
            if roots:
                with contextlib.ExitStack() as writes:
                    for updates in self.buffer_updates.values():
                        writes.enter_context(updates.refusing())
                    run_autograd_backward(roots, starts)
        except RayparError:
            raise
        except USER_CODE_ERRORS as error:
            raise self.coordinate.user_code_error("the backward pass", self.step, microbatch, error) from error
        finally:
            self.hooks.end()
            if self.offload is not None:
                self.offload.backward_of = None
            if self.gives is not None:
                self.gives.leave(BEFORE_ALL)
            if self.shard is not None:
                self.shard.group.shared_input = None  # activation checkpointing in a layer has run its forward again
        self._end_layers()
        self.guard.check("the backward pass")

    def _add_deferred(self, microbatch: int, block: int) -> None:
        """Compute the weight gradients that the microbatch has put off, and add them to the block's."""
        stash = self._live[microbatch].stash
        sums = sum_deferred_gradients(stash, self.weights)
        stash.clear()
        self.gradients.add_deferred(block, sums)
