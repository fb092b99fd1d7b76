"""Tells the user what this process is doing while it prints nothing else: a second thread reads the stack of the first.

`actors/wait_reporter.py` does the same for the driver and the workers, once the driver answers.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator

from raypar.elastic.user_messages import SILENCE_S, WaitAnnouncer
from raypar.launch.launch_options import EventHandler
from raypar.record.events import ActivityNotice, Event

POLL_S = 0.25
"""Time from one look at the stack to the next."""
JOIN_TIMEOUT_S = 1.0
"""How long to wait, at the end, for a line that is being printed: the terminal may be stopped."""


class ActivityReporter:
    """An event handler that passes every event on, and adds events of kind `waiting_for` when there were none for a while."""

    def __init__(self, tell: EventHandler, patience_s: float = SILENCE_S) -> None:
        self.tell = tell
        """Gets every event, from one thread at a time."""
        self.patience_s = patience_s
        """How long a silence may last before a line says what is waited for."""
        self.told_s = time.monotonic()
        """When an event was last passed on, or when the driver last answered: a driver that answers reports its own waits."""
        self._watched = threading.get_ident()
        """Ident of the thread whose stack is read."""
        self._over = threading.Event()
        """Set when `reporting` ends."""
        self._telling = threading.RLock()
        """Held while an event is passed on, so that two threads never print at once."""

    def __call__(self, event: Event) -> None:
        """Pass an event on."""
        with self._telling:
            self.told_s = time.monotonic()
            self.tell(event)

    def note_driver_answer(self) -> None:
        """Note that the driver has answered: from now on it is not this process that keeps the user waiting."""
        self.told_s = time.monotonic()

    @contextlib.contextmanager
    def reporting(self) -> Iterator[None]:
        """Context in which silences of the calling thread are reported."""
        self._watched, self.told_s = threading.get_ident(), time.monotonic()
        thread = threading.Thread(target=self._watch, name="raypar-activity", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._over.set()
            thread.join(JOIN_TIMEOUT_S)

    def _watch(self) -> None:
        from raypar.worker.process.thread_activity import describe_thread_activity

        announcer = WaitAnnouncer()
        while not self._over.wait(POLL_S):
            since_s, doing = self.told_s, describe_thread_activity(self._watched)
            line = announcer.due_line(doing, time.monotonic(), since_s, self.patience_s)
            if line is None:
                continue
            with self._telling, contextlib.suppress(Exception):  # the watched thread meets the same error with its next event
                if self.told_s == since_s and not self._over.is_set():
                    self.tell(ActivityNotice(text=line))
