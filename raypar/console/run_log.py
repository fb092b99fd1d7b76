"""The log of a run from its folder: events and some of its steps as lines, in the order of time. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from raypar.console.event_lines import EventNarrator
from raypar.console.run_status import indent_further_lines, local_time

EVERY_S = 10.0
"""Time from one line about a step to the next."""


class RunLogFormatter:
    """Makes the lines of a run's log from what is new in its files."""

    def __init__(self, steps: int | None) -> None:
        self.steps = steps
        """Number of steps of the job."""
        self.narrate = EventNarrator()
        """Makes the lines of events."""
        self.step_told_s = float("-inf")
        """The time of the last step that has a line."""

    def lines(self, metrics: Iterable[Mapping[str, Any]], events: Iterable[Mapping[str, Any]]) -> list[str]:
        """The lines for new metrics and events. The first and the last step, and one every `EVERY_S`, have a line."""
        found = [(entry.get("time") or 0.0, number, entry) for number, entry in enumerate((*metrics, *events))]
        texts = ((entry, self._text(entry)) for _, _, entry in sorted(found, key=lambda one: one[:2]))
        return [f"{local_time(entry.get('time'))}  {indent_further_lines(text)}" for entry, text in texts if text is not None]

    def _text(self, entry: Mapping[str, Any]) -> str | None:
        """The text of an entry; None if it has no line."""
        if "kind" in entry:
            return self.narrate(entry)
        if "loss" not in entry:
            return f"step {entry['step']}: validation loss {loss_text(entry['validation_loss'])}"
        at = entry.get("time") or 0.0
        if 0 <= at - self.step_told_s < EVERY_S and entry["step"] != self.steps:
            return None
        self.step_told_s = at
        of = f"/{self.steps}" if self.steps is not None else ""
        return f"step {entry['step']}{of}  loss {loss_text(entry['loss'])}  {entry['samples_per_s']:,.0f} samples/s"


def loss_text(loss: float | None) -> str:
    """A loss as text; the lines have null for one that is not finite."""
    return "not finite" if loss is None else f"{loss:.4f}"


def with_kind(entry: Mapping[str, Any]) -> dict[str, Any]:
    """The entry with its kind, for `--json`: of metrics step or validation."""
    if "kind" in entry:
        return dict(entry)
    return {"kind": "step" if "loss" in entry else "validation", **entry}


def exit_code_of_end(end: str) -> int:
    """The exit code of `raypar train` for a kind of end: 0 done, or stopped as the job asked; 130 interrupted; 1 failed."""
    return {"done": 0, "stopped": 0, "interrupted": 130}.get(end, 1)
