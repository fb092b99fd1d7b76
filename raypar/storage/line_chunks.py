"""Cuts a growing file of lines into numbered chunks, each an object, whose number stays small. Pure.

An object store cannot append. So the last chunk is written again, with the new lines, until it has `CHUNK_BYTES`; the next line
begins another one. `FAN` full chunks become one of the next level. A chunk has the number of its first line: a chunk that takes
the place of several is written under the name of the first of them, and readers leave out a chunk whose first line they have.
A writer that is killed between writing and deleting therefore leaves every line once.

Where lines are cut depends on the lines alone, not on when they were written: a writer that begins again finds the same chunks.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

CHUNK_BYTES = 256 << 10
"""A chunk of level 0 is full with so many bytes: about 1,000 steps."""
FAN, LEVELS = 8, 3
"""So many full chunks of one level become one of the next, and how many levels follow: 256 KiB, 2 MiB, 16 MiB, 128 MiB."""
_NAME = re.compile(r"(?P<first>[0-9]{12})\.jsonl")


@dataclass(frozen=True)
class Chunk:
    """Some lines of a file, one after the other."""

    first: int
    """The number of its first line; the file's first line has number 1."""
    start: int
    """The offset of its first line in the file."""
    lines: int
    """How many lines it has."""
    nbytes: int
    """How many bytes these have."""
    level: int = 0
    """How often full chunks were put together for it."""

    @property
    def name(self) -> str:
        """The name of its object."""
        return f"{self.first:012d}.jsonl"

    @property
    def full(self) -> bool:
        """Whether the next line begins another chunk."""
        return self.level > 0 or self.nbytes >= CHUNK_BYTES


def first_line_of_name(name: str) -> int | None:
    """The number of the first line of the chunk with this name; None if it is no name of a chunk."""
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
    """Put the last full chunks together wherever there are `FAN` of one level."""
    for level in range(LEVELS):
        last = made[-FAN:]
        if len(last) < FAN or any(chunk.level != level or not chunk.full for chunk in last):
            return
        made[-FAN:] = [Chunk(last[0].first, last[0].start, sum(c.lines for c in last), sum(c.nbytes for c in last), level + 1)]


def chunks_to_write(before: Sequence[Chunk], after: Sequence[Chunk]) -> tuple[list[Chunk], list[str]]:
    """(chunks to write, names to remove then), to lead from one state of the objects to another."""
    there = {chunk.first: chunk for chunk in before}
    now = {chunk.first for chunk in after}
    return [chunk for chunk in after if there.get(chunk.first) != chunk], [c.name for c in before if c.first not in now]
