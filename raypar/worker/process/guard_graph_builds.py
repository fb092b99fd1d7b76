"""A layer graph whose builds leave the state of the process as it was."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from torch import Tensor, nn

from raypar.model.graph import Graph, Layer
from raypar.model.layer_skeletons import SkeletonCopier
from raypar.worker.process.torch_state_guard import TorchStateGuard


def guard_graph_builds(graph: Graph, guard: TorchStateGuard) -> Graph:
    """The graph with calls of its builds and its `init` guarded: `guard` restores process state that they leave changed.

    Builds that copy skeletons are not guarded: they run no users' code, and a recovery waits for each of them.
    """

    def build(layer: Layer) -> nn.Module:
        with guard.watching(f"the constructor of layer {layer.name!r}"):
            return layer.build()

    def fill(init: Callable[[str, Tensor], None], name: str, parameter: Tensor) -> None:
        with guard.watching("the graph's init"):
            init(name, parameter)

    layers = tuple(
        layer if isinstance(layer.build, SkeletonCopier) else replace(layer, build=partial(build, layer))
        for layer in graph.layers
    )
    return replace(graph, layers=layers, init=graph.init and partial(fill, graph.init))
