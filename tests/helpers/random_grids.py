"""Plans drawn by lot whose stages have any grids of workers."""

from __future__ import annotations

import random
from collections.abc import Sequence

from raypar.plan import ParallelPlan, StagePlan
from raypar.plan.parallel_plan import WorkerGrid
from raypar.schedule import registry

ANY_PLAN = [name for name in registry.NAMES if registry.find_schedule(name).takes_any_plan]
"""Schedules that take all plans."""


def plan_of_grids(layers: int, *stages: tuple[int, WorkerGrid]) -> ParallelPlan:
    """`stages`: the first layer of each and its workers."""
    bounds = [first for first, _ in stages] + [layers]
    return ParallelPlan(tuple(StagePlan(*bounds[i : i + 2], grid) for i, (_, grid) in enumerate(stages)))


def random_plan(
    dice: random.Random, layers: int, *, most_workers: int = 4, most_stages: int = 4, shards: Sequence[int] = (1, 1, 2, 3)
) -> ParallelPlan:
    """Stages with any grids over few workers, numbered anew without those that have no work. `shards`: to draw from."""
    count, world = dice.randint(2, min(most_stages, layers)), dice.randint(2, most_workers)
    cuts = [0, *sorted(dice.sample(range(1, layers), count - 1))]
    grids = []
    for _ in range(count):
        columns = dice.choice([t for t in shards if t <= world])
        rows = dice.randint(1, world // columns)
        ranks = iter(sorted(dice.sample(range(world), rows * columns)))
        grids.append(tuple(tuple(next(ranks) for _ in range(columns)) for _ in range(rows)))
    used = sorted({rank for grid in grids for row in grid for rank in row})
    numbered = (tuple(tuple(map(used.index, row)) for row in grid) for grid in grids)
    return plan_of_grids(layers, *zip(cuts, numbered, strict=True))
