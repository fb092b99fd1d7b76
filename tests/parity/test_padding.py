"""Samples of unequal length are padded as `data.pad` says, in every layout alike; what does not fit is named."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from helpers import ragged
from helpers.captured_jobs import check_run, graph_of
from helpers.ragged import Masked, Plain, Reader, next_word

from raypar.errors import ConfigError, DataError
from raypar.job import DataConfig, FunctionConfig, Job, LossConfig, ModelConfig, OptimizerConfig, PadConfig, ValidationConfig
from raypar.job.contract import contract_of_job
from raypar.plan import ParallelPlan
from raypar.worker.data.padding import Padding, spread_indices
from raypar.worker.data.sample_reader import SampleReader
from raypar.worker.job_preflight import preflight
from raypar.worker.run_in_one_process import OneProcessRun

pytestmark = pytest.mark.part(5)


def job(name: str, data: Any = Masked, model: Any = Reader, **pad: Any) -> Job:
    return Job(
        name=name,
        seed=3,
        steps=3,
        batch_size=10,
        microbatches=4,
        model=ModelConfig(function=model),
        loss=LossConfig(function=next_word),
        data=DataConfig(function=data, target="labels", pad=PadConfig(**pad)),
        optimizer=OptimizerConfig(function="torch.optim:AdamW", args={"lr": 1e-2}),
    )


def read(
    samples: Sequence[Any], read_fields: Sequence[str], target: str = "labels", names: tuple[str, ...] = (), **pad: Any
) -> Any:
    spec = DataConfig(function=lambda: samples, target=target, names=names, pad=PadConfig(**pad))
    return SampleReader.of(samples, spec, 1, read_fields).read([(0, index) for index in range(len(samples))])


@pytest.mark.parametrize("pad", [{"to": [4, 6, 9]}, {"multiple": 4}, {}], ids=str)
def test_padded_batches_have_the_bits_of_one_process(pad: dict[str, Any]):
    spec = job(f"padded {pad}".translate(str.maketrans("", "", " {}[],':")), **pad)
    check_run(spec, ParallelPlan.mesh(pp=2, dp=2, layers=len(graph_of(spec).layers)), "1f1b")


@pytest.mark.ci
def test_lengths_differ_between_steps_on_shards_too():
    spec = job("sharded", model=Plain, multiple=2)
    found = []
    for stages in (1, 2):
        plan = ParallelPlan.mesh(pp=stages, tp=2, layers=len(graph_of(spec).layers))
        with OneProcessRun(spec, plan, "1f1b", graph=graph_of(spec)) as run:
            losses = [run.step(step)[0].loss for step in range(3)]
            found.append((losses, run.parameters()))
    (one, first), (other, second) = found
    assert one == other and first.keys() == second.keys()
    assert all(torch.equal(a, b) for name in first for a, b in zip(first[name], second[name], strict=True))
    assert any(
        len(copies) == 2 and not torch.equal(*copies) for copies in first.values() if len({c.shape for c in copies}) == 1
    )


def test_targets_are_padded_with_a_label_that_does_not_count_and_others_with_zero():
    samples = [{"ids": [5], "labels": [6], "n": 1}, {"ids": [5, 6, 7], "labels": [6, 7, 8], "n": 2}]
    found = read(samples, ("ids", "labels", "n"), to=[2, 4])
    assert found["ids"].tolist() == [[5, 0, 0, 0], [5, 6, 7, 0]] and found["n"].tolist() == [1, 2]
    assert found["labels"].tolist() == [[6, -100, -100, -100], [6, 7, 8, -100]]
    assert read(samples, ("ids", "labels"), value={"ids": 9, "labels": 3})["labels"].tolist() == [[6, 3, 3], [6, 7, 8]]
    assert read(samples, ("ids",), value={"ids": 9})["ids"].tolist() == [[5, 9, 9], [5, 6, 7]]


def test_later_dimensions_and_fields_that_are_not_named_stay():
    samples = [{"x": torch.ones(n, 2), "y": torch.ones(3)} for n in (2, 1)]
    found = read(samples, ("x", "y"), "y", multiple=4, fields=("x",))
    assert found["x"].shape == (2, 4, 2) and found["x"][1, :, 0].tolist() == [1, 0, 0, 0] and found["y"].shape == (2, 3)
    assert all(t.is_contiguous() and t.data_ptr() % 64 == 0 for t in found.values())


class Told(Masked):
    """A data set that tells its lengths."""

    @property
    def lengths(self) -> list[int]:
        return [len(self[index]["ids"]) for index in range(len(self))]


class Column(Masked):
    """As a Hugging Face data set with a column of lengths."""

    column_names = ("ids", "mask", "labels", "length")

    def __getitem__(self, index: Any) -> Any:
        return [len(Masked()[each]["ids"]) for each in range(23)] if index == "length" else super().__getitem__(index)


def listed() -> list[Any]:
    return [Masked()[index] for index in range(23)]


@pytest.mark.parametrize(
    ("data", "field"), [(Told, "length"), (Column, "length"), (listed, "ids")], ids=lambda part: getattr(part, "__name__", part)
)
def test_samples_beyond_the_ladder_are_told_before_the_run_where_lengths_are_known(data: Any, field: str):
    longer = [index for index in range(23) if len(Masked()[index]["ids"]) > 8]
    with pytest.raises(
        DataError,
        match=rf"sample {longer[0]}: its field '{field}' has length 9, and data.pad.to ends with 8; {len(longer)} of 23 "
        r"samples are longer\n  cure: add 9 or more",
    ):
        preflight(job("beyond", data, to=[8]))


def test_else_samples_are_read_for_a_moment_to_find_some(monkeypatch: pytest.MonkeyPatch):
    longer = [index for index in range(23) if len(Masked()[index]["ids"]) > 8]
    with pytest.raises(
        DataError,
        match=rf"sample {longer[0]}: its field 'ids' has length 9, .*; {len(longer)} of 23 samples that were looked at",
    ):
        preflight(job("looked", Masked, to=[8]))
    monkeypatch.setattr("raypar.worker.data.padding.LOOK_S", 0.0)
    asked: list[int] = []
    Padding(PadConfig(to=[8]), "labels").check_lengths(
        Masked(), 23, ("ids",), lambda index: asked.append(index) or {"ids": [1]}
    )  # type: ignore[func-returns-value]
    assert len(asked) <= 2
    for size in (1, 2, 3, 10, 23, 100):
        assert sorted(spread_indices(size)) == list(range(size))


def test_else_at_the_step_that_reads_them():
    with pytest.raises(
        DataError,
        match=r"sample \d+: its field 'ids' has length 9, and data.pad.to ends with 8\n  cure: add 9 or more to data.pad.to",
    ):
        read([dict(Masked()[index]) for index in range(23)], ("ids",), to=[4, 8])


BAD = {
    "a float target": (
        ([{"x": [1.0]}, {"x": [1.0, 2.0]}], ("x",), "x"),
        {},
        r"pads the target 'x', of torch.float32, and does not say with which",
    ),
    "half a label": (
        ([{"x": [1]}], ("x",), "y"),
        {"value": {"x": 0.5}},
        r"data.pad.value.x is 0.5, and the field has integers",
    ),
    "a number beyond bytes": (
        ([{"x": torch.zeros(1, dtype=torch.uint8)}], ("x",), "y"),
        {"value": {"x": 256}},
        r"data.pad.value.x is 256, and the field \(torch.uint8\) has numbers from 0 to 255\n",
    ),
    "a label below 0 of bools": (
        ([{"x": torch.zeros(1, dtype=torch.bool)}], ("x",), "y"),
        {"value": {"x": -100}},
        r"data.pad.value.x is -100, and the field \(torch.bool\) has numbers from 0 to 1\n",
    ),
    "beyond half precision": (
        ([{"x": torch.zeros(1, dtype=torch.float16)}], ("x",), "y"),
        {"value": {"x": -1e9}},
        r"data.pad.value.x is -1000000000.0, and the field \(torch.float16\) would have -inf instead\n  cure: ",
    ),
    "an infinite integer": (
        ([{"x": [1]}], ("x",), "y"),
        {"value": {"x": float("inf")}},
        r"data.pad.value.x is inf, and the field has integers",
    ),
    "other widths": (
        ([{"x": torch.ones(1, 2)}, {"x": torch.ones(1, 3)}], ("x",), "y"),
        {},
        r"sample 1 .*expected a length, then \[2\] torch.float32, as in sample 0, found \[1, 3\]",
    ),
    "other types": (
        ([{"x": [1]}, {"x": [1.0]}], ("x",), "y"),
        {},
        r"sample 1 .*found \[1\] torch.float32\n  cure: data.pad pads the first dimension only",
    ),
}


def test_numbers_that_a_dtype_rounds_are_numbers_that_it_has():
    for dtype, value in (
        (torch.bfloat16, 0.1),
        (torch.float16, -float("inf")),
        (torch.float32, float("nan")),
        (torch.int8, -128),
    ):
        samples = [{"x": torch.zeros(n, dtype=dtype)} for n in (1, 2)]
        want = torch.tensor(value, dtype=dtype)
        found = read(samples, ("x",), "y", value={"x": value})["x"][0, 1]
        assert torch.equal(found, want) or (found != found and want != want)


@pytest.mark.parametrize(("given", "pad", "says"), BAD.values(), ids=BAD)
def test_what_cannot_be_padded_is_refused(given: Any, pad: dict[str, Any], says: str):
    with pytest.raises(DataError, match=says):
        read(*given, **pad)


def test_without_pad_the_error_names_it():
    spec = DataConfig(function=Masked)
    with pytest.raises(
        DataError, match=r"expected shape \(\d,\).*\n  cure: pad or crop .*; or let data.pad do it: \{multiple: 64\}"
    ):
        SampleReader.of(Masked(), spec, 1, ("ids",)).read([(0, 0), (0, 1)])


@pytest.mark.parametrize(
    ("pad", "says"),
    [
        ({"to": [8, 4]}, r"pad.to is \[8, 4\]\n  cure: give lengths that rise"),
        ({"to": [8], "multiple": 4}, r"pad has to: \[8\] and multiple: 4, and a batch has one length"),
    ],
)
def test_lengths_that_contradict_each_other_are_refused(pad: dict[str, Any], says: str):
    with pytest.raises(ConfigError, match=says):
        PadConfig(**pad)


@pytest.mark.ci
@pytest.mark.parametrize("part", ["fields", "value"])
def test_names_that_no_field_has_are_refused_before_the_run(part: str):
    """Else the field that is meant would be padded with 0."""
    given: Any = {"fields": ("ids", "mask", "labels", "idss")} if part == "fields" else {"value": {"idss": 3}}
    with pytest.raises(ConfigError, match=rf"data.pad.{part} names 'idss', and samples have the fields ids, mask, labels\n"):
        preflight(job("misspelt", **given))
    spec = job("misspelt-in-validation")
    with pytest.raises(ConfigError, match=rf"validation.pad.{part} names 'idss', and samples have"):
        preflight(spec.replace(validation=ValidationConfig(function=Masked, pad=PadConfig(**given))))


def test_a_collate_function_pads_itself():
    spec = DataConfig(function=Masked, target="labels", collate=FunctionConfig(function=ragged.longest), pad=PadConfig())
    with pytest.raises(ConfigError, match=r"data has pad, and collate longest, which makes batches of its own"):
        SampleReader.of(Masked(), spec, 1)


def test_validation_is_padded_as_training_unless_it_says_otherwise():
    spec = job("validated", to=[4, 9])
    for own, want in (
        ({}, spec.data.pad),
        ({"pad": PadConfig(multiple=8)}, PadConfig(multiple=8)),
        ({"collate": FunctionConfig(function="m:c")}, None),
    ):
        assert spec.replace(validation=ValidationConfig(function=Masked, **own)).validation_data.pad == want
    assert spec.replace(validation=ValidationConfig(function=Masked)).validation_data.target == "labels"


def test_the_contract_has_the_lengths():
    assert contract_of_job(job("a", to=[4, 9]))["data"]["pad"] == {"to": [4, 9]}  # type: ignore[index,call-overload]
    assert contract_of_job(job("a"))["data"]["pad"] == {}  # type: ignore[index,call-overload]


def test_the_models_own_loss_has_its_labels_padded():
    spec = job("own").replace(loss=LossConfig(function="model"), data=DataConfig(function=Masked, pad=PadConfig()))
    assert spec.training_data.target == "labels"
