"""Orders that the user names, `data.sampler`, `weights` and `group_by`: the same ids on every reader, or an error."""

import itertools
import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy
import pytest
import torch
from helpers import reference
from helpers.optimizer_layouts import LAYERS, Points, compare_with_one_process, model
from torch.utils.data import BatchSampler, RandomSampler, Sampler, SequentialSampler, SubsetRandomSampler, WeightedRandomSampler

import raypar
from raypar.data.lengths import of_field
from raypar.errors import ConfigError, DataError, UserCodeError
from raypar.job import DataConfig
from raypar.job.contract import contract_of_job
from raypar.launch.steps_of_epochs import with_steps_of_epochs
from raypar.plan import ParallelPlan
from raypar.worker.data.sample_order import SampleOrder
from raypar.worker.data.sampler_weights_group_by import make_epoch_sampler
from raypar.worker.job_preflight import preflight
from raypar.worker.layer_graph_of_job import make_layer_graph
from raypar.worker.run_in_one_process import OneProcessRun

pytestmark = pytest.mark.part(4)

SIZE = len(Points())


def drawn(dataset: Any, epoch: int) -> list[int]:
    """Draws from all three generators."""
    first = random.randrange(len(dataset))
    return [first, *numpy.random.permutation(len(dataset)).tolist(), epoch % len(dataset), *torch.randperm(10).tolist()]


def odd_ones_twice(dataset: Any) -> list[float]:
    return [1.0 + index % 2 for index in range(len(dataset))]


def lengths(dataset: Any) -> list[int]:
    return [3 * index % 7 for index in range(len(dataset))]


class ByEpoch(Sampler[int]):
    """As a `DistributedSampler`: seeded by `set_epoch`."""

    def __init__(self, data_source: Any, step: int = 3) -> None:
        self.size, self.step, self.epoch = len(data_source), step, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter([(index * self.step + self.epoch) % self.size for index in range(self.size)])


def ids(epoch: int, **data: Any) -> list[int]:
    """Of an epoch, as raypar draws them."""
    made = raypar.Trainer(**GIVEN, data={"function": Points, **data}).job
    sampler = make_epoch_sampler(made, Points())
    assert sampler is not None
    return sampler.ids(epoch).tolist()


GIVEN: dict[str, Any] = {"model": model, "loss": torch.nn.functional.mse_loss, "steps": 6, "batch_size": 8, "microbatches": 4}

ORDERS: dict[str, dict[str, Any]] = {
    "sampler": {"sampler": drawn},
    "sampler, whole batches": {"sampler": drawn, "drop_last": True},
    "weights": {"weights": odd_ones_twice},
    "weights, each once": {"weights": {"function": odd_ones_twice, "replacement": False}},
    "group_by": {"group_by": lengths},
}


@pytest.mark.parametrize("what", ORDERS)
def test_two_stages_and_two_replicas_have_the_samples_and_bits_of_one_process(what: str):
    spec = raypar.Trainer(**GIVEN, data={"function": Points, **ORDERS[what]}).job
    graph = make_layer_graph(spec)
    preflight(spec)
    assert compare_with_one_process(spec, graph, ParallelPlan.mesh(pp=2, dp=2, layers=LAYERS)) == "equal"


@pytest.mark.parametrize("what", ORDERS)
def test_an_epoch_is_a_function_of_its_number_whatever_was_asked_before(what: str):
    spec = raypar.Trainer(**GIVEN, data={"function": Points, **ORDERS[what]}).job
    order, length = SampleOrder.of_job(spec, Points()), SampleOrder.of_job(spec, Points()).epoch_length
    stream = order.ids(0, 6 * length)
    for start in (3 * length + 2, 0, length - 1, 4 * length, 2 * length - 3):
        torch.manual_seed(start)  # what others have drawn
        again = SampleOrder.of_job(spec, Points()).ids(start, start + 7)
        assert again == order.ids(start, start + 7) == stream[start : start + 7]
    epochs = {tuple(index for epoch, index in stream if epoch == each) for each in range(6)}
    assert len(epochs) == 6 and all(len(each) == length for each in epochs)


def test_drawing_leaves_the_generators_of_the_process_alone():
    before = torch.get_rng_state(), random.getstate()
    ids(0, sampler=drawn)
    assert torch.equal(torch.get_rng_state(), before[0]) and random.getstate() == before[1]


SAMPLERS_OF_TORCH: dict[str, Any] = {
    "class": (RandomSampler, {}),
    "class by name": ("torch.utils.data:RandomSampler", {"replacement": True, "num_samples": 11}),
    "in sequence": SequentialSampler,
    "without a data set": (SubsetRandomSampler, {"indices": [3, 5, 7, 11]}),
    "weighted": (WeightedRandomSampler, {"weights": [1.0, 2.0, 0.5], "num_samples": 40}),
    "with set_epoch": (ByEpoch, {"step": 4}),
}


@pytest.mark.parametrize("what", SAMPLERS_OF_TORCH)
def test_samplers_of_torch_are_made_of_the_data_set_and_seeded_by_the_epoch(what: str):
    given = SAMPLERS_OF_TORCH[what]
    function, args = given if isinstance(given, tuple) else (given, {})
    kind = RandomSampler if isinstance(function, str) else function
    for epoch in (2, 0, 1):
        here = reference.seed_of(0, "sampler", epoch)
        torch.manual_seed(here)
        plain = kind(**args) if kind in (SubsetRandomSampler, WeightedRandomSampler) else kind(Points(), **args)
        if hasattr(plain, "set_epoch"):
            plain.set_epoch(epoch)
        assert ids(epoch, sampler=given) == list(plain)


def test_a_sampler_may_be_the_object_and_ids_and_weights_a_tensor():
    source = Points()
    assert ids(3, sampler=ByEpoch(source)) == ids(3, sampler=ByEpoch)
    assert ids(0, sampler=RandomSampler(source)) == ids(0, sampler=RandomSampler) != ids(1, sampler=RandomSampler(source))
    assert ids(5, sampler=torch.arange(4)) == [0, 1, 2, 3]
    weights = torch.zeros(SIZE)
    weights[7] = 1.0
    assert set(ids(2, weights=weights)) == {7}
    assert ids(2, group_by=torch.tensor(lengths(source))) == ids(2, group_by=lengths)


def test_weights_draw_as_the_sampler_of_torch_does():
    weights = odd_ones_twice(Points())
    generator = torch.Generator().manual_seed(reference.seed_of(0, "sampler", 4))
    assert ids(4, weights=odd_ones_twice) == list(WeightedRandomSampler(weights, SIZE, generator=generator))
    counts = Counter(itertools.chain.from_iterable(ids(epoch, weights=odd_ones_twice) for epoch in range(300)))
    odd = sum(count for index, count in counts.items() if index % 2)
    assert abs(odd / (300 * SIZE) - 28 / 43) < 0.02


def test_batches_of_grouped_samples_have_similar_lengths_and_every_sample_once():
    class Texts:
        def __len__(self) -> int:
            return 1000

        def __getitem__(self, index: int) -> dict[str, Any]:
            return {"ids": [1] * (1 + 37 * index % 101), "n": index}

    spec = raypar.Trainer(**GIVEN, data={"function": Texts, "group_by": (of_field, {"field": "ids"})}).job
    sampler, sizes = make_epoch_sampler(spec, Texts()), of_field(Texts(), "ids")
    assert sampler is not None
    order = sampler.ids(0).tolist()
    assert sorted(order) == list(range(1000)) and sizes[order[0]] == max(sizes)
    spread = [max(sizes[i] for i in order[at : at + 8]) - min(sizes[i] for i in order[at : at + 8]) for at in range(8, 1000, 8)]
    assert sorted(spread)[len(spread) * 9 // 10] <= 8, "of 100"
    assert of_field(Texts(), "n")[5] == 5 and of_field([(1, torch.ones(4))], 1) == [4]


def test_the_length_of_a_field_is_asked_for_by_the_name_that_the_field_has_in_a_batch():
    nested = [{"inputs": {"ids": [1] * n, "more": (torch.ones(2), torch.ones(n + 1))}, "a.b": [0]} for n in (3, 5)]
    assert of_field(nested, "inputs.ids") == [3, 5] and of_field(nested, "inputs.more.1") == [4, 6]
    assert of_field(nested, "a.b") == [1, 1] and of_field([(torch.ones(4), {"ids": [1, 2]})], "y.ids") == [2]
    with pytest.raises(KeyError, match="items"):
        of_field(nested, "inputs.items")


class Broken:
    def __call__(self, dataset: Any, epoch: int) -> list[int]:
        raise OSError("no such disk")


class OfData(RandomSampler):
    def __init__(self, data: Any) -> None:
        super().__init__(data)


class OfItsOwn:
    """A generator of its own."""

    dice = random.Random(4)

    def __call__(self, dataset: Any, epoch: int) -> list[int]:
        return self.dice.sample(range(len(dataset)), len(dataset))


REFUSED: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "raises": ({"sampler": Broken()}, UserCodeError, r"data.sampler .*Broken.* raised OSError: no such disk\n  in epoch 0"),
    "by chance": ({"sampler": OfItsOwn()}, DataError, r"called twice for epoch 0 under the same seed, gave other ids"),
    "too large": (
        {"sampler": lambda dataset, epoch: [0, 1, 29]},
        DataError,
        r"gave id 29 \(number 2 of epoch 0\), and the data set has 29 samples, 0 to 28",
    ),
    "negative": ({"sampler": lambda dataset, epoch: [-1]}, DataError, r"gave id -1 \(number 0 of epoch 0\)"),
    "another length": (
        {"sampler": lambda dataset, epoch: range(10 + epoch)},
        DataError,
        r"gave 11 ids in epoch 1, and 10 in epoch 0",
    ),
    "none": ({"sampler": lambda dataset, epoch: []}, DataError, r"gave \[0\] numbers of torch.float32, no ids of samples"),
    "no list": ({"sampler": lambda dataset, epoch: 3}, DataError, r"gave an int, no ids of samples"),
    "floats": ({"sampler": lambda dataset, epoch: [0.5]}, DataError, r"gave \[1\] numbers of torch.float32"),
    "a mask": ({"sampler": lambda dataset, epoch: torch.ones(29) > 0}, DataError, r"gave \[29\] numbers of torch.bool"),
    "texts": ({"sampler": lambda dataset, epoch: ["a"]}, DataError, r"gave a list of other things"),
    "batches": (
        {"sampler": (BatchSampler, {"sampler": range(9), "batch_size": 3, "drop_last": False})},
        DataError,
        "batches of ids",
    ),
    "lacks an argument": ({"sampler": SubsetRandomSampler}, ConfigError, r"data.sampler.args lacks indices"),
    "a class with another name for the data set": (
        {"sampler": OfData},
        ConfigError,
        r"args lacks data, which .*\n  cure: a class gets the data set as its parameter `dataset` or `data_source`, and",
    ),
    "weights: too few": ({"weights": lambda dataset: [1.0]}, DataError, r"gave \[1\] weights for 29 samples"),
    "weights: negative": ({"weights": lambda dataset: [-1.0] * 29}, DataError, r"gave sample 0 the weight -1.0"),
    "weights: all 0": ({"weights": lambda dataset: [0.0] * 29}, DataError, r"gave 0 of 29 samples a weight above 0"),
    "weights: 0 without replacement": (
        {"weights": {"function": lambda dataset: [0.0, *[1.0] * 28], "replacement": False}},
        DataError,
        r"gave 28 of 29 samples a weight above 0, and an epoch draws 29 without replacement",
    ),
    "weights: raise": ({"weights": lambda dataset: 1 / 0}, UserCodeError, r"data.weights .* raised ZeroDivisionError"),
    "lengths: too few": ({"group_by": lambda dataset: [1]}, DataError, r"gave \[1\] lengths for 29 samples"),
    "lengths: fractions": (
        {"group_by": lambda dataset: [1.0] * 7 + [0.3] * 22},
        DataError,
        r"gave sample 7 the length 0.3\n  cure: give whole numbers",
    ),
    "lengths: no number": ({"group_by": lambda dataset: [float("nan")] * 29}, DataError, r"gave sample 0 the length nan"),
    "lengths: no field": ({"group_by": (of_field, {"field": "ids"})}, UserCodeError, r"data.group_by .*of_field raised"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_gives_no_order_is_refused_before_the_run(what: str):
    data, kind, says = REFUSED[what]
    with pytest.raises(kind, match=says):
        preflight(raypar.Trainer(**GIVEN, data={"function": Points, **data}).job)


def test_an_endless_sampler_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("raypar.worker.data.sampler_weights_group_by.MOST_IDS", 100)
    with pytest.raises(DataError, match="gave more than 290 ids in an epoch, no ids"):
        ids(0, sampler=lambda dataset, epoch: itertools.cycle([1, 2]))


def test_there_is_one_order():
    for data in (
        {"sampler": drawn, "shuffle": False},
        {"sampler": drawn, "weights": odd_ones_twice},
        {"group_by": lengths, "shuffle": "indexed"},
    ):
        with pytest.raises(ConfigError, match=r"data has \w+ and \w+, and each of them is the order of an epoch"):
            DataConfig(function=Points, **data)


def test_readers_with_other_ids_find_it_in_the_step_itself_and_no_parameter_changes():
    spec = raypar.Trainer(**GIVEN, data={"function": Points, "sampler": drawn}).job
    plan = ParallelPlan.mesh(pp=2, dp=2, layers=LAYERS)
    with OneProcessRun(spec, plan, "1f1b") as run:
        run.step(0)
        before = {name: [copy.clone() for copy in copies] for name, copies in run.parameters().items()}
        loader = run.cores[3].loader
        assert loader is not None and loader._order.sampler is not None
        loader._order.sampler._kept.clear()
        loader._order.sampler.draw = lambda epoch, seed: [*range(SIZE), *range(12)]
        with pytest.raises(
            DataError, match=r"step 2: the sampler of `data` gave .*stage 1, replica 1.* other ids than .*stage 0, replica 0"
        ):
            run.step(1)
        assert all(
            torch.equal(a, b) for name, copies in run.parameters().items() for a, b in zip(copies, before[name], strict=True)
        )


def test_a_vote_says_nothing_of_the_order_where_the_job_names_none():
    sizes = []
    for data in ({}, {"sampler": drawn}):
        spec = raypar.Trainer(**GIVEN, data={"function": Points, **data}).job
        with OneProcessRun(spec, ParallelPlan.mesh(layers=LAYERS), "1f1b") as run:
            run.step(0)
            commit = run.cores[0].step_commit
            ballot, _ = commit._ballot(commit._settled)
            assert (ballot.workers, ballot.counts.rounded()) == (1, commit.outcome.count)
            sizes.append(len(ballot.orders))
    assert sizes == [0, 1]


def test_epochs_are_those_of_the_sampler():
    given = {key: value for key, value in GIVEN.items() if key != "steps"}
    for data, steps in (
        ({"sampler": drawn}, 11),
        ({"sampler": drawn, "drop_last": True}, 10),
        ({"weights": odd_ones_twice}, 8),
    ):
        spec = raypar.Trainer(**given, data={"function": Points, **data}, epochs=2).job
        assert with_steps_of_epochs(spec, lambda event: None).steps == steps, data


def test_the_order_is_in_the_contract_where_it_is_set():
    def held(**data: Any) -> Any:
        return contract_of_job(raypar.Trainer(**GIVEN, data={"function": "m:d", **data}).job)["data"]

    assert held() == {"function": "m:d", "args": {}, "input": None, "target": None, "names": []}
    assert held(sampler="m:s")["sampler"] == {"function": "m:s", "args": {}}
    assert held(weights={"function": "m:w", "replacement": False})["weights"] == {
        "function": "m:w",
        "args": {},
        "replacement": False,
    }
    assert held(group_by=("m:l", {"field": "x"}))["group_by"] == {"function": "m:l", "args": {"field": "x"}}


def test_an_iterable_data_set_has_no_ids_to_name():
    class Endless(torch.utils.data.IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            return iter([Points()[0]] * 64)

    for data in ({"sampler": drawn}, {"weights": odd_ones_twice}, {"group_by": lengths}):
        with pytest.raises(ConfigError, match=rf"data.{next(iter(data))} is given, and data set .*Endless is iterable"):
            preflight(raypar.Trainer(**GIVEN, data={"function": Endless, **data}).job)
