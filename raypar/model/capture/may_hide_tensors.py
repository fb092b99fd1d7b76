"""Decides which non-tensor arguments a trace may store as they are: those that cannot contain a tensor."""

from __future__ import annotations

import enum
import functools
import types
from dataclasses import fields, is_dataclass
from typing import Any

import numpy
import torch
from torch import Tensor, nn

from raypar.torch_compat.without_dynamo import is_filled_cell

_PLAIN = (
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
    if isinstance(value, _PLAIN):
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
