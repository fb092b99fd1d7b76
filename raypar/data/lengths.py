"""The lengths of a data set's samples, for `data.group_by`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from raypar.data.batch_fields import top_values, value_at


class _Samples(Protocol):
    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> object: ...


def of_field(dataset: _Samples, field: str | int) -> list[int]:
    """The length of a field of every sample; of a number the number itself. Reads every sample once.

    `field`: its name, dotted for one inside another (`inputs.ids`); also the place in samples that are tuples, or an
    attribute's name.
    """
    return [_length(dataset[index], field) for index in range(len(dataset))]


def _length(sample: object, field: str | int) -> int:
    value = _value(sample, field)
    shape = getattr(value, "shape", None)
    return int(value) if shape == () or not hasattr(value, "__len__") else len(value)


def _value(sample: object, field: str | int) -> Any:
    """A field of a sample. Raises `KeyError` if there is none."""
    if isinstance(sample, Mapping) and field in sample:
        return sample[field]
    if isinstance(sample, (tuple, list)) and isinstance(field, int):
        return sample[field]
    if not isinstance(sample, Mapping) and hasattr(sample, str(field)):
        return getattr(sample, str(field))
    return value_at(top_values(sample, (), "a sample"), str(field))
