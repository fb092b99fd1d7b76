"""The journal of the samples of streams: the same samples each time, in 16 bytes a microbatch at most."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from raypar.actors.sample_journal import SampleJournal
from raypar.plan.microbatches import BatchesOfSteps, Microbatches
from raypar.worker.data.stream_positions import StreamCursor, StreamPositions, StreamsRead

CUT = Microbatches(4, 0, 11)


def journal(folder: Path, told: list[str] | None = None, streams: int = 2) -> SampleJournal:
    tell = (told if told is not None else []).append
    return SampleJournal(folder / "samples.bin", folder / "cursors.json", CUT, streams, 10, tell)


def read(step: int, *microbatches: int, other: int = 0) -> StreamsRead:
    return StreamsRead({m: 1000 * step + m + 1 + other for m in microbatches}, {m % 2: (step // 3, step) for m in microbatches})


def written(folder: Path, steps: int) -> SampleJournal:
    made = journal(folder)
    made.open(0)
    for step in range(steps):
        assert made.note(step, read(step, 0, 2)) is None and made.note(step, read(step, 1, 3)) is None
        made.write(step, made.record(step))
    return made


def test_a_step_that_is_executed_again_must_read_the_same(tmp_path):
    made = written(tmp_path, 5)
    assert made.note(3, read(3, 1)) is None
    error = made.note(3, read(3, 1, other=7))
    assert error is not None and error.what.startswith("step 4, microbatch 1: stream 1 of 2 gave other samples than when")
    assert "no clock" in error.cure


def test_so_must_a_step_after_a_resume_and_the_microbatch_before_a_place(tmp_path):
    written(tmp_path, 5)
    again = journal(tmp_path)
    again.open(3)
    assert again.note(3, read(3, 0, 1, 2, 3)) is None
    assert again.note(4, read(4, 2, other=1)) is not None
    assert again.note(3, StreamsRead(again={(2, 3): 2004})) is None
    assert again.note(3, StreamsRead(again={(2, 3): 2005})) is not None
    assert again.note(3, StreamsRead(again={(0, 3): 2005})) is None  # before what was read of the file: not known
    assert again.note(5, read(5, 0)) is None  # new


def test_after_a_resume_with_other_data_or_batches_nothing_is_compared_with_what_was_read_before(tmp_path):
    written(tmp_path, 5)
    again = journal(tmp_path)
    again.begin_anew()
    assert again.note(3, read(3, 0, 1, other=7)) is None and again.known_epochs() == {0: ((1, 3),), 1: ((1, 3),)}
    again.write(3, again.record(3))
    later = journal(tmp_path)
    later.open(3)
    assert later.note(3, read(3, 0, 1)) is not None and later.note(4, read(4, 0, other=9)) is None


def test_the_first_microbatches_of_other_batches_have_none_before_them_to_compare(tmp_path):
    positions = StreamPositions(2, Microbatches(4, 0, 11, (BatchesOfSteps(3, 3, 9),)))
    assert [positions.before(3, m) for m in range(4)] == [None, None, (3, 0), (3, 1)]
    assert positions.before(4, 1) == (3, 3)
    assert [positions.of(3, m).start for m in range(2)] == [3 * 6, 3 * 3] and positions.of(4, 0).start == 3 * 6 + 5


def test_who_begins_to_read_learns_where_epochs_begin(tmp_path):
    written(tmp_path, 8)
    again = journal(tmp_path)
    again.open(7)
    assert again.known_epochs() == {0: ((2, 7),), 1: ((2, 7),)}


def test_a_microbatch_takes_16_bytes_at_most(tmp_path):
    written(tmp_path, 1000)
    assert (tmp_path / "samples.bin").stat().st_size <= 16 * 4 * 1000


@pytest.mark.parametrize("content", [b"", b"something else" * 9, b"raypar-s"])
def test_a_file_of_something_else_is_begun_anew(tmp_path, content):
    (tmp_path / "samples.bin").write_bytes(content)
    made = written(tmp_path, 2)
    again = journal(tmp_path)
    again.open(0)
    assert again.record(1)[0] == made.record(1)[0]


def test_a_record_that_was_cut_is_not_known(tmp_path):
    written(tmp_path, 3)
    path = tmp_path / "samples.bin"
    path.write_bytes(path.read_bytes()[:-5])
    again = journal(tmp_path)
    again.open(0)
    assert again.note(1, read(1, 0, other=1)) is not None
    assert again.note(2, read(2, 0, other=1)) is None


def test_a_file_that_cannot_be_written_is_told_once(tmp_path):
    told: list[str] = []
    made = journal(tmp_path / "gone", told)
    made.open(0)
    made.note(0, read(0, 0))
    made.write(0, made.record(0))
    assert len(told) == 1 and "cannot be written" in told[0]


def test_positions_are_those_of_the_streams_read_in_turn():
    positions = StreamPositions(2, CUT)
    given = {0: 0, 1: 0}
    last: dict[int, tuple[int, int] | None] = {0: None, 1: None}
    for step in range(3):
        for microbatch in range(4):
            stream, size = microbatch % 2, len(CUT.samples(microbatch))
            assert positions.of(step, microbatch) == range(given[stream], given[stream] + size)
            assert positions.before(step, microbatch) == last[stream]
            given[stream], last[stream] = given[stream] + size, (step, microbatch)


def test_cursors_of_the_last_steps_and_of_the_last_checkpoints_are_kept(tmp_path):
    made = journal(tmp_path)
    made.open(0)
    for step in range(100):
        assert made.wants_cursors(step) == (step % 10 == 9)
        cursors = {k: StreamCursor(5 * (step + 1), 0, 5 * (step + 1), json.dumps({"at": step})) for k in range(2)}
        made.note(step, replace(read(step, 0, 1, 2, 3), cursors=cursors if made.wants_cursors(step) else {}))
        made.write(step, made.record(step))
    again = journal(tmp_path)
    again.open(70)
    assert [one.position for one in again.known_cursors()[1]] == [350, 400, 450, 500]
    assert again.known_cursors() == made.known_cursors() and again.digests(70) == {m: 69_001 + m for m in range(4)}


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"0": 3}', '{"0": [[1, 2]]}', '{"0": [[1, 2, "3", 4]]}', "[" * 9999])
def test_a_file_that_holds_no_cursors_is_left_out(tmp_path, content):
    written(tmp_path, 3)
    (tmp_path / "cursors.json").write_text(content)
    again = journal(tmp_path)
    again.open(2)
    assert again.known_cursors() == {} and again.note(2, read(2, 0)) is None
