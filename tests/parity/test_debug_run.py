"""`raypar debug RUN` goes on from a run's last checkpoint, and finds the number that ended the run."""

from __future__ import annotations

import bdb
import json
from pathlib import Path

import pytest
from helpers import checkpoint_folders as checkpoint_files

from raypar.cli import main
from raypar.errors import NonFiniteError, UserCodeError
from raypar.job.read_job import load_job
from raypar.launch import Result, raise_run_failure
from raypar.launch.run_of_submitted_job import SUBMITTED_VARIABLE
from raypar.storage.run_folder import RunFolder
from raypar.worker.data.sample_order import SampleOrder
from raypar.worker.run_in_one_process import OneProcessRun
from raypar.worker.step.step_commit import NON_FINITE_CURE

DONE, SAVED = 4, 3
"""Steps that the run has done; steps done in its last checkpoint."""

CODE = """
import torch
from torch import nn

def model():
    return [("first", nn.Linear(2, 2)), ("last", nn.Linear(2, 1))]

def data(bad):
    return [(torch.tensor([float("nan") if i == bad else 1.0, i / 8]), torch.zeros(1)) for i in range(32)]

def loss(output, target):
    return (output - target).square().mean()
"""
JOB = """
name: odd
seed: 3
steps: 8
batch_size: 4
microbatches: 2
model: code_of_odd_run:model
data: {function: code_of_odd_run:data, args: {bad: BAD}}
loss: code_of_odd_run:loss
optimizer: {function: "torch.optim:AdamW", args: {lr: 0.1}}
plan: {stages: 2}
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    """A run that failed in step 5, after a checkpoint of 3 steps; `runs/odd` in this folder."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    bad = SampleOrder(seed=3, size=32).ids(4 * DONE, 4 * DONE + 1)[0][1]
    (tmp_path / "code_of_odd_run.py").write_text(CODE)
    (tmp_path / "odd.yaml").write_text(JOB.replace("BAD", str(bad)))
    job = load_job("odd.yaml")
    made = RunFolder.create("runs", "odd")
    made.job.write_text(job.to_yaml())
    with OneProcessRun(job, job.to_plan(2), "1f1b") as local:
        for step in range(DONE):
            if step == SAVED:
                checkpoint_files.save_run(local, made.checkpoints, SAVED)
            report = local.step(step)[0]
            line = {"step": step + 1, "loss": report.loss, "seconds": 0.1, "samples_per_s": 40.0, "time": 1000.0 + step}
            made.append_line(made.metrics, line)
        with pytest.raises(NonFiniteError):
            local.step(DONE)
    return made


@pytest.mark.parametrize("given", ["odd", "runs/odd", "{folder}"])
def test_debug_takes_a_run_by_name_or_folder_and_goes_on_from_its_checkpoint_to_the_step_that_failed(given, folder, capsys):
    assert main(["debug", given.format(folder=folder.path.resolve())]) == 1
    out, err = capsys.readouterr()
    losses = [json.loads(line)["loss"] for line in folder.metrics.read_text().splitlines()]
    assert "run odd: from step_00000003, 3 steps are done" in out
    assert f"step 4: loss {losses[3]:.6f}, " in out and "step 3: " not in out
    (bad,) = [i for i, (x, _) in enumerate(load_job("odd.yaml").data.call()) if x.isnan().any()]
    place = "first not finite: layer 'first' in microbatch 0 of step 5"
    assert f"{place}: its input 'x' has NaN (1 of 4 numbers), in sample {bad} (field 'x')\n" in err
    assert f"cure: {NON_FINITE_CURE}\n" in err


def test_a_run_without_a_checkpoint_is_run_from_its_first_step_to_the_one_that_failed(folder, capsys):
    checkpoint_files.discard_checkpoint(folder.checkpoints / "step_00000003")
    assert main(["debug", "odd"]) == 1
    out, err = capsys.readouterr()
    assert (
        "from its first step" in out
        and "step 1: loss" in out
        and "step 0" not in out
        and "of step 5: its input 'x' has NaN" in err
    )


def test_the_last_line_is_the_hash_of_the_weights_as_a_run_has_it(folder, capsys):
    assert main(["debug", "odd.yaml", "--steps", "2", "--set", "plan.replicas=2", "--set", "plan.zero=3"]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    job = load_job("odd.yaml", ["plan.stages=1"])
    with OneProcessRun(job, job.to_plan(2), "1f1b") as local:
        for step in range(2):
            local.step(step)
        saved = checkpoint_files.save_run(local, folder.checkpoints, 2)
    assert last == f"weights sha256 {checkpoint_files.checkpoint_weights_hash(saved)}"


def test_where_to_stop_is_within_the_steps_that_are_run(folder, capsys):
    assert main(["debug", "odd", "--stop-at", "3,0,0"]) == 2
    err = capsys.readouterr().err
    assert "--stop-at 3,0,0 is never reached: steps 4 to 5, 2 stages, 2 microbatches" in err
    assert "cure: steps count from 1, stages and microbatches from 0" in err
    assert main(["debug", "odd.yaml", "--steps", "1", "--stop-at", "0,0,0", "--set", "plan.stages=1"]) == 2
    assert "--stop-at 0,0,0 is never reached: 1 step, 1 stage, 2 microbatches" in capsys.readouterr().err


def test_where_to_stop_is_the_step_as_printed_and_leaving_the_debugger_names_it(folder, capsys, monkeypatch):
    def leave() -> None:
        raise bdb.BdbQuit

    monkeypatch.setattr("builtins.breakpoint", leave)
    assert main(["debug", "odd.yaml", "--steps", "3", "--stop-at", "2,1,0"]) == 130
    out, err = capsys.readouterr()
    assert "step 1: loss" in out and "step 2: loss" not in out
    assert "step 2: about to run 1F0" in err and "left the debugger in step 2\n" in err


def test_a_setting_on_which_the_bits_depend_is_refused_as_at_a_resume(folder, capsys):
    assert main(["debug", "odd", "--set", "seed=4"]) != 0
    assert "belongs to another job: seed" in capsys.readouterr().err


def test_a_run_made_in_python_without_a_job_file_says_what_to_do(folder, capsys):
    folder.job.unlink()
    folder.why_no_job.write_text("the model <lambda> has no name\n")
    assert main(["debug", "odd"]) == 2
    err = capsys.readouterr().err
    assert "run runs/odd has no job.yaml, from which `raypar debug` makes the model and the data again: the model <" in err
    assert "`raypar debug JOB`; for a run that commands can debug, put what is named here into a module of its own" in err


def test_what_is_neither_a_job_file_nor_a_run_names_the_runs(folder, capsys):
    assert main(["debug", "add"]) == 2
    err = capsys.readouterr().err
    assert "no run 'add'" in err and "did you mean odd?" in err and "a job file" in err
    assert main(["debug", "add.yaml"]) == 2
    assert "add.yaml" in capsys.readouterr().err


def test_the_cure_of_a_failed_run_names_the_run_to_debug(folder, monkeypatch):
    with OneProcessRun(job := load_job(folder.job), job.to_plan(2), "1f1b") as local, pytest.raises(NonFiniteError) as raised:
        for step in range(DONE + 1):
            local.step(step)
    assert raised.value.cure.startswith("`raypar debug JOB` names the first layer")
    assert "log, sqrt and divisions" in raised.value.cure and "precision" in raised.value.cure

    def cure(error: Exception, path: str) -> str:
        with pytest.raises(type(error)) as found:
            raise_run_failure(Result({}, path, "failed", DONE, error=error))
        assert found.value.args[1] == found.value.cure
        return found.value.cure

    made = NonFiniteError(raised.value.what, raised.value.cure)
    assert cure(made, "runs/odd").startswith("`raypar debug odd` names the first layer")
    of_code = UserCodeError("the model raised", "`raypar debug JOB` runs the same plan in one process under pdb")
    assert cure(of_code, str(folder.path.resolve())).startswith(f"`raypar debug {folder.path.resolve()}` runs the same plan")
    monkeypatch.setenv(SUBMITTED_VARIABLE, "{}")
    assert cure(NonFiniteError(*raised.value.args), "runs/odd").startswith("`raypar debug JOB`")
    monkeypatch.delenv(SUBMITTED_VARIABLE)
    folder.job.unlink()
    assert "this run has no job file: that command says what it needs" in cure(NonFiniteError(*raised.value.args), "runs/odd")


def test_one_worker_and_one_stage_are_said_so(folder: RunFolder, capsys: pytest.CaptureFixture[str]):
    main(["debug", "odd", "--steps", "1", "--set", "plan.stages=1"])
    assert "1 worker, 1 stage in one process" in capsys.readouterr().out
