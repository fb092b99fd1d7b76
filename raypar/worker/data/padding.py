"""Default collation of samples of unequal length: `data.pad` says to which length a microbatch is padded (rule 1)."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from raypar.errors import ConfigError, DataError
from raypar.job import PadConfig
from raypar.worker.data.batch_fields import flatten_fields
from raypar.worker.data.sample_order import SamplePosition

MASKED_LABEL = -100
"""The label that PyTorch's cross-entropy leaves out, unless it is told another one."""
MOST_SAMPLES_LOOKED_AT = 100_000
"""Of a list of more samples than this the lengths are not known before they are read."""


@dataclass(frozen=True)
class Padding:
    """Pads dimension 0 of samples' fields, and stacks them."""

    config: PadConfig
    """The job's `data.pad`."""
    target: str
    """The field that the loss gets as its target: integers there are padded with `MASKED_LABEL`."""
    names: tuple[str, ...] = ()
    """Names of the fields of tuple samples, for `check_known_lengths`."""

    def pads(self, name: str, value: Tensor) -> bool:
        """Whether a field with such a value is padded: one of `data.pad.fields`, without them any that has dimensions."""
        return name in self.config.fields if self.config.fields else value.dim() > 0

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
        padded = first.new_full((len(column), length, *first.shape[1:]), self._value(name, first.dtype))
        for row, value in zip(padded, column, strict=True):
            row[: len(value)] = value
        return padded

    def error_of_ladder(self, name: str, index: int, length: int, more: str = "") -> DataError:
        """The error for a sample that is longer than the last of `data.pad.to`. `more`: how many others are."""
        most = self.config.to[-1]
        return DataError(
            f"sample {index}: its field {name!r} has length {length:,}, and data.pad.to ends with {most:,}{more}",
            cure=f"add {length:,} or more to data.pad.to, or cut such samples, or leave them out, in the data set",
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
                    f"{key}.pad.{part} names {', '.join(map(repr, unknown))}, and samples have the fields {', '.join(names)}",
                    cure="correct the name, or leave it out",
                )

    def check_known_lengths(self, dataset: object, size: int, fields: Sequence[str]) -> None:
        """Raise `DataError` for samples beyond the last of `data.pad.to` where the data set tells its lengths without reading.

        It does by an attribute `lengths`, by the column `length` of a Hugging Face data set, or as a list of samples.
        """
        if not self.config.to:
            return
        found = _known_lengths(dataset, size)
        if found is not None:
            self._refuse_longest("length", found)
        elif isinstance(dataset, (list, tuple)) and size <= MOST_SAMPLES_LOOKED_AT:
            for name in fields:
                if not self.config.fields or name in self.config.fields:
                    self._refuse_longest(name, [self._length_in(sample, name) for sample in dataset])

    def _refuse_longest(self, name: str, lengths: Sequence[int]) -> None:
        beyond = [index for index, length in enumerate(lengths) if length > self.config.to[-1]]
        if beyond:
            index = max(beyond, key=lambda each: lengths[each])
            raise self.error_of_ladder(name, index, lengths[index], f"; {len(beyond):,} of {len(lengths):,} samples are longer")

    def _length_in(self, sample: object, name: str) -> int:
        """The length of a field of a sample in memory; 0 for one without."""
        value = flatten_fields(sample, self.names, "a sample").get(name)
        if isinstance(value, (list, tuple)):
            return len(value)
        shape: Sequence[int] = getattr(value, "shape", ())
        return int(shape[0]) if shape else 0

    def _value(self, name: str, dtype: torch.dtype) -> float:
        """What a field is padded with."""
        value = self.config.value.get(name)
        integers = not (dtype.is_floating_point or dtype.is_complex)
        if value is None and name == self.target:
            if not integers:
                raise DataError(
                    f"data.pad pads the target {name!r}, of {dtype}, and does not say with which number",
                    cure=f"set data.pad.value: {{{name}: ...}}, a number that the loss leaves out; or name the fields that are "
                    "padded in data.pad.fields",
                )
            value = MASKED_LABEL if dtype not in (torch.bool, torch.uint8) else None
        if value is not None and integers and value != int(value):
            raise DataError(
                f"data.pad.value.{name} is {value}, and the field has integers ({dtype})", cure="give a whole number"
            )
        return 0 if value is None else int(value) if integers else value


def _known_lengths(dataset: object, size: int) -> list[int] | None:
    """The lengths that a data set tells of all its samples; None if it tells none."""
    told = getattr(dataset, "lengths", None)
    if told is None and "length" in (getattr(dataset, "column_names", None) or ()):
        told = dataset["length"]  # type: ignore[index]
    if told is None or isinstance(told, Mapping) or not hasattr(told, "__len__") or len(told) != size:
        return None
    return [int(length) for length in told]
