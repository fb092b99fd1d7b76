"""A `ray.data.Dataset` is computed once, in its order, and read by index; what has no order is refused."""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import Any

import pyarrow
import pytest
import torch

import raypar
from raypar.data.ray_rows import RayRows, read_ray_rows
from raypar.errors import InputError
from raypar.worker.data.user_dataset import content_digest
from raypar.worker.job_preflight import preflight

SAMPLES = [{"x": [i / 7, 1.0], "y": [i % 3 / 3], "name": f"{i}"} for i in range(20)]


class Iterating:
    """What is used of iterators over a data set of Ray Data."""

    def __init__(self, samples: list[dict[str, Any]], block: int) -> None:
        self.samples, self.block, self.given = samples, block, 0
        self.context = types.SimpleNamespace(execution_options=types.SimpleNamespace(preserve_order=False))

    def iter_batches(self, *, batch_size: int | None, batch_format: str) -> Iterator[pyarrow.Table]:
        assert self.context.execution_options.preserve_order and (batch_size, batch_format) == (None, "pyarrow")
        for start in range(0, len(self.samples), self.block):
            self.given += 1
            yield pyarrow.Table.from_pylist(self.samples[start : start + self.block])


class Dataset(Iterating):
    """What is used of `ray.data.Dataset`."""

    files = False

    def streaming_split(self) -> None: ...

    def has_serializable_lineage(self) -> bool:
        return self.files

    def serialize_lineage(self) -> bytes:
        return b""

    def schema(self) -> Any:
        return pyarrow.Table.from_pylist(self.samples).schema


def job(data: Any) -> Any:
    settings: dict[str, Any] = {"loss": torch.nn.functional.mse_loss, "steps": 1, "batch_size": 4, "microbatches": 2}
    return raypar.Trainer(model=lambda: torch.nn.Sequential(torch.nn.Linear(2, 1)), data=data, **settings).job


def test_its_rows_are_samples_in_its_order_and_its_settings_stay():
    given = Dataset(SAMPLES, 7)
    rows = job(given).data.call()
    assert isinstance(rows, RayRows) and [rows[index] for index in range(len(rows))] == SAMPLES
    assert given.context.execution_options.preserve_order is False
    assert preflight(job({"function": Dataset(SAMPLES, 7), "shuffle": False})).samples == 20


def test_rows_that_have_changed_are_found_at_a_resume_however_they_are_cut_into_blocks():
    digests = [content_digest(read_ray_rows(Dataset(SAMPLES, block), "data")) for block in (7, 3, 20)]
    other = content_digest(read_ray_rows(Dataset([*SAMPLES[:-1], {**SAMPLES[-1], "y": [9.0]}], 7), "data"))
    assert len(set(digests)) == 1 and digests[0] is not None and other not in digests


def test_what_cannot_be_held_in_order_is_refused(monkeypatch: pytest.MonkeyPatch):
    for form in (Iterating(SAMPLES, 7), {"function": Iterating(SAMPLES, 7)}):
        with pytest.raises(
            InputError, match=r"data is an Iterating, of streaming_split or Ray Train: it guarantees no order.*\n  cu"
        ):
            job(form)
    with pytest.raises(InputError, match=r"data is a ray\.data\.Dataset without rows"):
        job(Dataset([], 7))
    with pytest.raises(InputError, match=r"of Ray Data dataset.take_all\(\) is one; or write_parquet"):
        preflight(job(lambda: Dataset(SAMPLES, 7)))
    monkeypatch.setattr("raypar.data.ray_rows.MOST_BYTES", 200)
    with pytest.raises(
        InputError, match=r"not of files alone \(from_items, .*: nobody could compute its rows again after a fail.*\n  cure: w"
    ):
        job(given := Dataset(SAMPLES, 2))  # too large to be held
    assert given.given < 5 and not given.context.execution_options.preserve_order
