"""Job files, `Trainer` arguments and run folders of the release before this one are accepted.

The texts below are that release's. A key or an argument that gets another name keeps its old one here.
"""

import functools
import inspect
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

import raypar
from raypar.cli import main
from raypar.errors import PlanError
from raypar.job import LrScheduleConfig, ModelConfig, PlanConfig
from raypar.job.contract import contract_of_job
from raypar.job.read_job import parse_job
from raypar.job.stable_callable_text import CONTRACT_CHARACTERS, stable_callable_label
from raypar.launch.launch_options import LaunchOptions
from raypar.launch.resume import find_last_whole_checkpoint, prepare_resumed_run
from raypar.launch.run_of_submitted_job import find_unfinished_run
from raypar.record.events import Event
from raypar.storage.run_folder import RunFolder
from raypar.worker.checkpoint.checkpoint_files import load_manifest
from raypar.worker.checkpoint.contract_comparison import describe_edition_change, list_contract_differences

JOB = """
name: old
seed: 3
steps: 8
batch_size: 8
microbatches: 4
virtual_replicas: 2
model: {function: "helpers.tiny_job:model", args: {}}
loss: helpers.tiny_job:loss
data: {function: "helpers.tiny_job:data", args: {}, input: x, target: y, names: [x, y], processes: 0}
optimizer: {function: "torch.optim:AdamW", args: {lr: 0.01}, groups: [{match: "*.bias", lr: 0.1}]}
lr_schedule: {function: "m:warm", args: {steps: 4}}
clip_norm: 1.0
validation:
  {function: "helpers.tiny_job:data", args: {}, every: 4, samples: 8, input: x, target: y, names: [x, y], processes: 0}
plan:
  stages: 2
  replicas: [1, 2]
  shards: [2, 1]
  schedule: interleaved
  chunks: 2
  cuts: [1, 2, 3]
  warmup: [2, 1]
  styles: {"block*.up": column}
  sequence_parallel: true
elastic:
  {min_workers: 2, max_workers: 6, standbys: 1, grow_after_s: 1.5, step_deadline_s: 4.0, last_copy_wait_s: 60.0, mirror: 8,
   stragglers: replace, straggler_times: 2.0}
checkpoint: {every: 4, keep: 3, at_end: false}
run_dir: elsewhere/
reduction: fast
dtype: float64
init: by-name
deferred_init: never
init_from:
  {path: w.safetensors, strip_prefix: "model.", add_prefix: "net.", rename: {"a": "b"}, allow_missing: ["head.*"],
   allow_unexpected: ["x"]}
device: cpu
threads: 1
non_finite: skip
max_time_s: 60.0
early_stopping: {patience: 2, min_delta: 0.1}
callbacks: ["m:callback"]
trackers: [{tracker: tensorboard, args: {log_dir: tb}}]
wait_for_workers_s: 30.0
trace_every: 5
"""
"""Every key that a job file could have, but `plan.schedule_file`."""

CONTRACT = {
    "seed": 3,
    "batch_size": 8,
    "microbatches": 4,
    "virtual_replicas": 2,
    "dtype": "float64",
    "device": "cpu",
    "threads": 1,
    "reduction": "fast",
    "non_finite": "skip",
    "clip_norm": 1.0,
    "model": {"function": "helpers.tiny_job:model", "args": {}},
    "loss": {"function": "helpers.tiny_job:loss", "args": {}},
    "data": {"function": "helpers.tiny_job:data", "args": {}},
    "optimizer": {"function": "torch.optim:AdamW", "args": {"lr": 0.01}, "groups": [["*.bias", {"lr": 0.1}]]},
    "lr_schedule": {"function": "m:warm", "args": {"steps": 4}},
    "styles": [["block*.up", "column"]],
    "sequence_parallel": True,
}
MANIFEST = {
    "format": 1,
    "steps_done": 5,
    "contract": CONTRACT,
    "metrics": {},
    "files": {},
    "entries": [],
    "sha256": "207561c1f425ce1f7ca278d789e1118086c334bb09f7b41d32639a9485685931",
}
"""Of a checkpoint of `JOB`, but for the tensors."""

ARGUMENTS = """
model loss data optimizer steps batch_size microbatches name seed virtual_replicas lr_schedule clip_norm validation plan
schedule workers elastic callbacks run_dir run_config checkpoint_config address local_nodes stop_at_step max_time_s
wait_for_workers_s resume_from_checkpoint
"""
FIELDS = {
    "dtype": "float64",
    "device": "cpu",
    "threads": 1,
    "reduction": "fast",
    "non_finite": "skip",
    "init": "by-name",
    "deferred_init": "never",
    "init_from": None,
}
"""Arguments that `Trainer` took beside the named ones."""

RUN = {
    "plan.json": {
        "schedule": "1f1b",
        "stages": [{"first": 0, "last": 2, "position": 0, "replicas": 2, "shards": 1}],
        "workers": ["worker 0 (stage 0, replica 0)", "worker 1 (stage 0, replica 1)"],
        "predicted_ms": 1.0,
        "predicted_bubble": 0.1,
    },
    "cluster.json": {"kind": "own", "address": "127.0.0.1:6379", "nodes": []},
    "members.json": {
        "time": 1.8e9,
        "step": 5,
        "steps": 8,
        "driver_pid": 7,
        "phase": "ended",
        "generation": 2,
        "plan": "1 stage x 2 replicas",
        "stages": [],
        "schedule": "1f1b",
        "members": [{"coordinate": "worker 0 (stage 0, replica 0)", "worker": 0, "node": "ab", "pid": 8, "host": "127.0.0.1"}],
        "spares": [],
        "starting": [],
        "wanted": 2,
        "why": "",
        "replaying": None,
    },
}
METRICS = {
    "time": 1.8e9, "step": 5, "loss": 0.5, "norm": 0.1, "count": 8.0, "seconds": 0.1, "samples_per_s": 80.0, "count_per_s": 8.0,
    "bubble": 0.1, "peak_rss_bytes": [1, 2],
}  # fmt: skip
EVENTS = (
    {"time": 1.8e9, "kind": "started", "text": "2 workers", "workers": [{"worker": 0, "node": "ab", "pid": 8, "host": "h"}]},
    {"time": 1.8e9, "kind": "lost", "text": "lost", "coordinate": "worker 1 (stage 0, replica 1)", "why": "died", "worker": 1},
    {"time": 1.8e9, "kind": "generation", "text": "goes on", "pause_s": 0.2, "again": 1, "generation": 2, "workers": [0],
     "plan": "1 stage x 1 replica", "shards": "1", "schedule": "1f1b", "step": 4, "moved_elements": 0, "state": "live"},
    {"time": 1.8e9, "kind": "end", "end": "stopped", "why": "5 steps were asked for", "step": 5, "driver_calls_per_step": 2.0},
)  # fmt: skip


@pytest.fixture
def old(tmp_path: Path) -> RunFolder:
    """A run folder of the former release, stopped after 5 of 8 steps."""
    folder = RunFolder.create(tmp_path / "runs", "old")
    folder.job.write_text(JOB.replace("elsewhere/", str(tmp_path / "runs")))
    for name, facts in RUN.items():
        (folder.path / name).write_text(json.dumps(facts))
    folder.append_line(folder.metrics, METRICS)
    for event in EVENTS:
        folder.append_line(folder.events, event)
    (folder.checkpoints / "step_00000005").mkdir()
    (folder.checkpoints / "step_00000005/manifest.json").write_text(json.dumps(MANIFEST, indent=1) + "\n")
    return folder


def test_every_key_of_a_job_file_is_accepted_and_means_the_same_job():
    found = json.loads(json.dumps(contract_of_job(parse_job(JOB))))
    assert found == {"edition": 4, **CONTRACT, "data": {**CONTRACT["data"], "input": "x", "target": "y", "names": ["x", "y"]}}
    assert parse_job(parse_job(JOB).to_yaml()) == parse_job(JOB)


def test_every_argument_of_trainer_is_accepted():
    assert set(ARGUMENTS.split()) <= set(inspect.signature(raypar.Trainer).parameters)
    given = {"model": "m:model", "loss": "m:loss", "data": "m:data", "steps": 2, "batch_size": 2, "microbatches": 1}
    spec = raypar.Trainer(**given, **FIELDS).job
    assert {name: getattr(spec, name) for name in FIELDS} == FIELDS


def test_styles_beside_a_whole_plan_belong_to_it():
    given = {"model": "m:model", "loss": "m:loss", "data": "m:data", "steps": 2, "batch_size": 2, "microbatches": 1}
    plan = raypar.ParallelPlan.mesh(pp=2, tp=2, layers=5, chunks=2, placement="v")
    job = raypar.Trainer(**given, plan=PlanConfig.of_plan(plan, "zb-v", styles={"*.up": "column"})).job
    with pytest.raises(PlanError, match="the plan is for 5 layers, and the model has 6"):
        job.to_plan(6)
    with pytest.raises(PlanError, match=r"the plan has its stages on positions \[0, 1, 1, 0\], and schedule interleaved on"):
        raypar.Trainer(**given, plan=plan, schedule="interleaved")
    assert job.to_plan(5) == plan and job.plan.schedule == "zb-v" and job.styles == (("*.up", "column"),)


def test_a_run_that_was_given_functions_goes_on_from_the_job_file_that_names_them():
    def contract(function: str) -> dict:
        return {**CONTRACT, "model": {"function": function, "args": {}}}

    def differs(then: str, now: str) -> bool:
        manifest = SimpleNamespace(contract=contract(then))
        name = now if ":" in now else {"model": model, "other": other}[now]
        spec = parse_job(JOB).replace(model=ModelConfig(function=name))
        return bool(list_contract_differences(manifest, spec))

    assert not differs("model", "m:model") and not differs("m:model", "model") and not differs("m:model", "m:model")
    assert differs("model", "m:other") and differs("m:model", "other") and differs("m:model", "n:model")


def model() -> None:
    """A function with a name."""


def other() -> None:
    """Another one."""


def test_objects_that_trainer_is_given_have_the_names_that_checkpoints_hold():
    spec = raypar.Trainer(model="m:model", loss="m:loss", data=[1, 2], steps=2, batch_size=2, microbatches=1).job
    assert contract_of_job(spec)["data"]["function"] == "Given(value=[1, 2])" and spec.data.label == "list"


def test_a_run_folder_is_shown_and_resumed(old: RunFolder, capsys: pytest.CaptureFixture[str]):
    assert main(["status", str(old.path)]) == 0
    shown = capsys.readouterr().out
    assert "run old: stopped, generation 2, step 5 of 8" in shown and "lost worker 1" in shown
    job = parse_job(old.job.read_text())
    assert find_unfinished_run(job) == (old, "")
    told: list[Event] = []
    path = find_last_whole_checkpoint(old, told.append)
    options, _ = prepare_resumed_run(path, LaunchOptions(job, lambda chosen: old), lambda checked: None, told.append)
    assert (options.resume, options.steps_done) == (path, 5)
    assert [event.kind for event in told] == ["warning", "resuming"]
    assert "was computed by edition 1 of the numerics contract, and the run goes on by edition 4" in (told[0].line() or "")


@pytest.mark.parametrize(
    "edition, differences, told",
    [(None, [], True), (1, [], True), (2, [], True), (3, [], True), (4, [], False)]
    + [(other, [f"edition was {other}, is 4"], False) for other in (5, 0, -1)],
)
def test_a_checkpoint_of_an_earlier_edition_of_the_numerics_contract_goes_on_and_one_of_a_later_does_not(
    edition, differences, told, old: RunFolder
):
    then = CONTRACT if edition is None else {**CONTRACT, "edition": edition}
    manifest = replace(load_manifest(old.checkpoints / "step_00000005"), contract=then)
    assert list_contract_differences(manifest, parse_job(JOB)) == differences
    assert (describe_edition_change(manifest) is not None) == told


@pytest.mark.parametrize("place", ["raypar.worker.tokens", "raypar.token_files"])
@pytest.mark.parametrize("form", ["name", "object"])
def test_a_checkpoint_of_a_job_whose_token_files_were_elsewhere_goes_on(form: str, place: str, old: RunFolder, tmp_path: Path):
    from raypar.data.token_files import TokenFile
    from raypar.data.tokenize_text import write_tokens

    write_tokens(tmp_path / "text.bin", [range(100)], dtype="uint16", notes={})
    arguments = {"path": str(tmp_path / "text.bin"), "context": 4}
    named = {"function": f"{place}:TokenFile", "args": arguments}
    data = TokenFile(**arguments) if form == "object" else (named["function"], named["args"])
    job = {"model": "m:model", "loss": "m:loss", "steps": 2, "batch_size": 2, "microbatches": 1}
    spec = raypar.Trainer(data=data, **job).job
    former = json.loads(json.dumps(contract_of_job(spec)).replace("raypar.data.token_files", place))
    assert place in json.dumps(former)
    manifest = replace(load_manifest(old.checkpoints / "step_00000005"), contract=former)
    assert list_contract_differences(manifest, spec) == []


def test_a_checkpoint_that_holds_a_long_text_whole_is_of_the_same_job(old: RunFolder):
    """Contracts of before held the text of all samples of a data set that was given as a list."""
    samples = functools.partial(list, [{"x": i} for i in range(5000)])
    manifest = load_manifest(old.checkpoints / "step_00000005")
    job = {"model": "m:model", "loss": "m:loss", "data": "m:data", "steps": 2, "batch_size": 2, "microbatches": 1}
    spec = raypar.Trainer(**job).job.replace(lr_schedule=LrScheduleConfig(function=samples))
    whole = stable_callable_label(samples)
    held = contract_of_job(spec) | {"lr_schedule": {"function": whole, "args": {}}}
    assert len(contract_of_job(spec)["lr_schedule"]["function"]) < 1000 < CONTRACT_CHARACTERS < len(whole)
    assert list_contract_differences(replace(manifest, contract=held), spec) == []
    held["lr_schedule"]["function"] = whole.replace("4999", "5000")
    assert len(list_contract_differences(replace(manifest, contract=held), spec)) == 1
