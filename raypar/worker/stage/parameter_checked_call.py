"""Refuses layers whose forward does to parameters what replicas cannot follow: replaces, changes or keeps them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from torch import Tensor, nn

from raypar.errors import UserCodeError
from raypar.worker.stage.buffer_updates import same_bits
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


class ParameterCheckedCall:
    """A layer's call (`LayerFunction`) of a stage with several replicas, which looks at the layer's parameters afterwards.

    Raises `UserCodeError`, with layer and parameter, for a forward that changes a frozen parameter, each replica as often as it
    has microbatches (what is written through `.data` counts no version: it is seen in the first call in training, and in the
    first of step 2, 4, 8 and so on); with `are_divided`, that replaces a parameter or its memory, of which owners have runs;
    with `are_freed`, if the first one in training keeps a view of a parameter in an attribute.
    """

    def __init__(self, layer: str, call: LayerFunction, *, are_divided: bool, are_freed: bool) -> None:
        self._layer, self._call, self._are_divided, self._looks_for_views = layer, call, are_divided, are_freed
        self._places: list[_Place] | None = None
        self._compared = -1
        """The last step, from 0, in which values of frozen parameters were compared."""

    def __call__(self, forward_pass: PassContext, weights: LayerTensors, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """What the layer returns."""
        if self._places is None:
            places = _places(weights.module)
            self._places = [place for place in places if self._are_divided or not place.parameter.requires_grad]
        before = [(place.parameter.data_ptr(), place.parameter._version) for place in self._places]
        values = self._values_to_compare(forward_pass, self._places)
        outputs = self._call(forward_pass, weights, inputs)
        for place, (address, version) in zip(self._places, before, strict=True):
            if place.owner._parameters.get(place.key) is not place.parameter or place.parameter.data_ptr() != address:
                self._refuse_replaced(place)
            if not place.parameter.requires_grad and place.parameter._version != version:
                self._refuse_changed(place)
        for place, value in values:
            if not same_bits(place.parameter.detach(), value):
                self._refuse_changed(place)
        if self._looks_for_views and forward_pass.training:
            self._refuse_kept(weights.module, self._places)
            self._looks_for_views = False
        return outputs

    def _values_to_compare(self, forward_pass: PassContext, places: Sequence[_Place]) -> list[tuple[_Place, Tensor]]:
        """Copies of the frozen parameters, where they are compared after the call: seldom, as most of a model may be frozen."""
        step = forward_pass.step
        if not forward_pass.training or step == self._compared or (self._compared >= 0 and (step + 1) & step):
            return []
        self._compared = step
        return [(place, place.parameter.detach().clone()) for place in places if not place.parameter.requires_grad]

    def _refuse_replaced(self, place: _Place) -> None:
        why = (
            "under plan.zero its owners train the one that it had" if self._are_divided else "each replica has another one then"
        )
        raise UserCodeError(
            f"layer {self._layer!r} replaces its parameter {place.path!r} in forward: {why}",
            cure=f"compute with a tensor made of it (weight = f(self.{place.key})), and leave the parameter alone; or set "
            + ("plan.zero: 0" if self._are_divided else "plan.replicas: 1"),
        )

    def _refuse_changed(self, place: _Place) -> None:
        raise UserCodeError(
            f"layer {self._layer!r} changes its frozen parameter {place.path!r} in forward: each replica would change its own, "
            "as often as it has microbatches",
            cure="set plan.replicas: 1 for its stage; a running mean of the weights is kept by the job's key average",
        )

    def _refuse_kept(self, module: nn.Module, places: Sequence[_Place]) -> None:
        own = {id(place.parameter) for place in places}
        of_address = {memory_begin(place.parameter): place.path for place in places}
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
