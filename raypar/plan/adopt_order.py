"""What one worker is told when a generation begins: its part of an `AdoptPlan` decision."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from raypar.plan.pieces import PieceMove


@dataclass(frozen=True)
class AdoptOrder:
    """What one worker adopts, and the state that it sends and receives for that."""

    assignment: Any
    """A `schedule.program_assignment.ProgramAssignment`; None for a worker without a seat, which only hands state over."""
    rank_of_worker: Mapping[int, int]
    """Worker -> rank of the new transport."""
    steps_done: int
    """Steps applied to the state from which all workers start."""
    moves: tuple[PieceMove, ...] = ()
    """All moves of the generation, those of other workers too."""
    checkpoint_folder: str | None = None
    """Folder of the checkpoint from which the state is read; None: from memory, or initial values."""
    run_begins: bool = False
    """Whether the run begins: all state has its initial values."""
    from_mirror: bool = False
    """Whether `moves` and the worker's own state come from the mirror."""
    mirror_keepers: Mapping[int, int] = field(default_factory=dict)
    """Rank -> the rank that keeps the mirror's second copy of its state (`elastic.buddies`)."""
