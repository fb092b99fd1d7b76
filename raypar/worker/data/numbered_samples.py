"""The user's data set with the number of each sample as one more field, for runs whose outputs are kept by sample."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from raypar.job import DataConfig, FunctionConfig
from raypar.job.function_section import ValidationConfig
from raypar.worker.data.batch_fields import top_values
from raypar.worker.data.collate import Collation, make_collation
from raypar.worker.data.user_dataset import MapStyleDataset, make_dataset

SAMPLE = "raypar_sample"
"""The field with a sample's number."""


def with_numbered_samples(data: DataConfig, samples: int) -> ValidationConfig:
    """The first `samples` samples of `data` as a section `validation`, whose target is the number of each sample."""
    collate = FunctionConfig.model_construct(function=NumberedCollation(data)) if data.collate is not None else None
    return ValidationConfig.model_construct(
        function=NumberedSamples(data),
        input=data.input,
        target=SAMPLE,
        collate=collate,
        pad=data.pad,
        processes=data.processes,
        samples=samples,
    )


@dataclass(frozen=True)
class NumberedSamples:
    """Makes the data set."""

    data: DataConfig
    """The user's data set, and how its samples are used."""

    def __call__(self) -> MapStyleDataset:
        return _NumberedDataset(make_dataset(self.data), self.data)

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
        sample = self.dataset[index]
        if self.data.collate is not None:
            return [index, sample]
        return {**top_values(sample, self.data.names, f"sample {index}"), SAMPLE: torch.tensor(index)}


class NumberedCollation:
    """The user's collate function on numbered samples: its batch, with their numbers."""

    def __init__(self, data: DataConfig) -> None:
        self.data = data
        self._made: Collation | None = None

    def __call__(self, samples: Sequence[tuple[int, object]]) -> Mapping[str, object]:
        if self._made is None:
            self._made = make_collation(self.data, 0)
        assert self._made is not None
        batch = self._made.function([sample for _, sample in samples])
        numbers = torch.tensor([index for index, _ in samples])
        return {**top_values(batch, self.data.names, "the batch of data.collate"), SAMPLE: numbers}

    def __getstate__(self) -> dict[str, object]:
        return {"data": self.data, "_made": None}  # each process makes its own

    @property
    def label_in_messages(self) -> str:
        """The user's name for the collate function."""
        return self.data.collate.label if self.data.collate is not None else ""
