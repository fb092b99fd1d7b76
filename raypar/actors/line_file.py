"""metrics.jsonl or events.jsonl of a run as its driver writes it: whole in the end, whatever befalls the file meanwhile.

Lines that the disk does not take wait in memory, and in the journal, where the next driver finds them. The last lines are kept
in memory even when they are written: a file that somebody has shortened, replaced or removed is written again from them.
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
"""Of each file's last lines so much is kept in memory: 20,000 steps or more. Older ones are in the file only."""
MIRRORED = 1000
"""So many of the last events are in the journal all the time: unlike steps, they are written there nowhere else."""
BLOCK = 64
"""Lines that one entry of the journal holds."""

Signature = tuple[int, int] | None
"""(inode, bytes) of a file; None: there is none. What tells that somebody else has changed it."""
UNKNOWN = (-1, -1)
"""Of no file."""


class Spare(Protocol):
    """A second place for lines that the file lacks: the journal."""

    def keep_lines(self, file: str, block: int, text: str) -> None:
        """Put lines there; those that were there under this number are replaced."""

    def kept_lines(self, file: str) -> dict[int, str]:
        """All that is there, by number."""

    def drop_lines(self, file: str, block: int | None = None) -> None:
        """Forget one entry, or all."""


@dataclass
class LineFile:
    """Call `open` first, then `append` line by line, and `close` at the end; from one thread at a time. `tell(kind, text)` is
    called for what people should know: once when lines begin to wait, once when they are written, and when the file was changed
    by somebody else."""

    path: Path
    tell: Callable[[str, str], None]
    spare: Spare | None = None
    mirrored: bool = False
    """Every line goes to the journal too, not only those that the file does not take."""
    kept_bytes: int = KEPT_BYTES
    opened: bool = False
    lines: deque[str] = field(default_factory=deque)
    """The last lines, each with its line break."""
    size: int = 0
    """Characters in `lines`."""
    trimmed: bool = False
    """Older lines than `lines` have been written, or lost."""
    count: int = 0
    """Lines so far, those of former drivers that were found included: the next line's number."""
    unwritten: int = 0
    """So many of the last `lines` are not in the file."""
    spared: int = 0
    """So many of those are in the journal."""
    lost: int = 0
    """So many lines have been dropped from memory without having been written."""
    known: Signature = None
    """The file as we have left it."""
    failing: bool = False
    """The last attempt to write came to nothing."""
    changed: bool = False
    """Somebody else has changed the file."""

    def open(self, correct: Callable[[list[Line]], list[Line]] = list) -> list[Line]:
        """What the file holds, and the journal of what it lacks, each line once; from now on it goes on from there. `correct`:
        gives the lines as they should be. The file is mended."""
        self.opened = True
        for left in self.path.parent.glob(".*.tmp"):  # by a driver that was killed while it wrote
            with contextlib.suppress(OSError):
                left.unlink()
        content = self._content()
        spare = self.spare.kept_lines(self.path.name) if self.spare is not None else {}
        waited = "".join(spare[block] for block in sorted(spare)).encode()
        lines = correct(joined(lines_in(self.path.name, content or b""), lines_in(self.path.name, waited)))
        texts = [json.dumps(line) + "\n" for line in lines]
        self.count = (max(spare) + 1) * BLOCK if spare else 0  # not the numbers of a former driver's
        for text in texts:
            self._keep(text)
        if content is not None and content[-1:] in (b"", b"\n") and "".join(texts).encode().startswith(content):
            self.known, self.unwritten = self._signature(), min(len(texts) - content.count(b"\n"), len(self.lines))
        else:
            self.known, self.unwritten = UNKNOWN, len(self.lines)
        if self.unwritten or self.known == UNKNOWN:
            self._flush(mending=True)
        if self.mirrored:
            self._to_journal()
        if not self.failing or self.spared >= self.unwritten:  # they are in the file now, or there under new numbers
            for block in spare:
                self._drop(block)
        return lines

    def append(self, facts: Line) -> None:
        """Add a line. On a full disk training goes on: it waits here."""
        if not self.opened:
            self.open()
        self._keep(json.dumps(facts) + "\n")
        self.unwritten += 1
        self._flush()
        if self.mirrored and not self.failing:
            self._to_journal()

    def close(self) -> None:
        """The last chance of what waits, and of what somebody has changed without changing the file's length."""
        if not self.opened:
            self.open()
        content, ours = self._content(), "".join(self.lines).encode()
        if content is None or not (content.endswith(ours) if self.trimmed else content == ours):
            self.known = UNKNOWN
            self._flush(alone=True)

    # -- memory and journal --------------------------------------------------------------------------------------------

    def _keep(self, text: str) -> None:
        """Add a line to those in memory; the oldest make room for it."""
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
                if number % BLOCK == BLOCK - 1:
                    self._drop(number // BLOCK)
            self.size -= len(self.lines.popleft())
            self.trimmed = True

    def _to_journal(self) -> None:
        """Put there what waits, and what is mirrored: the block of the last line, if the others are there already."""
        wanted = max(self.unwritten, min(MIRRORED, len(self.lines)) if self.mirrored else 0)
        if self.spare is None or not wanted:
            return
        start, last = self.count - wanted, (self.count - 1) // BLOCK
        first = last if wanted <= self.spared + 1 else start // BLOCK
        lines = self._last(wanted)
        with contextlib.suppress(Exception):  # a store that does not answer: memory has to do
            for block in range(first, last + 1):
                text = "".join(lines[max(0, block * BLOCK - start) : (block + 1) * BLOCK - start])
                self.spare.keep_lines(self.path.name, block, text)
            self.spared = wanted
        if (self.count - 1) % BLOCK == 0 and self.mirrored:
            self._drop(start // BLOCK - 1)

    def _last(self, number: int) -> list[str]:
        return [*islice(reversed(self.lines), number)][::-1]

    def _drop(self, block: int | None = None) -> None:
        if self.spare is not None:
            with contextlib.suppress(Exception):
                self.spare.drop_lines(self.path.name, block)

    # -- the file ------------------------------------------------------------------------------------------------------

    def _flush(self, *, mending: bool = False, alone: bool = False) -> None:
        """Write what waits. `mending`: that the file is not as it should be is known; `alone`: see `_restore`."""
        try:
            if self._signature() == self.known:
                self._write_on()
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
        if self.spared and not self.mirrored:
            self._drop()
            self.spared = 0

    def _write_on(self) -> None:
        """Add what waits behind what is there. Raises `OSError`; a part that was written is taken back."""
        if not self.unwritten:
            return
        try:
            with open(self.path, "a", opener=as_regular) as file:
                file.write("".join(self._last(self.unwritten)))
        except PermissionError:  # of the file, perhaps not of its folder
            self._restore()
            return
        except OSError:
            with contextlib.suppress(OSError):
                os.truncate(self.path, self.known[1] if self.known else 0)
                self.known = self.known or self._signature()
            raise
        self.known, self.unwritten = self._signature(), 0

    def _restore(self, *, alone: bool = False) -> None:
        """Put a whole file in the place of what is there: older lines from there, then those in memory. Raises `OSError`.

        Lines that are newer than ours stay, for a driver that was stopped for long, and wakes, must not remove those of its
        successor; unless we are known to be `alone`."""
        content = self._content()
        if content is None:
            aside = next(name for name in self._asides() if not os.path.lexists(name))
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
        self.known, self.unwritten = self._signature(), 0

    def _asides(self) -> Iterable[Path]:
        yield self.path.with_name(self.path.name + ".damaged")
        number = 2
        while True:
            yield self.path.with_name(f"{self.path.name}.damaged-{number}")
            number += 1

    def _content(self) -> bytes | None:
        return content_of(self.path)

    def _signature(self) -> Signature:
        try:
            found = os.lstat(self.path)
        except FileNotFoundError:
            return None
        return found.st_ino, found.st_size
