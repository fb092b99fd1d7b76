"""Where a weight's gradient lies: in the same place in every step, as long as nobody else looks at what was there.

Freed and allocated anew in each step, large gradients between small activations leave holes that nothing fits in: glibc asks
for more than an aligned block needs (`_int_memalign`), so it does not find back to a hole of the block's own size. With two
processors and 12 blocks of a GPT this made up to 24 MiB of 290 (7 %), from run to run; kept, the gradients take what they are.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from raypar.comm.buffer_pool import ALIGNED, CPU

_SMALL = 4
"""Activations of at most a fourth of the gradients are worth less than the holes."""

_storage_users = getattr(torch._C, "_storage_Use_Count", None)
"""How many tensors and Python objects hold a storage; not a public function (CUDA graph trees use it)."""


class GradientBuffer:
    """Of one weight. Only in host memory: PyTorch's allocator on GPUs finds freed blocks again."""

    def __init__(self) -> None:
        self._kept: Tensor | None = None

    def keep(self, weight: Tensor) -> None:
        """Nobody needs `weight.grad` [out, in] any more."""
        self._kept = weight.grad if weight.device == CPU else None

    def take(self, gradient: Tensor, x: Tensor) -> Tensor | None:
        """Memory for grad^T x of grad [rows, out] and x [rows, in], once a step; None: allocate it.

        What somebody still holds (an optimizer its last gradient, a hook, a reduction its buckets) is left to them, and so is
        what others than PyTorch's allocator have made: another process or numpy may look at it.
        """
        kept, self._kept = self._kept, None
        if kept is None or kept.dtype != gradient.dtype or kept.dtype != x.dtype:
            return None
        if torch.is_grad_enabled() or kept.requires_grad or kept.is_inference():
            return None
        if not kept.is_contiguous() or kept.data_ptr() % ALIGNED or kept.is_shared():
            return None
        if not _is_all_of_a_block(kept):
            return None
        return kept if _holders(kept) == _sole() else None


def _is_all_of_a_block(tensor: Tensor) -> bool:
    memory = tensor.untyped_storage()
    return memory.nbytes() == tensor.nbytes and memory.resizable()


def _holders(tensor: Tensor) -> tuple[int, int, int, int] | None:
    """Holders of the tensor and of its memory, of each the Python object and what is behind it; None if they cannot be told."""
    if _storage_users is None:
        return None
    memory = tensor.untyped_storage()
    return sys.getrefcount(tensor), tensor._use_count(), sys.getrefcount(memory), _storage_users(memory._cdata)


def _sole() -> tuple[int, int, int, int]:
    alone = torch.empty(1)
    return _holders(alone) or (0, 0, 0, 0)


class Keeper(Protocol):
    """A cut linear layer."""

    weight: Tensor

    def keep_gradient(self) -> None:
        """Its gradient of the last step is no longer needed."""


class GradientBuffers:
    """Of a stage: whether they are worth while, which the first step shows.

    They are if they cost nothing, as gradients and all activations are there at once anyway: some microbatch goes forward
    when another has gone back. Where all go forward first, gradients that are kept stand beside the activations, which else
    could lie there: they are kept if the activations are small.
    """

    def __init__(self, linears: Sequence[Keeper]) -> None:
        self._linears = linears
        self._worth: bool | None = None if linears else False
        self._before: int | None = None
        self._activations: int | None = None
        self._back = False

    def begin_step(self) -> None:
        """Before the gradients of the last step are let go."""
        if self._worth is None and self._activations is not None:
            gradients = sum(linear.weight.nbytes for linear in self._linears if linear.weight.requires_grad)
            self._worth = _SMALL * self._activations <= gradients
        if self._worth:
            for linear in self._linears:
                linear.keep_gradient()
        self._back = False

    def forward(self) -> None:
        """Before a microbatch goes forward."""
        if self._worth is not None:
            return
        if self._back:
            self._worth = True
        elif self._before is None:
            self._before = _allocated()

    def backward(self) -> None:
        """Before a microbatch goes back."""
        if self._worth is None and not self._back:
            self._back = True
            now = _allocated()
            self._activations = None if now is None or self._before is None else now - self._before


class _Mallinfo2(ctypes.Structure):
    names = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")
    _fields_ = [(name, ctypes.c_size_t) for name in names]


def _allocated() -> int | None:
    """Bytes that this process has allocated; None where glibc (2.33 or newer) cannot be asked."""
    ask = getattr(ctypes.CDLL(None), "mallinfo2", None) if sys.platform.startswith("linux") else None
    if ask is None:
        return None
    ask.restype = _Mallinfo2
    found = ask()
    return int(found.uordblks + found.hblkhd)
