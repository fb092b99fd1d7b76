"""The story of a run: the lines of its events, in order, and at most so many that memory is bounded. Pure."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from raypar.record.events import EndOfRun, Event, GenerationStart, Recovery, RunStart, SavedCheckpoint

FIRST_LINES, LAST_LINES = 60, 2000
"""How many of the first and of the last lines are kept."""


class Narrator:
    """Makes the lines for a sequence of events; also reports generations that were tried and given up."""

    def __init__(self) -> None:
        self.trying: int | None = None
        """The generation that is being started; None while none is."""
        self.known = 1
        """The last generation whose outcome was reported."""

    def line(self, event: Event) -> str | None:
        """The line of the next event; None if it has none."""
        trying = self.trying
        match event:
            case Recovery(workers=None):
                self.trying = None
                if trying is not None:
                    self.known = trying
                    return event.given_up_line(trying)
            case Recovery():
                self.trying = event.generation
            case GenerationStart():
                missed, self.known, self.trying = range(self.known + 1, event.generation), event.generation, None
                return event.line(missed=missed)
            case RunStart():
                self.known, self.trying = 1, None
            case EndOfRun():
                self.trying = None
        return event.line()


@dataclass(frozen=True)
class StoryLine:
    """One event of the story."""

    time: float | None
    """When it was, in Unix time."""
    event: Event
    """The event."""
    line: str
    """The line that was printed when it happened."""
    summary: str
    """The line in `Story.summary`, which leaves out the lines of finished recoveries."""


class Story:
    """The first and the last lines of a run's events. Of consecutive checkpoints only the last is kept."""

    def __init__(self) -> None:
        self.first: list[StoryLine] = []
        """The first lines."""
        self.last: deque[StoryLine] = deque(maxlen=LAST_LINES)
        """The last lines; in a short story some are in `first`, too."""
        self.count = 0
        """Number of all lines."""
        self._narrator = Narrator()
        self._generation = 1
        """The last generation that has trained."""
        self._over = 0
        """Number of lines before those about the present recovery."""
        self._checkpoint: StoryLine | None = None
        """The line of the last checkpoint."""
        self._after_checkpoint = False
        """Whether the last event was a checkpoint."""
        self._superseded = 0
        """Number of lines that `summary` leaves out."""
        self._recoveries = 0
        """Number of lines about the present recovery."""

    def add(self, event: Event) -> None:
        """Add the next event; not for steps and validations."""
        saved = isinstance(event, SavedCheckpoint)
        if saved and self._after_checkpoint and self._checkpoint is not None:
            self._pop_last()
        elif saved and self._checkpoint is not None:
            self._superseded += 1
        self._after_checkpoint = saved
        line = summary = self._narrator.line(event)
        if isinstance(event, GenerationStart):
            summary = event.line(missed=range(self._generation + 1, event.generation))
            self._generation = event.generation
        if isinstance(event, RunStart):
            self._generation = 1
        if isinstance(event, (RunStart, GenerationStart)):
            self._superseded += self._recoveries
            self._over, self._recoveries = self.count, 0
        if line is None or summary is None:
            return
        self._recoveries += isinstance(event, Recovery)
        told = StoryLine(event.time, event, line, summary)
        self._checkpoint = told if saved else self._checkpoint
        if len(self.first) < FIRST_LINES:
            self.first.append(told)
        self.last.append(told)
        self.count += 1

    def _pop_last(self) -> None:
        """Remove the last line."""
        if self.first and self.first[-1] is self.last[-1]:
            self.first.pop()
        self.last.pop()
        self.count -= 1

    def lines(self, first: int, last: int) -> tuple[list[StoryLine], int]:
        """(the first `first` and the last `last` lines, number of lines left out between them).

        `first` is at most `FIRST_LINES`, `last` at most `LAST_LINES`.
        """
        if self.count <= first + last:
            return list(self.last), 0
        return [*self.first[:first], *list(self.last)[-last:]], self.count - first - last

    def summary(self) -> tuple[list[StoryLine], int]:
        """(the last lines, number of lines left out before them), with only the last checkpoint and the present recovery."""
        before = self.count - len(self.last)
        told = [
            one
            for number, one in enumerate(self.last, start=before)
            if (not isinstance(one.event, SavedCheckpoint) or one is self._checkpoint)
            and (not isinstance(one.event, Recovery) or number >= self._over)
        ]
        return told, self.count - self._superseded - len(told)
