"""Default collation of samples of unequal length: `data.pad` says to which length a microbatch is padded (rule 1)."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from raypar.data.batch_fields import flatten_fields
from raypar.errors import ConfigError, DataError
from raypar.job import PadConfig
from raypar.worker.data.sample_order import SamplePosition

MASKED_LABEL = -100
"""The label that PyTorch's cross-entropy leaves out, unless it is told another one."""
UNSIGNED = (torch.bool, torch.uint8, torch.uint16, torch.uint32, torch.uint64)
"""Dtypes without numbers below 0."""
MOST_SAMPLES_LOOKED_AT = 100_000
"""A list of more samples than this is looked at like a data set that reads its samples."""
LOOK_S = 0.5
"""So long samples are read before the run to find some that are too long."""


def length_of(value: object) -> int:
    """The length of a field of a sample: of its first dimension; 0 for one without."""
    if isinstance(value, (list, tuple)):
        return len(value)
    shape: Sequence[int] = getattr(value, "shape", ())
    return int(shape[0]) if shape else 0


@dataclass(frozen=True)
class Padding:
    """Pads dimension 0 of samples' fields, and stacks them."""

    config: PadConfig
    """The job's `data.pad`."""
    target: str
    """The field that the loss gets as its target: integers there are padded with `MASKED_LABEL`."""
    names: tuple[str, ...] = ()
    """Names of the fields of tuple samples, for `check_lengths`."""
    key: str = "pad"
    """The key of the data that says so, for messages."""
    last_lengths: dict[str, list[int]] = field(default_factory=dict, compare=False)
    """Padded field -> the lengths of the samples of the batch that was made last."""

    def pads(self, name: str, value: Tensor) -> bool:
        """Whether a field with such a value is padded: one of `data.pad.fields`, without them any that has dimensions."""
        return name in self.config.fields if self.config.fields else value.dim() > 0

    def pads_batch(self, name: str, value: Tensor) -> bool:
        """Whether a field of a batch, [samples, ...], is padded."""
        return name in self.config.fields if self.config.fields else value.dim() > 1

    def length(self, longest: int) -> int | None:
        """The length of a batch whose longest sample has length `longest`; None beyond the last of `data.pad.to`."""
        if self.config.to:
            return next((each for each in self.config.to if each >= longest), None)
        return -(-longest // self.config.multiple) * self.config.multiple

    def stack(self, name: str, column: Sequence[Tensor], places: Sequence[SamplePosition]) -> Tensor:
        """The values of a field, [length, ...] each, as [samples, padded length, ...], in fresh memory.

        Raises `DataError` for values that differ in more than their length, and for those beyond the last of `data.pad.to`.
        """
        first = column[0]
        for value, (epoch, index) in zip(column, places, strict=True):
            if value.dim() == 0 or value.shape[1:] != first.shape[1:] or value.dtype != first.dtype:
                raise DataError(
                    f"sample {index} (epoch {epoch}), field {name!r}: expected a length, then {list(first.shape[1:])} "
                    f"{first.dtype}, as in sample {places[0][1]}, found {list(value.shape)} {value.dtype}",
                    cure="data.pad pads the first dimension only: give every sample the same others, and the same dtype",
                )
        longest = max(range(len(column)), key=lambda place: len(column[place]))
        length = self.length(len(column[longest]))
        if length is None:
            raise self.error_of_ladder(name, places[longest][1], len(column[longest]))
        self.last_lengths[name] = [len(value) for value in column]
        shape = (len(column), length, *first.shape[1:])
        with no_memory_named(name, shape, first.dtype, self.key):
            padded = first.new_full(shape, self.value(name, first.dtype))
        for row, value in zip(padded, column, strict=True):
            row[: len(value)] = value
        return padded

    def error_of_ladder(self, name: str, index: int, length: int, more: str = "") -> DataError:
        """The error for a sample that is longer than the last of `data.pad.to`. `more`: how many others are."""
        most = self.config.to[-1]
        is_ladder, key = self.key == "pad", f"data.{self.key}.to"
        change = f"add {length:,} or more to {key}" if is_ladder else f"set {key} to {length:,} or more"
        limit = f"{key} {'ends with' if is_ladder else 'is'} {most:,}"
        return DataError(
            f"sample {index}: its field {name!r} has length {length:,}, and {limit}{more}",
            cure=f"{change}, or cut such samples, or leave them out, in the data set",
        )

    @property
    def names_given(self) -> tuple[str, ...]:
        """The fields that the job names."""
        return (*self.config.fields, *self.config.value)

    def check_names(self, names: Collection[str], key: str = "data") -> None:
        """Raise `ConfigError` for fields that the job names and samples do not have: they would be padded with 0, or not at
        all. `names`: those of a sample; `key`: the job's key of the data."""
        for part, given in (("fields", self.config.fields), ("value", self.config.value)):
            unknown = [name for name in given if name not in names]
            if unknown:
                raise ConfigError(
                    f"{key}.{self.key}.{part} names {', '.join(map(repr, unknown))}, and samples have the fields "
                    f"{', '.join(names)}",
                    cure="correct the name, or leave it out",
                )

    def check_lengths(self, dataset: object, size: int, fields: Sequence[str], read: Callable[[int], object] | None) -> None:
        """Raise `DataError` for samples beyond the last of `data.pad.to`, as far as that is known before the run.

        All are where the data set tells its lengths without reading: by an attribute `lengths`, by the column `length` of a
        Hugging Face data set, or as a list of samples. Else samples spread over the data set are read with `read` for `LOOK_S`,
        which are all of a small one. `read`: reads sample i; None: samples are not read.
        """
        if not self.config.to:
            return
        found = _known_lengths(dataset, size)
        if found is not None:
            self._refuse_longest("length", dict(enumerate(found)))
            return
        padded = [name for name in fields if not self.config.fields or name in self.config.fields]
        lengths: dict[str, dict[int, int]] = {name: {} for name in padded}
        in_memory = isinstance(dataset, (list, tuple)) and size <= MOST_SAMPLES_LOOKED_AT
        deadline = time.monotonic() + LOOK_S
        for index in range(size) if in_memory else spread_indices(size) if read is not None else ():
            sample = dataset[index] if in_memory else read(index)  # type: ignore[index,misc]
            for name in padded:
                lengths[name][index] = self._length_in(sample, name)
            if not in_memory and time.monotonic() > deadline:
                break
        for name in padded:
            self._refuse_longest(name, lengths[name], "" if in_memory else "that were looked at ")

    def _refuse_longest(self, name: str, lengths: Mapping[int, int], which: str = "") -> None:
        """Raise `DataError` if one of the samples is too long. `lengths`: sample -> length of its field `name`."""
        beyond = [index for index, length in lengths.items() if length > self.config.to[-1]]
        if beyond:
            index = max(beyond, key=lambda each: (lengths[each], -each))
            more = f"; {len(beyond):,} of {len(lengths):,} samples {which}are longer"
            raise self.error_of_ladder(name, index, lengths[index], more)

    def _length_in(self, sample: object, name: str) -> int:
        """The length of a field of a sample in memory; 0 for one without."""
        return length_of(flatten_fields(sample, self.names, "a sample").get(name))

    def value(self, name: str, dtype: torch.dtype) -> float:
        """What a field is padded with. Raises `DataError` for a number that the dtype does not have."""
        value = self.config.value.get(name)
        integers = not (dtype.is_floating_point or dtype.is_complex)
        if value is not None:
            self._check_value(name, value, dtype)
        if value is None and name == self.target:
            if not integers:
                raise DataError(
                    f"data.{self.key} pads the target {name!r}, of {dtype}, and does not say with which number",
                    cure=f"set data.{self.key}.value: {{{name}: ...}}, a number that the loss leaves out; or name the fields "
                    f"that are padded in data.{self.key}.fields",
                )
            value = MASKED_LABEL if dtype not in UNSIGNED else None
        return 0 if value is None else int(value) if integers else value

    def _check_value(self, name: str, value: float, dtype: torch.dtype) -> None:
        """Raise `DataError` for a number that the dtype of its field does not have: PyTorch would put another one in its
        place."""
        where = f"data.{self.key}.value.{name} is {value}"
        if dtype.is_complex or (dtype.is_floating_point and math.isnan(value)):
            return
        if dtype.is_floating_point:
            kept = float(torch.tensor(value, dtype=torch.float64).to(dtype))
            if kept != value and abs(kept - value) > torch.finfo(dtype).eps * abs(value):
                raise DataError(
                    f"{where}, and the field ({dtype}) would have {kept:g} instead",
                    cure=f"give a number between {torch.finfo(dtype).min:g} and {torch.finfo(dtype).max:g}",
                )
            return
        if not math.isfinite(value) or value != int(value):
            raise DataError(f"{where}, and the field has integers ({dtype})", cure="give a whole number")
        least, most = (0, 1) if dtype == torch.bool else (torch.iinfo(dtype).min, torch.iinfo(dtype).max)
        if not least <= value <= most:
            raise DataError(f"{where}, and the field ({dtype}) has numbers from {least} to {most}", cure="give one of these")


@contextlib.contextmanager
def no_memory_named(name: str, shape: Sequence[int], dtype: torch.dtype, key: str) -> Iterator[None]:
    """Turns what is raised where there is no memory for a field of a microbatch into `DataError`. `key`: `pad` or `pack`."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        size = math.prod(shape) * dtype.itemsize / 2**30
        raise DataError(
            f"there is no memory for field {name!r} of a microbatch: {list(shape)} {str(dtype).removeprefix('torch.')} is "
            f"{size:,.1f} GiB",
            cure=f"give data.{key} smaller lengths or fewer rows, or set more microbatches",
        ) from error


def spread_indices(size: int) -> Iterator[int]:
    """Each of `size` indices once, so that the first ones are spread over all of them."""
    step = next(each for each in range(max(1, round(size * 0.618)), 0, -1) if math.gcd(each, size) == 1)
    return (index * step % size for index in range(size))


def _known_lengths(dataset: object, size: int) -> list[int] | None:
    """The lengths that a data set tells of all its samples; None if it tells none."""
    told = getattr(dataset, "lengths", None)
    if told is None and "length" in (getattr(dataset, "column_names", None) or ()):
        told = dataset["length"]  # type: ignore[index]
    if told is None or isinstance(told, Mapping) or not hasattr(told, "__len__") or len(told) != size:
        return None
    return [int(length) for length in told]
