"""Runs the program of one layer: the same calls as in the trace, on the layer's own inputs and modules."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from raypar.model.capture.layer_programs import LayerProgram
from raypar.model.capture.trace import Event, TensorKey

Values = dict[TensorKey, Tensor]
"""Tensors of one call of a layer, by the trace's keys."""


class ProgramSource(Protocol):
    """Where a layer finds its program for a batch: `TraceCache`."""

    def program(self, index: int, fields: Mapping[str, Tensor], *, training: bool) -> tuple[LayerProgram, Values]:
        """The program of layer `index`, and the trace's constants."""


class CapturedLayer(nn.Module):
    """A layer of a captured model: its unit, and the parameters and buffers of its glue, at the paths of the model.

    `forward(*inputs)` takes the values that the layer reads, then batch fields; it returns the values that it writes.
    """

    def __init__(self, source: ProgramSource, index: int, fields: Sequence[str]) -> None:
        super().__init__()
        self._captured = _CapturedLayerState(source, index, tuple(fields))
        """Plain data of the layer; copies of the module share it."""

    def forward(self, *inputs: Tensor) -> Tensor | tuple[Tensor, ...]:
        """The layer's outputs: a tensor, or a tuple of tensors."""
        state = self._captured
        count = len(inputs) - len(state.fields)
        fields = dict(zip(state.fields, inputs[count:], strict=True))
        program, constants = state.source.program(state.index, fields, training=self.training)
        values = dict(constants)
        values.update((key, value) for (_, key), value in zip(program.reads, inputs[:count], strict=True))
        values.update((TensorKey("field", name), value) for name, value in fields.items())
        run_layer(program, self, values)
        found = tuple(values[key] for _, key in program.outputs)
        return found[0] if len(found) == 1 else found


class _CapturedLayerState:
    """What all copies of a captured layer share."""

    def __init__(self, source: ProgramSource, index: int, fields: tuple[str, ...]) -> None:
        self.source = source
        """Where its program comes from."""
        self.index = index
        """The layer's place in the model."""
        self.fields = fields
        """The batch fields that it is given."""

    def __deepcopy__(self, memo: dict[int, Any]) -> _CapturedLayerState:
        return self


def run_layer(program: LayerProgram, module: nn.Module, values: Values) -> None:
    """Run the events of a layer; adds to `values` what they make."""
    for key in program.state:
        values[key] = _attribute(module, key.name)
    for key in program.copied:
        values[key] = values[key].clone()  # the layer owns what it writes into
    for event in program.events:
        run_event(event, module, values)


def run_event(event: Event, module: nn.Module, values: Values) -> Any:
    """Run one event, and add to `values` what it makes; returns its result."""
    args, kwargs = _arguments(event, values)
    call: Callable[..., Any] = _attribute(module, event.call) if isinstance(event.call, str) else event.call
    if event.grad and event.autocast is None:
        out = call(*args, **kwargs)
    else:
        with _users_contexts(event):
            out = call(*args, **kwargs)
    for rewrite in event.rewrites:
        if rewrite.before in values:
            values[rewrite.after] = values[rewrite.before]
    if event.returns_tensor:
        key = event.outputs[0]
        if key is not None:
            values[key] = out
        return out
    for key, result in zip(event.outputs, tree_flatten(out)[0], strict=False):
        if key is not None:
            values[key] = result
    return out


@contextlib.contextmanager
def _users_contexts(event: Event) -> Any:
    """The contexts that users' code has entered around an event."""
    with contextlib.ExitStack() as stack:
        if not event.grad:
            stack.enter_context(torch.no_grad())
        if event.autocast is not None:
            stack.enter_context(torch.autocast("cpu", event.autocast.dtype, event.autocast.enabled, cache_enabled=False))
        yield


def _arguments(event: Event, values: Values) -> tuple[Sequence[Any], Mapping[str, Any]]:
    """The arguments of an event."""
    leaves = [values[leaf] if type(leaf) is TensorKey else leaf for leaf in event.leaves]
    plain = vars(event).get("_plain_arguments")
    if plain is None:
        plain = vars(event)["_plain_arguments"] = _plain_arguments(event)
    if plain is False:
        args, kwargs = tree_unflatten(leaves, event.structure)
        return args, copy.copy(kwargs)
    count, names = plain
    return leaves[:count], dict(zip(names, leaves[count:], strict=True))


def _plain_arguments(event: Event) -> tuple[int, tuple[str, ...]] | bool:
    """(number of arguments by place, names of the others) where no argument is a container; else False."""
    args, kwargs = tree_unflatten(list(range(len(event.leaves))), event.structure)
    if [*args, *kwargs.values()] == list(range(len(event.leaves))):
        return len(args), tuple(kwargs)
    return False


def _attribute(module: nn.Module, path: str) -> Any:
    """The submodule, parameter or buffer at a path."""
    found: Any = module
    for name in path.split("."):
        found = getattr(found, name)
    return found
