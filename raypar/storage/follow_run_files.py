"""Reads the new lines of metrics.jsonl and events.jsonl, or only the last lines of long files."""

from __future__ import annotations

import contextlib
import io
import os
from pathlib import Path
from typing import TYPE_CHECKING

from raypar.files.untrusted_files import open_regular_file
from raypar.record.events import Event
from raypar.record.fold import RunView, timeline
from raypar.storage.read_run_lines import read_events

if TYPE_CHECKING:
    from raypar.storage.run_folder import RunFolder

PIECE_BYTES = 16 << 20
"""The largest number of bytes read at a time."""


class NewLineReader:
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


class RunFollower:
    """Reads the events of a run that are new since the last read, and keeps what they say."""

    def __init__(self, folder: RunFolder, last_bytes: int | None = None) -> None:
        self.folder = folder
        """The run; one on shared storage is copied again before each read but the first."""
        self.files = tuple(NewLineReader(path, last_bytes) for path in (folder.metrics, folder.events))
        """Its files of lines; of each the first read takes only the last `last_bytes`."""
        self.view = RunView()
        """What the events say."""
        self.has_read = False
        """Whether there was a read."""

    @property
    def restarted(self) -> bool:
        """Whether the last read took a file from its beginning because it had become shorter: `view` knows lines twice."""
        return any(file.restarted for file in self.files)

    def read(self) -> list[Event]:
        """The new events, in the order of time. Raises `ConfigError`."""
        if self.has_read and self.folder.shared is not None:
            from raypar.storage.folder_download import download_run

            download_run(self.folder.shared.uri, self.folder.path)
        self.has_read = True
        events = list(timeline(*(file.read() for file in self.files)))
        for event in events:
            self.view.apply(event)
        return events
