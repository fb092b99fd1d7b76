"""What a run's recorder writes and says: on a full disk, of its learning rate, of skipped steps, at the end."""

import errno
import json
import math
import pickle
import time
from types import SimpleNamespace

import pytest
from helpers.recorded_runs import view_of
from helpers.tiny_job import Diary

from raypar.actors import jsonl_file
from raypar.actors.run_recorder import RunRecorder
from raypar.callbacks import Callback, Callbacks, Tracker
from raypar.elastic.actions import Teardown
from raypar.elastic.run_policy import RunPolicy
from raypar.errors import CheckpointError, UnreadableStateError
from raypar.job.lr_schedule_metric import FollowedMetric
from raypar.plan import ParallelPlan
from raypar.record.events import DriverLoss, RunWarning, StepRecord, ValidationRecord
from raypar.worker.checkpoint import checkpoint_files


class Full:
    """A disk that takes ten bytes more and then is full, until there is room again."""

    def __init__(self) -> None:
        self.room = True

    def open(self, path, mode, **options):
        if self.room:
            return open(path, mode, **options)
        with open(path, mode) as file:
            file.write("0123456789")
        raise OSError(errno.ENOSPC, "No space left on device")


def test_on_a_full_disk_metrics_wait_in_memory_with_one_warning_and_no_line_is_torn_or_lost(tmp_path, monkeypatch):
    disk = Full()
    monkeypatch.setattr(jsonl_file, "open", disk.open, raising=False)
    recorder = RunRecorder(SimpleNamespace(folder=tmp_path))
    for step, room in enumerate((True, False, False, True, False)):
        disk.room = room
        recorder._write(ValidationRecord(step=step + 1, validation_loss=0.5))
    news = recorder.new_events()
    assert [event.kind for event in news] == ["warning", "note", "warning"]
    warnings = [event.text for event in news if isinstance(event, RunWarning)]
    assert len(warnings) == 2 and all("No space left" in text and "cure: " in text for text in warnings)
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3, 4]


def test_a_learning_rate_that_follows_a_metric_is_told_when_it_changes_once_and_by_a_new_driver_too(tmp_path):
    request = SimpleNamespace(folder=tmp_path)
    followed = FollowedMetric("validation_loss", 2, {2: 0.5})
    recorder, lines = RunRecorder(request, followed=followed), []

    def steps(recorder: RunRecorder, *rates: tuple[int, float | None]) -> None:
        for step, lr in rates:
            record = StepRecord(step=step, loss=1.0, lr=lr, seconds=1.0, samples_per_s=1.0)
            recorder._tell_of_learning_rate(record)
            recorder._write(record)
        lines.extend(event.line() for event in recorder.new_events())

    steps(recorder, (1, 0.1), (2, 0.1), (3, 0.1))
    followed.values[4] = 0.51
    steps(recorder, (4, None), (5, 0.05), (6, 0.05))
    followed.values[6] = 0.52
    again = RunRecorder(request, followed=followed)
    again.remember_learning_rate()
    steps(again, (7, 0.025))
    assert lines == [
        "learning rate 0.1 -> 0.05 from step 5 on: validation_loss was 0.51 after 4 steps",
        "learning rate 0.05 -> 0.025 from step 7 on: validation_loss was 0.52 after 6 steps",
    ]
    steps(RunRecorder(request), (8, 0.01), (9, 0.001))
    assert len(lines) == 2, "a job of its own schedule says nothing"


def test_a_checkpoint_that_cannot_be_committed_gives_its_room_back(tmp_path, monkeypatch):
    def full(folder, records, **facts):
        raise CheckpointError("No space left on device")

    monkeypatch.setattr(checkpoint_files, "commit_checkpoint", full)
    recorder = RunRecorder(SimpleNamespace(folder=tmp_path, contract={}))
    folder = recorder.checkpoints.begin(4)
    with pytest.raises(CheckpointError):
        recorder.checkpoints.commit(4, folder, [])
    assert not list((tmp_path / "checkpoints").iterdir())


def test_a_file_that_the_driver_cannot_see_is_no_matter_of_a_full_disk(tmp_path):
    """The run machine would try again for minutes, and advise to free room."""
    recorder = RunRecorder(SimpleNamespace(folder=tmp_path, contract={}))
    begun = recorder.checkpoints.begin(4)
    with pytest.raises(UnreadableStateError, match=r"seen\.bin, written by a worker, cannot be seen by the driver") as error:
        recorder.checkpoints.commit(4, begun, [SimpleNamespace(file="seen.bin")])
    assert error.value.cure == "set run_dir to storage that all nodes share"


def test_a_new_driver_knows_which_of_the_present_workers_were_told_to_be_lost():
    events = [
        {"kind": "lost", "worker": 1},
        {"kind": "started"},
        {"kind": "joined", "worker": 4},
        {"kind": "lost", "worker": 2},
    ]
    assert view_of(events=events).lost_since_start == {2}, "worker 1 was one of an earlier start"


def test_the_end_that_a_killed_driver_had_decided_on_is_written_once_and_callbacks_hear_of_it(tmp_path):
    """It stood nowhere: `raypar status` took the run for one under way."""
    diary = tmp_path / "diary"
    callbacks = pickle.dumps(Callbacks((Diary(str(diary)),)))
    request = SimpleNamespace(folder=tmp_path, run="tiny", policy=RunPolicy(workers=1, job_steps=3), callbacks=callbacks)
    request.job = SimpleNamespace(best_rules=[])
    events = tmp_path / "events.jsonl"
    lines = [
        json.dumps({"kind": kind, "end": "stopped", "time": 0.0}) + "\n" for kind in ("started", "end", "started")
    ]  # it was resumed
    events.write_text("".join(lines))
    facts = {"end": "done", "why": "all 3 steps are done", "done": 3, "error": None}
    for _ in range(2):  # the next driver may be killed as well
        RunRecorder(request).record_former_end(facts)
    written = [json.loads(line) for line in events.read_text().splitlines()]
    assert [event["kind"] for event in written] == ["started", "end", "started", "end"]
    assert (written[-1]["end"], written[-1]["step"]) == ("done", 3)
    assert diary.read_text().splitlines()[-1] == "end done 3"


def test_a_new_driver_knows_how_long_the_run_has_been_under_way(tmp_path):
    request = SimpleNamespace(folder=tmp_path, run="tiny", policy=RunPolicy(workers=1, job_steps=3))
    told = [("started", 1000.0), ("end", 900.0), ("started", 100.0), ("lost", 50.0)]  # seconds ago
    lines = [json.dumps({"kind": kind, "worker": 0, "end": "stopped", "time": time.time() - ago_s}) for kind, ago_s in told]
    (tmp_path / "events.jsonl").write_text("\n".join([*lines, '{"kind": "lo']))
    recorder = RunRecorder(request)
    assert recorder.take_over().lost == {0} and 100.0 <= recorder.age_s < 110.0
    recorder.note(DriverLoss())
    whole = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert whole[-1]["kind"] == "driver", "a line cut off by the kill does not swallow the next"


def test_a_tracker_that_cannot_write_is_told_as_a_lost_line_is_and_the_run_goes_on(tmp_path):
    class Full(Tracker):
        packages = ("json",)

        def log(self, step, metrics):
            raise OSError(errno.ENOSPC, "No space left on device")

    request = SimpleNamespace(folder=tmp_path, run="tiny", policy=RunPolicy(workers=1, job_steps=3), callbacks=b"")
    recorder = RunRecorder(request)
    recorder.callbacks = Callbacks([Full()])
    for step in (1, 2, 3):
        assert recorder._call("on_validation", {"step": step, "validation_loss": 0.5, "count": 1.0, "seconds": 0.1}) == (
            None,
            {},
        )
    (event,) = recorder.new_events()
    assert event.kind == "warning" and "tracker Full cannot write (OSError: [Errno 28] No space left" in event.text
    assert "\n  cure: free disk space" in event.text
    kept = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert [line["text"] for line in kept] == [event.text]


class Raising(Callback):
    """Raises at the end of a run, and notes which hooks were called."""

    def __init__(self) -> None:
        self.called: list[str] = []

    def on_exception(self, info):
        self.called.append("on_exception")
        raise ZeroDivisionError("in on_exception")

    def on_end(self, info):
        self.called.append("on_end")
        raise ZeroDivisionError("in on_end")


def test_a_callback_that_raises_at_the_end_keeps_no_other_hook_from_its_call_and_is_two_lines(tmp_path):
    """`on_end`, which closes trackers, was not called after a failing `on_exception`; the line had a whole traceback in it and
    said that the end could not be recorded."""
    request = SimpleNamespace(folder=tmp_path, run="tiny", policy=RunPolicy(workers=1, job_steps=3))
    recorder, callback = RunRecorder(request), Raising()
    recorder.callbacks = Callbacks([callback])
    recorder.record_end(Teardown("failed", "it failed", 2, CheckpointError("it failed")), None)
    assert callback.called == ["on_exception", "on_end"]
    warnings = [event.text for event in recorder.new_events() if isinstance(event, RunWarning)]
    assert [text.count("\n") for text in warnings] == [1, 1] and "callback Raising.on_end" in warnings[1]
    assert all(f'File "{__file__}", line ' in text and "the run itself is not touched" in text for text in warnings)


def test_a_validation_in_which_nothing_counts_has_no_loss_and_the_run_goes_on(tmp_path):
    """Only padding in the validation samples: the run ended with `ZeroDivisionError`, without a cure."""
    recorder = RunRecorder(SimpleNamespace(folder=tmp_path, validation_batching=None))
    recorder.record_validation(4, [{"losses": {0: (0.0, 0.0), 1: (0.0, 0.0)}, "seconds": 0.1}])
    assert math.isnan(recorder.new_events()[0].validation_loss)
    assert json.loads((tmp_path / "metrics.jsonl").read_text())["validation_loss"] is None


def test_skipped_steps_are_told_at_first_and_whenever_their_number_has_doubled(tmp_path):
    """A run of which every step was skipped ended well; a progress line every ten seconds might have said so."""
    batching = SimpleNamespace(batch_size=8)
    request = SimpleNamespace(folder=tmp_path, run="tiny", policy=RunPolicy(workers=1, job_steps=9), batching=batching)
    request.plan, request.traced_steps = SimpleNamespace(world=1), frozenset()
    recorder = RunRecorder(request)
    recorder.restart_step_timer()
    report = {"loss": math.nan, "norm": 0.5, "count": 8.0, "seconds": 0.5, "busy_seconds": 0.4, "peak_rss_bytes": 9}
    report |= {"mirror_seconds": 0.0, "digest": None, "spans": []}
    for step in range(9):
        recorder.record_step(step, {0: {**report, "skipped": step > 0}})
    told = [event.text.splitlines() for event in recorder.new_events() if isinstance(event, RunWarning)]
    assert [what.partition(" was skipped")[0] for what, _ in told] == ["step 2", "step 3", "step 5", "step 9"]
    assert told[0][0].endswith("loss nan, gradient norm 0.5") and told[3][0].endswith("so were 7 steps before it")


def test_what_workers_hold_is_saved_with_the_totals_for_the_report(tmp_path):
    recorder = RunRecorder(SimpleNamespace(folder=tmp_path))
    plan = ParallelPlan.mesh(dp=2, layers=2)
    recorder.telemetry.begin_generation(plan)
    held = [{"rss": 300, "empty": 200, "parameter": 8}, {"rss": 301, "empty": 200}]
    step = StepRecord(step=1, loss=0.5, seconds=0.1, samples_per_s=8.0, busy_shares=[0.5, 0.5], peak_rss_bytes=[400, 401])
    recorder.telemetry.add_step(step, 1.0, {rank: {"memory": each} for rank, each in enumerate(held)})
    recorder._save_totals(2.0)
    saved = json.loads((tmp_path / "totals.json").read_text())["worker_memory_bytes"]
    assert saved == [{"peak_rss": 400, **held[0]}, {"peak_rss": 401, **held[1]}]
    assert RunRecorder(SimpleNamespace(folder=tmp_path)).telemetry.totals.steps == 1, "and the totals are read as ever"
