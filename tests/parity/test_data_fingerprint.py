"""Data that gives other samples under the same names: found at a resume by a few microbatches, and said."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy
import pyarrow
import pyarrow.parquet
import pytest
import torch
from torch import nn

import raypar
from raypar.errors import RayparError
from raypar.launch import Result, launch_run
from raypar.model.module_options_digest import digest_of_module
from raypar.worker.checkpoint import checkpoint_files
from raypar.worker.checkpoint.state_key import OPTIMIZER, PARAMETER, StateKey
from raypar.worker.data import data_fingerprint
from raypar.worker.data.data_fingerprint import describe_changed_data
from raypar.worker.job_preflight import PreflightResult, preflight


class Rows(torch.utils.data.Dataset):
    """What a file of numbers holds."""

    def __init__(self, path: Path):
        self.rows = torch.from_numpy(numpy.load(path)).float()

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"x": self.rows[index, :2], "y": self.rows[index, 2:], "title": str(os.getpid())}


def model() -> nn.Module:
    return nn.Linear(2, 1)


def scaled(samples: list[Any], path: Path) -> dict[str, Any]:
    scale = float(path.read_text())
    return {name: torch.stack([one[name] for one in samples]) * scale for name in ("x", "y")}


def listed(_: Any, path: Path) -> list[int]:
    return [int(number) for number in path.read_text().split()]


def checked(data: Any, validation: Any = None, **more: Any) -> PreflightResult:
    settings = {"model": model, "loss": nn.functional.mse_loss, "steps": 4, "batch_size": 4, "microbatches": 2, **more}
    return preflight(raypar.Trainer(data=data, validation=validation, **settings).job)


def lines(then: PreflightResult, now: PreflightResult, said: tuple[str, ...] = ()) -> list[str]:
    return describe_changed_data(dict(then.fingerprint), now.fingerprint, said, 2)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    numpy.save(tmp_path / "rows.npy", numpy.random.RandomState(0).randn(40, 3))
    return tmp_path / "rows.npy"


@pytest.mark.parametrize("change", ["nothing", "touched", "other", "reordered", "last"])
def test_samples_that_are_others_under_the_same_name_are_told_with_the_step(change: str, file: Path):
    before, rows = checked((Rows, {"path": file})), numpy.load(file)
    if change == "touched":
        os.utime(file, (1, 1))
    elif change != "nothing":
        numpy.save(file, {"other": rows + 1, "reordered": rows[::-1], "last": rows}[change])
    if change == "last":  # a sample that is read in the last step of the epoch
        order = torch.randperm(40, generator=torch.Generator().manual_seed(raypar.plan.seeds.seed_of(0, "epoch", 0)))
        rows[order[-4]] += 1
        numpy.save(file, rows)
    found = lines(before, checked((Rows, {"path": file})))
    if change in ("nothing", "touched"):
        assert found == []
        return
    (line,) = found
    steps = "step 10 would read others now" if change == "last" else "steps 1, 2, 3, 4, 5, 6, 7, 8, 10 would read others now"
    assert line.startswith(
        "data gives other samples than when the checkpoint was written, though the job names the same: " + steps
    )
    assert "from step 3 on" in line and "\n  cure: put the data back as it was" in line


def test_a_collate_function_and_a_sampler_that_read_something_else_are_told(file: Path, tmp_path: Path):
    scale, ids = tmp_path / "scale.txt", tmp_path / "ids.txt"
    scale.write_text("1.0")
    ids.write_text(" ".join(map(str, range(40))))

    for key, path, other, words in (
        ("collate", scale, "2.0", "the same: steps 1, "),
        ("sampler", ids, " ".join(map(str, [*range(38), 39, 38])), "the same: their order; the run"),
    ):
        function = {"collate": scaled, "sampler": listed}[key]
        data = {"function": Rows, "args": {"path": file}, key: {"function": function, "args": {"path": path}}}
        before = checked(data)
        assert lines(before, checked(data)) == []
        path.write_text(other)
        (line,) = lines(before, checked(data))
        assert words in line


def test_what_a_resume_changes_on_purpose_and_what_is_not_known_is_not_told(file: Path):
    before = checked((Rows, {"path": file}))
    numpy.save(file, numpy.load(file) + 1)
    now = checked((Rows, {"path": file}))
    assert len(lines(before, now)) == 1
    assert lines(before, now, said=("data",)) == lines(before, now, said=("batch_size",)) == []
    for then in (None, 3, {}, {"microbatches": 3}, {"microbatches": {"x": 1}}):
        assert describe_changed_data(then, now.fingerprint, (), 2) == []


@pytest.mark.ci
def test_a_validation_set_that_has_changed_is_told_unless_it_is_another_one(file: Path, tmp_path: Path):
    rows = [{"x": [float(i), 1.0], "y": [2.0]} for i in range(40)]
    path, other = tmp_path / "held.parquet", tmp_path / "other.parquet"
    for each in (path, other):
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), each)
    before = checked((Rows, {"path": file}), {"parquet": path})
    assert lines(before, checked((Rows, {"path": file}), {"parquet": path})) == []
    rows[11]["y"] = [2.5]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    (line,) = lines(before, checked((Rows, {"path": file}), {"parquet": path}))
    assert line.startswith("validation gives other samples than when the checkpoint was written") and "best checkpoint" in line
    assert lines(before, checked((Rows, {"path": file}), {"parquet": other})) == []
    assert lines(before, checked((Rows, {"path": file}))) == []
    named = [checked((Rows, {"path": file}), {"a": {"parquet": path}, "b": {"function": Rows, "args": {"path": file}}})]
    numpy.save(file, numpy.load(file)[::-1])
    named += [checked((Rows, {"path": file}), {"a": {"parquet": path}, "b": {"function": Rows, "args": {"path": file}}})]
    assert [line.partition(" gives")[0] for line in lines(*named)] == ["data", "validation set b"]


def test_slow_samples_and_samples_that_cannot_be_read_cost_no_start(file: Path, monkeypatch: pytest.MonkeyPatch):
    class Broken(Rows):
        def __getitem__(self, index: int) -> dict[str, Any]:
            if index == broken:
                raise OSError("a bad sector")
            return super().__getitem__(index)

    order = torch.randperm(40, generator=torch.Generator().manual_seed(raypar.plan.seeds.seed_of(0, "epoch", 0)))
    broken = int(order[-4])
    found: Any = checked((Broken, {"path": file})).fingerprint["microbatches"]
    assert {*found} == {"0", *map(str, range(1, 8))}
    monkeypatch.setattr(data_fingerprint, "BUDGET_S", -1.0)
    assert checked((Rows, {"path": file})).fingerprint["microbatches"] == {}


def test_a_resumed_run_notes_the_line_and_its_checkpoints_have_the_fingerprint(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    made: list[Any] = []

    def connect(chosen: Any, make_request: Any, options: Any, tell: Any, after: Any) -> Result:
        made.append(make_request(options.make_folder(chosen), "127.0.0.1"))
        return Result({}, "", "failed", 0)

    monkeypatch.setattr(launch_run, "_connect_and_follow", connect)

    def start(resume_from: str | None = None) -> Any:
        settings: Any = {"loss": nn.functional.mse_loss, "steps": 4, "batch_size": 4, "microbatches": 2, "model": model}
        settings |= {"data": (Rows, {"path": file}), "run_dir": str(tmp_path / "runs"), "resume_from_checkpoint": resume_from}
        with pytest.raises(RayparError, match="the run failed after"):
            raypar.Trainer(**settings).fit()
        return made[-1]

    with_nothing = start()
    assert with_nothing.warnings == ()
    begun = checkpoint_files.create_checkpoint(tmp_path / "kept", 2)
    kinds = (PARAMETER, *(StateKey(OPTIMIZER, name) for name in ("exp_avg", "exp_avg_sq")))
    tensors = {(name, kind): torch.zeros(shape) for name, shape in (("weight", (1, 2)), ("bias", (1,))) for kind in kinds}
    record = checkpoint_files.write_shard(begun, "a.safetensors", tensors)
    saved = checkpoint_files.commit_checkpoint(begun, [record], steps_done=2, contract=with_nothing.contract)
    assert start(str(saved)).warnings == ()
    numpy.save(file, numpy.load(file) + 1)
    (line,) = start(str(saved)).warnings
    assert line.startswith("data gives other samples than when the checkpoint was written") and "from step 3 on" in line


class Configured(nn.Module):
    """A model whose options lie in a file, as those of a folder of transformers."""

    def __init__(self, path: Path):
        super().__init__()
        self.eps = float(path.read_text())
        self.norm, self.head = nn.LayerNorm(2, eps=self.eps), nn.Linear(2, 1)

    def forward(self, x: torch.Tensor) -> Any:
        return self.head(self.norm(x))


@pytest.mark.ci
def test_a_model_of_the_same_names_and_shapes_with_other_options_is_told(file: Path, tmp_path: Path):
    config = tmp_path / "config.txt"
    found = []
    for text in ("1e-5", "0.00001", "1e-3"):
        config.write_text(text)
        found.append(checked((Rows, {"path": file}), model=(Configured, {"path": config})))
    assert lines(found[0], found[1]) == []
    (line,) = lines(found[0], found[2])
    assert line.startswith("the model function makes a module of other classes or options") and "from step 3 on" in line
    assert lines(found[0], found[2], said=("model",)) == []


def test_the_configuration_of_a_folder_counts_and_its_place_does_not(tmp_path: Path):
    transformers = pytest.importorskip("transformers")
    digests = []
    for place, heads in (("a", 2), ("b", 2), ("c", 4)):
        config = transformers.GPT2Config(vocab_size=8, n_positions=8, n_embd=8, n_layer=1, n_head=heads)
        config.save_pretrained(tmp_path / place)
        with torch.device("meta"):
            made = transformers.GPT2LMHeadModel(transformers.AutoConfig.from_pretrained(tmp_path / place))
        digests.append(digest_of_module(made))
    assert digests[0] == digests[1] != digests[2]


class WithSettings(nn.Linear):
    """Its settings have a `to_dict` of their own kind, as those of no library have."""

    class Settings:
        def to_dict(self, indent: int) -> dict[str, int]:
            return {"indent": indent}

    def __init__(self) -> None:
        super().__init__(2, 1)
        self.settings = self.Settings()


def test_settings_that_are_no_configuration_of_transformers_end_no_check():
    assert digest_of_module(WithSettings()) == digest_of_module(WithSettings()) != ""
