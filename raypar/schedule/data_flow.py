"""What a compute instruction needs: the one statement of the data flow that lowering and validation share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from raypar.plan import Crossing, Edge
from raypar.schedule.instructions import Backward, BackwardInput, BackwardWeight, Compute, Forward, Kind

Result = tuple[Literal["F", "B", "W"], int, int]
"""(what was computed, stage, microbatch); B stands for the input gradients, from `Backward` or `BackwardInput`."""
Bundle = tuple[Kind, int, int, int]
"""(kind, producer's stage, consumer's stage, microbatch): the values of one edge, or their gradients."""


def result_of(instruction: Compute) -> Result:
    """What others wait for when they need this instruction."""
    if isinstance(instruction, Forward):
        return ("F", instruction.stage, instruction.microbatch)
    if isinstance(instruction, BackwardWeight):
        return ("W", instruction.stage, instruction.microbatch)
    return ("B", instruction.stage, instruction.microbatch)


class DataFlow:
    """The edges of a crossing by stage."""

    def __init__(self, crossing: Crossing, stages: int) -> None:
        self.into: tuple[tuple[Edge, ...], ...] = tuple(crossing.into(s) for s in range(stages))
        self.out_of: tuple[tuple[Edge, ...], ...] = tuple(crossing.out_of(s) for s in range(stages))

    def needs(self, instruction: Compute) -> Iterator[tuple[Result, Bundle | None]]:
        """Results an instruction needs, each with the bundle that carries it (None: from the same stage)."""
        stage, m = instruction.stage, instruction.microbatch
        if isinstance(instruction, Forward):
            for edge in self.into[stage]:
                yield ("F", edge.src, m), ("activation", edge.src, stage, m)
        elif isinstance(instruction, (Backward, BackwardInput)):
            yield ("F", stage, m), None
            for edge in self.out_of[stage]:
                if edge.differentiable:
                    yield ("B", edge.dst, m), ("gradient", stage, edge.dst, m)
        else:
            yield ("B", stage, m), None

    def gives(self, instruction: Compute) -> Iterator[tuple[int, Bundle]]:
        """(consuming stage, bundle) of everything an instruction hands on."""
        stage, m = instruction.stage, instruction.microbatch
        if isinstance(instruction, Forward):
            for edge in self.out_of[stage]:
                yield edge.dst, ("activation", stage, edge.dst, m)
        elif isinstance(instruction, (Backward, BackwardInput)):
            for edge in self.into[stage]:
                if edge.differentiable:
                    yield edge.src, ("gradient", edge.src, stage, m)
