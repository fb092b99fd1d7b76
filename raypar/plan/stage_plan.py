"""One stage of a plan, and the grid of workers that computes it."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, get_args

from raypar.errors import PlanError
from raypar.plan.wording import count_noun

GatherSpan = Literal["step", "microbatch", "layer"]
"""How long whole parameters, of which a worker owns a part, stay in its memory: for the step, for what it computes one after
the other in their stage, or for a layer's computation (two layers are there: one computes, one arrives)."""
GATHER_SPANS: tuple[GatherSpan, ...] = get_args(GatherSpan)
"""All of them, the one that costs least time and most memory first."""
GATHERS_FROM = 3
"""The ZeRO stage from which replicas divide parameters, and gather them."""
WorkerGrid = tuple[tuple[int, ...], ...]
"""The ranks that compute a stage: `grid[replica][shard]`. Replicas compute different microbatches; the shards of a replica
divide its layers (tensor parallelism)."""


@dataclass(frozen=True, slots=True)
class StagePlan:
    """Consecutive layers, the workers that compute them, and what their replicas and shards divide."""

    first: int
    """Index of the first layer."""
    last: int
    """Index behind the last layer."""
    workers: WorkerGrid = ((0,),)
    """The stage's grid of workers."""
    share: tuple[int, ...] = ()
    """Number of blocks of each replica: contiguous runs, in order of replicas. Empty: runs of nearly equal length."""
    division: tuple[int, ...] = ()
    """Number of virtual shards of each shard: contiguous runs, in order of shards. Empty: each is one virtual shard."""
    zero: int = 0
    """The ZeRO stage, 0 to 3: which kinds of state the replicas divide (`plan.ownership.SHARED_OUT_FROM`). One replica has
    everything, whatever it is. Results do not depend on it."""
    zero_holders: int = 1
    """How many replicas hold each part of the state that replicas divide: its owner, and those whose numbers follow. Where
    there are no more replicas than that, each has everything."""
    gather: GatherSpan = "step"
    """How long parameters that replicas divide (ZeRO stage 3) are whole. Results do not depend on it."""

    def __post_init__(self) -> None:
        if self.division and set(self.division) == {1}:
            object.__setattr__(self, "division", ())

    @property
    def zero_in_effect(self) -> int:
        """The ZeRO stage by which the replicas divide anything; 0 if each holds everything anyway."""
        return self.zero if self.replicas > self.zero_holders else 0

    @property
    def gather_in_effect(self) -> GatherSpan | None:
        """How long whole parameters are there, where replicas divide them; None: each replica has all of them, always."""
        return self.gather if self.zero_in_effect == GATHERS_FROM else None

    @property
    def replicas(self) -> int:
        """Number of copies of the stage that compute different microbatches."""
        return len(self.workers)

    @property
    def shards(self) -> int:
        """Number of workers that divide each replica (tensor parallelism)."""
        return len(self.workers[0])

    @property
    def virtual_shards(self) -> int:
        """Into how many parts the layers are cut. Results depend on it, and not on which workers compute these."""
        return sum(self.division) or self.shards

    def run_of(self, shard: int) -> range:
        """The virtual shards that a shard computes."""
        if not self.division:
            return range(shard, shard + 1)
        first = sum(self.division[:shard])
        return range(first, first + self.division[shard])

    @property
    def runs(self) -> tuple[range, ...]:
        """By shard: its virtual shards."""
        return tuple(map(self.run_of, range(self.shards)))

    def check(self, name: str) -> None:
        """Raise `PlanError` for a grid or shares that no plan can have. `name`: of the stage, in messages."""
        _check_grid(name, self.workers)
        if self.share and (len(self.share) != self.replicas or min(self.share) < 1):
            raise PlanError(
                f"{name} gives its {count_noun(self.replicas, 'replica')} the shares {list(self.share)} of the blocks",
                cure=f"give {count_noun(self.replicas, 'number')} >= 1, one for each replica, or no share for even runs",
            )
        if self.division and (len(self.division) != self.shards or min(self.division) < 1):
            raise PlanError(
                f"{name} gives its {count_noun(self.shards, 'shard')} {list(self.division)} virtual shards",
                cure=f"give {count_noun(self.shards, 'number')} >= 1, one for each shard, or () for one each",
            )
        if type(self.zero) is not int or not 0 <= self.zero <= 3:
            raise PlanError(f"{name}: there is no ZeRO stage {self.zero!r}", cure="use 0, 1, 2 or 3")
        if self.zero_holders not in (1, 2):
            raise PlanError(f"{name} has {self.zero_holders!r} holders of divided state", cure="use 1 or 2")
        if self.gather not in GATHER_SPANS:
            raise PlanError(f"{name} gathers parameters for a {self.gather!r}", cure=f"use {', '.join(GATHER_SPANS)}")
        if self.gather != "step" and self.zero < GATHERS_FROM:
            raise PlanError(
                f"{name}: plan.gather {self.gather} needs plan.zero {GATHERS_FROM}, and it has {self.zero}: each of its "
                "replicas has whole parameters",
                cure=f"set plan.zero: {GATHERS_FROM}, or plan.gather: step",
            )


def shortest_span(spans: Iterable[GatherSpan]) -> GatherSpan:
    """The one of some spans with which whole parameters take least memory."""
    return max(spans, key=GATHER_SPANS.index, default="step")


def consecutive_grids(shapes: Iterable[tuple[int, int]]) -> list[WorkerGrid]:
    """Grids of (replicas, shards) with ranks of their own, in order: those of a pipeline."""
    found: list[WorkerGrid] = []
    ranks = itertools.count()
    for replicas, shards in shapes:
        if replicas < 1 or shards < 1:
            raise PlanError(f"a stage with {replicas} replicas and {shards} shards", cure="set both to 1 or more")
        found.append(tuple(tuple(itertools.islice(ranks, shards)) for _ in range(replicas)))
    return found


def _check_grid(name: str, grid: WorkerGrid) -> None:
    """Raise `PlanError` for a grid without workers, with rows of different lengths, with a worker twice, or not ascending."""
    if not grid or not all(grid):
        raise PlanError(f"{name} has no workers", cure="give it at least one: a list with a list of shards per replica")
    if len({len(row) for row in grid}) > 1:
        raise PlanError(
            f"the replicas of {name} have {', '.join(str(len(row)) for row in grid)} shards",
            cure="give every replica of a stage as many shards",
        )
    twice = [rank for rank, times in Counter(rank for row in grid for rank in row).items() if times > 1]
    if twice:
        raise PlanError(
            f"{name} has worker {twice[0]} twice in its grid",
            cure="give each cell of a stage's grid to another worker; one worker may stand in the grids of several stages",
        )
    if min(rank for row in grid for rank in row) < 0:
        raise PlanError(f"{name} has a worker with a negative number", cure="number the workers 0, 1, 2, ...")
    lines = (*grid, *zip(*grid, strict=True))
    if any(list(line) != sorted(line) for line in lines):
        raise PlanError(
            f"the workers of {name} do not ascend along its replicas and shards: {[list(row) for row in grid]}",
            cure="give the lower number to the earlier shard and to the earlier replica; results do not depend on it",
        )
