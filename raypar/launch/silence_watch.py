"""Tells the user what this process is doing, whenever nothing else has been told for a while: a thread looks at its stack."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Any

from raypar.elastic.wait_announcements import SILENCE_S, WaitAnnouncer
from raypar.launch.result_neutral_options import EventHandler

LOOK_S = 0.25
"""Time from one look to the next."""
END_S = 1.0
"""How long the end waits for a line that is being printed; nobody may be reading it."""


class SilenceWatch:
    """Passes events on, one at a time, and notes when. Call it with each event."""

    def __init__(self, tell: EventHandler, patience_s: float = SILENCE_S) -> None:
        self.tell = tell
        """Gets every event, from one thread at a time."""
        self.patience_s = patience_s
        """How long nothing may be told."""
        self.told_s = time.monotonic()
        """When an event was last passed on, or the driver answered, which tells what it waits for itself."""
        self._watched = threading.get_ident()
        """The thread that is waited for."""
        self._over = threading.Event()
        """Set at the end."""
        self._telling = threading.RLock()
        """Held while an event is told."""

    def __call__(self, event: dict[str, Any]) -> None:
        """Tell an event."""
        with self._telling:
            self.told_s = time.monotonic()
            self.tell(event)

    def heard(self) -> None:
        """Note that the driver has answered."""
        self.told_s = time.monotonic()

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Within: events of kind `waiting_for` tell what the calling thread is doing while nothing else is told."""
        self._watched, self.told_s = threading.get_ident(), time.monotonic()
        thread = threading.Thread(target=self._watch, name="raypar-silence", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._over.set()
            thread.join(END_S)

    def _watch(self) -> None:
        from raypar.worker.process.thread_activity import describe_thread_activity

        announcer = WaitAnnouncer()
        while not self._over.wait(LOOK_S):
            since_s, doing = self.told_s, describe_thread_activity(self._watched)
            line = announcer.line(doing, time.monotonic(), since_s, self.patience_s)
            if line is None:
                continue
            with self._telling, contextlib.suppress(Exception):  # the watched thread meets the same error with its next event
                if self.told_s == since_s and not self._over.is_set():
                    self.tell({"kind": "waiting_for", "text": line})
