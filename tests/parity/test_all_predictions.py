"""`of: all` gives a metric the predictions and labels of a validation, in the order of samples, in every plan."""

import re
from collections import OrderedDict
from contextlib import nullcontext
from typing import Any

import numpy
import pytest
import torch
from helpers import metrics, ugly_models
from helpers.parity import Layout
from helpers.shard_grid import VOCAB as SHARD_VOCAB
from helpers.shard_grid import Cell
from torch import Tensor, nn

import raypar
from raypar.errors import ConfigError, RayparError, UserCodeError
from raypar.job import DataConfig, LossConfig, MetricConfig, ModelConfig, ValidationConfig
from raypar.job.data_section import ValidationSetConfig
from raypar.plan import ParallelPlan
from raypar.worker.job_preflight import preflight
from raypar.worker.metrics.metric import make_metric
from raypar.worker.run_in_one_process import OneProcessRun

LAYOUTS = [
    Layout("tangled", "1f1b", (1,), 4),
    Layout("tangled", "1f1b", (2, 2), 4),
    Layout("tangled", "gpipe", (2, 3), 4),
    Layout("tangled", "interleaved", (2, 2), 4, chunks=2),
    Layout("tangled", "zb-v", (2, 2), 4),
]
SAMPLES = 13
SEEN: list[Any] = []


def compute_metrics(found: Any) -> dict[str, float]:
    """As people write it for the Trainer of transformers."""
    predictions, labels = found
    assert found.predictions is predictions and found[1] is labels is found.label_ids
    assert isinstance(predictions, numpy.ndarray) and isinstance(labels, numpy.ndarray)
    SEEN.append((predictions, labels))
    weights = numpy.arange(len(labels), dtype=numpy.float64)  # so that the order shows
    return {"accuracy": float((predictions.argmax(-1) == labels).mean()), "ordered": float(weights @ predictions[:, 0, 0])}


def classes(logits: Tensor, labels: Tensor) -> Tensor:
    """A `preprocess_logits_for_metrics`."""
    return logits.argmax(-1)


def compute_from_classes(found: Any) -> dict[str, float]:
    return {"accuracy": float((found.predictions == found.label_ids).mean())}


ALL = {
    "glue": MetricConfig(function=compute_metrics, of="all"),
    "small": MetricConfig(function=compute_from_classes, of="all", preprocess_logits=classes),
}


def job_of(layout: Any, **given: MetricConfig) -> Any:
    data = layout.job.data
    validation = ValidationConfig(function=data.function, args=data.args, samples=SAMPLES)
    return layout.job.replace(validation=validation, metrics=given or ALL)


def validated(layout: Layout, **given: MetricConfig) -> dict[str, float]:
    with OneProcessRun(job_of(layout, **given), layout.plan, layout.schedule, graph=layout.graph, seed=3) as run:
        run.validate(0)
        return run.metrics


WANTED: list[Any] = []


@pytest.mark.ci
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_layout_calls_it_once_with_all_samples_in_their_order(layout: Layout):
    SEEN.clear()
    found = validated(layout)
    ((predictions, labels),) = SEEN
    WANTED.append((found, predictions, labels)) if not WANTED else None
    assert found == WANTED[0][0] and set(found) == {"glue/accuracy", "glue/ordered", "small/accuracy"}
    assert found["glue/accuracy"] == found["small/accuracy"]
    assert numpy.array_equal(predictions, WANTED[0][1]) and numpy.array_equal(labels, WANTED[0][2])
    dataset = layout.job.data.call()
    targets = [dataset[index][1] if isinstance(dataset[index], tuple) else dataset[index]["y"] for index in range(SAMPLES)]
    assert numpy.array_equal(labels, torch.stack(targets).numpy())


@pytest.mark.ci
@pytest.mark.parametrize(
    "cell", [Cell("gpt", "1f1b", (2, 1), (2, 2), 5), Cell("llama", "zb-h1", (1, 1), (1, 3), 5, True)], ids=str
)
def test_logits_that_are_cut_over_shards_come_whole(cell: Cell):
    SEEN.clear()
    with OneProcessRun(job_of(cell, glue=ALL["glue"]), cell.plan, cell.schedule, graph=cell.graph) as run:
        run.validate(0)
    ((predictions, labels),) = SEEN
    assert len(predictions) == len(labels) == SAMPLES and predictions.shape[:2] == labels.shape
    assert predictions.shape[-1] == SHARD_VOCAB


def test_training_is_not_measured_with_it():
    layout = LAYOUTS[1]
    job = job_of(layout, glue=ALL["glue"], accuracy=MetricConfig(function=metrics.accuracy)).replace(metrics_every=1)
    assert {"accuracy", "validation_glue"} <= job.series and "glue" not in job.series
    with OneProcessRun(job, layout.plan, layout.schedule, graph=layout.graph) as run:
        run.step(0)
        assert set(run.metrics) == {"accuracy"}
        run.validate(1)
        assert set(run.metrics) == {"accuracy", "glue/accuracy", "glue/ordered"}
    with pytest.raises(ConfigError, match=r"metrics_every is 1, and the metrics \(glue\) are of all samples"):
        raypar.Trainer(
            model=ReturnsParts, loss=loss_of_parts, data=Points, validation=Points, steps=1, batch_size=4, microbatches=2,
            metrics={"glue": {"function": compute_metrics, "of": "all"}}, metrics_every=1,
        )  # fmt: skip


# -- what it gets of other outputs -------------------------------------------------------------------------------------------


class Output(OrderedDict[str, Tensor]):
    """Like a `ModelOutput`."""

    def __getattr__(self, name: str) -> Tensor:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


def measured(metric: Any, *microbatches: tuple[Any, Tensor]) -> Any:
    states = [metric.measure(output, {}, target) for output, target in microbatches]
    total = states[0]
    for state in states[1:]:
        total = metric.merge(total, state)
    kept: list[Any] = []
    metric._function = lambda found: kept.append(found) or {}
    metric.compute(total)
    return kept[0]


def test_outputs_have_the_form_that_transformers_gives_them():
    """Without loss and caches; one part bare, several as a tuple; rows of other lengths filled up with -100."""
    metric = make_metric("m", ALL["glue"])
    output = Output(loss=torch.tensor(1.0), logits=torch.ones(2, 3, 5), past_key_values=torch.zeros(1))
    longer = Output(loss=torch.tensor(1.0), logits=torch.ones(1, 4, 5).bfloat16().float(), past_key_values=torch.zeros(1))
    found = measured(metric, (output, torch.ones(2, 3)), (longer, torch.ones(1, 4)))
    assert found.predictions.shape == (3, 4, 5) and (found.predictions[:2, 3] == -100).all()
    assert found.label_ids.shape == (3, 4) and found.label_ids[0].tolist() == [1, 1, 1, -100]
    several = Output(start_logits=torch.ones(2, 3), end_logits=torch.zeros(2, 3).bfloat16())
    start, end = measured(metric, (several, torch.ones(2)), (several, torch.ones(2))).predictions
    assert start.shape == end.shape == (4, 3) and end.dtype == numpy.float32


def test_they_are_those_of_the_trainer_of_transformers():
    """Its own functions make the same arrays of the same outputs."""
    from transformers.trainer_pt_utils import nested_concat, nested_numpify

    generator = torch.Generator().manual_seed(0)
    outputs = [
        (torch.randn(n, length, 4, generator=generator), torch.randn(n, 2, generator=generator))
        for n, length in ((3, 5), (2, 7))
    ]
    labels = [torch.arange(15).view(3, 5), torch.arange(14).view(2, 7)]
    found = measured(make_metric("m", ALL["glue"]), *zip(outputs, labels, strict=True))
    for mine, theirs in zip(found.predictions, nested_numpify(nested_concat(*outputs)), strict=True):
        assert numpy.array_equal(mine, theirs)
    assert numpy.array_equal(found.label_ids, nested_numpify(nested_concat(*labels)))


# -- parts of outputs --------------------------------------------------------------------------------------------------------


class ReturnsParts(nn.Module):
    """Returns its logits among other parts."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        hidden = self.first(x).relu()
        return {"logits": self.last(hidden), "hidden": hidden}


class Points(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> Any:
        return {"x": torch.full((4,), float(index)), "y": index % 3}


def loss_of_parts(output: Any, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output["logits"], target)


def right(output: Tensor, target: Tensor) -> tuple[Tensor, int]:
    return (output.argmax(-1) == target).sum(), len(target)


def of_parts(**given: MetricConfig) -> Any:
    return ugly_models.job("plain", microbatches=2).replace(
        model=ModelConfig(function=ReturnsParts),
        data=DataConfig(function=Points),
        loss=LossConfig(function=loss_of_parts),
        validation=ValidationConfig(function=Points),
        metrics=given,
    )


@pytest.mark.ci
def test_a_metric_gets_the_part_of_the_output_that_it_names():
    from torchmetrics.classification import MulticlassAccuracy

    job = of_parts(
        right=MetricConfig(function=right, output="logits"),
        library=MetricConfig(function=MulticlassAccuracy, args={"num_classes": 3, "average": "micro"}, output="logits"),
        all=MetricConfig(function=compute_from_classes, of="all", output="logits", preprocess_logits=classes),
    )
    checked = preflight(job)
    found = []
    for plan in (
        ParallelPlan.mesh(layers=len(checked.graph.layers)),
        ParallelPlan.mesh(pp=2, layers=len(checked.graph.layers)),
    ):
        with OneProcessRun(job, plan, "1f1b", graph=checked.graph) as run:
            run.validate(0)
            found.append(run.metrics)
    assert found[0] == found[1] and found[0]["right"] == found[0]["all/accuracy"]
    assert found[0]["library"] == pytest.approx(found[0]["right"])


def test_a_part_that_there_is_not_is_named_with_those_that_there_are():
    says = r"metric 'right' measures 'scores' of the model's output, which is a dict with logits, hidden"
    with pytest.raises(RayparError, match=says):
        preflight(of_parts(right=MetricConfig(function=right, output="scores")))


# -- what is wrong -----------------------------------------------------------------------------------------------------------


def no_dict(found: Any) -> float:
    return 0.5


def misspelt(found: Any) -> dict[str, float]:
    return {"a": found.label_id.mean()}


def needs_all(found: Any) -> dict[str, float]:
    raise ValueError("only one class present")


def one(layout: Layout, **given: Any) -> Any:
    return job_of(layout, m=MetricConfig(**{"function": compute_from_classes, "of": "all", **given}))


def test_more_than_the_limit_is_refused_before_the_run_with_its_bytes():
    layout = LAYOUTS[0]
    big = one(layout, limit_mib=1).replace(validation=ValidationConfig(function=Many, args={"count": 10**6}))
    with pytest.raises(ConfigError, match=re.escape("of each of 1,000,000 samples: ")) as caught:
        preflight(big)
    assert "limit_mib is 1" in caught.value.what and "metrics.m.preprocess_logits" in caught.value.cure
    assert preflight(one(layout, preprocess_logits=classes)).notes == ()
    small = ValidationSetConfig(function=layout.job.data.function, args=layout.job.data.args, samples=3)
    large = ValidationSetConfig(function=Many, args={"count": 10**6}, samples=999_000)
    other = MetricConfig(function=metrics.accuracy)
    for names, says in ((None, "999,003 samples: "), ((), None)):
        sets = {"small": small, "large": large.replace(metrics=names)}
        several = big.replace(validation=ValidationConfig(sets=sets), metrics={**big.metrics, "accuracy": other})
        with pytest.raises(ConfigError, match=f"of each of {says}") if says else nullcontext():
            preflight(several)


class Many:
    """A data set that says it is large."""

    def __init__(self, count: int) -> None:
        self.count, self.small = count, LAYOUTS[0].job.data.call()

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        return self.small[index % len(self.small)]


def test_a_worker_refuses_it_too_at_the_first_microbatch():
    """Where the model was too large to be tried. A limit that one microbatch keeps, and all samples together do not."""
    layout = LAYOUTS[1]
    with OneProcessRun(one(layout), layout.plan, "1f1b", graph=layout.graph) as run:
        measuring = [stage.metrics for core in run.cores for stage in core.stages.values() if stage.metrics is not None]
        for of_stage in measuring:
            of_stage.metrics["m"].limit_bytes = 2_000
        with pytest.raises(UserCodeError, match=f"bytes of each of {SAMPLES} samples: .* and limit_mib is 0, at stage 1, "):
            run.validate(0)


@pytest.mark.parametrize(
    "given, says",
    [
        ({"function": no_dict}, "metric 'm' returned a float for all predictions"),
        ({"function": misspelt}, "metric 'm' raised AttributeError"),
        ({"preprocess_logits": lambda logits: logits}, "metric 'm' raised TypeError"),
    ],
)
def test_what_is_wrong_with_it_is_said_before_the_run(given: Any, says: str):
    with pytest.raises(RayparError, match=says):
        preflight(one(LAYOUTS[0], **given))


def test_what_it_cannot_compute_of_few_samples_is_a_line():
    (line,) = preflight(one(LAYOUTS[0], function=needs_all)).notes
    assert line.startswith("metric 'm' raised ValueError: only one class present for the predictions of the first microbatches")


def test_preprocess_logits_is_for_all_predictions():
    with pytest.raises(ConfigError, match="has preprocess_logits, and measures each microbatch by itself"):
        MetricConfig(function=right, preprocess_logits=classes)
