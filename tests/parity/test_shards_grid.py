"""Shards in the whole engine: the bits of the same shards in one process, the numbers of no shards, in every layout."""

import time
from collections import OrderedDict

import pytest
import torch
from helpers import reference
from helpers.on_shards import error, graph_of
from helpers.shard_grid import HEADS, SEQ, STEPS, TOLERANCE, VOCAB, WIDTH, Cell, cells, check
from torch import nn

from examples import gpt
from raypar.plan import ParallelPlan
from raypar.worker.run_in_one_process import OneProcessRun

pytestmark = pytest.mark.part(5)

CELLS = cells()
SAMPLE = CELLS[::46]


def test_the_grid_has_at_least_100_layouts_of_every_kind():
    assert len(set(CELLS)) == len(CELLS) >= 100
    assert {cell.plan.world for cell in CELLS} >= {2, 3, 4, 5, 6, 8}


@pytest.mark.parametrize("cell", SAMPLE, ids=str)
def test_a_layout_with_shards_gives_the_bits_of_the_same_shards_and_the_numbers_of_none(cell):
    check(cell)


@pytest.mark.parametrize("cell", [Cell("gpt", "1f1b", (3,), (2,), 2, True), Cell("gpt", "1f1b", (1, 2), (2, 2), 1)], ids=str)
def test_so_does_one_with_a_replica_that_has_no_microbatch(cell):
    """It tells the others at once, in the first step too, which gradients are parts of sums over shards."""
    check(cell)


@pytest.mark.full
@pytest.mark.parametrize("cell", [cell for cell in CELLS if cell not in SAMPLE], ids=str)
def test_every_other_layout_with_shards_does_so_too(cell):
    check(cell)


@pytest.mark.parametrize("order_seed", [1, *(pytest.param(seed, marks=pytest.mark.full) for seed in (2, 3))])
def test_the_order_in_which_shards_run_does_not_matter(order_seed):
    check(
        next(cell for cell in CELLS if cell.replicas == (2, 2) and cell.shards == (2, 2) and cell.schedule == "zb-h1"),
        order_seed,
    )


def with_a_linear_as_a_layer() -> nn.Sequential:
    parts = OrderedDict(gpt.layers(VOCAB, WIDTH, 2, HEADS, SEQ + 1).named_children())
    made = [("embed", parts["embed"]), ("block0", parts["block0"]), ("mix", gpt.Linear(WIDTH, WIDTH)), ("head", parts["head"])]
    return nn.Sequential(OrderedDict(made))


WHOLE = {
    "inside layers": (lambda: gpt.layers(VOCAB, WIDTH, 2, HEADS, SEQ + 1), ("up", "down")),
    "a layer": (with_a_linear_as_a_layer, ("mix",)),
}


@pytest.mark.ci
@pytest.mark.parametrize("where", WHOLE)
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_whole_linear_layers_that_read_parts_of_a_sequence_train_as_without_shards(schedule, where):
    """Zero-bubble schedules put their weight gradients off where they read whole values only."""
    make, names = WHOLE[where]
    made, cell = graph_of(make), Cell("gpt", schedule, (1, 1), (2, 2), 5, True)
    job = cell.job.replace(plan=cell.job.plan.replace(styles={f"*{name}": "whole" for name in names}))
    plan = ParallelPlan.mesh(pp=2, tp=2, layers=len(made.layers), cuts=[3])
    with OneProcessRun(job, plan, schedule, graph=made) as local:
        for step in range(STEPS):
            (loss,) = {report.loss for report in local.step(step)}
        found = {name: copies for name, copies in local.parameters().items() if name.split(".")[-2] in names}
    want = reference.train(made, job)
    assert len(found) == 2 * (2 * len(names) if where == "inside layers" else 1)
    assert error(torch.tensor(loss), torch.tensor(want.losses[-1])) < TOLERANCE
    assert all(error(copy, want.parameters[name]) < TOLERANCE for name, copies in found.items() for copy in copies)


def test_waiting_for_a_slow_shard_is_not_computing(monkeypatch):
    """Else all shards of a replica would be told to be stragglers, where one is. Time passes in a layer of shard 0 only."""
    now = [0]
    monkeypatch.setattr(time, "perf_counter_ns", lambda: now[0])
    cell = Cell("gpt", "1f1b", (1,), (2,), 5)
    with OneProcessRun(cell.job, cell.plan, "1f1b", graph=cell.graph) as local:
        block = local.cores[0].stages[0, 0].modules["block0"]
        quick = block.forward

        def slow(x):
            now[0] += 10_000_000
            return quick(x)

        block.forward = slow
        for step in range(2):
            assert [report.busy_seconds for report in local.step(step)] == [0.05, 0.0]
