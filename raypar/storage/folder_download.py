"""Copies a run's documents and lines from shared storage into a local folder, and lists, checks and removes runs there.

Others may write to the storage, so only files that a run has are copied, each up to its size limit. Their content is checked by
the code that reads the folder.
"""

from __future__ import annotations

import contextlib
import io
import os
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from raypar.errors import ConfigError
from raypar.files.atomic_write import explain_write_errors, regular_file_opener
from raypar.record.folder import CHECKPOINTS, DOCUMENTS, LINE_FILES
from raypar.storage.filesystems import list_folders, open_filesystem, storage_errors
from raypar.storage.pyarrow_store import write_atomically
from raypar.storage.read_run_lines import FILE_BYTES
from raypar.storage.run_files import SENT_DOCUMENT_BYTES, first_line_of_name
from raypar.storage.storage_uri import StorageUri

if TYPE_CHECKING:
    from pyarrow.fs import FileSystem

PIECE_BYTES = 4 << 20
"""The most that is held in memory of a file at once."""
MOST_CHUNKS = 4096
"""Limit on the number of chunks of one file: a run of `FILE_BYTES` makes fewer."""
TRIES = 3
"""How often a file of lines is read if its chunks are merged meanwhile."""
RUNS_CURE = "give the run's place, such as s3://BUCKET/runs/NAME, or --run-dir s3://BUCKET/runs and its name"


def has_run(uri: StorageUri) -> bool:
    """Whether there is a run at this place. Raises `ConfigError` if the storage cannot be read."""
    from pyarrow.fs import FileType

    with storage_errors(f"cannot read {uri}", ConfigError):
        filesystem, path = open_filesystem(uri)
        job, checkpoints = filesystem.get_file_info([f"{path}/job.yaml", f"{path}/{CHECKPOINTS}"])
    return job.type is FileType.File or checkpoints.type is FileType.Directory


def has_document(uri: StorageUri, name: str) -> bool:
    """Whether the run at this place has a document of this name. Raises `ConfigError` if the storage cannot be read."""
    from pyarrow.fs import FileType

    with storage_errors(f"cannot read {uri}", ConfigError):
        filesystem, path = open_filesystem(uri)
        found: bool = filesystem.get_file_info(f"{path}/{name}").type is FileType.File
    return found


def list_runs_below(uri: StorageUri) -> list[tuple[StorageUri, float]]:
    """(place, Unix time of the last start) of all runs below a place, by ascending time. Raises `ConfigError`."""
    from pyarrow.fs import FileType

    with storage_errors(f"cannot read {uri}", ConfigError):
        filesystem, path = open_filesystem(uri)
        names = list_folders(filesystem, path)
        marks = ("cluster.json", "job.yaml")
        infos = filesystem.get_file_info([f"{path}/{name}/{mark}" for name in names for mark in marks]) if names else []
    started = {
        name: next(((info.mtime_ns or 0) / 1e9 for info in infos[2 * i : 2 * i + 2] if info.type is FileType.File), None)
        for i, name in enumerate(names)
    }
    there = [(uri.child(name), time_s) for name, time_s in started.items() if time_s is not None]
    return sorted(there, key=lambda pair: pair[1])


def download_run(uri: StorageUri, folder: Path, *, last_bytes: int | None = None) -> None:
    """Copy the run's documents and lines into `folder`. `last_bytes`: of lines, only the last chunks with
    together at least so many bytes.

    Raises `ConfigError` if the storage cannot be read.
    """
    from pyarrow.fs import FileType

    with storage_errors(f"cannot read {uri}", ConfigError), explain_write_errors(folder):
        filesystem, path = open_filesystem(uri)
        for info in filesystem.get_file_info([f"{path}/{name}" for name in DOCUMENTS]):
            if info.type is not FileType.File:
                continue
            if info.size > SENT_DOCUMENT_BYTES:
                raise ConfigError(
                    f"{uri.child(info.base_name)} has {info.size:,} bytes, more than a run writes", cure=RUNS_CURE
                )
            _copy_file(filesystem, info.path, folder / info.base_name)
            if info.mtime_ns is not None:
                os.utime(folder / info.base_name, ns=(info.mtime_ns, info.mtime_ns))
        for name in LINE_FILES:
            _download_lines(filesystem, uri.child(name), f"{path}/{name}", folder / name, last_bytes)


def _download_lines(filesystem: FileSystem, uri: StorageUri, path: str, file: Path, last_bytes: int | None) -> None:
    """Copy a file of lines: join its chunks. Raises what pyarrow raises, and `ConfigError`."""
    for attempt in range(TRIES):
        try:
            parts = _chunks(filesystem, uri, path)
            if last_bytes is not None:
                while len(parts) > 1 and sum(size for _, _, size in parts[1:]) >= last_bytes:
                    del parts[0]
            _join_chunks(filesystem, parts, file)
            return
        except FileNotFoundError:  # it was merged with others since they were listed
            if attempt == TRIES - 1:
                raise


def _chunks(filesystem: FileSystem, uri: StorageUri, path: str) -> list[tuple[int, str, int]]:
    """(number of the first line, path, bytes) of all stored chunks, in order. Raises `ConfigError` for too many."""
    from pyarrow.fs import FileSelector, FileType

    infos = filesystem.get_file_info(FileSelector(path, allow_not_found=True))
    found = [(first_line_of_name(info.base_name), info) for info in infos if info.type is FileType.File]
    parts = sorted((first, info.path, info.size) for first, info in found if first is not None)
    total = sum(size for _, _, size in parts)
    if len(parts) > MOST_CHUNKS or total > FILE_BYTES:
        raise ConfigError(f"{uri} has {len(parts):,} chunks of {total:,} bytes, more than a run writes", cure=RUNS_CURE)
    return parts


def _join_chunks(filesystem: FileSystem, parts: list[tuple[int, str, int]], file: Path) -> None:
    """Write the chunks one after the other, except those whose lines an earlier chunk has."""
    aside = file.with_name(f".{file.name}.tmp")
    following = 0
    with open(aside, "wb", opener=regular_file_opener) as out:
        for first, path, size in parts:
            if first >= following:
                following = first + _append(filesystem, path, out, size)
    os.replace(aside, file)


def _append(filesystem: FileSystem, path: str, out: BinaryIO, size: int) -> int:
    """Append at most `size` bytes of a file to `out`; returns the number of lines."""
    lines = 0
    with filesystem.open_input_file(path) as source:
        left = size
        while left and (piece := source.read(min(PIECE_BYTES, left))):
            out.write(piece)
            lines += piece.count(b"\n")
            left -= len(piece)
    return lines


def _copy_file(filesystem: FileSystem, path: str, file: Path) -> None:
    """Copy one document into a file of this machine, up to `SENT_DOCUMENT_BYTES`."""
    aside = file.with_name(f".{file.name}.tmp")
    with open(aside, "wb", opener=regular_file_opener) as out:
        _append(filesystem, path, out, SENT_DOCUMENT_BYTES)
    os.replace(aside, file)


def upload_document(uri: StorageUri, name: str, text: str) -> None:
    """Write one document of a run. Raises `ConfigError`."""
    content = text.encode()
    with storage_errors(f"cannot write {uri.child(name)}", ConfigError):
        filesystem, path = open_filesystem(uri)
        write_atomically(filesystem, f"{path}/{name}", io.BytesIO(content), len(content))


def remove_run(uri: StorageUri) -> None:
    """Remove everything at a run's place. Raises `ConfigError`."""
    # On GCS pyarrow has removed all objects when it raises FileNotFoundError, for a folder that is no object itself.
    with storage_errors(f"cannot remove {uri}", ConfigError), contextlib.suppress(FileNotFoundError):
        filesystem, path = open_filesystem(uri)
        filesystem.delete_dir(path)
