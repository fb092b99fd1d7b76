"""Calls that read only the dtype and device of a tensor: `mask.type_as(x)`, `x.new_zeros(3)`.

They are recorded with the dtype and device in place of the tensor. So a mask that is made in an activation's dtype does not
depend on the activation, and each stage that needs the mask can compute it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

_MAKERS: dict[Any, Callable[..., Tensor]] = {
    Tensor.new_zeros: torch.zeros,
    Tensor.new_ones: torch.ones,
    Tensor.new_full: torch.full,
    Tensor.new_empty: torch.empty,
}
"""Method that makes a tensor with the dtype and device of another -> function that makes it from a dtype and a device."""

Call = tuple[Any, tuple[Any, ...], dict[str, Any]]
"""(function, arguments, keyword arguments)"""


def without_dtype_and_device_tensor(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Call:
    """The call with dtype and device in place of a tensor of which it reads only these; other calls unchanged."""
    if func in (Tensor.type_as, Tensor.to) and len(args) > 1 and isinstance(args[1], Tensor):
        return Tensor.to, (args[0], args[1].device, args[1].dtype, *args[2:]), dict(kwargs)
    if func in _MAKERS and args and args[0].layout is torch.strided:
        given = {key: value for key, value in kwargs.items() if value is not None}
        return _MAKERS[func], args[1:], {"dtype": args[0].dtype, "device": args[0].device, **given}
    return func, args, dict(kwargs)
