"""The lengths of a data set's samples, for `data.group_by`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol


class _Samples(Protocol):
    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> object: ...


def of_field(dataset: _Samples, field: str | int) -> list[int]:
    """The length of a field of every sample; of a number the number itself. Reads every sample once.

    `field`: the key of samples that are mappings, the place in those that are tuples, or an attribute's name.
    """
    return [_length(dataset[index], field) for index in range(len(dataset))]


def _length(sample: object, field: str | int) -> int:
    if isinstance(sample, Mapping):
        value = sample[field]
    else:
        value = sample[field] if isinstance(sample, (tuple, list)) and isinstance(field, int) else getattr(sample, str(field))
    shape = getattr(value, "shape", None)
    return int(value) if shape == () or not hasattr(value, "__len__") else len(value)
