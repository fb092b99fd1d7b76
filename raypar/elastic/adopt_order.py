"""One worker's share of an `actions.AdoptPlan`: what it is sent when a generation begins."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from raypar.elastic.holdings import Move


@dataclass(frozen=True)
class AdoptOrder:
    """`assignment`: a `schedule.assignment.Assignment`, or None: no seat, but something to hand over.

    `ranks`: worker -> rank of the new transport; `done`: steps applied to the state everybody starts from; `load`: a
    checkpoint to read it from; `fresh`: it is the beginning, everything has its initial values; `cut`: it is the mirror's cut.
    `buddies`: rank -> the rank that keeps its copy (`elastic.buddies`).
    """

    assignment: Any
    ranks: Mapping[int, int]
    done: int
    moves: tuple[Move, ...] = ()
    load: str | None = None
    fresh: bool = False
    cut: bool = False
    buddies: Mapping[int, int] = field(default_factory=dict)
