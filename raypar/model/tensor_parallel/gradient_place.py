"""Where a weight's gradient lies: in the same place in every step, as long as nobody else looks at what was there.

Freed and allocated anew in each step, large gradients between small activations leave holes that nothing fits in: glibc asks
for more than an aligned block needs (`_int_memalign`), so it does not find back to a hole of the block's own size. With two
processors and 12 blocks of a GPT this made up to 24 MiB of 290 (7 %), from run to run; kept, the gradients take what they are.
"""

from __future__ import annotations

import sys

import torch
from torch import Tensor

from raypar.comm.memory import CPU

_storage_users = getattr(torch._C, "_storage_Use_Count", None)
"""How many tensors and Python objects hold a storage; not a public function (CUDA graph trees use it)."""


class Place:
    """Of one weight. Only in host memory: PyTorch's allocator on GPUs finds freed blocks again."""

    def __init__(self) -> None:
        self._kept: Tensor | None = None

    def keep(self, weight: Tensor) -> None:
        """Nobody needs `weight.grad` [out, in] any more."""
        self._kept = weight.grad if weight.device == CPU else None

    def take(self, gradient: Tensor, x: Tensor) -> Tensor | None:
        """Memory for grad^T x of grad [rows, out] and x [rows, in], once a step; None: allocate it.

        What somebody still holds (an optimizer its last gradient, a hook, a reduction its buckets) is left to them.
        """
        kept, self._kept = self._kept, None
        if kept is None or kept.dtype != gradient.dtype or kept.dtype != x.dtype or not kept.is_contiguous():
            return None
        return kept if _holders(kept) == _SOLE else None


def _holders(tensor: Tensor) -> tuple[int, int, int, int] | None:
    """Holders of the tensor and of its memory, of each the Python object and what is behind it; None if they cannot be told."""
    if _storage_users is None:
        return None
    memory = tensor.untyped_storage()
    return sys.getrefcount(tensor), tensor._use_count(), sys.getrefcount(memory), _storage_users(memory._cdata)


def _of_one() -> tuple[int, int, int, int]:
    alone = torch.empty(1)
    return _holders(alone) or (0, 0, 0, 0)


_SOLE = _of_one()
