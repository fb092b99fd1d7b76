"""Reads the samples of a user's data set and makes microbatches of them by the numerics contract (raypar/NUMERICS.md, rule 1).

Samples are read either here, in the thread that asks (`processes: 0`: nothing else may touch torch's generator while layers
compute), or ahead of time in CPU processes of their own. Both give the same bits: a sample depends on (seed, epoch, id) only.
"""

from __future__ import annotations

import multiprocessing
import pickle
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from concurrent.futures.process import BrokenProcessPool
from typing import Protocol

from torch import Tensor

from raypar.errors import ConfigError, RayparError, UserCodeError
from raypar.job import DataConfig
from raypar.plan.microbatches import Microbatches
from raypar.user_code.user_code_errors import error_text
from raypar.worker.data.data_processes import Answer, read_in_data_process, start_data_process, unpack
from raypar.worker.data.sample_order import SampleOrder, SamplePosition
from raypar.worker.data.sample_reader import SampleReader
from raypar.worker.data.user_dataset import MapStyleDataset, dataset_size
from raypar.worker.process.torch_state_guard import TorchStateGuard

READ_TIMEOUT_S = 120.0
"""How long data processes may take over one microbatch, their own start included."""

AHEAD_BYTES = 32 << 20
"""Bytes of the next step that are read while this worker waits for the votes on this step."""


class BatchSource(Protocol):
    """The source of the batch fields that a stage reads: a `MicrobatchLoader`, or what wraps one."""

    def get(self, step: int, microbatch: int) -> Mapping[str, Tensor]:
        """The collated fields of one microbatch; blocks until they are read, with a deadline of its own."""


class MicrobatchLoader:
    """The microbatches of one data set, by (step, microbatch).

    `batching.batch_size` samples a step; `fields`: which to collate; `readers`: how many times a step's microbatch is asked for
    (stages of one worker that read batch fields), so that it is read once and let go after its last use. `guard`: gets lines
    about process state that samples leave changed, here or in the data processes. `batch_names`: the fields of every batch that
    `data.collate` makes; empty: not known.
    """

    _spec: DataConfig
    """The data set and its fields."""
    _order: SampleOrder
    """Which sample lies at which position of the stream."""
    _batching: Microbatches
    """Which samples of a step a microbatch has."""
    _seed: int
    """The job's seed."""
    _fields: tuple[str, ...]
    """The fields that are collated."""
    _batch_names: tuple[str, ...]
    """All fields of every batch that `data.collate` makes; empty: not known."""
    _readers: int
    """How many times each microbatch is asked for."""
    _timeout_s: float
    """How long the data processes may take over one microbatch."""
    _guard: TorchStateGuard | None
    """Gets the lines about process state that samples leave changed."""
    _reader: SampleReader
    """Reads samples in this process."""
    _pool: ProcessPoolExecutor | None
    """The data processes; None before the first is needed, and after `close`."""
    _pending: dict[tuple[int, int], Future[Answer]]
    """(step, microbatch) -> the read under way in the data processes."""
    _kept: dict[tuple[int, int], tuple[dict[str, Tensor], int]]
    """(step, microbatch) -> (fields that were read, how many times they will still be asked for)."""

    def __init__(
        self,
        dataset: MapStyleDataset,
        spec: DataConfig,
        order: SampleOrder,
        batching: Microbatches,
        *,
        seed: int,
        fields: Sequence[str],
        readers: int = 1,
        timeout_s: float = READ_TIMEOUT_S,
        guard: TorchStateGuard | None = None,
        batch_names: Sequence[str] = (),
    ) -> None:
        dataset_size(dataset, spec.label)
        self._spec, self._order, self._batching = spec, order, batching
        self._seed, self._fields, self._readers, self._timeout_s = seed, tuple(fields), readers, timeout_s
        self._guard = guard
        self._batch_names = tuple(batch_names)
        self._reader = SampleReader.of(dataset, spec, seed, self._fields, guard=guard, batch_names=batch_names)
        self._pool, self._pending, self._kept = None, {}, {}

    def sample_positions(self, step: int, microbatch: int) -> list[SamplePosition]:
        """(epoch, id) of the samples of a microbatch."""
        samples = self._batching.samples(microbatch)
        start = self._batching.samples_before(step)
        return self._order.ids(start + samples.start, start + samples.stop)

    def order_digest(self, step: int) -> int | None:
        """64 bits over the order of the epochs that a step reaches; None where the order is not the user's."""
        start = self._batching.samples_before(step)
        return self._order.digest(start, start + self._batching.batch_size)

    def prefetch(self, step: int, microbatches: Sequence[int]) -> None:
        """Start to read these microbatches in the data processes, if any; those being read already are left alone."""
        if not self._spec.processes:
            return
        for key in [key for key in self._pending if key[0] < step - 1]:
            self._pending.pop(key).cancel()
        for microbatch in microbatches:
            key = (step, microbatch)
            if key not in self._pending and key not in self._kept:
                self._pending[key] = self._submit(self.sample_positions(*key), key)

    def read_ahead(self, step: int, microbatches: Sequence[int]) -> None:
        """Read these microbatches now, up to about `AHEAD_BYTES`, while the step waits for others. `get` raises the errors."""
        room = 0 if self._spec.processes else AHEAD_BYTES
        for key in [(step, microbatch) for microbatch in microbatches if (step, microbatch) not in self._kept]:
            if room <= 0:
                return
            try:
                batch = self._reader.read(self.sample_positions(*key), key)
            except RayparError:
                return
            self._kept[key] = batch, self._readers
            room -= sum(tensor.nbytes for tensor in batch.values())

    def get(self, step: int, microbatch: int) -> dict[str, Tensor]:
        """One microbatch: field -> [samples, ...], fresh tensors. Raises `DataError` or `UserCodeError`, also after the
        deadline."""
        key = (step, microbatch)
        for old in [k for k in self._kept if k[0] != step]:
            del self._kept[old]
        batch, left = self._kept.pop(key, (None, self._readers))
        if batch is None:
            places = self.sample_positions(step, microbatch)
            batch = self._wait(key, places) if self._spec.processes else self._reader.read(places, key)
        if left > 1:
            self._kept[key] = (batch, left - 1)
        return batch

    def close(self) -> None:
        """End the data processes; what is still being read is dropped. Idempotent."""
        self._pending.clear()
        self._kept.clear()
        pool, self._pool = self._pool, None
        if pool is not None:
            processes = list((getattr(pool, "_processes", None) or {}).values())
            pool.shutdown(wait=False, cancel_futures=True)
            # A sample that takes for ever must not keep us: the processes hold nothing that could be lost.
            for process in processes:
                process.terminate()

    def _submit(self, places: list[SamplePosition], key: tuple[int, int]) -> Future[Answer]:
        if self._pool is None:
            self._pool = ProcessPoolExecutor(
                self._spec.processes,
                multiprocessing.get_context("spawn"),
                initializer=start_data_process,
                initargs=(self._spec, self._fields, self._seed, self._batch_names),
            )
        try:
            return self._pool.submit(read_in_data_process, places, key)
        except BrokenProcessPool as error:
            raise self._died(error) from error
        except (pickle.PicklingError, AttributeError, TypeError) as error:  # what pickle raises for what it cannot take along
            self.close()
            raise ConfigError(
                f"data has processes: {self._spec.processes}, and they cannot be given {self._spec.label}"
                + (f" and collate {self._spec.collate.label}" if self._spec.collate is not None else "")
                + f": {error_text(error)}",
                cure="put functions and classes into a module that the processes can import, or set data.processes: 0",
            ) from error

    def _wait(self, key: tuple[int, int], places: list[SamplePosition]) -> dict[str, Tensor]:
        future = self._pending.pop(key, None) or self._submit(places, key)
        where = f"step {key[0] + 1}, microbatch {key[1]} (samples {_ids(places)})"
        try:
            packed, left = future.result(self._timeout_s)
            if self._guard is not None:
                self._guard.pass_on(left)
            return unpack(packed)
        except FutureTimeout:
            future.cancel()
            raise UserCodeError(
                f"the data set did not give {where} within {self._timeout_s:g} s, read by {self._spec.processes} processes",
                cure="raise data.processes, make __getitem__ cheaper, or find what it waits for",
            ) from None
        except BrokenProcessPool as error:
            raise self._died(error, where) from error
        except RayparError as error:
            error.args = (f"{where}: {error.what}", error.cure)
            error.what = error.args[0]
            raise

    def _died(self, error: Exception, where: str = "the samples") -> RayparError:
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


def _ids(places: Sequence[SamplePosition]) -> str:
    shown = ", ".join(str(index) for _, index in places[:8])
    return shown + (f", ... {len(places)} in all" if len(places) > 8 else "")
