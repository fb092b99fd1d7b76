"""A disk that takes nothing more, or that is gone: two lines and an exit code, never a traceback, and nothing half written."""

import errno
import json
from contextlib import contextmanager
from dataclasses import replace
from io import StringIO
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers import checkpoint_folders as checkpoint_files
from helpers.full_disk import room
from helpers.tiny_job import write_job

from raypar.actors import step_timeline_files
from raypar.actors.cluster_info import ClusterCapacity
from raypar.actors.ray_connection import RayConnection
from raypar.actors.run_recorder import RunRecorder, TracedStep
from raypar.cli import main
from raypar.console.event_printer import EventPrinter
from raypar.elastic.actions import Teardown
from raypar.elastic.run_policy import RunPolicy
from raypar.errors import CheckpointError, ConfigError, WorkerLost
from raypar.files.atomic_write import write_text_atomically
from raypar.job.job import Job
from raypar.job.read_job import load_job
from raypar.launch import Result, resume, start_new_run
from raypar.record.events import Note
from raypar.record.parse_events import parse_event
from raypar.storage import checkpoint_store
from raypar.storage.run_folder import RunFolder

LINE = {"step": 1, "loss": 0.5, "norm": 1.0, "count": 8.0, "seconds": 0.1, "samples_per_s": 80.0, "time": 1.0}


def two_lines(capsys, status: int = 2) -> str:
    """What is said on stderr, which is a what and a cure."""
    err = capsys.readouterr().err
    assert err.count("error: ") == err.count("  cure: ") == 1 and err.count("\n") == 2, err
    return err


@pytest.fixture
def run(tmp_path) -> Path:
    """A run folder with a checkpoint after one step."""
    folder = RunFolder.create(tmp_path / "runs", "tiny")
    folder.job.write_text("steps: 200\n")
    folder.plan.write_text('{"schedule": "1f1b", "stages": [{"replicas": 1}]}\n')
    folder.append_line(folder.metrics, LINE)
    aside = checkpoint_files.create_checkpoint(folder.checkpoints, 1)
    record = checkpoint_files.write_shard(
        aside, "worker_0000.safetensors", {("weight", checkpoint_files.PARAMETER): torch.zeros(500)}
    )
    checkpoint_files.commit_checkpoint(aside, [record], steps_done=1, contract={})
    return folder.path


SIMULATE = ["simulate", "--schedule", "1f1b", "--stages", "2", "--microbatches", "4"]
WRITERS = {
    "simulate --svg": ([*SIMULATE, "--svg"], "x.svg"),
    "simulate --csv": ([*SIMULATE, "--csv"], "x.csv"),
    "simulate --trace": ([*SIMULATE, "--trace"], "x.json"),
    "plan --svg": (["plan", "{job}", "--svg"], "x.svg"),
    "prepare --out": (["prepare", "{text}", "--out"], "x.bin"),
    "status --svg": (["status", "{run}", "--svg"], "x.svg"),
    "status --trace": (["status", "{run}", "--trace"], "x.json"),
    "export .safetensors": (["export", "{run}", "--out"], "x.safetensors"),
    "export .pt": (["export", "{run}", "--out"], "x.pt"),
}


SLOW = {"plan --svg": [pytest.mark.full]}  # it measures the model


@pytest.mark.parametrize("writer", [pytest.param(writer, marks=SLOW.get(writer, ())) for writer in WRITERS])
def test_a_file_that_does_not_fit_on_the_disk_is_two_lines_and_what_was_there_stays(writer, run, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(Path(__file__).parents[1])
    (tmp_path / "text").write_text("some text, " * 100)
    places = {"job": str(write_job(tmp_path)), "text": str(tmp_path / "text"), "run": str(run)}
    (words, name), there = WRITERS[writer], tmp_path / "out"
    there.mkdir()
    (there / name).write_text("what was there")
    with room(32):
        status = main([*(word.format(**places) for word in words), str(there / name)])
    said = two_lines(capsys)
    assert status == 2 and f"cannot write {there / name}: File too large" in said and "free disk space" in said
    assert [path.name for path in there.iterdir()] == [name], "nothing is left beside it"
    assert (there / name).read_text() == "what was there"


@pytest.mark.parametrize("option", ["--svg", "--csv", "--trace"])
def test_a_device_is_written_to_and_not_replaced(option, capsys):
    assert main([*SIMULATE, option, "/dev/full"]) == 2
    assert "cannot write /dev/full: No space left on device" in two_lines(capsys)
    assert Path("/dev/full").is_char_device()


def test_a_link_stays_a_link(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "target")
    write_text_atomically(tmp_path / "link", "text")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "target").read_text() == "text"


def test_a_read_only_disk_is_two_lines(tmp_path, monkeypatch, capsys):
    def read_only(*given, **options):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr("raypar.files.atomic_write.open", read_only, raising=False)
    assert main([*SIMULATE, "--svg", str(tmp_path / "x.svg")]) == 2
    said = two_lines(capsys)
    assert "Read-only file system\n  cure: make that disk writable again: it is mounted read-only" in said
    assert said.endswith("; or choose a folder you may write to\n")


def test_a_job_that_cannot_be_kept_is_not_started_and_leaves_no_run_folder(tmp_path, monkeypatch, capsys):
    @contextmanager
    def connected(*given):
        yield RayConnection("own", "a local Ray cluster", "nowhere:0")

    monkeypatch.chdir(Path(__file__).parents[1])
    monkeypatch.setattr("raypar.actors.ray_connection.connect_ray", connected)
    monkeypatch.setattr("raypar.actors.cluster_info.cluster_capacity", lambda: ClusterCapacity(1, 5, 5, None))
    job = str(write_job(tmp_path))
    monkeypatch.setattr(start_new_run, "plan_json", lambda chosen: "p" * 5000)
    for nbytes in (0, 32, 3000):  # job.yaml, the same, plan.json
        with room(nbytes):
            status = main(["train", job])
        said = two_lines(capsys)
        assert status == 2 and "cannot write" in said and "free disk space" in said
        assert not list((tmp_path / "runs").iterdir())


def test_a_run_that_cannot_be_changed_is_not_resumed_and_stays_as_it_was(run, tmp_path, monkeypatch):
    folder = RunFolder(run)
    folder.append_line(folder.metrics, {**LINE, "step": 2})
    before = {path: path.read_bytes() for path in run.iterdir() if path.is_file()}
    monkeypatch.setattr("raypar.actors.driver_client.refuse_active_run", lambda name: None)
    monkeypatch.setattr(
        resume, "prepare_resumed_run", lambda path, options, choose, tell: (replace(options, steps_done=1), choose)
    )
    monkeypatch.setattr(resume, "launch_run", lambda choose, options, tell: options.make_folder(chosen))
    chosen = SimpleNamespace(plan=SimpleNamespace(describe=lambda: "1 worker"))
    monkeypatch.setattr(resume, "plan_json", lambda chosen: "p" * 500)
    monkeypatch.setattr(resume, "make_plan_chooser", lambda job: None)
    monkeypatch.setattr(Job, "to_yaml", lambda job: "y" * 5000)
    job = load_job(write_job(tmp_path))
    with room(50), pytest.raises(ConfigError, match=r"cannot write .*metrics\.jsonl: File too large"):
        resume.resume_job(job, folder, print)
    with room(400), pytest.raises(ConfigError, match=r"cannot write .*plan\.json: File too large"):
        resume.resume_job(job, folder, print)
    assert folder.plan.read_bytes() == before[folder.plan]
    with room(2000), pytest.raises(ConfigError, match=r"cannot write .*job\.yaml: File too large"):
        resume.resume_job(job, folder, print)
    assert folder.job.read_bytes() == before[folder.job]
    assert [line["step"] for line in folder.read_lines(folder.metrics)] == [1], "no step after the checkpoint"


def test_a_run_folder_without_metrics_is_not_removed_when_steps_were_seen(tmp_path, monkeypatch, capfd):
    """The disk was full from the first step, and then the driver of a run that is not elastic was lost."""

    @contextmanager
    def connected(*given):
        yield RayConnection("own", "a local Ray cluster", "nowhere:0")

    def follow(request, tell, heard):
        tell(parse_event({"kind": "step", **LINE, "count_per_s": 1.0, "bubble": 0.0, "eta_s": 1.0}))
        raise WorkerLost("the driver was lost")

    monkeypatch.chdir(Path(__file__).parents[1])
    monkeypatch.setattr("raypar.actors.ray_connection.connect_ray", connected)
    monkeypatch.setattr("raypar.actors.cluster_info.cluster_capacity", lambda: ClusterCapacity(1, 5, 5, None))
    monkeypatch.setattr("raypar.actors.driver_client.follow_run", follow)
    assert main(["train", str(write_job(tmp_path))]) == 1
    assert (tmp_path / "runs/tiny/job.yaml").is_file()


@pytest.mark.parametrize("file", ["job.yaml", "plan.json", "members.json", "cluster.json", "metrics.jsonl", "events.jsonl"])
@pytest.mark.parametrize(
    "content", [b"", b"\xff\xfe\x00garbage", b"[1, 2]", b'{"step": {}, "kind": 3}\nnull\n3\n', b"steps: many"]
)
def test_status_takes_what_a_full_disk_has_left_of_a_run(file, content, run, capsys):
    (run / file).write_bytes(content)
    assert main(["status", str(run)]) == 0
    assert capsys.readouterr().out.startswith("run tiny: ")


def test_a_line_that_cannot_be_printed_does_not_end_the_run():
    class Full(StringIO):
        def flush(self):
            raise OSError(errno.ENOSPC, "No space left on device")

    console = EventPrinter(steps=10, out=Full())
    console(Note(text="something"))
    console.finish(Result({}, "runs/x", "done", 10, "all steps are done"))


def test_output_that_does_not_fit_is_told_on_stderr(monkeypatch, capsys):
    class Full(StringIO):
        def flush(self):
            raise OSError(errno.ENOSPC, "No space left on device")

        def fileno(self):
            with open("/dev/null", "w") as nowhere:
                return nowhere.fileno()

    monkeypatch.setattr("sys.stdout", Full())
    monkeypatch.setattr("os.dup2", lambda *numbers: None)
    assert main(SIMULATE) == 1
    assert "error: cannot write what is printed: No space left on device\n  cure: " in two_lines(capsys)


def test_a_picture_that_does_not_fit_is_a_warning_and_the_run_ends_well(tmp_path, monkeypatch):
    (tmp_path / "swimlane.svg").write_text("of an earlier part of the run")
    monkeypatch.setattr(step_timeline_files, "swimlanes_svg", lambda *given, **more: "x" * 5000)
    monkeypatch.setattr(step_timeline_files, "chrome_trace", lambda *given, **more: {})
    monkeypatch.setattr(step_timeline_files, "swimlane_data", lambda *given, **more: None)
    monkeypatch.setattr(step_timeline_files, "Timeline", SimpleNamespace(from_spans=lambda *given: None))
    monkeypatch.setattr(step_timeline_files, "replace", lambda *given, **more: None)
    plan = SimpleNamespace(world=1, coordinate=str, describe=lambda: "1 worker")
    more = SimpleNamespace(edges=(), relays=(), count=4, batch_size=8)
    request = SimpleNamespace(
        folder=tmp_path, run="tiny", policy=RunPolicy(workers=1, job_steps=3), plan=plan, batching=more, crossing=more
    )
    request.predicted, request.schedule_name = None, "1f1b"
    recorder = RunRecorder(request)
    recorder.traced_step = TracedStep(1, [[("V", 0.0, 1.0)]], ["n"])
    with room(2000):
        recorder.record_end(Teardown("done", "all steps are done", 3, None), None)
    told = [event for event in recorder.new_events() if "picture" in event.facts().get("text", "")]
    assert [event.kind for event in told] == ["warning"] and "cure: free disk space" in told[0].text
    assert sorted(path.name for path in tmp_path.iterdir()) == ["events.jsonl", "swimlane.svg", "totals.json"]
    assert (tmp_path / "swimlane.svg").read_text() == "of an earlier part of the run"


def test_a_checkpoint_that_does_not_fit_is_an_error_with_a_cure_and_the_last_one_stays(run):
    root = run / "checkpoints"
    with room(1000), pytest.raises(CheckpointError, match="File too large") as caught:
        aside = checkpoint_files.create_checkpoint(root, 2)
        checkpoint_files.write_shard(
            aside, "worker_0000.safetensors", {("weight", checkpoint_files.PARAMETER): torch.zeros(500)}
        )
    assert "free disk space" in caught.value.cure
    checkpoint_files.discard_checkpoint(aside)
    assert checkpoint_files.latest_usable_checkpoint(root) == (root / "step_00000001", [])


def test_a_checkpoint_that_cannot_be_read_is_skipped_and_said(run, monkeypatch):
    def fails(*given):
        raise OSError(errno.EIO, "Input/output error")

    @contextmanager
    def broken(path, **options):
        with open(path, "rb") as file:
            yield SimpleNamespace(fileno=file.fileno, read=fails)

    monkeypatch.setattr(checkpoint_store, "open_regular_file", broken)
    path, skipped = checkpoint_files.latest_usable_checkpoint(run / "checkpoints")
    assert path is None and len(skipped) == 1 and "Input/output error" in skipped[0]


def test_token_files_keep_their_notes_when_the_new_ones_do_not_fit(tmp_path, capsys):
    """The new tokens had replaced the old ones when the disk had no room for their notes, without which they are misread."""
    (tmp_path / "text").write_text("ab")
    out = str(tmp_path / "x.bin")
    assert main(["prepare", str(tmp_path / "text"), "--out", out, "--dtype", "uint32"]) == 0
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    capsys.readouterr()
    with room(20):  # enough for the tokens alone
        assert main(["prepare", str(tmp_path / "text"), "--out", out]) == 2
    two_lines(capsys)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    assert json.loads(before["x.bin.json"])["dtype"] == "uint32"
