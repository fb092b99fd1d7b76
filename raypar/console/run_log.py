"""Prints the log of a run from its folder: events and some of its steps as lines, in the order of time."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from typing import TextIO

from raypar.console.json_stdout import json_text
from raypar.console.read_run_folder import read_job_step_count
from raypar.console.run_status import indent_further_lines, local_time
from raypar.errors import ClusterError, ConfigError
from raypar.files.printable_text import printable_text
from raypar.files.redact_secrets import redact_certain_secrets, secrets_of_environment, without_certain_secrets
from raypar.record.events import Event, StepRecord, UnreadableLines, ValidationRecord
from raypar.record.field_types import is_finite_number
from raypar.record.story import Narrator
from raypar.storage.follow_run_files import RunFollower
from raypar.storage.run_folder import RunFolder, resume_argument
from raypar.storage.run_lease import is_held
from raypar.storage.s3_lease_store import s3_lease_store

POLL_S = 0.5
"""How often a followed run's files are looked at."""
POLL_STORAGE_S = 3.0
"""How often those of a run on shared storage are, at most: each look reads them again, in at most a tenth of the time."""
GONE_S = 30.0
"""How long a followed run without a process on this machine may write nothing."""
GONE_FROM_STORAGE_S = 600.0
"""The same for a run on storage whose lease cannot be read (only S3 has one): it may train on another machine."""
EVERY_S = 10.0
"""Time from one line about a step to the next."""


def print_run_log(folder: RunFolder, out: TextIO, *, follow: bool, as_json: bool) -> int:
    """Print the run's events and steps; with `follow` until it has ended. Returns the exit code.

    Raises `ClusterError` for a run that has neither a process on this machine nor news for `GONE_S`.
    """
    known = secrets_of_environment(os.environ)
    log, follower = RunLogFormatter(read_job_step_count(folder)), RunFollower(folder)
    may_train_elsewhere = make_remote_liveness_check(folder)
    heard_s = time.monotonic()
    while True:
        looked_s = time.monotonic()
        locked = folder.is_locked()  # before the files: then they hold all that the process has written
        events = follower.read()
        end = follower.view.ended()
        if as_json:
            facts = (event.facts() for event in events if not isinstance(event, UnreadableLines))
            out.writelines(json_text(without_certain_secrets(one, known)) + "\n" for one in facts)
        else:
            out.writelines(printable_text(redact_certain_secrets(line, known)) + "\n" for line in log.lines(events))
        out.flush()
        if not follow:
            return 0
        if end is not None and not locked:
            return exit_code_of_end(end.end)
        heard_s = time.monotonic() if events or locked else heard_s
        silent_s = time.monotonic() - heard_s
        if silent_s > GONE_S and not may_train_elsewhere(silent_s):
            who = "no process of this machine" if folder.shared is None else "no process that raypar knows of"
            place = resume_argument(folder.place)
            raise ClusterError(
                f"run {folder.name} has written nothing for {silent_s:.0f} s, and {who} trains it",
                cure=f"`raypar status {place}` says what it was doing; `raypar resume {place}` goes on from its last "
                "checkpoint",
            )
        took_s = time.monotonic() - looked_s
        time.sleep(POLL_S if folder.shared is None else max(POLL_STORAGE_S, 9 * took_s))


def make_remote_liveness_check(folder: RunFolder) -> Callable[[float], bool]:
    """A function from the seconds of a run's silence to whether it may still train on another machine.

    On S3 the run's lease tells it. On other storage a run may be silent for `GONE_FROM_STORAGE_S`. A run in a folder of this
    machine never trains elsewhere: its lock tells whether it trains.
    """
    if folder.shared is None:
        return lambda silent_s: False
    try:
        store = s3_lease_store(folder.shared.uri)
    except ConfigError:  # boto3 is missing; reading needs none
        store = None
    if store is None:
        return lambda silent_s: silent_s < GONE_FROM_STORAGE_S
    return lambda silent_s: is_held(store.read())


class RunLogFormatter:
    """Makes the lines of a run's log from what is new in its files."""

    def __init__(self, steps: int | None) -> None:
        self.steps = steps
        """Number of steps of the job."""
        self.narrator = Narrator()
        """Makes the lines of events."""
        self.step_told_s = float("-inf")
        """The time of the last step that has a line."""

    def lines(self, events: Iterable[Event]) -> list[str]:
        """The lines for new events. The first and the last step, and one every `EVERY_S`, have a line."""
        texts = ((event, self._text(event)) for event in events)
        return [f"{local_time(event.time)}  {indent_further_lines(text)}" for event, text in texts if text is not None]

    def _text(self, event: Event) -> str | None:
        """The text of an event; None if it has no line."""
        if isinstance(event, ValidationRecord):
            return event.progress_line()
        if not isinstance(event, StepRecord):
            return self.narrator.line(event)
        at = event.time or 0.0
        if 0 <= at - self.step_told_s < EVERY_S and event.step != self.steps:
            return None
        self.step_told_s = at
        of = f"/{self.steps}" if self.steps is not None else ""
        return f"step {event.step}{of}  loss {loss_text(event.loss)}  {event.samples_per_s:,.0f} samples/s"


def loss_text(loss: float) -> str:
    """A loss as text."""
    return f"{loss:.4f}" if is_finite_number(loss) else "not finite"


def exit_code_of_end(end: str) -> int:
    """The exit code of `raypar train` for a kind of end: 0 done, or stopped as the job asked; 130 interrupted; 1 failed."""
    return {"done": 0, "stopped": 0, "interrupted": 130}.get(end, 1)
