"""Which files of a run folder are copied to shared storage, and in which form: documents whole, others in parts. Pure.

s3://bucket/runs/mine/  lease.json  job.yaml  plan.json  members.json  ...      documents, replaced whole
                        metrics.jsonl/000000000001.jsonl  ...                   lines, in numbered chunks
                        samples.bin/00000000.bin  ...                           bytes, in pieces of one size
                        checkpoints/step_00000050/manifest.json  ...            written by the workers and the driver

An object store cannot append. So the last chunk is written again, with the new lines, until it has `FULL_CHUNK_BYTES`; the next
line begins a new chunk. `MERGED_CHUNKS` full chunks of one level are merged into one chunk of the next level.

An object is named by the number of its chunk's first line. A merged chunk is written under the name of the first chunk that it
replaces, and the others are deleted afterwards. Readers skip a chunk whose first line an earlier chunk contains, so a writer
that is killed before it has deleted them leaves no line twice.

The boundaries of chunks depend only on the lines, not on when they were written: a writer that starts again computes the same
chunks.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

SENT_DOCUMENT_BYTES = 64 << 20
"""Size limit of a document (`record.folder.DOCUMENTS`)."""
ALL_SENT_FILE = ".sent"
"""An empty file that the driver makes in the working folder once all of the folder is on the storage."""
TEMPORARY_FOLDER_PREFIX = "raypar-"
"""Beginning of the name of the temporary folder that contains a working folder."""
TEMPORARY_SUFFIXES = (".tmp", ".new")
"""Endings of files that are being written."""
FULL_CHUNK_BYTES = 256 << 10
"""Size at which a chunk of level 0 is full: about 1,000 steps."""
MERGED_CHUNKS, MERGE_LEVELS = 8, 3
"""Number of full chunks that are merged into one of the next level, and number of levels after level 0. Chunks are full at
256 KiB, 2 MiB, 16 MiB and 128 MiB."""
_NAME = re.compile(r"(?P<first>[0-9]{12})\.jsonl")
RECORD_PIECE_BYTES = 256 << 10
"""Size of each piece of a file of records (`record.folder.RECORD_FILES`) but the last."""
REWRITTEN_PIECES = 2
"""So many of the last pieces of such a file may have been written again since they were sent."""
_PIECE_NAME = re.compile(r"(?P<number>[0-9]{8})\.bin")


@dataclass(frozen=True)
class Chunk:
    """Consecutive lines of a file, stored as one object."""

    first: int
    """The number of its first line; the file's first line has number 1."""
    start: int
    """The offset of its first line in the file."""
    lines: int
    """How many lines it has."""
    nbytes: int
    """Their size in bytes."""
    level: int = 0
    """0 for a chunk that lines are added to; n + 1 for one merged from chunks of level n."""

    @property
    def name(self) -> str:
        """The name of its object."""
        return f"{self.first:012d}.jsonl"

    @property
    def full(self) -> bool:
        """Whether the next line begins another chunk."""
        return self.level > 0 or self.nbytes >= FULL_CHUNK_BYTES


def name_of_piece(number: int) -> str:
    """The name of the object of a piece of a file of records; the first piece has number 0."""
    return f"{number:08d}.bin"


def number_of_piece(name: str) -> int | None:
    """The number of the piece whose object has this name; None if it is not the name of a piece."""
    found = _PIECE_NAME.fullmatch(name)
    return int(found["number"]) if found else None


def first_line_of_name(name: str) -> int | None:
    """The number of the first line of the chunk whose object has this name; None if it is not the name of a chunk."""
    found = _NAME.fullmatch(name)
    return int(found["first"]) if found and int(found["first"]) else None


def add_lines(chunks: Sequence[Chunk], sizes: Iterable[int]) -> tuple[Chunk, ...]:
    """The chunks of a file after lines of these sizes (in bytes) were added to it."""
    made = list(chunks)
    for size in sizes:
        last = made[-1] if made else Chunk(1, 0, 0, 0)
        if made and not last.full:
            made[-1] = Chunk(last.first, last.start, last.lines + 1, last.nbytes + size)
        else:
            made.append(Chunk(last.first + last.lines, last.start + last.nbytes, 1, size))
        if made[-1].full:
            _merge(made)
    return tuple(made)


def _merge(made: list[Chunk]) -> None:
    """Merge the last `MERGED_CHUNKS` chunks into one as long as they are full and of one level."""
    for level in range(MERGE_LEVELS):
        last = made[-MERGED_CHUNKS:]
        if len(last) < MERGED_CHUNKS or any(chunk.level != level or not chunk.full for chunk in last):
            return
        made[-MERGED_CHUNKS:] = [
            Chunk(last[0].first, last[0].start, sum(c.lines for c in last), sum(c.nbytes for c in last), level + 1)
        ]


def chunks_to_write(before: Sequence[Chunk], after: Sequence[Chunk]) -> tuple[list[Chunk], list[str]]:
    """(chunks to write, names of objects to remove after that), so that the objects for `before` become those for `after`."""
    there = {chunk.first: chunk for chunk in before}
    now = {chunk.first for chunk in after}
    return [chunk for chunk in after if there.get(chunk.first) != chunk], [c.name for c in before if c.first not in now]
