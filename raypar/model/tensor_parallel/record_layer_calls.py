"""Records the calls of layers on tensors without values, and which call reads whose result; styles are inferred from that."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from raypar.model.capture.module_graph import build_layer_without_parameter_values
from raypar.model.graph import Graph
from raypar.model.random_state import preserve_random_state
from raypar.model.tensor_parallel.styles.head_styles import is_plain_attention
from raypar.model.tensor_parallel.styles.style import is_plain_embedding, is_plain_linear
from raypar.torch_compat.avoid_dynamo_import import meta_operations_without_dynamo
from raypar.torch_compat.pytree import tree_leaves

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class RecordedCall:
    """One call: of a module that a style can replace, or of a function of PyTorch outside of such modules."""

    module: str | None
    """Qualified name of the module; None for a function."""
    function: str
    """Name of the function; empty for a module."""
    inputs: tuple[int, ...]
    """Numbers of the tensors that it was given. A write in place gives a tensor a new number."""
    outputs: tuple[int, ...]
    """Numbers of the tensors that it returned, or has written."""
    arguments: tuple[str, ...] = ()
    """Its other arguments: sizes, dims, numbers."""


@dataclass(frozen=True, slots=True)
class LayerRecord:
    """One call of some layers, one after the other."""

    calls: tuple[RecordedCall, ...]
    """In order."""
    shapes: Mapping[int, tuple[int, ...]]
    """Number of a tensor -> its shape."""
    given: tuple[tuple[tuple[int, ...], torch.dtype, bool], ...]
    """Shape and dtype of each tensor that the layers were given, and whether it has a gradient."""
    outputs: tuple[int, ...]
    """Numbers of the tensors that others read."""


def record_layers(graph: Graph, first: int, last: int, values: Mapping[str, Tensor]) -> LayerRecord:
    """The record of layers [first, last), run one after the other on tensors without values.

    `values`: what they read, by the names of the graph. Raises what users' code raises where it cannot run so.
    """
    recorder, layers, found = _Recorder(), graph.layers[first:last], dict(values)
    with torch.enable_grad(), meta_operations_without_dynamo(), preserve_random_state():
        for index, layer in enumerate(layers, first):
            module = build_layer_without_parameter_values(graph, index)
            for path, part in module.named_modules():
                if is_recorded_whole(part):
                    part.forward = partial(recorder.call_module, layer.qualify(path), part.forward)
            with recorder:
                made = module(*(found[name] for name in layer.inputs))
            found.update(zip(layer.outputs, made if isinstance(made, tuple) else (made,), strict=True))
    leaving = [
        name
        for layer in layers
        for name in layer.outputs
        if any(not first <= reader < last for reader in graph.consumers(name))
    ]
    written = {name for layer in layers for name in layer.outputs}
    given = [values[name] for layer in layers for name in layer.inputs if name not in written]
    return LayerRecord(
        tuple(recorder.calls),
        recorder.shapes,
        tuple((tuple(x.shape), x.dtype, x.requires_grad) for x in given),
        recorder.numbers_of([found[name] for name in leaving]),
    )


def is_recorded_whole(module: nn.Module) -> bool:
    """Whether the record has the module's call as one: a linear layer, an embedding, or `nn.MultiheadAttention`."""
    return is_plain_linear(module) or is_plain_embedding(module) or is_plain_attention(module)


class _Recorder(TorchFunctionMode):
    """Records every function of PyTorch that is called while this mode is entered."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[RecordedCall] = []
        self.shapes: dict[int, tuple[int, ...]] = {}
        self._numbers: dict[int, int] = {}
        """Id of a tensor -> its number."""
        self._kept: list[Tensor] = []
        """All tensors with a number, so that no id is used again."""
        self._inside = 0
        """How many recorded modules run."""

    def call_module(self, name: str, forward: Callable[P, R], *args: P.args, **named: P.kwargs) -> R:
        """The forward of a module, as one call."""
        given = self.numbers_of(_tensors((args, named)))
        self._inside += 1
        try:
            made = forward(*args, **named)
        finally:
            self._inside -= 1
        if not self._inside:
            self.calls.append(RecordedCall(name, "", given, self._fresh(_tensors(made))))
        return made

    def __torch_function__(
        self, func: Callable[..., R], types: Collection[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> R:
        named = kwargs or {}
        if self._inside:
            return func(*args, **named)
        given = self.numbers_of(_tensors((args, named)))
        made = func(*args, **named)
        written = args[:1] if func.__name__ in ("__setitem__", "copy_") else made
        outputs = list(_tensors(written))
        if outputs:
            self.calls.append(RecordedCall(None, func.__name__, given, self._fresh(outputs), _arguments((args, named))))
        return made

    def numbers_of(self, tensors: Iterator[Tensor] | Sequence[Tensor]) -> tuple[int, ...]:
        """The numbers of tensors."""
        return tuple(self._numbers[id(t)] if id(t) in self._numbers else self._fresh([t])[0] for t in tensors)

    def _fresh(self, tensors: Iterator[Tensor] | Sequence[Tensor]) -> tuple[int, ...]:
        found = []
        for tensor in tensors:
            self._kept.append(tensor)
            self._numbers[id(tensor)] = len(self.shapes)
            found.append(len(self.shapes))
            self.shapes[len(self.shapes)] = tuple(tensor.shape)
        return tuple(found)


def _tensors(values: Any) -> Iterator[Tensor]:
    return (leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor))


def _arguments(values: Any) -> tuple[str, ...]:
    plain = (bool, int, float, str, slice, torch.dtype, type(None), type(Ellipsis))
    return tuple(repr(leaf) if isinstance(leaf, plain) else type(leaf).__name__ for leaf in tree_leaves(values))
