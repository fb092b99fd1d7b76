"""Runs hand-written layers on numbers before a run: no microbatch, and no layer, may depend on what another has left.

The layers of an `nn.Sequential`, a list or a `raypar.Graph` are what the user says they are: there is nothing to compare them
with. But their code may keep something outside of parameters and buffers: for the next microbatch, which another worker
computes, or for a later layer, which is in another stage.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from raypar.errors import ModelError
from raypar.job import Job
from raypar.model.capture.module_graph import traces_of
from raypar.model.graph import Graph
from raypar.model.materialise import materialise
from raypar.model.python_state import StateReading
from raypar.model.random_state import preserve_random_state
from raypar.worker.plain_microbatches import (
    UNSEEN,
    Batches,
    NotCompared,
    PlainMicrobatches,
    first_microbatches,
    refuse_large_models,
)
from raypar.worker.stage.loss import make_loss_function


def check_layers_with_numbers(spec: Job, graph: Graph) -> str | None:
    """Raises `ModelError` if a microbatch of hand-written layers depends on what another has left
    (`compute_with_and_without_state`), or a layer on what another has.

    Returns None after a look, and for captured models; else a line for the user about why there was none.
    """
    if traces_of(graph) is not None:
        return None
    with preserve_random_state():
        try:
            refuse_large_models(spec, graph)
            layers = _Layers(*first_microbatches(spec, graph), graph)
            layers.check()
        except NotCompared as found:
            return f"the layers were not looked through for state that they keep: {found}; {UNSEEN}"
    return layers.line_about_unread()


class _Layers(PlainMicrobatches):
    """The layers, one after the other in one process."""

    def __init__(self, spec: Job, batches: Batches, graph: Graph) -> None:
        modules = materialise(graph, 0, len(graph.layers), seed=spec.seed, dtype=getattr(torch, spec.dtype))
        super().__init__(spec, "a layer", modules, batches)
        self._graph = graph
        self._loss = graph.loss_of_values(make_loss_function(spec.loss))
        self._before_each_layer: StateReading | None = None
        """What is put back before each layer runs; None: nothing."""

    def check(self) -> None:
        """See `check_layers_with_numbers`."""
        first = self.state.read()
        one, *_ = self.run(1)
        left = first.changed(self.state.read())
        if not left:
            return
        self.state.put_back(first)
        self._before_each_layer = first
        try:
            difference = one.difference(self.compute(0))
        except NotCompared as error:
            difference = str(error)
        if difference is not None:
            raise ModelError(
                f"a layer reads what another layer of the same microbatch has left in {', or '.join(left[:3])}: without it "
                f"{difference}. A plan may put the layers into different stages, on workers that do not share it",
                cure="return what later layers need as a value, in a raypar.Graph whose layers name their inputs and outputs; "
                "or give one module whose forward passes it on, which raypar records",
            )

    def forward(self, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor | float | None]:
        """(loss, count) of one microbatch."""
        values = {name: field.clone() for name, field in batch.items()}
        for layer in self._graph.layers:
            if self._before_each_layer is not None:
                self.state.put_back(self._before_each_layer)
            self.seed(layer.name)
            out = self.modules[layer.name](*(values[name] for name in layer.inputs))
            values |= zip(layer.outputs, out if isinstance(out, tuple) else (out,), strict=True)
        found = self._loss(*(values[name] for name in self._graph.loss_inputs), values[self._spec.loss_target_name])
        return found if isinstance(found, tuple) else (found, None)
