"""What the cut of a model into stages makes cross between workers: values along edges, and tied parameters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Edge:
    """All values that stage `src` produces and stage `dst` uses; sent as one bundle a microbatch, straight to the consumer.

    `nbytes` is of one microbatch, for the simulator; 0 when unknown. `differentiable` says whether a gradient comes back.
    """

    src: int
    dst: int
    values: tuple[str, ...] = ("x",)
    nbytes: int = 0
    differentiable: bool = True


@dataclass(frozen=True, slots=True)
class Tie:
    """A parameter used by layers of several stages; `stages` ascending."""

    name: str
    stages: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Crossing:
    """Everything that connects the stages of one plan of one model."""

    edges: tuple[Edge, ...]
    ties: tuple[Tie, ...] = ()

    @staticmethod
    def chain(stages: int, nbytes: Sequence[int] | int = 0) -> Crossing:
        """Each stage feeds the next: the crossing of a plain sequential model. `nbytes`: one value, or one per cut."""
        sizes = [nbytes] * (stages - 1) if isinstance(nbytes, int) else list(nbytes)
        return Crossing(tuple(Edge(s, s + 1, nbytes=sizes[s]) for s in range(stages - 1)))

    def into(self, stage: int) -> tuple[Edge, ...]:
        """Edges whose values the stage consumes, by source."""
        return tuple(e for e in self.edges if e.dst == stage)

    def out_of(self, stage: int) -> tuple[Edge, ...]:
        """Edges whose values the stage produces, by destination."""
        return tuple(e for e in self.edges if e.src == stage)
