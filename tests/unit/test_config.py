"""Job files: what is wrong is said before anything starts, with the nearest right key; what is right means one thing."""

import functools
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import raypar
from raypar.callbacks import check_callbacks
from raypar.errors import ConfigError, DataError, InputError, PlanError, RayparError, ScheduleError
from raypar.job import FunctionConfig, Job, LrScheduleConfig, ModelConfig, OptimizerConfig, PrecisionConfig, ValidationConfig
from raypar.job.contract import contract_of_job
from raypar.job.keys_of_other_frameworks import ADVICE
from raypar.job.plan_section import PlanConfig
from raypar.job.read_job import load_job, parse_data_argument, parse_job
from raypar.job.walk_sections import dotted_keys
from raypar.launch import choose_plan
from raypar.launch.forward_run import choose_data, naming_argument
from raypar.plan import ParallelPlan, StagePlan
from raypar.storage.run_folder import RunFolder, check_run_dir_is_writable
from raypar.worker.layer_precisions import autocast_of

ROOT = Path(__file__).parents[2]
QUICKSTART = ROOT / "jobs" / "quickstart.yaml"
SMALL = """
name: small
steps: 3
batch_size: 8
microbatches: 4
model: m:layers
loss: m:loss
data: m:text
optimizer: {function: "torch.optim:SGD", args: {lr: 3e-4}}
"""


def test_the_quickstart_is_a_job():
    job = spec = load_job(QUICKSTART)
    assert (spec.seed, spec.steps, spec.batch_size, spec.microbatches, spec.batching.blocks) == (1337, 200, 32, 8, 4)
    assert spec.optimizer == OptimizerConfig(
        function="torch.optim:AdamW", args={"lr": 3e-3, "betas": [0.9, 0.95], "weight_decay": 0.1, "fused": True}
    )
    assert spec.validation is not None and (spec.validation.every, spec.validation.samples) == (50, 128)
    assert (
        spec.lr_schedule == LrScheduleConfig(function="examples.gpt:cosine", args={"warmup": 20, "total": 200})
        and spec.clip_norm == 1.0
    )
    assert (job.schedule_name, job.workers, job.plan_is_auto, job.checkpoint.keep) == ("1f1b", 4, False, 2)
    plan = job.to_plan(layers=6)
    assert plan.world == 4 and [(s.first, s.last, s.replicas) for s in plan.stages] == [(0, 3, 2), (3, 6, 2)]


@pytest.mark.parametrize("text", [QUICKSTART.read_text(), SMALL], ids=["quickstart", "small"])
def test_a_job_written_out_loads_to_the_same_job(text: str):
    job = parse_job(text)
    assert parse_job(job.to_yaml()) == job
    assert yaml.safe_load(job.to_yaml())["data"]["function"] == job.data.function


def test_short_forms_defaults_and_numbers_with_an_exponent():
    job = spec = parse_job(SMALL)
    assert spec.model == ModelConfig(function="m:layers") and spec.optimizer.args == {"lr": 3e-4}
    assert (job.run_dir, job.workers, job.schedule_name, job.checkpoint.at_end) == ("runs/", 1, "1f1b", True)
    assert (spec.dtype, spec.reduction, spec.threads, spec.non_finite, spec.batching.blocks) == (
        "float32",
        "canonical",
        1,
        "stop",
        4,
    )


@pytest.mark.parametrize("key", ["metrics", "callbacks", "trackers", "model.args", "data.mix", "checkpoint.best"])
def test_a_collection_without_anything_behind_its_key_is_empty(key: str):
    empty = parse_job(QUICKSTART.read_text(), [f"{key}=null"])
    assert functools.reduce(getattr, key.split("."), empty) in ((), {})


def test_the_name_of_a_job_is_by_default_that_of_its_file(tmp_path: Path):
    path = tmp_path / "mine.yaml"
    path.write_text(SMALL.replace("name: small", ""))
    assert load_job(path).name == "mine"
    assert load_job(path, ["name=other"]).name == "other"


OVERRIDES = {
    "plan.stages=4": lambda job: job.plan.stages == 4 and job.schedule_name == "1f1b",
    "plan=auto": lambda job: job.plan_is_auto and job.plan == "auto" and job.workers >= 1,
    "plan={replicas: [2, 1, 3], stages: 3}": lambda job: job.workers == 6 and job.to_plan(3).world == 6,
    "model.args.width=64": lambda job: job.model.function == "m:layers" and job.model.args == {"width": 64},
    "validation.function=m:text": lambda job: job.validation.function == "m:text",
    "optimizer.args.lr=1e-2": lambda job: job.optimizer.args["lr"] == 0.01,
    "optimizer.groups=[{match: '*.bias', weight_decay: 0}]": lambda job: (
        job.optimizer.options_by_pattern == (("*.bias", {"weight_decay": 0}),)
    ),
    "clip_norm=1": lambda job: job.clip_norm == 1.0,
    "lr_schedule=m:cosine": lambda job: job.lr_schedule == LrScheduleConfig(function="m:cosine"),
    "data={function: 'm:text', names: [a, b], input: a, target: b, processes: 2}": lambda job: (
        (
            job.data.names,
            job.data.processes,
        )
        == (("a", "b"), 2)
    ),
    "plan={stages: 2, cuts: [4], schedule: gpipe}": lambda job: [s.last for s in job.to_plan(6).stages] == [4, 6],
    "trackers=[tensorboard]": lambda job: job.trackers[0].tracker == "tensorboard",
    "callbacks=['m:Log']": lambda job: job.callbacks[0] == FunctionConfig(function="m:Log"),
}


def test_a_precision_is_only_said_where_it_is_set():
    plain, off, on = (parse_job(SMALL, given) for given in ([], ["precision={}"], ["precision.compute=bf16"]))
    assert plain == parse_job(SMALL, ["precision=null"]) and autocast_of(off.precision) is autocast_of(plain.precision) is None
    assert contract_of_job(plain) == contract_of_job(off)
    assert on.precision == PrecisionConfig(compute="bf16")
    assert contract_of_job(on) == contract_of_job(plain) | {"precision": {"compute": "bf16"}}
    assert parse_job(on.to_yaml()) == on


def test_bfloat16_is_refused_with_a_dtype_that_autocast_leaves_alone():
    with pytest.raises(ConfigError, match=r"precision\.compute is bf16, but dtype is float64") as caught:
        parse_job(SMALL, ["dtype=float64", "precision.compute=bf16"])
    assert caught.value.cure == "set dtype: float32, or leave precision out"


@pytest.mark.parametrize("override", OVERRIDES)
def test_overrides(override: str):
    assert OVERRIDES[override](parse_job(SMALL, [override]))


def test_overrides_apply_in_order_and_reach_into_lists():
    job = parse_job(SMALL, ["plan=auto", "plan.stages=2", "optimizer.groups=[{match: a, lr: 1}]", "optimizer.groups.0.lr=2"])
    assert job.plan.stages == 2 and job.optimizer.groups[0]["lr"] == 2


BAD = {
    "price_per_worker_hour=.inf": (ConfigError, "price_per_worker_hour: expected a finite number, got inf"),
    "price_per_worker_hour=-1": (ConfigError, "price_per_worker_hour: expected greater than 0, got -1"),
    "plan.stagse=2": (ConfigError, "unknown key plan.stagse: did you mean plan.stages?"),
    "microbatchs=2": (ConfigError, "unknown key microbatchs: did you mean microbatches?"),
    "stages=2": (ConfigError, "unknown key stages: did you mean plan.stages?"),
    "validation.evry=2": (ConfigError, "did you mean validation.every?"),
    "xyzzy=1": (ConfigError, "unknown key xyzzy"),
    "validation={every: 2, funktion: 'm:f'}": (
        ConfigError,
        "unknown key validation.funktion: did you mean validation.function?",
    ),
    "max_grad_norm=1": (ConfigError, "unknown key max_grad_norm"),
    "optimizer.lr=1": (ConfigError, "unknown key optimizer.lr"),
    "steps=many": (ConfigError, "steps: expected a valid integer, got 'many' (str)"),
    "steps=true": (ConfigError, "steps: expected a valid integer, got True (bool)"),
    "steps='3'": (ConfigError, "steps: expected a valid integer, got '3' (str)"),
    "batch_size=0": (ConfigError, "batch_size: expected greater than 0, got 0 (int)"),
    "clip_norm=-1": (ConfigError, "clip_norm: expected greater than 0"),
    "plan.replicas=0": (ConfigError, "plan.replicas: expected a number >= 1, or a list with one per stage, got 0 (int)"),
    "plan=fast": (ConfigError, "plan: expected auto, or keys and values (stages, replicas"),
    "plan=3": (ConfigError, "plan: expected keys and values (stages, replicas"),
    "data=3": (ConfigError, "data: expected module:name, or keys and values (function, args"),
    "model=layers": (ConfigError, "model.function: expected module:name"),
    "model.args=3": (ConfigError, "model.args: expected keys and values, got 3 (int)"),
    "optimizer.groups=[{lr: 1}]": (ConfigError, "every group needs a match"),
    "dtype=float16": (ConfigError, "dtype: expected 'float32' or 'float64', got 'float16' (str)"),
    "precision=bf16": (
        ConfigError,
        f"precision: expected keys and values ({', '.join(PrecisionConfig.model_fields)}), got 'bf16' (str)",
    ),
    "precision.compute=bfloat16": (ConfigError, "precision.compute: expected 'bf16' or 'fp16', got 'bfloat16' (str)"),
    "precision.compute=float16": (ConfigError, "precision.compute: expected 'bf16' or 'fp16', got 'float16' (str)"),
    "precision.computes=bf16": (ConfigError, "unknown key precision.computes: did you mean precision.compute?"),
    "precison.compute=bf16": (ConfigError, "unknown key precison: did you mean precision?"),
    "compute=bf16": (ConfigError, "unknown key compute: did you mean precision.compute?"),
    "precision={compute: bf16, loss: float32}": (ConfigError, "unknown key precision.loss"),
    "name=../up": (ConfigError, "name: expected letters, digits"),
    "trackers=[tensorbord]": (ConfigError, "trackers.0.tracker: expected 'tensorboard', 'wandb' or 'mlflow'"),
    "steps": (ConfigError, "override 'steps' is not key=value"),
    "steps.more=1": (ConfigError, "steps is 3 and has no keys"),
    "steps=[": (ConfigError, "not valid YAML"),
    "plan.schedule_file=none.csv": (ConfigError, "plan.schedule_file none.csv does not exist"),
    "early_stopping={patience: 2}": (ConfigError, "early_stopping needs validation losses"),
    "elastic={min_worker: 2}": (ConfigError, "did you mean elastic.min_workers?"),
    "placement={on_demand: 1, on_demand_label_selector: {}}": (ConfigError, "on_demand_label_selector is empty"),
    "placement={label_selector: {market: '!!spot'}}": (ConfigError, "market=!!spot is not a label selector of Ray"),
    "placement={label_selector: {ray.io/node-id: abc}}": (ConfigError, "ray.io/node-id is set by raypar"),
    "placement={labels: {market: spot}}": (ConfigError, "placement.labels"),
    "elastic={min_workers: 9, max_workers: 2}": (ConfigError, "elastic.min_workers is 9 and elastic.max_workers is 2"),
    "microbatches=9": (PlanError, "9 microbatches cannot be cut from a batch of 8 samples"),
    "plan.shards=0": (ConfigError, "plan.shards: expected a number >= 1, or a list with one per stage, got 0 (int)"),
    "plan.shards=[2, 1]": (PlanError, "plan.shards has 2 entries for 1 stages"),
    "plan.style={up: column}": (ConfigError, "unknown key plan.style: did you mean plan.styles?"),
    "plan.layout={heads: replicas}": (ConfigError, "plan.layout.heads: expected 'shards' or 'whole', got 'replicas' (str)"),
    "plan.styles={up: 3}": (ConfigError, "plan.styles.up: expected a valid string, got 3 (int)"),
    "plan.sequence_paralel=true": (ConfigError, "did you mean plan.sequence_parallel?"),
    "plan.replicas=[1, 2]": (PlanError, "plan.replicas has 2 entries for 1 stages"),
    "plan.cuts=[1, 2]": (PlanError, "plan.cuts has 2 cuts for 1 stages"),
    "plan.schedule=1f1c": (ScheduleError, "unknown schedule '1f1c'"),
    "plan={schedule: 1f1b, chunks: 3}": (ScheduleError, "not 3"),
}


@pytest.mark.parametrize("override", BAD)
def test_bad_input_is_one_message_with_its_cure(override: str):
    kind, text = BAD[override]
    with pytest.raises(RayparError) as found:
        parse_job(SMALL, [override])
    assert type(found.value) is kind and text in found.value.what and found.value.cure
    assert isinstance(found.value, InputError) and found.value.exit_code == 2


@pytest.mark.parametrize(
    "text, said",
    [
        ("", "holds a NoneType, not keys and values"),
        ("- a", "holds a list, not keys and values"),
        ("a: [1", "line 1, column 6: not valid YAML"),
        ("steps: 1\nsteps: 2", "line 2, column 1: not valid YAML: key 'steps' is given twice, first in line 1"),
        ("name: x\nsteps: 3", "batch_size is missing; microbatches is missing; model is missing"),
    ],
)
def test_a_text_that_is_no_job(text: str, said: str):
    with pytest.raises(ConfigError) as found:
        parse_job(text)
    assert said in found.value.what
    assert ("leave one of the two out" in found.value.cure) == ("twice" in said)


def test_a_plan_is_checked():
    assert parse_job(SMALL, ["plan={stages: 2, replicas: [1, 3]}"]).to_plan(4).world == 4
    with pytest.raises(ConfigError, match=r"unknown key plan\.stges: did you mean plan\.stages"):
        parse_job(SMALL, ["plan.stges=2"])
    with pytest.raises(ConfigError, match=r"plan\.stages: expected a valid integer, got 'two'"):
        parse_job(SMALL, ["plan.stages=two"])


def test_shards_multiply_the_workers_and_their_styles_belong_to_the_job():
    sets = ["plan.stages=2", "plan.replicas=[2, 1]", "plan.shards=[2, 4]", "plan.styles={'*.up': column}"]
    job = parse_job(SMALL, [*sets, "plan.sequence_parallel=true"])
    plan = job.to_plan(4)
    assert job.workers == plan.world == 8 and [stage.shards for stage in plan.stages] == [2, 4]
    assert plan.describe() == "2 stages x 2/1 replicas x 2/4 shards"
    assert job.styles == (("*.up", "column"),) and job.sequence_parallel
    assert parse_job(job.to_yaml()) == job


def test_validation_reads_the_fields_of_the_training_data_unless_it_names_its_own():
    data = "data={function: 'm:f', names: [a, b], input: a, target: b, processes: 2}"
    spec = parse_job(SMALL, [data, "validation=m:held_out"])
    assert (spec.validation_data.names, spec.validation_data.input, spec.validation_data.processes) == (("a", "b"), "a", 0)
    spec = parse_job(SMALL, [data, "validation={function: 'm:held_out', names: [b, a], every: 3}"])
    assert (spec.validation_data.names, spec.validation.every) == (("b", "a"), 3)


@pytest.mark.parametrize("key, option", [("address", "--address"), ("resume_from_checkpoint", "`raypar resume RUN`")])
def test_what_the_command_line_says_is_no_key_of_a_job(key: str, option: str):
    with pytest.raises(ConfigError, match=f"unknown key {key}") as found:
        parse_job(SMALL, [f"{key}=x"])
    assert option in found.value.cure


def test_a_missing_job_file(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"cannot read job file .*: No such file"):
        load_job(tmp_path / "none.yaml")


def test_too_few_layers_for_the_stages():
    with pytest.raises(PlanError, match="3 layers cannot fill 4 stages"):
        parse_job(SMALL, ["plan.stages=4"]).to_plan(layers=3)


PLACED = "[{layers: 'a*', workers: [[0], [1]]}, {layers: b, workers: [[0, 1]]}]"


def test_placements_stand_in_place_of_stages_replicas_and_shards():
    job = parse_job(SMALL, [f"plan={{placements: {PLACED}}}"])
    plan = job.to_plan(["a0", "a1", "b", "c"])
    assert [(s.last, s.workers) for s in plan.stages] == [(2, ((0,), (1,))), (4, ((0, 1),))]
    assert (job.workers, job.schedule_name, job.leaves_cuts_open) == (2, "list", False)
    with pytest.raises(PlanError, match="placements name layers, and only their number is known"):
        job.to_plan(4)
    assert job.plan.describe() == "2 stages x 2/1 replicas x 1/2 shards"


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (f"{{placements: {PLACED}, stages: 2}}", "plan.placements and plan.stages exclude each other"),
        (f"{{placements: {PLACED}, schedule: 1f1b}}", "schedule 1f1b is for plans in which each worker has one role"),
        ("{placements: [{layers: a, workers: [[0, 0]]}]}", r"plan.placements\[0\] has worker 0 twice in its grid"),
        ("{placements: [{layers: a, workers: [[0], [2]]}]}", "3 workers, but no stage is computed by worker 1"),
        (
            "{placements: [{layers: a, workers: [[0], [1]], share: [1]}]}",
            r"plan.placements\[0\] gives its 2 replicas the shares \[1\]",
        ),
        ("{placements: [{layers: a, workers: [[0], [1]], share: [1, 0]}]}", "expected greater than 0, got 0"),
        ("{placements: [{layers: a}]}", "plan.placements.0.workers"),
        ("{placements: [{layers: a, workers: [0, 1]}]}", r"a list for each replica, with the number of a worker for each"),
        ("{placements: [{layers: a, workers: [[0, true]]}]}", r"a list for each replica, with the number of a worker for each"),
        ("{placements: [{layers: a, workers: [[]]}]}", r"a list for each replica, with the number of a worker for each"),
        ("{placements: [{layers: [], workers: [[0]]}]}", "a pattern of layer names, or a list of patterns"),
    ],
)
def test_placements_are_checked_before_there_is_a_model(given, text):
    with pytest.raises((PlanError, ConfigError, ScheduleError), match=text):
        parse_job(SMALL, [f"plan={given}"])


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (
            ["plan={placements: [{layers: a, workers: [[0], [1]], share: [3, 2]}]}"],
            r"plan.placements\[0\].share adds up to 5 blocks, and a step has 4\n  cure: give numbers that add up to 4, or set",
        ),
        (
            ["virtual_shards=4", "plan={placements: [{layers: a, workers: [[0]]}, {layers: b, workers: [[0, 1, 2]]}]}"],
            r"virtual_shards is 4, and plan.placements\[1\] has 3 shards\n  cure: .* a multiple of 3, .* a divisor of 4",
        ),
        (
            ["virtual_shards=4", "plan={stages: 2, shards: [1, 3]}"],
            "virtual_shards is 4, and stage 1 has 3 shards\n  cure: .* a multiple of 3, .* a divisor of 4",
        ),
        (["virtual_shards=2", "plan={shards: 4}"], "virtual_shards is 2, and stage 0 has 4 shards"),
    ],
)
def test_blocks_and_virtual_shards_that_a_plan_cannot_share_are_refused_before_there_is_a_model(given, text):
    with pytest.raises(PlanError, match=text):
        parse_job(SMALL, given)


def test_a_plan_from_python_may_share_virtual_shards_unevenly():
    plan = PlanConfig.of_plan(ParallelPlan((StagePlan(0, 3, ((0, 1),), division=(1, 2)),)), "1f1b")
    assert parse_job(SMALL, ["virtual_shards=3"]).replace(plan=plan).to_plan(3).virtual_shard_counts == {3}


def test_a_plan_from_python_may_have_any_workers_where_its_schedule_takes_any():
    turned = ParallelPlan((StagePlan(0, 1, ((1,),)), StagePlan(1, 3, ((0,),))))
    again = ParallelPlan((StagePlan(0, 1, ((0,),)), StagePlan(1, 2, ((1,),)), StagePlan(2, 3, ((0,),))))
    shared = ParallelPlan((StagePlan(0, 1, ((0,), (1,))), StagePlan(1, 3, ((0, 1),))))
    for plan in (turned, again, shared):
        section = PlanConfig.of_plan(plan, "list")
        assert section.to_plan(3) == plan and section.workers == 2 and len(section.unwritable_parts) == 1
    with pytest.raises(ScheduleError, match="schedule 1f1b is for plans in which each worker has one role"):
        PlanConfig.of_plan(shared, "1f1b")


@pytest.mark.parametrize("asked, most", [(None, 3), (8, 8)])
def test_a_planner_gets_no_more_workers_than_there_are_processors_unless_they_are_asked_for(asked, most, monkeypatch):
    given = []
    monkeypatch.setattr(Job, "usable_processors", 3)
    monkeypatch.setattr(choose_plan, "choose_plan", lambda spec, checked, make, name, workers: given.append(workers))
    job = parse_job(SMALL, ["plan=auto"])
    choose_plan.make_plan_chooser(job, asked)(None)
    assert given == [most]


def test_an_automatic_plan_is_not_there_before_the_planner_has_run():
    job = parse_job(SMALL, ["plan=auto"])
    with pytest.raises(PlanError, match="plan is auto"):
        job.to_plan(4)


def test_reading_a_job_loads_neither_torch_nor_ray():
    code = (
        "import sys; from raypar.job.read_job import load_job; import raypar.storage.run_folder; "
        f"load_job({str(QUICKSTART)!r}).to_plan(6); print(*sorted({{'torch', 'ray', 'numpy'}} & set(sys.modules)))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True, cwd=ROOT)
    assert found.stdout.strip() == ""


def test_run_folders_never_share_a_name_and_are_found_by_name_or_path(tmp_path: Path):
    folders = [RunFolder.create(tmp_path, "quick") for _ in range(3)]
    assert [f.name for f in folders] == ["quick", "quick-2", "quick-3"]
    for folder in folders:
        folder.job.write_text(SMALL)
    assert RunFolder.find("quick-2", tmp_path) == RunFolder.find(folders[1].path) == folders[1]
    with pytest.raises(ConfigError, match="no run 'quik'") as found:
        RunFolder.find("quik", tmp_path)
    assert "did you mean quick" in found.value.cure


def test_only_one_at_a_time_trains_in_a_run_folder_and_a_killed_one_lets_go_of_it(tmp_path: Path):
    folder = RunFolder.create(tmp_path, "run")
    folder.job.write_text(SMALL)
    code = (
        f"from raypar.storage.run_folder import RunFolder; held = RunFolder.find({str(folder.path)!r}).hold_lock(); "
        "held.__enter__(); "
    )
    holder = subprocess.Popen([sys.executable, "-c", code + "print(1, flush=True); input()"], cwd=ROOT, stdin=-1, stdout=-1)
    assert holder.stdout is not None and holder.stdout.readline() == b"1\n"
    with pytest.raises(ConfigError, match=f"process {holder.pid}, which was started .* trains in"), folder.hold_lock():
        pass
    holder.kill()
    holder.communicate()
    for _ in range(2):
        with folder.hold_lock():
            pass
    assert folder.job.read_text() == SMALL


def test_lines_of_a_run_survive_a_last_one_cut_off(tmp_path: Path):
    folder = RunFolder.create(tmp_path, "run")
    assert list(folder.read_lines(folder.metrics)) == []
    for step in (1, 2):
        folder.append_line(folder.metrics, {"step": step, "loss": 0.5, "seconds": 0.1, "samples_per_s": 80.0})
    with open(folder.metrics, "a") as file:
        file.write('{"step": 3, "lo')
    assert [line["step"] for line in folder.read_lines(folder.metrics)] == [1, 2]


def test_a_run_dir_that_cannot_be_made(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot make a run folder"):
        RunFolder.create(tmp_path / "file", "run")


@pytest.mark.parametrize("run_dir", ["file", "file/runs", "dangling", "/proc/runs"])
def test_a_run_dir_that_cannot_be_made_is_found_before_the_run_begins(tmp_path: Path, run_dir: str):
    (tmp_path / "file").write_text("")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match=f"cannot make a run folder {tmp_path / run_dir / 'tiny'}: .*"):
        check_run_dir_is_writable(tmp_path / run_dir, "tiny")


def test_a_run_dir_that_can_be_made_is_not_made_by_the_check(tmp_path: Path):
    check_run_dir_is_writable(tmp_path / "some/runs", "tiny")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "setting, cure",
    [
        ("max_grad_norm=1", "clip_norm"),
        ("optimizer.lr=1", "optimizer.args.lr"),
        ("weight_decay=0.1", "argument of the optimizer"),
        ("data.num_workers=1", "data.processes"),
        ("gradient-accumulation-steps=4", "microbatches"),
        ("bf16=true", "precision.compute"),
        ("gradient_checkpointing=true", "plan.recompute"),
        ("plan.activation_checkpointing=full", "plan.recompute"),
        ("activation_checkpointing=full", "plan.recompute"),
        ("plan.activation_checkpoint=full", "plan.recompute"),
        ("plan.pipeline=2", "plan.stages"),
        ("plan.pipeline_parallel_degree=2", "plan.stages"),
        ("plan.split_points=[1]", "plan.cuts"),
        ("parallelism.pipeline_parallel_degree=2", "plan.stages"),
        ("workers=4", "plan: auto"),
    ],
)
def test_a_name_of_another_framework_gets_advice_of_its_own(setting, cure):
    with pytest.raises(ConfigError) as caught:
        parse_job(SMALL, [setting])
    assert cure in caught.value.cure and "did you mean" not in str(caught.value)


FOREIGN = """
torchrun: nproc_per_node=plan.stages nnodes=plan.stages rdzv_endpoint=`address` master_addr=`address`
    local_rank=`address` max_restarts=`elastic` collate_fn=data.collate
    persistent_workers=data.processes worker_init_fn=seeds find_unused_parameters=plan.replicas
    grad_scaler=precision.compute
transformers: args=batch_size compute_metrics=`metrics` data_collator=data.collate train_dataset=`data`
    eval_dataset=`validation` tokenizer=tokenizes processing_class=tokenizes optimizers=`optimizer` optim=`optimizer`
    num_train_epochs=`steps` per_device_train_batch_size=batch_size per_device_eval_batch_size=validation.samples
    logging_steps=metrics.jsonl eval_strategy=validation.every save_strategy=checkpoint.every
    load_best_model_at_end=checkpoint.best torch_compile=yet label_smoothing_factor=loss.args group_by_length=shuffled
    dataloader_drop_last=data.drop_last push_to_hub=export peft_config=get_peft_model label_names=data.target
    full_determinism=`seed` deepspeed=plan.stages
lightning: strategy=plan.replicas accelerator=`device` max_epochs=`steps` fast_dev_run=Subset
    limit_val_batches=validation.samples check_val_every_n_epoch=validation.every log_every_n_steps=metrics.jsonl
    enable_progress_bar=verbose sync_batchnorm=microbatch deterministic=`seed` profiler=trace_every datamodule=`data`
    gradient_clip_algorithm=clip_norm max_time=max_time_s ema=average
deepspeed: offload_optimizer=plan.optimizer_in train_micro_batch_size_per_gpu=batch_size wall_clock_breakdown=trace_every
    steps_per_print=metrics.jsonl moe=plan.shards
accelerate: mixed_precision=precision.compute split_batches=shuffled even_batches=shuffled log_with=trackers
    project_dir=run_dir
ray: train_loop_config=runs resources_per_worker=`threads` checkpoint_score_attribute=checkpoint.best datasets=`data`
"""
"""Framework -> name there = a word of the advice."""


@pytest.mark.parametrize("name, word", [pair.split("=") for pair in FOREIGN.split() if "=" in pair])
def test_a_word_of_another_framework_gets_its_sentence_wherever_it_is_written(name: str, word: str):
    for setting in (f"{name}=1", f"data.{name}=1", f"optimizer.{name}=1")[: 1 if name == "args" else 3]:
        with pytest.raises(ConfigError, match=rf"^unknown key {re.escape(setting[:-2])}\n") as caught:
            parse_job(SMALL, [setting])
        assert word in caught.value.cure


@pytest.mark.parametrize(
    "key",
    ["data.stages_", "data.schedules_", "compute_metric_", "optimizer.schedul", "evry", "model.input_names", "data.keeps_"],
)
def test_a_key_of_another_section_is_not_suggested_because_it_looks_like_it(key: str):
    with pytest.raises(ConfigError) as caught:
        parse_job(SMALL, [f"{key}=1"])
    assert caught.value.what == f"unknown key {key}" and "valid keys here: " in caught.value.cure


def test_a_callback_of_another_framework_is_told_what_does_its_work_here():
    for name, word in (
        ("EarlyStoppingCallback", "early_stopping"),
        ("ModelCheckpoint", "checkpoint.every"),
        ("LearningRateMonitor", "lr"),
        ("WandbCallback", "trackers"),
        ("TQDMProgressBar", "verbose"),
        ("StochasticWeightAveraging", "not supported yet"),
        ("EMACallback", "average.decay"),
        ("SchemaCallback", "derive your class from"),
    ):
        for given in (type(name, (), {}), type(name, (), {})()):
            with pytest.raises(
                ConfigError, match=f"^callbacks has (the class|an?) {name} of test_config, which is no raypar.Callback"
            ) as caught:
                check_callbacks([given])
            assert word in caught.value.cure


OTHER_NAMES = ("num_workers", "optimizer.args.lr", "metrics.jsonl", "torch.utils.data", "torch.compile", "get_peft_model")
"""Names in advice that are no keys."""


def test_advice_about_names_of_other_frameworks_names_keys_that_there_are_and_no_key_needs_it():
    keys = {*dotted_keys(Job), *inspect.signature(raypar.Trainer).parameters}
    assert {key.rpartition(".")[2] for key in keys} & set(ADVICE) == {
        "args",  # an argument of transformers' Trainer
        "offload",  # a section of other frameworks, where it is no key of `plan`
        "master",  # the node of torchrun, where it is no key of `precision`
        "weights",  # a file of them, where it is no key of `data`
        "zero",  # a section of DeepSpeed, where it is no key of `plan`
    }
    assert not set(Job.model_fields) & set(ADVICE)
    for advice in ADVICE.values():
        named = re.findall(r"\b[a-z]+(?:[._][a-z]+)+\b|(?<=`)[a-z]+(?=`)", advice)
        assert named, advice
        for key in named:
            assert key in keys or key in OTHER_NAMES, (key, advice)


# -- several validation sets ---------------------------------------------------------------------------------------------------

SETS = "{every: 2, short: 'm:a', long: {function: 'm:b', samples: 3}}"


def test_several_validation_sets_stand_in_validation_by_name():
    job = parse_job(SMALL, [f"validation={SETS}"])
    assert job.validation is not None and job.validation.every == 2
    assert {name: (one.function, one.samples) for name, one in job.validation_sets.items()} == {
        "short": ("m:a", 0),
        "long": ("m:b", 3),
    }
    same = parse_job(SMALL, ["validation={every: 2, sets: {short: 'm:a', long: {function: 'm:b', samples: 3}}}"])
    assert job == same == parse_job(job.to_yaml(), name="small")
    changed = parse_job(SMALL, [f"validation={SETS}", "validation.long.samples=5", "validation.every=7"])
    assert (changed.validation_sets["long"].samples, changed.validation and changed.validation.every) == (5, 7)
    assert list(parse_job(SMALL, ["validation={set1: 'm:a', set2: 'm:b'}"]).validation_sets) == ["set1", "set2"]
    alone = parse_job(SMALL, ["validation=m:a", "validation.every=3"])
    assert list(alone.validation_sets) == [""] and alone.validation_sets[""] is alone.validation


@pytest.mark.parametrize(
    "given, says",
    [
        ("{every: 2}", "validation.function is missing"),
        ("{a: 'm:f', samples: 3}", r"validation has the sets a, and beside them samples, which is of one set\n  cure: write"),
        ("{a: 'm:f', smples: 3}", "unknown key validation.smples: did you mean validation.samples?"),
        ("{a: {function: 'm:f'}, evry: 2}", r"(?s)\A(?!.*validation\.a\b).*unknown key validation.evry: did you mean"),
        ("{a: {function: 'm:f', every: 3}}", "unknown key validation.sets.a.every: did you mean validation.every"),
        ("{a: {samples: 3}}", "validation.sets.a.function is missing"),
        ("{'a/b': 'm:f'}", r"validation: 'a/b' is no name of a set\n  cure: at most 60 letters"),
        ("{a: 'm:f', sets: {a: 'm:f'}}", "validation has two sets a, one of them in sets"),
        ("{a: 'm:f', a: 'm:g'}", "key 'a' is given twice"),
        ("{a: {function: 'm:f', metrics: [f1]}}", r"validation.a.metrics names 'f1', which is none of the job's metrics"),
        ("{function: 'm:f', b: 'm:f'}", "unknown key validation.b"),
    ],
)
def test_what_is_wrong_with_validation_sets_is_said(given: str, says: str):
    with pytest.raises(ConfigError, match=says):
        parse_job(SMALL, [f"validation={given}"])


def test_without_sets_contracts_and_names_are_as_they_were():
    plain = parse_job(SMALL, ["validation={function: 'm:f', every: 2}"])
    several = parse_job(SMALL, [f"validation={SETS}"])
    assert contract_of_job(plain) == contract_of_job(several) == contract_of_job(parse_job(SMALL))
    assert plain.series == {"loss", "lr", "norm", "validation_loss"}


@pytest.mark.parametrize(
    "text, says",
    [
        ("./rows/*.jsonl", r"^--data ./rows/\*.jsonl names no data set\n.* a file is named so: --data '{jsonl: ./rows/"),
        ("a:b:c", r"^--data a:b:c names no data set\n  cure: give --data module:function, the name of one of the job's .*}'$"),
        ("{function: a:b, colour: red}", r"^unknown key colour in --data\n  cure: valid keys here: function, args, parquet"),
        ("{parquet: [1]}", r"^parquet.0 in --data: expected a valid string, got 1 .*\n  cure: correct parquet.0 in --data$"),
        ("{every: 2}", r"^function in --data is missing\n  cure: add function to --data"),
        ("{function: ab}", r"^function in --data: expected module:name.*\n  cure: correct function in --data$"),
    ],
)  # fmt: skip
def test_an_error_in_data_given_by_itself_names_its_argument(text: str, says: str):
    with pytest.raises(ConfigError, match=says) as caught:
        parse_data_argument(text)
    assert "job file" not in str(caught.value) and "validation." not in str(caught.value)


def test_a_file_where_a_validation_set_is_named_has_its_form_as_the_cure():
    with pytest.raises(ConfigError, match=r"no validation set 'rows.parquet'\n.*--data '{parquet: rows.parquet}'"):
        choose_data(parse_job(SMALL), "rows.parquet", None)


def test_errors_about_keys_of_data_say_in_which_argument_they_stand():
    for given, cure, says in (
        (ValidationConfig(function="a:b"), "set data.input: x", "set data.input: x; keys of this data set stand in --data"),
        (ValidationConfig(function="a:b"), "give metadata", "give metadata"),
        (None, "set data.input: x", "set data.input: x"),
    ):
        with pytest.raises(DataError) as caught, naming_argument(given, "--data"):
            raise DataError("sample 0 has no field 'z'", cure=cure)
        assert caught.value.cure == says and caught.value.args == ("sample 0 has no field 'z'", says)
