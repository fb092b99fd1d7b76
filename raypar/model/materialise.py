"""Makes the modules of one stage, never of the whole model: copies of skeletons, with initial or given values put in."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from raypar.model.graph import Graph
from raypar.model.initial_values import initial_values_of
from raypar.model.layer_skeletons import build_on_meta, put_values, state_shapes


def materialise(
    graph: Graph, first: int, last: int, *, seed: int, dtype: torch.dtype, values: Mapping[str, Tensor] | None = None
) -> dict[str, nn.Module]:
    """Layer name -> module on the CPU, in `dtype`, for layers [first, last). Tied uses inside the range hold equal values.

    `values`: name -> tensor, of every parameter (canonical names) and buffer of these layers; the modules take these tensors
    without a copy. None: the initial values (rule 2 of the numerics contract), which `seed` decides.
    """
    fresh = values is None
    if values is None:
        values = dict(initial_values_of(graph, seed).stream(state_shapes(graph, first, last), dtype))
    taken: set[str] = set()
    modules: dict[str, nn.Module] = {}
    for layer in graph.layers[first:last]:
        modules[layer.name] = module = build_on_meta(layer)
        names = put_values(graph, layer, module, values, dtype)
        for path, parameter in module.named_parameters() if fresh else ():
            if names[path] in taken:
                parameter.data = parameter.data.clone()  # each use of a tie is a parameter of its own
        taken |= set(names.values())
    return modules
