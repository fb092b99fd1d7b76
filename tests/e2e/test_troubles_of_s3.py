"""What goes wrong with a storage, on moto's S3 without Ray: it throttles, refuses to delete, has long lists and odd names."""

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.moto_s3 import ENVIRONMENT, FakeS3, fake_s3

from raypar.cli import main
from raypar.errors import CheckpointError, ClusterError, ConfigError
from raypar.storage.checkpoint_store import CheckpointStore, open_checkpoint_store
from raypar.storage.filesystems import check_storage_is_writable
from raypar.storage.folder_upload import FolderUpload
from raypar.storage.list_and_remove_runs import list_runs_below, remove_run
from raypar.storage.storage_uri import parse_storage_uri
from raypar.worker.checkpoint import checkpoint_files
from raypar.worker.checkpoint.checkpoint_files import PARAMETER

pytestmark = pytest.mark.chaos


@pytest.fixture
def s3() -> Iterator[FakeS3]:
    with fake_s3() as server:
        yield server


def commit(store: CheckpointStore, done: int) -> checkpoint_files.CheckpointRef:
    begun = checkpoint_files.create_checkpoint(store, done)
    record = checkpoint_files.write_shard(begun, "a.safetensors", {("w", PARAMETER): torch.full((3,), float(done))})
    return checkpoint_files.commit_checkpoint(begun, [record], steps_done=done, contract={})


def answers_with(monkeypatch: pytest.MonkeyPatch, call: str, code: str, status: int, when: Callable[[str], bool]) -> list[str]:
    """Have S3 answer a call about a key with an error, when `when` says so; returns the keys that met it."""
    from moto.s3.exceptions import S3ClientError
    from moto.s3.models import S3Backend

    before, met = getattr(S3Backend, call), list[str]()

    class Refusal(S3ClientError):
        """The error."""

    Refusal.code = status

    def answer(backend: Any, bucket: str, key: str, *rest: Any, **more: Any) -> Any:
        if when(key):
            met.append(key)
            raise Refusal(code, f"Not now, {ENVIRONMENT['AWS_ACCESS_KEY_ID']}")
        return before(backend, bucket, key, *rest, **more)

    monkeypatch.setattr(S3Backend, call, answer)
    return met


def test_a_storage_that_throttles_costs_time_and_nothing_else(s3: FakeS3, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    seen = list[str]()
    met = answers_with(monkeypatch, "put_object", "SlowDown", 503, lambda key: bool(seen.append(key)) or len(seen) % 2 == 1)
    store = open_checkpoint_store(s3.at("runs/x/checkpoints"))
    for done in (4, 8):
        commit(store, done)
    assert store.names() == ["step_00000004", "step_00000008"] and len(met) >= 4
    (tmp_path / "job.yaml").write_text("steps: 9\n")
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    upload = FolderUpload(tmp_path, parse_storage_uri(s3.at("runs/x")), lambda: None)
    upload.start()
    upload.finish(60)
    assert s3.content("runs/x/metrics.jsonl/000000000001.jsonl") == b'{"step": 1}\n' and s3.content("runs/x/job.yaml")


def test_an_outage_is_told_once_and_over_when_it_is_over(s3: FakeS3, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    began_s = time.monotonic()
    for call in ("put_object", "head_object", "list_objects"):
        answers_with(monkeypatch, call, "ServiceUnavailable", 503, lambda key: time.monotonic() - began_s < 8)
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    upload = FolderUpload(tmp_path, parse_storage_uri(s3.at("runs/x")), lambda: None)
    upload.start()
    upload.finish(90)
    notes = upload.take_notes()
    assert [kind for kind, _ in notes] in ([], ["warning", "note"]), notes
    assert not any(ENVIRONMENT["AWS_ACCESS_KEY_ID"] in text for _, text in notes)
    assert s3.content("runs/x/metrics.jsonl/000000000001.jsonl") == b'{"step": 1}\n'


@pytest.mark.parametrize(
    "call, code, status",
    [("put_object", "InvalidAccessKeyId", 403), ("put_object", "AccessDenied", 403), ("delete_object", "AccessDenied", 403)],
)
def test_without_the_rights_it_takes_one_error_comes_before_anything_starts(
    call: str, code: str, status: int, s3: FakeS3, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    answers_with(monkeypatch, call, code, status, lambda key: True)
    with pytest.raises(ConfigError, match="cannot write to s3://bucket/runs") as caught:
        check_storage_is_writable(parse_storage_uri(s3.at("runs")))
    assert "list, read, write and delete there" in caught.value.cure
    assert main(["doctor", "--run-dir", s3.at("runs"), "--json"]) == 1
    said = capfd.readouterr().out
    (found,) = [one for one in json.loads(said)["checks"] if one["subject"] == "runs folder"]
    assert found["level"] == "failure" and "cannot write to s3://bucket/runs" in found["text"]
    for secret in (ENVIRONMENT["AWS_ACCESS_KEY_ID"], ENVIRONMENT["AWS_SECRET_ACCESS_KEY"]):
        assert secret not in said and secret not in str(caught.value)


def test_old_checkpoints_that_may_not_be_deleted_harm_no_new_one(s3: FakeS3, monkeypatch: pytest.MonkeyPatch):
    store = open_checkpoint_store(s3.at("runs/x/checkpoints"))
    commit(store, 4)
    answers_with(monkeypatch, "delete_object", "AccessDenied", 403, lambda key: True)
    from moto.s3.models import S3Backend

    def refused(*given: Any, **more: Any) -> Any:
        raise PermissionError

    monkeypatch.setattr(S3Backend, "delete_objects", refused)
    last = commit(store, 8)
    checkpoint_files.remove_old_checkpoints(store, 1)
    assert checkpoint_files.latest_usable_checkpoint(store) == (last, [])


def test_retention_that_was_interrupted_leaves_no_checkpoint_that_is_taken_for_whole(s3: FakeS3):
    store = open_checkpoint_store(s3.at("runs/x/checkpoints"))
    first, _ = commit(store, 4), commit(store, 8)
    s3.client.delete_object(Bucket="bucket", Key="runs/x/checkpoints/step_00000008/manifest.json")  # and then it was killed
    assert store.names() == ["step_00000004"] and checkpoint_files.latest_usable_checkpoint(store) == (first, [])
    again = commit(store, 8)
    files = {key.split("/")[-1] for key in s3.all_keys("runs/x/checkpoints/step_00000008/")}
    assert files == {"manifest.json", *json.loads(s3.content("runs/x/checkpoints/step_00000008/manifest.json"))["files"]}
    assert checkpoint_files.latest_usable_checkpoint(store) == (again, [])


def test_more_than_a_page_of_objects_is_listed_and_removed(s3: FakeS3):
    store = open_checkpoint_store(s3.at("runs/x/checkpoints"))
    for done in range(1, 1103):  # a page has 1,000
        for file in ("manifest.json", "a.safetensors"):
            s3.client.put_object(Bucket="bucket", Key=f"runs/x/checkpoints/step_{done:08d}/{file}", Body=b"{}")
    assert len(store.names()) == 1102
    checkpoint = "runs/x/checkpoints/step_00000001"
    for worker in range(1100):
        s3.client.put_object(Bucket="bucket", Key=f"{checkpoint}/worker_{worker:04d}.0123456789ab.safetensors", Body=b"")
    store.remove("step_00000001")
    assert s3.all_keys(f"{checkpoint}/") == [] and len(store.names()) == 1101
    place = parse_storage_uri(s3.at("many"))
    for run in range(1001):
        s3.client.put_object(Bucket="bucket", Key=f"many/run-{run}/job.yaml", Body=b"steps: 1\n")
    assert len(list_runs_below(place)) == 1001
    remove_run(parse_storage_uri(s3.at("runs/x")))
    assert s3.all_keys("runs/") == []


@pytest.mark.parametrize("folder", ["läufe/日本 語", "a b/%41+&=#1".replace("#", ""), "." + "x" * 200, "-"])
def test_odd_names_are_names(folder: str, s3: FakeS3, capfd: pytest.CaptureFixture[str]):
    uri = s3.at(f"{folder}/run")
    check_storage_is_writable(parse_storage_uri(uri))
    store = open_checkpoint_store(f"{uri.partition('?')[0]}/checkpoints?{uri.partition('?')[2]}")
    made = commit(store, 4)
    s3.client.put_object(Bucket="bucket", Key=f"{folder}/run/job.yaml", Body=b"name: run\nsteps: 9\n")
    assert checkpoint_files.latest_usable_checkpoint(store) == (made, [])
    assert s3.all_keys(f"{folder}/run/checkpoints/step_00000004/manifest.json")
    assert main(["status", uri]) == 0 and "run" in capfd.readouterr().out
    assert main(["runs", s3.at(folder)]) == 0 and capfd.readouterr().out.splitlines()[1].startswith("run")


def test_a_place_whose_keys_would_be_too_long_is_refused_before_anything_starts(s3: FakeS3, monkeypatch: pytest.MonkeyPatch):
    """S3 allows 1,024 bytes (moto any number); a checkpoint's files have the longest keys."""
    for call in ("put_object", "create_multipart_upload"):
        answers_with(monkeypatch, call, "KeyTooLongError", 400, lambda key: len(key.encode()) > 1024)
    for length in (930, 1020, 1100):
        with pytest.raises(ConfigError, match="cannot write to"):
            check_storage_is_writable(parse_storage_uri(s3.at("x" * length)))
    fits = s3.at("x" * 800)
    check_storage_is_writable(parse_storage_uri(fits))
    commit(open_checkpoint_store(s3.at("x" * 800 + "/run/checkpoints")), 4)
    with pytest.raises((CheckpointError, ClusterError)):
        commit(open_checkpoint_store(s3.at("x" * 1000 + "/run/checkpoints")), 4)
