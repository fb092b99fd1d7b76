"""Copies a run's documents and lines from shared storage into a local folder.

Others may write to the storage, so only files that a run has are copied, each up to its size limit. Their content is checked by
the code that reads the folder.
"""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from raypar.errors import ConfigError
from raypar.files.atomic_write import explain_write_errors, regular_file_opener
from raypar.record.folder import DOCUMENTS, LINE_FILES, RECORD_FILES
from raypar.storage.filesystems import open_filesystem, storage_errors
from raypar.storage.pyarrow_store import write_atomically
from raypar.storage.read_run_lines import FILE_BYTES
from raypar.storage.storage_uri import StorageUri
from raypar.storage.stored_file_layout import RECORD_PIECE_BYTES, SENT_DOCUMENT_BYTES, first_line_of_name, number_of_piece

if TYPE_CHECKING:
    from pyarrow.fs import FileSystem

PIECE_BYTES = 4 << 20
"""The most that is held in memory of a file at once."""
MOST_CHUNKS = 4096
"""Limit on the number of chunks of one file: a run of `FILE_BYTES` makes fewer."""
TRIES = 3
"""How often a file of lines is read if its chunks are merged meanwhile."""
RUNS_CURE = "give the run's place, such as s3://BUCKET/runs/NAME, or --run-dir s3://BUCKET/runs and its name"


def download_run(uri: StorageUri, folder: Path, *, last_bytes: int | None = None, records: bool = False) -> None:
    """Copy the run's documents and lines into `folder`. `last_bytes`: of lines, only the last chunks with
    together at least so many bytes. `records`: also the files that only a run reads that goes on.

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
        for name in RECORD_FILES if records else ():
            _download_pieces(filesystem, uri.child(name), f"{path}/{name}", folder / name)


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


def _download_pieces(filesystem: FileSystem, uri: StorageUri, path: str, file: Path) -> None:
    """Copy a file of records, up to the first piece that is missing or short. Raises what pyarrow raises, and `ConfigError`."""
    from pyarrow.fs import FileSelector, FileType

    infos = filesystem.get_file_info(FileSelector(path, allow_not_found=True))
    found = {number_of_piece(info.base_name): info for info in infos if info.type is FileType.File}
    total = sum(info.size for info in found.values())
    if total > FILE_BYTES:
        raise ConfigError(f"{uri} has {total:,} bytes, more than a run writes", cure=RUNS_CURE)
    if 0 not in found:
        file.unlink(missing_ok=True)
        return
    aside, number, whole = file.with_name(f".{file.name}.tmp"), 0, True
    with open(aside, "wb", opener=regular_file_opener) as out:
        while whole and (info := found.get(number)) is not None:
            _append(filesystem, info.path, out, min(info.size, RECORD_PIECE_BYTES))
            number, whole = number + 1, info.size == RECORD_PIECE_BYTES
    os.replace(aside, file)


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
