"""The data flow between instructions: results that each needs and gives, for lowering, validator and simulator."""

from __future__ import annotations

from raypar.plan import StageConnections, StageEdge
from raypar.schedule.instructions import INPUT_GRADIENTS, VALUES, Bundle, Compute, MessageKind, letter_of_maker

StageResult = tuple[str, int, int]
"""(name of what was made or is kept, stage, microbatch)."""

MESSAGE_KIND: dict[str, MessageKind] = {VALUES: "activation", INPUT_GRADIENTS: "gradient"}
"""Name of what edges carry -> the kind of its messages."""


def name_maker_of_result(result: StageResult) -> str:
    """The instruction that gives a result as text, such as `1F0`; `B` if both B and I give it."""
    what, stage, microbatch = result
    return f"{stage}{letter_of_maker(what)}{microbatch}"


class DataFlow:
    """The edges between stages, and the results that instructions need and give along them."""

    into: tuple[tuple[StageEdge, ...], ...]
    """Stage -> edges whose values the stage uses."""
    out_of: tuple[tuple[StageEdge, ...], ...]
    """Stage -> edges whose values the stage makes."""

    def __init__(self, crossing: StageConnections, stages: int) -> None:
        self.into = tuple(crossing.into(s) for s in range(stages))
        self.out_of = tuple(crossing.out_of(s) for s in range(stages))
        self._arrivals: dict[tuple[type[Compute], int], list[tuple[str, int, MessageKind, int, int]]] = {}
        self._gives: dict[tuple[type[Compute], int], list[tuple[int, MessageKind, int, int]]] = {}

    def arriving(self, what: str, stage: int) -> list[tuple[int, StageEdge]]:
        """(source stage, edge) for each edge that brings `what` to a stage; empty if edges do not carry it."""
        if what == VALUES:
            return [(e.src, e) for e in self.into[stage]]
        if what == INPUT_GRADIENTS:
            return [(e.dst, e) for e in self.out_of[stage] if e.differentiable]
        return []

    def leaving(self, what: str, stage: int) -> list[tuple[int, StageEdge]]:
        """(consuming stage, edge) for each edge that takes `what` from a stage; empty if edges do not carry it."""
        if what == VALUES:
            return [(e.dst, e) for e in self.out_of[stage]]
        if what == INPUT_GRADIENTS:
            return [(e.src, e) for e in self.into[stage] if e.differentiable]
        return []

    def awaits(self, instruction: Compute) -> list[tuple[StageResult, Bundle]]:
        """The results of other stages that an instruction needs, each with the bundle that carries it."""
        m = instruction.microbatch
        arrivals = self.arrivals(type(instruction), instruction.stage)
        return [((what, other, m), (kind, src, dst, m)) for what, other, kind, src, dst in arrivals]

    def arrivals(self, kind: type[Compute], stage: int) -> list[tuple[str, int, MessageKind, int, int]]:
        """(what, source stage, kind, src, dst) for each result that a class of instructions needs of other stages.

        The last three are the bundle that carries it, without the microbatch.
        """
        found = self._arrivals.get((kind, stage))
        if found is None:
            found = self._arrivals[kind, stage] = [
                (what, other, MESSAGE_KIND[what], edge.src, edge.dst)
                for what in kind.needs
                for other, edge in self.arriving(what, stage)
            ]
        return found

    def gives(self, instruction: Compute) -> list[tuple[int, Bundle]]:
        """(consuming stage, bundle) for everything that an instruction sends to other stages."""
        key, m = (type(instruction), instruction.stage), instruction.microbatch
        gives = self._gives.get(key)
        if gives is None:
            gives = self._gives[key] = [
                (other, MESSAGE_KIND[what], edge.src, edge.dst)
                for what in key[0].makes
                for other, edge in self.leaving(what, key[1])
            ]
        return [(other, (kind, src, dst, m)) for other, kind, src, dst in gives]


def needs_of_own_stage(kind: type[Compute]) -> tuple[str, ...]:
    """Names of the results that a class of instructions needs of its own stage: all that edges do not carry."""
    return tuple(what for what in kind.needs if what not in MESSAGE_KIND)
