"""Layers are cut into so many virtual shards, and any number of workers computes these, with the bits of a worker for each."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from helpers.drawn_cells import check_drawn, draw_cell
from helpers.random_grids import random_division, random_plan
from helpers.shard_grid import Cell, check_plan
from helpers.virtual_shards import divided

from raypar.job import LossConfig
from raypar.plan import ParallelPlan
from raypar.worker.kept_predictions import Prediction
from raypar.worker.measure_profile import profile_job

GPT = Cell("shallow gpt", "1f1b", (), (), 4, dtype="float32")


@pytest.mark.parametrize("division", [(4,), (2, 2), (1, 3), (3, 1), (1, 2, 1)], ids=str)
def test_four_virtual_shards_on_any_workers_have_the_bits_of_four_shards(division: tuple[int, ...]):
    check_plan(GPT, divided(ParallelPlan.mesh(tp=len(division), layers=4), division))


@pytest.mark.parametrize(
    "schedule", ["zb-h1", *(pytest.param(s, marks=pytest.mark.ci) for s in ("gpipe", "1f1b", "interleaved"))]
)
def test_with_stages_replicas_and_sequence_parallel_too(schedule: str):
    cell = replace(GPT, model="gpt", schedule=schedule, replicas=(2, 1), shards=(2, 1), sequence=True, microbatches=3)
    check_plan(cell, cell.plan.with_virtual_shards(4))


def check_random(seed: int) -> None:
    dice = random.Random(seed)
    cell = draw_cell(dice)
    count = dice.choice((3, 4) if cell.model == "llama" else (2, 3, 4, 5))
    plan = random_plan(dice, len(cell.graph.layers), shards=(1, 1, 2, 3) if count > 2 else (1, 1, 2))
    check_drawn(dice, cell, random_division(dice, plan, count), seed)


@pytest.mark.parametrize("seed", [*range(4), *(pytest.param(seed, marks=pytest.mark.ci) for seed in range(4, 8))])
def test_any_division_over_any_grids_has_the_bits_of_the_same_shards(seed: int):
    check_random(seed)


@pytest.mark.full
@pytest.mark.parametrize("seeds", [range(at, at + 20) for at in range(8, 408, 20)], ids=str)
def test_four_hundred_divisions(seeds: range):
    for seed in seeds:
        check_random(seed)


def test_the_planner_measures_what_all_virtual_shards_of_a_layer_take_and_keep():
    spec = GPT.job.replace(virtual_shards=4)
    profile = profile_job(spec, workers=1, graph=GPT.graph, shards={4})
    assert all(layer.in_parts_ms for layer in profile.layers) and profile.price_of_virtual_shards
    kept = {layer.name: layer.in_parts_keep for layer in profile.layers}
    # Korthikanti et al. 2022, section 4: of 34 parts a block keeps 10 whole on each shard, without a mask of its own less.
    assert 1.5 < kept["block0"] == kept["block1"] < (4 * 10 + 24) / 34
    whole = profile_job(GPT.job, workers=1, graph=GPT.graph)
    assert whole.price_of_virtual_shards is None and whole.layers[1].in_parts_keep is None


def test_a_run_that_predicts_does_not_measure_parts():
    spec = GPT.job.replace(virtual_shards=4, loss=LossConfig(function=Prediction()))
    profile = profile_job(spec, workers=1, graph=GPT.graph, shards={4})
    assert profile.layers[0].forward_ms and profile.price_of_virtual_shards is None
