"""Plans drawn by lot whose stages have any grids of workers."""

from __future__ import annotations

import itertools
import operator
import random
from collections.abc import Sequence
from dataclasses import replace

from raypar.plan import ParallelPlan, StagePlan
from raypar.plan.stage_plan import WorkerGrid
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


def random_division(dice: random.Random, plan: ParallelPlan, virtual_shards: int) -> ParallelPlan:
    """The plan whose shards share so many virtual shards by lot, at least one each. No stage may have more shards."""
    sizes = {}
    for stage in plan.stages:
        if stage.workers not in sizes:
            ends = [0, *sorted(dice.sample(range(1, virtual_shards), stage.shards - 1)), virtual_shards]
            sizes[stage.workers] = tuple(b - a for a, b in itertools.pairwise(ends))
    return replace(plan, stages=tuple(replace(stage, division=sizes[stage.workers]) for stage in plan.stages))


def random_pipeline(
    dice: random.Random, layers: int, schedule: str, shards: Sequence[int], most_workers: int = 4
) -> ParallelPlan:
    """Up to three positions of the schedule, with replicas by lot, stages that are cut by lot. `shards`: to draw from."""
    chunks = registry.resolve_chunks_per_worker(schedule)
    while True:
        positions = dice.randint(1, 3)
        replicas, columns = ([dice.choice(each) for _ in range(positions)] for each in ((1, 1, 2, 3), shards))
        world = sum(map(operator.mul, replicas, columns))
        if 1 < world <= most_workers and positions * chunks <= layers:
            cuts = sorted(dice.sample(range(1, layers), positions * chunks - 1))
            placement = registry.placement_of_schedule(schedule)
            return ParallelPlan.of(replicas, columns, layers=layers, chunks=chunks, placement=placement, cuts=cuts)


def recompute_by_lot(dice: random.Random, plan: ParallelPlan) -> ParallelPlan:
    """The plan, in three of ten cases with two recomputed layers."""
    if dice.random() >= 0.3:
        return plan
    return replace(plan, recompute=tuple(sorted(dice.sample(range(plan.stages[-1].last), 2))))
