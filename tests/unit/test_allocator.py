"""What glibc is told of a worker's memory, and which errors say that there is none."""

import errno
import gc
import subprocess
import sys

import pytest

from raypar.actors.worker_actor import WorkerActor, is_out_of_memory
from raypar.errors import CommError, OutOfMemory
from raypar.worker.process.allocator_and_garbage_collector import garbage_collector_paused

BODY = """
import psutil
from raypar.worker.process.allocator_and_garbage_collector import keep_freed_memory, return_unused_memory

assert keep_freed_memory()
blocks, between = [], []
for _ in range(64):
    blocks.append(bytes(1 << 20) + b"1")  # written: its pages are there
    between.append(bytes(2000))
sizes = []
for step in (lambda: None, blocks.clear, return_unused_memory):
    step()
    sizes.append(psutil.Process().memory_info().rss >> 20)
print(*sizes)
"""


def test_freed_memory_is_kept_until_it_is_given_back():
    """As after building: holes between what stays."""
    done = subprocess.run([sys.executable, "-c", BODY], capture_output=True, text=True, timeout=60, check=True)
    full, freed, returned = map(int, done.stdout.split())
    assert full - freed <= 4 and freed - returned >= 60


LARGE = """
import ctypes
import psutil
from raypar.worker.process.allocator_and_garbage_collector import keep_freed_memory, large_blocks_returned

libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
sizes = []
for large_blocks in (False, True):
    keep_freed_memory(large_blocks=large_blocks)
    with large_blocks_returned():
        pass
    for nbytes in (2 << 20, 64 << 10):
        blocks = [libc.malloc(nbytes) for _ in range((64 << 20) // nbytes)]
        between = []
        for block in blocks:
            ctypes.memset(block, 1, nbytes)
            between.append(libc.malloc(2000))
        full = psutil.Process().memory_info().rss
        for block in blocks:
            libc.free(block)
        sizes.append((full - psutil.Process().memory_info().rss) >> 20)
print(*sizes)
"""


def test_large_blocks_are_returned_at_once_where_they_are_not_to_be_kept_and_small_ones_are_kept():
    done = subprocess.run([sys.executable, "-c", LARGE], capture_output=True, text=True, timeout=60, check=True)
    returned, *kept = map(int, done.stdout.split())
    assert returned >= 60 and max(kept) <= 4


CIRCLE = """
import gc
import weakref
from raypar.worker.process.allocator_and_garbage_collector import collect_what_came_since_freeze, freeze_existing_objects


class Step:
    pass


def circle():
    made = Step()
    made.self = made
    return weakref.ref(made)


gc.disable()
found = []
for freezes in (False, True):
    if freezes:
        freeze_existing_objects(collect=True)
    left = circle()
    collect_what_came_since_freeze()
    found.append(left() is None)
print(*found)
"""


def test_circles_that_came_since_the_last_freeze_are_freed_and_without_one_nothing_is_looked_through():
    done = subprocess.run([sys.executable, "-c", CIRCLE], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == ["False", "True"]


FAULTS = """
import resource
from contextlib import nullcontext
from raypar.worker.process.allocator_and_garbage_collector import freed_memory_kept


def faults_of(blocks):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(blocks):
        bytes(40 << 20) + b"1"
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


found = []
for keeps in (nullcontext, freed_memory_kept, nullcontext):
    with keeps():
        faults_of(1)
        found.append(faults_of(8))
print(*found)
"""


def test_a_process_takes_its_page_faults_once_while_memory_is_kept_and_as_before_afterwards():
    done = subprocess.run([sys.executable, "-c", FAULTS], capture_output=True, text=True, timeout=60, check=True)
    before, kept, after = map(int, done.stdout.split())
    assert 10 * kept < before and 10 * kept < after


@pytest.mark.parametrize("collects", [True, False])
def test_a_paused_collector_goes_on_as_before_also_after_an_error(collects):
    was = gc.isenabled()
    (gc.enable if collects else gc.disable)()
    try:
        with pytest.raises(ImportError), garbage_collector_paused():
            assert not gc.isenabled()
            raise ImportError
        assert gc.isenabled() == collects
    finally:
        (gc.enable if was else gc.disable)()


class SaysThatItIsEqual(ValueError):
    """As every exception that is a dataclass without fields."""

    def __eq__(self, other):
        return True


def test_the_cause_of_an_error_that_is_equal_to_it_is_looked_at_too():
    error = SaysThatItIsEqual()
    error.__cause__ = MemoryError()
    assert is_out_of_memory(error)


def test_errors_that_are_each_others_cause_are_looked_through_once():
    first, second = ValueError("first"), RuntimeError("second")
    first.__cause__, second.__cause__ = second, first
    assert not is_out_of_memory(first)
    second.args = ("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes",)
    assert is_out_of_memory(first)


def test_a_message_that_found_no_memory_is_no_broken_connection():
    """As one it would be left to the next generation, again and again, whose workers would need as much."""
    worker = object.__new__(WorkerActor)
    worker.coordinate = "worker 3 (replica 1)"
    error = CommError("receive: lost rank 1: it sent 8 bytes for which there is no memory here", cure="abort this group")
    assert worker._classify_failure("training", error).kind == "aborted"
    error.__cause__ = RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes")
    failure = worker._classify_failure("training", error)
    assert failure.kind == "user" and isinstance(failure.error, OutOfMemory)
    assert failure.error.what.startswith("worker 3 (replica 1), training: out of memory: receive: lost rank 1: it sent 8 bytes")


def test_what_the_system_says_of_memory_is_understood_too():
    assert is_out_of_memory(OSError(errno.ENOMEM, "Cannot allocate memory"))
    assert not is_out_of_memory(OSError(errno.ENOSPC, "No space left on device"))
