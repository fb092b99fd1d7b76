"""Copies of tensors that share memory until somebody writes into one of them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from raypar.fences.private_api_fence import Fence
from raypar.torch_compat import TESTED


def _look_for_lazy_clone() -> Callable[[Tensor], Tensor]:
    one = torch.zeros(2)
    other = torch._lazy_clone(one)
    other.add_(1.0)
    third = torch._lazy_clone(one)
    one.add_(2.0)
    assert (one.tolist(), other.tolist(), third.tolist()) == ([2.0, 2.0], [1.0, 1.0], [0.0, 0.0])
    return torch._lazy_clone


LAZY = Fence(
    api="torch._lazy_clone",
    reason="nothing public makes a copy that takes memory of its own only once it is written to",
    versions=TESTED,
    feature="sharing the sums of virtual shards between those of one worker",
    without="each gets a copy at once: the same numbers, in more memory and time",
    probe=_look_for_lazy_clone,
)


def lazy_copy(tensor: Tensor) -> Tensor:
    """A copy in the tensor's memory, which whoever writes into one of the two first leaves; a plain copy where that is not
    possible."""
    copy = LAZY.find() if tensor.is_cpu else None
    if copy is None:
        return tensor.clone()
    try:
        return copy(tensor)
    except RuntimeError:  # memory that is not of PyTorch's own allocator
        return tensor.clone()


LAZY.run_probe()  # on import: its tensor operations must not run while a model is recorded
