"""Makes the modules of one shard of one stage: parameters are slices, and sharded layers stand in the place of whole ones."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

import torch
from torch import Tensor, nn

from raypar.errors import ModelError
from raypar.model.graph import Graph, Layer
from raypar.model.initial_values import initial_values_of
from raypar.model.layer_skeletons import canonical_names, state_shapes
from raypar.model.materialise import materialise
from raypar.model.tensor_parallel import autograd_collectives
from raypar.model.tensor_parallel.autograd_collectives import select_ranges
from raypar.model.tensor_parallel.local_part_layout import (
    FEATURES,
    SAMPLES,
    SPATIAL,
    LocalPartLayout,
    samples_part_layout,
    sequence_part_layout,
)
from raypar.model.tensor_parallel.shard_group import ShardGroup
from raypar.model.tensor_parallel.sharded_value import ShardedValue, let_einops_take_parts
from raypar.model.tensor_parallel.styles.registry import parse_style
from raypar.plan.shard_ranges import IndexRanges, even_ranges_by_shard
from raypar.plan.tensor_parallel_layout import TensorParallelLayout


def shard_slice_of(layout: TensorParallelLayout, name: str, whole: Tensor, shard: int) -> Tensor:
    """A shard's slice of the whole parameter (or of a gradient or optimizer state of its shape), in memory of its own."""
    cut = layout.cuts.get(name)
    part = whole if cut is None else select_ranges(whole, cut.dim, cut.indices_by_shard[shard])
    return part.clone(memory_format=torch.contiguous_format)


def materialise_shard(
    graph: Graph,
    first: int,
    last: int,
    *,
    layout: TensorParallelLayout,
    group: ShardGroup,
    seed: int,
    dtype: torch.dtype,
    values: Mapping[str, Tensor] | None = None,
    left_out: Collection[int] = (),
) -> dict[str, nn.Module]:
    """Layer name -> this shard's module, for layers [first, last). The counterpart of `model.materialise.materialise`.

    `values`: slices of parameters and whole buffers by name, used as they are. None: the initial values, each tensor made whole
    and cut before the next one is made. The layers read and return this shard's tensors (see `_LayerBoundary`). With one shard
    the layers are as `materialise` makes them. `left_out`: positions, in the range, of layers in the place of which there is an
    empty module.
    """
    if values is None:
        stream = initial_values_of(graph, seed).stream(state_shapes(graph, first, last), dtype)
        values = {name: shard_slice_of(layout, name, whole, group.shard) if group.size > 1 else whole for name, whole in stream}
    slices = values

    def make(index: int) -> nn.Module:
        name = graph.layers[index].name
        if index - first in left_out:
            return nn.Module()
        return materialise(graph, index, index + 1, seed=seed, dtype=dtype, values=slices)[name]

    return build_shard_modules(graph, first, last, make, layout=layout, group=group, whole=False)


def build_shard_modules(
    graph: Graph,
    first: int,
    last: int,
    make: Callable[[int], nn.Module],
    *,
    layout: TensorParallelLayout,
    group: ShardGroup,
    whole: bool,
) -> dict[str, nn.Module]:
    """Layer name -> the module that this shard runs in the place of the one that `make(index)` gives.

    `whole`: whether the modules of `make` have whole parameters, which are then cut; else they have this shard's slices.
    """
    let_einops_take_parts()
    canonical = canonical_names(graph)
    edges = _StageEdges(graph, first, last)
    modules: dict[str, nn.Module] = {}
    for index in range(first, last):
        layer, module = graph.layers[index], make(index)
        if group.size > 1:
            if whole:
                _cut_parameters(module, layer, canonical, layout, group.shard)
            module = _replace_layers(module, layer, layout, group)
            module.forward = _LayerBoundary(module.forward, layer, group, edges, layout)
        modules[layer.name] = module
    return modules


def _cut_parameters(
    root: nn.Module, layer: Layer, canonical: Mapping[str, str], layout: TensorParallelLayout, shard: int
) -> None:
    """Replace whole parameters by slices, one at a time. A parameter that stands at several places stays one."""
    made: dict[int, nn.Parameter] = {}
    for path, part in root.named_modules():
        for key, parameter in list(part._parameters.items()):
            if parameter is None:
                continue
            name = layer.qualify(f"{path}.{key}" if path else key)
            name = canonical.get(name, name)
            if id(parameter) not in made and name in layout.cuts:
                made[id(parameter)] = nn.Parameter(
                    shard_slice_of(layout, name, parameter.detach(), shard), parameter.requires_grad
                )
            part._parameters[key] = made.get(id(parameter), parameter)


def _replace_layers(root: nn.Module, layer: Layer, layout: TensorParallelLayout, group: ShardGroup) -> nn.Module:
    """Put what its style builds in the place of every layer that has one. Returns the root, which may be such a layer."""
    for path, part in list(root.named_modules()):
        name = layer.qualify(path)
        if name not in layout.styles:
            continue
        made = parse_style(layout.styles[name]).build(name, part, layout, group)
        made.train(part.training)
        if not path:
            return made
        owner, _, key = path.rpartition(".")
        setattr(root.get_submodule(owner), key, made)
    return root


class _StageEdges:
    """The values with which a stage's layers hand over to other stages and the loss."""

    def __init__(self, graph: Graph, first: int, last: int) -> None:
        made = {value for layer in graph.layers[first:last] for value in layer.outputs}
        self.outputs = {v for v in made if graph.consumers(v) == (last,)} if last == len(graph.layers) else set()
        """Values of the last stage that the loss alone reads."""
        self.leaving = {v for v in made if any(c >= last for c in graph.consumers(v))}
        """Values that another stage, or the loss, reads."""
        self.read_by_loss = {v for v in made if len(graph.layers) in graph.consumers(v)}
        """Values that the loss reads."""


class _LayerBoundary:
    """The forward of a layer on a shard: turns plain tensors into `ShardedValue`s at its inputs, and back at its outputs.

    Values that enter or leave a stage are whole on every shard. A captured model's features that a column layer makes and a
    later layer reads (both may be modules of one `nn.Sequential`) are split over the shards (`values_in_parts` of the layout).
    They stay split within a stage; between stages they are gathered and split again. Layers and gradients see a part of the
    same memory layout in both cases, so stage boundaries do not change which kernels compute with it.

    Under sequence parallelism, floating point values [batch, sequence, features] are split along dim 1 where they enter the
    stage, stay split between the layers, and are gathered where they leave. A value that only the loss reads may leave split
    along its last dim, for `sharded_loss`.
    """

    def __init__(
        self,
        forward: Callable[..., Tensor],
        layer: Layer,
        group: ShardGroup,
        edges: _StageEdges,
        layout: TensorParallelLayout,
    ) -> None:
        self._forward, self._layer, self._group, self._edges = forward, layer, group, edges
        self._layout, self._values_in_parts = layout, layout.values_in_parts

    def __call__(self, *inputs: Tensor) -> Tensor | tuple[Tensor, ...]:
        group = self._group
        group.grad_enabled = torch.is_grad_enabled()
        made = self._forward(*(self._enter(n, x) for n, x in zip(self._layer.inputs, inputs, strict=True)))
        group.shared_input = None
        if not isinstance(made, tuple):
            return self._leave(self._layer.outputs[0], made)
        return tuple(self._leave(name, value) for name, value in zip(self._layer.outputs, made, strict=True))

    def _enter(self, name: str, x: Tensor) -> Tensor | ShardedValue:
        group, part = self._group, self._group.value_layouts.get(name)
        if part is not None:
            is_whole_elsewhere = part.axis in (FEATURES, SPATIAL, SAMPLES)  # where a stage ends, it is sent whole and cut again
            return ShardedValue(autograd_collectives.as_contiguous_part(x) if is_whole_elsewhere else x, part, group)
        if self._layout.divides_samples:
            return self._enter_in_samples(x)
        dim = (self._values_in_parts or {}).get(name)
        if dim is not None and not group.sequence_parallel:
            held = self._layout.parts_of_value(name, x.shape[dim])
            mine = autograd_collectives.scatter_to_shards(x, dim, group, held)
            axis = SPATIAL if name in self._layout.spatial_values else FEATURES
            return ShardedValue(mine, LocalPartLayout(dim, x.shape[dim], held[group.shard], axis), group)
        if group.sequence_parallel and x.is_floating_point() and x.dim() == 3:
            return ShardedValue(
                autograd_collectives.scatter_to_shards(x, 1, group),
                sequence_part_layout(x.shape[1], group.shard, group.size),
                group,
                whole=x,
            )
        return x

    def _leave(self, name: str, made: Tensor | ShardedValue) -> Tensor:
        self._group.value_layouts.pop(name, None)
        self._group.output_layouts.pop(name, None)
        if self._layout.divides_samples:
            return self._leave_in_samples(name, made)
        if not isinstance(made, ShardedValue):
            return made
        group, part = self._group, made.part_layout
        by_sequence = made.by_sequence and made.dim() == 3
        if part.axis == SPATIAL and part.ranges == even_ranges_by_shard(part.size, group.size)[group.shard]:
            return self._leave_in_rows(name, made)
        if name in self._edges.outputs and not by_sequence and part.dim == made.dim() - 1:
            group.output_layouts[name] = part
            return made.local
        if part.axis == FEATURES and self._layer.own_names is not None and not group.sequence_parallel:
            held = self._parts_of(name, part)
            if held is not None and part.ranges == held[group.shard] and name not in self._edges.read_by_loss:
                if name in self._edges.leaving:
                    return autograd_collectives.gather_from_shards(made.local, part.dim, held, group)
                group.value_layouts[name] = part
                return made.local
        if not by_sequence:
            cure = (
                "end what a column layer begins with a row layer, or give it the style gathered (plan.styles; "
                "a recurrent layer: gates, a convolution by groups: whole)"
            )
            if part.axis == SPATIAL:
                cure = "give the last convolution before it the style spatial-gathered (plan.styles)"
            raise ModelError(
                f"layer {self._layer.name!r} returns {name!r} {list(made.shape)} cut along dim {part.dim}",
                cure=cure + "; or set plan.sequence_parallel: false" * group.sequence_parallel,
            )
        if name in self._edges.leaving:
            return autograd_collectives.gather_from_shards(made.local, 1, even_ranges_by_shard(part.size, group.size), group)
        group.value_layouts[name] = part
        return made.local

    def _enter_in_samples(self, x: Tensor) -> Tensor | ShardedValue:
        """This shard's samples of a value that every shard has whole: a field of the batch, a value of another stage."""
        group = self._group
        if not x.dim():
            return x
        part = samples_part_layout(len(x), group.shard, group.size)
        floats = x.is_floating_point()
        mine = autograd_collectives.scatter_to_shards(x, 0, group) if floats else select_ranges(x, 0, part.ranges)
        return ShardedValue(mine, part, group, whole=x)

    def _leave_in_samples(self, name: str, made: Tensor | ShardedValue) -> Tensor:
        """This shard's samples of a value; all of them where another stage or the loss reads it."""
        group = self._group
        if not isinstance(made, ShardedValue):
            if not made.dim():
                return made
            raise ModelError(
                f"layer {self._layer.name!r} returns {name!r} {list(made.shape)}, which does not depend on the samples",
                cure="compute it in the layers that use it, or take samples out of plan.layout",
            )
        part = made.part_layout
        if part != samples_part_layout(part.size, group.shard, group.size):
            raise ModelError(
                f"layer {self._layer.name!r} returns {name!r} {list(made.shape)}, whose samples are no longer its first dim",
                cure="return values [samples, ...], or take samples out of plan.layout",
            )
        if name in self._edges.leaving:
            held = even_ranges_by_shard(part.size, group.size)
            return autograd_collectives.gather_from_shards(made.local, 0, held, group)
        group.value_layouts[name] = part
        return made.local

    def _leave_in_rows(self, name: str, made: ShardedValue) -> Tensor:
        """This shard's rows, where the value stays in parts within the stage; else all rows, which every shard gathers."""
        group, part, known = self._group, made.part_layout, self._values_in_parts
        stays = self._layer.own_names is not None and (known is None or known.get(name) == part.dim)
        if stays and not group.sequence_parallel and name not in self._edges.leaving:
            group.value_layouts[name] = part
            return made.local
        held = even_ranges_by_shard(part.size, group.size)
        return autograd_collectives.gather_from_shards(made.local, part.dim, held, group)

    def _parts_of(self, name: str, part: LocalPartLayout) -> tuple[IndexRanges, ...] | None:
        """By shard, the indices that it has of a value that may stay split between layers; None if it may not."""
        if self._values_in_parts is None:
            return self._layout.parts_like(part.ranges, part.size, self._group.shard)
        if self._values_in_parts.get(name) != part.dim:
            return None
        return self._layout.parts_of_value(name, part.size)


def sharded_loss(
    loss: Callable[..., Tensor | tuple[Tensor, Tensor | float]], group: ShardGroup, inputs: Sequence[str]
) -> Callable[..., Tensor | tuple[Tensor, Tensor | float]]:
    """The loss of values (named `inputs`) and what it reads beside them, for values that may have been left cut along their
    last dim (logits)."""
    if group.size == 1:
        return loss

    def run(*given: Tensor) -> Tensor | tuple[Tensor, Tensor | float]:
        values, beside = given[: len(inputs)], given[len(inputs) :]
        parts = [(value, group.output_layouts.get(name)) for name, value in zip(inputs, values, strict=True)]
        found = loss(*(value if part is None else ShardedValue(value, part, group) for value, part in parts), *beside)
        for value in found if isinstance(found, tuple) else (found,):
            if isinstance(value, ShardedValue):
                raise ModelError(
                    f"the loss returned a value {list(value.shape)} of which every shard has a part only",
                    cure="end the loss in torch.nn.functional.cross_entropy, or give the output layer the style gathered",
                )
        return found

    return run


def gather_outputs(values: Sequence[Tensor], names: Sequence[str], group: ShardGroup) -> list[Tensor]:
    """The model's outputs, those whole that the last forward pass left cut over the shards (logits). All shards call it."""
    found = []
    for name, value in zip(names, values, strict=True):
        part = group.output_layouts.get(name)
        if part is not None:
            even = even_ranges_by_shard(part.size, group.size)
            if part.ranges != even[group.shard]:
                raise ModelError(
                    f"a metric reads {name!r}, which is cut along dim {part.dim} into parts of {part.axis}",
                    cure="give the output layer the style gathered (plan.styles)",
                )
            value = group.gather_and_concat(value, part.dim, even, f"the parts of {name!r}, for metrics,")
        found.append(value)
    return found
