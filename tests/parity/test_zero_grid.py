"""The grid of ZeRO: every level under every schedule with all numbers of replicas and shards has the bits of one process."""

from __future__ import annotations

from collections import Counter

import pytest
from helpers.parity import Layout
from helpers.shard_grid import Cell
from helpers.zero_grid import LEVELS, check_zero_layout, zero_layouts
from helpers.zero_layouts import check_cell, check_zero, expected, run_cell

from raypar.schedule import registry

LAYOUTS = zero_layouts()
IN_DEFAULT_SUITE, IN_CI = 60, 12
"""One layout in so many is run there."""


def marks_of(number: int) -> list[pytest.MarkDecorator]:
    """The default suite has some, each with another level and schedule; CI more, the full one all."""
    if number % IN_DEFAULT_SUITE == 0:
        return []
    return [pytest.mark.ci] if number % IN_CI == 0 else [pytest.mark.full]


@pytest.mark.parametrize(
    "layout", [pytest.param(layout, marks=marks_of(number)) for number, layout in enumerate(LAYOUTS)], ids=str
)
def test_a_layout_has_the_bits_of_one_process(layout):
    check_zero_layout(layout)


def test_the_grid_has_more_than_400_layouts_and_all_that_is_drawn_at_every_level():
    assert len(LAYOUTS) >= 400
    for level in LEVELS:
        cells = [each.cell for each in LAYOUTS if level in each.levels]
        assert {cell.schedule for cell in cells} == set(registry.NAMES)
        assert {cell.model for cell in cells} == {"tangled", "uneasy", "plain", "llama", "uneasy llama", "gpt"}
        assert {None, "fp16", "fp16 parameters", "bf16 gradients"} <= {cell.compute for cell in cells}
        blocks = Counter("one" if c.blocks == 1 else "all" if c.blocks == c.microbatches else "between" for c in cells)
        assert len(blocks) == 3 and min(blocks.values()) > 20
        of_level = [each for each in LAYOUTS if max(each.levels) == level]
        assert {bool(each.recompute) for each in of_level} == {True, False}
        assert {each.holders for each in of_level} == ({1, 2} if level else {1})
        assert {each.gradients for each in of_level} == {"fold", "scatter"}
        assert {each.gather for each in of_level} == ({"step", "microbatch", "layer"} if level == 3 else {"step"})
        assert {isinstance(each.cell, Layout) for each in of_level} == {True, False}


@pytest.mark.part(6)
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("compute", ["fp16", "fp16 parameters", "fp16 gradients"])
def test_steps_whose_float16_gradients_overflow_are_skipped_by_all_owners(compute, level):
    layout = Layout("uneasy", "1f1b", (2, 3), 5, blocks=3, compute=compute)
    skipped = expected(layout.model, layout.microbatches, layout.blocks, compute).skipped
    assert any(skipped) and not all(skipped)
    check_zero(layout, level, gather="layer" if level == 3 else "step")


SKIPPED_ON_SHARDS = [
    (Cell("llama", "interleaved", (1, 3), (2, 2), 3, True, "float32", 3, "fp16 gradients"), 1, "step"),
    (Cell("llama", "interleaved", (1, 3), (2, 2), 5, True, "float32", 3, "fp16 parameters"), 3, "step"),
    (Cell("uneasy llama", "interleaved", (1, 3), (2, 2), 4, False, "float32", 2, "fp16"), 3, "layer"),
]


@pytest.mark.part(6)
@pytest.mark.parametrize("gradients", ["fold", "scatter"])
@pytest.mark.parametrize("cell, level, gather", SKIPPED_ON_SHARDS, ids=str)
def test_two_holders_of_a_tied_parameter_on_shards_have_the_same_gradients_when_a_step_is_skipped_too(
    cell, level, gather, gradients
):
    """Numbers that are none stand at the same places: they are no difference between holders."""
    plan = cell.plan.with_zero(level, 2).with_gather(gather).with_gradients(gradients)
    of_steps = run_cell(cell, plan).gradients
    assert any(of_steps) and not all(of_steps), "some steps are skipped"
    check_cell(cell, plan)


def test_a_replica_that_owns_nothing_of_a_bucket_gathers_totals_at_level_0_all_the_same():
    layout = Layout("uneasy", "zb-v", (3,), 3, blocks=3)
    check_zero(layout, 0, layout.plan.with_gradients("scatter"))
