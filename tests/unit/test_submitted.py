"""A job of Ray's job server: its runs outlast it, and the same command again goes on with what was stopped."""

from pathlib import Path

import pytest
from helpers import checkpoint_folders as checkpoint_files

from raypar.cli import main
from raypar.errors import ActiveError, Interrupted, OutlivedError
from raypar.job.contract import contract_of_job
from raypar.job.read_job import load_job
from raypar.launch import Result, raise_run_failure, resume
from raypar.launch.run_of_submitted_job import SUBMITTED_VARIABLE, choose_lasting_run_dir, find_unfinished_run
from raypar.storage.run_folder import RunFolder

JOB = """
name: small
steps: 8
batch_size: 8
microbatches: 4
model: m:layers
loss: m:loss
data: m:text
optimizer: torch.optim:SGD
"""


@pytest.fixture
def home(tmp_path, monkeypatch) -> Path:
    """Of somebody whose job stands in a folder that will be gone."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "copy").mkdir()
    (tmp_path / "copy/small.yaml").write_text(JOB)
    monkeypatch.chdir(tmp_path / "copy")
    monkeypatch.setenv(SUBMITTED_VARIABLE, '{"metadata": {"job_submission_id": "raysubmit_1"}}')
    return tmp_path / "home"


def stopped(run_dir: Path, done: int, *words: str) -> RunFolder:
    """A run of the job in `run_dir` with a checkpoint after so many steps."""
    job = load_job("small.yaml", words)
    folder = RunFolder.create(run_dir, job.name)
    folder.job.write_text(job.to_yaml())
    aside = checkpoint_files.create_checkpoint(folder.checkpoints, done)
    checkpoint_files.commit_checkpoint(aside, [], steps_done=done, contract=contract_of_job(job))
    return folder


@pytest.fixture
def launched(monkeypatch) -> list:
    """What `raypar train` begins or goes on with, instead of doing it."""
    made: list = []
    done = Result({}, "runs/small", "done", 8)
    monkeypatch.setattr(
        "raypar.launch.train_job_in_new_folder", lambda job, tell, **rest: made.append(("new", job.run_dir)) or done
    )
    monkeypatch.setattr(
        "raypar.launch.resume.resume_job", lambda job, folder, tell, **rest: made.append(("again", folder.path)) or done
    )
    return made


def test_runs_of_a_submitted_job_lie_where_nobody_removes_them(home, monkeypatch):
    assert choose_lasting_run_dir("runs/") == home / "raypar/runs"
    assert choose_lasting_run_dir("/shared/runs") == Path("/shared/runs")
    monkeypatch.delenv(SUBMITTED_VARIABLE)
    assert choose_lasting_run_dir("runs/") == Path("runs")


def test_the_same_command_again_goes_on_with_the_run_that_was_stopped(home, launched):
    assert main(["train", "small.yaml"]) == 0
    folder = stopped(home / "raypar/runs", 5)
    assert main(["train", "small.yaml"]) == 0
    assert main(["train", "small.yaml", "--no-resume"]) == 0
    assert launched == [("new", str(home / "raypar/runs")), ("again", folder.path), ("new", str(home / "raypar/runs"))]


def test_outside_of_the_job_server_a_new_run_begins_unless_the_last_one_is_asked_for(home, launched, monkeypatch):
    monkeypatch.delenv(SUBMITTED_VARIABLE)
    folder = stopped(Path("runs"), 5)
    assert main(["train", "small.yaml"]) == 0 and main(["train", "small.yaml", "--resume"]) == 0
    assert launched == [("new", "runs"), ("again", folder.path)]


def test_the_last_run_of_the_name_is_the_one_to_go_on_with(home):
    runs = home / "raypar/runs"
    job = load_job("small.yaml", [f"run_dir={runs}"])
    assert find_unfinished_run(job) == (None, "")
    stopped(runs, 5, "name=smaller")
    assert find_unfinished_run(job) == (None, ""), "another name"
    stopped(runs, 5)
    second = stopped(runs, 6)
    assert find_unfinished_run(job) == (second, "") and second.name == "small-2"
    assert find_unfinished_run(load_job("small.yaml", [f"run_dir={runs}", "steps=6"])) == (None, ""), "it has done them all"


def test_the_first_run_of_a_job_called_small_2_is_no_second_run_of_small(home):
    """It may be training: to go on with it would fail, or train it in the other's name."""
    runs = home / "raypar/runs"
    job, other = (load_job("small.yaml", [f"run_dir={runs}", f"name={name}"]) for name in ("small", "small-2"))
    mine, others = stopped(runs, 5), stopped(runs, 6, "name=small-2")
    assert (mine.name, others.name) == ("small", "small-2")
    assert find_unfinished_run(job) == (mine, "") and find_unfinished_run(other) == (others, "")
    mine.job.unlink()
    assert find_unfinished_run(job) == (None, "")


def test_a_run_of_another_job_is_left_alone_and_why_is_said(home, launched, capsys):
    stopped(home / "raypar/runs", 5, "seed=4")
    assert main(["train", "small.yaml"]) == 0
    assert [kind for kind, _ in launched] == ["new"]
    assert "was another job (seed was 4, is 0): a new run begins" in capsys.readouterr().out


def test_a_run_without_a_checkpoint_is_begun_again_and_that_is_said(home, launched, capsys):
    folder = RunFolder.create(home / "raypar/runs", "small")
    folder.job.write_text(JOB)
    assert main(["train", "small.yaml"]) == 0
    assert [kind for kind, _ in launched] == ["new"]
    assert f"run small in {folder.path} has no checkpoint: a new run begins" in capsys.readouterr().out


def test_a_driver_that_outlived_its_client_is_waited_for(home, launched, monkeypatch, capsys):
    """Ray's job server kills who has not ended after 3 s; the driver saves all the same."""
    stopped(home / "raypar/runs", 5)
    answers = [ActiveError("active", "wait"), OutlivedError("it has ended", "again"), Result({}, "runs/small", "done", 8)]
    slept: list[float] = []

    def resume_job(*given, **more):
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(resume, "resume_job", resume_job)
    monkeypatch.setattr("time.sleep", slept.append)
    assert main(["train", "small.yaml"]) == 0 and not answers and len(slept) == 2
    assert "warning: it has ended" in capsys.readouterr().out
    monkeypatch.setattr(resume, "FORMER_S", -1.0)
    answers[:] = [ActiveError("a run called 'small' is active", "end that one")]
    assert main(["train", "small.yaml"]) == 1
    assert "is active" in capsys.readouterr().err


def test_the_advice_in_a_submitted_jobs_log_is_right_for_who_reads_it(home, monkeypatch):
    stopped_run = Result({}, str(home / "raypar/runs/small"), "stopped", 5)
    assert stopped_run.resume_advice == "submit the same job again, also under another plan: it goes on from there"
    assert stopped_run.export_advice.startswith("on the head: raypar export ")
    (home / "raypar/runs/small").mkdir(parents=True)
    (home / "raypar/runs/small/job.yaml").write_text(JOB)
    ended = Result({}, stopped_run.path, "interrupted", 5, why="SIGTERM", checkpoint_path="/c/step_00000005")
    with pytest.raises(Interrupted) as told:
        raise_run_failure(ended)
    assert told.value.cure == "submit the same job again: it goes on from there"
    monkeypatch.delenv(SUBMITTED_VARIABLE)
    assert stopped_run.resume_advice.startswith("raypar resume ")
