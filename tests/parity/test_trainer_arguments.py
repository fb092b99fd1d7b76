"""What a script gives `Trainer` wrongly is said before anything starts."""

import dataclasses
import functools
import json
import re
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from helpers import checkpoint_folders as checkpoint_files
from pyarrow.fs import LocalFileSystem, S3FileSystem, SubTreeFileSystem
from ray.train import Checkpoint, CheckpointConfig, FailureConfig, LoggingConfig, RunConfig
from torch import nn
from torch.utils.data import DataLoader

import raypar
from raypar.callbacks import Callback, EarlyStopping
from raypar.cli import main
from raypar.errors import CheckpointError, ConfigError, DataError, PlanError
from raypar.job import DataConfig, ElasticConfig, InitFromConfig, PrecisionConfig, ValidationConfig
from raypar.job.contract import contract_of_job
from raypar.job.stable_callable_text import find_unstable_argument, stable_argument_text, stable_callable_label
from raypar.launch.forward_run import choose_data
from raypar.launch.resume import prepare_resumed_run
from raypar.launch.trainer_arguments import validation_argument
from raypar.worker import measure_profile
from raypar.worker.checkpoint import contract_comparison
from raypar.worker.checkpoint.check_job_changes import changes_at_resume
from raypar.worker.job_preflight import preflight
from raypar.worker.worker_core import WorkerCore

GIVEN = {"model": "m:f", "loss": "m:f", "data": "m:f", "steps": 1, "batch_size": 1, "microbatches": 1}


@pytest.mark.parametrize(
    "wrong, says",
    [
        ({"batchsize": 3}, r"unknown argument batchsize: did you mean batch_size\?\n.*arguments of Trainer: name, seed"),
        ({"nonsense_at_all": 3}, r"unknown argument nonsense_at_all\n.*arguments of Trainer: .*, run_config"),
        ({"adress": "auto"}, r"unknown argument adress: did you mean address\?"),
        ({"shards": 2}, r"unknown argument shards: did you mean plan.shards\?"),
        (
            {"model": nn.Sequential(nn.Linear(3000, 3000, device="meta"))},
            r"model is a Sequential that is built already, with 34 MiB of values; up to 32 MiB .*\n.*a function .*init_from",
        ),
        ({"validation": {"function": "m:f", "evry": 2}}, r"unknown key validation.evry: did you mean validation.every\?"),
        ({"data": {"inptu": "x"}}, r"unknown key data.inptu: did you mean data.input\?; data.function is missing"),
        (
            {"data": {"train": [1], "test": [2]}},
            r"data is a dict with keys train, test, not a data set\n.*of several splits, one",
        ),
        (
            {"data": 3},
            r"data: expected module:name, or keys and values \(function, .*\), got 3 .*\n.*the function itself, or a pair",
        ),
        (
            {"loss": object()},
            r"loss: expected module:name, or keys and values .*, got <object .*\n.*the function itself, or a pair",
        ),
        (
            {"data": DataLoader([1, 2], 3)},
            r"data is a DataLoader with batch_size 3, and the job's batch_size is \d+\n.*, or None",
        ),
        (
            {"optimizer": torch.optim.AdamW(nn.Linear(1, 1).parameters())},
            r"optimizer is an AdamW\n.*its class.*optimizer=\(AdamW, \{'lr': \.\.\.\}\)",
        ),
        ({"elastic": "yes"}, r"elastic: expected keys and values \(min_workers, .*\), got 'yes'"),
        ({"elastic": {"min_worker": 2}}, r"unknown key elastic.min_worker: did you mean elastic.min_workers\?"),
        ({"init_from": {"a": torch.zeros(1)}}, r"init_from is a state_dict with 1 entries.*\n.*save_file"),
        ({"num_workers": 2}, r"unknown argument num_workers\n.*plan.stages x plan.replicas"),
        ({"num_epochs": 2}, r"unknown argument num_epochs\n.*`steps`"),
        ({"elastic": {"min_workers": 0}}, r"elastic.min_workers: expected greater than 0, got 0"),
        ({"elastic": {"mirror": "on"}}, r"elastic.mirror: expected auto, off, or a number of steps, got 'on'"),
        ({"reduction": "foo"}, r"reduction: expected 'canonical' or 'fast', got 'foo' .*\n.*correct the argument reduction"),
        (
            {"dtype": "bfloat16"},
            r"dtype: expected 'float32' or 'float64', got 'bfl.*' .*\n.*set precision to ..compute.: .bf16",
        ),
        (
            {"precision": "bf16"},
            r"precision: expected keys and values .compute, parameters, master, gradients, loss_scale., got 'bf16'.*\n"
            r".*for mixed precision it is .*bf16",
        ),
        ({"precision": {"comput": "bf16"}}, r"unknown key precision.comput: did you mean precision.compute\?"),
        ({"precision": {"compute": "fp8"}}, r"precision.compute: expected 'bf16' or 'fp16', got 'fp8'"),
        ({"precision": {"compute": "bf16"}, "dtype": "float64"}, r"precision.compute is bf16, but dtype is float64"),
        ({"device": "tpu"}, r"device: expected 'cpu' or 'gpu', got 'tpu'"),
        ({"steps": -5}, r"steps: expected greater than 0, got -5"),
        ({"steps": "10"}, r"steps: expected a valid integer, got '10'"),
        ({"steps": 10.0}, r"steps: expected a valid integer, got 10.0"),
        ({"batch_size": 0}, r"batch_size: expected greater than 0, got 0"),
        ({"clip_norm": -1}, r"clip_norm: expected greater than 0, got -1"),
        (
            {"checkpoint": {"keep": 0}},
            r"^checkpoint.keep: expected greater than 0, got 0 \(int\)\n.*the argument checkpoint",
        ),
        ({"checkpoint": {"every": -1}}, r"^checkpoint.every: expected greater than or equal to 0, got -1"),
        ({"seed": "x"}, r"seed: expected a valid integer, got 'x'"),
        ({"threads": 0}, r"threads: expected greater than 0, got 0"),
        ({"non_finite": "go on"}, r"non_finite: expected 'stop' or 'skip'"),
        ({"virtual_replicas": -1}, r"virtual_replicas: expected greater than or equal to 0"),
        ({"name": "a/b"}, r"name: expected letters, digits"),
        ({"max_time_s": 0}, r"max_time_s: expected greater than 0"),
        ({"wait_for_workers_s": -1}, r"wait_for_workers_s: expected greater than or equal to 0"),
        ({"workers": 0}, r"^workers: expected greater than 0, got 0"),
        ({"stop_at_step": 0}, r"stop_at_step: expected greater than 0"),
        ({"local_nodes": 0}, r"local_nodes: expected greater than 0"),
        (
            {"data": {"function": "m:f", "names": "xy"}},
            r"^data.names: expected a list, got 'xy' .*\n.*argument data",
        ),
        ({"data": {"function": [1], "processes": -1}}, r"^data.processes: expected greater than or equal to 0"),
        ({"validation": {"function": [1], "every": -1}}, r"^validation.every: expected greater than or equal to 0"),
        ({"validation": {"every": 5}}, r"validation.function is missing\n.*add function to the argument validation"),
        ({"steps": -5, "dtype": "half"}, r"steps: expected .*; dtype: expected"),
        ({"styles": {"*": "row"}, "plan": {"shards": 2}}, r"unknown argument styles: did you mean plan.styles\?"),
        (
            {"run_dir": "ftp://bucket/runs"},
            r"run_dir is 'ftp://bucket/runs': raypar does not read or write ftp storage.*\n.*folder.*s3://",
        ),
        ({"run_dir": "s3://key:secret@bucket/runs"}, r"run_dir holds credentials.*\n.*AWS_ACCESS_KEY_ID"),
        ({"run_dir": Path("https://bucket/runs")}, r"raypar does not read or write https storage"),
        ({"run_config": RunConfig(storage_path="gdrive://c@a/runs")}, r"raypar does not read or write gdrive storage"),
        (
            {"run_config": RunConfig(storage_path="a", storage_filesystem="any")},
            r"run_config.storage_filesystem is a str, not a pyarrow.fs.FileSystem",
        ),
        (
            {"run_config": RunConfig(storage_filesystem=LocalFileSystem())},
            r"run_config.storage_filesystem is given without a path in it",
        ),
        (
            {"run_config": RunConfig(storage_path="s3://b/runs", storage_filesystem=LocalFileSystem())},
            r"run_config.storage_filesystem is given, and its path is a URI",
        ),
        ({"run_config": RunConfig(worker_runtime_env={"pip": ["x"]})}, r"run_config has worker_runtime_env.*\n.*ray.init"),
        (
            {"run_config": RunConfig(failure_config=FailureConfig(max_failures=3))},
            r"run_config.failure_config has max_failures, which raypar does not use\n.*elastic=True",
        ),
        (
            {"run_config": RunConfig(logging_config=LoggingConfig(log_level="DEBUG"))},
            r"run_config has logging_config, which raypar does not use\n.*leave it out",
        ),
        (
            {"checkpoint_config": CheckpointConfig(num_to_keep=2, checkpoint_score_attribute="loss")},
            r"checkpoint_config has checkpoint_score_attribute, .*\n.*give Trainer checkpoint=\{\"best\"",
        ),
        (
            {"run_config": RunConfig(checkpoint_config=CheckpointConfig(checkpoint_score_order="min"))},
            r"checkpoint_config has checkpoint_score_order",
        ),
        (
            {"schedule": "gpipe", "plan": "auto"},
            r'schedule is \'gpipe\', but with plan="auto" the planner chooses .*\n.*plan=\{"stages"',
        ),
        (
            {"schedule": "gpipe", "plan": {"stages": 2, "schedule": "1f1b"}},
            r"plan.schedule is '1f1b', and schedule is 'gpipe'\n.*one of them",
        ),
        ({"callbacks": [Callback]}, r"callback Callback is a class, not an object of it\n.*give an object: Callback\(...\)"),
        ({"callbacks": Callback}, r"callbacks is .*Callback.*, not a list\n.*callbacks=\[Callback\(\)\]"),
        ({"callbacks": EarlyStopping()}, r"not a list\n.*callbacks=\[EarlyStopping\(\)\]"),
    ],
)
def test_a_wrong_argument_is_one_error_with_a_cure(wrong, says):
    with pytest.raises(ConfigError, match=says):
        raypar.Trainer(**(GIVEN | wrong))


def test_more_microbatches_than_samples_are_refused_as_in_a_job_file():
    with pytest.raises(PlanError, match="9 microbatches cannot be cut from a batch of 8 samples"):
        raypar.Trainer(**(GIVEN | {"batch_size": 8, "microbatches": 9}))


def test_a_class_is_a_function_that_builds_a_model():
    class Model(nn.Sequential):
        pass

    assert raypar.Trainer(**(GIVEN | {"model": Model})).job.model.function is Model


def test_ray_trains_configurations_give_what_is_not_given_here():
    """Ray makes up a name where none is given, and has marks of its own in fields that it no longer uses."""
    run = RunConfig(name="theirs", storage_path="/somewhere", checkpoint_config=CheckpointConfig(num_to_keep=3))
    job = raypar.Trainer(**GIVEN, run_config=run, checkpoint={"every": 5}).job
    assert (job.name, job.run_dir, job.checkpoint.keep, job.checkpoint.every) == ("theirs", "/somewhere", 3, 5)
    assert raypar.Trainer(**GIVEN, name="mine", run_config=RunConfig()).job.name == "mine"


@pytest.mark.parametrize("scheme", ["ftp", "https", "memory"])
def test_a_checkpoint_in_a_storage_that_raypar_does_not_know_is_refused_by_its_scheme(scheme, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    at = f"{scheme}://bucket/runs"
    with pytest.raises(ConfigError, match=f"resume_from_checkpoint is '{at}': raypar does not read or write {scheme} storage"):
        raypar.Trainer(**GIVEN, resume_from_checkpoint=at).fit(verbose=False)
    for words in (["resume", at], ["export", at, "--out", "m.pt"], ["export", "run", "--out", f"{at}.pt"], ["status", at]):
        assert main(words) == 2
        assert f"does not read or write {scheme} storage" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_ray_trains_storage_arguments_say_where_runs_lie(tmp_path):
    """A folder of this machine is one by whatever way it is given; other file systems have an id, and no credentials in it."""
    local = RunConfig(storage_path="runs", storage_filesystem=SubTreeFileSystem(str(tmp_path), LocalFileSystem()))
    assert raypar.Trainer(**GIVEN, run_config=local).job.run_dir == str(tmp_path / "runs")
    there = S3FileSystem(
        access_key="planted-key", secret_key="planted-secret", region="eu-west-1", endpoint_override="127.0.0.1:9"
    )
    job = raypar.Trainer(**GIVEN, run_config=RunConfig(storage_path="bucket/exp", storage_filesystem=there)).job
    assert re.fullmatch(r"filesystem://[0-9a-f]{12}/bucket/exp", job.run_dir) and "planted" not in repr(job)
    assert raypar.Trainer(**GIVEN, run_config=RunConfig(storage_path="s3://bucket/exp")).job.run_dir == "s3://bucket/exp"


def test_a_ray_checkpoint_on_a_file_system_that_cannot_be_sent_is_refused():
    from pyarrow.fs import _MockFileSystem

    elsewhere = Checkpoint("bucket/run", filesystem=SubTreeFileSystem("bucket", _MockFileSystem()))
    with pytest.raises(ConfigError, match=r"resume_from_checkpoint cannot be sent to other processes.*\n.*pickled"):
        raypar.Trainer(**GIVEN, resume_from_checkpoint=elsewhere).fit(verbose=False)


DICTS = [{"ids": torch.ones(2), "labels": torch.zeros(2)}] * 4


def test_the_fields_of_dict_samples_are_named_where_the_job_was_given():
    job = GIVEN | {"model": lambda: nn.Sequential(nn.Linear(2, 2)), "loss": nn.functional.mse_loss, "data": DICTS}
    with pytest.raises(DataError, match=r"has no field 'x', only ids, labels\n.*data.input: ids, data.target: labels"):
        preflight(raypar.Trainer(**job).job)
    job["data"] = {"function": DICTS, "input": "ids", "target": "labels"}
    spec = raypar.Trainer(**job, validation=DICTS).job
    assert set(preflight(spec).batch) == {"ids", "labels"}
    assert (spec.data.input, spec.data.target) == ("ids", "labels") == (spec.validation_data.input, spec.validation_data.target)


def test_the_fields_of_tuple_samples_have_the_names_that_are_given():
    samples = [(torch.zeros(2), torch.ones(2), torch.ones(2), 1)] * 4
    job = GIVEN | {"model": lambda: nn.Sequential(nn.Linear(2, 2)), "loss": nn.functional.mse_loss, "data": samples}
    with pytest.raises(DataError, match=r"4 fields, but names for 3: x, y, z\n.*in data.names"):
        preflight(raypar.Trainer(**job).job)
    named = {"names": ["mask", "ids", "labels", "length"], "input": "ids", "target": "labels"}
    batch = preflight(raypar.Trainer(**(job | {"data": {"function": samples, **named}})).job).batch
    assert set(batch) == {"ids", "labels"} and batch["ids"].sum() == 2


def test_a_plan_of_more_workers_than_are_given_is_refused_before_anything_starts(tmp_path):
    job = {
        "model": lambda: nn.Sequential(nn.Linear(2, 2)),
        "loss": nn.functional.mse_loss,
        "data": [(torch.ones(2), torch.ones(2))] * 4,
    }
    job |= {"batch_size": 2, "microbatches": 2}
    with pytest.raises(ConfigError, match="the plan has 2 workers = 1 stage x 2 replicas, but workers is 1"):
        raypar.Trainer(**(GIVEN | job), plan={"stages": 1, "replicas": 2}, workers=1, run_dir=str(tmp_path))


def test_elastic_is_the_section_of_a_job_file():
    assert raypar.Trainer(**GIVEN).job.elastic is None and raypar.Trainer(**GIVEN, elastic=False).job.elastic is None
    assert raypar.Trainer(**GIVEN, elastic=True).job.elastic == ElasticConfig()
    given = {"min_workers": 2, "max_workers": 6, "grow_after_s": 1.5, "step_deadline_s": 4.0, "mirror": 8}
    assert raypar.Trainer(**GIVEN, elastic=given).job.elastic == ElasticConfig(**given)
    assert raypar.Trainer(**GIVEN, elastic={"mirror": False}).job.elastic.mirror == "off"


def test_more_workers_than_fit_here_are_taken_to_be_on_other_machines(monkeypatch):
    monkeypatch.setattr(measure_profile, "count_usable_cpus", lambda: 2)
    assert measure_profile.free_memory_per_worker(4) > 0.5 * measure_profile.free_memory_per_worker(400) > 0


def test_the_cure_of_a_finished_checkpoint_is_more_steps_than_it_has_done(monkeypatch: pytest.MonkeyPatch):
    from types import SimpleNamespace

    from raypar.worker.checkpoint import check_job_changes, checkpoint_files

    of_job = SimpleNamespace(only="all")
    monkeypatch.setattr(checkpoint_files, "load_manifest", lambda path: SimpleNamespace(steps_done=225, frozen=None))
    monkeypatch.setattr(check_job_changes, "changes_at_resume", lambda manifest, spec: None)
    with pytest.raises(CheckpointError, match="225 of 10 steps already done") as x:
        prepare_resumed_run(
            Path("c"),
            SimpleNamespace(stop_at_step=None, job=SimpleNamespace(steps=10, epochs=None, checkpoint=of_job)),
            None,
            None,
        )
    assert "--set steps=450" in x.value.cure
    with pytest.raises(CheckpointError, match="225 of 10 steps already done") as x:
        prepare_resumed_run(
            Path("c"),
            SimpleNamespace(stop_at_step=None, job=SimpleNamespace(steps=10, epochs=1.5, checkpoint=of_job)),
            None,
            None,
        )
    assert "--set epochs=3;" in x.value.cure and "steps=" not in x.value.cure
    with pytest.raises(CheckpointError, match="225 of 5 steps already done") as x:
        prepare_resumed_run(
            Path("c"), SimpleNamespace(stop_at_step=5, job=SimpleNamespace(steps=400, epochs=2, checkpoint=of_job)), None, None
        )
    assert "--stop-at-step" in x.value.cure and "--set" not in x.value.cure


# -- what a checkpoint keeps of the job's functions -------------------------------------------------------------------------


def squares(output, target, scale=1.0, weight=None):
    return ((output - target) ** 2).mean() * scale


def as_a_script_makes_them():
    """Functions, classes and objects as a script that is started again makes them: elsewhere in memory."""

    class Samples:
        def __len__(self):
            return 8

        def __getitem__(self, index):
            return torch.zeros(8), torch.zeros(8)

    class Squares:
        def __call__(self, output, target):
            return ((output - target) ** 2).mean()

    def scaled(output, target, scale, weight=None):
        return ((output - target) ** 2).mean() * scale

    heavier = torch.full((2000,), 1.0)
    losses = (
        functools.partial(scaled, scale=2.0),
        functools.partial(functools.partial(scaled, weight={"a", "b", "c"}), scale=heavier),
        Squares(),
        nn.CrossEntropyLoss(weight=heavier),
        (nn.CrossEntropyLoss, {"weight": heavier}),
    )
    return [raypar.Trainer(**(GIVEN | {"loss": loss, "data": Samples()})).job for loss in losses]


def test_a_script_that_is_started_again_gives_the_same_job_whatever_is_where_in_memory():
    """A partial and a data set object had their addresses in it: no such run could be resumed."""
    first, second = as_a_script_makes_them(), as_a_script_makes_them()  # both are kept: their addresses are different ones
    found = [[contract_of_job(spec) for spec in specs] for specs in (first, second)]
    assert found[0] == found[1] and "0x" not in json.dumps(found)
    name = as_a_script_makes_them.__name__ + ".<locals>.scaled"
    assert found[0][0]["loss"] == {"function": f"partial({name}, scale=2.0)", "args": {}}


WEIGHT = torch.full((2000,), 1.0)
OTHER = WEIGHT.clone()
OTHER[1000] += 1e-6  # in no repr


@pytest.mark.parametrize(
    "one, other",
    [
        (nn.CrossEntropyLoss(weight=WEIGHT), nn.CrossEntropyLoss(weight=OTHER)),
        (nn.CrossEntropyLoss(weight=WEIGHT), nn.CrossEntropyLoss()),
        ((nn.CrossEntropyLoss, {"weight": WEIGHT}), (nn.CrossEntropyLoss, {"weight": OTHER})),
        (functools.partial(squares, weight=WEIGHT), functools.partial(squares, weight=OTHER)),
        (functools.partial(squares, scale=1.0), functools.partial(squares, scale=2.0)),
        (functools.partial(squares, weight=[squares]), functools.partial(squares, weight=[len])),
    ],
)
def test_a_loss_with_other_class_weights_is_another_loss(one, other, tmp_path):
    before, again, after = (raypar.Trainer(**(GIVEN | {"loss": loss})).job for loss in (one, one, other))
    path = checkpoint_files.commit_checkpoint(
        checkpoint_files.create_checkpoint(tmp_path, 1), [], steps_done=1, contract=contract_of_job(before)
    )
    manifest = checkpoint_files.load_manifest(path)
    assert not contract_comparison.list_contract_differences(manifest, again)
    with pytest.raises(CheckpointError, match="belongs to another job: loss was"):
        changes_at_resume(manifest, after)


def test_a_run_in_another_precision_is_not_resumed(tmp_path):
    plain, mixed = (raypar.Trainer(**GIVEN, precision=given).job for given in (None, {"compute": "bf16"}))
    assert (plain.precision, mixed.precision) == (None, PrecisionConfig(compute="bf16"))
    for before, after in ((plain, mixed), (mixed, plain)):
        folder = checkpoint_files.create_checkpoint(tmp_path / str(before.precision), 1)
        path = checkpoint_files.commit_checkpoint(folder, [], steps_done=1, contract=contract_of_job(before))
        manifest = checkpoint_files.load_manifest(path)
        assert not contract_comparison.list_contract_differences(manifest, before)
        with pytest.raises(CheckpointError, match="belongs to another job: precision was") as caught:
            changes_at_resume(manifest, after)
        assert "not set" in caught.value.what and "{'compute': 'bf16'}" in caught.value.what


@pytest.mark.parametrize(
    "wrapped", [lambda it: it, lambda it: [it], lambda it: {"a": it}, lambda it: functools.partial(len, it)]
)
def test_a_partial_with_an_argument_that_has_no_text_of_its_own_is_refused(wrapped):
    with pytest.raises(
        ConfigError, match=r"loss is a functools.partial with the argument <object object at 0x.*resumed"
    ) as error:
        raypar.Trainer(**(GIVEN | {"loss": functools.partial(squares, scale=wrapped(object()))}))
    assert "a function that makes that argument itself" in error.value.cure


@dataclasses.dataclass
class Options:
    """As people give them to a model or a loss."""

    activation: Any = squares
    generator: Any = None


def test_functions_in_the_options_of_a_partial_are_named_and_not_refused():
    spec = raypar.Trainer(**(GIVEN | {"loss": functools.partial(squares, scale=Options())})).job
    assert spec.loss.label == "partial(squares, scale=Options(activation=<function squares>, generator=None))"


def test_addresses_in_capitals_are_no_part_of_a_label():
    """numpy writes `Generator(PCG64) at 0x7F...`: a job with such a data set could not be resumed."""

    @dataclasses.dataclass
    class Samples(Options):
        def __call__(self):
            return []

    labels = {stable_callable_label(Samples(generator=numpy.random.default_rng(seed))) for seed in range(2)}
    assert len(labels) == 1 and labels.pop().endswith("generator=Generator(PCG64))")


@pytest.mark.parametrize("tensor", [torch.ones(2, device="meta"), torch.eye(2).to_sparse()])
def test_tensors_without_dense_values_have_a_text(tensor):
    """A traceback of torch's came out of Trainer."""
    assert "tensor(" in stable_argument_text(tensor)


def test_two_data_sets_of_one_name_are_two():
    """Validation with `lambda: other` read the training samples: both are called <lambda>."""
    given = {**GIVEN, "model": lambda: nn.Sequential(nn.Linear(1, 1))}
    spec = raypar.Trainer(**(given | {"data": lambda: [1, 2], "validation": lambda: [3]})).job
    core = WorkerCore(spec)
    assert [core.data.dataset(data) for data in (spec.data, spec.validation_data)] == [[1, 2], [3]]
    assert core.data.dataset(spec.data) is core.data.dataset(spec.data)


def only(rows: torch.Tensor) -> torch.Tensor:
    return rows


def test_two_data_sets_whose_arguments_print_alike_are_two():
    """Of a large tensor `repr` shows the corners only: validation read the training samples."""
    train, other = torch.zeros(2000), torch.zeros(2000)
    other[1000] = 1.0
    given = {**GIVEN, "model": lambda: nn.Sequential(nn.Linear(1, 1)), "data": (only, {"rows": train})}
    spec = raypar.Trainer(**(given | {"validation": (only, {"rows": other})})).job
    made = WorkerCore(spec).data
    assert made.dataset(spec.data) is train and made.dataset(spec.validation_data) is other


def test_modules_in_a_partial_are_told_apart_by_their_weights():
    """A run was resumed with another teacher as if it were the same."""
    labels = {stable_callable_label(functools.partial(squares, scale=nn.Linear(2, 2))) for _ in range(2)}
    assert len(labels) == 2


@pytest.mark.parametrize("text", [stable_callable_label, find_unstable_argument])
def test_an_argument_that_contains_itself_has_a_text(text):
    """A RecursionError came out of Trainer."""
    rows: list[Any] = [1]
    of_itself = functools.partial(squares, scale=rows)
    rows += [of_itself, {"rows": rows}]
    assert text(of_itself) in ("partial(squares, scale=list(1, ..., {'rows': ...}))", None)


def test_a_state_dict_is_no_place_that_workers_can_read():
    with pytest.raises(ConfigError, match="init_from is a state_dict with 2 entries") as refused:
        InitFromConfig.model_validate(nn.Linear(2, 2).state_dict())
    assert "save_file" in refused.value.cure


# -- several validation sets -------------------------------------------------------------------------------------------------


def make_rows(size: int = 3) -> list[int]:
    return list(range(size))


def test_validation_takes_data_sets_by_name_in_every_form():
    rows, loader = [1, 2, 3], torch.utils.data.DataLoader([4, 5], batch_size=2, collate_fn=list)
    job = raypar.Trainer(
        **{**GIVEN, "validation": {"every": 3, "a": rows, "b": loader, "c": (make_rows, {"size": 2}), "d": "m:f",
                                      "e": {"function": rows, "samples": 2}, "f": DataConfig(function=make_rows)}}
    ).job  # fmt: skip
    assert job.validation is not None and job.validation.every == 3
    made = {name: job.data_of_set(one) for name, one in job.validation_sets.items()}
    assert list(made) == list("abcdef") and made["d"].function == "m:f" and made["f"].function is make_rows
    assert [made[name].call() for name in "abce"] == [rows, [4, 5], [0, 1], rows]
    assert made["b"].collate is not None and made["b"].collate.function is list and made["a"].collate is None
    assert job.validation_sets["e"].samples == 2


def test_a_mapping_of_splits_alone_is_several_sets_and_one_word_of_a_section_is_not():
    for given in ({"a": [1], "b": [2]}, {"sets": {"a": [1], "b": [2]}}):
        assert list(raypar.Trainer(**GIVEN, validation=given).job.validation_sets) == ["a", "b"]
    for given, says in (
        ({"functoin": [1]}, "unknown key validation.functoin: did you mean validation.function"),
        ({"a": [1], "samples": 3}, "validation has the sets a, and beside them samples, which is of one set"),
        ({"a": (torch.ones(2), torch.ones(2))}, "validation set a: validation is a tuple of Tensor"),
        (
            {"a": torch.utils.data.DataLoader([1], drop_last=True)},
            "validation set a: validation is a DataLoader with drop_last",
        ),
        ({"a": [1], 2: [2]}, "the key 2 is no text"),
    ):
        with pytest.raises(ConfigError, match=says):
            raypar.Trainer(**GIVEN, validation=given)


def test_evaluation_takes_several_sets_and_the_name_of_one_of_the_jobs():
    several = validation_argument({"a": [1], "b": make_rows})
    assert isinstance(several, ValidationConfig) and list(several.by_name) == ["a", "b"]
    job = raypar.Trainer(**GIVEN, validation={"a": [1], "b": {"function": [2], "samples": 1}}).job
    chosen = choose_data(job, validation_argument("b"), None)
    assert chosen.samples == 1 and not chosen.sets and chosen.function() == [2]
    assert choose_data(job, None, None) == job.validation
    limited = choose_data(job, None, 7)
    assert [one.samples for one in limited.sets.values()] == [7, 7]
    with pytest.raises(ConfigError, match=r"the job has no validation set 'c'\n  cure: its sets are a, b; another"):
        choose_data(job, "c", None)
    with pytest.raises(ConfigError, match=r"no validation set 'c'\n  cure: its validation has no names"):
        choose_data(raypar.Trainer(**GIVEN, validation=[1]).job, "c", None)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"optimizer": ["torch.optim:Adam", "torch.optim:SGD"]}, "optimizer is 2 optimizers"),
        ({"optimizer": [(torch.optim.Adam, {"lr": 1.0}), (torch.optim.SGD, {"lr": 1.0})]}, "optimizer is 2 optimizers"),
        ({"optimizer": {"generator": torch.optim.Adam, "discriminator": torch.optim.Adam}}, "optimizer is 2 optimizers"),
        ({"loss": (torch.nn.functional.mse_loss, torch.nn.functional.l1_loss)}, "loss is 2 losses"),
    ],
)
def test_losses_and_optimizers_in_turn_are_refused_by_a_sentence_of_their_own(given: dict[str, Any], said: str):
    job = {"model": lambda: torch.nn.Linear(2, 2), "loss": "torch.nn:MSELoss", "data": [1], "steps": 1, "batch_size": 1}
    with pytest.raises(ConfigError, match=rf"{said}: a run has one, and several that take turns \(a GAN\) .*\n  cure: ") as one:
        raypar.Trainer(**{"microbatches": 1, **job, **given})
    assert str(one.value).count("\n") == 1
