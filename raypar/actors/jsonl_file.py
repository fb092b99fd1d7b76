"""Writes metrics.jsonl or events.jsonl of a run so that no line is lost by a full disk or a damaged file.

The last lines are in up to three places: the file, memory (`RecentLines`) and the journal (`JournalLineBackup`).

- Lines that cannot be written (a full disk) wait in memory, and in the journal, where the next driver finds them.
- Lines stay in memory after they are written: a file that another process has truncated, replaced or removed is written again.
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

from raypar.files.atomic_write import regular_file_opener, replace_file_atomically
from raypar.files.os_error_cure import cure_of_os_error
from raypar.storage.read_run_lines import Line, jsonl_line_sort_key, merge_jsonl_lines, parse_jsonl_lines, read_lines_file

KEPT_BYTES = 8 << 20
"""Limit of each file's lines in memory: 20,000 steps or more. Older lines are in the file only."""
MIRRORED_LINES = 1000
"""How many of the last events are always in the journal. Of steps it has the reports anyway (`Journal.commit`)."""
BLOCK_LINES = 64
"""Lines in one entry of the journal."""

Signature = tuple[int, int] | None
"""(inode, bytes) of a file, None if it does not exist. Another signature shows that another process has changed the file."""
NEVER_MATCHES = (-1, -1)
"""The signature of no file: makes the next `_flush` write the whole file again."""


class LineBackupStore(Protocol):
    """A store for second copies of lines, in numbered blocks. The journal is one."""

    def keep_lines(self, file: str, block: int, text: str) -> None:
        """Store the lines of a block, in place of those it had."""

    def kept_lines(self, file: str) -> dict[int, str]:
        """Block number -> its lines, of all blocks."""

    def drop_lines(self, file: str, block: int | None = None) -> None:
        """Remove one block, or all."""


class RecentLines:
    """The last lines of a file, kept in memory."""

    def __init__(self, max_size: int) -> None:
        self.max_size = max_size
        """Limit of `size`; the oldest lines beyond it are dropped."""
        self.texts: deque[str] = deque()
        """The lines, each with its line break."""
        self.size = 0
        """Characters in `texts`."""
        self.trimmed = False
        """Whether older lines were dropped."""
        self.count = 0
        """Lines so far, with those found from former drivers: the number of the next line."""

    def __len__(self) -> int:
        return len(self.texts)

    def add(self, text: str) -> list[int]:
        """Add a line; returns the numbers of the lines that are dropped to make room."""
        self.texts.append(text)
        self.count += 1
        self.size += len(text)
        dropped = []
        while self.size > self.max_size and len(self.texts) > 1:
            dropped.append(self.count - len(self.texts))
            self.size -= len(self.texts.popleft())
            self.trimmed = True
        return dropped

    def last(self, number: int) -> list[str]:
        """The last `number` lines."""
        return [*islice(reversed(self.texts), number)][::-1]


class JournalLineBackup:
    """The last lines of a file, kept in the journal: line n is in block n // `BLOCK_LINES`.

    A journal that does not answer is ignored: the lines are then in memory only.
    """

    def __init__(self, journal: LineBackupStore | None, file: str) -> None:
        self.journal = journal
        """The store; None: lines are kept in memory only."""
        self.file = file
        """The file's name in the journal."""
        self.stored = 0
        """How many of the last lines are in the journal."""

    def found(self) -> dict[int, str]:
        """Block number -> its lines, as former drivers have left them."""
        return self.journal.kept_lines(self.file) if self.journal is not None else {}

    def store(self, recent: RecentLines, number: int) -> None:
        """Store the last `number` lines; only those of the last block, if the others are stored already."""
        if self.journal is None or not number:
            return
        start, last = recent.count - number, (recent.count - 1) // BLOCK_LINES
        first = last if number <= self.stored + 1 else start // BLOCK_LINES
        lines = recent.last(number)
        with contextlib.suppress(Exception):  # Ray's store fails with errors of many classes
            for block in range(first, last + 1):
                text = "".join(lines[max(0, block * BLOCK_LINES - start) : (block + 1) * BLOCK_LINES - start])
                self.journal.keep_lines(self.file, block, text)
            self.stored = number

    def drop(self, block: int) -> None:
        """Remove one block."""
        if self.journal is not None:
            with contextlib.suppress(Exception):  # as in `store`
                self.journal.drop_lines(self.file, block)

    def clear(self) -> None:
        """Remove all blocks."""
        if self.journal is not None:
            with contextlib.suppress(Exception):  # as in `store`
                self.journal.drop_lines(self.file)
        self.stored = 0


@dataclass
class JsonlFile:
    """A file of JSON lines. Call `open` first, then `append` for each line, then `close`; from one thread at a time."""

    path: Path
    """The file."""
    tell: Callable[[str, str], None]
    """Gets (kind, text) for the user: once when the file cannot be written, once when it can again, and when another process
    has changed it."""
    journal: LineBackupStore | None = None
    """Where lines are kept a second time."""
    mirrored: bool = False
    """Store every line in the journal too, not only those that cannot be written to the file."""
    kept_bytes: int = KEPT_BYTES
    """Limit of the lines in memory."""
    opened: bool = False
    """Whether `open` was called."""
    recent: RecentLines = field(init=False)
    """The last lines: all that are not in the file, and older ones from which it can be written again."""
    blocks: JournalLineBackup = field(init=False)
    """The last lines, as the journal has them."""
    unwritten: int = 0
    """How many of the last lines are not in the file."""
    lost: int = 0
    """Lines dropped from memory that were never written."""
    signature: Signature = None
    """The file's signature after our last write."""
    failing: bool = False
    """Whether the last attempt to write failed."""
    changed: bool = False
    """Whether another process has changed the file."""

    def __post_init__(self) -> None:
        self.recent, self.blocks = RecentLines(self.kept_bytes), JournalLineBackup(self.journal, self.path.name)

    def open(self, correct: Callable[[list[Line]], list[Line]] = list) -> list[Line]:
        """Repair the file; returns its lines and those that only the journal has, each once. `append` continues after them.

        `correct`: makes the lines as they should be from the lines found.
        """
        self.opened = True
        for left in self.path.parent.glob(".*.tmp"):  # left by a driver that was killed while it wrote
            with contextlib.suppress(OSError):
                left.unlink()
        content = self._content()
        blocks = self.blocks.found()
        in_journal = "".join(blocks[block] for block in sorted(blocks)).encode()
        lines = correct(
            merge_jsonl_lines(parse_jsonl_lines(self.path.name, content or b""), parse_jsonl_lines(self.path.name, in_journal))
        )
        texts = [json.dumps(line) + "\n" for line in lines]
        self.recent.count = (max(blocks) + 1) * BLOCK_LINES if blocks else 0  # after the blocks of former drivers
        for text in texts:
            self._keep(text)
        if content is not None and content[-1:] in (b"", b"\n") and "".join(texts).encode().startswith(content):
            self.signature, self.unwritten = self._current_signature(), min(len(texts) - content.count(b"\n"), len(self.recent))
        else:
            self.signature, self.unwritten = NEVER_MATCHES, len(self.recent)
        if self.unwritten or self.signature == NEVER_MATCHES:
            self._flush(mending=True)
        if self.mirrored:
            self._store()
        if not self.failing or self.blocks.stored >= self.unwritten:  # in the file now, or in the journal under new numbers
            for block in blocks:
                self.blocks.drop(block)
        return lines

    def append(self, facts: Line) -> None:
        """Add a line. If it cannot be written it stays in memory, and training continues."""
        if not self.opened:
            self.open()
        self._keep(json.dumps(facts) + "\n")
        self.unwritten += 1
        self._flush()
        if self.mirrored and not self.failing:
            self._store()

    def close(self) -> None:
        """Write the file again if its content differs: unwritten lines, or changes that kept the file's length."""
        if not self.opened:
            self.open()
        content, ours = self._content(), "".join(self.recent.texts).encode()
        if content is None or not (content.endswith(ours) if self.recent.trimmed else content == ours):
            self.signature = NEVER_MATCHES
            self._flush(alone=True)

    # -- memory and journal --------------------------------------------------------------------------------------------

    def _keep(self, text: str) -> None:
        """Keep a line in memory, before it is counted as unwritten; warn if an unwritten line is lost for the first time."""
        for number in self.recent.add(text):
            if number != self.recent.count - 1 - self.unwritten:  # not the oldest unwritten one: it is in the file
                continue
            self.unwritten -= 1
            self.lost += 1
            if self.lost == 1:
                what = f"the lines that wait for {self.path} take more than {self.kept_bytes:,} bytes: the oldest are dropped"
                self.tell("warning", what)
            if number % BLOCK_LINES == BLOCK_LINES - 1:
                self.blocks.drop(number // BLOCK_LINES)

    def _store(self) -> None:
        """Store lines in the journal: unwritten ones, and the last ones if `mirrored`."""
        number = max(self.unwritten, min(MIRRORED_LINES, len(self.recent)) if self.mirrored else 0)
        self.blocks.store(self.recent, number)
        if self.mirrored and number and (self.recent.count - 1) % BLOCK_LINES == 0:  # a block was begun: the oldest is over
            self.blocks.drop((self.recent.count - number) // BLOCK_LINES - 1)

    # -- the file ------------------------------------------------------------------------------------------------------

    def _flush(self, *, mending: bool = False, alone: bool = False) -> None:
        """Write unwritten lines, or the whole file if another process has changed it. Failures are told, not raised.

        `mending`: the file is known to be damaged, so do not warn of it. `alone`: see `_restore`.
        """
        try:
            if self._current_signature() == self.signature:
                self._append_unwritten()
            else:
                self.unwritten = len(self.recent)
                if not mending and not self.failing:
                    self.changed = True
                    self.tell(
                        "warning",
                        f"{self.path} was shortened, replaced or removed: it is written again\n"
                        "  cure: leave the files of a run alone while it trains",
                    )
                self._restore(alone=alone or mending)
        except OSError as error:
            self._store()
            if not self.failing:
                self.tell(
                    "warning",
                    f"{self.path} cannot be written ({error}); its lines are kept in memory until it can\n"
                    f"  cure: {cure_of_os_error(error, 'free disk space, or put the run folder back')}",
                )
            self.failing = True
            return
        if self.failing:
            what = f"{self.lost} lines are lost" if self.lost else "no line is lost"
            self.tell("note", f"{self.path} can be written again: {what}")
        self.failing = False
        if self.blocks.stored and not self.mirrored:
            self.blocks.clear()

    def _append_unwritten(self) -> None:
        """Append unwritten lines. Raises `OSError`, after truncating what was written in part."""
        if not self.unwritten:
            return
        try:
            with open(self.path, "a", opener=regular_file_opener) as file:
                file.write("".join(self.recent.last(self.unwritten)))
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
        """Write the whole file: its lines that are older than those in memory, then those in memory. Raises `OSError`.

        Newer lines of the file stay too, unless no other driver can have written them (`alone`): a driver that was stopped for
        long and wakes up must not remove its successor's lines.
        """
        content = self._content()
        if content is None:
            aside = next(name for name in self._damaged_names() if not os.path.lexists(name))
            os.rename(self.path, aside)
            self.tell("warning", f"{self.path} was something that cannot be read: it is {aside.name} now, and written anew")
        there = parse_jsonl_lines(self.path.name, content or b"")
        if self.recent.texts:
            first, last = (jsonl_line_sort_key(json.loads(self.recent.texts[i])) for i in (0, -1))
            older = [line for line in there if self.recent.trimmed and jsonl_line_sort_key(line) < first]
            newer = [line for line in there if not alone and jsonl_line_sort_key(line) > last]
        else:
            older, newer = there, []
        texts = [[json.dumps(line) + "\n" for line in lines] for lines in (older, newer)]
        replace_file_atomically(self.path, "".join([*texts[0], *self.recent.texts, *texts[1]]).encode())
        self.signature, self.unwritten = self._current_signature(), 0

    def _damaged_names(self) -> Iterable[Path]:
        """Names for a file that cannot be read, the preferred one first."""
        yield self.path.with_name(self.path.name + ".damaged")
        number = 2
        while True:
            yield self.path.with_name(f"{self.path.name}.damaged-{number}")
            number += 1

    def _content(self) -> bytes | None:
        """The bytes of the file (`read_lines_file`)."""
        return read_lines_file(self.path)

    def _current_signature(self) -> Signature:
        try:
            found = os.lstat(self.path)
        except FileNotFoundError:
            return None
        return found.st_ino, found.st_size
