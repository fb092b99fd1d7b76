"""Replicas with uneven shares of the blocks change no bit: every layout has the bits of one process, as even ones have."""

import pytest
from helpers.parity import Layout, check_local
from helpers.shard_grid import Cell, check

from raypar.schedule import registry

pytestmark = pytest.mark.part(4)

ONE = ((1, 3, 12),)
TWO = ((5, 5, 2), (7, 5))
THREE = ((), (9, 1, 2), (1, 11))
CELLS = [
    Layout("tangled", "1f1b", (3,), 16, blocks=16, shares=ONE),
    Layout("tangled", "gpipe", (3,), 21, blocks=16, shares=ONE),
    Layout("tangled", "1f1b", (3,), 16, blocks=16, compute="bf16", shares=ONE),
    Layout("relayed", "1f1b", (1, 2, 1), 4, shares=((), (1, 3), ())),
    Layout("plain", "zb-v", (2, 2), 3, blocks=7, shares=((6, 1), ())),
    Layout("norms", "1f1b", (3, 1), 8, blocks=8, shares=((1, 5, 2), ())),
    *(Layout("tangled", name, (3, 2), 16, blocks=12, shares=TWO) for name in registry.NAMES),
    *(Layout("plain", name, (2, 3, 2), 12, blocks=12, shares=THREE) for name in registry.NAMES),
    *(Layout("tangled", name, (2, 2), 5, blocks=4, shares=((3, 1), (3, 1))) for name in registry.NAMES),
]
SHARDED = [
    Cell("shallow gpt", "1f1b", (3,), (2,), 10, blocks=10, shares=((1, 7, 2),)),
    Cell("shallow gpt", "zb-h1", (2, 1), (2, 3), 7, blocks=5, shares=((4, 1), ())),
    Cell("gpt", "interleaved", (2, 2), (2, 1), 5, blocks=5, shares=((4, 1), (1, 4))),
    Cell("gpt", "zb-v", (2, 2), (1, 2), 10, True, blocks=8, shares=((), (7, 1))),
    Cell("dropped", "gpipe", (2, 1), (2, 2), 4, shares=((3, 1), ())),
]


@pytest.mark.parametrize("layout", CELLS, ids=str)
def test_uneven_shares_have_the_bits_of_one_process(layout):
    check_local(layout)


@pytest.mark.parametrize("cell", SHARDED, ids=str)
def test_uneven_shares_of_shards_have_the_bits_of_the_same_shards_in_one_process(cell):
    check(cell)
