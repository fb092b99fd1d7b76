"""How many bytes the state of a model takes on each rank of a plan."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from raypar.plan.model_outline import ModelOutline
from raypar.plan.ownership import SHARED_OUT_FROM, OwnedRun, Ownership, StateKind
from raypar.plan.parallel_plan import ParallelPlan
from raypar.plan.stage_plan import StagePlan


@dataclass(frozen=True)
class StateBytes:
    """The bytes of each kind of state of a model's tensors. `Ownership` says which of the state a rank keeps."""

    outline: ModelOutline
    """The model's parameters and buffers, and how they are cut over shards."""
    by_tensor: Mapping[StateKind, Mapping[str, int]]
    """Kind of state -> tensor -> bytes when the tensor is whole; a tensor that is not named has no state of the kind."""
    copies: Mapping[str, int] = field(default_factory=dict)
    """Parameter -> bytes of the copy in a lower precision that layers compute with, of parameters that have one."""
    _on_ranks: dict[tuple[Hashable, ...], int] = field(default_factory=dict, init=False, repr=False, compare=False)
    """Cache of `_on_rank`; plans that give a rank the same stages share entries."""
    _of_layers: dict[tuple[StateKind, int], tuple[tuple[dict[str, int], ...], ...]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    """What has been answered of layers: see `_by_layer`."""

    def of_plan(self, plan: ParallelPlan) -> dict[StateKind, tuple[int, ...]]:
        """Kind of state -> by rank, its bytes in memory.

        Raises `PlanError` for a number of shards that the outline does not know.
        """
        ownership = Ownership(plan, self.outline)
        return {kind: tuple(self._on_rank(ownership, rank, kind) for rank in range(plan.world)) for kind in self.by_tensor}

    def owned_by(self, plan: ParallelPlan) -> tuple[int, ...]:
        """By rank: bytes of the state that it has to hold, and of which the mirror makes copies: of what replicas divide its
        own part, of what is kept in several precisions the most precise.

        Raises `PlanError` for a number of shards that the outline does not know.
        """
        return tuple(map(sum, zip(*self._owned.of_plan(plan).values(), strict=True)))

    @cached_property
    def _owned(self) -> StateBytes:
        """The bytes of each tensor's state that moves with it, as those of a kind that is divided as it is."""
        of = {kind: self.by_tensor.get(kind, {}) for kind in ("parameter", "master", "optimizer", "average", "buffer")}
        frozen = {name: nbytes for name, nbytes in of["parameter"].items() if name in self.outline.frozen}
        trained = {
            name: of["master"].get(name, nbytes) + of["optimizer"].get(name, 0) + of["average"].get(name, 0)
            for name, nbytes in of["parameter"].items()
            if name not in frozen
        }
        return StateBytes(self.outline, {"optimizer": trained, "parameter": frozen, "buffer": of["buffer"]})

    def gathered(self, plan: ParallelPlan) -> tuple[int, ...]:
        """By rank: bytes of what layers compute with and other replicas keep, where these divide parameters and gather them
        once a step.

        Raises `PlanError` as `of_plan` does.
        """
        most, levels = SHARED_OUT_FROM["parameter"] - 1, zip(plan.zero_levels, plan.gather_spans, strict=True)
        by_step = plan.with_zero([level if span == "step" else min(level, most) for level, span in levels])
        undivided = by_step.with_zero([min(level, most) for level in plan.zero_levels])
        whole, kept = (self._computed_with.of_plan(each)["parameter"] for each in (undivided, by_step))
        return tuple(here - own for here, own in zip(whole, kept, strict=True))

    def computed_with(self, stage: StagePlan) -> int:
        """Bytes of the whole parameters with which a stage computes, on the fullest shard of each of its layers."""
        return self._computed_with.on_fullest_shard("parameter", stage)

    def gathered_by_layer(self, plan: ParallelPlan, stage: int, rank: int) -> list[list[dict[str, int]]]:
        """By virtual shard of a rank in a stage whose replicas divide parameters, and by layer: parameter -> bytes of the whole
        with which the layer computes, of those that come and go: what is one run of a replica, in the precision of the whole,
        stays.

        Raises `PlanError` as `of_plan` does.
        """
        place, role = plan.stages[stage], plan.role_in(rank, stage)
        ownership, once = Ownership(plan, self.outline), self._computed_once(place)
        layers, run = self._computed_with._by_layer("parameter", place.virtual_shards), place.run_of(role.shard)
        found = []
        for number in run:
            held = [r for frozen in (False, True) for r in ownership.runs(stage, number, role.replica, frozen=frozen)]
            alone = {each.name: self._computed_bytes(each) for each in held if each.name not in self.copies}
            here = [layers[i][number] if i not in once or number == run[0] else {} for i in range(place.first, place.last)]
            found.append([{name: of for name, of in layer.items() if of and alone.get(name) != of} for layer in here])
        return found

    def owned_by_layer(self, plan: ParallelPlan, stage: int, rank: int) -> list[list[dict[str, int]]]:
        """As `gathered_by_layer`: parameter -> bytes, where the layer computes with it, of what a rank owns of it and gives to
        others."""
        place, role, ownership = plan.stages[stage], plan.role_in(rank, stage), Ownership(plan, self.outline)
        once, run = self._computed_once(place), place.run_of(role.shard)
        found = []
        for number in run:
            owned: Counter[str] = Counter()
            for frozen in (False, True):
                for each in ownership.owned_runs(stage, number, role.replica, frozen=frozen):
                    owned[each.name] += self._computed_bytes(each)
            layers = [
                self.outline.elements[i] if i not in once or number == run[0] else {} for i in range(place.first, place.last)
            ]
            found.append([{name: owned[name] for name in layer if name in owned} for layer in layers])
        return found

    def _computed_bytes(self, run: OwnedRun) -> int:
        """Bytes of a run where layers compute with it."""
        return (run.stop - run.start) * self._bytes_of_element[run.name]

    @cached_property
    def _bytes_of_element(self) -> dict[str, int]:
        """Parameter -> bytes of one of its elements where layers compute with it."""
        sizes = {name: size for layer in self.outline.elements for name, size in layer.items()}
        return {name: of // sizes[name] for name, of in self._computed_with.by_tensor["parameter"].items() if sizes.get(name)}

    @cached_property
    def _computed_with(self) -> StateBytes:
        """Of parameters what layers compute with, alone."""
        parameters = self.by_tensor["parameter"]
        return StateBytes(self.outline, {"parameter": {name: self.copies.get(name, of) for name, of in parameters.items()}})

    def on_fullest_shard(self, kind: StateKind, stage: StagePlan) -> int:
        """Bytes of a kind of state in a stage: the sum over its layers of the bytes on the layer's fullest shard.

        So a tied parameter counts in each of its layers, as in a reduction of gradients.
        """
        layers, once = self._by_layer(kind, stage.virtual_shards), self._computed_once(stage)
        return sum(
            max(sum(sum(layers[layer][v].values()) for v in (run[:1] if layer in once else run)) for run in stage.runs)
            for layer in range(stage.first, stage.last)
        )

    def _on_rank(self, ownership: Ownership, rank: int, kind: StateKind) -> int:
        plan = ownership.plan
        stages = [plan.stages[stage] for stage in plan.stages_of(rank)]
        roles = [plan.role_in(rank, stage) for stage in plan.stages_of(rank)]
        divided = [ownership.divides(stage, kind) for stage in plan.stages_of(rank)]
        shared_out = any(divided)
        places = zip(stages, roles, divided, strict=True)
        key = (
            kind,
            *(
                (
                    s.first,
                    s.last,
                    s.virtual_shards,
                    s.run_of(role.shard),
                    *((role.replica, s.replicas, s.zero_holders, s.gather) if shared else ()),
                )
                for s, role, shared in places
            ),
        )
        if key not in self._on_ranks:
            copies = self._copies(stages, kind)
            if shared_out:
                of_virtual_shards = [self._kept(ownership, rank, kind)]
            else:  # by layer, because plans with other stages have the same layers and share the cache
                runs = [stage.run_of(role.shard) for stage, role in zip(stages, roles, strict=True)]
                of_virtual_shards = [{} for _ in range(max(map(len, runs)))]
                for stage, run in zip(stages, runs, strict=True):
                    layers, once = self._by_layer(kind, stage.virtual_shards), self._computed_once(stage)
                    for layer in range(stage.first, stage.last):
                        for kept, virtual_shard in zip(of_virtual_shards, run[:1] if layer in once else run, strict=False):
                            kept.update(layers[layer][virtual_shard])
            self._on_ranks[key] = sum(copies[name] * nbytes for kept in of_virtual_shards for name, nbytes in kept.items())
        return self._on_ranks[key]

    def _computed_once(self, stage: StagePlan) -> frozenset[int]:
        """Layers of a stage of which the first virtual shard of a worker alone has anything."""
        layout = self.outline.layouts.get(stage.virtual_shards)
        return frozenset() if layout is None else layout.computed_once(stage.first, stage.last, len(self.outline.elements))

    def _by_layer(self, kind: StateKind, shards: int) -> tuple[tuple[dict[str, int], ...], ...]:
        """By layer and shard: tensor -> bytes of a kind of state, the layer being a stage of its own."""
        if (kind, shards) not in self._of_layers:
            apart = ParallelPlan.mesh(pp=len(self.outline.elements), tp=shards)
            ownership = Ownership(apart, self.outline)
            self._of_layers[kind, shards] = tuple(
                tuple(self._kept(ownership, apart.rank(layer, 0, shard), kind) for shard in range(shards))
                for layer in range(len(apart.stages))
            )
        return self._of_layers[kind, shards]

    def _kept(self, ownership: Ownership, rank: int, kind: StateKind) -> dict[str, int]:
        """Tensor -> bytes of its pieces of a kind of state that a rank keeps."""
        sizes, nbytes = ownership.sizes(rank), self.by_tensor[kind]
        if kind == "parameter" and (gone := self._copies_that_go(ownership.plan, rank)):
            nbytes = {name: of - self.copies[name] if name in gone else of for name, of in nbytes.items()}
        elements: Counter[str] = Counter()
        for piece in ownership.pieces(rank, kind):
            elements[piece.name] += piece.size
        return {name: nbytes.get(name, 0) * count // sizes[name] for name, count in elements.items()}

    def _copies_that_go(self, plan: ParallelPlan, rank: int) -> frozenset[str]:
        """Parameters of a rank whose copies come and go whole inside a step, so that it keeps no part of them."""
        spans = {stage: plan.stages[stage].gather_in_effect for stage in plan.stages_of(rank)}
        places = [plan.stages[stage] for stage, span in spans.items() if span in ("microbatch", "layer")]
        layers = (layer for place in places for layer in self.outline.elements[place.first : place.last])
        return frozenset(name for layer in layers for name in layer).intersection(self.copies)

    def _copies(self, stages: Sequence[StagePlan], kind: StateKind) -> Counter[str]:
        """Tensor -> how often a worker with these stages has its state in memory.

        Of a tied parameter each stage has a tensor of its own, and each layer that uses it a gradient of its own.
        """
        found: Counter[str] = Counter()
        for stage in stages:
            uses = [name for layer in self.outline.elements[stage.first : stage.last] for name in layer]
            found.update(uses if kind == "gradient" else set(uses))
        return found
