"""The user's data set with the number of each sample as one more field, for runs whose outputs are kept by sample."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from raypar.data.batch_fields import flatten_fields, top_values
from raypar.errors import ConfigError, DataError
from raypar.job import DataConfig, FunctionConfig
from raypar.job.data_section import ValidationConfig
from raypar.plan.wording import count_noun
from raypar.worker.data.collate import Collation, make_collation, shallow_copy
from raypar.worker.data.padding import length_of
from raypar.worker.data.sample_reader import is_one_tensor
from raypar.worker.data.user_dataset import MapStyleDataset, is_stream, make_dataset

SAMPLE = "raypar_sample"
"""The field with a sample's number, and its length where samples are padded (`number_and_length`)."""
_LENGTH_BIT = 40
"""The bit of the field at which the length begins."""


def number_and_length(sample: Tensor) -> tuple[Tensor, Tensor | None]:
    """The numbers of samples, of values of the field `SAMPLE`, and their lengths before padding; None where none is padded."""
    if max(sample.tolist()) >> _LENGTH_BIT == 0:
        return sample, None
    return sample & ((1 << _LENGTH_BIT) - 1), (sample >> _LENGTH_BIT) - 1


def with_numbered_samples(data: DataConfig, samples: int) -> ValidationConfig:
    """The first `samples` samples of `data` as a section `validation`, whose target is the number of each sample."""
    if data.pack is not None:
        raise ConfigError(
            "data.pack puts several samples into a row, and predictions are kept by sample",
            cure="leave it out for predictions, and pad: --set data.pack=null --set 'data.pad={multiple: 64}'",
        )
    collate = FunctionConfig.model_construct(function=NumberedCollation(data)) if data.collate is not None else None
    return ValidationConfig.model_construct(
        function=NumberedSamples(data),
        input=data.input,
        target=SAMPLE,
        collate=collate,
        pad=data.pad,
        processes=data.processes,
        samples=samples,
        streams=data.streams,
    )


@dataclass(frozen=True)
class NumberedSamples:
    """Makes the data set."""

    data: DataConfig
    """The user's data set, and how its samples are used."""

    def __call__(self) -> MapStyleDataset | NumberedStream:
        dataset = make_dataset(self.data)
        return NumberedStream(dataset, self.data) if is_stream(dataset) else _NumberedDataset(dataset, self.data)

    @property
    def label_in_messages(self) -> str:
        """The user's name for the data set."""
        return self.data.label


class _NumberedDataset:
    """Sample i: the fields of the user's sample i, and its number; for a collate function (number, the user's sample)."""

    def __init__(self, dataset: MapStyleDataset, data: DataConfig) -> None:
        self.dataset, self.data = dataset, data
        self.raypar_thread_safe = bool(getattr(dataset, "raypar_thread_safe", False))

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        return _numbered(self.dataset[index], index, self.data)


class NumberedStream:
    """The same of an iterable data set, which is read to its end once. Raises `DataError` if it ends before all samples that
    are wanted."""

    def __init__(self, dataset: Iterable[object], data: DataConfig) -> None:
        self.dataset, self.data = dataset, data
        self.raypar_thread_safe = bool(getattr(dataset, "raypar_thread_safe", False))
        self._given = 0

    def set_epoch(self, epoch: int) -> None:
        """See `StreamSource`: there is one epoch."""
        if epoch:
            raise DataError(
                f"data set {self.data.label} ended after {count_noun(self._given, 'sample')}, and more were asked for",
                cure="ask for no more (--samples; in a section of data samples), or leave it out: then they are counted",
            )
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)

    def __iter__(self) -> Iterator[object]:
        self._given = 0
        for index, sample in enumerate(self.dataset):
            self._given += 1
            yield _numbered(sample, index, self.data)

    def raypar_close(self) -> None:
        """See `StreamSource.close`."""
        if (close := getattr(self.dataset, "raypar_close", None)) is not None:
            close()


def _numbered(sample: object, index: int, data: DataConfig) -> object:
    if data.collate is not None:
        return [index, sample]
    number = index if data.pad is None else index | 1 + _padded_length(sample, index, data) << _LENGTH_BIT
    return {**top_values(sample, data.names, f"sample {index}"), SAMPLE: number}


def _padded_length(sample: object, index: int, data: DataConfig) -> int:
    """The length of the longest field of a sample that is padded, the target apart if another one is; -1 if none is."""
    fields, padded = flatten_fields(sample, data.names, f"sample {index}", is_one_tensor), data.pad.fields if data.pad else ()
    lengths = {name: length_of(value) for name, value in fields.items() if not padded or name in padded}
    if len(lengths) > 1:
        lengths.pop(data.target or "y", None)
    return max(lengths.values(), default=-1)


class NumberedCollation:
    """The user's collate function on numbered samples: its batch, with their numbers."""

    def __init__(self, data: DataConfig) -> None:
        self.data = data
        self._made: Collation | None = None

    def __call__(self, samples: Sequence[tuple[int, object]]) -> Mapping[str, object]:
        if self._made is None:
            self._made = make_collation(self.data, 0)
        assert self._made is not None
        batch = self._made.function([shallow_copy(sample) for _, sample in samples])
        numbers = torch.tensor([index for index, _ in samples])
        return {**top_values(batch, self.data.names, "the batch of data.collate"), SAMPLE: numbers}

    def __getstate__(self) -> dict[str, object]:
        return {"data": self.data, "_made": None}  # each process makes its own

    @property
    def label_in_messages(self) -> str:
        """The user's name for the collate function."""
        return self.data.collate.label if self.data.collate is not None else ""
