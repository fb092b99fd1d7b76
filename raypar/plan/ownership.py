"""The pieces of state that each rank keeps, by kind of state."""

from __future__ import annotations

import heapq
from bisect import bisect_left, bisect_right
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import Literal

from raypar.errors import PlanError
from raypar.plan.model_outline import ModelOutline
from raypar.plan.parallel_plan import ParallelPlan, Role
from raypar.plan.pieces import Piece
from raypar.plan.shard_ranges import IndexRanges, TensorCut, count_indices, indices_at_positions, intersect_ranges

CANONICAL_PIECE = 32_768
"""Elements of a flattened tensor whose squares are summed in its own dtype, before float64 takes over (rule 7 of the numerics
contract, raypar/NUMERICS.md).

Owners' runs begin at multiples of it. So an owner computes whole terms of the norm, and an optimizer that works on
runs of elements, a fused one too, gives the same bits as one that works on the whole tensor.
"""


@dataclass(frozen=True)
class BalancedTensorShares:
    """Flattened tensors, divided among `owners` in canonical pieces: each piece goes to an owner with the fewest elements.

    Full pieces are given out first, tensor by tensor, and an owner's pieces of a tensor are adjacent. The shorter pieces at the
    ends of tensors follow, the longest first, and even out the numbers of elements.
    """

    sizes: tuple[int, ...]
    """Elements of each tensor."""
    owners: int
    """Number of owners."""

    def runs_of_owner(self, owner: int) -> Iterator[tuple[int, int, int]]:
        """The runs of one owner, ascending: (index of the tensor, first element, element behind the last)."""
        for index, size in enumerate(self.sizes):
            full = size // CANONICAL_PIECE
            each, more = divmod(full, self.owners)
            place = (owner - self._next_owner[index]) % self.owners
            first = place * each + min(place, more)
            start, stop = first * CANONICAL_PIECE, (first + each + (place < more)) * CANONICAL_PIECE
            last = self._owner_of_end.get(index) == owner
            if last and stop == full * CANONICAL_PIECE and start < stop:
                yield index, start, size
                continue
            if start < stop:
                yield index, start, stop
            if last:
                yield index, full * CANONICAL_PIECE, size

    @cached_property
    def _next_owner(self) -> tuple[int, ...]:
        """By tensor: the owner whose turn it is when the tensor's full pieces are given out."""
        counts = accumulate((size // CANONICAL_PIECE for size in self.sizes), initial=0)
        return tuple(count % self.owners for count in counts)

    @cached_property
    def _owner_of_end(self) -> dict[int, int]:
        """Tensor -> owner of the shorter piece at its end."""
        each, more = divmod(sum(size // CANONICAL_PIECE for size in self.sizes), self.owners)
        loads = [((each + (owner < more)) * CANONICAL_PIECE, owner) for owner in range(self.owners)]
        heapq.heapify(loads)
        ends = [(-(size % CANONICAL_PIECE), index) for index, size in enumerate(self.sizes) if size % CANONICAL_PIECE]
        found = {}
        for size, index in sorted(ends):
            load, owner = loads[0]
            heapq.heapreplace(loads, (load - size, owner))
            found[index] = owner
        return found


def consecutive_tensor_share(sizes: Sequence[int], owner: int, owners: int) -> slice:
    """The slice of tensors that belongs to one owner: owners get whole, consecutive tensors of about equal total size."""
    total = max(1, sum(sizes))
    before = accumulate(sizes[:-1], initial=0) if sizes else ()
    owner_of = [owners * start // total for start in before]  # beyond the last owner if only empty tensors follow
    return slice(bisect_left(owner_of, owner), len(owner_of) if owner == owners - 1 else bisect_right(owner_of, owner))


StateKind = Literal["parameter", "gradient", "widened", "master", "optimizer", "buffer", "average"]
"""`parameter`: what layers compute with. `gradient`: its gradient, reduced. `master`: the parameter in full precision, where
layers use a copy in lower precision. `widened`: by how much the gradient is larger in the master's precision, as the optimizer
gets it, where it is summed in that of the copy. `optimizer`: what the optimizer keeps for each element. `average`: a moving
average of the parameter. `buffer`: a module's buffers."""

STATE_KIND_NOUNS: Mapping[StateKind, str] = {
    "parameter": "parameters",
    "gradient": "gradients",
    "widened": "float32 gradients for the optimizer",
    "master": "master parameters",
    "optimizer": "optimizer state",
    "buffer": "buffers",
    "average": "averages",
}
"""Kind of state -> its name in messages."""

SHARED_OUT_FROM: Mapping[StateKind, int] = {
    "optimizer": 1,
    "master": 1,
    "average": 1,
    "gradient": 2,
    "widened": 2,
    "parameter": 3,
    "buffer": 4,
}
"""Kind of state -> the ZeRO stage from which the replicas of a stage divide it. Below it every replica keeps all of it.

The stages are those of Rajbhandari et al. 2020 (arXiv:1910.02054), section 5; none of them divides buffers.
"""


@dataclass(frozen=True)
class Ownership:
    """The state that each rank of a plan keeps. Elements are numbered as in `Piece`, alike under every plan of a model."""

    plan: ParallelPlan
    """The plan whose ranks keep the state."""
    outline: ModelOutline
    """The model's parameters and buffers, which of them are frozen, and how they are cut over shards."""
    zero_stage: int = 0
    """The ZeRO stage, 0 to 3: which kinds of state replicas divide (`SHARED_OUT_FROM`). Runs of today use 0."""
    _answers: dict[tuple[Hashable, ...], tuple[Piece, ...]] = field(default_factory=dict, init=False, repr=False, compare=False)
    """Cache of pieces; ranks that keep the same pieces share one tuple."""
    _shares: dict[tuple[Hashable, ...], BalancedTensorShares] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    """(grid, shard, whether frozen) -> how the replicas divide these parameters."""
    _cuts: dict[tuple[Hashable, ...], TensorCut] = field(default_factory=dict, init=False, repr=False, compare=False)
    """(name, virtual shards, their division) -> how the tensor is cut over shards that hold several of these."""
    _sizes_of_grids: dict[tuple[int, ...], dict[str, int]] = field(default_factory=dict, init=False, repr=False, compare=False)
    """Grids -> name -> elements of the tensors of their stages."""

    def __post_init__(self) -> None:
        if type(self.zero_stage) is not int or not 0 <= self.zero_stage <= 3:
            raise PlanError(f"there is no ZeRO stage {self.zero_stage!r}", cure="use 0, 1, 2 or 3")

    # -- who keeps what ------------------------------------------------------------------------------------------------

    def pieces(self, rank: int, kind: StateKind) -> tuple[Piece, ...]:
        """The pieces of a kind of state that a rank keeps, in layer order (if replicas divide parameters: frozen ones last).

        Only trained parameters have gradients, masters, optimizer state and averages. A tied parameter counts once.
        Raises `PlanError` for a number of shards that the outline does not know.
        """
        shared_out = self.zero_stage >= SHARED_OUT_FROM[kind]
        key = (kind, self.plan.roles[rank] if shared_out else self.plan.compute_keys[rank])
        if key not in self._answers:
            if not shared_out:
                names = self._names(rank, kind)
                found = tuple(piece for name in names for piece in _pieces(name, self._on_shard(rank, name)))
            else:
                found = tuple(piece for role in self.plan.roles[rank] for piece in self._share_of_role(rank, role, kind))
            self._answers[key] = found
        return self._answers[key]

    def _share_of_role(self, rank: int, role: Role, kind: StateKind) -> tuple[Piece, ...]:
        """What a rank keeps as one of the replicas of a grid that divide this kind of state."""
        here = self._names(rank, "parameter", role.grid)
        found = self._share(rank, role, [name for name in here if self._is_trained(name)], frozen=False)
        if kind == "parameter":
            found += self._share(rank, role, [name for name in here if name in self.outline.frozen], frozen=True)
        return found

    def elements(self, rank: int, kind: StateKind) -> int:
        """How many elements of a kind a rank keeps."""
        return sum(piece.size for piece in self.pieces(rank, kind))

    def sizes(self, rank: int) -> dict[str, int]:
        """Name -> elements when whole, of each parameter and buffer of a rank's stages that is not empty, in layer order."""
        return self._sizes(tuple(role.grid for role in self.plan.roles[rank]))

    def cut_of(self, rank: int, name: str) -> TensorCut | None:
        """How a tensor is cut over the shards of a rank's stages; None: each shard has the whole tensor."""
        stage = self.plan.stages[self._stage_with(rank, name)]
        if stage.shards == 1:
            return None
        if stage.virtual_shards not in self.outline.shardings:
            raise PlanError(f"it is not known how the model is cut over {stage.virtual_shards} shards", cure="report this")
        cut = self.outline.shardings[stage.virtual_shards].get(name)
        if cut is None or not stage.division:
            return cut
        key = name, stage.virtual_shards, stage.division
        if key not in self._cuts:
            self._cuts[key] = cut.over_runs(stage.runs)
        return self._cuts[key]

    def shard_of(self, rank: int, name: str) -> int:
        """Which shard of a tensor a rank has."""
        return self.plan.role_in(rank, self._stage_with(rank, name)).shard

    def _stage_with(self, rank: int, name: str) -> int:
        """The first stage of a rank that has a tensor. Others cut a tied parameter alike (`check_ties_are_cut_alike`)."""
        stages = self.plan.stages_of(rank)
        if len(self.plan.roles[rank]) == 1:
            return stages[0]
        return next(stage for stage in stages if name in self._tensors_of_stage(stage))

    # -- who holds the same --------------------------------------------------------------------------------------------

    @cached_property
    def held(self) -> tuple[tuple[Piece, ...], ...]:
        """By rank, sorted: the pieces of state that the rank has to hold, and sends to others when the plan changes.

        Optimizer state moves with its parameter's elements, so a trained parameter has the pieces of its optimizer state.
        """
        return tuple(self._held(rank) for rank in range(self.plan.world))

    @cached_property
    def first_rank_with_same_state(self) -> tuple[int, ...]:
        """By rank; ranks with the same key hold the same state."""
        return first_rank_with_same_state(self.held)

    def has_copies(self, rank: int) -> bool:
        """Whether another rank holds the same state. False for a rank that holds no state.

        Every worker asks this when a generation begins, so only ranks with the same tensors are looked at.
        """
        held, sizes = self._held(rank), self.sizes(rank)
        others = (other for other in range(self.plan.world) if other != rank and self.sizes(other) == sizes)
        return bool(held) and any(self._held(other) == held for other in others)

    def _held(self, rank: int) -> tuple[Piece, ...]:
        key = ("held", self.plan.roles[rank] if self.zero_stage else self.plan.compute_keys[rank])
        if key not in self._answers:
            frozen = (piece for piece in self.pieces(rank, "parameter") if piece.name in self.outline.frozen)
            self._answers[key] = tuple(sorted([*self.pieces(rank, "optimizer"), *frozen, *self.pieces(rank, "buffer")]))
        return self._answers[key]

    # -- what one rank does for all --------------------------------------------------------------------------------------

    @cached_property
    def trained(self) -> tuple[str, ...]:
        """All trained parameters of the model, in layer order."""
        return tuple(dict.fromkeys(name for layer in self.outline.elements for name in layer if self._is_trained(name)))

    def norm_parameters(self, rank: int) -> dict[int, tuple[str, ...]]:
        """Stage -> trained parameters, empty ones too, for which a rank sums the squares of gradients, for the norm.

        Every element is counted by one rank: the replicas of a stage take whole, consecutive parameters in layer order, each
        shard sums the elements that it owns, and the first stage with a tied parameter sums it. Every replica must have
        whole gradients (ZeRO stages 0 and 1).
        """
        assert self.zero_stage < SHARED_OUT_FROM["gradient"], "the norm of gradients that replicas share out is summed by piece"
        found = {}
        for stage in self.plan.stages_of(rank):
            here = [name for name in self._tensors_of_stage(stage) if self._first_stage[name] == stage]
            names = [name for name in here if self._is_trained(name)]
            sizes = [self._owned_elements(rank, name) for name in names]
            replica, replicas = self.plan.role_in(rank, stage).replica, self.plan.stages[stage].replicas
            found[stage] = tuple(names[consecutive_tensor_share(sizes, replica, replicas)])
        return found

    def checkpoint_pieces(self, rank: int) -> dict[int, dict[str, tuple[Piece, ...]]]:
        """The pieces that a rank writes into a checkpoint: stage -> parameter or buffer -> pieces (none of an empty tensor).

        Optimizer state is written with its parameter. Every element is written by one rank. The first stage with a tied
        parameter writes it. Ranks that hold the same tensor take turns, tensor by tensor; of a tensor that shards or replicas
        divide, each rank writes its own part.
        """
        held: dict[str, list[tuple[int, int]]] = {}
        for piece in self._held(rank):
            held.setdefault(piece.name, []).append((piece.start, piece.stop))
        found: dict[int, dict[str, tuple[Piece, ...]]] = {}
        for stage in self.plan.stages_of(rank):
            replicas, shards = self.plan.stages[stage].replicas, self.plan.stages[stage].shards
            role = self.plan.role_in(rank, stage)
            mine = found[stage] = {}
            for turn, (name, size) in enumerate(self._tensors_of_stage(stage).items()):
                cut = self.cut_of(rank, name)
                replica_writes = self._is_shared_out(name) or turn % replicas == role.replica
                shard_writes = cut is not None or turn // replicas % shards == role.shard
                if self._first_stage[name] != stage or not (replica_writes and shard_writes):
                    continue
                spans: IndexRanges = tuple(held.get(name, ()))
                if cut is not None:
                    spans = intersect_ranges(spans, cut.element_ranges(cut.owned(role.shard), size))
                if spans or not size:
                    mine[name] = _pieces(name, spans)
        return found

    def _is_shared_out(self, name: str) -> bool:
        """Whether the replicas of a stage divide a tensor's authoritative state."""
        kind: StateKind = "parameter" if name in self.outline.frozen else "optimizer"
        return name not in self.outline.buffers and self.zero_stage >= SHARED_OUT_FROM[kind]

    # -- tensors by grid -----------------------------------------------------------------------------------------------

    def _sizes(self, grids: tuple[int, ...]) -> dict[str, int]:
        """Name -> elements of each parameter and buffer of the stages of some grids that is not empty, in layer order."""
        found = self._sizes_of_grids.get(grids)
        if found is None:
            stages = sorted(stage for grid in grids for stage in self.plan.stages_of_grid[grid])
            places = [self.plan.stages[stage] for stage in stages]
            layers = [layer for place in places for layer in self.outline.elements[place.first : place.last]]
            found = {name: size for layer in layers for name, size in layer.items() if size}
            self._sizes_of_grids[grids] = found
        return found

    @cached_property
    def _first_stage(self) -> dict[str, int]:
        """Name -> the first stage that has the parameter or buffer."""
        found: dict[str, int] = {}
        for stage in range(len(self.plan.stages)):
            for name in self._tensors_of_stage(stage):
                found.setdefault(name, stage)
        return found

    def _tensors_of_stage(self, stage: int) -> dict[str, int]:
        """Name -> elements: parameters, then buffers, each in layer order."""
        place = self.plan.stages[stage]
        sizes = {name: size for layer in self.outline.elements[place.first : place.last] for name, size in layer.items()}
        return dict(sorted(sizes.items(), key=lambda tensor: tensor[0] in self.outline.buffers))

    def _names(self, rank: int, kind: StateKind, grid: int | None = None) -> list[str]:
        """Names of the tensors of a rank's stages, or of those in one grid, that have this kind of state, in layer order."""
        buffers, names = self.outline.buffers, self.sizes(rank) if grid is None else self._sizes((grid,))
        if kind == "buffer":
            return [name for name in names if name in buffers]
        return [name for name in names if self._is_trained(name) or (kind == "parameter" and name not in buffers)]

    def _is_trained(self, name: str) -> bool:
        return name not in self.outline.buffers and name not in self.outline.frozen

    # -- elements by shard and replica ---------------------------------------------------------------------------------

    def _on_shard(self, rank: int, name: str) -> IndexRanges:
        """The elements of a tensor that the rank's shard has, all replicas together."""
        cut, size = self.cut_of(rank, name), self.sizes(rank)[name]
        return ((0, size),) if cut is None else cut.element_ranges(cut.indices_by_shard[self.shard_of(rank, name)], size)

    def _owned_elements(self, rank: int, name: str) -> int:
        """Number of elements of a tensor that the rank's shard has and no earlier shard has."""
        cut, shard, size = self.cut_of(rank, name), self.shard_of(rank, name), self.sizes(rank).get(name, 0)
        if cut is None:
            return size if shard == 0 else 0
        return count_indices(cut.element_ranges(cut.owned(shard), size))

    def _share(self, rank: int, role: Role, names: Sequence[str], *, frozen: bool) -> tuple[Piece, ...]:
        """The rank's share of parameters that the replicas of its shard in a grid divide."""
        here = [self._on_shard(rank, name) for name in names]
        key = (role.grid, role.shard, frozen)
        if key not in self._shares:
            replicas = len(self.plan.grids[role.grid])
            self._shares[key] = BalancedTensorShares(tuple(count_indices(spans) for spans in here), replicas)
        return tuple(
            piece
            for index, start, stop in self._shares[key].runs_of_owner(role.replica)
            for piece in _pieces(names[index], indices_at_positions(here[index], start, stop))
        )


def first_rank_with_same_state(held: Sequence[tuple[Piece, ...]]) -> tuple[int, ...]:
    """By rank: the first rank that holds the same pieces. So ranks with equal keys hold the same state."""
    first: dict[tuple[Piece, ...], int] = {}
    compared: dict[int, int] = {}  # by identity: replicas share one long tuple
    for rank, pieces in enumerate(held):
        if id(pieces) not in compared:
            compared[id(pieces)] = first.setdefault(pieces, rank)
    return tuple(compared[id(pieces)] for pieces in held)


def _pieces(name: str, spans: Iterable[tuple[int, int]]) -> tuple[Piece, ...]:
    return tuple(Piece(name, start, stop) for start, stop in spans)
