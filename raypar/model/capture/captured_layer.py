"""The module of one layer of a captured model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from raypar.model.capture.replay import CPU, run_layer
from raypar.model.capture.trace import TensorKey
from raypar.model.capture.trace_cache import TraceCache


class CapturedLayer(nn.Module):
    """A layer of a captured model: its unit, and the parameters and buffers of its glue, at the paths of the model.

    `forward(*inputs)` takes the values that the layer reads, then batch fields; it returns the values that it writes.
    """

    def __init__(self, cache: TraceCache, index: int, fields: Sequence[str]) -> None:
        super().__init__()
        self._captured = _CapturedLayerState(cache, index, tuple(fields))
        """Plain data of the layer; copies of the module share it."""

    @property
    def cache(self) -> TraceCache:
        """The traces of the whole model."""
        return self._captured.cache

    def forward(self, *inputs: Tensor) -> Tensor | tuple[Tensor, ...]:
        """The layer's outputs: a tensor, or a tuple of tensors."""
        state = self._captured
        count = len(inputs) - len(state.fields)
        fields = dict(zip(state.fields, inputs[count:], strict=True)) if state.fields else {}
        program, constants = state.cache.program(state.index, fields, training=self.training)
        device = inputs[0].device if inputs else CPU
        values = dict(zip((*program.read_keys, *state.field_keys), inputs, strict=True))
        values.update(constants if device == CPU else {key: value.to(device) for key, value in constants.items()})
        run_layer(program, self, values, device)
        if len(program.output_keys) == 1:
            return values[program.output_keys[0]]
        return tuple(values[key] for key in program.output_keys)


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

    def __deepcopy__(self, memo: dict[int, Any]) -> _CapturedLayerState:
        return self
