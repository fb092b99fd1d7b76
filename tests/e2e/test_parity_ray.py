"""The same bits on Ray, in layouts beside the one of `test_train.py`."""

from pathlib import Path

import pytest
from helpers.parity import Layout
from helpers.parity_on_ray import check_on_ray

from raypar.actors.ray_connection import connect_ray

LAYOUTS = [
    Layout("tangled", "zb-v", (2, 2), 7),
    Layout("tangled", "interleaved", (1, 1, 1), 7, chunks=3),
    Layout("plain", "zb-h1", (1, 2, 1), 8),
    Layout("tangled", "zb-h1", (2, 1), 5, compute="bf16"),
    Layout("plain norms", "1f1b", (2, 2), 4),
]


@pytest.fixture(scope="module", autouse=True)
def own_ray():
    """One local Ray for all layouts."""
    with connect_ray(None, 4, Path(__file__).parents[1]):
        yield


@pytest.mark.full
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_the_other_layouts_on_ray_give_the_bits_of_one_process(layout, tmp_path):
    check_on_ray(layout, tmp_path)


@pytest.mark.full
def test_a_layout_that_recomputes_on_ray_gives_the_bits_of_one_process(tmp_path):
    check_on_ray(LAYOUTS[0], tmp_path, recompute="full")


@pytest.mark.full
@pytest.mark.parametrize("layout", [LAYOUTS[0], LAYOUTS[4], Layout("tangled", "1f1b", (4,), 8)], ids=str)
def test_replicas_on_ray_that_divide_state_give_the_bits_of_one_process(layout, tmp_path):
    check_on_ray(layout, tmp_path, zero=1)
