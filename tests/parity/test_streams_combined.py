"""Streams with shards, padding, collation and validation: as a map-style data set that has the same samples in their order."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
import torch
from helpers import ragged, reference
from helpers.captured_jobs import graph_of
from helpers.stream_cases import part

from raypar.job import DataConfig, FunctionConfig, Job, LossConfig, ModelConfig, OptimizerConfig, PadConfig, ValidationConfig
from raypar.plan import ParallelPlan
from raypar.worker.data.check_and_count_streams import resolve_streams
from raypar.worker.run_in_one_process import OneProcessRun

pytestmark = pytest.mark.part(5)

STEPS, SIZE, CHECKED = 4, 23, 7


def sentences() -> Iterator[dict[str, Any]]:
    """Of unequal length, divided by worker."""
    for index in part(SIZE):
        yield ragged.Masked(SIZE)[index]


class Titled(torch.utils.data.IterableDataset[dict[str, Any]]):
    """With titles, which only a collate function takes; in another order in each epoch."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[dict[str, Any]]:
        numbers = list(part(SIZE))
        return (ragged.Sentences(SIZE)[index] for index in (numbers[::-1] if self.epoch % 2 else numbers))


class Listed(list[Any]):
    """Samples in the order in which they are read."""


BATCHES: dict[str, tuple[Any, dict[str, Any]]] = {
    "a ladder": (sentences, {"pad": PadConfig(to=(4, 6, 9))}),
    "a multiple, a window": (sentences, {"pad": PadConfig(multiple=4), "shuffle_window": 5}),
    "a collate function that draws": (Titled, {"collate": FunctionConfig(function=ragged.noisy)}),
    "a collate class, a window, two streams": (
        Titled,
        {"collate": FunctionConfig(function=ragged.Noisy, args={"share": 0.5}), "shuffle_window": 4, "streams": 2},
    ),
}
PLANS: dict[str, dict[str, int]] = {
    "1 worker": {},
    "2 stages x 2 replicas": {"pp": 2, "dp": 2},
    "3 stages": {"pp": 3},
    "2 shards": {"tp": 2},
    "4 replicas": {"dp": 4},
    "2 stages x 2 shards": {"pp": 2, "tp": 2},
}


def job(source: Any, **data: Any) -> Job:
    checked = {key: value for key, value in data.items() if key in ("pad", "collate")}
    spec = Job(
        name="combined",
        seed=3,
        steps=STEPS,
        batch_size=10,
        microbatches=4,
        model=ModelConfig(function=ragged.Plain),
        loss=LossConfig(function=ragged.next_word),
        data=DataConfig(function=source, target="labels", **data),
        validation=ValidationConfig(function=source, samples=CHECKED, **checked),
        optimizer=OptimizerConfig(function="torch.optim:AdamW", args={"lr": 1e-2}),
    )
    return resolve_streams(spec).job


def on_map_style(spec: Job) -> Job:
    """The job with lists of the samples of its streams, in the order of steps and microbatches."""
    assert spec.data.streams is not None and spec.validation is not None
    streams, found = [reference.stream(spec, number) for number in range(spec.data.streams)], Listed()
    for _ in range(STEPS):
        for microbatch in range(spec.microbatches):
            stream = streams[microbatch % len(streams)]
            found += [next(stream)[1] for _ in spec.batching.samples(microbatch)]
    plain = spec.replace(data=spec.data.replace(shuffle_window=0, function=spec.validation.function, streams=1))
    first = reference.stream(plain, 0)
    checked = Listed(next(first)[1] for _ in range(CHECKED))
    data = spec.data.replace(function=lambda: found, streams=None, shuffle_window=0, shuffle=False)
    return spec.replace(data=data, validation=spec.validation.replace(function=lambda: checked, streams=None))


def trained(spec: Job, plan: dict[str, int]) -> tuple[list[float], list[float], dict[str, Any]]:
    graph = graph_of(spec)
    with OneProcessRun(spec, ParallelPlan.mesh(layers=len(graph.layers), **plan), "1f1b", graph=graph) as run:
        losses = [run.step(step)[0].loss for step in range(STEPS)]
        return (
            losses,
            [run.validate(0), run.validate(1)],
            {name: copies[0].clone() for name, copies in run.parameters().items()},
        )


QUICK = {
    ("a ladder", "2 stages x 2 shards"),
    ("a multiple, a window", "2 stages x 2 replicas"),
    ("a collate function that draws", "2 stages x 2 replicas"),
    ("a collate class, a window, two streams", "2 stages x 2 shards"),
}
"""Those of the default suite: which samples a microbatch has does not depend on the plan."""


@pytest.mark.ci
@pytest.mark.parametrize(
    ("batch", "plan"),
    [pytest.param(*pair, marks=[pytest.mark.full] * (pair not in QUICK)) for pair in product(BATCHES, PLANS)],
)
def test_a_stream_trains_and_validates_as_a_list_of_its_samples(batch: str, plan: str):
    source, data = BATCHES[batch]
    spec = job(source, **data)
    losses, checked, parameters = trained(spec, PLANS[plan])
    want = trained(on_map_style(spec), PLANS[plan])
    assert losses == want[0] and checked == want[1] and len(set(checked)) == 1
    assert parameters.keys() == want[2].keys()
    assert all(torch.equal(value, want[2][name]) for name, value in parameters.items())
