"""Finds tensors inside of values that PyTorch's pytree does not look into: dataclasses, functions and their closures."""

from __future__ import annotations

import enum
import functools
import itertools
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import numpy
import torch
from torch import Tensor, nn

from raypar.torch_compat.avoid_dynamo_import import is_filled_cell
from raypar.torch_compat.pytree import TreeSpec, register_pytree_node, tree_flatten

_WITHOUT_TENSORS = (
    int, float, complex, str, bytes, bool, type(None), type(...), range, enum.Enum, numpy.generic, numpy.ndarray,
    torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size, type,
)  # fmt: skip
"""Types whose objects contain no tensors."""

_DEPTH = 12
"""Nesting depth to which functions and containers are searched."""


def values_of_function(function: types.FunctionType) -> list[Any]:
    """The values that a function holds: in its closure, in default arguments, in keyword-only ones, in its own attributes."""
    cells = [cell.cell_contents for cell in function.__closure__ or () if is_filled_cell(cell)]
    defaults = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    return [*cells, *defaults, *attributes_of_function(function).values()]


def attributes_of_function(function: types.FunctionType) -> dict[str, Any]:
    """The attributes that code has given a function, without those that describe it (`__wrapped__` of `functools.wraps`)."""
    return {name: value for name, value in vars(function).items() if not (name.startswith("__") and name.endswith("__"))}


def may_hide_tensors(value: Any, depth: int = 0) -> bool:
    """Whether an object may contain tensors or modules. A replay would use those of the trace instead of its own."""
    if isinstance(value, _WITHOUT_TENSORS):
        return False
    if depth > _DEPTH or isinstance(value, (Tensor, nn.Module, torch.Generator)):
        return True
    if isinstance(value, slice):
        return any(may_hide_tensors(part, depth + 1) for part in (value.start, value.stop, value.step))
    if isinstance(value, (types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType)):
        return isinstance(getattr(value, "__self__", None), (Tensor, nn.Module))
    if isinstance(value, types.FunctionType):
        return any(may_hide_tensors(each, depth + 1) for each in values_of_function(value))
    if isinstance(value, functools.partial):
        return any(may_hide_tensors(each, depth + 1) for each in (value.func, *value.args, *value.keywords.values()))
    if isinstance(value, (tuple, list, set, frozenset)):
        return any(may_hide_tensors(each, depth + 1) for each in value)
    if is_dataclass(value) and getattr(type(value), "__dataclass_params__").frozen:  # noqa: B009
        return any(may_hide_tensors(getattr(value, each.name), depth + 1) for each in fields(value))
    return True


_NOT_ONLY_ATTRIBUTES = (type, Tensor, nn.Module, dict, list, tuple)
"""Classes whose objects hold more than their attributes say, dataclasses or not."""


def flatten(value: Any) -> tuple[list[Any], TreeSpec]:
    """The leaves and the structure of a value, as `tree_flatten` returns them, but with dataclasses as containers."""
    while True:
        leaves, structure = tree_flatten(value)
        unknown = {type(leaf) for leaf in leaves if is_dataclass(leaf) and not isinstance(leaf, _NOT_ONLY_ATTRIBUTES)}
        if not unknown:
            return leaves, structure
        for kind in unknown:
            register_pytree_node(kind, _dataclass_parts, _rebuild_dataclass)


def _dataclass_parts(value: Any) -> tuple[list[Any], Any]:
    """(values of the attributes, (class, names of the attributes)) of a dataclass."""
    names = tuple(vars(value)) if hasattr(value, "__dict__") else tuple(each.name for each in fields(value))
    return [getattr(value, name) for name in names], (type(value), names)


def _rebuild_dataclass(parts: Iterable[Any], context: Any) -> Any:
    """A dataclass with these attributes. Its constructor is not called: it might refuse values that stand for tensors."""
    kind, names = context
    made = object.__new__(kind)
    for name, part in zip(names, parts, strict=True):
        object.__setattr__(made, name, part)
    return made


@dataclass(frozen=True)
class _Placeholder:
    """Stands in a function for a tensor that the function held."""


class MappedCall:
    """A call of `torch.vmap`, as a function of the tensors that the mapped function holds and of the call's arguments.

    The mapped function runs on batched tensors of functorch. They exist only during the call, so its operations cannot be
    recorded one by one: the call is one event. Attention masks are often made this way.
    """

    __name__ = "vmap"

    def __init__(self, original: Callable[..., Any], function: Any, options: Sequence[Any]) -> None:
        """`original`: PyTorch's implementation, called with the function, `options`, and then the call's arguments."""
        self._original, self._options = original, options
        self.held = list(_tensors_in(function))
        """The tensors that the function holds in closures and default arguments."""
        self.function = _with_tensors(function, iter([_Placeholder()] * len(self.held)))
        """The function with placeholders for them."""

    def __call__(self, held: Sequence[Tensor], args: Sequence[Any], kwargs: Any) -> Any:
        """The call's result with `held` in the place of the placeholders."""
        return self._original(_with_tensors(self.function, iter(held)), *self._options, *args, **kwargs)


def _tensors_in(value: Any, depth: int = 0) -> Iterator[Any]:
    """The tensors or placeholders that a function holds, directly or in functions and containers that it holds, in order."""
    if isinstance(value, (Tensor, _Placeholder)):
        yield value
    elif depth <= _DEPTH:
        for part in _parts(value):
            yield from _tensors_in(part, depth + 1)


def _parts(value: Any) -> list[Any]:
    """The values that a function, a partial function, a tuple or a list holds; none for anything else."""
    if isinstance(value, types.FunctionType):
        return values_of_function(value)
    if isinstance(value, functools.partial):
        return [value.func, *value.args, *value.keywords.values()]
    return list(value) if type(value) in (tuple, list) else []


def _with_tensors(value: Any, tensors: Iterator[Any], depth: int = 0) -> Any:
    """A copy of `value` in which the next `tensors` replace what `_tensors_in` yields; `value` itself if that is nothing."""
    if isinstance(value, (Tensor, _Placeholder)):
        return next(tensors)
    if depth > _DEPTH or not any(True for _ in _tensors_in(value, depth)):
        return value
    parts = iter([_with_tensors(part, tensors, depth + 1) for part in _parts(value)])
    if isinstance(value, types.FunctionType):
        cells = [types.CellType(next(parts)) if is_filled_cell(cell) else cell for cell in value.__closure__ or ()]
        made = types.FunctionType(value.__code__, value.__globals__, value.__name__, None, tuple(cells))
        made.__defaults__ = value.__defaults__ and tuple(itertools.islice(parts, len(value.__defaults__)))
        made.__kwdefaults__ = value.__kwdefaults__ and dict(zip(value.__kwdefaults__, parts, strict=False))
        vars(made).update(vars(value) | dict(zip(attributes_of_function(value), parts, strict=True)))
        return made
    if isinstance(value, functools.partial):
        function, *rest = parts
        count = len(value.args)
        return functools.partial(function, *rest[:count], **dict(zip(value.keywords, rest[count:], strict=True)))
    return type(value)(parts)
