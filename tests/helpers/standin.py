"""The stand-in `libnccl.so.2` (tests/standin/nccl.c): built when it is first needed, loaded before CuPy looks for the real one.

Raypar has no way to it: whoever wants it calls `load` in the process, before the first use of `raypar.comm.nccl.bindings`.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from enum import IntEnum
from pathlib import Path
from typing import Any

import torch

from raypar.comm.nccl.device import MAX_COMMUNICATORS
from raypar.comm.transport import COLLECTIVES, CommunicatorKey

SOURCE = Path(__file__).parents[1] / "standin" / "nccl.c"
BUILD_S = 120
COMPILERS = ("cc", "gcc", "clang")

SUPPORTED = sys.platform == "linux" and platform.machine() == "x86_64"
"""Where the `test` extra has a wheel of CuPy."""


def needs_cupy(*values: object) -> Any:
    """A parameter of tests that use the stand-in: left out where there is no wheel of CuPy; elsewhere CuPy must be there."""
    import pytest

    return pytest.param(*values, marks=pytest.mark.skipif(not SUPPORTED, reason="CuPy has a wheel for Linux x86-64 only"))


class Setting(IntEnum):
    """What `set_to` changes, in this process: faults on request, and the version that is told."""

    INIT_HANGS = 0
    LAUNCHES_UNTIL_ERROR = 1
    OPERATIONS_UNTIL_ERROR = 2
    DELAY_US = 3
    ABORT_TAKES_MS = 4
    VERSION = 5
    LAUNCH_TAKES_MS = 6
    STATUS = 7
    INIT_STATUS = 8
    CALLS_UNTIL_ERROR = 9
    SILENT_LOSSES = 10
    SENDS_ARE_BUFFERED = 11


class Status(IntEnum):
    """What NCCL's calls return (nccl.h, ncclResult_t)."""

    SYSTEM_ERROR = 2
    REMOTE_ERROR = 6
    IN_PROGRESS = 7


class Count(IntEnum):
    """What `count` knows of this process."""

    LAUNCHED = 0
    NATIVE = 1
    ALIVE = 2


def compiler() -> str:
    """Raises `RuntimeError` with what to install."""
    for name in COMPILERS:
        if shutil.which(name):
            return name
    raise RuntimeError(
        "the tests of the nccl transport compile a stand-in for libnccl and find no C compiler "
        f"({', '.join(COMPILERS)}): apt-get install gcc libc6-dev, or dnf install gcc"
    )


def build() -> Path:
    """The library, compiled at most once for each text of the source, in the clone's `build/`."""
    name = compiler()
    digest = hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:16]
    folder = SOURCE.parents[2] / "build" / f"standin-{digest}"
    built = folder / "libnccl.so.2"
    if built.exists():
        return built
    folder.mkdir(parents=True, exist_ok=True)
    own = folder / f"{os.getpid()}.so"
    flags = ["-O2", "-shared", "-fPIC", "-fwrapv", "-pthread", "-Wl,-soname,libnccl.so.2"]
    command = [name, *flags, str(SOURCE), "-o", str(own)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=BUILD_S, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr}")
    with contextlib.suppress(FileExistsError):  # another test process was faster; the file that it has loaded must stay
        built.hardlink_to(own)
    own.unlink()
    return built


@functools.cache
def load() -> ctypes.CDLL:
    """Make this process's CuPy find the stand-in. Raises `RuntimeError` with what to install."""
    sweep()
    atexit.register(sweep)
    library = ctypes.CDLL(str(build()), ctypes.RTLD_GLOBAL)
    for name, rest in (
        ("standin_device", [ctypes.c_long]),
        ("standin_logged", [ctypes.c_void_p]),
        ("standin_log_communicator", [ctypes.c_void_p, ctypes.c_long]),
        ("standin_log_kind", [ctypes.c_void_p, ctypes.c_long]),
        ("standin_communicator", [ctypes.c_void_p]),
        ("standin_stream", [ctypes.c_void_p]),
        ("standin_set", [ctypes.c_int, ctypes.c_long]),
        ("standin_count", [ctypes.c_int]),
        ("standin_stream_call", [ctypes.c_void_p, CALL, ctypes.c_void_p]),
        ("standin_stream_enqueued", [ctypes.c_void_p]),
        ("standin_stream_completed", [ctypes.c_void_p]),
        ("standin_stream_end", [ctypes.c_void_p]),
    ):
        function = getattr(library, name)
        function.argtypes = rest
        function.restype = ctypes.c_void_p if name in ("standin_device", "standin_stream") else ctypes.c_long
    from raypar.comm.nccl import bindings

    try:
        found = bindings.find_nccl_installation()
    except Exception as error:
        raise RuntimeError(f"the tests of the nccl transport need CuPy: pip install -e '.[test]' ({error})") from error
    library.standin_set(Setting.VERSION, 29901)
    if bindings.find_nccl_installation().nccl_version != 29901:
        raise RuntimeError(f"CuPy uses another libnccl than the stand-in: {found}")
    library.standin_set(Setting.VERSION, found.nccl_version)
    return library


def sweep() -> None:
    """Remove the memory of communicators that were never whole, of processes that are gone and of this one."""
    for path in Path("/dev/shm").glob("nccl-standin-*-*"):
        maker = int(path.name.split("-")[2])
        if maker == os.getpid() or not Path(f"/proc/{maker}").exists():
            path.unlink(missing_ok=True)


CALL = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


@contextlib.contextmanager
def set_to(setting: Setting, value: int, after: int = 0) -> Iterator[None]:
    """`setting` is `value` inside, `after` later."""
    load().standin_set(setting, value)
    try:
        yield
    finally:
        load().standin_set(setting, after)


def communicator_number(communicator: Any) -> int:
    """What names a `bindings.NcclCommunicator` on all its ranks, and no other one."""
    return int(load().standin_communicator(communicator._comm.comm))


def count(what: Count) -> int:
    """See `Count`."""
    return int(load().standin_count(what))


# -- host memory as a device


class HostEvent:
    """See `StreamEvent`: so many tasks of a stream. None as the stream: the calling thread, which is always done."""

    def __init__(self, stream: HostStream | None) -> None:
        self.stream = stream
        self._enqueued = 0 if stream is None else stream.enqueued

    def query(self) -> bool:
        """See `StreamEvent.query`."""
        return self.stream is None or self.stream.completed >= self._enqueued

    def make_stream_wait(self, check: Callable[[], object]) -> None:
        """See `StreamEvent.make_stream_wait`: the host computes by itself, so it waits."""
        while not self.query():
            check()
            os.sched_yield()


class HostStream:
    """A thread of the stand-in; `run` calls back into Python from there."""

    def __init__(self, device: int | None = None) -> None:
        self._library = load()
        self._stream = self._library.standin_stream(device)
        self._calls: dict[int, Callable[[], object]] = {}
        self._number = 0
        self._callback = CALL(self._called)
        self._ended = 0
        self.closed = False
        self.cuda_stream = int(self._stream)
        self.errors: list[Exception] = []

    def _called(self, number: int | None) -> None:
        try:
            with torch.no_grad():
                self._calls.pop(number or 0)()
        except Exception as error:
            self.errors.append(error)

    @property
    def enqueued(self) -> int:
        """Tasks given to it."""
        return self._ended or int(self._library.standin_stream_enqueued(self._stream))

    @property
    def completed(self) -> int:
        """Tasks done."""
        return self._ended or int(self._library.standin_stream_completed(self._stream))

    def wait_event(self, event: Any) -> None:
        """See `Stream.wait_event`."""
        if event.stream is not None and event.stream is not self:
            self.run(lambda: event.make_stream_wait(lambda: None))

    def run(self, work: Callable[[], object]) -> None:
        """See `Stream.run`."""
        self._number += 1
        self._calls[self._number] = work
        self._library.standin_stream_call(self._stream, self._callback, self._number)

    def record_event(self) -> HostEvent:
        """See `Stream.record_event`."""
        return HostEvent(self)

    def close(self) -> None:
        """See `Stream.close`."""
        self.closed = True
        done = self.enqueued
        self._library.standin_stream_end(self._stream)
        self._ended = done
        assert not self.errors, self.errors


class HostDevice:
    """Host memory, as a device of its own for each rank. With `only`, tensors of other dtypes count as the host's.

    `channels`: how many operations of NCCL it does at once; by default as many as it says to have room for communicators.
    """

    def __init__(
        self,
        identity: str,
        max_communicators: int = MAX_COMMUNICATORS,
        only: frozenset[torch.dtype] | None = None,
        channels: int | None = None,
    ) -> None:
        self.name = "cpu"
        self.device = torch.device("cpu")
        self.only = only
        self.identity = identity
        self.allocating = threading.Lock()
        """Held by who allocates or frees, as the lock of PyTorch's allocator."""
        self._streams: list[HostStream] = []
        self.max_communicators = max_communicators
        self._channels = max_communicators if channels is None else channels

    def bind(self) -> None:
        """See `Device.bind`."""

    def owns(self, tensor: torch.Tensor) -> bool:
        """See `Device.owns`."""
        return tensor.device.type == "cpu" and (self.only is None or tensor.dtype in self.only)

    def stream(self) -> HostStream:
        """See `Device.stream`."""
        self._streams.append(HostStream(self._made))
        return self._streams[-1]

    def free_cached(self) -> None:
        """As PyTorch where memory is short: `cudaFree` waits for all that the device was given; the allocator is locked."""
        with self.allocating:
            for event in [stream.record_event() for stream in self._streams if not stream.closed]:
                event.make_stream_wait(lambda: None)

    @functools.cached_property
    def _made(self) -> int:
        return int(load().standin_device(self._channels))

    def launches(self) -> list[int]:
        """The communicators (`communicator_number`) of all operations that were enqueued so far, in that order."""
        library = load()
        return [library.standin_log_communicator(self._made, i) for i in range(library.standin_logged(self._made))]

    def record_event(self) -> HostEvent:
        """See `Device.record_event`."""
        return HostEvent(None)

    def empty(self, shape: Sequence[int], dtype: torch.dtype, stream: Any) -> torch.Tensor:
        """See `Device.empty`."""
        with self.allocating:
            return torch.empty(tuple(shape), dtype=dtype)

    def record_stream(self, tensor: torch.Tensor) -> None:
        """See `Device.record_stream`."""


def all_communicators(size: int) -> list[CommunicatorKey]:
    """Everything that the cases of the conformance suite do together."""
    everybody = tuple(range(size))
    groups = {everybody, (0, size - 1), everybody[1:]}
    keys = [CommunicatorKey((a, b), "message") for a in everybody for b in everybody if a != b]
    keys += [
        CommunicatorKey(group, name)
        for group in groups
        for name in COLLECTIVES
        if len(group) > 1 and (name != "halving_all_reduce" or len(group).bit_count() == 1)
    ]
    keys += [CommunicatorKey(everybody, "all_reduce", channel) for channel in (1, 2)]
    return keys
