"""Twelve models in layouts drawn by lot: any grids of workers, schedules, virtual shards and recomputed layers have the bits of
one worker, and in float64 the numbers of the plain module."""

import pytest
import torch
from helpers.drawn_layouts import (
    COUNTS,
    NAMES,
    STEPS,
    DrawnLayout,
    check_layout,
    errors_of_plain,
    one_worker,
    train_plainly,
)
from helpers.on_shards import TOLERANCE

QUICK = {"vgg-11": (3,), "graph 8": ()}
"""Models of the default suite, and virtual shards whose numbers it compares."""
CASES = [(name, shards) for name in NAMES for shards in sorted({*COUNTS.get(name, (2, 3, 4))} - {1})]


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.ci] * (name not in QUICK)) for name in NAMES])
def test_a_layout_drawn_by_lot_has_the_bits_of_one_worker(name: str):
    check_layout(DrawnLayout(name, 0))


@pytest.mark.full
@pytest.mark.parametrize("seeds", [range(at, at + 10) for at in range(1, 41, 10)], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_forty_layouts_of_each_model(name: str, seeds: range):
    for seed in seeds:
        check_layout(DrawnLayout(name, seed))


@pytest.mark.full
@pytest.mark.parametrize("seeds", [range(at, at + 20) for at in range(0, 500, 20)], ids=str)
def test_five_hundred_graphs_each_in_a_layout_of_its_own(seeds: range):
    for seed in seeds:
        check_layout(DrawnLayout(f"{('branches', 'graph')[seed % 2]} {seed}", seed))


@pytest.mark.ci
@pytest.mark.parametrize("name", NAMES)
def test_one_worker_without_virtual_shards_has_the_bits_of_the_plain_module(name: str):
    got, want = one_worker(name, 1), train_plainly(name)
    assert (got.losses, got.norms) == (want.losses, want.norms)
    for step in range(STEPS):
        for (parameter, _, _), (value,) in got.gradients[step].items():
            whole = want.gradients[step][parameter]
            assert value is whole is None or torch.equal(value, whole), (step, parameter)
    state = want.parameters | want.buffers
    assert all(torch.equal(value, state[key[0]]) for key, (value,) in (got.parameters | got.buffers).items())


@pytest.mark.parametrize(
    "name, shards", [pytest.param(*case, marks=[pytest.mark.ci] * (case[1] not in QUICK.get(case[0], ()))) for case in CASES]
)
def test_virtual_shards_have_the_numbers_of_the_plain_module(name: str, shards: int):
    found = errors_of_plain(name, shards)
    assert {what: by for what, by in found.items() if not by <= TOLERANCE} == {}
