"""Refuses layers whose parameters replicas cannot divide: a forward replaces one, or keeps a view of what is to be freed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from torch import Tensor, nn

from raypar.errors import UserCodeError
from raypar.worker.stage.layer_call import LayerFunction, PassContext
from raypar.worker.stage.layer_tensors import LayerTensors, memory_begin

_DEPTH = 3
"""So many containers inside each other are looked through."""


class _Place(NamedTuple):
    """Where a layer has a parameter."""

    path: str
    """Its path in the layer."""
    owner: nn.Module
    """The module that has it."""
    key: str
    """Its name there."""
    parameter: nn.Parameter


_Before = Sequence[tuple[_Place, int]]
"""The parameters of a layer before its forward, and where the memory of each is."""


class ParameterCheckedCall:
    """A layer's call (`LayerFunction`) that looks where the layer's parameters are afterwards.

    Raises `UserCodeError`, with layer and parameter, for a forward that replaces a parameter or its memory, of which owners
    have runs; with `are_freed`, if the first one in training keeps a view of a parameter in an attribute.
    """

    def __init__(self, layer: str, call: LayerFunction, *, are_freed: bool) -> None:
        self._layer, self._call, self._looks_for_views = layer, call, are_freed

    def __call__(self, forward_pass: PassContext, weights: LayerTensors, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """What the layer returns."""
        before = [(place, memory_begin(place.parameter)) for place in _places(weights.module)]
        outputs = self._call(forward_pass, weights, inputs)
        self._refuse_replaced(before)
        if self._looks_for_views and forward_pass.training:
            self._refuse_kept(weights.module, before)
            self._looks_for_views = False
        return outputs

    def _refuse_replaced(self, before: _Before) -> None:
        for (path, owner, key, parameter), address in before:
            if owner._parameters.get(key) is not parameter or memory_begin(parameter) != address:
                raise UserCodeError(
                    f"layer {self._layer!r} replaces its parameter {path!r} in forward: under plan.zero its owners train the "
                    "one that it had",
                    cure=f"compute with a tensor made of it (weight = f(self.{key})), and leave the parameter alone; or set "
                    "plan.zero: 0",
                )

    def _refuse_kept(self, module: nn.Module, before: _Before) -> None:
        own, of_address = {id(place.parameter) for place, _ in before}, {address: place.path for place, address in before}
        for where, tensor in _tensors_kept(module):
            kept = of_address.get(_address(tensor)) if id(tensor) not in own else None
            if kept is not None:
                raise UserCodeError(
                    f"layer {self._layer!r} keeps a view of its parameter {kept!r} in {where!r} after its forward: under "
                    "plan.zero: 3 the parameter's memory is freed after its last use in a step",
                    cure="make the view anew in each forward, or keep a copy (.clone()); or set plan.zero: 2, under which each "
                    "replica keeps whole parameters",
                )


def _places(module: nn.Module) -> Iterator[_Place]:
    for path, part in module.named_modules():
        for key, parameter in part._parameters.items():
            if parameter is not None and parameter.numel():
                where = ".".join(filter(None, (path, key)))
                yield _Place(where, part, key, parameter)


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
