"""Records what PyTorch computes: which operation, on tensors of which shape, strides and place in memory.

Kernels of matrix products choose their path by these (MKL by the place modulo 64 bytes too), and another path has other bits.
Which processor shows that differs: the calls are the same on all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from helpers.late_device import World
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from raypar.comm.buffer_pool import ALIGNED_ON_CUDA

ALIGNED = 64
"""Bytes. PyTorch's allocator for the CPU gives memory that begins at multiples."""

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


@contextmanager
def calls_on_late_devices() -> Iterator[Counter[str]]:
    """What all late devices are asked for inside, as `calls_of` has it, at addresses modulo those of new tensors on CUDA."""
    calls, compute = Counter[str](), World.compute

    def counted(world: World, op: Any, args: Any, kwargs: Any) -> Any:
        described = [_described(value, ALIGNED_ON_CUDA) for value in (*args, *kwargs.values())]
        calls[f"{op.overloadpacket.__name__}({', '.join(described)})"] += 1
        return compute(world, op, args, kwargs)

    with mock.patch.object(World, "compute", counted):
        yield calls


def products_in(calls: Counter[str]) -> Counter[str]:
    """The matrix products among calls."""
    return Counter({call: count for call, count in calls.items() if call.partition("(")[0] in PRODUCTS})


class AnotherProcessor(TorchDispatchMode):
    """While it is entered, products and attention round otherwise: their results move by some of what rounding may change.

    That is as large as what is summed, not as the sum, of which nothing but this may be left.
    """

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self._numbers = torch.Generator().manual_seed(seed)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """See `TorchDispatchMode`."""
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name in PRODUCTS:
            return self._moved(result, func(*(x.abs() if isinstance(x, Tensor) else x for x in args)))
        if name == "_scaled_dot_product_flash_attention_for_cpu_backward":
            gradient, q, k, v = (x.abs().max() for x in args[:4])
            scales = gradient * v * k, gradient * v * q, gradient
            return tuple(self._moved(x, scale) for x, scale in zip(result, scales, strict=True))
        return result

    def _moved(self, x: Tensor, scale: Tensor) -> Tensor:
        noise = torch.rand(x.shape, generator=self._numbers, dtype=x.dtype) - 0.5
        return x + noise * torch.finfo(x.dtype).eps * scale


def _described(value: Any, alignment: int = ALIGNED) -> str:
    if isinstance(value, Tensor):
        dtype, place = str(value.dtype).removeprefix("torch."), value.data_ptr() % alignment
        return f"{dtype}{list(value.shape)} strides {list(value.stride())} at {place}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(_described(each, alignment) for each in value)}]"
    return repr(value)


def parameters_lie_as_new_ones(stages: Mapping[int, Any]) -> None:
    """Asserts it of a worker's stages: products with a weight that lies elsewhere may have other bits."""
    for stage in stages.values():
        wrong = [name for name, p in stage.parameters.items() if p.numel() and p.data_ptr() % ALIGNED]
        assert not wrong, f"{wrong} of stage {stage.index} do not begin at multiples of {ALIGNED} bytes"


def elsewhere(tensor: Tensor, by: int = 1) -> Tensor:
    """An equal, contiguous tensor in memory that begins `by` elements after a multiple of 64 bytes."""
    room = torch.empty(tensor.numel() + by, dtype=tensor.dtype)
    return room[by:].view(tensor.shape).copy_(tensor)
