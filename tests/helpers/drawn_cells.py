"""Cells of the grid of shards and plans for them, drawn by lot."""

from __future__ import annotations

import random

import pytest
from helpers.random_grids import ANY_PLAN, recompute_by_lot
from helpers.shard_grid import Cell, check_plan, run

from raypar.errors import PlanError
from raypar.plan import ParallelPlan
from raypar.plan.stage_connections import check_ties_are_cut_alike


def draw_cell(dice: random.Random) -> Cell:
    """A model, a schedule that takes all plans, microbatches, sequence parallelism and a dtype."""
    return Cell(
        dice.choice(["gpt", "shallow gpt", "llama", "dropped"]),
        dice.choice(ANY_PLAN),
        (),
        (),
        dice.choice((1, 2, 3, 4, 5, 7)),
        dice.random() < 0.3,
        dice.choice(("float64", "float32")),
    )


def check_drawn(dice: random.Random, cell: Cell, plan: ParallelPlan, order_seed: int) -> None:
    """`check_plan`, where by lot two layers are recomputed; a plan that cuts a tie in two ways must be refused."""
    plan = recompute_by_lot(dice, plan)
    try:
        check_ties_are_cut_alike(plan, cell.graph.crossing(plan).ties)
    except PlanError:
        with pytest.raises(PlanError, match="would have it"):
            run(cell, plan)
        return
    check_plan(cell, plan, order_seed)
