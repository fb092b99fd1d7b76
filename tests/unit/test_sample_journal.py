"""The journal of the samples of streams: the same samples each time, in 16 bytes a microbatch at most."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from raypar.actors.stream_digest_journal import StreamDigestJournal
from raypar.elastic.run_policy import RunPolicy
from raypar.plan.microbatches import BatchesOfSteps, Microbatches
from raypar.worker.data.microbatch_stream_positions import StreamCursor, StreamPositions, StreamsRead

CUT = Microbatches(4, 0, 11)


def journal(folder: Path, told: list[str] | None = None, streams: int = 2) -> StreamDigestJournal:
    tell = (told if told is not None else []).append
    return StreamDigestJournal(folder / "samples.bin", folder / "cursors.json", CUT, streams, 10, tell)


def read(step: int, *microbatches: int, other: int = 0) -> StreamsRead:
    return StreamsRead({m: 1000 * step + m + 1 + other for m in microbatches}, {m % 2: (step // 3, step) for m in microbatches})


def written(folder: Path, steps: int) -> StreamDigestJournal:
    made = journal(folder)
    made.open(0)
    for step in range(steps):
        assert made.note(step, read(step, 0, 2)) is None and made.note(step, read(step, 1, 3)) is None
        made.write(made.record(step))
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
    late = journal(tmp_path)
    late.open(20)
    assert late.note(3, StreamsRead(again={(0, 3): 2005})) is None  # before what was read of the file: not known
    assert again.note(5, read(5, 0)) is None  # new


def test_after_a_resume_with_other_data_or_batches_nothing_is_compared_with_what_was_read_before(tmp_path):
    written(tmp_path, 5)
    told = list[str]()
    again = journal(tmp_path, told)
    again.begin_anew(3)
    (line,) = told
    assert line.startswith(f"{again.path} forgets which samples were read in the 3 steps before: with other data or batches")
    assert again.note(3, read(3, 0, 1, other=7)) is None and again.known_epochs() == {0: ((1, 3),), 1: ((1, 3),)}
    again.write(again.record(3))
    later = journal(tmp_path)
    later.open(3)
    assert later.note(3, read(3, 0, 1)) is not None and later.note(4, read(4, 0, other=9)) is None


def test_the_first_microbatches_of_other_batches_have_none_before_them_to_compare(tmp_path):
    positions = StreamPositions(2, Microbatches(4, 0, 11, (BatchesOfSteps(3, 3, 9),)))
    assert [positions.leading_to(3, m) for m in range(4)] == [[], [], [(3, 0)], [(3, 1)]]
    assert positions.leading_to(4, 3) == [(3, 1), (3, 3), (4, 1)]
    assert [positions.of(3, m).start for m in range(2)] == [3 * 6, 3 * 3] and positions.of(4, 0).start == 3 * 6 + 5


def test_who_begins_to_read_learns_where_epochs_begin(tmp_path):
    written(tmp_path, 8)
    again = journal(tmp_path)
    again.open(7)
    assert again.known_epochs() == dict.fromkeys(range(2), ((0, 2), (1, 5), (2, 7)))


def test_a_microbatch_takes_16_bytes_at_most(tmp_path):
    written(tmp_path, 1000)
    assert (tmp_path / "samples.bin").stat().st_size <= 16 * 4 * 1000


@pytest.mark.parametrize("content", [b"", b"something else" * 9, b"raypar-s"])
def test_a_file_of_something_else_is_begun_anew(tmp_path, content):
    (tmp_path / "samples.bin").write_bytes(content)
    made = written(tmp_path, 2)
    again = journal(tmp_path)
    again.open(0)
    assert again.record(1)[0][1] == made.record(1)[0][1]


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
    made.write(made.record(0))
    assert len(told) == 1 and "cannot be written" in told[0]


def test_positions_are_those_of_the_streams_read_in_turn():
    positions = StreamPositions(2, CUT)
    given = {0: 0, 1: 0}
    given_before: dict[int, list[tuple[int, int]]] = {0: [], 1: []}
    for step in range(3):
        for microbatch in range(4):
            stream, size = microbatch % 2, len(CUT.samples(microbatch))
            assert positions.of(step, microbatch) == range(given[stream], given[stream] + size)
            before = given_before[stream]
            assert positions.leading_to(step, microbatch) == [place for place in before if place[0] >= step - 1]
            given[stream], given_before[stream] = given[stream] + size, [*before, (step, microbatch)]


def test_cursors_of_the_last_steps_and_of_the_last_checkpoints_are_kept(tmp_path):
    made = journal(tmp_path)
    made.open(0)
    for step in range(100):
        assert made.wants_cursors(step) == (step % 10 in (7, 8)), "while the step before the last before a checkpoint is read"
        cursors = {k: StreamCursor(5 * (step + 1), 0, 5 * (step + 1), json.dumps({"at": step})) for k in range(2)}
        made.note(step, replace(read(step, 0, 1, 2, 3), cursors=cursors if step % 10 == 8 else {}))
        made.write(made.record(step))
    again = journal(tmp_path)
    again.open(70)
    assert [one.position for one in again.known_cursors()[1]] == [345, 395, 445, 495]
    assert again.known_cursors() == made.known_cursors() and again.digests(70) == {m: 69_001 + m for m in range(4)}


def test_what_a_driver_has_not_written_is_written_by_the_next_one_as_workers_report_it(tmp_path):
    written(tmp_path, 12)
    path = tmp_path / "samples.bin"
    whole = path.read_bytes()
    path.write_bytes(whole[: -2 * 6 * 8] + bytes(2 * 6 * 8))  # of steps 11 and 12
    again = journal(tmp_path)
    again.open(12)
    assert again.note_digests({(10, m): 10_001 + m for m in range(4)} | {(11, m): 11_001 + m for m in range(4)}) is None
    assert again.note_digests({(10, 3): 7}) is not None and again.note_digests({(3, 0): 7}) is None  # long written
    assert again.note(12, read(12, 0, 1, 2, 3)) is None
    again.write(again.record(12))
    later = journal(tmp_path)
    later.open(13)
    assert [later.digests(step) for step in (11, 12)] == [{m: 1000 * step + m + 1 for m in range(4)} for step in (10, 11)]


def test_what_is_read_again_and_cannot_be_compared_is_told(tmp_path):
    told: list[str] = []
    made = journal(tmp_path, told)
    made.open(0)
    for step in range(3):
        assert made.note(step, read(step, 0, 2)) is None  # the worker with microbatches 1 and 3 dies
        made.write(made.record(step))
    assert told == []
    assert made.note(3, replace(read(3, 1, 3), again={(2, 0): 2001, (2, 1): 7, (2, 3): 7})) is None
    assert made.note(1, read(1, 0, 1)) is None
    why = "read again, and the samples could not be compared: the worker that had read them before died without a report"
    assert told == [f"step 3, microbatches 1, 3 were {why}", f"step 2, microbatch 1 was {why}"]
    assert made.note(3, StreamsRead(again={(2, 1): 8})) is not None, "from then on it is known"
    again = journal(tmp_path, told)
    again.open(0)
    again.note(0, read(0, 1))
    assert told[2:] == [f"step 1, microbatch 1 was {why}"], "after a resume too"


@pytest.mark.parametrize("content", [None, b"", b"raypar-s" + bytes(24), b"cut"])
def test_a_run_that_goes_on_without_the_file_says_that_nothing_is_compared(tmp_path, content: bytes | None):
    written(tmp_path, 5)
    path, told = tmp_path / "samples.bin", list[str]()
    whole = path.read_bytes()
    path.unlink() if content is None else path.write_bytes(whole[:200] if content == b"cut" else content)
    journal(tmp_path, told).open(5)
    assert told == [
        f"{path} does not say which samples were read before: that the streams give the same again after 5 steps cannot be "
        "checked\n  cure: put the file back if there is a copy; else make sure that the data has not changed"
    ]
    path.write_bytes(whole)
    for done in (0, 5):
        journal(tmp_path, told).open(done)
    assert len(told) == 1


def test_a_run_of_forward_passes_has_no_journal_and_says_nothing_of_places_in_streams(tmp_path):
    folder = SimpleNamespace(samples=tmp_path / "samples.bin", cursors=tmp_path / "cursors.json")

    def of_run(streams: int | None, passes: int) -> StreamDigestJournal | None:
        policy = RunPolicy(workers=1, job_steps=9, forward_passes=passes, save_every=10)
        request = SimpleNamespace(contract={"data": {"streams": streams}}, policy=policy, batching=CUT)
        return StreamDigestJournal.of_run(request, folder, print)  # type: ignore[arg-type]

    assert of_run(2, 3) is None and of_run(None, 0) is None
    made = of_run(2, 0)
    assert made is not None and made.streams == 2


def test_the_time_that_finding_places_takes_is_told_before(tmp_path):
    made = journal(tmp_path)
    made.open(0)
    assert made.line_about_places(900, 2) is None, "9,900 samples"
    assert "nobody knows" in str(made.line_about_places(5000, 2))
    made.note(0, replace(read(0, 0, 1, 2, 3), read=(11, 0.011)))
    assert made.line_about_places(1000, 4) == (
        "up to 5,994 samples of each of 2 streams are read again to find the place after 1,000 steps: about 5 s at the rate of "
        "the run so far, 1,000 a second\n"
        "  cure: give the data set state_dict and load_state_dict that lead to the next sample; of a ray.data.Dataset, "
        "read the files that its write_parquet(FOLDER) has written"
    )
    made.note(998, replace(read(998, 0, 1, 2, 3), cursors={k: StreamCursor(5 * 998, 0, 5 * 998, "{}") for k in range(2)}))
    made.note(999, read(999, 0, 1, 2, 3))
    made.write(made.record(999))
    again = journal(tmp_path)
    again.open(1000)
    assert again.line_about_places(1000, 4) is None and again.known_cursors() == made.known_cursors()


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"0": 3}', '{"0": [[1, 2]]}', '{"0": [[1, 2, "3", 4]]}', "[" * 9999])
def test_a_file_that_holds_no_cursors_is_left_out(tmp_path, content):
    written(tmp_path, 3)
    (tmp_path / "cursors.json").write_text(content)
    again = journal(tmp_path)
    again.open(2)
    assert again.known_cursors() == {} and again.note(2, read(2, 0)) is None
