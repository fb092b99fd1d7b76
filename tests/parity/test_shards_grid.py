"""Shards in the whole engine: the bits of the same shards in one process, the numbers of no shards, in every layout."""

import pytest
from helpers.shard_grid import cells, check

CELLS = cells()
SAMPLE = CELLS[::11]


def test_the_grid_has_at_least_100_layouts_of_every_kind():
    assert len(set(CELLS)) == len(CELLS) >= 100
    assert {cell.plan.world for cell in CELLS} >= {2, 3, 4, 5, 6, 8}


@pytest.mark.parametrize("cell", SAMPLE, ids=str)
def test_a_layout_with_shards_gives_the_bits_of_the_same_shards_and_the_numbers_of_none(cell):
    check(cell)


@pytest.mark.full
@pytest.mark.parametrize("cell", [cell for cell in CELLS if cell not in SAMPLE], ids=str)
def test_every_other_layout_with_shards_does_so_too(cell):
    check(cell)


@pytest.mark.parametrize("order_seed", range(1, 4))
def test_the_order_in_which_shards_run_does_not_matter(order_seed):
    check(
        next(cell for cell in CELLS if cell.replicas == (2, 2) and cell.shards == (2, 2) and cell.schedule == "zb-h1"),
        order_seed,
    )
