"""The data processes of a worker for one data set: they outlive plans, with what they are reading, and end with the worker."""

from __future__ import annotations

import multiprocessing
import pickle
from collections.abc import Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool

from raypar.errors import ConfigError, RayparError, UserCodeError
from raypar.job import DataConfig
from raypar.user_code.user_code_errors import error_text
from raypar.worker.data.end_with_parent import EndWithParent, call_in_child
from raypar.worker.data.inside_data_process import Answer, read_in_data_process, start_data_process
from raypar.worker.data.sample_order import SamplePosition

Read = tuple[int, int, tuple[str, ...]]
"""(step, microbatch, fields) of a microbatch that is read: it is the same under every plan."""


class DataProcesses:
    """`spec.processes` data processes, which begin with the first microbatch that is asked for.

    `spec`: the data set; `seed`: the job's.
    """

    _spec: DataConfig
    """The data set and how it is collated."""
    _seed: int
    """The job's seed."""
    _pool: ProcessPoolExecutor | None
    """The processes; None before the first is needed, and after `close`."""
    _pending: dict[Read, Future[Answer]]
    """Microbatch -> the read under way, or its outcome that nobody has taken."""

    def __init__(self, spec: DataConfig, seed: int) -> None:
        self._spec, self._seed, self._pool, self._pending = spec, seed, None, {}

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
        """End the processes; what is still being read is dropped. Idempotent."""
        self._pending.clear()
        pool, self._pool = self._pool, None
        if pool is not None:
            processes = list((getattr(pool, "_processes", None) or {}).values())
            pool.shutdown(wait=False, cancel_futures=True)
            # A sample that takes for ever must not keep us: the processes hold nothing that could be lost.
            for process in processes:
                process.terminate()

    def _submit(self, read: Read, places: Sequence[SamplePosition], batch_names: tuple[str, ...]) -> Future[Answer]:
        if self._pool is None:
            self._pool = ProcessPoolExecutor(
                self._spec.processes,
                multiprocessing.get_context("spawn"),
                initializer=call_in_child,
                initargs=(EndWithParent(), start_data_process, self._spec, self._seed),
            )
        step, microbatch, fields = read
        try:
            return self._pool.submit(read_in_data_process, list(places), (step, microbatch), fields, batch_names)
        except BrokenProcessPool as error:
            raise self.died(error) from error
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
