"""Memory of a worker process: large pages, what one microbatch frees kept for the next, what stays not looked at again."""

from __future__ import annotations

import ctypes
import gc
import os
import sys

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_LARGE = (1 << 31) - 1


def tune_memory() -> bool:
    """Call it before torch is imported: large tensors in large pages, and freed memory is not returned to the system.

    By default glibc maps large blocks afresh and trims the heap, so that every step takes its page faults again: hundreds to
    thousands a step, 5 to 10 % of the processor time of a small GPT (measured: 1,550 -> 100 faults a step). Pages of 2 MB for
    tensors from 2 MB on, PyTorch's `THP_MEM_ALLOC_ENABLE`, which it reads once, save 1 % more where walking the page table is
    dear, as in virtual machines. False where the first is not possible (another C library).
    """
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return bool(mallopt and mallopt(_M_MMAP_THRESHOLD, _LARGE >> 1) and mallopt(_M_TRIM_THRESHOLD, _LARGE))


def freeze_what_stays() -> None:
    """Call it when the stages are built: Python's collector leaves modules, torch and ray alone in its passes from now on.

    A pass over everything takes milliseconds and comes in the middle of some step. What an earlier plan left is collected.
    """
    gc.unfreeze()
    gc.collect()
    gc.freeze()
