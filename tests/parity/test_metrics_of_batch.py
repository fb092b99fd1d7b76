"""Metrics of (output, batch) get every field of the samples that is a tensor, also of streams, which only one worker reads."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from helpers import ugly_models
from torch import Tensor, nn

from raypar.errors import RayparError
from raypar.job import DataConfig, LossConfig, MetricConfig, ModelConfig, ValidationConfig
from raypar.job.data_section import ValidationSetConfig
from raypar.plan import ParallelPlan
from raypar.worker.job_preflight import preflight
from raypar.worker.run_in_one_process import OneProcessRun


def sample(index: int) -> dict[str, Any]:
    return {"x": torch.full((4,), float(index)), "y": torch.tensor(float(index)), "group": index % 2, "title": f"no. {index}"}


class Listed(torch.utils.data.Dataset[Any]):
    """Samples with a field that only a metric reads, and a text that nobody reads."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index >= 10:
            raise IndexError(index)
        return sample(index)


class Stream(torch.utils.data.IterableDataset[Any]):
    """The same samples, as a stream."""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return map(sample, range(10))


class WithoutGroups(Stream):
    def __iter__(self) -> Iterator[dict[str, Any]]:
        return ({name: value for name, value in sample(index).items() if name != "group"} for index in range(10))


def in_group_one(output: Tensor, batch: Any) -> tuple[Tensor, Tensor]:
    assert set(batch) == {"x", "y", "group"}
    return (output.squeeze(-1) * batch["group"]).sum(), batch["group"].sum()


def job(data: Any, validation: Any, **given: Any) -> Any:
    return ugly_models.job("plain", microbatches=2).replace(
        model=ModelConfig(function=lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))),
        data=DataConfig(function=data, shuffle=False),
        loss=LossConfig(function=ugly_models.mean_loss),
        validation=ValidationConfig(function=validation, samples=7),
        metrics={"ones": MetricConfig(function=in_group_one)},
        metrics_every=1,
        **given,
    )


def values(spec: Any, plan: ParallelPlan) -> list[Any]:
    with OneProcessRun(spec, plan, "1f1b") as run:
        run.validate(0)
        found = [run.metrics]
        run.step(0)
        return [*found, run.metrics]


@pytest.mark.parametrize("data, validation", [(Stream, Stream), (Stream, Listed), (Listed, Stream)])
def test_a_metric_gets_the_fields_of_a_stream_that_neither_model_nor_loss_reads(data: Any, validation: Any):
    wanted = values(job(Listed, Listed), ParallelPlan.mesh(layers=2))
    assert all(each["ones"] for each in wanted)
    checked = preflight(job(data, validation))
    assert [line for line in checked.notes if "these fields of the samples" in line] == [
        "neither the model, the loss nor a metric reads these fields of the samples: title"
    ]
    for plan in (ParallelPlan.mesh(layers=2), ParallelPlan.mesh(pp=2, layers=2), ParallelPlan.mesh(pp=2, dp=2, layers=2)):
        assert values(checked.job, plan) == wanted


def test_so_it_does_of_a_stream_with_several_validation_sets():
    sets = {"a": ValidationSetConfig(function=Listed, samples=7), "b": ValidationSetConfig(function=Stream, samples=3)}
    checked = preflight(job(Stream, Listed).replace(validation=ValidationConfig(sets=sets)))
    found, _ = values(checked.job, ParallelPlan.mesh(pp=2, dp=2, layers=2))
    for name, samples in (("a", 7), ("b", 3)):
        alone = job(Listed, Listed).replace(validation=ValidationConfig(function=Listed, samples=samples))
        assert found[f"{name}/ones"] == values(alone, ParallelPlan.mesh(layers=2))[0]["ones"]


def test_a_field_that_only_one_of_the_two_data_sets_has_is_missed_before_the_run():
    with pytest.raises(RayparError, match="metric 'ones' raised AssertionError"):
        preflight(job(WithoutGroups, Stream))


class Answers(Listed):
    """Samples whose target has a name of its own."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        found = super().__getitem__(index)
        return {"x": found["x"], "answer": found["y"]}


def test_a_metric_whose_second_parameter_is_called_as_the_jobs_target_gets_the_target():
    """With the batch in its place `len` counted fields, and the value was wrong without a word."""

    def by_field(output: Tensor, answer: Tensor) -> tuple[Tensor, int]:
        return answer.sum(), len(answer)

    def by_target(output: Tensor, target: Tensor) -> tuple[Tensor, int]:
        return target.sum(), len(target)

    spec = job(Listed, Listed).replace(
        data=DataConfig(function=Answers, target="answer", shuffle=False),
        validation=ValidationConfig(function=Answers, samples=7),
        metrics={"one": MetricConfig(function=by_field), "other": MetricConfig(function=by_target)},
    )
    preflight(spec)
    for found in values(spec, ParallelPlan.mesh(pp=2, layers=2)):
        assert found["one"] == found["other"] > 2.0
