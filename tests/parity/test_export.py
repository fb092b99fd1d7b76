"""`raypar export`: the whole model as one file, from the last checkpoint that is whole."""

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import checkpoint_folders as checkpoint_files
from safetensors.torch import load_file

from raypar.cli import main
from raypar.storage.run_folder import RunFolder
from raypar.worker.checkpoint.checkpoint_files import PARAMETER, optimizer_key
from raypar.worker.norm_and_weights_hash import weights_hash


def weights(done: int) -> dict[str, torch.Tensor]:
    return {"b": torch.full((3,), float(done)), "a.w": torch.arange(6.0).view(2, 3) + done}


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    """A run with checkpoints after 5 and 10 steps, two files each."""
    folder = RunFolder.create(tmp_path, "mine")
    folder.job.write_text("name: mine\n")
    for done in (5, 10):
        save(folder, done)
    return folder


def save(folder: RunFolder, done: int) -> None:
    aside = checkpoint_files.create_checkpoint(folder.checkpoints, done)
    records = [
        checkpoint_files.write_shard(aside, f"{i}.safetensors", {(name, PARAMETER): w, (name, optimizer_key("exp_avg")): w + 1})
        for i, (name, w) in enumerate(weights(done).items())
    ]
    checkpoint_files.commit_checkpoint(aside, records, steps_done=done, contract={})


def test_one_file_holds_all_parameters_and_nothing_else(run: RunFolder, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    for suffix, read in ((".safetensors", load_file), (".pt", torch.load)):
        out = tmp_path / f"model{suffix}"
        assert main(["export", "mine", "--run-dir", str(tmp_path), "--out", str(out)]) == 0
        found = read(out)
        assert set(found) == {"a.w", "b"} and all(torch.equal(found[k], v) for k, v in weights(10).items())
        assert capsys.readouterr().out.splitlines()[-1] == f"weights sha256 {weights_hash(weights(10))}"
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize("run_is", ["a path", "a checkpoint", "a name with a step"])
def test_a_run_may_be_a_path_and_a_checkpoint_may_be_chosen(run_is: str, run: RunFolder, tmp_path: Path):
    out = tmp_path / "model.safetensors"
    arguments = {
        "a path": [str(run.path), "--step", "5"],
        "a checkpoint": [str(run.checkpoints / "step_00000005")],
        "a name with a step": ["mine", "--run-dir", str(tmp_path), "--step", "5"],
    }[run_is]
    assert main(["export", *arguments, "--out", str(out)]) == 0
    assert torch.equal(load_file(out)["b"], weights(5)["b"])


def test_of_one_checkpoint_no_step_is_chosen(run: RunFolder, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (name, *_) = run.list_checkpoints()
    given = str(Path(run.checkpoint_store_location) / name)
    assert main(["export", given, "--step", "1", "--out", str(tmp_path / "m.pt")]) != 0
    assert "is one checkpoint: no other one is chosen\n  cure: leave the step out" in capsys.readouterr().err
    assert not (tmp_path / "m.pt").exists()


@pytest.mark.parametrize("moment", ["while it is verified", "before its hash"])
def test_a_checkpoint_that_a_run_removes_while_it_is_exported_is_replaced_by_the_next_one(
    moment: str, run: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """The run keeps one checkpoint."""
    name = {"while it is verified": "load_manifest", "before its hash": "checkpoint_weights_hash"}[moment]
    done, call = [10], getattr(checkpoint_files, name)

    def called(checkpoint: Any) -> Any:
        if done[-1] == 10 and not isinstance(checkpoint, Path):
            done.append(15)
            save(run, 15)
            checkpoint_files.remove_old_checkpoints(run.checkpoints, 1)
        return call(checkpoint)

    monkeypatch.setattr("raypar.worker.checkpoint.checkpoint_files." + name, called)
    code = main(["export", str(run.path), "--out", str(tmp_path / "m.safetensors")])
    said, err = capsys.readouterr()
    assert (code, err) == (0, ""), said
    assert "after 15 steps" in said and f"weights sha256 {weights_hash(weights(15))}" in said
    assert torch.equal(load_file(tmp_path / "m.safetensors")["b"], weights(15)["b"])
    assert [path.name for path in run.checkpoints.iterdir()] == ["step_00000015"]


def test_an_export_that_is_slower_than_the_run_saves_says_so(
    run: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    steps, call = iter(range(15, 500)), checkpoint_files.checkpoint_weights_hash

    def called(checkpoint: Any) -> Any:
        save(run, next(steps))
        checkpoint_files.remove_old_checkpoints(run.checkpoints, 1)
        return call(checkpoint)

    monkeypatch.setattr("raypar.worker.checkpoint.checkpoint_files.checkpoint_weights_hash", called)
    assert main(["export", str(run.path), "--out", str(tmp_path / "m.safetensors")]) == 2
    err = capsys.readouterr().err
    assert f"run {run.name} trains, and has removed the checkpoint during each of 10 exports: " in err
    assert "cure: export when it has ended" in err and next(steps) == 25


def test_a_damaged_checkpoint_is_skipped_and_that_is_said(run: RunFolder, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (run.checkpoints / "step_00000010" / "1.safetensors").unlink()
    assert main(["export", str(run.path), "--out", str(tmp_path / "m.pt")]) == 0
    said = capsys.readouterr()
    assert "warning: skipped step_00000010" in said.err and "after 5 steps" in said.out


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["mine", "--out", "model.txt"], "name a .safetensors or .pt file"),
        (["mine", "--out", "nowhere/model.pt"], "in a folder that exists"),
        (["yours", "--out", "model.pt"], "no run 'yours'"),
        (["mine", "--step", "7", "--out", "model.pt"], "it has: step_00000005, step_00000010"),
    ],
)
def test_bad_arguments_exit_with_2(
    arguments: list[str],
    said: str,
    run: RunFolder,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.chdir(tmp_path)
    assert main(["export", *arguments, "--run-dir", "."]) == 2
    assert said in capsys.readouterr().err and not list(tmp_path.glob("*.pt"))
