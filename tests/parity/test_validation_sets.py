"""Several validation sets: each has, in every layout, the bits of a validation of it alone in one process."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import pytest
import torch
from helpers import metrics, ugly_models
from helpers.parity import Layout
from torch import Tensor, nn

import raypar
from raypar.comm.local_transport import LocalMesh
from raypar.errors import ConfigError, DataError, UserCodeError, WorkerLost
from raypar.job import DataConfig, Job, LossConfig, MetricConfig, ModelConfig, ValidationConfig
from raypar.job.data_section import ValidationSetConfig
from raypar.plan import ParallelPlan
from raypar.plan.microbatches import Microbatches, MicrobatchesOfSets, mean_loss, mean_loss_by_set
from raypar.worker.job_preflight import preflight
from raypar.worker.run_in_one_process import OneProcessRun
from raypar.worker.stage.initial_state import InitialStageState

pytestmark = pytest.mark.part(4)

SETS: dict[str, ValidationSetConfig] = {
    "long": ValidationSetConfig(function=ugly_models.Tokens, args={"size": 41}, samples=13),
    "short": ValidationSetConfig(function=ugly_models.Tokens, args={"size": 7}, batch_size=2, metrics=("median", "dropped")),
    "one": ValidationSetConfig(function=ugly_models.Tokens, args={"size": 1}, metrics=()),
}
ALL = {
    "accuracy": MetricConfig(function=metrics.accuracy),
    "certainty": MetricConfig(function=metrics.certainty),
    "dropped": MetricConfig(function=metrics.dropped),
    "median": MetricConfig(function=metrics.Median, args={"scale": 2.0}),
}
LAYOUTS = [
    Layout("tangled", "1f1b", (1,), 4),
    Layout("tangled", "1f1b", (2, 2), 4),
    Layout("tangled", "gpipe", (1, 2, 3, 1), 4),
    Layout("tangled", "gpipe", (2, 3), 4),
    Layout("tangled", "interleaved", (2, 2), 4, chunks=2),
    Layout("tangled", "zb-v", (2, 2), 4),
    Layout("tangled", "1f1b", (4,), 4),
]


def values_alone(job: Job, layout: Layout, name: str) -> dict[str, float]:
    """The values of one set, by a job that validates on it alone, in one process."""
    one = SETS[name]
    own = ValidationConfig(**{key: getattr(one, key) for key in one.model_fields_set})
    one_process = Layout(layout.model, "1f1b", (1,), layout.microbatches)
    with OneProcessRun(job.replace(validation=own), one_process.plan, "1f1b", graph=layout.graph) as run:
        return {"loss": run.validate(0), **run.metrics}


WANTED: dict[str, float] = {}


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_each_set_has_the_bits_of_a_validation_of_it_alone(layout: Layout):
    job = layout.job.replace(metrics=ALL)
    if not WANTED:
        alone = {name: values_alone(job, layout, name) for name in SETS}
        WANTED.update({f"{name}/{each}": value for name, values in alone.items() for each, value in values.items()})
        assert {"long/accuracy", "short/median/last", "one/loss"} <= set(WANTED) and "short/accuracy" not in WANTED
        assert all(math.isfinite(value) for value in WANTED.values()) and len({WANTED[f"{name}/loss"] for name in SETS}) == 3
    with OneProcessRun(
        job.replace(validation=ValidationConfig(sets=SETS)), layout.plan, layout.schedule, graph=layout.graph, seed=3
    ) as run:
        whole = run.validate(0)
    assert run.metrics == WANTED
    assert [name for name in run.metrics if "/loss" not in name] == [name for name in WANTED if "/loss" not in name]
    losses = [run.metrics[f"{name}/loss"] for name in SETS]
    assert min(losses) < whole < max(losses), "of all samples"


def test_each_set_has_data_processes_that_read_it():
    layout = LAYOUTS[0]
    sets = {name: one.replace(processes=1) for name, one in SETS.items()}
    job = layout.job.replace(validation=ValidationConfig(sets=sets))
    with OneProcessRun(job, layout.plan, layout.schedule, graph=layout.graph) as run:
        loaders: Any = run.cores[0].validation_loader
        read = {name: loader._processes._spec.args for name, loader in loaders.loaders.items()}
    assert read == {name: one.args for name, one in SETS.items()}


@pytest.mark.parametrize("after", range(5))
def test_a_pass_that_was_broken_off_anywhere_is_made_again_with_the_same_values(after: int):
    """By workers that keep their state, as after the loss of another one."""
    layout = LAYOUTS[1]
    job = layout.job.replace(metrics=ALL, validation=ValidationConfig(sets=SETS))
    with OneProcessRun(job, layout.plan, layout.schedule, graph=layout.graph) as run:
        run.validate(0)
        wanted = run.metrics
        stage = run.cores[-1].stages[1, 0]
        evaluate, left = stage.evaluate, iter(range(after))

        def broken(microbatch: int, *given: Any) -> Any:
            if next(left, None) is None:
                stage.evaluate = evaluate  # type: ignore[method-assign]
                raise WorkerLost("another worker is lost", cure="")
            return evaluate(microbatch, *given)

        stage.evaluate = broken  # type: ignore[method-assign]
        with contextlib.suppress(WorkerLost):
            run.validate(0)
            raise AssertionError("the pass was not broken off")
        run.mesh = LocalMesh(layout.plan.world)
        for core, transport in zip(run.cores, run.mesh.transports, strict=True):
            core.adopt(core.assignment, transport, values=state_of(core))
        run.validate(0)
        assert run.metrics == wanted


def state_of(core: Any) -> dict[Any, InitialStageState]:
    return {
        key: InitialStageState({name: value.detach().clone() for name, value in (stage.parameters | stage.buffers).items()})
        for key, stage in core.stages.items()
    }


class Read(torch.utils.data.Dataset[Any]):
    """Keeps the ids that were read, of all sets."""

    seen: ClassVar[list[tuple[str, int]]] = []

    def __init__(self, name: str, size: int) -> None:
        self.name, self.size = name, size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        Read.seen.append((self.name, index))
        return {"x": torch.full((4,), float(index)), "y": torch.tensor(float(index))}


class Counted(torch.utils.data.IterableDataset[Any]):
    """Samples one after the other."""

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        for index in range(50):
            yield {"x": torch.full((4,), index / 50), "y": torch.tensor(1.0)}


def small(sets: dict[str, Any], **given: Any) -> Job:
    return ugly_models.job("plain", microbatches=2).replace(
        model=ModelConfig(function=lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))),
        data=DataConfig(function=lambda: Read("training", 9)),
        loss=LossConfig(function=ugly_models.mean_loss),
        validation=ValidationConfig(sets={name: ValidationSetConfig(**one) for name, one in sets.items()}),
        **given,
    )


def test_every_sample_of_every_set_is_read_once_in_a_pass():
    """By the one worker of a stage that reads: no batch size divides the sets."""
    job = small({name: {"function": Read, "args": {"name": name, "size": size}} for name, size in (("a", 11), ("b", 3))})
    for plan in (ParallelPlan.mesh(layers=2), ParallelPlan.mesh(dp=3, layers=2)):
        with OneProcessRun(job, plan, "1f1b") as run:
            Read.seen.clear()
            run.validate(0)
        assert sorted(Read.seen) == [*(("a", n) for n in range(11)), *(("b", n) for n in range(3))]


def test_a_set_may_be_iterable_beside_one_that_is_not():
    sets = {"mapped": {"function": Read, "args": {"name": "m", "size": 5}}, "read": {"function": Counted, "samples": 7}}
    found = []
    for plan in (ParallelPlan.mesh(layers=2), ParallelPlan.mesh(pp=2, dp=2, layers=2)):
        checked = preflight(small(sets))
        assert checked.samples_of_sets == {"mapped": 5, "read": 7} and checked.job.reads_streams
        with OneProcessRun(checked.job, plan, "1f1b") as run:
            run.validate(0)
            found.append(dict(run.metrics))
    assert found[0] == found[1] and set(found[0]) == {"mapped/loss", "read/loss"}


def of_batch(output: Tensor, batch: Mapping[str, Tensor]) -> tuple[Tensor, int]:
    return batch["x"].sum(), len(output)


def test_metrics_of_the_batch_measure_sets_beside_data_that_is_read_as_streams():
    """The first stage reads all fields, of the training data and of every set."""
    job = small({"a": {"function": Read, "args": {"name": "a", "size": 5}}, "b": {"function": Counted, "samples": 7}})
    job = job.replace(data=DataConfig(function=Counted, streams=1), metrics={"of_batch": MetricConfig(function=of_batch)})
    job = preflight(job).job
    with OneProcessRun(job, ParallelPlan.mesh(pp=2, dp=2, layers=2), "1f1b") as run:
        run.validate(0)
    assert run.metrics["a/of_batch"] == 4 * sum(range(5)) / 5
    assert run.metrics["b/of_batch"] == pytest.approx(4 * sum(range(7)) / 50 / 7)


# -- what is wrong ---------------------------------------------------------------------------------------------------------


def of_kind(**fields: Tensor) -> Any:
    return lambda: [{"x": torch.zeros(4), "y": torch.tensor(0.0)} | fields] * 3


def test_sets_that_differ_in_kind_are_refused_before_the_run_and_longer_ones_are_not():
    def check(one: Any, other: Any, model: Any) -> None:
        preflight(small({"a": {"function": one}, "b": {"function": other}}).replace(model=ModelConfig(function=model)))

    def linear() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))

    with pytest.raises(DataError, match=r"field 'y' is int64 with 1 dimensions in the validation set b, and float32 with 1"):
        check(of_kind(), of_kind(y=torch.tensor(1)), linear)
    with pytest.raises(DataError, match=r"field 'x' is float32 with 3 dimensions in the validation set b, and float32 with 2"):
        check(of_kind(), of_kind(x=torch.zeros(2, 4)), linear)
    check(of_kind(), lambda: [{"y": torch.tensor(1.0), "x": torch.ones(4)}] * 5, linear)


def test_what_is_wrong_with_a_set_names_it():
    def broken() -> list[Any]:
        return [{"x": torch.zeros(4)}] * 3

    with pytest.raises(DataError, match=r"validation\.b: sample 0 has no field 'y'"):
        preflight(small({"a": {"function": of_kind()}, "b": {"function": broken}}))
    with (
        pytest.raises(DataError, match=r"validation set b: sample 2 has no field 'y'"),
        OneProcessRun(
            small({"a": {"function": of_kind()}, "b": {"function": lambda: [*of_kind()()[:2], *broken()]}}),
            ParallelPlan.mesh(layers=2),
            "1f1b",
        ) as run,
    ):
        run.validate(0)


def test_a_set_without_samples_is_named():
    with pytest.raises(DataError, match=r"data set validation\.b .* is empty\n  cure: check its arguments"):
        preflight(small({"a": {"function": of_kind()}, "b": {"function": list}}))


@pytest.mark.parametrize("key", ["samples", "metrics", "pack", "every", "parquet"])
def test_a_set_with_the_name_of_a_key_stands_in_sets(key: str):
    given = {"every": 2, key: {"function": "m:f"}, "b": {"function": "m:g"}}
    for make in (ValidationConfig.model_validate, trainer):
        with pytest.raises(
            ConfigError, match=rf"validation\.{key} is a data set, and {key} is a key of validation\n  cure: write"
        ):
            make(given)
    assert set(trainer({"sets": {key: {"function": "m:f"}}}).validation_sets) == {key}


def test_two_sets_of_one_name_are_refused():
    given = {"a": {"function": "m:f"}, "sets": {"a": {"function": "m:g"}}}
    for make in (ValidationConfig.model_validate, trainer):
        with pytest.raises(
            ConfigError, match=r"validation has two sets a, one of them in sets\n  cure: give one of them another"
        ):
            make(given)


def trainer(validation: Any) -> Job:
    data = lambda: Read("t", 9)  # noqa: E731
    given = {"model": "m:f", "loss": "m:l", "steps": 1, "batch_size": 2, "microbatches": 1}
    return raypar.Trainer(**given, data=data, validation=validation).job


def raises_on_b(output: Tensor, target: Tensor) -> tuple[Tensor, int]:
    if float(target.sum()) == 3.0:
        raise ValueError("no")
    return output.sum(), 1


def test_so_does_what_a_metric_raises():
    job = small(
        {"a": {"function": of_kind()}, "b": {"function": of_kind(y=torch.tensor(1.0))}},
        metrics={"m": MetricConfig(function=raises_on_b)},
    )
    with (
        pytest.raises(UserCodeError, match=r"microbatch 0 of validation set b"),
        OneProcessRun(job, ParallelPlan.mesh(layers=2), "1f1b") as run,
    ):
        run.validate(0)


# -- numbers -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [(1,), (3, 1), (4, 7, 2), (1, 1, 1, 9)])
def test_the_microbatches_of_a_pass_are_those_of_each_set_one_after_the_other(sizes: tuple[int, ...]):
    parts = {f"s{number}": Microbatches(count, count, 2 * count + 1) for number, count in enumerate(sizes)}
    whole = MicrobatchesOfSets.of(parts)
    places = [whole.place_in_set(microbatch) for microbatch in range(whole.count)]
    assert places == [(name, number) for name, part in parts.items() for number in range(part.count)]
    offsets = [index for microbatch in range(whole.count) for index in whole.samples(microbatch)]
    assert offsets == list(range(sum(part.batch_size for part in parts.values())))
    assert [len(own) for own in whole.by_set.values()] == list(sizes) and whole.blocks == whole.count


def test_each_set_has_a_loss_of_its_own_microbatches():
    whole = MicrobatchesOfSets.of({"a": Microbatches(2, 2, 4), "b": Microbatches(1, 1, 1)})
    losses = {0: (4.0, 2.0), 2: (3.0, 1.0), 1: (0.0, 2.0)}
    assert mean_loss_by_set(whole, losses) == {"a": 1.0, "b": 3.0}
    assert mean_loss_by_set(Microbatches(3), losses) == mean_loss_by_set(None, losses) == {}


@pytest.mark.parametrize("counts", [(0.0, 0.0), (1.0, math.inf), (1.0, -2.0), (1.0, math.nan)])
def test_a_loss_that_cannot_be_divided_by_its_count_is_nan(counts):
    mean, _ = mean_loss({m: (3.0, count) for m, count in enumerate(counts)})
    assert math.isnan(mean)
