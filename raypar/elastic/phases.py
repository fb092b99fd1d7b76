"""The phases of a run."""

from __future__ import annotations

import enum


class Phase(enum.Enum):
    """Where the run is."""

    STARTING = "starting"
    RUNNING = "running"
    FLUSHING = "flushing"
    VALIDATING = "validating"
    SAVING = "saving"
    ENDING = "ending"
    ABORTING = "aborting"
    FAILING = "failing"
    OVER = "over"

    # Recovery and rescaling: a new generation comes about.
    CLAIMING = "claiming a generation"
    STANDING = "asking where the workers stand"
    SETTLING = "settling the open step"
    PLANNING = "choosing a plan"
    ADOPTING = "moving to the new plan"
    WAITING = "waiting for workers"


class UnexpectedEvent(Exception):
    """An event that the table has no rule for: our own mistake. The text has the story so far."""
