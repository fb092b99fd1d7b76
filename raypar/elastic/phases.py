"""The phases of a run. Their values appear in messages."""

from __future__ import annotations

import enum


class Phase(enum.Enum):
    """A phase of the run machine."""

    STARTING = "starting"
    """The first workers are placed and load their code."""
    RUNNING = "running"
    """Steps are issued."""
    FLUSHING = "flushing"
    """No step is issued before the open ones are emitted: a checkpoint, a validation or the end is due."""
    VALIDATING = "validating"
    """The workers run a validation pass."""
    SAVING = "saving"
    """The workers copy their state for a checkpoint; it is written while training goes on."""
    REBALANCING = "sharing out the blocks anew"
    """The workers take other blocks of a step, because one is slow, or fast again; nothing else changes."""
    ENDING = "ending"
    """Training is over; the last checkpoint is being written."""
    ABORTING = "aborting"
    """The grace period after Ctrl-C is over: the workers abort the steps in flight and report the steps they have applied."""
    FAILING = "failing"
    """The run has failed: the machine waits for the cause, and a checkpoint may still be completed."""
    OVER = "over"
    """The last decision has been made."""

    # From one generation to the next.
    CLAIMING = "claiming a generation"
    """The journal is asked whether this driver may go on."""
    STANDING = "asking where the workers stand"
    """The workers abort their work and report which state they hold."""
    SETTLING = "settling the open step"
    """Some workers apply late a step that others have applied."""
    PLANNING = "choosing a plan"
    """The planner looks for a plan for the workers that are left."""
    ADOPTING = "moving to the new plan"
    """The workers exchange state and build their new stages."""
    WAITING = "waiting for workers"
    """There are too few workers for any plan."""


class UnexpectedEvent(Exception):
    """Raised if the table has no row for an event, or the rule led to a phase that its row does not name: a bug in raypar.

    The text tells the events before.
    """
