"""What people see of a run when the disk is full."""

import errno
import json
from types import SimpleNamespace

import pytest

from raypar.actors import recorder as module
from raypar.actors.recorder import Recorder
from raypar.errors import CheckpointError


class Full:
    """A disk that takes ten bytes more and then is full, until there is room again."""

    def __init__(self) -> None:
        self.room = True

    def open(self, path, mode):
        if self.room:
            return open(path, mode)
        with open(path, mode) as file:
            file.write("0123456789")
        raise OSError(errno.ENOSPC, "No space left on device")


def test_on_a_full_disk_metrics_wait_in_memory_with_one_warning_and_no_line_is_torn_or_lost(tmp_path, monkeypatch):
    disk = Full()
    monkeypatch.setattr(module, "open", disk.open, raising=False)
    recorder = Recorder(SimpleNamespace(folder=tmp_path))
    for step, room in enumerate((True, False, False, True, False)):
        disk.room = room
        recorder._write({"step": step})
    warnings = [event["text"] for event in recorder.news()]
    assert len(warnings) == 2 and all("No space left" in text and "cure: " in text for text in warnings)
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [0, 1, 2, 3]


def test_a_checkpoint_that_cannot_be_committed_gives_its_room_back(tmp_path, monkeypatch):
    def full(folder, records, **facts):
        raise CheckpointError("No space left on device")

    monkeypatch.setattr(module.checkpoint, "commit", full)
    recorder = Recorder(SimpleNamespace(folder=tmp_path, contract={}))
    folder = recorder.checkpoint_begin(4)
    with pytest.raises(CheckpointError):
        recorder.checkpoint_end(4, folder, [])
    assert not list((tmp_path / "checkpoints").iterdir())


def test_a_new_driver_knows_which_of_the_present_workers_were_told_to_be_lost():
    events = [
        {"kind": "lost", "worker": 1},
        {"kind": "started"},
        {"kind": "joined", "worker": 4},
        {"kind": "lost", "worker": 2},
    ]
    assert module.lost_of(events) == {2}, "worker 1 was one of an earlier start"
