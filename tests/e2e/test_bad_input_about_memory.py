"""Bad input about divided state, offloading, float16 and averages: one error of two lines before anything starts, or a line."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
from helpers.tiny_job import write_job

from raypar.cli import main
from raypar.errors import ConfigError
from raypar.job.read_job import load_job
from raypar.worker.layer_precisions import AUTOCAST_PRECISIONS

SHARDS = ("plan.shards=2", "plan.styles={'*': gathered}")
COUPLED = "optimizer=helpers.optimizers:NormalisesAll"
DIFFERENCE = r".*; measured: in a trial of \d+ steps.* differ by [\d.e-]+ "
STATE = r"state that replicas divide \(ZeRO, FSDP\) is plan\.zero: 0, 1 for the optimizer's state, 2 for gradients too"
AVERAGES = r"a moving average of the weights \(EMA\) is `average`, with average.decay, average.every and average.from_step"
ERRORS = {
    "an optimizer that couples parameters": (
        [COUPLED, "plan.stages=1", "plan.zero=1"],
        "NormalisesAll cannot be used with plan.zero: 1: its step of one parameter depends on the other parameters",
        r"set plan\.zero: 0, or use an optimizer that takes each parameter by itself" + DIFFERENCE,
    ),
    "the same on stages": ([COUPLED], "NormalisesAll cannot be used with 2 stages", r"set plan\.stages: 1 \(" + DIFFERENCE),
    "an optimizer of whole parameters on shards": (
        [*SHARDS, "optimizer.function=torch.optim:Adafactor", "plan.zero=1"],
        "Adafactor cannot be used with 2 shards: its step of one element depends on other elements",
        r"set plan\.shards: 1 and leave virtual_shards out" + DIFFERENCE,
    ),
    "8 bits on shards": (
        [*SHARDS, "optimizer=raypar.optimizers:AdamW8bit", "plan.zero=3"],
        "AdamW8bit cannot be used with 2 shards",
        r"set plan\.shards: 1" + DIFFERENCE,
    ),
    "fp16 and float64": (
        ["dtype=float64", "precision={compute: fp16}"],
        "precision.compute is fp16, but dtype is float64",
        "set dtype: float32",
    ),
    "copies in fp16 and float64": (
        ["dtype=float64", "precision={parameters: fp16, master: float32}"],
        "precision.master is float32, but dtype, that of the parameters themselves, is float64",
        "set dtype: float32",
    ),
    "holders of nothing": (
        ["plan.zero_holders=2"],
        "plan.zero_holders is 2, and plan.zero is 0: each replica holds all state of its stage",
        "set plan.zero: 1, or leave plan.zero_holders out",
    ),
    "gather below level 3": (
        ["plan.zero=2", "plan.gather=layer"],
        "plan.gather: layer needs plan.zero: 3, and plan.zero is 2: each replica has whole parameters",
        "set plan.zero: 3, or leave plan.gather out",
    ),
    "gather below level 3 on one stage": (
        ["plan.zero=[0, 3]", "plan.gather=layer"],
        "plan.gather: layer needs plan.zero: 3, and plan.zero of stage 0 is 0: each replica has whole parameters",
        r"set plan\.zero: 3, or plan\.gather: \[step, layer\]",
    ),
    "object storage": (
        ["plan.optimizer_in=s3://bucket/state"],
        "plan.optimizer_in: expected a folder on a local disk of each worker, not a URI, got 's3://bucket/state' (str)",
        r"correct --set plan\.optimizer_in$",
    ),
    "object storage for the mirror": (
        ["elastic.mirror_in=s3://bucket/state"],
        "elastic.mirror_in: expected a folder on a local disk of each worker, not a URI",
        r"correct --set elastic\.mirror_in$",
    ),
    "a folder without a name": (
        ["plan.optimizer_in=''"],
        "plan.optimizer_in: expected a folder on a local disk of each worker, not a URI, got '' (str)",
        r"correct --set plan\.optimizer_in$",
    ),
    "a decay alone": (
        ["average=0.999"],
        "average: expected keys and values (decay, every, from_step, validate_with), got 0.999 (float)",
        r'correct --set average; for average\.decay write \{"decay": 0\.999\}$',
    ),
    "an optimizer in a list": (
        ["optimizer=[torch.optim:AdamW, {lr: 0.1}]"],
        "optimizer is a list that begins with the text 'torch.optim:AdamW', and its entries are optimizers, each for some",
        r"for one optimizer write optimizer: \{function: torch\.optim:AdamW, args: \{lr: 0\.001\}\}; for several",
    ),
    "levels of other stages": (["plan.zero=[1, 2, 3]"], "plan.zero has 3 entries for 2 stages", "give one value, or one per"),
    "spans of other stages": (
        ["plan.zero=3", "plan.gather=[layer, step, step]"],
        "plan.gather has 3 entries for 2 stages",
        "give one value, or one per stage",
    ),
    "a folder that is none": (
        ["plan.optimizer_in=/dev/null/here"],
        "plan.optimizer_in /dev/null/here takes none of optimizer state: ",
        "give a folder that workers can write to, on a local disk with room for",
    ),
    "more than a worker may use": (
        ["placement.worker_memory_mib=0.001"],
        "the plan does not fit: worker ",
        "predicted to fit: |neither recomputation nor plan.zero",
    ),
    "fsdp": (["fsdp=full_shard"], "unknown key fsdp", STATE),
    "zero_optimization": (["zero_optimization={stage: 2}"], "unknown key zero_optimization", STATE),
    "reshard_after_forward": (
        ["plan.reshard_after_forward=true"],
        "unknown key plan.reshard_after_forward",
        r"how long parameters .* are whole is plan\.gather: step .* or layer",
    ),
    "cpu_offload": (
        ["cpu_offload=true"],
        "unknown key cpu_offload",
        r"offloading to files of a local disk is plan\.optimizer_in: FOLDER .* and plan\.activations_in for activations",
    ),
    "ema": (["ema=0.999"], "unknown key ema", AVERAGES),
    "ema of an optimizer": (["optimizer.ema=0.999"], "unknown key optimizer.ema", AVERAGES),
}
"""What is wrong -> settings, what the error says first, the pattern with which its cure begins."""
LINES = {
    "one replica": (
        ["plan.zero=3", "plan.replicas=1"],
        "plan.zero is 3, and no stage has replicas to divide state: each worker keeps all of its own",
    ),
    "scattered without replicas": (
        ["plan.gradients=scatter", "plan.replicas=1"],
        "plan.gradients is scatter, and no stage has replicas: each worker adds up all gradients of its own, as with fold",
    ),
    "two holders of two replicas": (
        ["plan.zero=1", "plan.zero_holders=2"],
        "plan.zero_holders is 2, and a stage has 2 replicas: each holds everything, and nothing is saved",
    ),
}
"""What saves nothing -> settings, the warning."""


@pytest.fixture(autouse=True)
def nothing_starts(monkeypatch):
    def connect(*given):
        raise ConfigError("nothing is started here")

    monkeypatch.chdir(Path(__file__).parents[1])
    monkeypatch.setattr("raypar.actors.ray_connection.connect_ray", connect)


def train(folder: Path, sets: list[str]) -> int:
    return main(["train", str(write_job(folder)), *(word for one in sets for word in ("--set", one))])


@pytest.mark.part(6)
@pytest.mark.parametrize("case", ERRORS)
def test_it_is_one_error_of_two_lines_before_anything_starts(case, tmp_path, capfd):
    sets, said, cure = ERRORS[case]
    assert train(tmp_path, sets) == 2
    first, second = capfd.readouterr().err.splitlines()
    assert first.startswith("error: ") and said in first and "nothing is started here" not in first
    assert re.match(f"  cure: (?:{cure})", second), second
    assert not (tmp_path / "runs").exists()


@pytest.mark.part(2)
@pytest.mark.parametrize("case", LINES)
def test_what_saves_nothing_is_a_line_and_a_run_starts(case, tmp_path, capfd):
    sets, line = LINES[case]
    assert train(tmp_path, sets) == 2, "as nothing can be started here"
    found = capfd.readouterr()
    assert found.out.count(f"warning: {line}") == 1 and "error: nothing is started here" in found.err


@pytest.mark.part(2)
@pytest.mark.parametrize("case", LINES)
def test_the_plan_says_it_too(case, tmp_path, capfd):
    sets, line = LINES[case]
    assert main(["plan", str(write_job(tmp_path)), *(word for one in sets for word in ("--set", one))]) == 0
    assert capfd.readouterr().out.count(f"\n{line}") == 1


def test_host_is_the_memory_of_the_host_for_activations_alone():
    quickstart = Path(__file__).parents[2] / "jobs/quickstart.yaml"
    job = load_job(quickstart, ["plan.optimizer_in=host", "elastic.mirror_in=host"])
    assert job.optimizer_in == str(Path("host").absolute()) == job.elastic.mirror_in
    with pytest.raises(ConfigError, match=r"plan\.activations_in is host, and device is cpu"):
        load_job(quickstart, ["plan.activations_in=host"])


@pytest.mark.parametrize("key", ["plan.optimizer_in", "plan.activations_in", "elastic.mirror_in"])
def test_a_folder_that_is_made_is_a_line_with_its_whole_path(key, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    assert train(tmp_path, [f"{key}=state/here"]) == 2, "as nothing can be started here"
    line = f"warning: {key} {tmp_path}/state/here is not there yet: workers make it in {tmp_path}\n"
    assert line in capfd.readouterr().out


def test_fp16_on_a_processor_without_it_is_refused_before_a_worker_starts(tmp_path, monkeypatch, capfd):
    lacking = replace(AUTOCAST_PRECISIONS["fp16"], cpu_supports=lambda: False)
    monkeypatch.setattr("raypar.worker.backend.layer_precision_of", lambda precision: lacking if precision else None)
    assert train(tmp_path, ["precision={compute: fp16}"])
    first, second = capfd.readouterr().err.splitlines()
    assert re.fullmatch(r"error: PyTorch \S+ cannot compute in float16 on the processor of \S+", first)
    assert second.startswith("  cure: use a newer PyTorch, or set precision: ")
