"""Checkpoints on any file system of pyarrow: `PyarrowStore`, a `CheckpointStore` that never renames a folder.

    checkpoints/step_00000050/  manifest.json  worker_0000.1f0c8a5be2d4.safetensors  worker_0001.1f0c8a5be2d4.safetensors ...

An object store cannot move a folder. So each attempt at a checkpoint writes its files in their final folder, under names that
contain the attempt's id, and writes the manifest, which lists these names, last. A checkpoint exists once its manifest does; a
new manifest replaces a checkpoint of the same name.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
import uuid
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, BinaryIO

from raypar.errors import CheckpointError
from raypar.files.printable_text import shorten
from raypar.storage.filesystems import is_object_store, list_folders, open_filesystem, storage_errors
from raypar.storage.storage_uri import StorageUri

if TYPE_CHECKING:
    from pyarrow import NativeFile
    from pyarrow.fs import FileSystem

PIECE_BYTES = 16 << 20
"""The most that is written or read at once."""
UNSENT_BYTES = 64 << 20
"""After this many bytes a writer waits until they are sent, so that unsent data does not fill the memory."""
LISTED_MANIFEST_BYTES = 64 << 20
"""Size limit of a manifest that is read to find files of earlier attempts; those beside a larger one are kept."""
WRITE_CURE = "look at the storage; the last good checkpoint stays"
_ATTEMPT = re.compile(r"(?P<stem>.+)\.(?P<attempt>[0-9a-f]{12})(?P<suffix>\.[^.]+)?")
"""The name of a checkpoint's file, with the id of the attempt that wrote it."""
_BEGUN = re.compile(r"(?P<name>.+)@(?P<attempt>[0-9a-f]{12})")
"""The name of a checkpoint that is being written, with the id of the attempt."""


@dataclass(frozen=True)
class PyarrowFile:
    """An `OpenedFile` of a file system of pyarrow."""

    stream: NativeFile
    """The open `pyarrow.NativeFile`."""
    nbytes: int
    """See `OpenedFile`."""
    place: tuple[str, ...]
    """(path, size, time of change) of the file when it was opened."""

    def version(self) -> Hashable:
        """See `OpenedFile`."""
        return self.place

    def read_at(self, memory: memoryview, offset: int) -> int:
        """See `OpenedFile`."""
        done = 0
        while done < len(memory):
            piece = self.stream.read_at(min(PIECE_BYTES, len(memory) - done), offset + done)
            if not piece:
                break
            memory[done : done + len(piece)] = piece
            done += len(piece)
        return done


class BoundedWriter:
    """Writes into a stream of pyarrow without having more than `UNSENT_BYTES` in memory."""

    def __init__(self, stream: NativeFile) -> None:
        self.stream = stream
        """The open stream."""
        self.unsent = 0
        """Bytes written since the last flush."""

    def write(self, content: bytes | memoryview) -> int:
        """Write bytes. Raises what pyarrow raises."""
        view = memoryview(content).cast("B")
        for start in range(0, len(view), PIECE_BYTES):
            piece = view[start : start + PIECE_BYTES]
            self.stream.write(piece)
            self.unsent += len(piece)
            if self.unsent >= UNSENT_BYTES:
                self.stream.flush()
                self.unsent = 0
        return len(view)


@dataclass(frozen=True)
class PyarrowStore:
    """A `CheckpointStore` at a place on a file system of pyarrow. Equal stores see the same checkpoints in every process."""

    uri: StorageUri
    """The folder of the checkpoints."""
    last_file: str = "manifest.json"
    """The file that is written last: a checkpoint that has it is whole."""

    def checkpoint_location(self, name: str, file: str = "") -> str:
        """See `CheckpointStore`."""
        return str(self.uri.child(name, file))

    def absolute_location(self, name: str) -> str:
        """See `CheckpointStore`."""
        return self.checkpoint_location(name)

    def names(self) -> list[str]:
        """See `CheckpointStore`. Only whole checkpoints are listed."""
        with storage_errors(f"cannot read {self.uri}"):
            return sorted(name for name, whole in self._folders().items() if whole)

    def begin(self, name: str) -> str:
        """See `CheckpointStore`."""
        begun = f"{name}@{uuid.uuid4().hex[:12]}"
        filesystem, path = self._at(begun)
        if not is_object_store(filesystem):
            with storage_errors(f"cannot write {self.checkpoint_location(name)}", cure=WRITE_CURE):
                filesystem.create_dir(path, recursive=True)
        return begun

    def file_name(self, begun: str, file: str) -> str:
        """See `CheckpointStore`. The name contains the id of the attempt."""
        found = _BEGUN.fullmatch(begun)
        stem, dot, suffix = file.rpartition(".")
        return f"{stem or suffix}.{found['attempt']}{dot}{suffix if stem else ''}" if found else file

    @contextlib.contextmanager
    def write(self, name: str, file: str) -> Iterator[NativeFile]:
        """See `CheckpointStore`."""
        self._at(name, file)  # checks the names
        begun = _BEGUN.fullmatch(name)
        with open_for_writing(self.uri.child(begun["name"] if begun else name, file)) as writer:
            yield writer

    def commit(self, begun: str, name: str, last_file: str, content: bytes) -> None:
        """See `CheckpointStore`."""
        filesystem, path = self._at(name, last_file)
        with storage_errors(f"cannot write {self.checkpoint_location(name, last_file)}", cure=WRITE_CURE):
            write_atomically(filesystem, path, io.BytesIO(content), len(content))
        attempt = _BEGUN.fullmatch(begun)
        with contextlib.suppress(OSError, ValueError):  # leftovers do no harm
            for file, other in self._attempts(name):
                if attempt is not None and other != attempt["attempt"]:
                    filesystem.delete_file(self._at(name, file)[1])

    def has_file(self, name: str, file: str) -> bool:
        """See `CheckpointStore`."""
        from pyarrow.fs import FileType

        filesystem, path = self._at(name, file)
        with storage_errors(f"cannot read {self.checkpoint_location(name, file)}"):
            return filesystem.get_file_info(path).type is not FileType.NotFound

    def read(self, name: str, file: str, *, limit: int, cure: str) -> bytes:
        """See `CheckpointStore`."""
        with self.open(name, file, cure=cure) as opened:
            if opened.nbytes > limit:
                raise CheckpointError(
                    f"{shorten(self.checkpoint_location(name, file))} has {opened.nbytes:,} bytes, "
                    f"more than the {limit:,} that are read",
                    cure=cure,
                )
            with storage_errors(f"cannot read {self.checkpoint_location(name, file)}", cure=cure):
                return bytes(opened.stream.read(limit))

    @contextlib.contextmanager
    def open(self, name: str, file: str, *, cure: str) -> Iterator[PyarrowFile]:
        """See `CheckpointStore`."""
        from pyarrow.fs import FileType

        filesystem, path = self._at(name, file)
        what = f"cannot read {shorten(self.checkpoint_location(name, file))}"
        with storage_errors(what, cure=cure):
            info = filesystem.get_file_info(path)
            if info.type is not FileType.File:
                why = "there is no such file" if info.type is FileType.NotFound else "it is no regular file"
                raise CheckpointError(f"{what}: {why}", cure=cure)
            stream = filesystem.open_input_file(path)
        with contextlib.closing(stream):
            with storage_errors(what, cure=cure):
                nbytes = stream.size()
            yield PyarrowFile(stream, nbytes, (path, nbytes, info.mtime_ns))

    def remove(self, name: str) -> None:
        """See `CheckpointStore`. Deletes the last file first: without it the rest is not a checkpoint."""
        begun = _BEGUN.fullmatch(name)
        with contextlib.suppress(Exception):
            filesystem, path = self._at(name)
            if begun is not None:
                others = 0
                for file, attempt in self._attempts(name):
                    if attempt == begun["attempt"]:
                        filesystem.delete_file(f"{path}/{file}")
                    else:
                        others += 1
                if others or filesystem.get_file_info(f"{path}/{self.last_file}").is_file:
                    return
            with contextlib.suppress(OSError):
                filesystem.delete_file(f"{path}/{self.last_file}")
            filesystem.delete_dir(path)

    def leftovers(self) -> list[tuple[str, str]]:
        """See `CheckpointStore`. In the folder of a whole checkpoint: the attempts whose files its last file does not list."""
        found = []
        with storage_errors(f"cannot read {self.uri}"):
            for name, whole in self._folders().items():
                attempts = {attempt for _, attempt in self._attempts(name)}
                if whole and len(attempts) > 1:
                    attempts -= self._attempts_in_use(name)
                elif whole:
                    continue
                found += [(f"{name}@{attempt}", name) for attempt in sorted(attempts)] or [(name, name)] * (not whole)
        return found

    # -- parts -------------------------------------------------------------------------------------------------------------

    def _at(self, name: str, file: str = "") -> tuple[FileSystem, str]:
        """(the file system, the path of a checkpoint's folder or of a file in it). Raises `CheckpointError` for names that
        lead out of the folder."""
        for part in (name, *([file] if file else [])):
            if not part or "/" in part or part in (".", "..") or not part.isprintable():
                raise CheckpointError(f"{part!r} names no file of a checkpoint in {self.uri}", cure="use another checkpoint")
        begun = _BEGUN.fullmatch(name)
        filesystem, path = open_filesystem(self.uri)
        return filesystem, "/".join([path, begun["name"] if begun else name, *([file] if file else [])])

    def _folders(self) -> dict[str, bool]:
        """Name of each folder at this place -> whether it has the last file. Raises what pyarrow raises."""
        from pyarrow.fs import FileType

        filesystem, path = open_filesystem(self.uri)
        names = [name for name in list_folders(filesystem, path) if not _BEGUN.fullmatch(name)]
        there = filesystem.get_file_info([f"{path}/{name}/{self.last_file}" for name in names]) if names else []
        return {name: info.type is FileType.File for name, info in zip(names, there, strict=True)}

    def _attempts(self, name: str) -> list[tuple[str, str]]:
        """(name, attempt) of each file in a checkpoint's folder whose name has an attempt's id. Raises what pyarrow raises."""
        from pyarrow.fs import FileSelector, FileType

        filesystem, path = self._at(name)
        infos = filesystem.get_file_info(FileSelector(path, allow_not_found=True))
        found = [(info.base_name, _ATTEMPT.fullmatch(info.base_name)) for info in infos if info.type is FileType.File]
        return [(file, match["attempt"]) for file, match in found if match]

    def _attempts_in_use(self, name: str) -> set[str]:
        """The attempts whose files a whole checkpoint lists; all attempts in its folder if its last file cannot be parsed."""
        try:
            files = json.loads(self.read(name, self.last_file, limit=LISTED_MANIFEST_BYTES, cure=""))["files"]
            found = [_ATTEMPT.fullmatch(file) for file in files]
        except (CheckpointError, ValueError, KeyError, TypeError, RecursionError):
            return {attempt for _, attempt in self._attempts(name)}
        return {match["attempt"] for match in found if match}


def file_exists(uri: StorageUri) -> bool:
    """Whether there is a file. Raises `CheckpointError` for a storage that does not answer."""
    filesystem, path = open_filesystem(uri)
    with storage_errors(f"cannot read {uri}", cure="look at the storage, and at what this machine may read there"):
        return bool(filesystem.get_file_info(path).is_file)


@contextlib.contextmanager
def open_for_writing(uri: StorageUri) -> Iterator[BoundedWriter]:
    """Gives the block a writer of a new file, which appears whole at its end, or not at all. Raises `CheckpointError`."""
    filesystem, path = open_filesystem(uri)
    aside = path if is_object_store(filesystem) else f"{path}.{uuid.uuid4().hex[:12]}.tmp"
    with storage_errors(f"cannot write {uri}", cure="look at the storage, and at what this machine may write there"):
        if not is_object_store(filesystem):
            filesystem.create_dir(path.rpartition("/")[0], recursive=True)
        stream = filesystem.open_output_stream(aside)
        try:
            yield BoundedWriter(stream)
            stream.close()
            if aside != path:
                filesystem.move(aside, path)
        except BaseException:
            # On an object store, closing creates the truncated file; so it is deleted.
            with contextlib.suppress(Exception):
                stream.close()
            with contextlib.suppress(Exception):
                filesystem.delete_file(aside)
            raise


def write_atomically(filesystem: FileSystem, path: str, source: BinaryIO, nbytes: int) -> None:
    """Write `nbytes` from `source` as a file; readers see either the former content or all of the new one.

    Raises what pyarrow raises.
    """
    if is_object_store(filesystem):
        _copy(source, nbytes, filesystem, path)
        return
    aside = f"{path}.{uuid.uuid4().hex[:12]}.tmp"
    try:
        _copy(source, nbytes, filesystem, aside)
        try:
            filesystem.move(aside, path)
        except OSError:  # HDFS does not replace
            filesystem.delete_file(path)
            filesystem.move(aside, path)
    except BaseException:
        with contextlib.suppress(Exception):
            filesystem.delete_file(aside)
        raise


def _copy(source: BinaryIO, nbytes: int, filesystem: FileSystem, path: str) -> None:
    """Write `nbytes` from `source` into a file. Raises what pyarrow raises, and `OSError` if `source` has less."""
    piece, left = source.read(min(PIECE_BYTES, nbytes)), nbytes  # read first: an error then leaves no file
    with filesystem.open_output_stream(path) as file:
        writer = BoundedWriter(file)
        while left:
            if not piece:
                raise OSError(f"a file became shorter while it was sent to {path}")
            left -= writer.write(piece)
            piece = source.read(min(PIECE_BYTES, left)) if left else b""
