"""Metrics of validations are those of one process that measures one microbatch after the other, whatever the layout."""

import math
import random
import re
from dataclasses import dataclass
from typing import Any

import numpy
import pytest
import torch
from helpers import metrics, ugly_models
from helpers.parity import Layout
from helpers.shard_grid import Cell, cells
from torch import Tensor, nn

from raypar.comm.buffer_pool import CPU
from raypar.errors import ConfigError, RayparError, UserCodeError
from raypar.job import DataConfig, LossConfig, MetricConfig, ModelConfig, ValidationConfig
from raypar.model.graph import Graph
from raypar.plan import ParallelPlan
from raypar.plan.seeds import seed_of
from raypar.worker import plain_microbatches
from raypar.worker.job_preflight import preflight
from raypar.worker.metrics import function_trial
from raypar.worker.metrics.metric import FunctionMetric, make_metric, values_by_name
from raypar.worker.process.seed_generators import make_seeder
from raypar.worker.run_in_one_process import OneProcessRun

pytestmark = pytest.mark.part(5)

SAMPLES = 13
ALL: dict[str, MetricConfig] = {
    "accuracy": MetricConfig(function=metrics.accuracy),
    "certainty": MetricConfig(function=metrics.certainty),
    "energy": MetricConfig(function=metrics.energy),
    "by_place": MetricConfig(function=metrics.by_place),
    "dropped": MetricConfig(function=metrics.dropped),
    "median": MetricConfig(function=metrics.Median, args={"scale": 2.0}),
    "library": MetricConfig(function=metrics.LikeTorchmetrics),
}
LAYOUTS = [
    Layout("tangled", "1f1b", (1,), 4),
    Layout("tangled", "1f1b", (2, 2), 4),
    Layout("tangled", "1f1b", (3,), 4),
    Layout("tangled", "gpipe", (1, 2, 3, 1), 4),
    Layout("tangled", "gpipe", (2, 3), 4),
    Layout("tangled", "interleaved", (2, 2), 4, chunks=2),
    Layout("tangled", "zb-v", (2, 2), 4),
    Layout("tangled", "zb-h1", (1, 1, 1, 1), 4),
    Layout("tangled", "1f1b", (4,), 4),
    Layout("tangled", "1f1b", (2, 2), 4, blocks=1),
]


def with_metrics(job: Any, names: Any = ALL, **changes: Any) -> Any:
    validation = ValidationConfig(function=job.data.function, args=job.data.args, samples=SAMPLES)
    return job.replace(validation=validation, metrics={name: ALL[name] for name in names}, **changes)


def outputs_of_one_process(job: Any, layout: Layout) -> list[tuple[Tensor, dict[str, Tensor]]]:
    """(output, fields) of each microbatch of the validation, before the first step, by the layers themselves in a row."""
    with OneProcessRun(job, Layout(layout.model, "1f1b", (1,), 4).plan, "1f1b", graph=layout.graph) as run:
        seen: list[tuple[Tensor, dict[str, Tensor]]] = []
        stage = run.cores[0].stages[0, 0]
        loss = stage.loss

        def keep(forward_pass: Any, values: Any) -> Any:
            seen.append((values["logits"].clone(), {name: values[name].clone() for name in ("x", "y")}))
            return loss(forward_pass, values)

        stage.loss = keep  # type: ignore[assignment]
        run.validate(0)
    return seen


def expected(job: Any, layout: Layout) -> dict[str, float]:
    """The values by a loop: sums in float64, objects that take one microbatch after the other."""
    found: dict[str, float] = {}
    outputs = outputs_of_one_process(job, layout)
    assert sum(len(fields["y"]) for _, fields in outputs) == SAMPLES and len(outputs) == 5
    seed = make_seeder(CPU)
    for name, ref in job.metrics.items():
        made = ref.resolve()
        if isinstance(made, type):
            one = made(**ref.args)
            for output, fields in outputs:
                one.update(output, fields["y"])
            found |= values_by_name(name, one.compute())
            continue
        total, count = 0, 0
        for microbatch, (output, fields) in enumerate(outputs):
            seed(seed_of(job.seed, "metric", microbatch, name))
            returned = made(output, fields if name == "certainty" else fields["y"])
            parts = returned if isinstance(returned, tuple) else (returned, 0)
            total, count = total + torch.as_tensor(parts[0]).double(), count + torch.as_tensor(parts[1]).double()
        found |= values_by_name(name, total / count if name != "energy" else total)
    return found


WANTED: dict[str, float] = {}


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_layout_has_the_values_of_one_process_of_exactly_the_samples_there_are(layout: Layout):
    job = with_metrics(layout.job)
    WANTED.update({} if WANTED else expected(job, layout))
    with OneProcessRun(job, layout.plan, layout.schedule, graph=layout.graph, seed=3) as run:
        run.validate(0)
    assert list(run.metrics) == list(WANTED)
    assert torch.equal(torch.tensor([*run.metrics.values()]).double(), torch.tensor([*WANTED.values()]).double())
    assert {"accuracy", "by_place/1", "median/last", "library/0"} <= set(WANTED)
    assert all(math.isfinite(value) for value in WANTED.values())


def on_tokens(output: Tensor, target: Tensor) -> tuple[Tensor, int]:
    """Reads every logit, so that a part of them is not enough."""
    return output.double().logsumexp(-1).sum() + output[..., -1].sum(), target.numel()


SHARDED = [
    Cell("gpt", "1f1b", (1,), (2,), 5),
    Cell("gpt", "1f1b", (2, 1), (2, 2), 5),
    Cell("llama", "zb-h1", (1, 1), (1, 3), 5, True),
    Cell("gpt", "gpipe", (1, 2), (2, 3), 4),
]


GRID = [cell for cell in cells() if cell.plan.stages[-1].shards > 1 and cell.model != "dropped" and cell not in SHARDED][::2]


@pytest.mark.parametrize("cell", SHARDED, ids=str)
def test_logits_that_are_cut_over_shards_are_gathered_for_metrics(cell: Cell):
    assert check_sharded(cell), "the logits are whole: the case is none"


@pytest.mark.full
@pytest.mark.parametrize("cell", GRID, ids=str)
def test_so_they_are_in_every_layout(cell: Cell):
    assert len(GRID) >= 60
    check_sharded(cell)


def check_sharded(cell: Cell) -> bool:
    """The metric gets what one process gets whose layers are cut the same way: the whole logits. True if they were cut."""
    job = cell.job.replace(
        validation=ValidationConfig(function=cell.job.data.function, args=cell.job.data.args, samples=9),
        metrics={"tokens": MetricConfig(function=on_tokens), "median": MetricConfig(function=metrics.Median)},
    )
    parts: dict[tuple[int, int], Tensor] = {}
    targets: dict[int, Tensor] = {}
    with OneProcessRun(job, cell.plan, cell.schedule, graph=cell.graph) as run:
        for core in run.cores:
            for stage in core.stages.values():
                if stage.loss is not None:
                    stage.loss = kept_parts(stage.loss, stage.shard, parts, targets)  # type: ignore[assignment]
        run.validate(0)
    cut = len(parts) > len(targets)
    whole = [torch.cat([parts[m, t] for t in range(cell.plan.stages[-1].shards if cut else 1)], -1) for m in sorted(targets)]
    median, total, count = metrics.Median(), 0.0, 0
    for m, logits in enumerate(whole):
        median.update(logits, targets[m])
        added, tokens = on_tokens(logits, targets[m])
        total, count = total + float(added), count + tokens
    assert run.metrics == {"tokens": total / count, **values_by_name("median", median.compute())}
    assert sum(len(target) for target in targets.values()) == 9
    return cut


def kept_parts(loss: Any, shard: Any, parts: dict[tuple[int, int], Tensor], targets: dict[int, Tensor]) -> Any:
    """The loss, which keeps the shard's part of the logits, and the target, of each microbatch."""

    def call(forward_pass: Any, values: Any) -> Any:
        if loss.inputs[0] in shard.group.output_layouts or shard.group.shard == 0:
            parts[forward_pass.microbatch, shard.group.shard] = values[loss.inputs[0]].clone()
        targets[forward_pass.microbatch] = values[loss.fields[0]].clone()
        return loss(forward_pass, values)

    return call


def train(job: Any, layout: Layout) -> list[Any]:
    found: list[Any] = []
    with OneProcessRun(job, layout.plan, layout.schedule, graph=layout.graph) as run:
        for step in range(2):
            found += [run.step(step)[0].loss, run.validate(step + 1)]
        found += [copy.clone() for copies in run.parameters().values() for copy in copies]
    return found


@pytest.mark.ci
def test_metrics_change_no_bit_of_losses_and_weights():
    layout = LAYOUTS[1]
    plain, measured = (train(with_metrics(layout.job, names), layout) for names in ((), ALL))
    assert all(torch.equal(torch.as_tensor(a), torch.as_tensor(b)) for a, b in zip(plain, measured, strict=True))


# -- in training -------------------------------------------------------------------------------------------------------------

MEASURED: dict[str, float] = {}


def outputs_of_second_step(job: Any, layout: Layout) -> list[tuple[Tensor, Tensor]]:
    """(output, target) of each microbatch of the second step, by the layers themselves in a row."""
    seen: list[tuple[Tensor, Tensor]] = []
    with OneProcessRun(job, Layout(layout.model, "1f1b", (1,), 4).plan, "1f1b", graph=layout.graph) as run:
        run.step(0)
        stage = run.cores[0].stages[0, 0]
        loss = stage.loss

        def keep(forward_pass: Any, values: Any) -> Any:
            seen.append((values["logits"].detach().clone(), values["y"].clone()))
            return loss(forward_pass, values)

        stage.loss = keep  # type: ignore[assignment]
        run.step(1)
    return seen


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_second_step_of_training_is_measured_as_one_process_would(layout: Layout):
    job = layout.job.replace(metrics=ALL, metrics_every=2)
    if not MEASURED:
        median, right, tokens = metrics.Median(2.0), 0, 0
        for output, target in outputs_of_second_step(layout.job, layout):
            median.update(output, target)
            added, count = metrics.accuracy(output, target)
            right, tokens = right + int(added), tokens + count
        MEASURED.update(accuracy=right / tokens, **values_by_name("median", median.compute()))
    with OneProcessRun(job, layout.plan, layout.schedule, graph=layout.graph, seed=3) as run:
        assert run.step(0)[0].metrics == {} == run.metrics
        reports = run.step(1)
        found, first = run.metrics, reports[0].loss
        run.step(2)
        assert run.metrics == {}
    assert {name: found[name] for name in MEASURED} == MEASURED
    assert set(found) == set(WANTED or found) and sum(bool(report.metrics) for report in reports) == 1
    with OneProcessRun(layout.job, layout.plan, layout.schedule, graph=layout.graph) as plain:
        plain.step(0)
        assert plain.step(1)[0].loss == first


@pytest.mark.ci
@pytest.mark.parametrize("schedule, replicas", [("1f1b", (2, 2)), ("zb-h1", (1, 1, 1))])
def test_measuring_in_training_changes_no_bit_of_it_and_costs_nothing_in_other_steps(schedule: str, replicas: Any):
    layout = Layout("tangled", schedule, replicas, 4)
    found = []
    for every in (0, 1):
        job = layout.job.replace(metrics=ALL if every else {}, metrics_every=every)
        with OneProcessRun(job, layout.plan, schedule, graph=layout.graph) as run:
            counted = [count_sends(transport) for transport in run.mesh.transports]
            losses = [run.step(step)[0].loss for step in range(3)]
            state = [copy.clone() for copies in run.parameters().values() for copy in copies]
        found.append((losses, state))
        assert sum(map(len, counted)) == (3 * (replicas[-1] - 1) if every else 0)
    assert found[0][0] == found[1][0]
    assert all(torch.equal(a, b) for a, b in zip(found[0][1], found[1][1], strict=True))


@pytest.mark.ci
def test_logits_that_are_cut_are_gathered_in_training_in_measured_steps_only():
    cell = SHARDED[1]
    job = cell.job.replace(metrics={"tokens": MetricConfig(function=on_tokens)}, metrics_every=2)
    gathers = []
    with OneProcessRun(job, cell.plan, cell.schedule, graph=cell.graph) as run:
        for core in run.cores:
            for stage in core.stages.values():
                if stage.loss is not None and stage.shard is not None:
                    stage.shard.group.gather_and_concat = counted_calls(stage.shard.group.gather_and_concat, gathers)
        run.step(0)
        assert gathers == []
        run.step(1)
    assert len(gathers) == 5 * 2 and math.isfinite(run.metrics["tokens"])


def counted_calls(call: Any, calls: list[str]) -> Any:
    def counted(*given: Any) -> Any:
        calls.append(given[-1])
        return call(*given)

    return counted


def test_a_recomputed_layer_is_measured_once():
    layout = Layout("tangled", "1f1b", (1, 1), 4)
    plan = ParallelPlan.mesh(pp=2, layers=9, recompute=range(9))
    found = []
    for each in (layout.plan, plan):
        with OneProcessRun(layout.job.replace(metrics=ALL, metrics_every=1), each, "1f1b", graph=layout.graph) as run:
            run.step(0)
            found.append(run.metrics)
    assert found[0] == found[1]


@pytest.mark.ci
def test_metrics_of_training_alone_are_tried_before_the_run_too():
    job = ugly_models.job("tangled", microbatches=4).replace(metrics_every=1)
    assert preflight(job.replace(metrics=ALL)).notes == ()
    with pytest.raises(ConfigError, match=r"metric 'm' returned .* so it is a mean"):
        preflight(job.replace(metrics={"m": MetricConfig(function=mean)}))


# -- without metrics ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("names, messages", [((), 0), (ALL, 1)], ids=["none", "all"])
def test_without_metrics_there_is_no_message_no_call_and_nothing_more_is_read(names: Any, messages: int, monkeypatch: Any):
    """With them each other replica of the last stage sends one."""
    layout, job = LAYOUTS[1], with_metrics(LAYOUTS[1].job, names)
    monkeypatch.setattr("raypar.worker.worker_core.make_metrics", make_metrics_if(bool(names)))
    with OneProcessRun(job, layout.plan, layout.schedule, graph=layout.graph) as run:
        counted = [count_sends(transport) for transport in run.mesh.transports]
        run.validate(0)
        fields = {name for core in run.cores if core.validation_loader for name in core.validation_loader._fields}
        assert all(core.loader is None or set(core.loader._fields) <= {"x", "y"} for core in run.cores)
    assert sum(len(sent) for sent in counted) == messages
    assert fields == {"x", "y"}
    assert bool(run.metrics) == bool(names)


def make_metrics_if(allowed: bool) -> Any:
    from raypar.worker.metrics.metric import make_metrics

    def make(configs: Any, target: str) -> Any:
        assert allowed, "metrics are made though the job has none"
        return make_metrics(configs, target)

    return make


def count_sends(transport: Any) -> list[int]:
    """The tags of messages in host memory that no stage receives as values."""
    sent: list[int] = []
    send = transport.send

    def listened(tensor: Tensor, *, to: int, tag: int, keep_layout: bool = False) -> Any:
        if tensor.dtype == torch.uint8:
            sent.append(tag)
        return send(tensor, to=to, tag=tag, keep_layout=keep_layout)

    transport.send = listened
    return sent


class Named(torch.utils.data.Dataset[Any]):
    """Samples with a field that neither the model nor the loss reads."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": torch.full((4,), float(index)), "y": torch.tensor(float(index)), "group": torch.tensor(index % 2)}


def in_group_one(output: Tensor, batch: Any) -> tuple[Tensor, Tensor]:
    return (output.squeeze(-1) * batch["group"]).sum(), batch["group"].sum()


def of_named(**given: Any) -> Any:
    return ugly_models.job("plain", microbatches=2).replace(
        model=ModelConfig(function=lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))),
        data=DataConfig(function=Named),
        loss=LossConfig(function=ugly_models.mean_loss),
        validation=ValidationConfig(function=Named),
        **given,
    )


def test_a_metric_gets_every_field_of_the_batch_and_only_its_worker_reads_them():
    job = of_named(metrics={"ones": MetricConfig(function=in_group_one)})
    found = []
    for plan in (ParallelPlan.mesh(layers=2), ParallelPlan.mesh(pp=2, dp=2, layers=2)):
        with OneProcessRun(job, plan, "1f1b") as run:
            run.validate(0)
            found.append(run.metrics)
            read = [core.validation_loader._fields for core in run.cores if core.validation_loader is not None]
    assert found[0] == found[1] and found[0]["ones"] != 0
    assert sorted(map(sorted, read)) == [["group", "x", "y"], ["group", "x", "y"], ["x"], ["x"]]


def several() -> Graph:
    from test_outputs import pair

    return pair()


def test_an_output_of_several_values_is_rebuilt_for_metrics_as_for_the_loss():
    from test_outputs import loss_of_two

    job = ugly_models.job("plain", microbatches=3).replace(
        model=ModelConfig(function=several),
        loss=LossConfig(function=loss_of_two),
        metrics={"gap": MetricConfig(function=lambda output, target: ((output[0] - output[1]).sum(), len(target)))},
    )
    job = job.replace(validation=ValidationConfig(function=job.data.function, args=job.data.args, samples=6))
    found = []
    for stages in (1, 4):
        with OneProcessRun(job, ParallelPlan.mesh(pp=stages, layers=4), "1f1b") as run:
            run.validate(0)
            found.append(run.metrics)
    assert found[0] == found[1] and found[0]["gap"]


# -- what is wrong -----------------------------------------------------------------------------------------------------------


def raises(output: Tensor, target: Tensor) -> Any:
    raise ValueError("no such class")


def writes(output: Tensor, target: Tensor) -> Any:
    return output.zero_().sum(), 1


def leaves_gradients_on(output: Tensor, target: Tensor) -> Any:
    torch.set_grad_enabled(True)
    return output.sum(), 1


def text(output: Tensor, target: Tensor) -> Any:
    return "0.5"


def other_shapes(output: Tensor, target: Tensor) -> Any:
    return output.flatten()[: len(target)].double(), len(target)


@pytest.mark.parametrize(
    "function, says",
    [
        (raises, r"metric 'm' raised ValueError: no such class\n  at stage 1, replica 0, step 0, microbatch 0"),
        (writes, r"metric 'm' writes into the output or the batch, at stage 1, replica 0, step 0, microbatch 0"),
        (text, r"metric 'm' returned a str, at stage 1, replica 0, step 0, microbatch 0"),
        (other_shapes, r"metric 'm' returned \[2\] and \[\] for one microbatch and \[3\] and \[\] for another"),
    ],
)
def test_a_metric_that_is_wrong_is_named_with_its_microbatch(function: Any, says: str):
    layout = Layout("tangled", "1f1b", (1, 1), 4)
    job = with_metrics(layout.job).replace(metrics={"m": MetricConfig(function=function)})
    with OneProcessRun(job, layout.plan, "1f1b", graph=layout.graph) as run, pytest.raises(UserCodeError, match=says):
        run.validate(0)


def test_process_state_that_a_metric_leaves_changed_is_put_back():
    layout = LAYOUTS[1]
    job = with_metrics(layout.job).replace(metrics={"m": MetricConfig(function=leaves_gradients_on)})
    with OneProcessRun(job, layout.plan, "1f1b", graph=layout.graph) as run:
        run.validate(0)
    assert any("metric 'm'" in line for line in run.warnings)


def test_nothing_that_counts_is_nan_and_not_fatal():
    layout = LAYOUTS[1]
    job = with_metrics(layout.job).replace(metrics={"m": MetricConfig(function=lambda output, target: (0, 0))})
    with OneProcessRun(job, layout.plan, "1f1b", graph=layout.graph) as run:
        run.validate(0)
    assert math.isnan(run.metrics["m"])


def mean(output: Tensor, target: Tensor) -> Tensor:
    return (output.argmax(-1) == target).double().mean()


def mean_and_count(output: Tensor, target: Tensor) -> Any:
    return output.square().mean(), target.numel()


def job_of(ref: MetricConfig) -> Any:
    return with_metrics(ugly_models.job("tangled", microbatches=4)).replace(metrics={"m": ref})


@pytest.mark.parametrize(
    "ref, says",
    [
        (MetricConfig(function=mean), r"metric 'm' returned .* twice, so it is a mean, .*\n  cure: return \(sum"),
        (MetricConfig(function=mean_and_count), r"metric 'm' returned .* so it is a mean"),
        (MetricConfig(function=metrics.LastOnly), r"metric 'm/first' would depend on how states are merged: of 3 microbatches"),
        (MetricConfig(function=metrics.CannotMerge), r"metric 'm' \(CannotMerge\) has no merge_state"),
        (MetricConfig(function=metrics.Median, args={"scales": 1}), r"metrics\.m\.args"),
        (MetricConfig(function=raises), r"metric 'm' raised ValueError: no such class"),
        (MetricConfig(function="helpers.metrics:nowhere"), r"cannot import 'helpers.metrics:nowhere'"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_metric_is_said_before_the_run(ref: MetricConfig, says: str):
    with pytest.raises(RayparError, match=re.compile(says, re.DOTALL)):
        preflight(job_of(ref))


@pytest.mark.parametrize("name", ALL)
def test_metrics_that_are_right_pass_the_trial_without_a_word(name: str):
    assert preflight(job_of(ALL[name])).notes == ()


@dataclass
class Logits:
    """What a model of `transformers` returns, as far as metrics read it."""

    logits: Tensor
    loss: Tensor


@pytest.mark.parametrize("shape", ["dict", "dataclass"])
def test_a_mean_of_a_part_of_the_output_is_refused_too_also_where_nothing_is_right_yet(shape: str):
    """An accuracy of 0, as a new model has, was the same for the samples twice without being a mean."""
    logits, target = torch.zeros(4, 6, 9), torch.tensor([[1, 2, 3, -100, -100, 5]] * 4)
    made = {"logits": logits, "loss": torch.tensor(2.0)} if shape == "dict" else Logits(logits, torch.tensor(2.0))

    def hits(output: Any, labels: Tensor) -> Tensor:
        kept, found = labels != -100, output["logits"] if shape == "dict" else output.logits
        return (found.argmax(-1)[kept] == labels[kept]).double()

    def trial(function: Any) -> bool:
        given = function_trial.Measured(made, {"labels": target}, target)
        return function_trial.refuse_means(FunctionMetric("m", function), given)

    assert trial(lambda output, target: hits(output, target).sum())
    assert trial(lambda output, target: (hits(output, target).sum(), int((target != -100).sum())))
    with pytest.raises(ConfigError, match="so it is a mean"):
        trial(lambda output, target: hits(output, target).mean())
    assert not trial(lambda output, target: 0.0), "nothing was compared"


def test_a_metric_that_is_not_exact_may_be_allowed_and_is_named():
    (line,) = preflight(job_of(MetricConfig(function=metrics.LastOnly, exact=False))).notes
    assert line.startswith("metric 'm/first' is not exact: of 3 microbatches merged states give")


class Forgets(metrics.Median):
    """An attribute that an update deletes is there again in an object that is made of the state that was sent."""

    def reset(self) -> None:
        super().reset()
        self.fresh = 1.0

    def update(self, output: Tensor, target: Tensor) -> None:
        super().update(output, target)
        self.__dict__.pop("fresh", None)

    def compute(self) -> dict[str, Tensor]:
        return {"m": torch.tensor(getattr(self, "fresh", 0.0))}


class TwoViews(metrics.Median):
    """Two attributes that are one storage, which a merge writes to through one of them."""

    def reset(self) -> None:
        self.both = self.same = torch.zeros(1, dtype=torch.float64)

    def update(self, output: Tensor, target: Tensor) -> None:
        self.both += target.numel()

    def merge_state(self, other: Any) -> None:
        self.both += other.both

    def compute(self) -> Tensor:
        return self.same.clone()


def median_of_many(values: list[Tensor]) -> Tensor:
    if len(values) < 2:
        raise ValueError("too few")
    return torch.cat(values).median()


class NeedsMany(metrics.Median):
    def compute(self) -> Any:
        return median_of_many(self.seen)


class Draws(metrics.Median):
    """Draws random numbers, which are seeded by the microbatch."""

    def update(self, output: Tensor, target: Tensor) -> None:
        self.seen.append(torch.rand(3, dtype=torch.float64) + random.random() + numpy.random.rand())


def test_a_metric_that_draws_random_numbers_is_no_error():
    found, plain = (preflight(job_of(MetricConfig(function=each))).notes for each in (Draws, metrics.Median))
    assert found == plain


DEPENDS = r"metric 'm.*' depends on how states are merged: of %d microbatch.* merged states give .*, and one object updated"


@pytest.mark.ci
@pytest.mark.parametrize(
    "ref, says",
    [
        (MetricConfig(function=metrics.LastOnly), DEPENDS % 2),
        (MetricConfig(function=Forgets), DEPENDS % 1),
        (MetricConfig(function=TwoViews), DEPENDS % 2),
        (
            MetricConfig(function=NeedsMany),
            r"whether states of metric 'm' merge right could not be tried .*too few",
        ),
        (MetricConfig(function=metrics.LastOnly, exact=False), None),
        (MetricConfig(function=Draws), None),
        *[(ref, None) for ref in ALL.values()],
    ],
)
def test_of_a_model_too_large_for_the_trial_the_first_validation_says_what_merging_loses(
    ref: MetricConfig, says: str | None, monkeypatch: pytest.MonkeyPatch
):
    """A line said that it would, and it computed another value in silence."""
    layout = LAYOUTS[1]
    job = job_of(ref).replace(model=layout.job.model, loss=layout.job.loss)
    with OneProcessRun(job, layout.plan, "1f1b", graph=layout.graph) as run:
        run.validate(0)
    monkeypatch.setattr(plain_microbatches, "MOST_BYTES", 0)
    assert "were not tried before the run" in " ".join(preflight(job).notes)
    with OneProcessRun(job, layout.plan, "1f1b", graph=layout.graph) as untried:
        untried.validate(0)
        measuring = [stage.metrics for core in untried.cores for stage in core.stages.values() if stage.metrics is not None]
        trials = [one for each in measuring for one in each._trials.values() if not one._left]
        assert not any(getattr(one, "_states", None) for one in trials), "it keeps no outputs"
    assert repr(untried.metrics) == repr(run.metrics), "the trial changes no value"
    told = untried.warnings
    assert told == [] if says is None else told and all(re.match(says, line) and "exact: false" in line for line in told)


def share_right(output: Tensor, target: Tensor) -> Tensor:
    return (output.reshape(len(target), -1) > 0).double().mean()


@pytest.mark.parametrize(
    "function, says",
    [
        (share_right, r"metric 'm' returned \S+ for \d samples and for the same samples twice, so it is a mean"),
        (lambda output, target: 0, r"metric 'm' could not be tried with the same samples twice"),
        (lambda output, target: (output.double().sum(), output.numel()), None),
    ],
)
def test_of_a_model_too_large_for_the_trial_the_first_validation_says_that_a_function_returns_a_mean(
    function: Any, says: str | None, monkeypatch: pytest.MonkeyPatch
):
    layout = LAYOUTS[1]
    job = job_of(MetricConfig(function=function)).replace(model=layout.job.model, loss=layout.job.loss)
    monkeypatch.setattr(plain_microbatches, "MOST_BYTES", 0)
    with OneProcessRun(job, layout.plan, "1f1b", graph=layout.graph) as run:
        run.validate(0)
        run.validate(0)
    assert [bool(says and re.match(says, line)) for line in run.warnings] == [True] * len(run.warnings)
    assert bool(run.warnings) == bool(says), run.warnings


def test_objects_of_torchmetrics_are_exact_or_refused():
    import torchmetrics
    from torchmetrics.classification import MulticlassF1Score

    class F1(MulticlassF1Score):
        def update(self, output: Tensor, target: Tensor) -> None:
            super().update(output.flatten(0, 1), target.flatten())

    class Running(torchmetrics.aggregation.RunningMean):
        def update(self, output: Tensor, target: Tensor) -> None:
            super().update(output.mean())

    assert preflight(job_of(MetricConfig(function=F1, args={"num_classes": ugly_models.VOCAB}))).notes == ()
    with pytest.raises(ConfigError, match="metric 'm' would depend on how states are merged"):
        preflight(job_of(MetricConfig(function=Running, args={"window": 2})))


def test_values_of_a_metric_are_numbers_under_names():
    assert values_by_name("m", 3) == values_by_name("m", torch.tensor([3.0])) == {"m": 3.0}
    assert values_by_name("m", {"a": torch.tensor([1.0, 2.0]), "b": 0.5}) == {"m/a/0": 1.0, "m/a/1": 2.0, "m/b": 0.5}
    with pytest.raises(UserCodeError, match=r"metric 'm' has the value a Tensor \[2, 2\]"):
        values_by_name("m", torch.zeros(2, 2))
    with pytest.raises(UserCodeError, match="metric 'm' has 101 values"):
        values_by_name("m", [0.0] * 101)


def test_a_function_without_parameters_makes_the_object():
    def make() -> metrics.Median:
        return metrics.Median(3.0)

    made = make_metric("m", MetricConfig(function=make))
    assert type(made).__name__ == "ObjectMetric" and made.new().scale == 3.0


class WithText(Named):
    """Has a text beside the fields that are tensors, and exactly the samples that it says."""

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index >= len(self):
            raise IndexError(index)
        return {**super().__getitem__(index), "title": f"sample {index}"}


def stacked_with_text(samples: list[dict[str, Any]]) -> dict[str, Any]:
    texts = [sample["title"] for sample in samples]
    return {name: torch.stack([sample[name] for sample in samples]) for name in ("x", "y", "group")} | {"title": texts}


@pytest.mark.parametrize("collate", [None, stacked_with_text], ids=["stacked", "collated"])
def test_fields_that_are_no_tensors_are_left_out_of_what_metrics_get(collate: Any):
    """Also where a step has more samples than the data set."""
    collation = None if collate is None else {"function": collate}
    job = of_named(metrics={"ones": MetricConfig(function=in_group_one)}, metrics_every=1).replace(
        data=DataConfig(function=WithText, collate=collation), validation=ValidationConfig(function=WithText)
    )
    assert job.batch_size > len(WithText())
    preflight(job)
    found = []
    for stages in (1, 2):
        with OneProcessRun(job, ParallelPlan.mesh(pp=stages, layers=2), "1f1b") as run:
            run.step(0)
            found.append(run.metrics)
            run.validate(1)
            found.append(run.metrics)
    assert found[:2] == found[2:] and all(value["ones"] for value in found)


CALLS = [0]


def counts_calls(output: Tensor, target: Tensor) -> Any:
    CALLS[0] += 1
    return output.sum() + CALLS[0], len(target)


def counts_calls_at_the_end(found: Any) -> dict[str, int]:
    CALLS[0] += 1
    return {"calls": CALLS[0]}


@pytest.mark.ci
@pytest.mark.parametrize(
    "metric", [MetricConfig(function=counts_calls), MetricConfig(function=counts_calls_at_the_end, of="all")]
)
def test_a_function_that_depends_on_the_process_is_refused(metric: MetricConfig):
    job = with_metrics(ugly_models.job("plain"), names=()).replace(metrics={"m": metric, "draws": ALL["dropped"]})
    with pytest.raises(ConfigError, match=r"metric 'm', called twice with the same output under the same seed, returned "):
        preflight(job)
    preflight(job.replace(metrics={"draws": ALL["dropped"]}))
