"""Reused memory for received tensors and scratch.

The C library returns large blocks to the system at every free, and the page faults of the next block cost more than a copy
(1 MB: 3 ms against 0.03 ms in a virtual machine of 2026). So a transport keeps the blocks that it has used once.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from math import prod
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

CPU = torch.device("cpu")

ALIGNED = 64
"""Bytes. Addresses of host memory that PyTorch allocates are multiples of this."""

ALIGNED_ON_CUDA = 256
"""Bytes. Addresses of memory of `cudaMalloc` are multiples of this (CUDA C++ Programming Guide, Device Memory Accesses)."""

SMALL_BLOCK_BYTES = 32 << 10
"""Tensors below this size are allocated as usual: the C library keeps such small blocks itself."""


def alignment_on(device: torch.device) -> int:
    """Bytes of which the address of a new tensor on the device is a multiple."""
    return ALIGNED_ON_CUDA if device.type == "cuda" else ALIGNED


def bytes_behind_alignment(tensor: Tensor) -> int:
    """How far the tensor begins behind an address at which new tensors of its device begin; 0: it lies as these."""
    return tensor.data_ptr() % (ALIGNED if tensor.is_cpu else alignment_on(tensor.device))  # `is_cpu` asks for no device


def aligned_contiguous(tensor: Tensor) -> Tensor:
    """The tensor itself if it is contiguous and begins where new tensors may; else a copy that is and does.

    MKL and cuBLAS choose kernels by the address: products of the same numbers at another one may differ in their last bits.
    """
    if not tensor.is_contiguous():
        return tensor.contiguous()
    return tensor.clone() if bytes_behind_alignment(tensor) else tensor


class BufferPool:
    """Gives tensors in 64-byte aligned memory, which is reused once neither the tensor nor a view of it exists any more.

    A block is a numpy array; a tensor made of it holds one reference, which ends with the tensor's storage. The size of a
    block is a power of two (pages that were never touched take no memory).
    """

    small_bytes: ClassVar[int] = SMALL_BLOCK_BYTES
    """Tensors below this size lie in no block."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._blocks: dict[int, list[np.ndarray]] = {}
        """Size in bytes -> blocks."""
        self.held_bytes = 0
        """Size of all blocks."""

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """An uninitialised contiguous tensor."""
        nbytes = prod(shape) * dtype.itemsize
        if nbytes < self.small_bytes:
            return torch.empty(shape, dtype=dtype)
        size = self._block_bytes(nbytes)
        with self._lock:
            blocks = self._blocks.setdefault(size, [])
            for block in blocks:
                if sys.getrefcount(block) <= 3:  # the list, `block`, and the argument
                    flat = torch.from_numpy(block)
                    break
            else:
                block = self._new_block(size)
                blocks.append(block)
                self.held_bytes += size
                flat = torch.from_numpy(block)
        # `.data`: autograd shall not take the tensor for a view of these bytes, which may not be written in place.
        return flat[:nbytes].view(dtype).view(tuple(shape)).data

    def _block_bytes(self, nbytes: int) -> int:
        """The size of a block for a tensor of so many bytes."""
        return 1 << (nbytes - 1).bit_length()

    def _new_block(self, size: int) -> np.ndarray:
        """A block of memory [size], aligned."""
        raw = np.empty(size + ALIGNED, dtype=np.uint8)
        start = -raw.ctypes.data % ALIGNED
        return raw[start : start + size]

    def clear(self) -> None:
        """Forget all blocks; tensors that are still held keep theirs."""
        with self._lock:
            self._blocks.clear()
            self.held_bytes = 0
