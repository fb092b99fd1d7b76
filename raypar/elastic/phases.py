"""The phases of a run. Their values appear in messages."""

from __future__ import annotations

import enum


class Phase(enum.Enum):
    """Where the run is."""

    STARTING = "starting"
    """The first workers build their stages and connect."""
    RUNNING = "running"
    """Steps are issued."""
    FLUSHING = "flushing"
    """No step is issued before those in flight are seen: a checkpoint, a validation or the end is due."""
    VALIDATING = "validating"
    """The workers run a validation pass."""
    SAVING = "saving"
    """The workers copy their state for a checkpoint; it is written while training goes on."""
    ENDING = "ending"
    """All is done but the last checkpoint, which is being written."""
    ABORTING = "aborting"
    """Ctrl-C's grace is over: the workers leave the steps in flight, and say where they stand."""
    FAILING = "failing"
    """The run has failed; its cause is looked for, and a checkpoint may still be completed."""
    OVER = "over"
    """The last decision has been made."""

    # From one generation to the next.
    CLAIMING = "claiming a generation"
    """The journal is asked whether this driver may go on."""
    STANDING = "asking where the workers stand"
    """The workers leave what they do, and say which state they hold."""
    SETTLING = "settling the open step"
    """Workers apply a step late that others have applied."""
    PLANNING = "choosing a plan"
    """The planner looks for a plan of the workers that are left."""
    ADOPTING = "moving to the new plan"
    """The workers exchange state and build their new stages."""
    WAITING = "waiting for workers"
    """There are too few workers for any plan."""


class UnexpectedEvent(Exception):
    """The table has no row for an event, or the row does not name the phase it led to: a mistake of ours.

    The text tells what happened before.
    """
