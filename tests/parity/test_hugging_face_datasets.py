"""A `datasets.Dataset` is read as any other map-style set, by lists of ids where that gives the same samples."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest
import torch
from helpers.ragged import Reader, Sentences, longest, next_word

import raypar
from raypar.errors import UserCodeError
from raypar.job import DataConfig
from raypar.worker.data.sample_reader import SampleReader
from raypar.worker.job_preflight import preflight

ROWS = [Sentences()[index] for index in range(23)]
PLACES = [(0, 3), (0, 17), (1, 3)]


class Dataset:
    """What raypar uses of `datasets.Dataset`."""

    def __init__(self, kind: str | None = None) -> None:
        self.format, self.lists, self.single = {"type": kind}, 0, 0

    def __len__(self) -> int:
        return len(ROWS)

    def __getitem__(self, index: int) -> Any:
        self.single += 1
        return ROWS[index] | {"draw": torch.rand(())}

    def __getitems__(self, ids: list[int]) -> list[Any]:
        self.lists += 1
        return [ROWS[index] | {"draw": torch.zeros(())} for index in ids]


def reader(dataset: Any, *fields: str) -> SampleReader:
    return SampleReader.of(dataset, DataConfig(function=Sentences, collate=longest if "mask" in fields else None), 3, fields)


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in = types.ModuleType("datasets")
    stand_in.Dataset = Dataset  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", stand_in)


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize(("kind", "lists"), [(None, 1), ("python", 1), ("numpy", 0), ("torch", 0), ("custom", 0)])
def test_ids_are_read_in_one_list_where_no_format_or_transform_is_set(kind: str | None, lists: int):
    dataset = Dataset(kind)
    found = reader(dataset, "ids", "mask").read(PLACES)
    assert (dataset.lists, dataset.single) == (lists, 0 if lists else 3)
    assert found["ids"][0].tolist()[: len(ROWS[3]["ids"])] == ROWS[3]["ids"]


def test_other_sets_with_such_a_method_are_read_one_by_one_and_seeded(library: None):
    other = type(
        "Other", (), {name: getattr(Dataset, name) for name in ("__init__", "__len__", "__getitem__", "__getitems__")}
    )()
    found = reader(other, "draw").read(PLACES)["draw"]
    assert other.lists == 0 and len(set(found.tolist())) == 3
    assert torch.equal(reader(other, "draw").read(PLACES[::-1])["draw"], found.flip(0))


def test_a_class_with_samples_of_its_own_is_read_one_by_one_and_seeded(library: None):
    class Augmented(Dataset):
        def __getitem__(self, index: int) -> Any:
            return super().__getitem__(index) | {"ids": [1, 2, 3]}

    dataset = Augmented()
    found = reader(dataset, "ids", "draw").read(PLACES)
    assert (dataset.lists, dataset.single) == (0, 3) and found["ids"].tolist() == [[1, 2, 3]] * 3
    assert torch.equal(found["draw"][1:2], reader(dataset, "draw").read(PLACES[1:2])["draw"])


def test_a_sample_that_cannot_be_read_is_named(library: None):
    class Broken(Dataset):
        def __getitems__(self, ids: list[int]) -> list[Any]:
            raise OSError("a shard is gone")

        def __getitem__(self, index: int) -> Any:
            if index == 17:
                raise OSError("a shard is gone")
            return super().__getitem__(index)

    with pytest.raises(UserCodeError, match=r"sample 17 \(epoch 0\): the data set raised OSError: a shard is gone"):
        reader(Broken(), "draw").read(PLACES)


def real() -> Any:
    import datasets

    return datasets.Dataset.from_list([{name: row[name] for name in ("ids", "labels", "title")} for row in ROWS])


def test_the_library_gives_the_same_samples_by_list():
    dataset = real()
    assert dataset.__getitems__([3, 17, 3]) == [dataset[index] for index in (3, 17, 3)] == [ROWS[index] for index in (3, 17, 3)]
    kept = dataset.with_transform(lambda rows: rows)
    assert (
        dataset.format["type"] is None
        and kept.format["type"] == "custom"
        and dataset.with_format("torch").format["type"] == "torch"
    )


def test_a_job_takes_it_with_a_collate_function_or_padding():
    for more in ({"collate": longest}, {"pad": {"multiple": 4}}):
        trainer = raypar.Trainer(
            model=Reader
            if "collate" in more
            else lambda: torch.nn.Sequential(torch.nn.Embedding(40, 8), torch.nn.Linear(8, 40)),
            loss=next_word,
            data={"function": real(), "input": "ids", "target": "labels", **more},
            steps=1,
            batch_size=8,
            microbatches=2,
        )
        assert preflight(trainer.job).samples == 23
