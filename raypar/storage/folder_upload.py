"""Copies a run's working folder to shared storage in a thread of the driver: documents whole, other files in parts.

Training writes only to the working folder, so a storage that does not answer delays no step. Files that could not be sent stay
in the folder and are sent when the storage answers again.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from raypar.errors import ClusterError, ConfigError, LeaseLostError, RayparError
from raypar.files.atomic_write import regular_file_opener
from raypar.files.untrusted_files import read_limited_bytes
from raypar.record.folder import DOCUMENTS, LINE_FILES, RECORD_FILES
from raypar.storage.filesystems import is_object_store, open_filesystem, storage_errors
from raypar.storage.folder_download import PIECE_BYTES
from raypar.storage.pyarrow_store import write_atomically
from raypar.storage.storage_uri import StorageUri
from raypar.storage.stored_file_layout import (
    RECORD_PIECE_BYTES,
    REWRITTEN_PIECES,
    SENT_DOCUMENT_BYTES,
    TEMPORARY_SUFFIXES,
    Chunk,
    add_lines,
    chunks_to_write,
    first_line_of_name,
    name_of_piece,
    number_of_piece,
)

if TYPE_CHECKING:
    from pyarrow.fs import FileSystem

UPLOAD_S = 2.0
"""Time between two passes over the folder. A document that changes all the time is sent once in each pass."""
OTHERS_S, MOST_OTHERS = 30.0, 1000
"""For files of callbacks and trackers: the least time between two uploads of a file, and the most files that are sent."""
BACKOFF_S = 30.0
"""The longest pause after a failed pass; pauses double up to it."""
FINISH_S = 120.0
"""How long the end of a run waits until everything is sent."""

FileSignature = tuple[int, int, int] | None
"""(inode, bytes, time of change) of a file; None: there is none."""


def file_signature(path: Path) -> FileSignature:
    """The file's inode, size and time of change: another signature means that the file has changed."""
    try:
        found = os.lstat(path)
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns


class LineFileUpload:
    """Sends one file of lines as chunks."""

    def __init__(self, path: Path, filesystem: FileSystem, folder: str, may_write: Callable[[], None]) -> None:
        self.path = path
        """The file in the working folder."""
        self.filesystem = filesystem
        """The file system of pyarrow."""
        self.folder = folder
        """The folder of its chunks on the storage."""
        self.may_write = may_write
        """Raises if nothing may be written now."""
        self.chunks: tuple[Chunk, ...] | None = None
        """The chunks that are on the storage; None: not known yet."""
        self.inode = 0
        """The file's inode when it was last sent; it changes when the file is replaced."""

    @property
    def sent(self) -> int:
        """How many bytes of the file are on the storage."""
        return self.chunks[-1].start + self.chunks[-1].nbytes if self.chunks else 0

    def send(self) -> None:
        """Send the lines that are not on the storage yet. Raises what pyarrow and `may_write` raise, and `OSError`."""
        try:
            file = open(self.path, "rb", opener=regular_file_opener)  # noqa: SIM115  closed below
        except FileNotFoundError:
            if self.chunks is None:
                self._remove(self._names_there())
                self.chunks = ()
            return
        with file:
            about = os.fstat(file.fileno())
            if self.chunks is not None and (about.st_ino != self.inode or about.st_size < self.sent):
                self.chunks = None
            before = self.chunks or ()
            after = add_lines(before, _line_sizes(file, self.sent))
            if self.chunks is None:
                self._replace(file, after)
            else:
                write, superseded = chunks_to_write(before, after)
                for chunk in write:
                    self._put(file, chunk)
                self._remove(set(superseded))
            self.chunks, self.inode = after, about.st_ino

    def _replace(self, file: BinaryIO, chunks: Sequence[Chunk]) -> None:
        """Write all chunks and remove all others, which may be left of a longer file that began with the same lines.

        From the last chunk to the first: until a reader finds the new lines, it finds the old file, or the beginning of it.
        """
        stale = self._names_there() - {chunk.name for chunk in chunks}
        beyond = {name for name in stale if not chunks or name > chunks[-1].name}
        self._remove(beyond)
        for chunk in reversed(chunks):
            self._put(file, chunk)
        self._remove(stale - beyond)

    def _names_there(self) -> set[str]:
        """The names of all chunks that are on the storage now."""
        from pyarrow.fs import FileSelector

        found = self.filesystem.get_file_info(FileSelector(self.folder, allow_not_found=True))
        return {info.base_name for info in found if first_line_of_name(info.base_name) is not None}

    def _remove(self, names: set[str]) -> None:
        for name in sorted(names, reverse=True):
            self.may_write()
            with contextlib.suppress(FileNotFoundError):
                self.filesystem.delete_file(f"{self.folder}/{name}")

    def _put(self, file: BinaryIO, chunk: Chunk) -> None:
        """Write one chunk; replaces an object of the same name."""
        self.may_write()
        if not is_object_store(self.filesystem):
            self.filesystem.create_dir(self.folder, recursive=True)
        file.seek(chunk.start)
        write_atomically(self.filesystem, f"{self.folder}/{chunk.name}", file, chunk.nbytes)


class RecordFileUpload:
    """Sends one file of records in pieces of one size: those that it has more, and the last ones where they have changed."""

    def __init__(self, path: Path, filesystem: FileSystem, folder: str, may_write: Callable[[], None]) -> None:
        self.path = path
        """The file in the working folder."""
        self.filesystem = filesystem
        """The file system of pyarrow."""
        self.folder = folder
        """The folder of its pieces on the storage."""
        self.may_write = may_write
        """Raises if nothing may be written now."""
        self.sent: list[bytes] | None = None
        """Digest of each piece that is on the storage; None: not known yet."""
        self.signature: FileSignature = None
        """The file's signature when it was sent last."""

    def send(self) -> None:
        """Send what is not on the storage yet. Raises what pyarrow and `may_write` raise, and `OSError`."""
        signature = file_signature(self.path)
        if self.sent is not None and signature == self.signature:
            return
        before, pieces = self.sent or [], 0 if signature is None else -(-signature[1] // RECORD_PIECE_BYTES)
        if self.sent is None or pieces < len(before):
            self._remove_from(pieces)
        sent: list[bytes] = []
        if pieces:
            with open(self.path, "rb", opener=regular_file_opener) as file:
                begun_anew = before[:1] != [_digest(file.read(RECORD_PIECE_BYTES))]
                sent = before[: 0 if begun_anew else max(0, len(before) - REWRITTEN_PIECES)]
                file.seek(len(sent) * RECORD_PIECE_BYTES)
                while piece := file.read(RECORD_PIECE_BYTES):
                    if before[len(sent) : len(sent) + 1] != [_digest(piece)]:
                        self._put(len(sent), piece)
                    sent.append(_digest(piece))
        self.sent, self.signature = sent, signature

    def _put(self, number: int, piece: bytes) -> None:
        self.may_write()
        if not is_object_store(self.filesystem):
            self.filesystem.create_dir(self.folder, recursive=True)
        write_atomically(self.filesystem, f"{self.folder}/{name_of_piece(number)}", io.BytesIO(piece), len(piece))

    def _remove_from(self, first: int) -> None:
        """Remove the pieces from a number on: the file was begun anew, or was another run's."""
        from pyarrow.fs import FileSelector

        infos = self.filesystem.get_file_info(FileSelector(self.folder, allow_not_found=True))
        found = {number: info.path for info in infos if (number := number_of_piece(info.base_name)) is not None}
        for number in sorted(found, reverse=True):
            if number >= first:
                self.may_write()
                with contextlib.suppress(FileNotFoundError):
                    self.filesystem.delete_file(found[number])


def _digest(piece: bytes) -> bytes:
    return hashlib.blake2b(piece, digest_size=16).digest()


def _line_sizes(file: BinaryIO, start: int) -> Iterator[int]:
    """The sizes of the complete lines from an offset on; a last line without a line break is left out."""
    file.seek(start)
    size = 0
    while piece := file.read(PIECE_BYTES):
        for line in io.BytesIO(piece):
            size += len(line)
            if line.endswith(b"\n"):
                yield size
                size = 0


class FolderUpload:
    """Sends a working folder to its place on shared storage, until `finish`."""

    def __init__(self, folder: Path, uri: StorageUri, may_write: Callable[[], None]) -> None:
        self.folder = folder
        """The working folder."""
        self.uri = uri
        """The run's place."""
        self.may_write = may_write
        """Raises `LeaseLostError` if nothing may be written any more, another `ClusterError` if not now."""
        self.filesystem: Any = None
        """The file system of pyarrow; None before the thread has opened it."""
        self.files: list[LineFileUpload | RecordFileUpload] = []
        """The files of lines and of records."""
        self.sent: dict[str, FileSignature] = {}
        """File -> its signature when it was sent last."""
        self.sent_s: dict[str, float] = {}
        """File of a callback -> when it was sent last."""
        self.failing = False
        """Whether the last attempt failed."""
        self.complete = False
        """Whether the thread has ended with everything sent."""
        self.notes: list[tuple[str, str]] = []
        """(kind, text) of lines for the user, not yet taken."""
        self.lost: LeaseLostError | None = None
        """The error with which the thread has ended: the lease is another process's; None if there was none."""
        self._said: set[str] = set()
        """Warnings that were given already; each is given once."""
        self._stopped = threading.Event()
        """Set by `finish` and `abandon`: no further pass begins after the one that sends what is left."""
        self._given_up = threading.Event()
        """Set when nothing more may be sent."""
        self._thread = threading.Thread(target=self._run, name="raypar-upload", daemon=True)
        """The thread that sends."""

    def start(self) -> None:
        """Begin to send, in a thread."""
        self._thread.start()

    def take_notes(self) -> list[tuple[str, str]]:
        """The lines for the user since the last call, as (kind, text)."""
        notes, self.notes = self.notes, []
        return notes

    def finish(self, seconds: float = FINISH_S) -> None:
        """Send all that is left and end the thread. Raises `ClusterError` if that is not done within `seconds`."""
        self._stopped.set()
        self._thread.join(seconds)
        if self.lost is not None:
            raise self.lost
        self._given_up.set()
        if not self.complete:
            raise ClusterError(
                f"{self.uri} has not taken the run's last files within {seconds:g} s: they are in {self.folder}",
                cure="copy them from there; checkpoints that were reported are whole",
            )

    def abandon(self) -> None:
        """End the thread without sending more: another driver sends now, or the lease is lost."""
        self._given_up.set()
        self._stopped.set()

    def _run(self) -> None:
        pause_s, last = 0.0, False
        while not last or self.failing:
            if self._stopped.is_set():
                self._given_up.wait(min(pause_s, 1.0) if last else 0.0)
            last = self._stopped.wait(pause_s)
            if self._given_up.is_set():
                return
            try:
                with storage_errors(f"{self.uri} does not take the run's files", ClusterError):
                    self._send()
            except LeaseLostError as error:
                self.lost = error
                return
            except RayparError as error:
                pause_s = min(BACKOFF_S, max(UPLOAD_S, 2 * pause_s))
                if not self.failing:
                    text = f"{error.what}; they stay in {self.folder} and are sent when it takes files again"
                    self.notes.append(("warning", f"{text}\n  cure: {error.cure}"))
                self.failing = True
            else:
                if self.failing:
                    self.notes.append(("note", f"{self.uri} takes the run's files again: nothing is lost"))
                self.failing, pause_s = False, UPLOAD_S
        self.complete = True

    def _send(self) -> None:
        """Send every file that has changed. Raises what pyarrow raises, `OSError` and `LeaseLostError`."""
        if not self.files:
            filesystem, path = open_filesystem(self.uri)
            if not is_object_store(filesystem):
                self.may_write()
                filesystem.create_dir(path, recursive=True)
            self.filesystem = filesystem
            self.files = [
                kind(self.folder / name, filesystem, f"{path}/{name}", self.may_write)
                for kind, names in ((LineFileUpload, LINE_FILES), (RecordFileUpload, RECORD_FILES))
                for name in names
            ]
        path = open_filesystem(self.uri)[1]
        for name in DOCUMENTS:
            self._send_document(name, f"{path}/{name}")
        for file in self.files:
            file.send()
        for name in self._other_files():
            self._send_other(name, f"{path}/{name}")

    def _other_files(self) -> list[str]:
        """Relative paths of the regular files that callbacks and trackers have put into the working folder."""
        found: list[str] = []
        for folder, folders, files in os.walk(self.folder):
            folders[:] = [name for name in folders if not name.startswith(".") and name.isprintable()]
            names = [
                name
                for name in files
                if name.isprintable() and not name.startswith(".") and not name.endswith(TEMPORARY_SUFFIXES)
            ]
            paths = [Path(folder, name) for name in names]
            found += [path.relative_to(self.folder).as_posix() for path in paths if path.is_file() and not path.is_symlink()]
        others = sorted(set(found) - {*DOCUMENTS, *LINE_FILES, *RECORD_FILES})
        if len(others) > MOST_OTHERS:
            self._say_once(
                f"callbacks have put more than {MOST_OTHERS:,} files into the run folder: the others are not sent to {self.uri}"
            )
        return others[:MOST_OTHERS]

    def _send_other(self, name: str, there: str) -> None:
        """Send a callback's file if it has changed, at most once in `OTHERS_S`, because it is always sent whole."""
        now, now_s = file_signature(self.folder / name), time.monotonic()
        recent = now_s - self.sent_s.get(name, -OTHERS_S) < OTHERS_S and not self._stopped.is_set()
        if now is None or self.sent.get(name) == now or recent:
            return
        with contextlib.suppress(FileNotFoundError), open(self.folder / name, "rb", opener=regular_file_opener) as file:
            self.may_write()
            if not is_object_store(self.filesystem):
                self.filesystem.create_dir(there.rpartition("/")[0], recursive=True)
            write_atomically(self.filesystem, there, file, os.fstat(file.fileno()).st_size)
        self.sent[name], self.sent_s[name] = now, now_s

    def _say_once(self, text: str) -> None:
        """Warn the user, if this warning was not given before."""
        if text not in self._said:
            self._said.add(text)
            self.notes.append(("warning", text))

    def _send_document(self, name: str, there: str) -> None:
        """Send a document if it has changed. In the first pass, remove one that an earlier start has left on the storage."""
        now = file_signature(self.folder / name)
        if name in self.sent and now in (None, self.sent[name]):  # a run removes no document: others did
            return
        self.may_write()
        if now is None:
            with contextlib.suppress(FileNotFoundError):
                self.filesystem.delete_file(there)
        elif (content := self._content(name)) is not None:
            write_atomically(self.filesystem, there, io.BytesIO(content), len(content))
        self.sent[name] = now

    def _content(self, name: str) -> bytes | None:
        """The content of a document; None, with a warning, if it is not a regular file or is too large."""
        try:
            return read_limited_bytes(self.folder / name, follow=False, limit=SENT_DOCUMENT_BYTES)
        except ConfigError as error:
            self._say_once(f"{error.what}: it is not sent to {self.uri}")
            return None
