"""The log of a run from its folder: events and some of its steps as lines, in the order of time. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from raypar.console.run_status import indent_further_lines, local_time
from raypar.record.events import Event, StepRecord, ValidationRecord, is_finite_number
from raypar.record.story import Narrator

EVERY_S = 10.0
"""Time from one line about a step to the next."""


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
            return f"step {event.step}: validation loss {loss_text(event.validation_loss)}"
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
