"""Records what PyTorch computes: which operation, on tensors of which shape, strides and place in memory.

Kernels of matrix products choose their path by these (MKL by the place modulo 64 bytes too), and another path has other bits.
Which processor shows that differs: the calls are the same on all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

ALIGNED = 64
"""Bytes. PyTorch's allocator gives memory that begins at multiples."""

_COMPUTE_NOTHING = (
    {"t", "view", "_unsafe_view", "detach", "alias", "expand", "unsqueeze", "squeeze", "squeeze_", "transpose", "permute"}
    | {"slice", "select", "as_strided", "split", "narrow", "unbind", "clone", "copy_"}
    | {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
)
"""Views and copies: what they give is seen where something is computed of it."""
PRODUCTS = {"mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "dot", "matmul", "linear"}
"""Operations that a BLAS computes."""


class KernelCalls(TorchDispatchMode):
    """While it is entered, `calls` gets one line of text for each operation that computes something."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """See `TorchDispatchMode`."""
        name = func.overloadpacket.__name__
        if name not in _COMPUTE_NOTHING:
            named = [f"{key}={_described(value)}" for key, value in (kwargs or {}).items()]
            self.calls.append(f"{name}({', '.join([*map(_described, args), *named])})")
        return func(*args, **(kwargs or {}))


def calls_of(run: Callable[..., Any], *args: Any) -> tuple[Counter[str], Any]:
    """What `run(*args)` computes, backward passes included, each call with how many times it is made; and what it returns."""
    with KernelCalls() as recorded:
        result = run(*args)
    return Counter(recorded.calls), result


def products_in(calls: Counter[str]) -> Counter[str]:
    """The matrix products among calls."""
    return Counter({call: count for call, count in calls.items() if call.partition("(")[0] in PRODUCTS})


def _described(value: Any) -> str:
    if isinstance(value, Tensor):
        dtype, place = str(value.dtype).removeprefix("torch."), value.data_ptr() % ALIGNED
        return f"{dtype}{list(value.shape)} strides {list(value.stride())} at {place}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_described, value))}]"
    return repr(value)


def unaligned(tensors: dict[str, Tensor]) -> list[str]:
    """Names of those whose memory does not begin as that of a new tensor does."""
    return [name for name, tensor in tensors.items() if tensor.numel() and tensor.data_ptr() % ALIGNED]


def elsewhere(tensor: Tensor, by: int = 1) -> Tensor:
    """An equal, contiguous tensor in memory that begins `by` elements after a multiple of 64 bytes."""
    room = torch.empty(tensor.numel() + by, dtype=tensor.dtype)
    return room[by:].view(tensor.shape).copy_(tensor)
