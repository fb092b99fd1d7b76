"""Contracts that checkpoints of before hold: the same job has the same contract in every release.

`tests/data/contracts.json` was made by the release before jobs became one tree, and is never made anew: a key that is added
later must be left out of the contract where it has its default, or be no difference where a checkpoint lacks it.
"""

import functools
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from raypar.errors import CheckpointError
from raypar.files.safe_yaml import dump_yaml
from raypar.job import Job, PrecisionConfig
from raypar.job.contract import NAMES, contract_of_job, keys_that_may_change
from raypar.job.function_section import ModelConfig
from raypar.job.key import marked_keys
from raypar.job.read_job import parse_job
from raypar.job.walk_sections import dotted_keys
from raypar.launch.launch_options import LaunchOptions
from raypar.launch.make_run_request import contract_fields
from raypar.trainer import Trainer
from raypar.worker.checkpoint.contract_comparison import check_number_of_samples, list_contract_differences

STORED: dict[str, Any] = json.loads((Path(__file__).parents[1] / "data/contracts.json").read_text())
FILES = {name: entry for name, entry in STORED.items() if "job" in entry}
"""Those of job files: each has its `job`, and the `contract` that checkpoints of it hold."""


class Net(nn.Sequential):
    """A model by its class."""


class Samples(list[Any]):
    """A data set with a text of its own."""

    def __repr__(self) -> str:
        return "Samples"


def loss(output: Any, target: Any, scale: float = 1.0) -> Any:
    return output


def warm(step: int) -> float:
    return 1.0


def base(**changes: Any) -> dict[str, Any]:
    return {
        "steps": 2,
        "batch_size": 4,
        "microbatches": 2,
        "model": Net,
        "loss": loss,
        "data": [{"x": 1}, {"x": 2}],
        **changes,
    }


GIVEN: dict[str, Callable[[], dict[str, Any]]] = {
    "python: classes, functions and a list": base,
    "python: pairs": lambda: base(model=(Net, {"width": 3}), optimizer=(torch.optim.SGD, {"lr": 0.1, "betas": (0.9, 0.99)})),
    "python: a loss module": lambda: base(loss=nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0]), label_smoothing=0.1)),
    "python: partials": lambda: base(
        loss=functools.partial(loss, scale=2.0), lr_schedule=functools.partial(warm), data=functools.partial(Samples, [1])
    ),
    "python: a tensor, a set and a dtype as arguments": lambda: base(
        model=(Net, {"start": torch.arange(3.0), "names": {"b", "a"}, "dtype": torch.float64, "nested": {"t": torch.ones(2)}})
    ),
    "python: a data set with a text of its own": lambda: base(data=Samples([1, 2])),
    "python: a long list of samples": lambda: base(data=[{"x": number} for number in range(3000)]),
    "python: fields of samples, validation": lambda: base(
        data={"function": Samples([1]), "input": "ids", "target": "labels", "names": ["ids", "labels"]},
        validation={"function": Samples([1]), "every": 1},
        optimizer={"function": torch.optim.AdamW, "args": {"lr": 0.1}, "groups": [{"match": "*.bias", "lr": 0.0}]},
    ),
}
"""Jobs that no job file can express, as `Trainer`'s arguments."""


ADDED = {"input", "target", "names"}
"""Of `data`: what contracts have that checkpoints of before lack."""


def contract(job: Job) -> dict[str, Any]:
    """Without what has been added, as of the edition of the numerics contract by which the stored ones were computed."""
    made = contract_of_job(job)
    assert made["data"].keys() >= ADDED and made["edition"] >= 2
    return {**made, "edition": 2, "data": {name: value for name, value in made["data"].items() if name not in ADDED}}


def differences(stored: dict[str, Any], job: Job) -> list[str]:
    return list_contract_differences(SimpleNamespace(contract=stored), job)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", FILES)
def test_the_contract_of_a_job_file_is_what_checkpoints_hold(name: str):
    job, stored = parse_job(dump_yaml(FILES[name]["job"])), FILES[name]["contract"]
    assert contract(job) == stored
    assert differences(stored, job) == []


@pytest.mark.parametrize("name", GIVEN)
def test_the_contract_of_a_job_from_python_is_what_checkpoints_hold(name: str):
    job, stored = Trainer(**GIVEN[name]()).job, STORED[name]["contract"]
    assert contract(job) == stored and differences(stored, job) == []


def test_a_job_goes_on_from_what_its_own_run_writes_into_checkpoints():
    """They also hold a digest of the job's code, of which a change is a warning."""
    job = parse_job(dump_yaml(FILES["the least that a job needs"]["job"]))
    written = contract_fields(LaunchOptions(job, make_folder=lambda chosen: None))["contract"]  # type: ignore[arg-type, return-value]
    assert written.keys() - contract_of_job(job).keys() == {"code"}
    assert differences(written, job) == []


def test_every_contract_is_compared():
    assert set(STORED) == {*FILES, *GIVEN} and len(FILES) >= 60


def test_the_stored_jobs_set_every_key_that_there_was():
    def paths(tree: Any, above: str = "") -> set[str]:
        if isinstance(tree, list):
            return {path for item in tree for path in paths(item, above)}
        if not isinstance(tree, dict):
            return set()
        inner = {f"{above}.{key}".removeprefix(".") for key in tree}
        return inner | {path for key, value in tree.items() for path in paths(value, f"{above}.{key}".removeprefix("."))}

    there = {path for entry in FILES.values() for path in paths(entry["job"])}
    assert set(STORED["a job with every key set"]["keys"]) - there == set()
    assert set(STORED["a job with every key set"]["keys"]) <= set(dotted_keys(Job))


def test_only_the_keys_that_decide_bits_change_a_contract():
    """Each stored job `KEY = ...` differs from the first by one key; those whose contract differs too are the ones that do."""
    plain = FILES["the least that a job needs"]["contract"]
    changing = {name.partition(" = ")[0] for name, entry in FILES.items() if " = " in name and entry["contract"] != plain}
    assert changing == {
        *("batch_size", "clip_norm", "data", "data.args", "device", "dtype", "loss", "loss.args", "lr_schedule", "seed"),
        *("lr_schedule.args", "microbatches", "model", "model.args", "model.buffers", "model.units", "non_finite", "optimizer"),
        *("optimizer.args", "optimizer.groups", "plan.sequence_parallel", "plan.styles", "precision", "reduction", "threads"),
        "virtual_replicas",
    }


@pytest.mark.parametrize("name", [name for name in FILES if " = " in name])
def test_a_setting_that_only_one_of_job_and_checkpoint_has_is_a_difference(name: str):
    """A checkpoint of the plain job and the job `KEY = ...`, and the other way round."""
    plain, other = (parse_job(dump_yaml(FILES[one]["job"])) for one in ("the least that a job needs", name))
    was, is_ = contract_of_job(plain), contract_of_job(other)
    decide = {key for key in {*was, *is_} if was.get(key) != is_.get(key)} - keys_that_may_change().keys()
    for stored, job in ((was, other), (is_, plain)):
        assert {line.partition(" was ")[0] for line in differences(stored, job)} == decide


@pytest.mark.parametrize("change", [{"input": "ids"}, {"target": "labels"}, {"names": ["a", "b"]}])
def test_how_samples_are_used_is_in_the_contract(change: dict[str, Any]):
    job = FILES["the least that a job needs"]["job"]
    plain = parse_job(dump_yaml(job))
    other = parse_job(dump_yaml({**job, "data": {"function": job["data"], **change}}))
    validated = parse_job(dump_yaml({**job, "validation": {"function": job["data"], **change}}))
    (line,) = differences(contract_of_job(plain), other)
    assert line.startswith("data was ") and repr(next(iter(change))) in line
    assert differences(contract_of_job(other), plain) != []
    assert differences(FILES["the least that a job needs"]["contract"], other) == []  # which says nothing of them
    assert contract_of_job(validated) == contract_of_job(plain)


@pytest.mark.parametrize(
    "change",
    [{"collate": "m:pad"}, {"pad": {"multiple": 8}}, {"shuffle": False}, {"drop_last": True}],
    ids=lambda change: next(iter(change)),
)
def test_how_batches_are_made_is_a_difference_whichever_of_job_and_checkpoint_says_it(change: dict[str, Any]):
    job = FILES["the least that a job needs"]["job"]
    plain, other = parse_job(dump_yaml(job)), parse_job(dump_yaml({**job, "data": {"function": job["data"], **change}}))
    for stored, now in ((contract_of_job(plain), other), (contract_of_job(other), plain), (contract(plain), other)):
        (line,) = differences(stored, now)
        assert line.startswith("data was ") and repr(next(iter(change))) in line


def test_a_checkpoint_of_other_data_is_refused_with_both_numbers_of_samples():
    job = parse_job(dump_yaml(FILES["the least that a job needs"]["job"]))
    manifest: Any = SimpleNamespace(contract={**contract_of_job(job), "samples": 1000}, checkpoint="c")
    assert list_contract_differences(manifest, job) == []
    check_number_of_samples(manifest, 1000)
    check_number_of_samples(SimpleNamespace(contract=contract_of_job(job), checkpoint="c"), 7)  # type: ignore[arg-type]
    with pytest.raises(CheckpointError, match=r"checkpoint c was trained on 1,000 samples, and data gives 1,200: the order"):
        check_number_of_samples(manifest, 1200)


class RoundedPrecision(PrecisionConfig):
    """A section of a later release, with one more key."""

    rounding: str = "nearest"


class SeededModel(ModelConfig):
    """A function of a later release, with one more key."""

    seeds: int = 1


def test_a_later_key_of_a_section_is_in_the_contract_where_it_is_set_and_only_there():
    """Checkpoints of before it keep their contract."""
    plain = parse_job(dump_yaml(FILES["precision = 1"]["job"]))
    assert plain.precision is not None
    compute, function = plain.precision.compute, plain.model.function
    former = contract(plain)
    assert contract(plain.replace(precision=RoundedPrecision(compute=compute))) == former
    assert contract(plain.replace(model=SeededModel(function=function))) == former
    rounded = contract(plain.replace(precision=RoundedPrecision(compute=compute, rounding="up")))
    assert rounded == former | {"precision": {"compute": compute, "rounding": "up"}}
    seeded = contract(plain.replace(model=SeededModel(function=function, seeds=2)))
    assert seeded == former | {"model": former["model"] | {"seeds": 2}}


def test_no_two_keys_have_the_same_name_in_a_contract():
    deciding = [NAMES.get(name, name) for name, marker in marked_keys(Job) if marker is not None and marker.decides_bits]
    assert len(deciding) == len(set(deciding)) and set(NAMES) <= {name for name, _ in marked_keys(Job)}
