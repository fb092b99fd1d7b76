"""Runs on Google Cloud Storage (an emulator on this machine), by URI: trained, read, resumed, exported, killed, kept from each
other on one cluster."""

import re
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.fake_gcs import FakeGcs, fake_gcs
from helpers.run_commands import Command
from helpers.tiny_job import write_job
from helpers.trainee import Undisturbed

from raypar.cli import main
from raypar.storage.run_folder import RunFolder

pytestmark = pytest.mark.chaos
TESTS = Path(__file__).parents[1]


@pytest.fixture
def gcs(tmp_path: Path) -> Iterator[FakeGcs]:
    with fake_gcs(tmp_path) as server:
        yield server


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gcs: FakeGcs) -> Path:
    monkeypatch.chdir(TESTS)
    path = tmp_path / "on_gcs.yaml"
    path.write_text(write_job(tmp_path).read_text().replace(str(tmp_path / "runs"), f"'{gcs.at('runs')}'"))
    return path


def hash_in(text: str) -> str:
    return re.findall(r"weights sha256 ([0-9a-f]{64})", text)[-1]


def test_a_run_on_gcs_has_the_bits_of_one_in_a_folder_and_is_read_resumed_and_exported_by_its_uri(
    gcs: FakeGcs, job: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    uri, expected = gcs.at("runs/tiny"), Undisturbed.of(tmp_path, "steps=12")
    assert main(["train", str(job), "--stop-at-step", "6"]) == 0
    first = capfd.readouterr().out
    assert f"its folder is {uri}" in first and "only runs of this Ray cluster are kept from training in" in first
    names = {key.removeprefix("runs/tiny/").partition("/")[0] for key in gcs.all_keys("runs/tiny/")}
    assert names == {"job.yaml", "plan.json", "members.json", "cluster.json", "metrics.jsonl", "events.jsonl", "checkpoints",
                     "totals.json", "trace.json", "swimlane.svg"}  # fmt: skip
    assert main(["status", uri]) == 0 and "6 of 12" in capfd.readouterr().out
    assert main(["resume", uri, "--set", "plan.stages=1", "--set", "plan.replicas=1"]) == 0
    assert hash_in(capfd.readouterr().out) == expected.weights_sha256
    with RunFolder.open_for_reading(uri) as folder:
        assert [(m["step"], m["loss"]) for m in folder.read_lines(folder.metrics) if "loss" in m] == expected.losses
    steps = sorted({key.split("/")[3] for key in gcs.all_keys("runs/tiny/checkpoints/")})
    assert steps == ["step_00000008", "step_00000012"], "old ones were removed"
    for words in (["runs", gcs.at("runs")], ["logs", uri, "-f"], ["top", uri, "--once"]):
        assert main(words) == 0 and "tiny" in capfd.readouterr().out + uri
    assert main(["stop", uri]) == 2 and "which only S3 has" in capfd.readouterr().err
    assert main(["export", uri, "--out", gcs.at("out/model.safetensors")]) == 0
    assert main(["export", uri, "--out", str(tmp_path / "here.safetensors")]) == 0
    assert gcs.content("out/model.safetensors") == (tmp_path / "here.safetensors").read_bytes()
    assert not list(tmp_path.glob("raypar-*"))


@pytest.mark.parametrize("at", [r"step_00000008%2Fworker_\d+|step_00000008/worker_\d+", r"step_00000008(%2F|/)manifest"])
def test_an_uploader_killed_in_the_middle_of_a_checkpoint_leaves_the_step_before(
    at: str, gcs: FakeGcs, job: Path, tmp_path: Path
):
    uri, expected = gcs.at("runs/tiny"), Undisturbed.of(tmp_path, "steps=12")
    (tmp_path / "hold").write_text(at)
    command = Command(tmp_path, "train", str(job))
    command.wait_for((tmp_path / "held").exists, "a write of step 8")
    command.kill_all()
    (tmp_path / "hold").unlink()
    again = Command(tmp_path, "resume", uri)
    again.wait(240)
    assert again.process.returncode == 0, again.text()
    assert "from step_00000004: 4 steps are done" in again.text()
    assert hash_in(again.text()) == expected.weights_sha256
    left = {key.split("/")[-1] for key in gcs.all_keys("runs/tiny/checkpoints/step_00000008/")}
    with RunFolder.open_for_reading(uri):
        manifest = gcs.content("runs/tiny/checkpoints/step_00000008/manifest.json").decode()
    assert left == {"manifest.json", *re.findall(r"worker_[\w.]+safetensors", manifest)}, (
        "nothing of the killed attempt is left"
    )
