"""Reads the samples of a user's data set and makes microbatches of them by the numerics contract (raypar/NUMERICS.md, rule 1).

Samples are read either here, in the thread that asks (`processes: 0`: nothing else may touch torch's generator while layers
compute), or ahead of time in CPU processes of their own. Both give the same bits: a sample depends on (seed, epoch, id) only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Protocol

from torch import Tensor

from raypar.data.batch_fields import digest_of_fields
from raypar.errors import RayparError, UserCodeError
from raypar.job import DataConfig
from raypar.plan.microbatches import Microbatches
from raypar.plan.wording import count_noun
from raypar.worker.data.data_process_pool import DataProcessDiedError, DataProcesses
from raypar.worker.data.inside_data_process import unpack
from raypar.worker.data.mixed_order import MixedOrder
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
    `data.collate` makes; empty: not known. `processes`: data processes that outlive this loader; without, it has its own.
    """

    _spec: DataConfig
    """The data set and its fields."""
    _order: SampleOrder | MixedOrder
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
    _processes: DataProcesses | None
    """The data processes; None where samples are read here."""
    _owns_processes: bool
    """Whether they end with this loader."""
    _kept: dict[tuple[int, int], tuple[dict[str, Tensor], int]]
    """(step, microbatch) -> (fields that were read, how many times they will still be asked for)."""

    def __init__(
        self,
        dataset: MapStyleDataset,
        spec: DataConfig,
        order: SampleOrder | MixedOrder,
        batching: Microbatches,
        *,
        seed: int,
        fields: Sequence[str],
        readers: int = 1,
        timeout_s: float = READ_TIMEOUT_S,
        guard: TorchStateGuard | None = None,
        batch_names: Sequence[str] = (),
        processes: DataProcesses | None = None,
    ) -> None:
        dataset_size(dataset, spec.label)
        self._spec, self._order, self._batching = spec, order, batching
        self._seed, self._fields, self._readers, self._timeout_s = seed, tuple(fields), readers, timeout_s
        self._guard = guard
        self._batch_names = tuple(batch_names)
        self._reader = SampleReader.of(dataset, spec, seed, self._fields, guard=guard, batch_names=batch_names)
        self._owns_processes = processes is None
        self._processes = (processes or DataProcesses(spec, seed)) if spec.processes else None
        self._kept = {}

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
        if self._processes is None:
            return
        self._processes.drop_before(step - 1)
        for microbatch in microbatches:
            if (step, microbatch) not in self._kept:
                places = self.sample_positions(step, microbatch)
                self._processes.request((step, microbatch, self._fields), places, self._batch_names)

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
            batch = self._wait(self._processes, key, places) if self._processes else self._reader.read(places, key)
        if left > 1:
            self._kept[key] = (batch, left - 1)
        return batch

    def first_batch_digests(self) -> dict[str, int]:
        """Field -> 8 bytes of hash over the job's first microbatch, which is read for this and let go."""
        fields = self.get(0, 0)
        self._kept.pop((0, 0), None)
        return {name: digest_of_fields({name: value}) for name, value in fields.items()}

    def close(self) -> None:
        """Let go of what was read; data processes that were not given end. Idempotent."""
        self._kept.clear()
        if self._processes is not None and self._owns_processes:
            self._processes.close()

    def _wait(self, processes: DataProcesses, key: tuple[int, int], places: list[SamplePosition]) -> dict[str, Tensor]:
        future = processes.take((*key, self._fields), places, self._batch_names)
        where = f"step {key[0] + 1}, microbatch {key[1]} (samples {_ids(places)})"
        try:
            packed, left = future.result(self._timeout_s)
            if self._guard is not None:
                self._guard.pass_on(left)
            return unpack(packed)
        except FutureTimeout:
            future.cancel()
            raise UserCodeError(
                f"the data set did not give {where} within {self._timeout_s:g} s, read by "
                f"{count_noun(self._spec.processes, 'process', 'processes')}",
                cure="raise data.processes, make __getitem__ cheaper, or find what it waits for",
            ) from None
        except DataProcessDiedError as error:
            raise processes.died(error, where) from error
        except RayparError as error:
            error.add_place(where)
            raise


def _ids(places: Sequence[SamplePosition]) -> str:
    shown = ", ".join(str(index) for _, index in places[:8])
    return shown + (f", ... {len(places)} in all" if len(places) > 8 else "")
