"""Into which parts the state of an optimizer may be divided among owners without changing a bit."""

from __future__ import annotations

from enum import Enum


class StateDivision(Enum):
    """The parts of a parameter's optimizer state that several owners may keep, each with an optimizer of its own parts.

    A trial of the optimizer finds it (`worker/step/state_division_trial.py`).
    """

    BY_RUNS = "by runs of 32,768 elements"
    """An owner may have runs of a flattened parameter that begin at multiples of `CANONICAL_PIECE` (`plan/ownership.py`)."""
    BY_PARAMETERS = "by whole parameters"
    """An owner has whole parameters: what a step does to one element depends on others of its parameter, or on its shape."""
    NOT_AT_ALL = "not at all"
    """Every owner has all parameters: what a step does to one depends on others."""
