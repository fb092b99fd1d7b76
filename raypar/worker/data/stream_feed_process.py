"""The data process of a node that reads an undivided stream for the node's workers; it ends with the last of them.

Workers of a node find it by the name of a Unix socket, which the first process that takes it has. A connection is what tells it
that a worker lives: the kernel closes it when the worker ends, however that ends.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import pickle
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, NamedTuple

from raypar.data.shared_rows import SILENT_S, RowsLostError
from raypar.errors import DataError, RayparError, UserCodeError
from raypar.user_code.user_code_errors import error_text
from raypar.worker.data.stream_feed_messages import FedSamples, SampleRequest

if TYPE_CHECKING:  # torch is loaded once a worker asks: whoever only looks whether the process is there does not wait for it
    from raypar.worker.data.stream_feed import StreamFeed

START_S = 60.0
"""A data process answers within this time after its start, and ends if no worker has come meanwhile."""
POLL_S = 0.05
"""How often a worker tries to connect to a data process that starts."""
MOST_LOSSES = 5
"""After so many data processes that died before they came further no other is started."""
SWITCH_S = 0.0005
"""A worker is answered so soon while the data set computes in Python."""
_SIZE = struct.Struct("<Q")

_START = """
import os, sys
if os.fork():
    os._exit(0)
os.setsid()
starter = int(sys.argv[1])
sys.path[:] = sys.argv[2:]
from raypar.worker.data.stream_feed_process import main
main(starter)
"""
"""The program of the process. It is no child of the worker that starts it, and outlives that one while others read."""


class StreamFeedJob(NamedTuple):
    """What the data process is told."""

    job: bytes
    """The `Job`, pickled."""
    key: bytes
    """The name of its socket; see `socket_name`."""
    filesystems: Mapping[str, bytes]
    """Id -> pickle of file systems that the job was given as objects."""


def socket_name(secret: bytes, node: str) -> bytes:
    """The name of the socket of a run's data process on a node, without a file."""
    return b"\0raypar-" + hashlib.blake2b(node.encode(), key=secret[:64], digest_size=16).hexdigest().encode()


class StreamFeedProcess:
    """The node's data process, as one of its workers uses it. It is started by whoever needs it first."""

    def __init__(self, job: StreamFeedJob, label: str) -> None:
        self._job, self._label = job, label
        self._connection: socket.socket | None = None
        self._peer, self._losses, self._furthest, self._started_s = 0, 0, -1, float("-inf")
        self._until_connected = contextlib.ExitStack()
        """Closes the pipes whose end tells processes that are started from here, and not connected yet, that we have ended."""

    def begin(self) -> None:
        """Start the process if there is none, without waiting for it."""
        if self._connection is None and not self._connect():
            self._start()

    def read(self, request: SampleRequest) -> FedSamples | None:
        """See `StreamFeed.read`. Raises `RowsLostError` if the process is gone, `DataError` after several, or if silent."""
        try:
            connection = self._connection or self._wait_for_process()
            _send(connection, request)
            answer = _receive(connection)
        except TimeoutError as error:
            self.close()
            raise DataError(
                f"{self.who} has not answered for {SILENT_S:.0f} s; sample {request.position:,} of the stream is waited for",
                cure=f"look at what process {self._peer} does (py-spy dump --pid {self._peer}); data.processes: 0 reads in the "
                "workers",
            ) from error
        except (OSError, EOFError) as error:
            raise self._lost(error) from error
        if isinstance(answer, RayparError):
            raise answer
        assert answer is None or isinstance(answer, FedSamples)
        if answer is not None and answer.contents and request.position > self._furthest:
            self._losses, self._furthest = 0, request.position
        return answer

    @property
    def who(self) -> str:
        """The process in words."""
        number = f" (process {self._peer})" if self._peer else ""
        return f"the data process of this node{number} that reads {self._label}"

    def close(self) -> None:
        """Read no more. Idempotent."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()
        self._until_connected.close()

    def _lost(self, error: Exception) -> DataError:
        self.close()
        self._losses += 1
        if self._losses > MOST_LOSSES:
            return DataError(
                f"{self.who} is gone, as {MOST_LOSSES} before it, and none has come further: {error_text(error)}",
                cure="it may have run out of memory, or the data set crashed: its output is in this worker's log; "
                "data.processes: 0 reads in the workers",
            )
        return RowsLostError(f"{self.who} is gone", cure="none is needed: another one reads the stream again")

    def _wait_for_process(self) -> socket.socket:
        """A connection to the process, which is started if need be. Raises `DataError` if none is there in time."""
        until_s = time.monotonic() + START_S
        while not self._connect():
            if time.monotonic() > until_s:
                raise DataError(
                    f"{self.who} has not started within {START_S:.0f} s",
                    cure="look at this worker's log, and whether its node has memory for another process",
                )
            if time.monotonic() - self._started_s > START_S / 3:
                self._start()
            time.sleep(POLL_S)
        assert self._connection is not None
        return self._connection

    def _connect(self) -> bool:
        made = socket.socket(socket.AF_UNIX)
        made.settimeout(SILENT_S)
        try:
            made.connect(self._job.key)
            self._peer = _peer_of(made)
        except OSError:
            made.close()
            return False
        self._connection = made
        self._until_connected.close()
        return True

    def _start(self) -> None:
        self._started_s = time.monotonic()
        reads, writes = os.pipe()
        self._until_connected.callback(os.close, writes)
        with open(os.memfd_create("raypar-stream"), "w+b") as told, open(reads, "rb"):
            told.write(pickle.dumps(self._job))
            told.seek(0)
            begun = subprocess.Popen([sys.executable, "-c", _START, str(reads), *sys.path], stdin=told, pass_fds=[reads])
        begun.wait(START_S)  # its first process, which ends at once


def _peer_of(connection: socket.socket) -> int:
    """The id of the process at the other end. Raises `PermissionError` for another user's."""
    size = struct.calcsize("3i")
    process, user, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    if user != os.geteuid():
        raise PermissionError(f"user {user} is at the other end")
    return int(process)


def _send(connection: socket.socket, value: object) -> None:
    content = pickle.dumps(value, protocol=5)
    connection.sendall(_SIZE.pack(len(content)) + content)


def _receive(connection: socket.socket) -> object:
    """What the other end has sent. Raises `EOFError` if it has ended, `TimeoutError`, `OSError`."""
    (size,) = _SIZE.unpack(_receive_bytes(connection, _SIZE.size))
    return pickle.loads(_receive_bytes(connection, size))


def _receive_bytes(connection: socket.socket, size: int) -> bytearray:
    content = bytearray(size)
    left = memoryview(content)
    while left:
        count = connection.recv_into(left)
        if not count:
            raise EOFError("the connection was closed")
        left = left[count:]
    return content


# -- in the data process -----------------------------------------------------------------------------------------------------


def main(starter: int) -> None:
    """Serve the workers of this node until none is left. `starter`: of the pipe that ends with the worker that started this."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole terminal; the workers decide
    with open(0, "rb") as told:
        job: StreamFeedJob = pickle.load(told)
    listener = socket.socket(socket.AF_UNIX)
    try:
        listener.bind(job.key)
    except OSError:
        return  # another worker's is there
    listener.listen(1024)
    listener.setblocking(False)
    sys.setswitchinterval(SWITCH_S)
    serve(listener, _Feed(job), starter)
    os._exit(0)  # not when the data set's threads have ended


def serve(listener: socket.socket, feed: Callable[[], StreamFeed], starter: int | None = None) -> None:
    """Answer workers in threads until the last connection is closed, or `starter` or `START_S` has ended without any. `feed`
    may raise."""
    workers = set[int]()
    until_s = time.monotonic() + START_S
    ready = select.poll()  # unlike `selectors`, it tells of a closed connection while its thread makes the data set
    ready.register(listener, select.POLLIN)
    if starter is not None:
        ready.register(starter, select.POLLHUP)
    with listener:
        while workers or time.monotonic() < until_s:
            # The listener last: what it accepts may have the number of a connection that has just been closed.
            for number, _ in sorted(ready.poll(1000), key=lambda found: found[0] == listener.fileno()):
                if number == listener.fileno():
                    connection, _ = listener.accept()
                    connection.setblocking(True)
                    workers.add(connection.fileno())
                    ready.register(connection, select.POLLRDHUP)
                    threading.Thread(target=_answer, args=(connection, feed), daemon=True).start()
                    until_s = 0.0
                else:
                    ready.unregister(number)
                    workers.discard(number)
                    until_s = 0.0


class _Feed:
    """The feed, made by the thread that asks first."""

    def __init__(self, job: StreamFeedJob) -> None:
        self._job, self._lock = job, threading.Lock()
        self._feed: StreamFeed | RayparError | None = None

    def __call__(self) -> StreamFeed:
        with self._lock:
            if self._feed is None:
                self._feed = _make_feed(self._job)
        if isinstance(self._feed, RayparError):
            raise self._feed
        return self._feed


def _make_feed(told: StreamFeedJob) -> StreamFeed | RayparError:
    import torch

    from raypar.storage.filesystems import register_pickled_filesystems
    from raypar.worker.data.stream_feed import StreamFeed
    from raypar.worker.process.torch_state_guard import DEFAULT_TORCH_STATE, TorchStateGuard

    register_pickled_filesystems(told.filesystems)
    guard = TorchStateGuard(threads=1, base=DEFAULT_TORCH_STATE)
    try:
        with guard.watching("a module that the job names"):
            job = pickle.loads(told.job)
    except RayparError as error:
        return error
    except BaseException as error:  # of users' modules
        return UserCodeError(
            f"the job cannot be loaded in the data process: {error_text(error)}", cure="leave data.processes out"
        )
    torch.set_num_threads(job.threads)
    return StreamFeed(job.training_data, job.seed, job.batch_size, TorchStateGuard(job.threads, DEFAULT_TORCH_STATE))


def _answer(connection: socket.socket, feed: Callable[[], StreamFeed]) -> None:
    """Answer one worker until it closes its connection."""
    with contextlib.suppress(OSError, EOFError), connection:
        _peer_of(connection)
        while True:
            request = _receive(connection)
            assert isinstance(request, SampleRequest)
            try:
                answer: FedSamples | RayparError | None = feed().read(request)
            except RayparError as error:
                answer = error
            except Exception as error:  # ours: the worker shall say so, rather than wait
                answer = DataError(f"the data process has failed: {error_text(error)}", cure="report this")
            _send(connection, answer)
