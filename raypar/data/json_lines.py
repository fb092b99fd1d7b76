"""Files of JSON lines as a map-style data set: sample i is the object on line i, found by an index of places in the files."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Iterator
from typing import BinaryIO, NamedTuple

import numpy
import torch

from raypar.data.file_list import DataFile, Files, find_data_files
from raypar.data.open_files import OpenFiles
from raypar.errors import DataError
from raypar.files.json_type import Json
from raypar.files.printable_text import shorten

PIECE_BYTES = 4 << 20
"""How much of a file is read at a time when its lines are counted."""
LINES, LONG_LINE_BYTES = 16, 4096
"""The index has the place of every 16th line, and of every line behind one of so many bytes."""
_NEWLINE = 10
_GZIP = b"\x1f\x8b"


class _LineIndex(NamedTuple):
    """Where the lines of a file are."""

    lines: int
    """Number of lines; blank ones at the end do not count."""
    numbers: numpy.ndarray
    """Numbers of the lines whose places are known, ascending from 0 [n], int64."""
    places: numpy.ndarray
    """Byte at which each of them begins, and the end of the last line [n + 1], int64."""
    digest: bytes
    """Of the file's bytes."""


class JsonLines(torch.utils.data.Dataset[dict[str, Json]]):
    """The objects in files of JSON lines (`.jsonl`), file after file in the order of their names.

    `files`: a path or URI, or several, with wildcards. Each file is read once when the data set is made, to count its lines; of
    them half a byte is kept for each line, and the line itself is read when it is asked for. Raises `DataError` for files that
    cannot be that.
    """

    raypar_thread_safe = True
    """Draws no random numbers: nothing needs to be seeded before a sample."""

    def __init__(self, files: Files) -> None:
        self.files = find_data_files(files, "JSON lines file")
        self._indices = [_index_of(file) for file in self.files]
        self._ends = numpy.cumsum([index.lines for index in self._indices])
        """The sample after the last one of each file."""
        digests = b"".join(index.digest for index in self._indices)
        self.raypar_content_digest = hashlib.blake2b(digests, digest_size=8).hexdigest()
        """Of what the files hold, wherever they lie: a run that is resumed with other files is told so."""
        self._open = OpenFiles(lambda number: self.files[number].opened())

    def __getstate__(self) -> dict[str, object]:
        """Another process opens the files itself."""
        return {name: value for name, value in self.__dict__.items() if name != "_open"}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state)
        self._open = OpenFiles(lambda number: self.files[number].opened())

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, index: int) -> dict[str, Json]:
        if not 0 <= index < len(self):
            raise IndexError(f"no line {index}: the files have lines 0 to {len(self) - 1:,} ({len(self):,} in all)")
        number = int(numpy.searchsorted(self._ends, index, side="right"))
        line = index - (int(self._ends[number]) - self._indices[number].lines)
        try:
            text = _line(self._open.get(number), self._indices[number], line)
            found = json.loads(text)
        except (OSError, ValueError, RecursionError) as error:
            reason = "it is blank" if isinstance(error, ValueError) and not text.strip() else shorten(str(error))
            raise DataError(
                f"line {line + 1:,} of {shorten(self.files[number].location)} is not JSON: {reason}",
                cure="write one object a line",
            ) from error
        if not isinstance(found, dict):
            raise DataError(
                f"line {line + 1:,} of {shorten(self.files[number].location)} is no object: "
                f"{shorten(text.decode(errors='replace'), 60)}",
                cure='write one object a line: {"text": ..., "label": ...}',
            )
        return found


def _line(file: BinaryIO, index: _LineIndex, line: int) -> bytes:
    """The bytes of a line: its block is read, from the last known place before it to the next."""
    at = int(numpy.searchsorted(index.numbers, line, side="right")) - 1
    first, last = int(index.places[at]), int(index.places[at + 1])
    file.seek(first)
    return file.read(last - first).split(b"\n")[line - int(index.numbers[at])]


@functools.lru_cache(maxsize=4096)
def _index_of(file: DataFile) -> _LineIndex:
    """Reads a file and notes where its lines are. Raises `DataError` for one without lines, and for a compressed one."""
    found = hashlib.blake2b(digest_size=16)
    numbers, places = [numpy.zeros(1, numpy.int64)], [numpy.zeros(1, numpy.int64)]
    lines, last_start, end, place = 0, 0, 0, 0
    with file.opened() as opened:
        for piece in _pieces(opened):
            if place == 0 and piece.startswith(_GZIP):
                raise DataError(
                    f"{shorten(file.location)} is compressed (gzip): its lines cannot be read by their places",
                    cure="decompress it: gunzip FILE.jsonl.gz",
                )
            found.update(piece)
            starts = numpy.flatnonzero(numpy.frombuffer(piece, numpy.uint8) == _NEWLINE) + (place + 1)
            if stripped := len(piece.rstrip()):
                end = place + stripped
            if len(starts):
                count = numpy.arange(lines + 1, lines + 1 + len(starts))
                long = numpy.diff(starts, prepend=last_start) >= LONG_LINE_BYTES
                kept = (count % LINES == 0) | long
                numbers.append(count[kept])
                places.append(starts[kept])
                lines, last_start = lines + len(starts), int(starts[-1])
            place += len(piece)
        known, at = numpy.concatenate(numbers), numpy.concatenate(places)
        inside = at < end
        known, at = known[inside], at[inside]
        if not end:
            raise DataError(f"{shorten(file.location)} has no lines", cure="give a file with one JSON object a line")
        opened.seek(int(at[-1]))
        lines = int(known[-1]) + opened.read(end - int(at[-1])).count(b"\n") + 1
    return _LineIndex(lines, known, numpy.append(at, end), found.digest())


def _pieces(file: BinaryIO) -> Iterator[bytes]:
    while piece := file.read(PIECE_BYTES):
        yield piece
