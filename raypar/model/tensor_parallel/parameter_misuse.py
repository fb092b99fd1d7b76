"""Finds uses of parameters that would silently be wrong on shards, during the pass on the meta device (`meta_check`).

Code that reads `layer.weight` itself silently gets this shard's slice only: `F.linear(x, self.up.weight)` would be computed
with this shard's rows alone.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, ParamSpec, TypeVar

from torch import nn
from torch.overrides import TorchFunctionMode

from raypar.errors import ModelError
from raypar.model.graph import Graph
from raypar.model.tensor_parallel.shard_group import ShardedModule, ShardGroup
from raypar.model.tensor_parallel.sharded_value import ShardedValue, flatten_arguments
from raypar.plan.tensor_parallel_layout import TensorParallelLayout

P = ParamSpec("P")
R = TypeVar("R")

_ASKING = {"size", "dim", "numel", "stride", "element_size", "is_floating_point", "is_complex", "is_contiguous", "detach"}
_ASKING |= {"new_zeros", "new_ones", "new_empty", "new_full", "new_tensor"}
"""Functions that ask a parameter about itself, or make something like it that has no gradient: they compute nothing with it."""
_COMPUTED = {"T", "mT", "H", "mH", "data", "real", "imag"}
"""Attributes whose reading computes with the parameter."""


class ParameterMisuseDetector(TorchFunctionMode):
    """While it is entered, watches what is computed with the parameters of `modules` (layer name -> this shard's module)."""

    def __init__(self, graph: Graph, modules: Mapping[str, nn.Module], layout: TensorParallelLayout, group: ShardGroup) -> None:
        super().__init__()
        self.layer = ""
        """The layer that runs; set by the caller."""
        self._group = group
        self._names: dict[int, str] = {}
        """Id of a parameter -> its qualified name."""
        self._owners: dict[int, list[nn.Module]] = {}
        """Id of a parameter that is cut -> the sharded layers that it belongs to."""
        self._running: list[nn.Module] = []
        """The sharded layers that run, the innermost last."""
        self._whole: set[int] = set()
        """Ids of parameters that were computed with whole values."""
        for layer in (each for each in graph.layers if each.name in modules):
            for path, part in modules[layer.name].named_modules():
                sharded = isinstance(part, ShardedModule)
                for key, parameter in part._parameters.items():
                    if parameter is None:
                        continue
                    name = layer.qualify(f"{path}.{key}" if path else key)
                    self._names.setdefault(id(parameter), name)
                    if sharded and name in layout.cuts:
                        self._owners.setdefault(id(parameter), []).append(part)
                if sharded:
                    part.forward = partial(self._run, part, part.forward)

    def _run(self, part: nn.Module, forward: Callable[P, R], *args: P.args, **named: P.kwargs) -> R:
        self._running.append(part)
        try:
            return forward(*args, **named)
        finally:
            self._running.remove(part)

    def __torch_function__(
        self, func: Callable[..., R], types: Collection[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> R:
        named = kwargs or {}
        given = list(flatten_arguments((*args, *named.values())))
        for value in given:
            if isinstance(value, nn.Parameter) and _computes(func, value, args):
                self._note(func, value, any(isinstance(other, ShardedValue) for other in given))
        return func(*args, **named)

    def _note(self, func: Callable[..., R], parameter: nn.Parameter, with_part: bool) -> None:
        owners = self._owners.get(id(parameter))
        if owners is not None and not any(owner in self._running for owner in owners):
            name = self._names[id(parameter)]
            raise ModelError(
                f"layer {self.layer!r} computes {_name(func)} with {name} itself, of which every shard has a slice",
                cure=f"call the module that it belongs to, or give {name.rpartition('.')[0]} the style whole (plan.styles)",
            )
        if not with_part and not (
            id(parameter) in self._group.partially_used_parameters and _name(func) == "narrow"
        ):  # as `take_part` does it
            self._whole.add(id(parameter))

    def refuse_mixed_use(self) -> None:
        """Raise `ModelError`, after the pass, for a parameter whose gradient would be both whole and a part of a sum."""
        for both in self._whole & self._group.partially_used_parameters.keys():
            name = self._names.get(both, "a parameter")
            raise ModelError(
                f"{name} meets whole values and values of which every shard has a part: its gradient would be neither",
                cure="use two parameters, or give the layers around it the style whole (plan.styles)",
            )


def _name(func: Callable[..., R]) -> str:
    """The name of a function, or of the attribute that it reads."""
    name: str = getattr(func, "__name__", repr(func))
    return str(getattr(getattr(func, "__self__", None), "__name__", name)) if name == "__get__" else name


def _computes(func: Callable[..., R], parameter: nn.Parameter, args: Sequence[Any]) -> bool:
    """Whether the function computes with the parameter's values."""
    name = getattr(func, "__name__", "")
    if name == "__get__":
        return _name(func) in _COMPUTED
    if name in ("to", "type_as"):
        return bool(args) and args[0] is parameter
    return name not in _ASKING
