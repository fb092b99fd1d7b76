"""Casts of a layer's operands as `torch.autocast` makes them, for layers whose backward pass is raypar's own."""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch import Tensor

from raypar.torch_compat.process_state import AUTOCAST, torch_state_reader

_may_be_enabled = torch_state_reader(AUTOCAST, "_is_any_autocast_enabled", True)
"""Whether autocast is on for any kind of device: one question in the place of several."""


def is_autocast_enabled(device: torch.device) -> bool:
    """Whether this runs inside `torch.autocast` for that kind of device; kinds without autocast (meta) never do."""
    if not _may_be_enabled():
        return False
    return torch.amp.is_autocast_available(device.type) and torch.is_autocast_enabled(device.type)


def cast_for_autocast(*tensors: Tensor | None) -> tuple[Tensor | None, ...]:
    """The operands of a product, cast as `torch.autocast` would cast them, by operations that autograd records."""
    if not _may_be_enabled():
        return tensors
    device = next(t.device for t in tensors if t is not None)
    if not is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device.type)
    castable = (t is not None and t.is_floating_point() and t.dtype != torch.float64 for t in tensors)
    return tuple(t.to(dtype) if t is not None and can else t for t, can in zip(tensors, castable, strict=True))


_PROBES: dict[torch.device, Tensor] = {}
"""A leaf of our own on each device: see `autocast_cast_token`."""


def autocast_cast_token(device: torch.device) -> Hashable:
    """The same object for all calls that share autocast's cached cast of a weight; None without autocast.

    Without the cache (`cache_enabled=False`) no two calls share one.
    Plain autograd adds the gradients of such calls in the compute dtype, and casts the sum. PyTorch does not say whether it
    still has a cast in its cache, so a leaf of our own is cast as weights are: the object is the graph node of that cast.
    """
    if not is_autocast_enabled(device):
        return None
    if not torch.is_autocast_cache_enabled():
        return object()
    if device not in _PROBES:
        _PROBES[device] = torch.ones(1, 1, dtype=torch.float32, device=device, requires_grad=True)
    made = torch.mm(_PROBES[device], _PROBES[device])
    return made.grad_fn.next_functions[0][0] if made.grad_fn is not None else None
