"""Offloading changes no bit: every layout has losses, gradients and parameters of one process that keeps all in memory."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.offloaded_layouts import in_folder, offloaded_cells, offloaded_layouts, small_memory_offloaded
from helpers.recomputed_layouts import check_recomputed
from helpers.shard_grid import check

CELLS = offloaded_layouts()
SAMPLE = CELLS[::12]
SHARDED = offloaded_cells()
SHARDED_SAMPLE = SHARDED[::40]

pytestmark = pytest.mark.part(4)


@pytest.fixture(autouse=True)
def small_memory() -> Iterator[None]:
    with small_memory_offloaded():
        yield


def test_the_grids_have_at_least_40_layouts_each_that_offload():
    assert len(CELLS) >= 40 and len(SHARDED) >= 40
    assert len(set(map(str, CELLS))) == len(CELLS)


@pytest.mark.parametrize("cell", SAMPLE, ids=str)
def test_a_layout_that_offloads_has_the_bits_of_one_process(cell, tmp_path: Path):
    check_recomputed(in_folder(cell, tmp_path))


@pytest.mark.full
@pytest.mark.parametrize("cell", [cell for cell in CELLS if cell not in SAMPLE], ids=str)
def test_every_other_layout_that_offloads_has_the_bits_of_one_process(cell, tmp_path: Path):
    check_recomputed(in_folder(cell, tmp_path))


@pytest.mark.parametrize("cell", SHARDED_SAMPLE, ids=str)
def test_shards_that_offload_have_the_bits_of_the_same_shards_in_one_process(cell, tmp_path: Path):
    check(in_folder(cell, tmp_path))


@pytest.mark.full
@pytest.mark.parametrize("cell", [cell for cell in SHARDED if cell not in SHARDED_SAMPLE], ids=str)
def test_every_other_layout_of_shards_that_offload_has_the_bits_of_one_process(cell, tmp_path: Path):
    check(in_folder(cell, tmp_path))
