"""Prints a run in a few lines, each with the run's name: for many runs side by side, as in a sweep."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, TextIO

from raypar.files.redact_secrets import redact_certain_secrets
from raypar.record.events import ActivityNotice, EndOfRun, Event, RunStart, SavedCheckpoint, StartupStage
from raypar.record.story import Narrator

if TYPE_CHECKING:
    from raypar.launch.result import Result


class BriefEventPrinter:
    """Prints what a run waits for, warnings, what happens to its workers, and its end; call it with each event."""

    def __init__(self, run: str, known_secrets: list[str], out: TextIO | None = None) -> None:
        self.run = run
        """The run's name: the job's, until the run has its folder."""
        self.known_secrets = known_secrets
        """Texts that are not printed."""
        self.out = out or sys.stdout
        """Where lines are printed."""
        self.narrator = Narrator()
        """Makes the lines of events."""
        self.plan = ""
        """The plan in words; empty until the stage `planned`."""

    def __call__(self, event: Event) -> None:
        """Print an event, unless it is a step, a checkpoint, or a stage before training begins."""
        match event:
            case StartupStage():
                self._show_stage(event)
            case RunStart() | EndOfRun() | SavedCheckpoint() | ActivityNotice():
                pass
            case _:
                line = self.narrator.line(event)
                if line is not None:
                    self.line(line)

    def _show_stage(self, event: StartupStage) -> None:
        """Print that training begins, with the plan; earlier stages are not printed."""
        self.run = event.run or self.run
        if event.stage == "planned":
            self.plan = (event.text or "").splitlines()[0].partition(";")[0]
        elif event.stage == "built":
            self.line(f"training begins: {self.plan}")

    def finish(self, result: Result) -> None:
        """Print how the run has ended, its last loss and its folder."""
        loss = result.metrics.get("loss")
        self.line(f"{result.why}" + (f", loss {loss:.4f}" if loss is not None else "") + f"; in {result.path}")

    def line(self, text: str) -> None:
        """Print the lines of a text, each behind the run's name."""
        for one in redact_certain_secrets(text, self.known_secrets).splitlines():
            print(f"{self.run}: {one}", file=self.out, flush=True)
