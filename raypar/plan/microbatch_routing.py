"""Which replica of each stage runs each microbatch, and in which order microbatches enter the pipeline."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property, lru_cache

from raypar.errors import PlanError
from raypar.plan.gradient_scatter import replicas_by_share, rounds_of
from raypar.plan.microbatches import Microbatches, contiguous_part
from raypar.plan.parallel_plan import ParallelPlan
from raypar.plan.wording import count_noun


@dataclass(frozen=True)
class MicrobatchRouting:
    """The replica that runs each microbatch: replicas have contiguous runs of blocks (rule 6 of the numerics contract), or take
    microbatches in turn, where the plan scatters gradients."""

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

    @property
    def _takes_turns(self) -> bool:
        """Whether replicas take microbatches in turn."""
        return self.plan.gradients == "scatter" and not self.forward_only

    def scatters(self, stage: int) -> bool:
        """Whether each microbatch's gradients of a stage go to their owners by themselves."""
        return self._takes_turns and self.plan.stages[stage].replicas > 1

    @cached_property
    def rounds_of_stage(self) -> tuple[tuple[range, ...], ...]:
        """By stage: the rounds in which its owners add up gradients that are scattered (`gradient_scatter.rounds_of`); none of
        other stages."""
        return tuple(rounds_of(row) if self.scatters(stage) else () for stage, row in enumerate(self._replica_of))

    @cached_property
    def _replica_of(self) -> tuple[tuple[int, ...], ...]:
        table: list[tuple[int, ...]] = []
        for stage in range(len(self.plan.stages)):
            if self._takes_turns:
                place = self.plan.stages[stage]
                table.append(replicas_by_share(self.microbatches.count, place.share or (1,) * place.replicas))
                continue
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
        equal length take strict turns. Inside a run, and so inside a block, microbatches enter by index. Where replicas take
        microbatches in turn, all enter by index.
        """
        if self._takes_turns:
            return tuple(range(self.microbatches.count))
        blocks = self.microbatches.blocks
        starts = {0}
        for index in dict(zip(self.plan.grid_of_stage, range(len(self.plan.stages)), strict=True)).values():
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

    def microbatches_of_worker(self, stage: int, rank: int) -> tuple[int, ...]:
        """The microbatches that a worker computes in one of its stages, in the order in which they enter the pipeline."""
        return self.microbatches_of_replica(stage, self.plan.role_in(rank, stage).replica)

    def blocks_of_worker(self, stage: int, rank: int) -> range:
        """The blocks that a worker computes in one of its stages."""
        return self.blocks_of_replica(stage, self.plan.role_in(rank, stage).replica)

    def ranks(self, stage: int, microbatch: int) -> tuple[int, ...]:
        """By shard: the ranks that run `stage` on `microbatch`."""
        return self.plan.stages[stage].workers[self._replica_of[stage][microbatch]]

    def serving_shards(self, maker: int, user: int, microbatch: int) -> tuple[int, ...]:
        """By shard of the stage `user`: the shard of `maker` that gives it values or gradients of a microbatch."""
        return serving_shards(self.ranks(maker, microbatch), self.ranks(user, microbatch))

    def messages(self, maker: int, user: int) -> int:
        """How many bundles of the stage `maker` go to other workers in a step, for the stage `user`."""
        count = 0
        for m in range(self.microbatches.count):
            makers, served = self.ranks(maker, m), zip(self.serving_shards(maker, user, m), self.ranks(user, m), strict=True)
            count += sum(makers[shard] != rank for shard, rank in served)
        return count


@lru_cache(maxsize=1 << 12)
def serving_shards(makers: tuple[int, ...], users: tuple[int, ...]) -> tuple[int, ...]:
    """By shard of one replica of a stage: which shard of a replica of another stage gives it values or gradients.

    These are whole and equal on all shards of their maker. So a worker that is one of the makers takes its own, and nothing
    travels; the other users take the makers in turn. `makers`, `users`: ranks, by shard.
    """
    return tuple(makers.index(rank) if rank in makers else shard % len(makers) for shard, rank in enumerate(users))
