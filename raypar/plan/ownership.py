"""The pieces of state that each rank keeps, by kind of state."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, product
from typing import Literal, NamedTuple

from raypar.errors import PlanError
from raypar.plan.model_outline import ModelOutline
from raypar.plan.nested_shares import NestedTensorShares
from raypar.plan.parallel_plan import ParallelPlan
from raypar.plan.pieces import Piece
from raypar.plan.shard_ranges import (
    IndexRanges,
    TensorCut,
    count_indices,
    indices_at_positions,
    intersect_ranges,
    merge_ranges,
)

CANONICAL_PIECE = 32_768
"""Elements of a flattened tensor whose squares are one term of the norm (rule 7 of the numerics contract,
raypar/NUMERICS.md).

Owners' runs begin at multiples of it. So an owner computes whole terms of the norm, and an optimizer that works on
runs of elements, a fused one too, gives the same bits as one that works on the whole tensor.
"""


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


class OwnedRun(NamedTuple):
    """Elements [start, stop) of a tensor as it lies in memory, flattened: of a virtual shard's slice, or of a whole one."""

    name: str
    start: int
    stop: int


class GradientRun(NamedTuple):
    """Elements [start, stop) of a tensor as it lies in memory, flattened, of whose gradient a replica gets the total."""

    start: int
    stop: int
    elements: IndexRanges
    """The same elements, numbered as in `Piece`."""


class _LocalTensor(NamedTuple):
    """A parameter as a worker has it, or a virtual shard's slice of one, which replicas may divide."""

    name: str
    number: int | None
    """The virtual shard; None: all virtual shards of the worker have all of it."""
    spans: IndexRanges
    """Its elements, numbered as in `Piece`."""


@dataclass(frozen=True)
class _SharedTensors:
    """The parameters that the replicas of a shard in a grid divide, and how they do."""

    tensors: tuple[_LocalTensor, ...]
    """In layer order."""
    shares: tuple[tuple[NestedTensorShares, tuple[tuple[int, ...], ...]], ...]
    """(how some of them are divided, by tensor there: the indices of the local tensors that it stands for)."""

    def runs_of_owner(self, owner: int) -> list[tuple[int, int, int]]:
        """The runs of one owner, ascending: (index of the tensor, first element, element behind the last)."""
        found = []
        for shares, places in self.shares:
            for entry, start, stop in shares.runs_of_owner(owner):
                if entry not in shares.undivided:
                    found.append((places[entry][0], start, stop))
                    continue
                sizes = [(place, count_indices(self.tensors[place].spans)) for place in places[entry]]
                found += [(place, 0, size) for place, size in sizes if size]
        return sorted(found)


class _Divided:
    """Tensors that replicas divide, while they are listed."""

    def __init__(self, owners: int) -> None:
        self.owners = owners
        """Number of replicas."""
        self.counts: list[int] = []
        """Elements of each."""
        self._places: list[tuple[int, ...]] = []
        self._undivided = set[int]()

    def add(self, count: int, places: tuple[int, ...], *, is_divisible: bool) -> None:
        """Add a tensor of `count` elements, which stands for the local tensors at these `places`."""
        if not is_divisible:
            self._undivided.add(len(self.counts))
        self.counts.append(count)
        self._places.append(places)

    def shares(self) -> tuple[NestedTensorShares, tuple[tuple[int, ...], ...]]:
        """How they are divided, and their places."""
        shares = NestedTensorShares(tuple(self.counts), self.owners, CANONICAL_PIECE, frozenset(self._undivided))
        return shares, tuple(self._places)


@dataclass(frozen=True)
class Ownership:
    """The state that each rank of a plan keeps. Elements are numbered as in `Piece`, alike under every plan of a model.

    Which kinds of state the replicas of a stage divide says `StagePlan.zero` (`SHARED_OUT_FROM`). They divide tensors as they
    lie in memory, each virtual shard's slice by itself, so that an owner's runs are views of them and hold whole terms of the
    norm. Slices along another dim than the first, of which a run in memory is no run of `Piece`, go to one owner each, whole.

    The gradients of two kinds of parameters are added up over shards, after replicas: of what every shard has whole, and of
    what several shards have the same elements of. So of these a replica owns the same on every shard: the same runs of whole
    parameters, and of the others all slices. Tied parameters of several grids are divided by themselves, so that two stages
    with as many replicas divide them alike, and each replica exchanges their gradients with one other.
    """

    plan: ParallelPlan
    """The plan whose ranks keep the state."""
    outline: ModelOutline
    """The model's parameters and buffers, which of them are frozen, and how they are cut over shards."""
    _answers: dict[tuple[Hashable, ...], tuple[Piece, ...]] = field(default_factory=dict, init=False, repr=False, compare=False)
    """Cache of pieces; ranks that keep the same pieces share one tuple."""
    _shares: dict[tuple[int, int, bool], _SharedTensors] = field(default_factory=dict, init=False, repr=False, compare=False)
    """(grid, shard, whether frozen) -> these parameters, and how the replicas divide them."""
    _cuts: dict[tuple[Hashable, ...], TensorCut] = field(default_factory=dict, init=False, repr=False, compare=False)
    """(name, virtual shards, their division) -> how the tensor is cut over shards that hold several of these."""
    _sizes_of_grids: dict[tuple[int, ...], dict[str, int]] = field(default_factory=dict, init=False, repr=False, compare=False)
    """Grids -> name -> elements of the tensors of their stages."""

    # -- who keeps what ------------------------------------------------------------------------------------------------

    def pieces(self, rank: int, kind: StateKind) -> tuple[Piece, ...]:
        """The pieces of a kind of state that a rank keeps, in layer order (if replicas divide parameters: frozen ones last).

        Only trained parameters have gradients, masters, optimizer state and averages. A tied parameter counts once.
        Raises `PlanError` for a number of shards that the outline does not know.
        """
        roles = self.plan.roles[rank]
        divided = {role.grid for role in roles if self._is_divided(role.grid, kind)}
        key = (kind, tuple(role if role.grid in divided else (role.grid, role.shard) for role in roles))
        if key not in self._answers:
            found: dict[str, list[tuple[int, int]]] = {}
            if not divided:
                found = {name: list(self._on_shard(rank, name)) for name in self._names(rank, kind)}
            for role in roles if divided else ():
                if role.grid in divided:
                    for name, spans in self._divided(role.grid, role.shard, role.replica, kind):
                        found.setdefault(name, []).extend(spans)
                    continue
                for name in self._names(rank, kind, role.grid):
                    found.setdefault(name, []).extend(self._on_shard(rank, name))
            self._answers[key] = tuple(piece for name, spans in found.items() for piece in _pieces(name, merge_ranges(spans)))
        return self._answers[key]

    def _is_divided(self, grid: int, kind: StateKind) -> bool:
        """Whether the replicas of a grid of workers divide a kind of state."""
        return self._level(self.plan.stages_of_grid[grid][0]) >= SHARED_OUT_FROM[kind]

    def _level(self, stage: int) -> int:
        """A stage's ZeRO stage; 0 where each replica holds everything."""
        return self.plan.stages[stage].zero_in_effect

    def _owners_held_by(self, stage: int, replica: int) -> list[int]:
        """The owners whose parts a replica of a stage holds: itself, and with several holders those before it."""
        place = self.plan.stages[stage]
        return [(replica - before) % place.replicas for before in range(place.zero_holders)]

    def _divided(self, grid: int, shard: int, replica: int, kind: StateKind) -> Iterator[tuple[str, IndexRanges]]:
        """(parameter, elements) of a kind of state that replicas divide, of one of them."""
        for frozen in (False, True) if kind == "parameter" else (False,):
            shared = self._share(grid, shard, frozen=frozen)
            for owner in self._owners_held_by(self.plan.stages_of_grid[grid][0], replica):
                for index, start, stop in shared.runs_of_owner(owner):
                    yield shared.tensors[index].name, indices_at_positions(shared.tensors[index].spans, start, stop)

    def divides(self, stage: int, kind: StateKind) -> bool:
        """Whether the replicas of a stage divide a kind of state."""
        return self._level(stage) >= SHARED_OUT_FROM[kind]

    def runs(self, stage: int, number: int, replica: int, *, frozen: bool = False) -> tuple[OwnedRun, ...]:
        """The runs of trained parameters that one replica of a virtual shard of a stage holds where replicas divide state, in
        layer order; none of empty parameters. Each owner's run is one by itself, so that all its holders have the same.
        `frozen`: those of frozen parameters; none where each replica holds all of these."""
        return self._runs(stage, number, self._owners_held_by(stage, replica), frozen=frozen)

    def owned_runs(self, stage: int, number: int, replica: int, *, frozen: bool = False) -> tuple[OwnedRun, ...]:
        """Those of `runs` that the replica owns: it alone sends them to others, counts them in the norm and writes them."""
        return self._runs(stage, number, [replica], frozen=frozen)

    def runs_by_name(self, stage: int, number: int, replica: int) -> dict[str, list[tuple[int, int]]]:
        """Parameter of a virtual shard of a stage that replicas divide, frozen ones too -> those of its `runs` that one of them
        holds: (first element, element behind the last); maybe none."""
        found: dict[str, list[tuple[int, int]]] = {}
        for other, frozen in product(range(self.plan.stages[stage].replicas), (False, True)):
            for name, start, stop in self.runs(stage, number, other, frozen=frozen) if self.divides(stage, "optimizer") else ():
                own = found.setdefault(name, [])
                if other == replica:
                    own.append((start, stop))
        return found

    def _runs(self, stage: int, number: int, owners: Sequence[int], *, frozen: bool) -> tuple[OwnedRun, ...]:
        if frozen and not self.divides(stage, "parameter"):
            return ()
        place, grid = self.plan.stages[stage], self.plan.grid_of_stage[stage]
        shard = next(index for index, run in enumerate(place.runs) if number in run)
        shared, here = self._share(grid, shard, frozen=frozen), self._tensors_of_stage(stage)
        return tuple(
            OwnedRun(shared.tensors[index].name, start, stop)
            for index, start, stop in sorted(run for owner in owners for run in shared.runs_of_owner(owner))
            if shared.tensors[index].name in here and shared.tensors[index].number in (None, number)
        )

    def counted_runs(self, stage: int, number: int, replica: int) -> frozenset[OwnedRun]:
        """Those of `owned_runs` whose squares the replica sums for the norm: of a tied parameter in its first stage alone."""
        runs = self.owned_runs(stage, number, replica)
        return frozenset(run for run in runs if self._first_stage[run.name] == stage)

    def gradient_runs(self, stage: int, number: int, replica: int, name: str) -> tuple[GradientRun, ...]:
        """Of which runs of a trained parameter a replica of a virtual shard of a stage gets the reduced gradient: all of it as
        one, or, where replicas divide state, those that it holds."""
        size, cut = self._tensors_of_stage(stage)[name], self._cut_over_virtual_shards(stage, name)
        spans: IndexRanges = ((0, size),) if cut is None else cut.element_ranges(cut.indices_by_shard[number], size)
        runs = [(0, count_indices(spans))]
        if self.divides(stage, "optimizer"):
            runs = [(start, stop) for other, start, stop in self.runs(stage, number, replica) if other == name]
        return tuple(GradientRun(start, stop, indices_at_positions(spans, start, stop)) for start, stop in runs)

    def slowest_dim(self, name: str) -> int:
        """The dim of a parameter along which `Piece` numbers its elements."""
        return next((cuts[name].dim for cuts in self.outline.shardings.values() if name in cuts), 0)

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
        roles = self.plan.roles[rank]
        key = ("held", tuple(r if self._level(self.plan.stages_of_grid[r.grid][0]) else (r.grid, r.shard) for r in roles))
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
        whole gradients until the norm is taken (ZeRO stages 0 to 2).
        """
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
            divided = self._counted_shares(stage, role.shard, role.replica)
            mine = found[stage] = {}
            for turn, (name, size) in enumerate(self._tensors_of_stage(stage).items()):
                cut, is_divided = self.cut_of(rank, name), self._is_shared_out(stage, name)
                replica_writes = is_divided or turn % replicas == role.replica
                shard_writes = cut is not None or turn // replicas % shards == role.shard
                if self._first_stage[name] != stage or not (replica_writes and shard_writes):
                    continue
                spans: IndexRanges = tuple(held.get(name, ()))
                if is_divided and size:
                    spans = merge_ranges(divided.get(name, ()))
                elif cut is not None:
                    spans = intersect_ranges(spans, cut.element_ranges(cut.owned(role.shard), size))
                if spans or not size:
                    mine[name] = _pieces(name, spans)
        return found

    def _counted_shares(self, stage: int, shard: int, replica: int) -> dict[str, list[tuple[int, int]]]:
        """Parameter -> the elements that a replica owns of those that replicas of the stage divide, without those that an
        earlier virtual shard has, too: each element has one owner."""
        found: dict[str, list[tuple[int, int]]] = {}
        kinds: Mapping[bool, StateKind] = {False: "optimizer", True: "parameter"}
        for frozen, kind in kinds.items():
            if self._level(stage) < SHARED_OUT_FROM[kind]:
                continue
            shared = self._share(self.plan.grid_of_stage[stage], shard, frozen=frozen)
            for index, start, stop in shared.runs_of_owner(replica):
                name, number, spans = shared.tensors[index]
                own = indices_at_positions(spans, start, stop)
                if number is not None:
                    cut = self._cut_over_virtual_shards(stage, name)
                    assert cut is not None
                    own = intersect_ranges(own, cut.element_ranges(cut.owned(number), self._tensors_of_stage(stage)[name]))
                found.setdefault(name, []).extend(own)
        return found

    def _is_shared_out(self, stage: int, name: str) -> bool:
        """Whether the replicas of a stage divide a tensor's authoritative state."""
        kind: StateKind = "parameter" if name in self.outline.frozen else "optimizer"
        return name not in self.outline.buffers and self._level(stage) >= SHARED_OUT_FROM[kind]

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

    def _share(self, grid: int, shard: int, *, frozen: bool) -> _SharedTensors:
        """The trained or the frozen parameters that the replicas of a shard in a grid divide, and how they do."""
        key = grid, shard, frozen
        if key not in self._shares:
            sizes = self._sizes((grid,))
            tensors: list[_LocalTensor] = []
            divided: dict[tuple[tuple[int, ...], bool], _Divided] = {}
            for name, grids in ((name, grids) for name, grids in self._grids_of.items() if name in sizes):
                size = sizes[name]
                if not (name in self.outline.frozen if frozen else self._is_trained(name)):
                    continue
                stage = next(stage for stage in self.plan.stages_of_grid[grid] if name in self._tensors_of_stage(stage))
                cut, place = self._cut_over_virtual_shards(stage, name), self.plan.stages[stage]
                here = [_LocalTensor(name, None, ((0, size),))]
                if cut is not None:
                    held = [cut.element_ranges(spans, size) for spans in cut.indices_by_shard]
                    here = [_LocalTensor(name, number, held[number]) for number in place.run_of(shard)]
                places = range(len(tensors), len(tensors) + len(here))
                tensors += here
                alike = divided.setdefault((grids, True), _Divided(len(self.plan.grids[grid])))
                alone = divided.setdefault((grids, False), _Divided(len(self.plan.grids[grid])))
                if cut is not None and cut.overlaps:
                    most = max(sum(count_indices(held[number]) for number in run) for run in place.runs)
                    alike.add(most, tuple(places), is_divisible=False)
                    continue
                for index in places:
                    count = count_indices(tensors[index].spans)
                    (alike if cut is None else alone).add(count, (index,), is_divisible=self._is_divisible(name))
            self._shares[key] = _SharedTensors(tuple(tensors), tuple(each.shares() for each in divided.values() if each.counts))
        return self._shares[key]

    @cached_property
    def _grids_of(self) -> dict[str, tuple[int, ...]]:
        """Name of a parameter or buffer -> the grids of workers that have it, in the order of their first stages."""
        found: dict[str, list[int]] = {}
        for stage, grid in enumerate(self.plan.grid_of_stage):
            for name in self._tensors_of_stage(stage):
                grids = found.setdefault(name, [])
                grids += [grid] if grid not in grids else []
        return {name: tuple(grids) for name, grids in found.items()}

    def _cut_over_virtual_shards(self, stage: int, name: str) -> TensorCut | None:
        """How a parameter is cut over the virtual shards of a stage; None: each has all of it."""
        count = self.plan.stages[stage].virtual_shards
        if count == 1:
            return None
        if count not in self.outline.shardings:
            raise PlanError(f"it is not known how the model is cut over {count} shards", cure="report this")
        return self.outline.shardings[count].get(name)

    def _is_divisible(self, name: str) -> bool:
        """Whether a tensor may be divided: runs of it in memory are runs of `Piece`, and its optimizer takes runs
        (`StateDivision`)."""
        return name not in self._numbered_otherwise and name not in self.outline.undivided

    @cached_property
    def _numbered_otherwise(self) -> frozenset[str]:
        """Parameters whose elements are numbered otherwise than they lie in memory, under plans without shards too."""
        cuts = (cut for of_count in self.outline.shardings.values() for cut in of_count.items())
        return frozenset(name for name, cut in cuts if cut.dim > 0)


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
