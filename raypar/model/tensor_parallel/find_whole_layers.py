"""Finds the layers of a stage that are whole on all shards: all shards would make the same calls on equal values."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from raypar.model.graph import Graph, Layer
from raypar.model.tensor_parallel.shard_group import ShardGroup
from raypar.model.tensor_parallel.styles.linear_styles import WholeStyle
from raypar.model.tensor_parallel.styles.registry import parse_style
from raypar.plan.tensor_parallel_layout import TensorParallelLayout


def find_whole_layers(
    graph: Graph,
    first: int,
    last: int,
    modules: Mapping[str, nn.Module],
    layout: TensorParallelLayout,
    group: ShardGroup,
) -> frozenset[int]:
    """Positions, in the stage of layers [first, last), of those that are whole.

    No style cuts such a layer, values that it reads and returns are not in parts, and no other layer has a parameter of it:
    uses of one parameter are added up on every shard. `modules`: layer name -> a shard's module.
    """
    parts = layout.values_in_parts
    if group.sequence_parallel or layout.divides_samples or parts is None:
        return frozenset()
    tied = {name for names in graph.ties for name in names}

    def is_whole(layer: Layer) -> bool:
        module = modules[layer.name]
        if any(name in parts for name in (*layer.inputs, *layer.outputs)):
            return False
        if any(_is_cut(layout, layer.qualify(path)) for path, _ in module.named_modules(remove_duplicate=False)):
            return False
        parameters = {layer.qualify(path) for path, _ in module.named_parameters(remove_duplicate=False)}
        return tied.isdisjoint(parameters) and layout.cuts.keys().isdisjoint(parameters)

    return frozenset(position for position, layer in enumerate(graph.layers[first:last]) if is_whole(layer))


def find_leading_layers(layers: tuple[Layer, ...], whole: frozenset[int]) -> frozenset[int]:
    """Those of a stage's whole layers that read nothing which other layers of the stage have had a part in."""
    made = {name for position, layer in enumerate(layers) if position not in whole for name in layer.outputs}
    found = set()
    for position, layer in enumerate(layers):
        if position in whole and made.isdisjoint(layer.inputs):
            found.add(position)
        made.update(layer.outputs if position not in found else ())
    return frozenset(found)


def _is_cut(layout: TensorParallelLayout, module: str) -> bool:
    return module in layout.styles and not isinstance(parse_style(layout.styles[module]), WholeStyle)
