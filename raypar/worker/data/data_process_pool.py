"""The data processes of a worker for one data set: they outlive plans, with what they are reading, and end with the worker."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import pickle
import queue
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from raypar.errors import ConfigError, RayparError, UserCodeError
from raypar.job import DataConfig
from raypar.user_code.user_code_errors import error_text
from raypar.worker.data.end_with_parent import EndWithParent, call_in_child
from raypar.worker.data.inside_data_process import Answer, ReadRequest, serve_reads
from raypar.worker.data.sample_order import SamplePosition

Read = tuple[int, int, tuple[str, ...]]
"""(step, microbatch, fields) of a microbatch that is read: it is the same under every plan."""


JOIN_S = 5.0
"""A process whose pipe is closed has ended after this time."""
TERMINATE_S = 1.0
"""A data process that handles SIGTERM itself is killed after this time."""


class DataProcessDiedError(Exception):
    """A data process has ended."""


class _DataProcess:
    """A data process, as its worker uses it: one read at a time.

    Over a pipe, not by `ProcessPoolExecutor`: its queues have semaphores with names, which stay in /dev/shm where Ray ends a
    worker, as it ends the process of Python that would remove them, too.
    """

    def __init__(self, spec: DataConfig, seed: int) -> None:
        """Start it. Raises what pickle raises for what it cannot take along."""
        context = multiprocessing.get_context("spawn")
        self._connection, there = context.Pipe()
        with there:
            self.process = context.Process(target=call_in_child, args=(EndWithParent(), serve_reads, there, spec, seed))
            self.process.start()

    def read(self, request: ReadRequest) -> Answer:
        """The microbatch. Raises the error with which it could not be read, `DataProcessDiedError`."""
        try:
            self._connection.send(request)
            answer: Answer | BaseException = self._connection.recv()
        except (EOFError, OSError) as error:
            self.process.join(JOIN_S)
            raise DataProcessDiedError(f"process {self.process.pid} ended with exit code {self.process.exitcode}") from error
        if isinstance(answer, BaseException):
            raise answer
        return answer


class DataProcesses:
    """`spec.processes` data processes, which begin with the first microbatch that is asked for.

    `spec`: the data set; `seed`: the job's.
    """

    _spec: DataConfig
    """The data set and how it is collated."""
    _seed: int
    """The job's seed."""
    _threads: ThreadPoolExecutor | None
    """A thread for each process; None before the first is needed, and after `close`."""
    _processes: list[_DataProcess]
    """All of them."""
    _idle: queue.SimpleQueue[_DataProcess]
    """Those that read nothing."""
    _owner: int
    """Id of the process whose children they are."""
    _pending: dict[Read, Future[Answer]]
    """Microbatch -> the read under way, or its outcome that nobody has taken."""

    def __init__(self, spec: DataConfig, seed: int) -> None:
        self._spec, self._seed, self._threads, self._pending = spec, seed, None, {}
        self._processes, self._idle = [], queue.SimpleQueue()
        self._owner = os.getpid()

    def request(self, read: Read, places: Sequence[SamplePosition], batch_names: tuple[str, ...]) -> None:
        """Begin to read a microbatch, unless that is under way. Raises `ConfigError` or `UserCodeError`.

        `places`: (epoch, id) of its samples; `batch_names`: all fields of a collated batch, empty if not known.
        """
        if read not in self._pending:
            self._pending[read] = self._submit(read, places, batch_names)

    def take(self, read: Read, places: Sequence[SamplePosition], batch_names: tuple[str, ...]) -> Future[Answer]:
        """The read of a microbatch, which is begun if it is not under way. It is given once. Raises as `request` does."""
        self.request(read, places, batch_names)
        return self._pending.pop(read)

    def drop_before(self, step: int) -> None:
        """Drop what was read for earlier steps, and nobody has taken."""
        for read in [read for read in self._pending if read[0] < step]:
            self._pending.pop(read).cancel()

    def close(self) -> None:
        """End the processes; what is still being read is dropped. Idempotent. Does nothing in a process that users' code has
        forked from the worker's, where Python calls it at the end."""
        if os.getpid() != self._owner:
            return
        self._pending.clear()
        threads, self._threads = self._threads, None
        processes, self._processes, self._idle = self._processes, [], queue.SimpleQueue()
        # A sample that takes for ever must not keep us: the processes hold nothing that could be lost.
        for one in processes:
            one.process.terminate()
        until_s = time.monotonic() + TERMINATE_S
        for one in processes:
            one.process.join(max(0.0, until_s - time.monotonic()))
            one.process.kill()
        if threads is not None:
            threads.shutdown(wait=False, cancel_futures=True)
            atexit.unregister(self.close)

    def _submit(self, read: Read, places: Sequence[SamplePosition], batch_names: tuple[str, ...]) -> Future[Answer]:
        if self._threads is None:
            self._start()
        assert self._threads is not None
        step, microbatch, fields = read
        return self._threads.submit(self._read, self._idle, (list(places), (step, microbatch), fields, batch_names))

    @staticmethod
    def _read(idle: queue.SimpleQueue[_DataProcess], request: ReadRequest) -> Answer:
        one = idle.get()  # there are as many as threads
        try:
            return one.read(request)
        finally:
            idle.put(one)

    def _start(self) -> None:
        atexit.register(self.close)  # Python waits for processes that it has started when it ends
        self._threads = ThreadPoolExecutor(self._spec.processes, "data process")
        try:
            for _ in range(self._spec.processes):
                self._processes.append(_DataProcess(self._spec, self._seed))
                self._idle.put(self._processes[-1])
        except (pickle.PicklingError, AttributeError, TypeError) as error:  # what pickle raises for what it cannot take along
            self.close()
            raise ConfigError(
                f"data has processes: {self._spec.processes}, and they cannot be given {self._spec.label}"
                + (f" and collate {self._spec.collate.label}" if self._spec.collate is not None else "")
                + f": {error_text(error)}",
                cure="put functions and classes into a module that the processes can import, or set data.processes: 0",
            ) from error

    def died(self, error: Exception, where: str = "the samples") -> RayparError:
        """The error for a data process that has died while it read `where`."""
        target = self._spec.function
        if not isinstance(target, str) and getattr(target, "__module__", "") in {"__main__", None}:
            return ConfigError(
                f"data processes cannot import {self._spec.label}: it lives in the script that was started",
                cure="put it into a module of its own and name it module:name, or set data.processes: 0",
            )
        return UserCodeError(
            f"a data process died while it read {where}: {error}",
            cure="it may have run out of memory (lower data.processes), or the data set crashed: try data.processes: 0",
        )
