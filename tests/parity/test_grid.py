"""The promise: loss, gradients, norm, parameters and optimizer state of one plain process, bit for bit, in every layout."""

import pytest
from helpers.parity import check_local, layouts

pytestmark = pytest.mark.part(5)

CELLS = layouts()
SAMPLE = CELLS[::7]


def test_the_grid_has_at_least_150_layouts():
    assert len(CELLS) >= 150
    assert len(set(CELLS)) == len(CELLS)


@pytest.mark.parametrize("layout", SAMPLE, ids=str)
def test_a_layout_gives_the_bits_of_one_process(layout):
    check_local(layout)


@pytest.mark.full
@pytest.mark.parametrize("layout", [cell for cell in CELLS if cell not in SAMPLE], ids=str)
def test_every_other_layout_gives_the_bits_of_one_process(layout):
    check_local(layout)


@pytest.mark.ci
@pytest.mark.parametrize("order_seed", range(3))
def test_the_order_in_which_workers_run_does_not_matter(order_seed):
    check_local(CELLS[20], order_seed)
