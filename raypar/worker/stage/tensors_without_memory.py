"""Tensors whose memory comes later: whole parameters of which a worker keeps runs, or nothing, until they are gathered."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from raypar.comm.buffer_pool import CPU


def without_memory(shape: Sequence[int], dtype: torch.dtype, device: torch.device = CPU) -> Tensor:
    """A tensor whose storage has no bytes; on a device whose storages cannot be resized, an uninitialised one."""
    made = torch.empty(tuple(shape), dtype=dtype, device=device)
    if can_be_resized(device):
        made.untyped_storage().resize_(0)
    return made


def has_memory(tensor: Tensor) -> bool:
    """Whether the elements of a tensor, if it has any, are in memory."""
    return not tensor.numel() or tensor.untyped_storage().nbytes() > 0


def view_of_run(flat: Tensor, start: int, stop: int) -> Tensor:
    """A view of elements of a flat tensor, also of one that has no memory: it is there for as long as that takes."""
    if has_memory(flat):
        return flat[start:stop]
    storage = flat.untyped_storage()
    storage.resize_(flat.nbytes)
    view = flat[start:stop]
    storage.resize_(0)
    return view


@cache
def can_be_resized(device: torch.device) -> bool:
    """Whether storages of a device can be: those of processors and of CUDA can, those of a backend of one's own need not."""
    try:
        torch.empty(1, device=device).untyped_storage().resize_(0)
    except RuntimeError:
        return False
    return True
