"""Parallel plans: the stages, replicas and shards of a run, and the seats of its workers."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from typing import Literal

from raypar.errors import PlanError
from raypar.plan.microbatches import Microbatches, contiguous_part
from raypar.plan.wording import count_noun

Placement = Literal["loop", "v"]


@dataclass(frozen=True, slots=True)
class StagePlan:
    """Consecutive layers at one position of the pipeline."""

    first: int
    """Index of the first layer."""
    last: int
    """Index behind the last layer."""
    position: int
    """Position in the pipeline; several stages at one position are the chunks of its workers."""
    replicas: int = 1
    """Number of copies of the stage that compute different microbatches."""
    shards: int = 1
    """Number of workers that divide each replica (tensor parallelism)."""
    share: tuple[int, ...] = ()
    """Number of blocks of each replica: contiguous runs, in order of replicas. Empty: runs of nearly equal length."""

    def check_share(self, index: int) -> None:
        """Raise `PlanError` unless stage `index` gives every replica at least one block, or all even runs."""
        if self.share and (len(self.share) != self.replicas or min(self.share) < 1):
            raise PlanError(
                f"stage {index} gives its {count_noun(self.replicas, 'replica')} the shares {list(self.share)} of the blocks",
                cure=f"give {count_noun(self.replicas, 'number')} >= 1, one for each replica, or () for even runs",
            )


@dataclass(frozen=True, slots=True, order=True)
class Seat:
    """A worker's place in the plan: its position in the pipeline, its replica, its shard."""

    position: int
    replica: int
    shard: int = 0

    def __str__(self) -> str:
        shard = f" shard {self.shard}" if self.shard else ""
        return f"position {self.position} replica {self.replica}{shard}"


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
            if stage.replicas < 1 or stage.shards < 1:
                raise PlanError(
                    f"stage {index} has {stage.replicas} replicas and {stage.shards} shards", cure="set both to 1 or more"
                )
            stage.check_share(index)
            before = stage.last
        if sorted({s.position for s in self.stages}) != list(range(self.positions)):
            raise PlanError("pipeline positions are not 0, 1, 2, ...", cure="number the positions without gaps")
        for position in range(self.positions):
            shapes = {(s.replicas, s.shards, s.share) for s in self.stages if s.position == position}
            if len(shapes) > 1:
                raise PlanError(
                    f"the chunks of position {position} have different (replicas, shards, shares): {sorted(shapes)}",
                    cure="chunks of one worker have the same replicas, shards and shares; make them equal",
                )
        if self.recompute != tuple(sorted(set(self.recompute) & set(range(self.stages[-1].last)))):
            raise PlanError(
                f"recompute names the layers {self.recompute}; the plan has layers 0 to {self.stages[-1].last - 1}",
                cure="give the index of each layer to recompute once, in order; range(number of layers) for all",
            )

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
            tuple(StagePlan(bounds[s], bounds[s + 1], at[s], replicas[at[s]], shards[at[s]]) for s in range(count)),
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

    @property
    def has_movable_split_points(self) -> bool:
        """Whether some split point could move without changing the number of shards of a layer."""
        return any(a.shards == b.shards and b.last - a.first > 2 for a, b in itertools.pairwise(self.stages))

    @cached_property
    def positions(self) -> int:
        """Number of pipeline positions."""
        return max(s.position for s in self.stages) + 1

    @cached_property
    def seats(self) -> tuple[Seat, ...]:
        """The seats of all workers; the index of a seat is the worker's rank."""
        shape = {s.position: (s.replicas, s.shards) for s in self.stages}
        return tuple(Seat(p, r, t) for p in range(self.positions) for r in range(shape[p][0]) for t in range(shape[p][1]))

    @cached_property
    def _rank_of_seat(self) -> dict[Seat, int]:
        return {seat: rank for rank, seat in enumerate(self.seats)}

    @cached_property
    def _stages_at(self) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(i for i, s in enumerate(self.stages) if s.position == p) for p in range(self.positions))

    @property
    def world(self) -> int:
        """Number of workers."""
        return len(self.seats)

    def rank(self, stage: int, replica: int, shard: int = 0) -> int:
        """Rank of the worker that holds this replica and shard of a stage."""
        return self._rank_of_seat[Seat(self.stages[stage].position, replica, shard)]

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Stages (chunks) hosted by a worker, ascending."""
        return self._stages_at[self.seats[rank].position]

    @cached_property
    def compute_keys(self) -> tuple[tuple[int, int], ...]:
        """By rank: (position, shard). Ranks with the same key do the same work, on other microbatches.

        Whether they also hold the same state is another question: see `plan.ownership.first_rank_with_same_state`.
        """
        return tuple((seat.position, seat.shard) for seat in self.seats)

    @cached_property
    def shards_by_layer(self) -> tuple[int, ...]:
        """The number of shards of every layer: the only part of a plan on which results depend."""
        return tuple(stage.shards for stage in self.stages for _ in range(stage.first, stage.last))

    def recomputed_layers(self, stage: int) -> tuple[int, ...]:
        """Indices of the stage's recomputed layers."""
        return tuple(layer for layer in self.recompute if self.stages[stage].first <= layer < self.stages[stage].last)

    def replica_ranks(self, stage: int, shard: int = 0) -> tuple[int, ...]:
        """Ranks of one shard of all replicas of a stage: the group that reduces the stage's gradients."""
        return tuple(self.rank(stage, r, shard) for r in range(self.stages[stage].replicas))

    def describe(self) -> str:
        """The plan's shape as text (`describe_mesh`), and which stages give their replicas uneven shares."""
        text = describe_mesh([stage.replicas for stage in self.stages], [stage.shards for stage in self.stages])
        uneven = [f"stage {i} {':'.join(map(str, s.share))}" for i, s in enumerate(self.stages) if s.share]
        return f"{text}, shares of blocks: {', '.join(uneven)}" if uneven else text

    def coordinate(self, rank: int) -> str:
        """A rank with its place as text: `worker 3 (stage 1, replica 1)`."""
        seat = self.seats[rank]
        stages = ",".join(str(s) for s in self.stages_of(rank))
        shard = f", shard {seat.shard}" if self.stages[self.stages_of(rank)[0]].shards > 1 else ""
        return f"worker {rank} (stage {stages}, replica {seat.replica}{shard})"


def even_split_points(layers: int, stages: int) -> tuple[int, ...]:
    """First layers of stages 1, 2, ... with nearly equal numbers of layers; earlier stages may have one less."""
    return tuple(stage * layers // stages for stage in range(1, stages))


def describe_mesh(replicas: Sequence[int], shards: Sequence[int]) -> str:
    """Counts by stage as text: `2 stages x 2 replicas`, `2 stages x 1/2 replicas`, `1 stage x 1 replica x 4 shards`."""

    def counted(counts: Sequence[int], what: str) -> str:
        return count_noun(str(counts[0]) if len(set(counts)) == 1 else "/".join(map(str, counts)), what)

    text = f"{counted([len(replicas)], 'stage')} x {counted(replicas, 'replica')}"
    return f"{text} x {counted(shards, 'shard')}" if max(shards) > 1 else text


@dataclass(frozen=True)
class MicrobatchRouting:
    """The replica that runs each microbatch: replicas have contiguous runs of blocks (rule 6 of the numerics contract)."""

    plan: ParallelPlan
    """The plan whose replicas run the microbatches."""
    microbatches: Microbatches
    """The microbatches of a step, with their blocks."""
    forward_only: bool = False
    """Whether these are the microbatches of a validation pass: its blocks are others, cut in proportion to the shares."""

    def __post_init__(self) -> None:
        blocks = self.microbatches.blocks
        for index, stage in enumerate(self.plan.stages):
            if stage.share and sum(stage.share) != blocks and not self.forward_only:
                raise PlanError(
                    f"stage {index} shares out {count_noun(sum(stage.share), 'block')} as {list(stage.share)}, and a step has "
                    f"{blocks}",
                    cure=f"give shares that add up to {blocks}, the job's virtual_replicas",
                )

    def blocks_of_replica(self, stage: int, replica: int) -> range:
        """The blocks of a replica; it may be empty if there are more replicas than blocks."""
        share, blocks = self.plan.stages[stage].share, self.microbatches.blocks
        if not share:
            return contiguous_part(replica, self.plan.stages[stage].replicas, blocks)
        first, last = (sum(share[:end]) * blocks // sum(share) for end in (replica, replica + 1))
        return range(first, last)

    @cached_property
    def _replica_of(self) -> tuple[tuple[int, ...], ...]:
        table = []
        for stage in range(len(self.plan.stages)):
            row = [0] * self.microbatches.count
            for replica in range(self.plan.stages[stage].replicas):
                for block in self.blocks_of_replica(stage, replica):
                    for microbatch in self.microbatches.microbatches_of_block(block):
                        row[microbatch] = replica
            table.append(tuple(row))
        return tuple(table)

    def replica_for(self, stage: int, microbatch: int) -> int:
        """The replica of `stage` that runs `microbatch`."""
        return self._replica_of[stage][microbatch]

    def rank(self, stage: int, microbatch: int, shard: int = 0) -> int:
        """Rank of the worker that runs one shard of `stage` on `microbatch`."""
        return self.plan.rank(stage, self.replica_for(stage, microbatch), shard)

    @cached_property
    def entry_order(self) -> tuple[int, ...]:
        """The order in which microbatches enter the pipeline: one from each run of blocks in turn, in proportion.

        A run ends wherever the blocks of some stage's replica end, so each run lies on one replica of every stage. Runs of
        equal length take strict turns. Inside a run, and so inside a block, microbatches enter by index.
        """
        blocks = self.microbatches.blocks
        starts = {0}
        for index in {s.position: i for i, s in enumerate(self.plan.stages)}.values():
            starts |= {self.blocks_of_replica(index, r).start for r in range(self.plan.stages[index].replicas)}
        bounds = [b for b in sorted(starts) if b < blocks] + [blocks]
        keyed: list[tuple[Fraction, int, int]] = []
        for number, (lo, hi) in enumerate(itertools.pairwise(bounds)):
            members = [m for b in range(lo, hi) for m in self.microbatches.microbatches_of_block(b)]
            keyed += [(Fraction(2 * i + 1, 2 * len(members)), number, m) for i, m in enumerate(members)]
        return tuple(m for _, _, m in sorted(keyed))

    def microbatches_of_replica(self, stage: int, replica: int) -> tuple[int, ...]:
        """The microbatches of one replica of a stage, in the order in which they enter the pipeline."""
        return tuple(m for m in self.entry_order if self.replica_for(stage, m) == replica)
