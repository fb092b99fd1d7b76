"""Keeps the memory of a weight's gradient from step to step, as long as nobody else uses what is in it.

Large gradients that are freed and allocated anew in each step, between small activations, leave holes that nothing fits into:
glibc asks for more than an aligned block needs (`_int_memalign`), so a block does not find back to a hole of its own size.
With two processors and 12 blocks of a GPT these holes took up to 24 MiB of 290 (7 %), differing from run to run.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from raypar.comm.buffer_pool import ALIGNED, CPU
from raypar.torch_compat.storages import count_holders

_SMALL = 4
"""Gradients are kept, though activations could use their memory, if the activations are at most a fourth of them."""


class KeptGradientMemory:
    """The memory of one weight's gradient. Host memory only: on GPUs PyTorch's allocator finds freed blocks again."""

    def __init__(self) -> None:
        self._kept: Tensor | None = None
        """The gradient of the last step, from `keep` until `take`."""

    def keep(self, weight: Tensor) -> None:
        """Offer the memory of `weight.grad` [out, in], which is no longer needed, to the next `take`."""
        self._kept = weight.grad if weight.device == CPU else None

    def take(self, gradient: Tensor, x: Tensor) -> Tensor | None:
        """The kept memory [out, in] for gradient^T x, from `gradient` [rows, out] and `x` [rows, in]; None: use new memory.

        Gives it once a step. It gives no memory that is still referenced (by an optimizer, a hook, a reduction's buckets), nor
        memory that PyTorch's allocator has not allocated: another process or numpy may use it.
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
        return kept if count_holders(kept) == _sole() else None


def _is_all_of_a_block(tensor: Tensor) -> bool:
    """Whether a tensor fills its storage, and PyTorch's allocator has allocated that."""
    memory = tensor.untyped_storage()
    return memory.nbytes() == tensor.nbytes and memory.resizable()


def _sole() -> tuple[int, int, int, int]:
    """The result of `count_holders` for a tensor that only one variable of its caller refers to."""
    alone = torch.empty(1)
    return count_holders(alone) or (0, 0, 0, 0)


class LinearKeepingGradientMemory(Protocol):
    """A sharded linear layer that can keep its gradient's memory."""

    weight: Tensor

    def keep_gradient_memory(self) -> None:
        """Keep the memory of the last step's gradient, which is no longer needed, for the next gradient."""


class GradientReusePolicy:
    """Decides for a stage, in its first step, whether the memory of gradients is kept from step to step.

    It is kept if that costs nothing: some microbatch goes forward after another has gone backward, so that gradients and
    activations exist at the same time anyway. Where all microbatches go forward first, the memory of freed gradients could
    hold activations: then gradients are kept only if the activations are small.
    """

    def __init__(self, linears: Sequence[LinearKeepingGradientMemory]) -> None:
        self._linears = linears
        self._worth: bool | None = None if linears else False
        """Whether gradients are kept; None: not decided yet."""
        self._before: int | None = None
        """Bytes allocated before the first forward pass."""
        self._activations: int | None = None
        """Bytes of the activations of all microbatches, measured before the first backward pass."""
        self._back = False
        """Whether a microbatch of this step has gone backward."""

    def begin_step(self) -> None:
        """Call before the gradients of the last step are freed."""
        if self._worth is None and self._activations is not None:
            gradients = sum(linear.weight.nbytes for linear in self._linears if linear.weight.requires_grad)
            self._worth = _SMALL * self._activations <= gradients
        if self._worth:
            for linear in self._linears:
                linear.keep_gradient_memory()
        self._back = False

    def before_forward(self) -> None:
        """Call before a microbatch goes forward."""
        if self._worth is not None:
            return
        if self._back:
            self._worth = True
        elif self._before is None:
            self._before = _allocated()

    def before_backward(self) -> None:
        """Call before a microbatch goes backward."""
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
