"""Copies a run's small files from shared storage into a folder of this machine, where they are read as those of any run.

Names and sizes come from a storage that others may write to: only a run's own files are read, each up to its limit. What they
contain is checked by those who read the folder.
"""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any

from raypar.atomic_write import explain_write_errors, regular_file_opener
from raypar.errors import ConfigError
from raypar.read_run_lines import FILE_BYTES
from raypar.storage.filesystems import open_filesystem, storage_errors
from raypar.storage.line_chunks import first_line_of_name
from raypar.storage.pyarrow_store import put_whole
from raypar.storage.run_files import CHECKPOINTS, DOCUMENT_BYTES, DOCUMENTS, LINE_FILES
from raypar.storage.storage_uri import StorageUri

PIECE_BYTES = 4 << 20
"""The most that is in memory of a file at once."""
MOST_CHUNKS = 4096
"""Limit of the chunks of one file: more than a run of `FILE_BYTES` makes."""
TRIES = 3
"""How often a file of lines is read again whose chunks were put together meanwhile."""
RUNS_CURE = "give the run's place, such as s3://BUCKET/runs/NAME, or --run-dir s3://BUCKET/runs and its name"


def is_run(uri: StorageUri) -> bool:
    """Whether a run lies at this place. Raises `ConfigError` if the storage cannot be read."""
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


def runs_below(uri: StorageUri) -> list[tuple[StorageUri, float]]:
    """(place, Unix time of the last start) of the runs below a place, the last one last. Raises `ConfigError`."""
    from pyarrow.fs import FileSelector, FileType

    with storage_errors(f"cannot read {uri}", ConfigError):
        filesystem, path = open_filesystem(uri)
        found = filesystem.get_file_info(FileSelector(path, allow_not_found=True))
        names = [info.base_name for info in found if info.type is FileType.Directory]
        names = [name for name in names if name.isprintable() and name not in ("", ".", "..")]
        marks = ("cluster.json", "job.yaml")
        infos = filesystem.get_file_info([f"{path}/{name}/{mark}" for name in names for mark in marks]) if names else []
    started = {
        name: next(((info.mtime_ns or 0) / 1e9 for info in infos[2 * i : 2 * i + 2] if info.type is FileType.File), None)
        for i, name in enumerate(names)
    }
    there = [(uri.child(name), time_s) for name, time_s in started.items() if time_s is not None]
    return sorted(there, key=lambda pair: pair[1])


def download_run(uri: StorageUri, folder: Path, *, last_bytes: int | None = None) -> None:
    """Copy the run's documents and lines into `folder`. `last_bytes`: of lines only the last chunks, of at least so many bytes.

    Raises `ConfigError` if the storage cannot be read.
    """
    from pyarrow.fs import FileType

    with storage_errors(f"cannot read {uri}", ConfigError), explain_write_errors(folder):
        filesystem, path = open_filesystem(uri)
        for info in filesystem.get_file_info([f"{path}/{name}" for name in DOCUMENTS]):
            if info.type is not FileType.File:
                continue
            if info.size > DOCUMENT_BYTES:
                raise ConfigError(
                    f"{uri.child(info.base_name)} has {info.size:,} bytes, more than a run writes", cure=RUNS_CURE
                )
            _copy_file(filesystem, info.path, folder / info.base_name)
            if info.mtime_ns is not None:
                os.utime(folder / info.base_name, ns=(info.mtime_ns, info.mtime_ns))
        for name in LINE_FILES:
            _download_lines(filesystem, uri.child(name), f"{path}/{name}", folder / name, last_bytes)


def _download_lines(filesystem: Any, uri: StorageUri, path: str, file: Path, last_bytes: int | None) -> None:
    """Copy a file of lines, put together from its chunks. Raises what pyarrow raises, and `ConfigError`."""
    for attempt in range(TRIES):
        try:
            parts = _chunks(filesystem, uri, path)
            if last_bytes is not None:
                while len(parts) > 1 and sum(size for _, _, size in parts[1:]) >= last_bytes:
                    del parts[0]
            _put_together(filesystem, parts, file)
            return
        except FileNotFoundError:  # it was put together with others since the list was made
            if attempt == TRIES - 1:
                raise


def _chunks(filesystem: Any, uri: StorageUri, path: str) -> list[tuple[int, str, int]]:
    """(number of the first line, path, bytes) of the chunks that are there, in order. Raises `ConfigError` for too many."""
    from pyarrow.fs import FileSelector, FileType

    infos = filesystem.get_file_info(FileSelector(path, allow_not_found=True))
    found = [(first_line_of_name(info.base_name), info) for info in infos if info.type is FileType.File]
    parts = sorted((first, info.path, info.size) for first, info in found if first is not None)
    total = sum(size for _, _, size in parts)
    if len(parts) > MOST_CHUNKS or total > FILE_BYTES:
        raise ConfigError(f"{uri} has {len(parts):,} chunks of {total:,} bytes, more than a run writes", cure=RUNS_CURE)
    return parts


def _put_together(filesystem: Any, parts: list[tuple[int, str, int]], file: Path) -> None:
    """Write the chunks one after the other, without those whose lines an earlier one has."""
    aside = file.with_name(f".{file.name}.tmp")
    following = 0
    with open(aside, "wb", opener=regular_file_opener) as out:
        for first, path, size in parts:
            if first >= following:
                following = first + _append(filesystem, path, out, size)
    os.replace(aside, file)


def _append(filesystem: Any, path: str, out: Any, size: int) -> int:
    """Write one chunk into `out`; returns the number of its lines."""
    lines = 0
    with filesystem.open_input_file(path) as source:
        left = size
        while left and (piece := source.read(min(PIECE_BYTES, left))):
            out.write(piece)
            lines += piece.count(b"\n")
            left -= len(piece)
    return lines


def _copy_file(filesystem: Any, path: str, file: Path) -> None:
    """Copy one document into a file of this machine, up to `DOCUMENT_BYTES`."""
    aside = file.with_name(f".{file.name}.tmp")
    with open(aside, "wb", opener=regular_file_opener) as out:
        _append(filesystem, path, out, DOCUMENT_BYTES)
    os.replace(aside, file)


def put_document(uri: StorageUri, name: str, text: str) -> None:
    """Write one document of a run. Raises `ConfigError`."""
    content = text.encode()
    with storage_errors(f"cannot write {uri.child(name)}", ConfigError):
        filesystem, path = open_filesystem(uri)
        put_whole(filesystem, f"{path}/{name}", io.BytesIO(content), len(content))


def remove_run(uri: StorageUri) -> None:
    """Remove everything at a run's place. Raises `ConfigError`."""
    with storage_errors(f"cannot remove {uri}", ConfigError):
        filesystem, path = open_filesystem(uri)
        filesystem.delete_dir(path)
