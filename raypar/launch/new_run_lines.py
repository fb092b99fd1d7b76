"""Reads the new lines of metrics.jsonl or events.jsonl, or only the last lines of a long file."""

from __future__ import annotations

import contextlib
import io
import os
from pathlib import Path

from raypar.files.untrusted_files import open_regular_file
from raypar.record.events import Event
from raypar.storage.read_run_lines import read_events

PIECE_BYTES = 16 << 20
"""The largest number of bytes read at a time."""


class NewLines:
    """Reads the lines that have been added to one file since the last read."""

    def __init__(self, path: Path, last_bytes: int | None = None) -> None:
        self.path = path
        """The file; it may not exist yet."""
        self.offset = 0
        """Position in the file, in bytes, at which the next read begins."""
        self.within_line = False
        """Whether that position may be in the middle of a line."""
        self.restarted = False
        """Whether the last read started from the beginning because the file had become shorter."""
        if last_bytes is not None:
            with contextlib.suppress(OSError):
                self.offset = max(0, path.lstat().st_size - last_bytes)
            self.within_line = self.offset > 0

    def read(self) -> list[Event]:
        """The events of new complete lines; of all lines if the file has become shorter. Raises `ConfigError`."""
        self.restarted = False
        if not os.path.lexists(self.path):
            return []
        with open_regular_file(self.path, follow=False) as file:
            size = os.fstat(file.fileno()).st_size
            if size < self.offset:
                self.offset, self.within_line, self.restarted = 0, False, True
            file.seek(self.offset)
            found: list[Event] = []
            while piece := file.read(PIECE_BYTES):
                whole = piece[: piece.rfind(b"\n") + 1] or (piece if len(piece) == PIECE_BYTES else b"")
                if not whole:
                    break
                lines = io.BytesIO(whole)
                if self.within_line:
                    lines.readline()
                    self.within_line = False
                found += read_events(self.path.name, lines)
                self.offset += len(whole)
                file.seek(self.offset)
            return found
