"""Which rank holds which pieces of the state under a plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from raypar.errors import PlanError
from raypar.plan.parallel_plan import ParallelPlan
from raypar.plan.pieces import Piece
from raypar.plan.shard_ranges import Cut


@dataclass(frozen=True)
class WholeParameters:
    """What each rank of a plan has to hold when nothing is sliced. `sizes`: by layer, parameter -> elements (a tie under its
    first name, in every layer that uses it); what the optimizer keeps for a parameter goes with it.
    """

    sizes: tuple[Mapping[str, int], ...]

    def __call__(self, plan: ParallelPlan) -> tuple[tuple[Piece, ...], ...]:
        """By rank."""
        return tuple(tuple(Piece(name, 0, size) for name, size in sorted(self.of(plan, r).items())) for r in range(plan.world))

    def of(self, plan: ParallelPlan, rank: int) -> dict[str, int]:
        """Parameters of one rank, and their sizes."""
        found: dict[str, int] = {}
        for index in plan.stages_of(rank):
            for layer in range(plan.stages[index].first, plan.stages[index].last):
                found |= self.sizes[layer]
        return found


@dataclass(frozen=True)
class SlicedParameters:
    """`sizes` as in `WholeParameters`. `cuts`: number of shards -> parameter -> cut; a parameter that is not there is whole on
    every shard.

    Pieces number the elements of a cut parameter with the cut dim as the slowest, under every plan (`Cut.pieces`): so what
    moves between plans of other shards is their set difference too.
    """

    sizes: tuple[Mapping[str, int], ...]
    cuts: Mapping[int, Mapping[str, Cut]]

    def __call__(self, plan: ParallelPlan) -> tuple[tuple[Piece, ...], ...]:
        """By rank. Raises `PlanError` for a number of shards that nobody has thought of."""
        whole = WholeParameters(self.sizes)
        found = []
        for rank, seat in enumerate(plan.seats):
            shards = plan.stages[plan.stages_of(rank)[0]].shards
            if shards > 1 and shards not in self.cuts:
                raise PlanError(f"it is not known how the model is cut over {shards} shards", cure="report this")
            cuts = self.cuts.get(shards, {})
            pieces: list[Piece] = []
            for name, size in sorted(whole.of(plan, rank).items()):
                spans = cuts[name].pieces(cuts[name].held[seat.shard], size) if name in cuts else ((0, size),)
                pieces += [Piece(name, start, stop) for start, stop in spans]
            found.append(tuple(pieces))
        return tuple(found)
