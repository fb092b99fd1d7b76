"""Reads the samples of a user's data set and makes microbatches of them by the numerics contract (raypar/NUMERICS.md, rule 1).

Samples are read either here, in the thread that asks (`processes: 0`: nothing else may touch torch's generator while layers
compute), or ahead of time in CPU processes of their own. Both give the same bits: a sample depends on (seed, epoch, id) only.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import threading
import traceback
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from multiprocessing.connection import wait as wait_for_sentinel
from typing import Any, Protocol

import numpy
import torch
from torch import Tensor

from raypar.errors import ConfigError, DataError, RayparError, UserCodeError, with_article
from raypar.job import DataConfig
from raypar.plan.microbatches import Microbatches
from raypar.plan.seeds import seed_of
from raypar.user_code.user_code_errors import error_text, reraise_ctrl_c
from raypar.worker.process.environment_and_signals_guard import StateWarnings
from raypar.worker.process.torch_state_guard import DEFAULT_TORCH_STATE, TorchStateGuard

FIELD_NAMES = ("x", "y", "z")
"""Names of a tuple sample's fields, unless `data.names` gives others."""

INPUT_NAMES = ("input_ids", "pixel_values", "inputs", "input", "image", "images", "img", "features", "tokens", "text", "x")
TARGET_NAMES = ("labels", "label", "targets", "target", "y")
"""What fields for the first layer, and for the loss, are often called; to guess them in messages."""
WHERE_FIELDS_ARE_NAMED = (
    "name the fields there are: data.input and data.target, for tuples data.names (from Python keys of the dict data=)"
)
"""Cure of errors about fields of samples."""


def name_fields_cure(fields: Collection[str]) -> str:
    """The cure of errors about fields of samples, with the fields that a sample has, if it has two or more."""
    others = [name for name in fields if name not in TARGET_NAMES]
    target = next((name for name in TARGET_NAMES if name in fields), others[-1] if len(others) > 1 else None)
    first = next((name for name in INPUT_NAMES if name in others), next(iter(others), None))
    if first is None or target is None or first == target:
        return WHERE_FIELDS_ARE_NAMED
    return f'set data.input: {first}, data.target: {target} (from Python data={{"function": ..., "input": "{first}", ' + (
        f'"target": "{target}"}}), or which of the fields the first layer and the loss read'
    )


READ_TIMEOUT_S = 120.0
"""How long data processes may take over one microbatch, their own start included."""

AHEAD_BYTES = 32 << 20
"""Bytes of the next step that are read while this worker waits for the votes on this step."""

SamplePosition = tuple[int, int]
"""(epoch, sample id)."""


class MapStyleDataset(Protocol):
    """The user's data set, whose samples are read by id."""

    def __len__(self) -> int:
        """Number of samples."""

    def __getitem__(self, index: int, /) -> Any:
        """A sample: a mapping, a tuple or list, or one tensor or number."""


def make_dataset(spec: DataConfig, key: str = "data") -> Any:
    """Call the user's data set function. Raises `UserCodeError` if it raises, `DataError` if samples cannot be read by id.

    `key`: the job's key of the data, for messages.
    """
    try:
        dataset = spec.call(f"{key}.args")
    except RayparError:
        raise
    except BaseException as error:  # some classes of libraries are no Exception
        reraise_ctrl_c(error)
        raise UserCodeError(
            f"the data set function {spec.label} raised {error_text(error)}\n{traceback.format_exc()}",
            cure=f"run it by itself with {key}.args",
        ) from error
    dataset_size(dataset, spec.label)
    return dataset


def require_map_style(dataset: Any, what: str) -> None:
    """Raise `DataError` for a data set without `__len__` and `__getitem__`. `what`: its name, for messages."""
    if hasattr(dataset, "iloc") and hasattr(dataset, "columns"):
        raise DataError(
            f"{what} is {with_article(type(dataset).__name__)}, whose [0] is a column, not a sample",
            cure="give a list of samples: frame.to_dict('records'), or torch.utils.data.TensorDataset(inputs, targets)",
        )
    if hasattr(dataset, "dataset") and hasattr(dataset, "batch_sampler"):
        raise _error_of_data_loader(dataset, what)
    iterable = isinstance(dataset, torch.utils.data.IterableDataset)  # has a __getitem__ that only raises
    if iterable or not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        listed = "dataset.take_all() is such a list" if hasattr(dataset, "take_all") else "an iterable one can be listed first"
        raise DataError(
            f"{what} is {with_article(type(dataset).__name__)}, which cannot be read by sample id",
            cure="give a map-style data set, with __len__ and __getitem__, such as a list of samples; "
            f"{listed}, or saved to files",
        )


def _error_of_data_loader(loader: torch.utils.data.DataLoader[Tensor], what: str) -> ConfigError:
    """The error for a `DataLoader`, which names what of it has no effect here."""
    own: list[str] = []
    usual = torch.utils.data.SequentialSampler, torch.utils.data.RandomSampler
    if type(loader.sampler) not in usual and not isinstance(loader.dataset, torch.utils.data.IterableDataset):
        own.append(f"its {type(loader.sampler).__name__} is not used: samples are shuffled anew in every epoch, by `seed`")
    if loader.collate_fn is not torch.utils.data.default_collate and loader.batch_sampler is not None:
        own.append("its collate_fn is not used: fields of samples are stacked, so pad them in the data set")
    return ConfigError(
        f"{what} is {with_article(type(loader).__name__)}",
        cure="give the data set in it (data=loader.dataset): raypar makes the batches, of batch_size= samples each"
        + "".join(f"; {line}" for line in own),
    )


def dataset_size(dataset: Any, label: str = "") -> int:
    """Number of samples. Raises `DataError` for an empty data set and for one without `__len__` and `__getitem__`."""
    name = label or type(dataset).__name__
    require_map_style(dataset, f"data set {name}")
    try:
        size = len(dataset)
    except TypeError as error:
        raise DataError(f"data set {name} has no length: {error}", cure="give it a __len__ that returns an int") from error
    except BaseException as error:  # some classes of libraries are no Exception
        reraise_ctrl_c(error)
        raise UserCodeError(
            f"data set {name} has no length: it raised {error_text(error)}\n{traceback.format_exc()}",
            cure="call its __len__ by itself",
        ) from error
    if size == 0:
        raise DataError(f"data set {name} is empty", cure="check data.args: its path, split and context length")
    return size


@dataclass
class SampleOrder:
    """Which sample lies at each position of the endless stream of samples."""

    seed: int
    """The job's seed."""
    size: int
    """Samples in an epoch."""
    shuffle: bool = True
    """Whether each epoch has an order of its own; else every epoch is 0, 1, 2, ..."""
    _permutations: dict[int, Tensor] = field(default_factory=dict, repr=False)
    """Epoch -> its order, of the epochs used last."""

    def __post_init__(self) -> None:
        if self.size < 1:
            raise DataError(f"a data set of {self.size} samples", cure="give it at least one")

    def ids(self, start: int, stop: int) -> list[SamplePosition]:
        """(epoch, id) of stream positions [start, stop)."""
        found: list[SamplePosition] = []
        while start < stop:
            epoch, first = divmod(start, self.size)
            last = min(self.size, first + stop - start)
            entries = self._order(epoch)[first:last].tolist() if self.shuffle else range(first, last)
            found += [(epoch, entry) for entry in entries]
            start += last - first
        return found

    def _order(self, epoch: int) -> Tensor:
        """The order of one epoch's samples; kept for two epochs, because a step may reach from one into the next."""
        if epoch not in self._permutations:
            generator = torch.Generator().manual_seed(seed_of(self.seed, "epoch", epoch))
            while len(self._permutations) > 1:
                del self._permutations[min(self._permutations)]
            self._permutations[epoch] = torch.randperm(self.size, generator=generator)
        return self._permutations[epoch]


@dataclass(frozen=True)
class SampleReader:
    """Reads the samples of one microbatch and stacks the fields asked for. Works in any process."""

    dataset: MapStyleDataset
    """The user's data set."""
    names: tuple[str, ...]
    """Names of the fields of tuple samples; empty: `FIELD_NAMES`."""
    fields: tuple[str, ...]
    """The fields to stack."""
    seed: int
    """The job's seed."""
    guard: TorchStateGuard | None = None
    """Restores process state that a sample leaves changed, so that the next one does not depend on it."""

    def read(self, places: Sequence[SamplePosition]) -> dict[str, Tensor]:
        """Read samples: field -> [samples, ...], in fresh memory. Leaves python, numpy and torch seeded by the last sample."""
        columns: list[list[Tensor]] = [[] for _ in self.fields]
        # Who promises to draw no random numbers need not have them seeded; it does not change a bit.
        seeded = not getattr(self.dataset, "raypar_thread_safe", False)
        for place in places:
            sample = self._sample(place, seeded=seeded)
            for column, name in zip(columns, self.fields, strict=True):
                column.append(self._tensor(sample, name, place[1]))
        return {name: self._stack(name, column, places) for name, column in zip(self.fields, columns, strict=True)}

    def field_names(self, place: SamplePosition) -> tuple[str, ...]:
        """Names of the fields of a sample. Leaves python, numpy and torch seeded by it."""
        sample = self._sample(place, seeded=True)
        if isinstance(sample, Mapping):
            return tuple(map(str, sample))
        return (self.names or FIELD_NAMES)[: len(sample) if isinstance(sample, (tuple, list)) else 1]

    def _sample(self, place: SamplePosition, *, seeded: bool) -> Any:
        """One sample, as the data set gives it. `seeded`: seed the generators first."""
        epoch, index = place
        if seeded:
            here = seed_of(self.seed, "sample", epoch, index) % 2**32
            random.seed(here)
            numpy.random.seed(here)
            # The CPU's share of torch.manual_seed, which takes 65 us: it visits every kind of device.
            torch.default_generator.manual_seed(here)
        try:
            sample = self.dataset[index]
        except BaseException as error:  # some classes of libraries are no Exception
            reraise_ctrl_c(error)
            size, more, cure = self._size(), "", f"read it by itself: dataset[{index}]"
            if size is not None and (isinstance(error, IndexError) or (isinstance(error, KeyError) and error.args == (index,))):
                more = f"\n  its length is {size:,}, so samples 0 to {size - 1:,} are read"
                cure += "; " + (
                    "if there are fewer samples, let __len__ return their number"
                    if index < size
                    else "the length was larger when the run began: let __len__ return the same in every process"
                )
            raise UserCodeError(
                f"sample {index} (epoch {epoch}): the data set raised {error_text(error)}{more}\n{traceback.format_exc()}",
                cure=cure,
            ) from error
        if self.guard is not None:
            self.guard.check("the data set's __getitem__")
        return sample

    def _size(self) -> int | None:
        """Number of samples, as the data set tells it; None where it does not."""
        try:
            return len(self.dataset)
        except BaseException as error:  # some classes of libraries are no Exception
            reraise_ctrl_c(error)
            return None

    def _tensor(self, sample: Any, name: str, index: int) -> Tensor:
        if isinstance(sample, Mapping):
            found: Mapping[str, Any] = sample
        else:
            values = sample if isinstance(sample, (tuple, list)) else (sample,)
            names = self.names or FIELD_NAMES
            if len(values) > len(names):
                raise DataError(
                    f"sample {index} has {len(values)} fields, but names for {len(names)}: {', '.join(names)}",
                    cure=f"name all {len(values)} in data.names, or return a dict",
                )
            found = dict(zip(names, values, strict=False))
        if name not in found:
            raise DataError(
                f"sample {index} has no field {name!r}, only {', '.join(map(str, found)) or 'none at all'}",
                cure=name_fields_cure([str(each) for each in found]) if isinstance(sample, Mapping) else WHERE_FIELDS_ARE_NAMED,
            )
        value = found[name]
        if isinstance(value, Tensor):
            return value.detach()
        try:
            return torch.as_tensor(value)
        except (TypeError, ValueError, RuntimeError) as error:
            raise DataError(
                f"sample {index}, field {name!r}: a {type(value).__name__} cannot be made a tensor: {error}",
                cure="return tensors, arrays or numbers",
            ) from error

    @staticmethod
    def _stack(name: str, column: list[Tensor], places: Sequence[SamplePosition]) -> Tensor:
        kinds = [(tuple(value.shape), value.dtype) for value in column]
        if kinds.count(kinds[0]) != len(kinds):
            usual = Counter(kinds).most_common(1)[0][0]
            odd, (epoch, index) = next((k, p) for k, p in zip(kinds, places, strict=True) if k != usual)
            other = next(p[1] for k, p in zip(kinds, places, strict=True) if k == usual)
            raise DataError(
                f"sample {index} (epoch {epoch}), field {name!r}: expected shape {usual[0]} {usual[1]} as in sample {other} "
                f"of the same microbatch, found shape {odd[0]} {odd[1]}",
                cure="pad or crop samples to one shape, and give every sample the same dtype",
            )
        return torch.stack(column)


class BatchSource(Protocol):
    """The source of the batch fields that a stage reads: a `MicrobatchLoader`, or what wraps one."""

    def get(self, step: int, microbatch: int) -> Mapping[str, Tensor]:
        """The collated fields of one microbatch; blocks until they are read, with a deadline of its own."""


class MicrobatchLoader:
    """The microbatches of one data set, by (step, microbatch).

    `batching.batch_size` samples a step; `fields`: which to collate; `readers`: how many times a step's microbatch is asked for
    (stages of one worker that read batch fields), so that it is read once and let go after its last use. `guard`: gets lines
    about process state that samples leave changed, here or in the data processes.
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
    _pending: dict[tuple[int, int], Future[_Answer]]
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
    ) -> None:
        dataset_size(dataset, spec.label)
        self._spec, self._order, self._batching = spec, order, batching
        self._seed, self._fields, self._readers, self._timeout_s = seed, tuple(fields), readers, timeout_s
        self._guard = guard
        self._reader = SampleReader(dataset, spec.names, self._fields, seed, guard)
        self._pool, self._pending, self._kept = None, {}, {}

    def sample_positions(self, step: int, microbatch: int) -> list[SamplePosition]:
        """(epoch, id) of the samples of a microbatch."""
        samples = self._batching.samples(microbatch)
        start = step * self._batching.batch_size
        return self._order.ids(start + samples.start, start + samples.stop)

    def prefetch(self, step: int, microbatches: Sequence[int]) -> None:
        """Start to read these microbatches in the data processes, if any; those being read already are left alone."""
        if not self._spec.processes:
            return
        for key in [key for key in self._pending if key[0] < step - 1]:
            self._pending.pop(key).cancel()
        for microbatch in microbatches:
            key = (step, microbatch)
            if key not in self._pending and key not in self._kept:
                self._pending[key] = self._submit(self.sample_positions(*key))

    def read_ahead(self, step: int, microbatches: Sequence[int]) -> None:
        """Read these microbatches now, up to about `AHEAD_BYTES`, while the step waits for others. `get` raises the errors."""
        room = 0 if self._spec.processes else AHEAD_BYTES
        for key in [(step, microbatch) for microbatch in microbatches if (step, microbatch) not in self._kept]:
            if room <= 0:
                return
            try:
                batch = self._reader.read(self.sample_positions(*key))
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
            batch = self._wait(key, places) if self._spec.processes else self._reader.read(places)
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

    def _submit(self, places: list[SamplePosition]) -> Future[_Answer]:
        if self._pool is None:
            self._pool = ProcessPoolExecutor(
                self._spec.processes,
                multiprocessing.get_context("spawn"),
                initializer=_start,
                initargs=(self._spec, self._fields, self._seed),
            )
        try:
            return self._pool.submit(_read, places)
        except BrokenProcessPool as error:
            raise self._died(error) from error

    def _wait(self, key: tuple[int, int], places: list[SamplePosition]) -> dict[str, Tensor]:
        future = self._pending.pop(key, None) or self._submit(places)
        where = f"step {key[0] + 1}, microbatch {key[1]} (samples {_ids(places)})"
        try:
            packed, left = future.result(self._timeout_s)
            if self._guard is not None:
                self._guard.pass_on(left)
            return _unpack(packed)
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


# -- in the data processes ---------------------------------------------------------------------------------------------------

_Packed = dict[str, tuple[bytearray, torch.dtype, tuple[int, ...]]]
_Answer = tuple[_Packed, StateWarnings]
"""A microbatch, and lines about process state that the data set has left changed."""

_reader: SampleReader | RayparError | None = None
"""Of this data process; an error when the data set could not be made."""


def _start(spec: DataConfig, fields: tuple[str, ...], seed: int) -> None:
    """Runs once in every data process: makes the data set, and sees to it that the process ends with its parent."""
    global _reader
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole terminal; the parent decides
    parent = multiprocessing.parent_process()
    if parent is not None:
        # Not PR_SET_PDEATHSIG: that follows the thread which started us, and actor methods run in threads that come and go.
        threading.Thread(target=_follow, args=(parent.sentinel,), daemon=True).start()
    guard = TorchStateGuard(
        threads=1, base=DEFAULT_TORCH_STATE
    )  # the arguments are unpickled, and the data set's module imported, by now
    guard.establish("the module of the data set")
    try:
        with guard.watching(f"the data set function {spec.label}"):
            dataset = make_dataset(spec)
        _reader = SampleReader(dataset, spec.names, fields, seed, guard)
    except RayparError as error:
        _reader = error


def _follow(sentinel: int) -> None:
    wait_for_sentinel([sentinel])
    os._exit(1)


def _read(places: list[SamplePosition]) -> _Answer:
    if isinstance(_reader, RayparError):
        raise _reader
    assert _reader is not None and _reader.guard is not None, "_start runs first"
    packed = _pack(_reader.read(places))
    _reader.guard.check_all("the data set's __getitem__")
    return packed, _reader.guard.lines()


def _pack(batch: Mapping[str, Tensor]) -> _Packed:
    """Plain bytes: torch's own way to another process is shared memory, one file descriptor a tensor."""
    return {
        name: (bytearray(t.contiguous().reshape(-1).view(torch.uint8).numpy().data), t.dtype, tuple(t.shape))
        for name, t in batch.items()
    }


def _unpack(packed: _Packed) -> dict[str, Tensor]:
    return {
        name: torch.frombuffer(data, dtype=dtype).clone().reshape(shape) if data else torch.empty(shape, dtype=dtype)
        for name, (data, dtype, shape) in packed.items()
    }
