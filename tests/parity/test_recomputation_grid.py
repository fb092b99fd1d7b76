"""Recomputation changes no bit: every layout has losses, gradients and parameters of one process that recomputes nothing."""

import pytest
from helpers.recomputed_layouts import check_recomputed, recomputed_layouts
from helpers.shard_grid import check, recomputing_cells

pytestmark = pytest.mark.part(5)

CELLS = recomputed_layouts()
SAMPLE = CELLS[::12]
SHARDED = recomputing_cells()
SHARDED_SAMPLE = SHARDED[::28]


def test_the_grids_have_at_least_60_layouts_each_that_recompute():
    assert len(CELLS) >= 60 and len(SHARDED) >= 60
    assert len(set(map(str, CELLS))) == len(CELLS) and len(set(SHARDED)) == len(SHARDED)


@pytest.mark.parametrize("cell", SAMPLE, ids=str)
def test_a_layout_that_recomputes_has_the_bits_of_one_process(cell):
    check_recomputed(cell)


@pytest.mark.full
@pytest.mark.parametrize("cell", [cell for cell in CELLS if cell not in SAMPLE], ids=str)
def test_every_other_layout_that_recomputes_has_the_bits_of_one_process(cell):
    check_recomputed(cell)


@pytest.mark.parametrize("cell", SHARDED_SAMPLE, ids=str)
def test_shards_that_recompute_have_the_bits_of_the_same_shards_in_one_process(cell):
    check(cell)


@pytest.mark.full
@pytest.mark.parametrize("cell", [cell for cell in SHARDED if cell not in SHARDED_SAMPLE], ids=str)
def test_every_other_layout_of_shards_that_recompute_has_the_bits_of_one_process(cell):
    check(cell)
