"""A run's working folder on shared storage: few objects, and readers see each line once, wherever a writer was killed."""

import itertools
import random
from pathlib import Path
from typing import Any, cast

import pytest

from raypar.actors.stream_digest_journal import StreamDigestJournal
from raypar.errors import ClusterError, ConfigError, LeaseLostError
from raypar.plan.microbatches import Microbatches
from raypar.storage import folder_download, folder_upload, pyarrow_store, stored_file_layout
from raypar.storage.filesystems import uri_of_filesystem_object
from raypar.storage.folder_download import _download_lines, download_run
from raypar.storage.folder_upload import FolderUpload, LineFileUpload, RecordFileUpload
from raypar.storage.storage_uri import StorageUri
from raypar.storage.stored_file_layout import (
    FULL_CHUNK_BYTES,
    MERGE_LEVELS,
    MERGED_CHUNKS,
    Chunk,
    add_lines,
    chunks_to_write,
    first_line_of_name,
)
from raypar.worker.data.microbatch_stream_positions import StreamCursor, StreamsRead

PLACE = StorageUri("s3", "bucket/run/metrics.jsonl")


def test_a_thousand_steps_are_two_objects_and_ten_million_some_tens():
    assert len(add_lines((), [300] * 1000)) == 2
    chunks: tuple[Chunk, ...] = ()
    for _ in range(40):  # 4 GB
        chunks = add_lines(chunks, [FULL_CHUNK_BYTES] * 400)
    assert len(chunks) <= MERGED_CHUNKS * MERGE_LEVELS + 16_000 // MERGED_CHUNKS**MERGE_LEVELS + 1
    assert sum(chunk.lines for chunk in chunks) == 16_000


def test_where_lines_are_cut_does_not_depend_on_when_they_were_written():
    chance = random.Random(7)
    sizes = [chance.randrange(1, FULL_CHUNK_BYTES // 3) for _ in range(600)]
    at_once, piecewise, at = add_lines((), sizes), (), 0
    while at < len(sizes):
        step = chance.randrange(1, 9)
        piecewise, at = add_lines(piecewise, sizes[at : at + step]), at + step
    assert piecewise == at_once
    assert all(a.first + a.lines == b.first and a.start + a.nbytes == b.start for a, b in itertools.pairwise(at_once))


def test_only_what_has_changed_is_written_and_what_was_put_together_is_removed():
    before = add_lines((), [FULL_CHUNK_BYTES] * (MERGED_CHUNKS - 1))
    after = add_lines(before, [FULL_CHUNK_BYTES, 5])
    write, remove = chunks_to_write(before, after)
    assert [(c.first, c.lines, c.level) for c in write] == [(1, MERGED_CHUNKS, 1), (MERGED_CHUNKS + 1, 1, 0)]
    assert remove == [chunk.name for chunk in before[1:]]


@pytest.mark.parametrize("name", ["1.jsonl", "000000000000.jsonl", "../000000000001.jsonl", "000000000001.jsonl.tmp", ""])
def test_other_names_are_no_chunks(name: str):
    assert first_line_of_name(name) is None


class Killed(Exception):
    """The end of the writing process."""


class Dies:
    """A file system whose user is killed before the `after`th call that changes something."""

    def __init__(self, filesystem: Any, after: int) -> None:
        self.filesystem, self.left = filesystem, after

    def __getattr__(self, name: str) -> Any:
        if name in ("move", "delete_file"):
            self.left -= 1
            if self.left < 0:
                raise Killed
        return getattr(self.filesystem, name)


def read(filesystem: Any, folder: str, tmp_path: Path) -> list[bytes]:
    out = tmp_path / "read"
    _download_lines(filesystem, PLACE, folder, out, None)
    return out.read_bytes().splitlines(keepends=True)


@pytest.mark.parametrize("kills", [range(0, 60, 4), pytest.param(range(60), marks=pytest.mark.ci)], ids=["some", "all"])
def test_a_writer_killed_anywhere_leaves_every_line_once_and_the_next_one_goes_on(
    kills: range, tmp_path: Path, monkeypatch: Any
):
    from pyarrow.fs import LocalFileSystem

    monkeypatch.setattr(stored_file_layout, "FULL_CHUNK_BYTES", 40)  # two or three lines
    filesystem, file = LocalFileSystem(), tmp_path / "metrics.jsonl"
    lines = [b'{"step": %d}\n' % step for step in range(1, 90)]
    for after in kills:
        folder = str(tmp_path / f"chunks-{after}")
        dying, seen = Dies(filesystem, after), 0
        upload = LineFileUpload(file, dying, folder, lambda: None)
        file.write_bytes(b"")
        try:
            for step in range(0, len(lines), 4):
                with open(file, "ab") as out:
                    out.write(b"".join(lines[step : step + 4]) + b'{"st')  # being written
                upload.send()
                seen = step + 4
                file.write_bytes(b"".join(lines[: step + 4]))
        except Killed:
            pass
        there = read(filesystem, folder, tmp_path)
        assert there == lines[: len(there)] and len(there) >= min(seen, len(lines)), f"killed before change {after}"
        LineFileUpload(file, filesystem, folder, lambda: None).send()
        assert read(filesystem, folder, tmp_path) == [line for line in file.open("rb") if line.endswith(b"\n")]
        assert len(list(Path(folder).glob("*.jsonl"))) <= 3 * MERGED_CHUNKS


def test_a_file_that_was_written_anew_takes_the_place_of_the_old_one(tmp_path: Path, monkeypatch: Any):
    """A resumed run begins after its checkpoint: lines of steps that are run again must not be seen beside the new ones."""
    from pyarrow.fs import LocalFileSystem

    monkeypatch.setattr(stored_file_layout, "FULL_CHUNK_BYTES", 40)
    filesystem, file = LocalFileSystem(), tmp_path / "metrics.jsonl"
    before = [b"step %d\n" % n for n in range(30)]
    for longer, added, after in itertools.product((5, 60), (0, 1, 12), range(14)):
        folder = str(tmp_path / f"chunks-{longer}-{added}-{after}")
        old, new = [*before, *[b"old %d\n" % n for n in range(longer)]], [*before, *[b"new %d\n" % n for n in range(added)]]
        file.write_bytes(b"".join(old))
        LineFileUpload(file, filesystem, folder, lambda: None).send()
        file.write_bytes(b"".join(new))
        try:
            LineFileUpload(file, Dies(filesystem, after), folder, lambda: None).send()
        except Killed:
            there = read(filesystem, folder, tmp_path)
            assert there[:30] == before[: len(there)]
            assert added or there in (old[: len(there)], new), f"killed before change {after}"
        LineFileUpload(file, filesystem, folder, lambda: None).send()
        assert read(filesystem, folder, tmp_path) == new


def test_hostile_chunks_are_left_out_or_refused(tmp_path: Path):
    from pyarrow.fs import LocalFileSystem

    folder = tmp_path / "chunks"
    (folder / "000000000009.jsonl").mkdir(parents=True)
    (folder / "000000000001.jsonl").write_bytes(b"a\nb\n")
    (folder / "000000000002.jsonl").write_bytes(b"superseded\n")
    (folder / "evil.jsonl").write_bytes(b"x\n")
    assert read(LocalFileSystem(), str(folder), tmp_path) == [b"a\n", b"b\n"]
    with open(folder / "000000000003.jsonl", "wb") as file:
        file.truncate(5 << 30)
    with pytest.raises(ConfigError, match="more than a run writes"):
        read(LocalFileSystem(), str(folder), tmp_path)


def test_a_working_folder_is_sent_with_what_callbacks_put_there_and_nothing_else(tmp_path: Path, monkeypatch: Any):
    """What a former start has left and this one has not (an error.txt) is removed; links and unfinished files are not sent."""
    from fsspec.implementations.local import LocalFileSystem as Fsspec
    from pyarrow.fs import FSSpecHandler, PyFileSystem

    place = uri_of_filesystem_object(PyFileSystem(FSSpecHandler(Fsspec())), str(tmp_path / "there"))
    folder, there = tmp_path / "work", tmp_path / "there"
    for path, text in {
        "work/job.yaml": "steps: 1\n",
        "work/metrics.jsonl": '{"step": 1}\n',
        "work/tensorboard/events.1": "board",
        "work/.hidden": "x",
        "work/plan.new": "x",
        "secret": "x",
        "there/error.txt": "former",
        "there/checkpoints/step_00000001/manifest.json": "{}",
    }.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    (folder / "link").symlink_to(tmp_path / "secret")
    assert isinstance(place, StorageUri)
    upload = FolderUpload(folder, place, lambda: None)
    upload.start()
    upload.finish(30)
    files = {path.relative_to(there).as_posix(): path.read_text() for path in there.rglob("*") if path.is_file()}
    assert files == {
        "job.yaml": "steps: 1\n",
        "metrics.jsonl/000000000001.jsonl": '{"step": 1}\n',
        "tensorboard/events.1": "board",
        "checkpoints/step_00000001/manifest.json": "{}",
    }
    assert upload.take_notes() == []


class Counting:
    """A file system that counts what is written and removed."""

    def __init__(self, filesystem: Any) -> None:
        self.filesystem, self.done = filesystem, list[str]()

    def __getattr__(self, name: str) -> Any:
        if name in ("move", "delete_file"):
            return lambda *paths: self.done.append(Path(paths[-1]).name) or getattr(self.filesystem, name)(*paths)
        return getattr(self.filesystem, name)


def test_a_file_of_records_is_sent_in_pieces_of_which_only_those_at_its_end_are_sent_again(tmp_path: Path, monkeypatch: Any):
    from pyarrow.fs import LocalFileSystem

    for module in (folder_upload, folder_download):
        monkeypatch.setattr(module, "RECORD_PIECE_BYTES", 100)
    file, there, filesystem = tmp_path / "samples.bin", tmp_path / "there", Counting(LocalFileSystem())
    upload = RecordFileUpload(file, cast(Any, filesystem), str(there), lambda: None)

    def sends() -> list[str]:
        filesystem.done.clear()
        upload.send()
        out = tmp_path / "read"
        folder_download._download_pieces(LocalFileSystem(), PLACE, str(there), out)
        assert (out.read_bytes() if out.exists() else b"") == (file.read_bytes() if file.exists() else b"")
        return filesystem.done

    def write(at: int, count: int, value: int = 1) -> None:
        with open(file, "r+b" if file.exists() else "w+b") as out:
            out.seek(at)
            out.write(bytes([value]) * count)

    assert sends() == []
    write(0, 450)
    assert sends() == [f"0000000{number}.bin" for number in range(5)]
    assert sends() == []
    write(450, 70)
    assert sends() == ["00000004.bin", "00000005.bin"]
    write(470, 10, 2)  # a step that was executed again
    assert sends() == ["00000004.bin"]
    file.write_bytes(b"anew" * 40)
    assert sends() == [*(f"0000000{number}.bin" for number in (5, 4, 3, 2)), "00000000.bin", "00000001.bin"]
    write(160, 400)
    assert sends() == [f"0000000{number}.bin" for number in range(1, 6)]
    file.write_bytes(b"x" * 560)  # begun anew, and as long
    assert sends() == [f"0000000{number}.bin" for number in range(6)]
    upload = RecordFileUpload(file, cast(Any, filesystem), str(there), lambda: None)
    file.unlink()
    assert sends() == [f"0000000{number}.bin" for number in range(5, -1, -1)]


def test_a_record_file_is_taken_up_to_the_first_piece_that_is_missing_or_short(tmp_path: Path, monkeypatch: Any):
    from pyarrow.fs import LocalFileSystem

    monkeypatch.setattr(folder_download, "RECORD_PIECE_BYTES", 4)
    there, out = tmp_path / "there", tmp_path / "samples.bin"
    there.mkdir()
    for name, content in {"00000000.bin": b"abcd", "00000001.bin": b"ef", "00000002.bin": b"ghij", "other": b"x"}.items():
        (there / name).write_bytes(content)
    (there / "00000003.bin").mkdir()
    folder_download._download_pieces(LocalFileSystem(), PLACE, str(there), out)
    assert out.read_bytes() == b"abcdef"
    (there / "00000000.bin").unlink()
    folder_download._download_pieces(LocalFileSystem(), PLACE, str(there), out)
    assert not out.exists()
    with open(there / "00000004.bin", "wb") as file:
        file.truncate(5 << 30)
    with pytest.raises(ConfigError, match="more than a run writes"):
        folder_download._download_pieces(LocalFileSystem(), PLACE, str(there), out)


def test_a_run_that_goes_on_from_shared_storage_has_the_journal_of_its_samples_and_their_cursors(tmp_path: Path):
    from fsspec.implementations.local import LocalFileSystem as Fsspec
    from pyarrow.fs import FSSpecHandler, PyFileSystem

    place = uri_of_filesystem_object(PyFileSystem(FSSpecHandler(Fsspec())), str(tmp_path / "there"))
    assert isinstance(place, StorageUri)
    work, again, shown = (tmp_path / name for name in ("work", "again", "shown"))
    for folder in (work, again, shown):
        folder.mkdir()

    def journal(folder: Path) -> StreamDigestJournal:
        return StreamDigestJournal(folder / "samples.bin", folder / "cursors.json", Microbatches(2, 0, 8), 2, 10, print)

    first, upload = journal(work), FolderUpload(work, place, lambda: None)
    upload.start()
    first.open(0)
    for step in range(20):
        cursors = {k: StreamCursor(4 * step, 0, 4 * step, f'{{"at": {step}}}') for k in range(2)}
        first.note(step, StreamsRead({0: step + 1, 1: step + 100}, {0: (0, 0), 1: (1, step + 1)}, cursors))
        first.write(first.record(step))
    upload.finish(30)
    download_run(place, again, records=True)
    second = journal(again)
    second.open(20)
    assert second.digests(20) == {0: 20, 1: 119} and second.known_cursors() == first.known_cursors()
    assert second.known_epochs() == {1: ((1, 20),)} and second.note(19, StreamsRead({0: 7})) is not None
    download_run(place, shown)
    assert not (shown / "samples.bin").exists(), "who only looks at a run needs none"


def test_a_storage_that_does_not_answer_is_told_once_and_gets_everything_later(tmp_path: Path, monkeypatch: Any):
    from fsspec.implementations.local import LocalFileSystem as Fsspec
    from pyarrow.fs import FSSpecHandler, PyFileSystem

    monkeypatch.setattr(folder_upload, "UPLOAD_S", 0.01)
    monkeypatch.setattr(folder_upload, "BACKOFF_S", 0.02)
    place = uri_of_filesystem_object(PyFileSystem(FSSpecHandler(Fsspec())), str(tmp_path / "there"))
    assert isinstance(place, StorageUri)
    (tmp_path / "work").mkdir()
    (tmp_path / "work/metrics.jsonl").write_text('{"step": 1}\n')
    before, failures = folder_upload.write_atomically, []

    def put(*arguments: Any) -> None:
        if len(failures) < 5:
            failures.append(1)
            raise OSError("no answer")
        before(*arguments)

    monkeypatch.setattr(folder_upload, "write_atomically", put)
    upload = FolderUpload(tmp_path / "work", place, lambda: None)
    upload.start()
    upload.finish(60)
    assert (tmp_path / "there/metrics.jsonl/000000000001.jsonl").read_text() == '{"step": 1}\n'
    (first, text), (second, again) = upload.take_notes()
    assert (first, second) == ("warning", "note") and "no answer" in text and "they stay in" in text
    assert again.endswith("takes the run's files again: nothing is lost")
    failures[:] = []
    (tmp_path / "work/metrics.jsonl").write_text('{"step": 1}\n{"step": 2}\n')
    late = FolderUpload(tmp_path / "work", place, lambda: None)
    monkeypatch.setattr(folder_upload, "write_atomically", lambda *arguments: put(failures.clear()))
    late.start()
    with pytest.raises(ClusterError, match=r"has not taken the run's last files within 0.1 s: they are in .*work"):
        late.finish(0.1)


def test_an_upload_without_the_lease_writes_nothing_and_ends(tmp_path: Path):
    from fsspec.implementations.local import LocalFileSystem as Fsspec
    from pyarrow.fs import FSSpecHandler, PyFileSystem

    def lost() -> None:
        raise LeaseLostError("it is another's")

    place = uri_of_filesystem_object(PyFileSystem(FSSpecHandler(Fsspec())), str(tmp_path / "there"))
    assert isinstance(place, StorageUri)
    (tmp_path / "work").mkdir()
    (tmp_path / "work/metrics.jsonl").write_text('{"step": 1}\n')
    upload = FolderUpload(tmp_path / "work", place, lost)
    upload.start()
    with pytest.raises(LeaseLostError, match="it is another's"):
        upload.finish(30)
    assert not [path for path in (tmp_path / "there").rglob("*") if path.is_file()]


def test_a_shard_streams_to_a_slow_storage_in_bounded_memory(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(pyarrow_store, "PIECE_BYTES", 4)
    monkeypatch.setattr(pyarrow_store, "UNSENT_BYTES", 10)

    class Stream:
        """Sends nothing before it is flushed."""

        unsent = most = 0
        content = b""

        def write(self, piece: memoryview) -> None:
            self.content += bytes(piece)
            self.unsent += len(piece)
            self.most = max(self.most, self.unsent)

        def flush(self) -> None:
            self.unsent = 0

    stream, content = Stream(), bytes(range(200))
    writer = pyarrow_store.BoundedWriter(stream)
    assert writer.write(memoryview(content[:150])) == 150 and writer.write(content[150:]) == 50
    assert stream.content == content and stream.most <= 13
