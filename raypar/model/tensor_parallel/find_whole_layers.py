"""Finds the layers that are whole on all shards: all shards would make the same calls on equal values."""

from __future__ import annotations

from collections.abc import Sequence

from raypar.model.graph import Graph, Layer
from raypar.model.layer_skeletons import shared_skeleton
from raypar.plan.tensor_parallel_layout import TensorParallelLayout


def find_whole_layers(graph: Graph, layout: TensorParallelLayout) -> frozenset[int]:
    """Indices of the whole layers.

    No style cuts such a layer, values that it reads and returns are not in parts, and no other layer has a parameter of it:
    uses of one parameter are added up on every shard.
    """
    parts = layout.values_in_parts
    if layout.divides_samples or parts is None:
        return frozenset()
    tied = {name for names in graph.ties for name in names}

    def is_whole(layer: Layer) -> bool:
        module = shared_skeleton(layer)
        if any(name in parts for name in (*layer.inputs, *layer.outputs)):
            return False
        parameters = {layer.qualify(path) for path, _ in module.named_parameters(remove_duplicate=False)}
        modules = {layer.qualify(path) for path, _ in module.named_modules(remove_duplicate=False)}
        return parameters.isdisjoint(tied) and parameters.isdisjoint(layout.cuts) and modules.isdisjoint(layout.styles)

    return frozenset(index for index, layer in enumerate(graph.layers) if is_whole(layer))


def find_leading_layers(layers: Sequence[Layer], whole: frozenset[int]) -> frozenset[int]:
    """Positions, in a stage, of those of its whole layers that read nothing which other layers of the stage have had a part
    in."""
    made = {name for position, layer in enumerate(layers) if position not in whole for name in layer.outputs}
    found = set()
    for position, layer in enumerate(layers):
        if position in whole and made.isdisjoint(layer.inputs):
            found.add(position)
        made.update(layer.outputs if position not in found else ())
    return frozenset(found)
