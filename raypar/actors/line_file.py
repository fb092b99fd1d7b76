"""Writes metrics.jsonl or events.jsonl of a run, so that a full disk or a damaged file loses no lines.

Lines that cannot be written (a full disk) are kept in memory and in the journal, where the next driver finds them. The last
lines stay in memory even after they are written: a file that somebody has truncated, replaced or removed is written again from
them.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Protocol

from raypar.run_folder import Line, as_regular, content_of, joined, lines_in, place_of, replace_whole

KEPT_BYTES = 8 << 20
"""Limit of each file's lines in memory: 20,000 steps or more. Older lines are in the file only."""
MIRRORED_LINES = 1000
"""So many of the last events are always in the journal, which, unlike steps, it holds in no other form."""
BLOCK_LINES = 64
"""Lines in one entry of the journal."""

Signature = tuple[int, int] | None
"""(inode, bytes) of a file, None if it does not exist. A difference shows that somebody else has changed the file."""
NEVER_MATCHES = (-1, -1)
"""The signature of no file: makes the next `_flush` write the whole file again."""


class LineStore(Protocol):
    """A second place for lines, in numbered blocks: the journal."""

    def keep_lines(self, file: str, block: int, text: str) -> None:
        """Store the lines of a block, in place of those it had."""

    def kept_lines(self, file: str) -> dict[int, str]:
        """Block number -> its lines, of all blocks."""

    def drop_lines(self, file: str, block: int | None = None) -> None:
        """Remove one block, or all."""


@dataclass
class LineFile:
    """A file of JSON lines. Call `open` first, then `append` for each line, and `close` at the end; from one thread at a time.

    `tell(kind, text)` gets lines for the user: once when the file cannot be written, once when it can again, and when somebody
    else has changed it.
    """

    path: Path
    tell: Callable[[str, str], None]
    journal: LineStore | None = None
    mirrored: bool = False
    """Store every line in the journal too, not only those that cannot be written to the file."""
    kept_bytes: int = KEPT_BYTES
    opened: bool = False
    lines: deque[str] = field(default_factory=deque)
    """The last lines, each with its line break."""
    size: int = 0
    """Characters in `lines`."""
    trimmed: bool = False
    """Whether there were older lines, now written or lost, that `lines` lacks."""
    count: int = 0
    """Lines so far, with those found from former drivers: the number of the next line."""
    unwritten: int = 0
    """So many of the last `lines` are not in the file."""
    journaled: int = 0
    """So many of the last `lines` are in the journal."""
    lost: int = 0
    """Lines dropped from memory that were never written."""
    signature: Signature = None
    """The file's signature after our last write."""
    failing: bool = False
    """Whether the last attempt to write failed."""
    changed: bool = False
    """Whether somebody else has changed the file."""

    def open(self, correct: Callable[[list[Line]], list[Line]] = list) -> list[Line]:
        """The lines of the file and those that only the journal has, each once; repairs the file. `append` continues there.

        `correct`: returns the lines as they should be, from those found.
        """
        self.opened = True
        for left in self.path.parent.glob(".*.tmp"):  # by a driver that was killed while it wrote
            with contextlib.suppress(OSError):
                left.unlink()
        content = self._content()
        blocks = self.journal.kept_lines(self.path.name) if self.journal is not None else {}
        waited = "".join(blocks[block] for block in sorted(blocks)).encode()
        lines = correct(joined(lines_in(self.path.name, content or b""), lines_in(self.path.name, waited)))
        texts = [json.dumps(line) + "\n" for line in lines]
        self.count = (max(blocks) + 1) * BLOCK_LINES if blocks else 0  # not the numbers of a former driver's
        for text in texts:
            self._keep(text)
        if content is not None and content[-1:] in (b"", b"\n") and "".join(texts).encode().startswith(content):
            self.signature, self.unwritten = self._current_signature(), min(len(texts) - content.count(b"\n"), len(self.lines))
        else:
            self.signature, self.unwritten = NEVER_MATCHES, len(self.lines)
        if self.unwritten or self.signature == NEVER_MATCHES:
            self._flush(mending=True)
        if self.mirrored:
            self._to_journal()
        if not self.failing or self.journaled >= self.unwritten:  # they are in the file now, or there under new numbers
            for block in blocks:
                self._drop(block)
        return lines

    def append(self, facts: Line) -> None:
        """Add a line. If it cannot be written it stays in memory, and training goes on."""
        if not self.opened:
            self.open()
        self._keep(json.dumps(facts) + "\n")
        self.unwritten += 1
        self._flush()
        if self.mirrored and not self.failing:
            self._to_journal()

    def close(self) -> None:
        """Write the file again if its content is not ours: unwritten lines, or changes that kept the file's length."""
        if not self.opened:
            self.open()
        content, ours = self._content(), "".join(self.lines).encode()
        if content is None or not (content.endswith(ours) if self.trimmed else content == ours):
            self.signature = NEVER_MATCHES
            self._flush(alone=True)

    # -- memory and journal --------------------------------------------------------------------------------------------

    def _keep(self, text: str) -> None:
        """Add a line to those in memory; drops the oldest beyond `kept_bytes`."""
        self.lines.append(text)
        self.count += 1
        self.size += len(text)
        while self.size > self.kept_bytes and len(self.lines) > 1:
            number = self.count - len(self.lines)
            if len(self.lines) == self.unwritten + 1:  # the new line is not counted yet
                self.unwritten -= 1
                self.lost += 1
                if self.lost == 1:
                    self.tell(
                        "warning", f"the lines that wait for {self.path} take {self.size:,} bytes: the oldest are dropped"
                    )
                if number % BLOCK_LINES == BLOCK_LINES - 1:
                    self._drop(number // BLOCK_LINES)
            self.size -= len(self.lines.popleft())
            self.trimmed = True

    def _to_journal(self) -> None:
        """Store unwritten and mirrored lines in the journal; only the last block, if the others are there already."""
        wanted = max(self.unwritten, min(MIRRORED_LINES, len(self.lines)) if self.mirrored else 0)
        if self.journal is None or not wanted:
            return
        start, last = self.count - wanted, (self.count - 1) // BLOCK_LINES
        first = last if wanted <= self.journaled + 1 else start // BLOCK_LINES
        lines = self._last(wanted)
        with contextlib.suppress(Exception):  # if the store does not answer, the lines are in memory only
            for block in range(first, last + 1):
                text = "".join(lines[max(0, block * BLOCK_LINES - start) : (block + 1) * BLOCK_LINES - start])
                self.journal.keep_lines(self.path.name, block, text)
            self.journaled = wanted
        if (self.count - 1) % BLOCK_LINES == 0 and self.mirrored:
            self._drop(start // BLOCK_LINES - 1)

    def _last(self, number: int) -> list[str]:
        """The last `number` lines in memory."""
        return [*islice(reversed(self.lines), number)][::-1]

    def _drop(self, block: int | None = None) -> None:
        if self.journal is not None:
            with contextlib.suppress(Exception):
                self.journal.drop_lines(self.path.name, block)

    # -- the file ------------------------------------------------------------------------------------------------------

    def _flush(self, *, mending: bool = False, alone: bool = False) -> None:
        """Write unwritten lines, or the whole file if its signature is another. Failures are told, not raised.

        `mending`: the file is known to be damaged, so do not warn of it. `alone`: see `_restore`.
        """
        try:
            if self._current_signature() == self.signature:
                self._append_unwritten()
            else:
                self.unwritten = len(self.lines)
                if not mending and not self.failing:
                    self.changed = True
                    self.tell(
                        "warning",
                        f"{self.path} was shortened, replaced or removed: it is written again\n"
                        "  cure: leave the files of a run alone while it trains",
                    )
                self._restore(alone=alone or mending)
        except OSError as error:
            self._to_journal()
            if not self.failing:
                self.tell(
                    "warning",
                    f"{self.path} cannot be written ({error}); its lines are kept in memory until it can\n"
                    "  cure: free disk space, or put the run folder back",
                )
            self.failing = True
            return
        if self.failing:
            what = f"{self.lost} lines are lost" if self.lost else "no line is lost"
            self.tell("note", f"{self.path} can be written again: {what}")
        self.failing = False
        if self.journaled and not self.mirrored:
            self._drop()
            self.journaled = 0

    def _append_unwritten(self) -> None:
        """Append unwritten lines. Raises `OSError`, after truncating what was written in part."""
        if not self.unwritten:
            return
        try:
            with open(self.path, "a", opener=as_regular) as file:
                file.write("".join(self._last(self.unwritten)))
        except PermissionError:  # the folder may still be writable
            self._restore()
            return
        except OSError:
            with contextlib.suppress(OSError):
                os.truncate(self.path, self.signature[1] if self.signature else 0)
                self.signature = self.signature or self._current_signature()
            raise
        self.signature, self.unwritten = self._current_signature(), 0

    def _restore(self, *, alone: bool = False) -> None:
        """Replace the file: its lines that are older than those in memory, then those in memory. Raises `OSError`.

        Newer lines of the file stay too, unless no other driver can have written them (`alone`): a driver that was stopped for
        long and wakes up must not remove its successor's lines.
        """
        content = self._content()
        if content is None:
            aside = next(name for name in self._damaged_names() if not os.path.lexists(name))
            os.rename(self.path, aside)
            self.tell("warning", f"{self.path} was something that cannot be read: it is {aside.name} now, and written anew")
        there = lines_in(self.path.name, content or b"")
        if self.lines:
            first, last = (place_of(json.loads(self.lines[i])) for i in (0, -1))
            older = [line for line in there if self.trimmed and place_of(line) < first]
            newer = [line for line in there if not alone and place_of(line) > last]
        else:
            older, newer = there, []
        texts = [[json.dumps(line) + "\n" for line in lines] for lines in (older, newer)]
        replace_whole(self.path, "".join([*texts[0], *self.lines, *texts[1]]).encode())
        self.signature, self.unwritten = self._current_signature(), 0

    def _damaged_names(self) -> Iterable[Path]:
        """Names for a file that cannot be read, the preferred one first."""
        yield self.path.with_name(self.path.name + ".damaged")
        number = 2
        while True:
            yield self.path.with_name(f"{self.path.name}.damaged-{number}")
            number += 1

    def _content(self) -> bytes | None:
        return content_of(self.path)

    def _current_signature(self) -> Signature:
        try:
            found = os.lstat(self.path)
        except FileNotFoundError:
            return None
        return found.st_ino, found.st_size
