"""How a worker's process sets glibc's allocator and Python's garbage collector, so that steps are not interrupted by them."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import sys
from collections.abc import Iterator

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3
_HEAP = 64 << 20
"""Size of the heaps in which threads other than the first one allocate (HEAP_MAX_SIZE of 64-bit machines)."""
_LARGE = (1 << 31) - 1
_LARGE_BLOCK = 1 << 20
"""Blocks that are not kept where memory shall hold what is in use: parameters of a layer, but not its small activations."""
_MAPPED = 128 << 10
"""What glibc maps afresh by default (DEFAULT_MMAP_THRESHOLD)."""
_LARGEST_OWN = 32 << 20
"""Blocks that glibc maps afresh, whatever has been freed before (DEFAULT_MMAP_THRESHOLD_MAX): it trims twice as much."""


def keep_freed_memory(*, large_blocks: bool = True) -> bool:
    """Tell glibc not to return freed activations to the system; False where that is not possible (another C library).

    `large_blocks`: those of 1 MiB and more, too. Where parameters come and go inside a step, heaps cannot reuse what they have
    freed of such blocks, which are aligned: counted, 320 MiB of 510 were free in heaps after one step of a worker of a GPT.

    By default glibc maps large blocks afresh and trims the heap, so that every step takes its page faults again: hundreds to
    thousands a step, 5 to 10 % of the processor time of a small GPT (measured: 1,550 -> 100 faults a step). Large pages on top
    (`glibc.malloc.hugetlb=1`) took the faults to 0 and made the same step 3 % longer; `THP_MEM_ALLOC_ENABLE` did nothing.
    """
    # Ray runs steps in a thread of a pool. Whatever the trim threshold, a thread's heap that becomes empty is unmapped (100 to
    # 2,400 faults a step), unless the heap before it has less room than the pad. In the first thread the pad only reserves
    # addresses.
    global _mapped_afresh
    mapped = _LARGE >> 1 if large_blocks else _LARGE_BLOCK
    keeps = _set_allocator(mapped, _LARGE, _HEAP)
    _mapped_afresh = mapped if keeps else _LARGEST_OWN
    return keeps


_mapped_afresh = _LARGEST_OWN
"""The size from which glibc maps blocks afresh outside of `large_blocks_returned`."""
_returning = 0
"""How many `large_blocks_returned` are entered, one inside the other."""


@contextlib.contextmanager
def large_blocks_returned() -> Iterator[None]:
    """Have glibc map blocks afresh inside that its heaps have no room for, so that they go back to the system when they are
    freed. A heap would keep them, and find no room in them for the next ones of the same size, which are aligned."""
    global _returning
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform.startswith("linux") else None
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _MAPPED)
    _returning += 1
    try:
        yield
    finally:
        _returning -= 1
        if mallopt is not None and not _returning:
            mallopt(_M_MMAP_THRESHOLD, _mapped_afresh)


@contextlib.contextmanager
def freed_memory_kept() -> Iterator[None]:
    """Keep freed memory as workers do (`keep_freed_memory`), in a process that goes on with something else.

    Afterwards glibc maps and trims the sizes to which it would have come by itself with such blocks, and what is free goes back
    to the system.
    """
    global _mapped_afresh
    kept = keep_freed_memory()
    try:
        yield
    finally:
        if kept:
            _set_allocator(_LARGEST_OWN, 2 * _LARGEST_OWN, 0)
            _mapped_afresh = _LARGEST_OWN
            return_unused_memory()


def _set_allocator(mapped: int, trimmed: int, pad: int) -> bool:
    """Set the size from which blocks are mapped afresh, that from which free heaps are trimmed, and by how much heaps grow."""
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    sizes = {_M_MMAP_THRESHOLD: mapped, _M_TRIM_THRESHOLD: trimmed, _M_TOP_PAD: pad}
    return mallopt is not None and all(mallopt(which, size) for which, size in sizes.items())


def return_unused_memory() -> None:
    """Return freed memory that glibc keeps to the system, once: the remains of building a stage, like a layer that was cut.

    Measured with a GPT of 14 blocks of 12 MiB on 2 shards: 10 to 22 MiB of 400, by chance, in 1 to 2 ms.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform.startswith("linux") else None
    if trim:
        trim(ctypes.c_size_t(0))


@contextlib.contextmanager
def garbage_collector_paused() -> Iterator[None]:
    """Keep Python's garbage collector from looking through all modules again and again while others are loaded.

    Loading makes 200,000 objects that stay, and next to no garbage: without this the collector takes 0.2 to 0.3 s of the 2 s
    of a processor in which a worker loads PyTorch and raypar.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def collect_what_came_since_freeze() -> None:
    """Free what only circles of references still hold, of the objects made since the last `freeze_existing_objects`.

    Circles of a step that has failed hold its tensors, and the next freeze would keep them for ever. Nothing where nothing is
    frozen: a pass over all modules takes too long.
    """
    if gc.get_freeze_count():
        gc.collect()


def freeze_existing_objects(*, collect: bool) -> None:
    """Exclude all objects that exist (torch, ray, modules, stages) from later passes of Python's garbage collector.

    A pass over everything would come in the middle of some step, and takes 0.25 s once torch is loaded. `collect`: make one
    such pass before; not while others wait for this worker.
    """
    if collect:
        gc.collect()
    gc.freeze()
