"""What is kept of a metric's states while a pass runs: they are merged as they come, wait for no device, and travel packed."""

import pickle
from functools import reduce
from typing import Any

import pytest
import torch
from helpers import metrics
from helpers.parity import Layout
from torch import Tensor

from raypar.job import MetricConfig, ValidationConfig
from raypar.worker.metrics.metric import make_metric
from raypar.worker.run_in_one_process import OneProcessRun

LAYOUTS = [
    Layout("tangled", "1f1b", (1,), 4),
    Layout("tangled", "1f1b", (2, 2), 4),
    Layout("tangled", "interleaved", (2, 2), 4, chunks=2),
    Layout("tangled", "gpipe", (2, 3), 4),
]


def validated(layout: Layout, **functions: Any) -> tuple[dict[str, float], list[int]]:
    """The values of a validation of 13 samples, and the number of states that are kept unmerged after each microbatch."""
    data = layout.job.data
    job = layout.job.replace(
        validation=ValidationConfig(function=data.function, args=data.args, samples=13),
        metrics={name: MetricConfig(function=function) for name, function in functions.items()},
    )
    kept: list[int] = []
    with OneProcessRun(job, layout.plan, layout.schedule, graph=layout.graph) as run:
        for core in run.cores:
            for stage in core.stages.values():
                if stage.metrics is not None:
                    stage.metrics.measure = counting(stage.metrics, kept)  # type: ignore[method-assign]
        run.validate(0)
        return run.metrics, kept


def counting(of_stage: Any, kept: list[int]) -> Any:
    measure = of_stage.measure

    def call(*given: Any) -> None:
        measure(*given)
        kept.append(len(of_stage.states))

    return call


def test_one_worker_keeps_one_state_however_many_microbatches_there_are():
    _, kept = validated(LAYOUTS[0], median=metrics.Median, accuracy=metrics.accuracy)
    assert kept == [0, 0, 0, 0, 0]


class DrawsInMerge(metrics.Median):
    """Its merge draws random numbers, as one that keeps a random part of all values does."""

    def merge_state(self, other: "DrawsInMerge") -> None:
        self.seen = [*self.seen, *(torch.rand(()) * each for each in other.seen)]


def test_a_merge_that_draws_random_numbers_draws_the_same_in_every_layout():
    found = [validated(layout, drawn=DrawsInMerge)[0] for layout in LAYOUTS]
    assert all(one == found[0] for one in found)


class WithFunction(metrics.Median):
    """Holds a function that cannot be pickled, which all copies share."""

    def __init__(self) -> None:
        super().__init__()
        self.transform = lambda value: 2 * value

    def update(self, output: Tensor, target: Tensor) -> None:
        self.seen.append(self.transform(output.amax(-1).flatten()))


@pytest.mark.parametrize(
    "function", [metrics.Median, metrics.LikeTorchmetrics, WithFunction, metrics.certainty, metrics.energy]
)
def test_packed_states_make_the_value_of_those_that_were_kept(function: Any):
    generator = torch.Generator().manual_seed(0)
    batches = [(torch.randn(3, 5, 7, generator=generator), torch.randint(0, 7, (3, 5), generator=generator)) for _ in range(3)]
    found = []
    for packed in (False, True):
        metric = make_metric("m", MetricConfig(function=function))
        states = [metric.measure(output, {"x": target}, target) for output, target in batches]
        if packed:
            states = pickle.loads(pickle.dumps(metric.pack(states)))
        found.append(metric.compute(reduce(metric.merge, states)))
    assert str(found[0]) == str(found[1])


def test_functions_wait_for_no_device_before_their_states_are_gathered():
    """A tensor of the meta device has no numbers that could be waited for."""
    for function in (metrics.accuracy, metrics.energy, metrics.by_place):
        metric = make_metric("m", MetricConfig(function=function))
        output, target = torch.empty(3, 5, 7, device="meta"), torch.zeros(3, 5, dtype=torch.long, device="meta")
        states = [metric.measure(output, {}, target) for _ in range(2)]
        assert {part.device.type for part in metric.merge(*states)["parts"]} <= {"meta", "cpu"}


def test_a_state_on_a_device_takes_one_that_another_worker_has_sent():
    """Which lies in host memory."""
    metric = make_metric("m", MetricConfig(function=metrics.by_place))
    here, sent = (
        metric.measure(torch.zeros(3, 5, 7, device=device), {}, torch.zeros(3, 5, dtype=torch.long, device=device))
        for device in ("meta", "cpu")
    )
    assert metric.merge(here, sent)["parts"][0].device.type == "meta"


def test_a_part_of_an_output_that_is_kept_keeps_no_more_than_itself():
    metric = make_metric("m", MetricConfig(function=lambda output, target: (output[0, 0, :2], 1)))
    parts: Any = metric.measure(torch.ones(3, 5, 7, dtype=torch.float64), {}, torch.zeros(3))["parts"]
    assert parts[0].untyped_storage().nbytes() == 16
