"""The module of one layer of a captured model."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from raypar.model.capture.cut_trace_into_layers import LayerProgram
from raypar.model.capture.replay import CPU, check_against_record, run_layer
from raypar.model.capture.trace_cache import TraceCache
from raypar.model.capture.trace_data import TensorKey


class CapturedLayer(nn.Module):
    """A layer of a captured model: holds its unit, and what its glue reads of parameters and buffers, at their paths in the
    model.

    `forward(*inputs)` takes the values that the layer reads, then batch fields; it returns the values that it writes.
    """

    def __init__(self, cache: TraceCache, index: int, fields: Sequence[str]) -> None:
        super().__init__()
        self._raypar_captured_layer = _CapturedLayerState(cache, index, tuple(fields))
        """Plain data of the layer; copies of the module share it. No other attribute: the model's modules have any name."""

    def forward(self, *inputs: Tensor) -> Tensor | tuple[Tensor, ...]:
        """The layer's outputs: a tensor, or a tuple of tensors."""
        state = self._raypar_captured_layer
        count = len(inputs) - len(state.fields)
        given = (value if isinstance(value, Tensor) else value.whole for value in inputs[count:])  # of samples of it all
        fields = dict(zip(state.fields, given, strict=True)) if state.fields else {}
        found = state.cache.trace_for_layer(state.index, fields, training=self.training)
        program, constants = found.layers[state.index], found.trace.constants
        device = inputs[0].device if inputs else CPU
        values = dict(zip((*program.read_keys, *state.field_keys), inputs, strict=True))
        values.update(constants if device == CPU else {key: value.to(device) for key, value in constants.items()})
        run_layer(program, self, values, device)
        if program not in state.checked:
            if not state.cache.first_trace.is_fixed(state.index):  # else it has the program of another batch
                check_against_record(program, values, found.trace)
            state.checked.add(program)
        outputs = [values[key] for key in program.output_keys]
        if found.returns_numbers and program is found.layers[-1]:
            outputs.append(torch.tensor(state.cache.number_of_output_form(found)))
        return outputs[0] if len(outputs) == 1 else tuple(outputs)


def cache_of(layer: CapturedLayer) -> TraceCache:
    """The traces of the whole model of which a layer is."""
    return layer._raypar_captured_layer.cache


class _CapturedLayerState:
    """What all copies of a captured layer share."""

    def __init__(self, cache: TraceCache, index: int, fields: tuple[str, ...]) -> None:
        self.cache = cache
        """Where its program comes from."""
        self.index = index
        """The layer's place in the model."""
        self.fields = fields
        """The batch fields that it is given."""
        self.field_keys = tuple(TensorKey("field", name) for name in fields)
        """Their keys in traces."""
        self.checked: weakref.WeakSet[LayerProgram] = weakref.WeakSet()
        """Programs that have run once, and had the shapes of their record."""

    def __deepcopy__(self, memo: dict[int, nn.Module]) -> _CapturedLayerState:
        return self
