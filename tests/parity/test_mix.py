"""`data.mix`: sources in fixed ratios, each in an order of its own; a function of the step and the job alone."""

from __future__ import annotations

import itertools
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import reference
from helpers.optimizer_layouts import LAYERS, Points, compare_with_one_process, model
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

import raypar
from raypar.errors import ConfigError, InputError
from raypar.job.contract import contract_of_job
from raypar.job.read_job import parse_job
from raypar.plan import ParallelPlan
from raypar.worker.data.check_and_count_streams import resolve_streams
from raypar.worker.data.mixed_order import MixedOrder, largest_deficit_pattern, whole_shares
from raypar.worker.data.sample_order import SampleOrder
from raypar.worker.data.user_dataset import make_dataset
from raypar.worker.job_preflight import preflight
from raypar.worker.layer_graph_of_job import make_layer_graph

pytestmark = pytest.mark.part(4)

GIVEN: dict[str, Any] = {"model": model, "loss": torch.nn.functional.mse_loss, "steps": 6, "batch_size": 8, "microbatches": 4}


class Noisy:
    """Other samples than those of `Points`, with noise that the generators give."""

    def __init__(self, size: int = 7) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x, y = Points()[index]
        return x + torch.rand(x.shape), y - index


MIX = [
    {"function": Points, "ratio": 3},
    {"function": Noisy, "ratio": 1},
    {"function": Noisy, "args": {"size": 5}, "ratio": 0.5},
]


def job(mix: Any = MIX, **more: Any) -> Any:
    return raypar.Trainer(**(GIVEN | {"data": {"mix": mix, **more.pop("data", {})}} | more)).job


def ids(order: Any, start: int, stop: int) -> list[tuple[int, int]]:
    assert isinstance(order, MixedOrder)
    return order.ids(start, stop)


def test_the_source_that_lacks_most_of_its_share_comes_next():
    assert largest_deficit_pattern([3, 1]) == [0, 0, 1, 0]
    assert largest_deficit_pattern([2, 1, 1]) == [0, 1, 2, 0]
    assert whole_shares([0.7, 0.3]) == [7, 3] and whole_shares([6, 2.0]) == [3, 1] and whole_shares([0.125, 1]) == [1, 8]
    for shares in itertools.product((1, 2, 3, 7, 20), repeat=3):
        pattern = largest_deficit_pattern(shares)
        assert [pattern.count(source) for source in range(3)] == list(shares)
        for place in range(len(pattern) + 1):
            for source in range(3):
                assert abs(pattern[:place].count(source) - place * shares[source] / sum(shares)) < 1


@pytest.mark.parametrize("shuffle", [True, False, "indexed"])
def test_any_positions_are_computed_without_those_before_them(shuffle: Any):
    spec = job(data={"shuffle": shuffle})
    sizes = [len(source.call()) for source in spec.data.mix]
    want = [reference.mixed_id(spec, sizes, position) for position in range(150)]  # three epochs of each source
    for start, stop in ((0, 150), (149, 150), (37, 37), (120, 131), (5, 6)):
        assert ids(SampleOrder.of_job(spec, make_dataset(spec.data)), start, stop) == want[start:stop]
    far = ids(SampleOrder.of_job(spec, make_dataset(spec.data)), 10**12, 10**12 + 9)
    assert [sum(index >= end for end in (sizes[0], sizes[0] + sizes[1])) for _, index in far].count(0) == 6


def test_every_epoch_of_a_source_has_each_of_its_samples_once_in_an_order_of_its_own():
    spec = job()
    found = ids(SampleOrder.of_job(spec, make_dataset(spec.data)), 0, 9 * 5 * 7 * len(Points()))
    sizes = [len(source.call()) for source in spec.data.mix]
    for source, size in enumerate(sizes):
        first = sum(sizes[:source])
        own = [(epoch, index - first) for epoch, index in found if first <= index < first + size]
        whole = own[: len(own) // size * size]
        assert set(Counter(whole).values()) == {1} and [epoch for epoch, _ in whole] == sorted(epoch for epoch, _ in whole)
        assert len(whole) > 4 * size and whole[:size] != whole[size : 2 * size]
    assert Counter(sum(index >= end for end in itertools.accumulate(sizes)) for _, index in found[:90]) == {0: 60, 1: 20, 2: 10}


@pytest.mark.parametrize("data", [{}, {"shuffle": "indexed"}])
def test_two_stages_and_two_replicas_have_the_samples_and_bits_of_one_process(data: dict[str, Any]):
    spec = job(data=data)
    graph = make_layer_graph(spec)
    checked = preflight(spec)
    assert checked.samples == len(Points()) + 12
    assert compare_with_one_process(spec, graph, ParallelPlan.mesh(pp=2, dp=2, layers=LAYERS)) == "equal"


def test_ratios_sources_and_their_sizes_are_part_of_the_job():
    def contract(mix: Any) -> Any:
        return contract_of_job(job(mix))["data"]

    assert contract(MIX)["mix"][2] == {"function": "Noisy", "args": {"size": 5}, "ratio": 0.5}
    others = [{**MIX[0], "ratio": 2}, MIX[1], MIX[2]], MIX[:2], [MIX[1], MIX[0], MIX[2]]
    assert all(contract(other) != contract(MIX) for other in others)

    def digest(first: int, second: int) -> str | None:
        sources = [{"function": Noisy, "args": {"size": size}, "ratio": 1} for size in (first, second)]
        return preflight(job(sources)).data_digest

    assert digest(5, 7) == digest(5, 7) != digest(7, 5)


def test_a_mixture_from_a_job_file_and_from_objects(tmp_path: Path):
    text = "steps: 1\nbatch_size: 2\nmicrobatches: 1\nmodel: m:f\nloss: m:l\ndata:\n  shuffle: indexed\n"
    text += "  mix: [{parquet: a.parquet, ratio: 3}, {function: m:d, args: {n: 2}, ratio: 0.5}]\n"
    spec = parse_job(text)
    assert parse_job(spec.to_yaml()) == spec and spec.data.mix[0].args == {"files": ("a.parquet",)}
    pairs = [Points()[index] for index in range(4)]
    made = make_dataset(job([{"function": pairs, "ratio": 1}, {"function": (Noisy, {"size": 3}), "ratio": 1}]).data)
    assert len(made) == 7 and made[3] is pairs[3]


class Asked(Points):
    """Says what a random order costs, which it has to find out."""

    asked = 0

    @property
    def line_about_random_order(self) -> str:
        Asked.asked += 1
        return "a random order costs something"


def test_what_a_random_order_of_a_source_costs_is_told_once_and_not_asked_by_workers():
    spec = job([{"function": Noisy, "ratio": 1}, {"function": Asked, "ratio": 1}])
    make_dataset(spec.data)
    assert Asked.asked == 0
    assert resolve_streams(spec).notes == ("a random order costs something",) and Asked.asked == 1


class Stream(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(9))


def broken() -> Any:
    raise OSError("no disk")


@pytest.mark.parametrize(
    ("given", "what"),
    [
        ({"mix": MIX[:1]}, "data.mix has one source | give its keys in data itself"),
        ({"mix": [{**MIX[0], "ratio": 0}, MIX[1]]}, "data.mix.0.ratio: expected greater than 0, got 0"),
        ({"mix": [{**MIX[0], "ratio": -1.5}, MIX[1]]}, "data.mix.0.ratio: expected greater than 0, got -1.5"),
        ({"mix": [{"function": Points}, MIX[1]]}, "data.mix.0.ratio is missing"),
        ({"mix": [{**MIX[0], "ratio": 0.123456789}, MIX[1]]}, "so many samples in turn repeat after"),
        (
            {"mix": [{**MIX[0], "ratio": 1e-300}, MIX[1]]},
            "has the ratios 1e-300, 1: so many samples in turn repeat after 10^300",
        ),
        ({"mix": MIX, "sampler": Noisy}, "data has mix and sampler: a mixture has no epochs"),
        ({"mix": MIX, "drop_last": True}, "data has mix and drop_last"),
        ({"mix": MIX, "args": {"n": 1}}, "data has mix and args | give args to the sources"),
        ({"mix": MIX, "function": Points}, "are given together, and either of them is the data set"),
        (
            {"mix": [MIX[0], {"function": Stream, "ratio": 1}]},
            "data.mix.1 Stream is a Stream, which is iterable, and data.mix.0 Points is not",
        ),
        ({"mix": [MIX[0], {"function": Noisy, "args": {"size": 0}, "ratio": 1}]}, "data.mix.1 Noisy is empty"),
        (
            {"mix": [MIX[0], {"function": lambda: DataLoader(Noisy()), "ratio": 1}]},
            "is a DataLoader, whose batches have samples",
        ),
        ({"mix": [MIX[0], {"function": Noisy, "args": {"sizes": 0}, "ratio": 1}]}, "data.mix.1.args.sizes: Noisy has no such"),
    ],
)
def test_what_cannot_be_mixed_is_refused_before_the_run(given: dict[str, Any], what: str):
    with pytest.raises(InputError) as found:
        preflight(raypar.Trainer(**GIVEN, data=given).job)
    assert what in str(found.value).replace("\n  cure: ", " | ")
    assert str(found.value).count("\n") == 1


def test_epochs_of_a_mixture_are_refused():
    with pytest.raises(ConfigError, match=r"epochs is 2, and data\.mix has sources that end at different places\n  cure: set"):
        job(steps=None, epochs=2)
