"""Every command that takes a run folder takes a URI too, or refuses it with one error and its cure."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from test_run_lease import Clock, LeasesInMemory
from test_runs_logs_stop import make_run, step

from raypar.cli import main
from raypar.console import run_log
from raypar.doctor import gather
from raypar.errors import ClusterError, ConfigError
from raypar.launch import stop_run as stop
from raypar.storage import held_lease
from raypar.storage.filesystems import uri_of_filesystem_object
from raypar.storage.folder_upload import FolderUpload
from raypar.storage.held_lease import HeldLease
from raypar.storage.run_folder import RunFolder
from raypar.storage.run_lease import LEASE_S
from raypar.storage.storage_uri import StorageUri

END = {"kind": "end", "end": "interrupted", "why": "Ctrl-C", "done": 3, "time": 1003.0}
MEMBERS = {"phase": "ended", "time": 1003.0, "step": 3}


@pytest.fixture(autouse=True)
def no_cluster(monkeypatch: pytest.MonkeyPatch):
    for name in ("RAY_API_SERVER_ADDRESS", "RAY_ADDRESS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(gather, "run_probe", lambda *given: {})  # the doctor would import PyTorch and Ray


@pytest.fixture
def runs(tmp_path: Path) -> StorageUri:
    """A place with a run `small` that has ended, on a file system that is no folder to raypar."""
    from fsspec.implementations.local import LocalFileSystem
    from pyarrow.fs import FSSpecHandler, PyFileSystem

    there = uri_of_filesystem_object(PyFileSystem(FSSpecHandler(LocalFileSystem())), str(tmp_path / "there"))
    assert isinstance(there, StorageUri)
    folder = make_run(tmp_path / "work", "small", [step(n, 1000.0 + n) for n in (1, 2, 3)], [END])
    folder.members.write_text(json.dumps(MEMBERS))
    upload = FolderUpload(folder.path, there.child("small"), lambda: None)
    upload.start()
    upload.finish(30)
    (tmp_path / "there/small/checkpoints/step_00000003").mkdir(parents=True)
    (tmp_path / "there/small/checkpoints/step_00000003/manifest.json").write_text("{}")
    return there


def test_a_run_on_storage_is_read_by_its_uri_and_by_its_name(
    runs: StorageUri, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("RAY_API_SERVER_ADDRESS", "http://127.0.0.1:9")  # a URI is no job of that cluster
    uri = str(runs.child("small"))
    for words in (["status", uri], ["status", "small", "--run-dir", str(runs)], ["top", uri, "--once"], ["logs", uri, "-f"]):
        code = main(words)
        said = capfd.readouterr()
        assert code == (130 if "logs" in words else 0) and "small" in said.out + uri and said.err == "", (words, said)
        assert "raypar-" not in said.out, "the place of the temporary copy is not shown"
    for words in (["runs", str(runs), "--json"], ["runs", "--run-dir", f"{runs}/", "--json"]):
        assert main(words) == 0
        (row,) = json.loads(capfd.readouterr().out)
        assert (row["name"], row["state"], row["step"], row["path"]) == ("small", "interrupted", 3, uri)
    assert main(["report", uri, "--out", str(tmp_path / "r.html")]) == 0
    assert "raypar-" not in (tmp_path / "r.html").read_text()
    assert main(["doctor", "--run-dir", str(runs), "--json"]) in (0, 1)
    found, *_ = [
        one for one in json.loads(capfd.readouterr().out.partition("\n")[2])["checks"] if one["subject"] == "runs folder"
    ]
    assert (
        found["level"] == "ok" and "was written and removed in" in found["text"] and "not kept from each other" in found["text"]
    )


def test_what_cannot_be_done_with_a_run_on_storage_is_one_error_with_its_cure(
    runs: StorageUri, capfd: pytest.CaptureFixture[str]
):
    uri = str(runs.child("small"))
    for words, what, cure in [
        (["stop", uri], "which only S3 has", "stop it where it was started"),
        (["drain", "abc", "--run", uri], "run small has ended", "give --address host:port"),
        (["drain", "abc", "--run", str(runs.child("none"))], "no run lies at", "give the run's place"),
        (["status", f"{runs}/../other"], "a part of its path is '..'", "give the path without it"),
        (["status", f"{runs}//small"], "a part of its path is ''", "give the path without it"),
        (["runs", "ftp://host/runs"], "does not read or write ftp storage", "give the path of a folder"),
        (["runs", str(runs), "--run-dir", str(runs)], "two places of runs are given", "give one of them"),
        (["doctor", "--run-dir", "s3://key:hidden@bucket/runs"], "holds credentials", "leave them out"),
        (["top", "s3://", "--once"], "names no bucket", "give s3://BUCKET"),
    ]:
        assert main(words) == 2, words
        said = capfd.readouterr().err
        assert what in said and cure in said and said.count("cure:") == 1 and "hidden" not in said, said


def test_a_file_uri_is_a_folder_for_every_command(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    runs = f"file://{tmp_path}/runs/"
    make_run(tmp_path / "runs", "small", [step(n, 1000.0 + n) for n in (1, 2, 3)], [END]).members.write_text(
        json.dumps(MEMBERS)
    )
    uri = f"{runs}small/"
    for words in (
        ["status", uri],
        ["runs", runs],
        ["logs", uri],
        ["top", uri, "--once"],
        ["report", uri, "--out", str(tmp_path / "r.html")],
        ["stop", uri],
        ["stop", "small", "--run-dir", runs],
    ):
        assert main(words) == 0, (words, capfd.readouterr().err)
    assert "nothing trains run small: it is interrupted after 3 of 8 steps" in capfd.readouterr().out
    assert main(["drain", "abc", "--run", uri]) == 2
    assert "has ended" in capfd.readouterr().err
    assert main(["doctor", "--run-dir", runs, "--json"]) in (0, 1)
    assert f"{tmp_path}/runs is writable" in capfd.readouterr().out


class Running:
    """A run on S3 whose driver renews its lease and ends `ends_after` renewals after it was asked to."""

    def __init__(self, clock: Clock, monkeypatch: pytest.MonkeyPatch, ends_after: int) -> None:
        self.clock, self.store, self.left = clock, LeasesInMemory(clock), ends_after
        self.lease = HeldLease(self.store, "one", "mine", "s3://bucket/runs/mine")
        self.lease.take()
        monkeypatch.setattr(stop, "s3_lease_store", lambda uri: self.store)
        monkeypatch.setattr(stop.time, "sleep", self.sleep)
        monkeypatch.setattr(stop.time, "monotonic", lambda: clock.now_s)

    def sleep(self, seconds: float) -> None:
        self.clock.now_s += 5
        if self.left:
            self.lease.renew()
            self.left -= self.lease.stop_requested
        else:
            self.lease.release()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(held_lease, "seconds_since_boot", lambda: clock.now_s)
    return clock


def test_stop_is_written_into_the_lease_and_waits_until_that_is_given_back(clock: Clock, monkeypatch: pytest.MonkeyPatch):
    uri, said = StorageUri("s3", "bucket/runs/mine"), list[str]()
    running = Running(clock, monkeypatch, ends_after=2)
    running.store.before = running.lease.renew  # the driver renews it at the same moment
    assert stop.stop_run_on_storage(uri, 60, said.append) is True
    assert running.store.read().lease.released and not running.store.read().lease.stop_requested  # type: ignore[union-attr]
    assert "to save and end; it reads the request within 10 s" in said[0] and "waiting for run mine" in said[1]
    assert stop.stop_run_on_storage(uri, 60, said.append) is False, "nothing trains it now"
    HeldLease(running.store, "two", "mine", "x").take()
    assert not running.store.read().lease.stop_requested, "the next start is not stopped by the former request"  # type: ignore[union-attr]


def test_a_run_that_does_not_stop_is_an_error_and_one_that_dies_meanwhile_has_ended(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
):
    uri = StorageUri("s3", "bucket/runs/mine")
    running = Running(clock, monkeypatch, ends_after=1000)
    with pytest.raises(ClusterError, match="was asked to save and end, and has not ended within 60 s"):
        stop.stop_run_on_storage(uri, 60, lambda text: None)
    monkeypatch.setattr(running.lease, "renew", lambda: None)
    assert stop.stop_run_on_storage(uri, 2 * LEASE_S, lambda text: None) is True


def test_a_followed_run_elsewhere_is_waited_for_as_long_as_its_lease_is_held(clock: Clock, monkeypatch: pytest.MonkeyPatch):
    from raypar.storage.run_folder import SharedStoragePlace

    folder = RunFolder(Path("mine"), SharedStoragePlace(StorageUri("s3", "bucket/runs/mine")))
    store = LeasesInMemory(clock)
    lease = HeldLease(store, "one", "mine", "x")
    lease.take()
    monkeypatch.setattr(run_log, "s3_lease_store", lambda uri: store)
    trains = run_log.make_remote_liveness_check(folder)
    clock.now_s += LEASE_S - 1
    assert trains(1000.0)
    clock.now_s += 1
    assert not trains(1000.0)
    assert not run_log.make_remote_liveness_check(replace(folder, shared=None))(31.0)

    def missing(uri: StorageUri) -> Any:
        raise ConfigError("boto3 is missing")

    monkeypatch.setattr(run_log, "s3_lease_store", missing)
    assert run_log.make_remote_liveness_check(folder)(31.0) and not run_log.make_remote_liveness_check(folder)(
        run_log.GONE_FROM_STORAGE_S
    )
