"""Runs on S3 (moto's server on this machine): read, resumed and exported by URI, and with kills at awkward moments."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.moto_s3 import ENVIRONMENT, FakeS3, fake_s3
from helpers.run_commands import Command
from helpers.streamed_runs import StreamedRun, in_one_process, journal_of
from helpers.tiny_job import write_job
from helpers.trainee import Undisturbed, as_soon_as

from raypar import Trainer
from raypar.actors.ray_connection import connect_ray
from raypar.cli import main
from raypar.errors import ConfigError, LeaseLostError
from raypar.job.read_job import load_job
from raypar.launch import train_job_in_new_folder
from raypar.launch.resume import find_checkpoint
from raypar.launch.run_on_storage import resumed_run_on_storage
from raypar.record.events import DriverLoss, Event, SavedCheckpoint
from raypar.storage.checkpoint_store import open_checkpoint_store
from raypar.storage.run_folder import RunFolder
from raypar.storage.run_lease import LEASE_S, Lease
from raypar.storage.s3_lease_store import s3_lease_store
from raypar.storage.storage_uri import parse_storage_uri
from raypar.worker.checkpoint import checkpoint_files
from raypar.worker.checkpoint.checkpoint_files import PARAMETER

pytestmark = pytest.mark.chaos
TESTS = Path(__file__).parents[1]
ONE = ["plan.stages=1", "plan.replicas=1"]


@pytest.fixture
def s3() -> Iterator[FakeS3]:
    with fake_s3() as server:
        yield server


@pytest.fixture
def own_ray(s3: FakeS3) -> Iterator[None]:
    """One cluster in this process, whose workers have S3's credentials from its environment."""
    with connect_ray(None, 4, TESTS):
        yield


@pytest.fixture
def ray_without_credentials(s3: FakeS3, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """One cluster in this process; neither this process nor the cluster's has S3's credentials in its environment."""
    for name in ENVIRONMENT:
        monkeypatch.delenv(name)
    with connect_ray(None, 4, TESTS):
        yield


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, s3: FakeS3) -> Path:
    monkeypatch.chdir(TESTS)
    path = tmp_path / "on_s3.yaml"
    path.write_text(write_job(tmp_path).read_text().replace(str(tmp_path / "runs"), f"'{s3.at('runs')}'"))
    return path


def hash_in(text: str) -> str:
    return re.findall(r"weights sha256 ([0-9a-f]{64})", text)[-1]


def lines_at(uri: str, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
    with RunFolder.open_for_reading(uri) as folder:
        return list(folder.read_lines(folder.path / name))


def no_secret_in(s3: FakeS3, *texts: str) -> None:
    for secret in (ENVIRONMENT["AWS_ACCESS_KEY_ID"], ENVIRONMENT["AWS_SECRET_ACCESS_KEY"]):
        assert not any(secret in text for text in texts)
        assert not [key for key in s3.all_keys() if secret.encode() in s3.content(key)]


class Pauses:
    """Holds S3's answer to the first write of a key that matches, until `release`; `met` is set then."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, pattern: str) -> None:
        from moto.s3.models import S3Backend

        self.met, self.go = threading.Event(), threading.Event()
        for name in ("put_object", "create_multipart_upload"):
            before = getattr(S3Backend, name)

            def held(backend: Any, bucket: str, key: str, *rest: Any, before: Any = before, **more: Any) -> Any:
                if re.search(pattern, key) and not self.go.is_set():
                    self.met.set()
                    self.go.wait(120)
                    raise ConnectionError("the writer was killed meanwhile")
                return before(backend, bucket, key, *rest, **more)

            monkeypatch.setattr(S3Backend, name, held)


def test_a_run_on_s3_has_the_bits_of_one_in_a_folder_and_is_read_resumed_and_exported_by_its_uri(
    s3: FakeS3, own_ray: None, job: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    uri, expected = s3.at("runs/tiny"), Undisturbed.of(tmp_path, "steps=12")
    assert main(["train", str(job), "--stop-at-step", "6"]) == 0
    first = capfd.readouterr()
    assert f"its folder is {uri}" in first.out and f"raypar resume '{uri}'" in first.out
    keys = s3.all_keys("runs/tiny/")
    names = {key.removeprefix("runs/tiny/").partition("/")[0] for key in keys}
    assert names == {"job.yaml", "plan.json", "members.json", "cluster.json", "metrics.jsonl", "events.jsonl", "checkpoints",
                     "lease.json", "totals.json", "trace.json", "swimlane.svg"}  # fmt: skip
    assert json.loads(s3.content("runs/tiny/lease.json"))["released"] is True
    assert main(["status", uri]) == 0
    assert main(["top", uri, "--once"]) == 0
    said = capfd.readouterr().out
    assert "6 of 12" in said and uri in said
    assert main(["resume", uri, "--set", "plan.stages=1", "--set", "plan.replicas=1"]) == 0
    second = capfd.readouterr()
    assert hash_in(second.out) == expected.weights_sha256
    assert [(m["step"], m["loss"]) for m in lines_at(uri) if "loss" in m] == expected.losses
    assert sorted({key.split("/")[3] for key in s3.all_keys("runs/tiny/checkpoints/")}) == ["step_00000008", "step_00000012"]
    assert {key.split("/")[-1].split(".")[-1] for key in s3.all_keys("runs/tiny/checkpoints/")} == {"json", "safetensors"}

    assert main(["runs", "--run-dir", s3.at("runs"), "--json"]) == 0
    (row,) = json.loads(capfd.readouterr().out)
    assert (row["name"], row["state"], row["step"], row["path"]) == ("tiny", "done", 12, uri)
    assert main(["logs", uri, "-f"]) == 0 and "step 12" in capfd.readouterr().out.lower()
    assert main(["report", uri, "--out", str(tmp_path / "r.html")]) == 0
    assert main(["export", uri, "--out", s3.at("out/model.safetensors")]) == 0
    assert main(["export", uri, "--out", str(tmp_path / "here.safetensors")]) == 0
    assert s3.content("out/model.safetensors") == (tmp_path / "here.safetensors").read_bytes()
    out = capfd.readouterr()
    assert expected.weights_sha256 in out.out
    no_secret_in(s3, first.out, first.err, second.out, second.err, said, out.out, (tmp_path / "r.html").read_text())
    assert not list(tmp_path.glob("raypar-*"))


def test_a_stream_is_resumed_on_s3_with_the_journal_and_the_cursors_that_lie_there(
    s3: FakeS3, own_ray: None, tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    source = "IterableDataset with state_dict"
    run = StreamedRun(tmp_path, source, "plan.stages=1", "plan.replicas=2", "checkpoint.every=10", f"run_dir={s3.at('runs')}")
    train_job_in_new_folder(load_job(run.path, run.words), lambda event: None, stop_at_step=20)
    uri, key = s3.at("runs/tiny"), "runs/tiny/samples.bin/00000000.bin"
    assert {key, "runs/tiny/cursors.json"} <= set(s3.all_keys("runs/tiny/"))
    assert len(json.loads(s3.content("runs/tiny/cursors.json"))["0"][0]) == 4

    kept = s3.content(key)
    at = 32 + 19 * 64 + 8  # of the last step that is done, microbatch 1
    s3.client.put_object(Bucket="bucket", Key=key, Body=kept[:at] + bytes([kept[at] ^ 1]) + kept[at + 1 :])
    assert main(["resume", uri]) != 0
    assert "step 20, microbatch 1: stream 1 of 4 gave other samples" in capfd.readouterr().err
    s3.client.put_object(Bucket="bucket", Key=key, Body=kept)
    assert main(["resume", uri, "--set", "plan.stages=2", "--set", "plan.replicas=1"]) == 0
    want = in_one_process(tmp_path, source)
    assert hash_in(capfd.readouterr().out) == want.weights_sha256
    assert journal_of(s3.content(key)) == want.journal


def test_ray_trains_storage_arguments_and_checkpoints_work_on_s3(
    s3: FakeS3, ray_without_credentials: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """`storage_filesystem` has credentials of its own: none are in the environment of this process or of its workers."""
    from pyarrow.fs import S3FileSystem
    from ray.train import RunConfig

    monkeypatch.chdir(TESTS)
    filesystem = S3FileSystem(
        endpoint_override=f"127.0.0.1:{s3.port}",
        scheme="http",
        access_key=ENVIRONMENT["AWS_ACCESS_KEY_ID"],
        secret_key=ENVIRONMENT["AWS_SECRET_ACCESS_KEY"],
        region="us-east-1",
    )
    base = load_job(write_job(tmp_path), ONE)
    given = {"model": "helpers.tiny_job:model", "loss": "helpers.tiny_job:loss", "data": "helpers.tiny_job:data"}
    given |= {"batch_size": 8, "microbatches": 4, "seed": 3, "clip_norm": 1.0, "optimizer": ("torch.optim:AdamW", {"lr": 1e-2})}
    config = RunConfig(name="theirs", storage_path="bucket/exp", storage_filesystem=filesystem)
    result = Trainer(**given, steps=4, run_config=config).fit(verbose=False)
    assert [key for key in s3.all_keys("exp/theirs/checkpoints/step_00000004/") if key.endswith("manifest.json")]
    there = result.checkpoint.to_directory(str(tmp_path / "copy"))
    assert checkpoint_files.checkpoint_weights_hash(there) == result.weights_sha256, "a copy is a checkpoint too"
    assert result.filesystem.equals(filesystem)
    for start in (result.checkpoint, there):
        more = Trainer(**given, steps=8, run_config=config, resume_from_checkpoint=start).fit(verbose=False)
        assert more.path.endswith(("theirs-2", "theirs-3")) and more.weights_sha256 is not None
    assert base.steps == 12
    no_secret_in(s3, str(result))


@pytest.mark.parametrize("at", [r"step_00000008/worker_\d+", r"step_00000008/manifest\.json"])
def test_an_uploader_killed_in_the_middle_of_a_checkpoint_leaves_the_step_before_and_the_run_goes_on_from_it(
    at: str, s3: FakeS3, job: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    expected, uri = Undisturbed.of(tmp_path, "steps=12"), s3.at("runs/tiny")
    pauses = Pauses(monkeypatch, at)
    command = Command(tmp_path, "train", str(job), "--set", "plan.replicas=1")
    try:
        command.wait_for(pauses.met.is_set, "a write of the checkpoint after 8 steps")
    finally:
        command.kill_all()
        pauses.go.set()
    found, skipped = checkpoint_files.latest_usable_checkpoint(s3.at("runs/tiny/checkpoints"))
    assert found is not None and (found.name, skipped) == ("step_00000004", [])
    refused = Command(tmp_path, "resume", uri)
    refused.wait(240)
    assert "run tiny is under way: process" in refused.text() or refused.process.returncode == 0, refused.text()
    if refused.process.returncode:
        time.sleep(LEASE_S)
        again = Command(tmp_path, "resume", uri)
        again.wait(240)
        assert again.process.returncode == 0, again.text()
        refused = again
    assert "from step_00000004: 4 steps are done" in refused.text()
    assert hash_in(refused.text()) == expected.weights_sha256
    left = s3.all_keys("runs/tiny/checkpoints/step_00000008/")
    listed = json.loads(s3.content("runs/tiny/checkpoints/step_00000008/manifest.json"))["files"]
    assert {key.split("/")[-1] for key in left} == {"manifest.json", *listed}, "nothing of the killed attempt is left"
    no_secret_in(s3, command.text(), refused.text())


@pytest.mark.parametrize("at", [r"step_00000008/manifest\.json", r"metrics\.jsonl/"])
def test_a_driver_killed_while_it_uploads_is_followed_by_one_that_goes_on_and_no_line_is_lost(
    at: str, s3: FakeS3, own_ray: None, job: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    expected, pauses = Undisturbed.of(tmp_path, "steps=40"), Pauses(monkeypatch, at)
    words = ["plan.stages=1", "plan.replicas=2", "steps=40", "checkpoint.every=4", "model.args.sleep_s=0.05", "elastic=true"]
    events: list[Event] = []

    def kill_driver(there: bool) -> None:
        facts = next(tmp_path.glob("raypar-*/tiny/members.json")).read_text()
        os.kill(json.loads(facts)["driver_pid"], signal.SIGKILL)
        pauses.go.set()

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with as_soon_as(pauses.met.is_set, kill_driver, limit_s=120):
        result = train_job_in_new_folder(load_job(job, words), events.append)
    assert (result.end, result.weights_sha256) == ("done", expected.weights_sha256), result.why
    assert [event for event in events if isinstance(event, DriverLoss)], "another driver has taken over"
    lines = lines_at(s3.at("runs/tiny"))
    assert [(line["step"], line["loss"]) for line in lines if "loss" in line] == expected.losses
    assert [event["kind"] for event in lines_at(s3.at("runs/tiny"), "events.jsonl")][-1] == "end"
    for name in ("step_00000036", "step_00000040"):
        listed = json.loads(s3.content(f"runs/tiny/checkpoints/{name}/manifest.json"))["files"]
        assert {key.split("/")[-1] for key in s3.all_keys(f"runs/tiny/checkpoints/{name}/")} == {"manifest.json", *listed}
    assert not list(tmp_path.glob("raypar-*"))


def test_a_second_owner_is_refused_while_the_first_trains_and_a_new_run_gets_another_name(
    s3: FakeS3, own_ray: None, job: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    uri = s3.at("runs/tiny")
    first = Command(tmp_path, "train", str(job), *["--set", "plan.replicas=1", "--set", "plan.stages=1", "--set", "steps=4000"])
    try:
        first.wait_for(lambda: "runs/tiny/checkpoints/step_00000004/manifest.json" in s3.all_keys(), "a checkpoint")
        assert main(["resume", uri]) == 1
        said = capfd.readouterr().err
        assert re.search(r"run tiny is under way: process \d+ of \S+ trains in s3://bucket/runs/tiny", said) and "cure:" in said
        assert main(["train", str(job), *(word for text in [*ONE, "steps=2"] for word in ("--set", text))]) == 0
        assert s3.all_keys("runs/tiny-2/checkpoints/step_00000002/")
        os.kill(first.process.pid, signal.SIGINT)
        first.wait(120)
        assert first.process.returncode == 130, first.text()
    finally:
        if first.process.poll() is None:
            first.kill_all()
    assert json.loads(s3.content("runs/tiny/lease.json"))["released"] is True


def test_stop_reaches_a_run_on_s3_wherever_it_trains(s3: FakeS3, job: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    uri = s3.at("runs/tiny")
    assert main(["stop", uri]) == 2 and "no run lies at" in capfd.readouterr().err
    words = [word for text in [*ONE, "steps=4000", "model.args.sleep_s=0.02"] for word in ("--set", text)]
    first = Command(tmp_path, "train", str(job), *words)
    try:
        first.wait_for(lambda: "runs/tiny/checkpoints/step_00000004/manifest.json" in s3.all_keys(), "a checkpoint")
        assert main(["stop", uri, "--json"]) == 0
        told = capfd.readouterr()
        facts = json.loads(told.out)
        assert first.wait(60) == 130, first.text()
    finally:
        if first.process.poll() is None:
            first.kill_all()
    assert "asked process" in told.err and "raypar stop" in first.text()
    assert (facts["state"], facts["stopped"], facts["step"] >= 4) == ("interrupted", True, True)
    assert facts["checkpoint"] == f"step_{facts['step']:08d}", "its state was saved"
    assert main(["stop", uri]) == 0
    said = capfd.readouterr().out
    assert f"nothing trains run tiny: it is interrupted after {facts['step']} of 4000 steps" in said
    assert f"raypar resume '{uri}' goes on from {facts['checkpoint']}" in said
    no_secret_in(s3, told.out, told.err, said, first.text())


def test_a_thousand_steps_with_metrics_leave_some_tens_of_objects(
    s3: FakeS3, own_ray: None, job: Path, capfd: pytest.CaptureFixture[str]
):
    words = [*ONE, "steps=1000", "checkpoint.every=50", "validation.every=10"]
    assert main(["train", str(job), *(word for text in words for word in ("--set", text))]) == 0
    keys = s3.all_keys("runs/tiny/")
    by_kind = {
        kind: len([key for key in keys if key.startswith(f"runs/tiny/{kind}")]) for kind in ("metrics", "events", "check")
    }
    print(f"objects after 1,000 steps: {len(keys)}, {by_kind}")
    assert len(keys) <= 20 and by_kind["metrics"] <= 3 and by_kind["check"] == 4
    lines = lines_at(s3.at("runs/tiny"))
    assert [line["step"] for line in lines if "loss" in line] == list(range(1, 1001))
    assert len([line for line in lines if "validation_loss" in line]) == 100


def test_a_storage_that_does_not_answer_costs_one_line_and_no_metrics(
    s3: FakeS3, own_ray: None, job: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    from moto.s3.exceptions import InvalidRequest
    from moto.s3.models import S3Backend

    before, refused_s = S3Backend.put_object, list[float]()

    def put(backend: Any, bucket: str, key: str, *rest: Any, **more: Any) -> Any:
        if "/metrics.jsonl/" in key and time.monotonic() < (refused_s or [time.monotonic()])[0] + 30:
            refused_s.append(time.monotonic())
            raise InvalidRequest("PutObject")  # one that the client does not try again by itself
        return before(backend, bucket, key, *rest, **more)

    monkeypatch.setattr(S3Backend, "put_object", put)
    words = [*ONE, "steps=600", "checkpoint.every=0", "validation.every=0", "model.args.sleep_s=0.02"]
    assert main(["train", str(job), *(word for text in words for word in ("--set", text))]) == 0
    out = capfd.readouterr()
    assert refused_s and out.out.count("does not take the run's files") == 1, out.out
    assert out.out.count("takes the run's files again: nothing is lost") == 1
    assert [line["step"] for line in lines_at(s3.at("runs/tiny")) if "loss" in line] == list(range(1, 601))


def test_a_run_whose_lease_was_taken_ends_with_one_error_and_writes_nothing_more(
    s3: FakeS3, own_ray: None, job: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("raypar.storage.held_lease.RENEW_S", 1.0)
    written: dict[str, Any] = {}

    def tell(event: Event) -> None:
        if isinstance(event, SavedCheckpoint) and not written:
            s3.client.put_object(
                Bucket="bucket", Key="runs/tiny/lease.json", Body=Lease("other", "process 1 of elsewhere").to_bytes()
            )
            written["lease"] = s3.content("runs/tiny/lease.json")

    result = train_job_in_new_folder(
        load_job(job, [*ONE, "steps=100000", "checkpoint.every=4", "model.args.sleep_s=0.02"]), tell
    )
    assert result.end == "failed" and isinstance(result.error, LeaseLostError), result.error
    assert "process 1 of elsewhere has it now" in str(result.error)
    before = {key: s3.client.head_object(Bucket="bucket", Key=key)["ETag"] for key in s3.all_keys()}
    time.sleep(5)
    assert {key: s3.client.head_object(Bucket="bucket", Key=key)["ETag"] for key in s3.all_keys()} == before
    assert s3.content("runs/tiny/lease.json") == written["lease"]


def test_a_resumption_that_fails_before_it_begins_changes_nothing_but_its_lease(s3: FakeS3):
    objects = {"job.yaml": b"name: x\nsteps: 9\n", "metrics.jsonl/000000000001.jsonl": b'{"step": 1}\n' * 50}
    for name, content in objects.items():
        s3.client.put_object(Bucket="bucket", Key=f"runs/x/{name}", Body=content)
    with RunFolder.open_for_reading(s3.at("runs/x")) as folder, pytest.raises(KeyError), resumed_run_on_storage(folder, print):
        folder.metrics.unlink()
        folder.job.write_text("another")
        raise KeyError
    assert {key.removeprefix("runs/x/") for key in s3.all_keys("runs/x/")} == {*objects, "lease.json"}
    assert all(s3.content(f"runs/x/{name}") == content for name, content in objects.items())


def test_a_lease_on_s3_is_replaced_only_by_who_names_its_version_and_has_the_age_that_s3_says(s3: FakeS3):
    store = s3_lease_store(parse_storage_uri(s3.at("runs/x")))
    mine = Lease("one", "me")
    assert store is not None and store.read() is None and store.put(mine, '"0123"') is None
    first = store.put(mine, None)
    assert first is not None and store.put(Lease("two", "you"), None) is None and store.honours_conditions(mine)
    second = store.put(replace(mine, renewal=1), first)
    assert second is not None and store.put(Lease("two", "you"), first) is None
    time.sleep(2.1)
    found = store.read()
    assert found is not None and found.lease == replace(mine, renewal=1) and 1 <= found.age_s <= 30
    with ThreadPoolExecutor(4) as pool:
        wrote = [*pool.map(lambda n: store.put(Lease(f"taker {n}", "them"), second), range(4))]
    assert len([version for version in wrote if version is not None]) == 1


def test_hostile_names_and_manifests_are_as_harmless_as_on_disk(s3: FakeS3, capfd: pytest.CaptureFixture[str], tmp_path: Path):
    store = open_checkpoint_store(s3.at("runs/x/checkpoints"))
    begun = checkpoint_files.create_checkpoint(store, 4)
    record = checkpoint_files.write_shard(begun, "a.safetensors", {("w", PARAMETER): torch.ones(3)})
    good = checkpoint_files.commit_checkpoint(begun, [record], steps_done=4, contract={})
    whole = json.loads(s3.content("runs/x/checkpoints/step_00000004/manifest.json"))
    (name,) = whole["files"]

    def altered(**changes: Any) -> bytes:
        from raypar.worker.checkpoint.manifest import manifest_checksum

        body = {**{key: value for key, value in whole.items() if key != "sha256"}, **changes}
        return json.dumps({**body, "sha256": manifest_checksum(body)}).encode()

    at = "runs/x/checkpoints/"
    objects = {
        f"{at}step_00000005/manifest.json": b"{",
        f"{at}step_00000006/manifest.json": b"[" * 100_000,
        f"{at}step_00000007/manifest.json": altered(steps_done=7, files={"../step_00000004/" + name: whole["files"][name]}),
        f"{at}step_00000008/manifest.json": altered(steps_done=8),  # its file is missing
        f"{at}step_00000009/manifest.json/inside": b"",
        f"{at}step_00000010": b"no folder",
        f"{at}step_00000011/": b"",
        f"{at}../evil": b"x",
        f"{at}step_00000012@0123456789ab/manifest.json": b"{}",
        f"{at}a\tb/manifest.json": b"{}",
        f"{at}step_99999999999999999999999/manifest.json": b"{}",
        "runs/x/metrics.jsonl/000000000001.jsonl": b'{"step": 1, "loss": 1.0}\n{"st',
        "runs/x/metrics.jsonl/../../000000000001.jsonl": b"x",
        "runs/x/members.json": b"[" * 1000,
        "runs/x/job.yaml": b"name: x\nsteps: 9\n",
    }
    for key, content in objects.items():
        s3.client.put_object(Bucket="bucket", Key=key, Body=content)
    found, skipped = checkpoint_files.latest_usable_checkpoint(store)
    assert found == good and find_checkpoint(s3.at("runs/x"), lambda event: None, "runs") == good
    for step in (5, 6, 7, 8):
        assert any(line.startswith(f"skipped step_{step:08d}") for line in skipped), skipped
    assert not any("step_00000009" in line or "00000010" in line or "evil" in line for line in skipped)
    assert main(["status", s3.at("runs/x")]) in (0, 2)
    assert main(["export", s3.at("runs/x"), "--out", str(tmp_path / "m.safetensors")]) == 0
    checkpoint_files.remove_old_checkpoints(store, 9)
    assert s3.content(f"{at}step_00000004/{name}") and s3.all_keys("runs/x/job.yaml")


def test_what_cannot_be_written_is_one_error_before_anything_starts(
    s3: FakeS3, job: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    import raypar.storage.filesystems as filesystems

    query = s3.uri.partition("?")[2]
    began_s = time.monotonic()
    for run_dir, what in [
        (f"s3://no-such-bucket/runs?{query}", "cannot write to s3://no-such-bucket/runs"),
        ("s3://bucket/runs?endpoint_override=127.0.0.1:9&scheme=http", "cannot write to s3://bucket/runs"),
        ("s3://key:secret@bucket/runs", "holds credentials"),
        ("ftp://bucket/runs", "does not read or write ftp storage"),
    ]:
        assert main(["train", str(job), "--set", f"run_dir={run_dir}"]) == 2
        said = capfd.readouterr()
        assert what in said.err and said.err.count("cure:") == 1 and "Traceback" not in said.err, said.err
    assert time.monotonic() - began_s < 4 * filesystems.WRITE_CHECK_S
    monkeypatch.setitem(sys.modules, "boto3", None)
    with pytest.raises(ConfigError, match="needs boto3, which is not installed") as caught:
        train_job_in_new_folder(load_job(job), lambda event: None)
    assert "raypar[s3]" in caught.value.cure
    assert s3.all_keys("runs/") == []
