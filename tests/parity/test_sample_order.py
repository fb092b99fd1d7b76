"""Order is a pure function of the job: shuffled, in sequence, computed by index, with or without the last part of a batch."""

import time
import tracemalloc
from collections import Counter
from typing import Any

import numpy
import pytest
import torch
from helpers import reference

import raypar
from raypar.errors import ConfigError, DataError
from raypar.job import Job
from raypar.job.contract import contract_of_job
from raypar.plan.seeds import seed_of
from raypar.worker.data.indexed_permutation import permuted
from raypar.worker.data.sample_order import SampleOrder
from raypar.worker.job_preflight import preflight
from raypar.worker.measure_profile import read_microbatches_of_steps

BILLION = 10**9


def entries(size: int, key: int) -> list[int]:
    return permuted(numpy.arange(size), size, key).tolist()


@pytest.mark.ci
@pytest.mark.parametrize("first", range(0, 2000, 500))
def test_the_indexed_order_is_a_permutation_of_every_size(first: int):
    for size in range(first + 1, first + 501):
        assert sorted(entries(size, 7 * size)) == list(range(size)), size


def test_it_is_one_of_a_million_and_without_repetition_in_a_window_of_a_billion():
    found = permuted(numpy.arange(10**6), 10**6, 3)
    assert len(numpy.unique(found)) == 10**6 and found.min() == 0 and found.max() == 10**6 - 1
    window = permuted(numpy.arange(123_456_789, 123_456_789 + 200_000), BILLION, 3)
    assert len(numpy.unique(window)) == 200_000 and window.min() >= 0 and window.max() < BILLION


def test_it_is_what_the_contract_says_one_number_at_a_time():
    for size in (1, 2, 3, 10, 97, 4096, BILLION, 2**53):
        places = sorted({0, 1, size // 3, size - 1} & set(range(min(size, 10))) | {size // 3, size - 1})
        here = permuted(numpy.array(places), size, seed_of(1, "epoch", 2)).tolist()
        assert here == [reference.permuted_index(place, size, seed_of(1, "epoch", 2)) for place in places], size


def chi_square(counts: Any, expected: float) -> float:
    return float(((numpy.asarray(counts) - expected) ** 2 / expected).sum())


@pytest.mark.ci
def test_entries_are_spread_evenly_and_depend_on_the_epoch():
    """Each statistic has about as many degrees of freedom as cells: twice that is far outside of chance."""
    keys = [seed_of(5, "epoch", epoch) for epoch in range(2000)]
    by_key = numpy.stack([permuted(numpy.arange(10), 10, key) for key in keys])
    for place in range(10):  # which sample comes at each place
        assert chi_square(numpy.bincount(by_key[:, place], minlength=10), 200) < 30
    pairs = Counter(zip(by_key[:, 0].tolist(), by_key[:, 1].tolist(), strict=True))
    assert len(pairs) == 90 and chi_square(list(pairs.values()), 2000 / 90) < 180
    found = permuted(numpy.arange(BILLION // 2, BILLION // 2 + 100_000), BILLION, keys[0])
    assert chi_square(numpy.bincount(found * 64 // BILLION, minlength=64), 100_000 / 64) < 128
    steps = numpy.diff(found)
    assert abs((steps > 0).mean() - 0.5) < 0.01
    other = permuted(numpy.arange(BILLION // 2, BILLION // 2 + 100_000), BILLION, keys[1])
    assert (found == other).sum() <= 2 and abs(numpy.corrcoef(found, other)[0, 1]) < 0.02


def test_an_order_of_a_billion_takes_no_memory_and_no_time():
    order = SampleOrder(1, BILLION, "indexed")
    order.ids(0, 8)  # what is made once
    tracemalloc.start()
    start = time.process_time()
    order = SampleOrder(1, BILLION, "indexed")
    for step in range(20):
        assert len(order.ids(step * 512 + BILLION - 4096, (step + 1) * 512 + BILLION - 4096)) == 512
    took_s, (_, peak) = time.process_time() - start, tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2**20, peak
    assert took_s < 20 * 0.05, took_s


@pytest.mark.parametrize("size", [1, 2, 5, 13])
@pytest.mark.parametrize("shuffle", [True, False, "indexed"])
def test_every_epoch_has_every_sample_once(size: int, shuffle: Any):
    order = SampleOrder(3, size, shuffle)
    stream = order.ids(0, 5 * size)
    assert Counter(stream) == {(epoch, index): 1 for epoch in range(5) for index in range(size)}
    assert [place for start in range(0, 5 * size, 3) for place in order.ids(start, min(start + 3, 5 * size))] == stream
    if size == 13:
        by_epoch = {tuple(index for each, index in stream if each == epoch) for epoch in range(5)}
        assert len(by_epoch) == (5 if shuffle else 1)


@pytest.mark.parametrize("shuffle", [True, False, "indexed"])
def test_drop_last_ends_an_epoch_with_its_last_whole_batch(shuffle: Any):
    order, whole = SampleOrder(3, 13, shuffle, whole_batches_of=5), SampleOrder(3, 13, shuffle)
    assert order.epoch_length == 10
    assert order.ids(0, 25) == whole.ids(0, 10) + whole.ids(13, 23) + whole.ids(26, 31)
    with pytest.raises(DataError, match=r"13 samples for a batch_size of 14\n  cure: set batch_size <= 13"):
        SampleOrder(3, 13, shuffle, whole_batches_of=14)


class Drawn:
    """Samples with random numbers."""

    def __init__(self, size: int = 13) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"x": torch.rand(3) + index, "id": index}


GIVEN = {
    "model": lambda: torch.nn.Sequential(torch.nn.Linear(3, 2)),
    "loss": lambda output, target: (output.sum() * 0 + target.float().sum(), len(target)),
    "steps": 4,
    "batch_size": 5,
    "microbatches": 2,
}


def job(size: int = 13, **data: Any) -> Job:
    return raypar.Trainer(**GIVEN, data={"function": Drawn, "args": {"size": size}, "target": "id", **data}).job


ORDERS = [{}, {"shuffle": False}, {"shuffle": "indexed"}, {"drop_last": True}, {"shuffle": "indexed", "drop_last": True}]


@pytest.mark.parametrize("data", ORDERS, ids=str)
def test_microbatches_have_the_samples_of_the_reference(data: dict[str, Any]):
    spec, places = job(**data), [(0, 0), (2, 1), (1, 0), (3, 1)]
    found = read_microbatches_of_steps(spec, preflight(spec).graph, places)
    for (step, microbatch), batch in zip(places, found, strict=True):
        first, last = (step * 5 + (microbatch + more) * 5 // 2 for more in (0, 1))
        expected = reference.samples(Drawn(13), spec, first, last)
        assert all(torch.equal(value, expected[name]) for name, value in batch.items()), (step, microbatch)


def test_the_order_is_in_the_contract_where_it_is_set():
    held = [contract_of_job(job(**data))["data"] for data in ORDERS]
    assert "shuffle" not in held[0] and "drop_last" not in held[0]
    assert held[1]["shuffle"] is False and held[4]["shuffle"] == "indexed" and held[4]["drop_last"] is True
    assert contract_of_job(job(shuffle=True, drop_last=False)) == contract_of_job(job())


def test_validation_has_no_order_of_its_own():
    with pytest.raises(ConfigError, match="shuffle"):
        raypar.Trainer(**GIVEN, data=Drawn(), validation={"function": Drawn, "shuffle": False})


def test_a_large_data_set_is_told_of_the_indexed_order_once(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("raypar.worker.job_preflight.MANY_SAMPLES", 12)
    lines = [line for line in preflight(job()).notes if "data.shuffle: indexed" in line]
    assert len(lines) == 1 and lines[0].startswith("the data set has 13 samples, whose order is a list that every worker")
    assert not [line for line in preflight(job(shuffle="indexed")).notes if "data.shuffle" in line]
    assert not [line for line in preflight(job(shuffle=False)).notes if "data.shuffle" in line]
