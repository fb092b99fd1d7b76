"""Refuses layers whose parameters cannot be freed when the layers have run: a forward replaces one, or keeps a view of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from torch import Tensor, nn

from raypar.errors import UserCodeError
from raypar.worker.stage.layer_call import LayerFunction, PassContext
from raypar.worker.stage.layer_tensors import LayerTensors, memory_begin

_CURE = "or set plan.zero: 2, under which each replica keeps whole parameters"
_DEPTH = 3
"""So many containers inside each other are looked through."""


class _Place(NamedTuple):
    """A parameter of a layer before its forward."""

    path: str
    """Its path in the layer."""
    owner: nn.Module
    """The module that has it."""
    key: str
    """Its name there."""
    parameter: nn.Parameter
    address: int
    """Of its memory."""


class ParameterCheckedCall:
    """A layer's call (`LayerFunction`), whose first one in training looks where the layer's parameters are afterwards.

    Raises `UserCodeError`, with layer and parameter, for a forward that replaces a parameter or its memory, or keeps a view of
    one in an attribute.
    """

    def __init__(self, layer: str, call: LayerFunction) -> None:
        self._layer, self._call, self._has_looked = layer, call, False

    def __call__(self, forward_pass: PassContext, weights: LayerTensors, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """What the layer returns."""
        if self._has_looked or not forward_pass.training:
            return self._call(forward_pass, weights, inputs)
        before = list(_places(weights.module))
        outputs = self._call(forward_pass, weights, inputs)
        self._refuse_replaced(before)
        self._refuse_kept(weights.module, before)
        self._has_looked = True
        return outputs

    def _refuse_replaced(self, before: Sequence[_Place]) -> None:
        for path, owner, key, parameter, address in before:
            if owner._parameters.get(key) is not parameter or memory_begin(parameter) != address:
                raise UserCodeError(
                    f"layer {self._layer!r} replaces its parameter {path!r} in forward: under plan.zero: 3 its owners have "
                    "another one, and bring that back in each step",
                    cure=f"compute with a tensor made of it (weight = f(self.{key})), and leave the parameter alone; {_CURE}",
                )

    def _refuse_kept(self, module: nn.Module, before: Sequence[_Place]) -> None:
        own, of_address = {id(place.parameter) for place in before}, {place.address: place.path for place in before}
        for where, tensor in _tensors_kept(module):
            kept = of_address.get(_address(tensor)) if id(tensor) not in own else None
            if kept is not None:
                raise UserCodeError(
                    f"layer {self._layer!r} keeps a view of its parameter {kept!r} in {where!r} after its forward: under "
                    "plan.zero: 3 the parameter's memory is freed after its last use in a step",
                    cure=f"make the view anew in each forward, or keep a copy (.clone()); {_CURE}",
                )


def _places(module: nn.Module) -> Iterator[_Place]:
    for path, part in module.named_modules():
        for key, parameter in part._parameters.items():
            if parameter is not None and parameter.numel():
                where = ".".join(filter(None, (path, key)))
                yield _Place(where, part, key, parameter, memory_begin(parameter))


def _tensors_kept(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of what a module's attributes have beside its parameters."""
    for path, part in module.named_modules():
        for name, value in vars(part).items():
            if name not in ("_parameters", "_modules"):
                where = ".".join(filter(None, (path, name)))
                yield from ((where, tensor) for tensor in _tensors_in(value, _DEPTH))


def _address(tensor: Tensor) -> int:
    """Where a tensor's memory is; 0 of one without a storage of its own (a sparse one, a wrapper of another)."""
    try:
        return memory_begin(tensor)
    except (RuntimeError, NotImplementedError):
        return 0


def _tensors_in(value: object, depth: int) -> Iterator[Tensor]:
    """The tensors that an attribute has, also in containers."""
    if isinstance(value, Tensor):
        yield value
    elif depth and isinstance(value, (list, tuple, set, Mapping)):
        for one in value.values() if isinstance(value, Mapping) else value:
            yield from _tensors_in(one, depth - 1)
