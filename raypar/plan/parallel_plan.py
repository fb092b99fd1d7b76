"""Parallel plans: the stages of a run, the grid of workers of each, and so what each worker is.

The work of a stage in a step is a grid: blocks of samples by virtual shards of its layers. Results depend on that grid alone.
A plan gives every cell of it to a worker: replicas are rows on different workers, shards are columns. Stages may have one grid
of workers (chunks), grids of other workers (a pipeline), or grids that share workers (replicas of some layers and shards of
others on the same workers).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from raypar.errors import PlanError
from raypar.plan.gradient_scatter import GradientRoute
from raypar.plan.stage_plan import GATHERS_FROM, GatherSpan, StagePlan, WorkerGrid, consecutive_grids, shortest_span
from raypar.plan.wording import count_noun

Placement = Literal["loop", "v"]
ComputeKey = tuple[tuple[int, int], ...]
"""(grid, shard) of each of a worker's roles."""


@dataclass(frozen=True, slots=True, order=True)
class Role:
    """What a worker is in one grid of workers: which of its replicas, and which shard of that."""

    grid: int
    """Index of the grid in `ParallelPlan.grids`. In a pipeline it is the worker's position."""
    replica: int
    shard: int = 0


def position_of_stage(stage: int, pp: int, placement: Placement) -> int:
    """The position that hosts a stage: `loop` starts again at position 0 (interleaved 1F1B), `v` turns back (ZB-V)."""
    lap, offset = divmod(stage, pp)
    return pp - 1 - offset if placement == "v" and lap % 2 else offset


@dataclass(frozen=True)
class ParallelPlan:
    """The stages of a model, with their replicas and shards. Immutable; an inconsistent plan raises `PlanError` when built."""

    stages: tuple[StagePlan, ...]
    """The stages in layer order."""
    recompute: tuple[int, ...] = ()
    """Indices of the recomputed layers, ascending: their activations are computed again for the backward."""
    gradients: GradientRoute = "fold"
    """How gradients get to those replicas that keep them, in all stages: it decides which replica runs which microbatch.
    Results do not depend on it."""
    offload: tuple[int, ...] = ()
    """Indices of the offloaded layers, ascending: their activations are out of memory until the backward."""

    def __post_init__(self) -> None:
        if not self.stages:
            raise PlanError("a plan needs at least one stage", cure="set plan.stages >= 1")
        before = 0
        for index, stage in enumerate(self.stages):
            if stage.first != before or stage.last <= stage.first:
                raise PlanError(
                    f"stage {index} holds layers [{stage.first}, {stage.last}) but the stages before it end at {before}",
                    cure="give every stage at least one layer and leave no gap between stages",
                )
            stage.check(f"stage {index}")
            before = stage.last
        for stages in self.stages_of_grid:
            of_grid = {
                "shares of the blocks": "share",
                "divisions of virtual shards": "division",
                "ZeRO stages": "zero",
                "holders of state": "zero_holders",
                "spans of gathered parameters": "gather",
            }
            for what, given in of_grid.items():
                unlike = sorted({getattr(self.stages[stage], given) for stage in stages})
                if len(unlike) > 1:
                    raise PlanError(
                        f"stages {', '.join(map(str, stages))} have the same workers and different {what}: {unlike}",
                        cure=f"give the stages of one grid of workers the same {given}",
                    )
        missing = sorted(set(range(self.world)) - {rank for grid in self.grids for row in grid for rank in row})
        if missing:
            shown = ", ".join(map(str, missing[:8])) + ", ..." * (len(missing) > 8)
            raise PlanError(
                f"{self.world} workers, but no stage is computed by worker {shown}",
                cure="number the workers 0, 1, 2, ... and give each of them a place in the grid of some stage",
            )
        self._check_gradients()
        self._check_layers()

    def _check_layers(self) -> None:
        """Raise `PlanError` for recomputed and offloaded layers that do not fit."""
        for what, layers in (("recompute", self.recompute), ("offload", self.offload)):
            if layers != tuple(sorted(set(layers) & set(range(self.stages[-1].last)))):
                raise PlanError(
                    f"{what} names the layers {layers}; the plan has layers 0 to {self.stages[-1].last - 1}",
                    cure=f"give the index of each layer to {what} once, in order; range(number of layers) for all",
                )
        if both := sorted(set(self.recompute) & set(self.offload)):
            raise PlanError(
                f"layers {both} are both recomputed and offloaded", cure="leave each of them out of recompute or of offload"
            )

    def _check_gradients(self) -> None:
        if self.gradients not in ("fold", "scatter"):
            raise PlanError(f"gradients are reduced as {self.gradients!r}", cure="use fold or scatter")

    @staticmethod
    def mesh(
        *,
        dp: int = 1,
        pp: int = 1,
        tp: int = 1,
        layers: int | None = None,
        chunks: int = 1,
        placement: Placement = "loop",
        cuts: Sequence[int] | None = None,
        recompute: Iterable[int] = (),
    ) -> ParallelPlan:
        """A plan whose stages all have `dp` replicas and `tp` shards, on `pp` positions.

        `layers`: number of layers, spread evenly (earlier stages may have one less); None: every stage has one layer. `cuts`:
        the first layer of stages 1, 2, ..., if they are not to be even. `recompute`: indices of the recomputed
        layers.
        """
        if min(dp, pp, tp, chunks) < 1:
            raise PlanError(f"replicas {dp}, stages {pp}, shards {tp}, chunks {chunks}", cure="set all of them to 1 or more")
        return ParallelPlan.of(
            [dp] * pp, [tp] * pp, layers=layers, chunks=chunks, placement=placement, cuts=cuts, recompute=recompute
        )

    @staticmethod
    def of(
        replicas: Sequence[int],
        shards: Sequence[int] | None = None,
        *,
        layers: int | None = None,
        chunks: int = 1,
        placement: Placement = "loop",
        cuts: Sequence[int] | None = None,
        recompute: Iterable[int] = (),
    ) -> ParallelPlan:
        """A plan with one entry of `replicas` (and `shards`) per pipeline position; the rest as in `mesh`."""
        pp = len(replicas)
        shards = list(shards) if shards is not None else [1] * pp
        if len(shards) != pp:
            raise PlanError(f"{pp} replica counts but {len(shards)} shard counts", cure="give one of each per stage")
        grids = consecutive_grids(zip(replicas, shards, strict=True))
        count = pp * chunks
        total = count if layers is None else layers
        if total < count:
            raise PlanError(
                f"{total} layers cannot fill {count} stages" + (f" ({pp} workers x {chunks} chunks)" if chunks > 1 else ""),
                cure=f"set plan.stages x plan.chunks <= {total}, or use a deeper model",
            )
        bounds = [0, *(cuts if cuts is not None else even_split_points(total, count)), total]
        if len(bounds) != count + 1:
            raise PlanError(f"{len(bounds) - 2} cuts for {count} stages", cure=f"give {count - 1} cuts")
        if any(first >= last for first, last in itertools.pairwise(bounds)):
            raise PlanError(
                f"the cuts {', '.join(map(str, bounds[1:-1]))} leave a stage without a layer: the model has {total} layers",
                cure=f"give {count - 1} ascending cuts between 1 and {total - 1}: the first layer of stages 1, 2, ...",
            )
        at = [position_of_stage(s, pp, placement) for s in range(count)]
        return ParallelPlan(
            tuple(StagePlan(bounds[s], bounds[s + 1], grids[at[s]]) for s in range(count)),
            tuple(sorted(recompute)),
        )

    @property
    def split_points(self) -> tuple[int, ...]:
        """The first layers of stages 1, 2, ..."""
        return tuple(stage.first for stage in self.stages[1:])

    def with_split_points(self, points: Sequence[int]) -> ParallelPlan:
        """The same plan with stages 1, 2, ... beginning at other layers."""
        bounds = itertools.pairwise((0, *points, self.stages[-1].last))
        stages = (replace(stage, first=a, last=b) for stage, (a, b) in zip(self.stages, bounds, strict=True))
        return replace(self, stages=tuple(stages))

    def with_even_stages(self) -> ParallelPlan:
        """The same plan with nearly equal numbers of layers in all stages."""
        return self.with_split_points(even_split_points(self.stages[-1].last, len(self.stages)))

    def with_even_shares(self) -> ParallelPlan:
        """The same plan with runs of blocks of nearly equal length."""
        return replace(self, stages=tuple(replace(stage, share=()) for stage in self.stages))

    def with_shares(self, shares: Mapping[int, tuple[int, ...]]) -> ParallelPlan:
        """The same plan with other shares of the blocks: grid -> `StagePlan.share` of its stages."""
        stages = zip(self.stages, self.grid_of_stage, strict=True)
        return replace(self, stages=tuple(replace(s, share=shares.get(grid, s.share)) for s, grid in stages))

    def with_zero(self, levels: int | Sequence[int], holders: int | None = None) -> ParallelPlan:
        """The same plan with these ZeRO stages: one for all stages of the model, or one for each grid of workers (in a
        pipeline: for each position). For another number of grids the highest of them counts. `holders`: how many replicas hold
        each part of the state; None: as many as now. Below 3 nothing is gathered."""
        each = [levels] * len(self.grids) if isinstance(levels, int) else list(levels)
        if len(each) != len(self.grids):
            each = [max(each, default=0)] * len(self.grids)
        stages = tuple(
            replace(
                stage,
                zero=each[grid],
                zero_holders=holders or stage.zero_holders,
                gather=stage.gather if each[grid] >= GATHERS_FROM else "step",
            )
            for stage, grid in zip(self.stages, self.grid_of_stage, strict=True)
        )
        return replace(self, stages=stages)

    def with_gather(self, spans: GatherSpan | Sequence[GatherSpan]) -> ParallelPlan:
        """The same plan with parameters that stay whole for so long: one span for all stages, or one for each grid of workers.
        For another number of grids the one that needs least memory counts. Grids below ZeRO stage 3 gather nothing."""
        each = [spans] * len(self.grids) if isinstance(spans, str) else list(spans)
        if len(each) != len(self.grids):
            each = [shortest_span(each)] * len(self.grids)
        stages = zip(self.stages, self.grid_of_stage, strict=True)
        return replace(
            self, stages=tuple(replace(s, gather=each[grid] if s.zero >= GATHERS_FROM else "step") for s, grid in stages)
        )

    def with_offload(self, layers: Iterable[int]) -> ParallelPlan:
        """The plan with these offloaded layers, given as indices."""
        return replace(self, offload=tuple(sorted(layers)))

    def with_gradients(self, route: GradientRoute) -> ParallelPlan:
        """The same plan with gradients that are folded or scattered."""
        return replace(self, gradients=route)

    @property
    def zero_levels(self) -> tuple[int, ...]:
        """By grid of workers: its ZeRO stage."""
        return tuple(self.stages[stages[0]].zero for stages in self.stages_of_grid)

    @property
    def gather_spans(self) -> tuple[GatherSpan, ...]:
        """By grid of workers: how long parameters that its replicas divide are whole."""
        return tuple(self.stages[stages[0]].gather for stages in self.stages_of_grid)

    def divides_state(self, stage: int) -> bool:
        """Whether the replicas of a stage divide some state, so that gradients are reduced to owners alone, and parameters have
        to be gathered."""
        return self.stages[stage].zero_in_effect > 0

    @property
    def most_zero(self) -> int:
        """The highest ZeRO stage by which replicas divide anything; 0 where each holds everything."""
        return max(stage.zero_in_effect for stage in self.stages)

    @property
    def zero_holders(self) -> int:
        """How many replicas hold each part of the state that replicas divide, at most."""
        return max(stage.zero_holders for stage in self.stages)

    def with_virtual_shards(self, count: int) -> ParallelPlan:
        """The same plan with layers that are cut into `count` virtual shards, which shards divide evenly unless they divide as
        many already.

        Raises `PlanError` if some stage's number of shards does not divide `count`.
        """
        for index, stage in enumerate(self.stages):
            if stage.virtual_shards != count and count % stage.shards:
                raise PlanError(
                    f"virtual_shards is {count}, and stage {index} has {count_noun(stage.shards, 'shard')}",
                    cure=f"set virtual_shards to a multiple of {stage.shards}, or its shards to a divisor of {count}",
                )

        def cut(stage: StagePlan) -> StagePlan:
            return stage if stage.virtual_shards == count else replace(stage, division=(count // stage.shards,) * stage.shards)

        return replace(self, stages=tuple(map(cut, self.stages)))

    def with_replicas(self, counts: Sequence[int]) -> ParallelPlan:
        """A plan of workers with one role each, with other numbers of replicas, one for each grid, and even shares.

        Ranks are numbered anew.
        """
        assert self.one_role_each, "replicas of one grid cannot go alone where workers stand in several"
        grids = consecutive_grids((count, len(grid[0])) for count, grid in zip(counts, self.grids, strict=True))
        stages = zip(self.stages, self.grid_of_stage, strict=True)
        return replace(self, stages=tuple(replace(stage, workers=grids[grid], share=()) for stage, grid in stages))

    @property
    def has_movable_split_points(self) -> bool:
        """Whether some split point could move without changing the number of shards of a layer."""
        return any(a.virtual_shards == b.virtual_shards and b.last - a.first > 2 for a, b in itertools.pairwise(self.stages))

    # -- grids and roles -------------------------------------------------------------------------------------------------

    @cached_property
    def grids(self) -> tuple[WorkerGrid, ...]:
        """The grids of workers, each once, in order of their ranks; in a pipeline one for each position."""
        return tuple(sorted({stage.workers for stage in self.stages}))

    @cached_property
    def grid_of_stage(self) -> tuple[int, ...]:
        """By stage: the index of its grid in `grids`. Several stages of one grid are the chunks of its workers."""
        number = {grid: index for index, grid in enumerate(self.grids)}
        return tuple(number[stage.workers] for stage in self.stages)

    @cached_property
    def stages_of_grid(self) -> tuple[tuple[int, ...], ...]:
        """By grid: the stages that it computes, ascending."""
        return tuple(tuple(i for i, at in enumerate(self.grid_of_stage) if at == grid) for grid in range(len(self.grids)))

    @cached_property
    def roles(self) -> tuple[tuple[Role, ...], ...]:
        """By rank: what the worker is in each grid that it stands in, in order of the grids."""
        found: list[list[Role]] = [[] for _ in range(self.world)]
        for number, grid in enumerate(self.grids):
            for replica, row in enumerate(grid):
                for shard, rank in enumerate(row):
                    found[rank].append(Role(number, replica, shard))
        return tuple(map(tuple, found))

    @cached_property
    def one_role_each(self) -> bool:
        """Whether every worker stands in one grid, as in all pipelines; else some are replicas here and shards there."""
        return all(len(roles) == 1 for roles in self.roles)

    def lies_in(self, placement: Placement) -> bool:
        """Whether each worker has one role, and the stages go over the grids in this order, in as many laps as it takes."""
        at = enumerate(self.grid_of_stage)
        return self.one_role_each and all(grid == position_of_stage(i, len(self.grids), placement) for i, grid in at)

    @cached_property
    def order_givers(self) -> tuple[int, ...]:
        """By rank: the rank that stands for it where orders are made and simulated.

        Where each worker has one role the shards of a replica move in lockstep, and the first one stands for all.
        """
        if not self.one_role_each:
            return tuple(range(self.world))
        return tuple(self.grids[role.grid][role.replica][0] for (role,) in self.roles)

    def only_role(self, rank: int) -> Role:
        """The role of a worker that has one. Raises `PlanError` for one that stands in several grids."""
        if len(self.roles[rank]) > 1:
            raise PlanError(
                f"{self.coordinate(rank)} stands in {len(self.roles[rank])} grids of workers",
                cure="this needs a plan in which each worker stands in one; plan.schedule: list takes all plans",
            )
        return self.roles[rank][0]

    @cached_property
    def _role_in(self) -> tuple[dict[int, Role], ...]:
        return tuple({stage: role for role in roles for stage in self.stages_of_grid[role.grid]} for roles in self.roles)

    def role_in(self, rank: int, stage: int) -> Role:
        """What a worker is in the grid of one of its stages."""
        return self._role_in[rank][stage]

    def shards_of_stages(self, rank: int) -> dict[int, int]:
        """A worker's stages -> which shard of them it is."""
        return {stage: role.shard for stage, role in self._role_in[rank].items()}

    @cached_property
    def world(self) -> int:
        """Number of workers."""
        return max(rank for stage in self.stages for row in stage.workers for rank in row) + 1

    def rank(self, stage: int, replica: int, shard: int = 0) -> int:
        """Rank of the worker that holds this replica and shard of a stage."""
        return self.stages[stage].workers[replica][shard]

    @cached_property
    def _stages_of(self) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(sorted(stages)) for stages in self._role_in)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Stages that a worker computes, ascending."""
        return self._stages_of[rank]

    @cached_property
    def compute_keys(self) -> tuple[ComputeKey, ...]:
        """By rank. Ranks with the same key do the same work, on other microbatches.

        Whether they also hold the same state is another question: see `plan.ownership.first_rank_with_same_state`.
        """
        return tuple(tuple((role.grid, role.shard) for role in roles) for roles in self.roles)

    @cached_property
    def shard_groups(self) -> tuple[tuple[int, ...], ...]:
        """The workers that compute layers together, as shards of one replica, ascending; one that does so with none is alone.

        In order of their first ranks. In a pipeline these are the replicas of its positions.
        """
        group_of = {rank: {rank} for rank in range(self.world)}
        for row in (row for grid in self.grids for row in grid):
            joined = set[int]().union(*(group_of[rank] for rank in row))
            group_of.update(dict.fromkeys(joined, joined))
        return tuple(dict.fromkeys(tuple(sorted(group_of[rank])) for rank in range(self.world)))

    @cached_property
    def shards_by_layer(self) -> tuple[int, ...]:
        """The number of virtual shards of every layer: the only part of a plan on which results depend."""
        return tuple(stage.virtual_shards for stage in self.stages for _ in range(stage.first, stage.last))

    @property
    def virtual_shard_counts(self) -> frozenset[int]:
        """Into how many virtual shards the layers of some stage are cut."""
        return frozenset(stage.virtual_shards for stage in self.stages)

    def recomputed_layers(self, stage: int) -> tuple[int, ...]:
        """Indices of the stage's recomputed layers."""
        return tuple(layer for layer in self.recompute if self.stages[stage].first <= layer < self.stages[stage].last)

    def offloaded_layers(self, stage: int) -> tuple[int, ...]:
        """Indices of the stage's offloaded layers."""
        return tuple(layer for layer in self.offload if self.stages[stage].first <= layer < self.stages[stage].last)

    def replica_ranks(self, stage: int, shard: int = 0) -> tuple[int, ...]:
        """Ranks of one shard of all replicas of a stage: the group that reduces the stage's gradients."""
        return tuple(row[shard] for row in self.stages[stage].workers)

    def describe(self) -> str:
        """The plan's shape as text (`describe_mesh`), which stages give their replicas uneven shares, and what these divide."""
        text = describe_mesh([stage.replicas for stage in self.stages], [stage.shards for stage in self.stages])
        uneven = [f"stage {i} {':'.join(map(str, s.share))}" for i, s in enumerate(self.stages) if s.share]
        if uneven:
            text += f", shares of blocks: {', '.join(uneven)}"
        if self.most_zero:
            text += f", ZeRO {'/'.join(map(str, dict.fromkeys(self.zero_levels)))}"
            text += f", {self.zero_holders} holders" * (self.zero_holders > 1)
        gathered = dict.fromkeys(span for stage in self.stages if (span := stage.gather_in_effect) is not None)
        if set(gathered) - {"step"}:
            text += f", gathered by {'/'.join(gathered)}"
        if self.gradients == "scatter" and any(stage.replicas > 1 for stage in self.stages):
            text += ", gradients scattered"
        divided = sorted(stage.virtual_shards for stage in self.stages if stage.division)
        return f"{text}, {'/'.join(map(str, dict.fromkeys(divided)))} virtual shards" if divided else text

    def coordinate(self, rank: int) -> str:
        """A rank with its place as text: `worker 3 (stage 1, replica 1)`."""
        return f"worker {rank} ({self.seat(rank)})"

    def seat(self, rank: int) -> str:
        """The place of a rank as text: `stage 1, replica 1`."""
        places = []
        for role in self.roles[rank]:
            stages = ",".join(str(s) for s in self.stages_of_grid[role.grid])
            shard = f", shard {role.shard}" if len(self.grids[role.grid][0]) > 1 else ""
            places.append(f"stage {stages}, replica {role.replica}{shard}")
        return "; ".join(places)


def even_split_points(layers: int, stages: int) -> tuple[int, ...]:
    """First layers of stages 1, 2, ... with nearly equal numbers of layers; earlier stages may have one less."""
    return tuple(stage * layers // stages for stage in range(1, stages))


def describe_mesh(replicas: Sequence[int], shards: Sequence[int]) -> str:
    """Counts by stage as text: `2 stages x 2 replicas`, `2 stages x 1/2 replicas`, `1 stage x 1 replica x 4 shards`."""

    def counted(counts: Sequence[int], what: str) -> str:
        return count_noun(str(counts[0]) if len(set(counts)) == 1 else "/".join(map(str, counts)), what)

    text = f"{counted([len(replicas)], 'stage')} x {counted(replicas, 'replica')}"
    return f"{text} x {counted(shards, 'shard')}" if max(shards) > 1 else text
