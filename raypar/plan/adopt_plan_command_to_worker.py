"""The command that one worker gets when a generation begins: its part of the action `AdoptPlan`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from raypar.plan.pieces import PieceMove


@dataclass(frozen=True)
class AdoptPlanCommand:
    """One worker's part of a new plan, and the state that it sends and receives for it."""

    assignment: Any
    """A `schedule.program_assignment.ProgramAssignment`; None for a worker without a seat, which only sends state."""
    rank_of_worker: Mapping[int, int]
    """Worker number -> its rank in the new transport."""
    steps_done: int
    """Number of steps that have been applied to the state from which all workers start."""
    moves: tuple[PieceMove, ...] = ()
    """All moves of state in this generation, including those between other workers."""
    checkpoint_folder: str | None = None
    """Folder of the checkpoint from which the state is read; None: from memory, or initial values."""
    run_begins: bool = False
    """Whether the run begins, so that all state has its initial values."""
    from_mirror: bool = False
    """Whether `moves` and the worker's own state come from a mirror snapshot."""
    mirror_keepers: Mapping[int, int] = field(default_factory=dict)
    """Rank -> the rank that keeps the mirror's second copy of its state (`elastic.buddies`)."""
