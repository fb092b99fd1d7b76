"""The data flow between instructions: results that each needs and gives, for lowering, validator and simulator."""

from __future__ import annotations

from collections.abc import Sequence

from raypar.plan import GradientRelay, StageConnections, StageEdge
from raypar.schedule.instructions import INPUT_GRADIENTS, VALUES, Bundle, Compute, MessageKind, letter_of_producer

StageResult = tuple[str, int, int]
"""(name of what was made or is kept, stage, microbatch)."""

MESSAGE_KIND: dict[str, MessageKind] = {VALUES: "activation", INPUT_GRADIENTS: "gradient"}
"""Name of what edges and relays carry -> the kind of its messages."""


def message_ends(what: str, carrier: StageEdge | GradientRelay) -> tuple[MessageKind, int, int]:
    """(kind, earlier stage, later stage) of what an edge or a relay carries: its `Bundle` without the microbatch."""
    kind = MESSAGE_KIND[what]
    return (kind, carrier.src, carrier.dst) if kind == "activation" else (kind, carrier.dst, carrier.src)


MessageRoute = tuple[str, int, int]
"""(name of what is carried, sending stage, receiving stage)."""


def message_routes(crossing: StageConnections) -> list[MessageRoute]:
    """The routes of all messages between stages: those of values, then those of gradients."""
    return [(VALUES, e.src, e.dst) for e in crossing.edges] + [(INPUT_GRADIENTS, r.src, r.dst) for r in crossing.relays]


def name_of_producing_instruction(result: StageResult) -> str:
    """The instruction that gives a result as text, such as `1F0`; `B` if both B and I give it."""
    what, stage, microbatch = result
    return f"{stage}{letter_of_producer(what)}{microbatch}"


class DataFlow:
    """The edges and relays between stages, and the results that instructions need and give along them."""

    into: tuple[tuple[StageEdge, ...], ...]
    """Stage -> edges whose values the stage uses."""
    out_of: tuple[tuple[StageEdge, ...], ...]
    """Stage -> edges whose values the stage makes."""
    relays_to: tuple[tuple[GradientRelay, ...], ...]
    """Stage -> relays that bring gradients to the stage."""
    relays_from: tuple[tuple[GradientRelay, ...], ...]
    """Stage -> relays by which the stage hands gradients on."""

    def __init__(self, crossing: StageConnections, stages: int) -> None:
        self.into = tuple(crossing.into(s) for s in range(stages))
        self.out_of = tuple(crossing.out_of(s) for s in range(stages))
        self.relays_to = tuple(crossing.relays_to(s) for s in range(stages))
        self.relays_from = tuple(crossing.relays_from(s) for s in range(stages))
        self._arrivals: dict[tuple[type[Compute], int], list[tuple[str, int, MessageKind, int, int]]] = {}
        self._gives: dict[tuple[type[Compute], int], list[tuple[int, MessageKind, int, int]]] = {}

    def connections_into(self, what: str, stage: int) -> Sequence[StageEdge | GradientRelay]:
        """The edges or relays that bring `what` to a stage; empty if messages do not carry it."""
        if what == VALUES:
            return self.into[stage]
        return self.relays_to[stage] if what == INPUT_GRADIENTS else ()

    def connections_out_of(self, what: str, stage: int) -> Sequence[StageEdge | GradientRelay]:
        """The edges or relays that take `what` from a stage; empty if messages do not carry it."""
        if what == VALUES:
            return self.out_of[stage]
        return self.relays_from[stage] if what == INPUT_GRADIENTS else ()

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
                (what, carrier.src, *message_ends(what, carrier))
                for what in kind.needs
                for carrier in self.connections_into(what, stage)
            ]
        return found

    def gives(self, instruction: Compute) -> list[tuple[int, Bundle]]:
        """(consuming stage, bundle) for everything that an instruction sends to other stages."""
        key, m = (type(instruction), instruction.stage), instruction.microbatch
        gives = self._gives.get(key)
        if gives is None:
            gives = self._gives[key] = [
                (carrier.dst, *message_ends(what, carrier))
                for what in key[0].makes
                for carrier in self.connections_out_of(what, key[1])
            ]
        return [(other, (kind, src, dst, m)) for other, kind, src, dst in gives]


def needs_of_own_stage(kind: type[Compute]) -> tuple[str, ...]:
    """Names of the results that a class of instructions needs of its own stage: all that messages do not carry."""
    return tuple(what for what in kind.needs if what not in MESSAGE_KIND)
