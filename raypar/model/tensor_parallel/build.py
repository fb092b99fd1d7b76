"""Makes the modules of one shard of one stage: parameters by (name, slice), sharded layers in the place of whole ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from raypar.errors import ModelError
from raypar.model.build import canonical_names, materialise, state_shapes
from raypar.model.graph import Graph, Layer
from raypar.model.initial_values import initial_values_of
from raypar.model.tensor_parallel import functions
from raypar.model.tensor_parallel.embedding import VocabularyEmbedding
from raypar.model.tensor_parallel.functions import select
from raypar.model.tensor_parallel.group import ShardGroup
from raypar.model.tensor_parallel.linear import ColumnLinear, RowLinear
from raypar.model.tensor_parallel.styles import ShardLayout
from raypar.model.tensor_parallel.value import Held, Sharded
from raypar.plan.shard_ranges import even_range


def slice_of(layout: ShardLayout, name: str, whole: Tensor, shard: int) -> Tensor:
    """What a shard holds of the whole parameter (or of its gradient, or of optimizer state of its shape); its own memory."""
    cut = layout.cuts.get(name)
    return (whole if cut is None else select(whole, cut.dim, cut.held[shard])).clone(memory_format=torch.contiguous_format)


def materialise_shard(
    graph: Graph,
    first: int,
    last: int,
    *,
    layout: ShardLayout,
    group: ShardGroup,
    seed: int,
    dtype: torch.dtype,
    values: Mapping[str, Tensor] | None = None,
) -> dict[str, nn.Module]:
    """As `model.build.materialise`, for this shard: every parameter is the slice of what one process would have made.

    `values`: slices of parameters and whole buffers by name, used as they are. None: the initial values, each tensor made whole
    and cut before the next one is made. The layers read and return this shard's tensors (see `_Boundary`). With one shard the
    layers are as they would be without.
    """
    if values is None:
        stream = initial_values_of(graph, seed).stream(state_shapes(graph, first, last), dtype)
        values = {name: slice_of(layout, name, whole, group.shard) if group.size > 1 else whole for name, whole in stream}
    held = values

    def make(index: int) -> nn.Module:
        name = graph.layers[index].name
        return materialise(graph, index, index + 1, seed=seed, dtype=dtype, values=held)[name]

    return layers_of_shard(graph, first, last, make, layout=layout, group=group, whole=False)


def layers_of_shard(
    graph: Graph,
    first: int,
    last: int,
    make: Callable[[int], nn.Module],
    *,
    layout: ShardLayout,
    group: ShardGroup,
    whole: bool,
) -> dict[str, nn.Module]:
    """Layer name -> what becomes of the layer that `make(index)` gives, whose parameters are `whole` or this shard's slices."""
    canonical = canonical_names(graph)
    edges = _Edges(graph, first, last)
    held: dict[str, Held] = {}
    modules: dict[str, nn.Module] = {}
    for index in range(first, last):
        layer, module = graph.layers[index], make(index)
        if group.size > 1:
            if whole:
                _cut(module, layer.name, canonical, layout, group.shard)
            module = _rewritten(module, layer.name, layout, group)
            module.forward = _Boundary(module.forward, layer, group, edges, held)
        modules[layer.name] = module
    return modules


def _cut(root: nn.Module, layer: str, canonical: Mapping[str, str], layout: ShardLayout, shard: int) -> None:
    """Whole parameters become slices, one at a time; one that stands at several places stays one."""
    made: dict[int, nn.Parameter] = {}
    for path, part in root.named_modules():
        prefix = f"{layer}.{path}." if path else f"{layer}."
        for key, parameter in list(part._parameters.items()):
            if parameter is None:
                continue
            name = canonical.get(prefix + key, prefix + key)
            if id(parameter) not in made and name in layout.cuts:
                made[id(parameter)] = nn.Parameter(slice_of(layout, name, parameter.detach(), shard), parameter.requires_grad)
            part._parameters[key] = made.get(id(parameter), parameter)


def _rewritten(root: nn.Module, layer: str, layout: ShardLayout, group: ShardGroup) -> nn.Module:
    """Puts sharded layers in the place of those that have a style. Returns the root, which may be one."""
    for path, part in list(root.named_modules()):
        name = f"{layer}.{path}" if path else layer
        if name not in layout.styles:
            continue
        made = _sharded(part, name, layout, group)
        made.train(part.training)
        if not path:
            return made
        owner, _, key = path.rpartition(".")
        setattr(root.get_submodule(owner), key, made)
    return root


def _sharded(module: nn.Module, name: str, layout: ShardLayout, group: ShardGroup) -> nn.Module:
    style, held = layout.styles[name], layout.cuts[f"{name}.weight"].held[group.shard]
    if isinstance(module, nn.Embedding):
        return VocabularyEmbedding(module, name, group, held)
    assert isinstance(module, nn.Linear)
    if style.kind in ("row", "heads-row"):
        return RowLinear(module, name, group, held)
    return ColumnLinear(module, name, group, held, shares=name in layout.shares, gather=style.kind == "gathered")


class _Edges:
    """Which values of a stage stay inside it: only these may be left in parts between layers."""

    def __init__(self, graph: Graph, first: int, last: int) -> None:
        made = {value for layer in graph.layers[first:last] for value in layer.outputs}
        self.output = graph.output
        self.leaving = {v for v in made if v == graph.output or any(c >= last for c in graph.consumers(v))}


class _Boundary:
    """The forward of a layer: its inputs as what the other shards see of them too, its outputs as plain tensors.

    Values that come into the stage and leave it are whole on every shard. With sequence parallelism floating point values of 3
    dims ([batch, sequence, features]) are cut over dim 1 as they come in, stay so between the layers, are joined as they leave.
    The model's output may leave cut by its last dim: `sharded_loss` takes it so.
    `held`: what the last run has left in parts, by value.
    """

    def __init__(
        self, forward: Callable[..., Any], layer: Layer, group: ShardGroup, edges: _Edges, held: dict[str, Held]
    ) -> None:
        self._forward, self._layer, self._group, self._edges, self._held = forward, layer, group, edges, held

    def __call__(self, *inputs: Tensor) -> Any:
        group = self._group
        group.recording = torch.is_grad_enabled()
        made = self._forward(*(self._enter(n, x) for n, x in zip(self._layer.inputs, inputs, strict=True)))
        group.shared = None
        if not isinstance(made, tuple):
            return self._leave(self._layer.outputs[0], made)
        return tuple(self._leave(name, value) for name, value in zip(self._layer.outputs, made, strict=True))

    def _enter(self, name: str, x: Tensor) -> Tensor | Sharded:
        held = self._held.get(name)
        if held is not None:
            return Sharded(x, held, self._group)
        if self._group.sequence and x.is_floating_point() and x.dim() == 3:
            size = x.shape[1]
            held = Held(1, size, even_range(size, self._group.size)[self._group.shard])
            return Sharded(functions.split(x, 1, self._group), held, self._group)
        return x

    def _leave(self, name: str, made: Any) -> Any:
        self._held.pop(name, None)
        if name == self._edges.output:
            self._group.output = None
        if not isinstance(made, Sharded):
            return made
        group, held = self._group, made.held
        by_sequence = made.by_sequence and made.dim() == 3
        if name == self._edges.output and not by_sequence and held.dim == made.dim() - 1:
            group.output = held
            return made.local
        if not by_sequence:
            raise ModelError(
                f"layer {self._layer.name!r} returns {name!r} {list(made.shape)} cut along dim {held.dim}",
                cure="end what a column layer begins with a row layer, or give it the style gathered (plan.styles)",
            )
        if name in self._edges.leaving:
            return functions.whole(made.local, 1, even_range(held.size, group.size), group)
        self._held[name] = held
        return made.local


def sharded_loss(loss: Callable[..., Any], group: ShardGroup) -> Callable[..., Any]:
    """The user's loss function for output that the last layer's `_Boundary` has left cut by its last dim (logits)."""
    if group.size == 1:
        return loss

    def run(output: Tensor, *others: Any) -> Any:
        held: Held | None = group.output
        found = loss(output if held is None else Sharded(output, held, group), *others)
        for part in found if isinstance(found, tuple) else (found,):
            if isinstance(part, Sharded):
                raise ModelError(
                    f"the loss returned a value {list(part.shape)} of which every shard has a part only",
                    cure="end the loss in torch.nn.functional.cross_entropy, or give the output layer the style gathered",
                )
        return found

    return run
