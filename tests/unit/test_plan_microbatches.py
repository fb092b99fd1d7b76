"""How a step is cut: samples into microbatches, microbatches into blocks, and the addition tree over blocks."""

from itertools import product

import pytest

from raypar.errors import PlanError
from raypar.plan import Microbatches
from raypar.plan.addition_tree import addition_tree_children, covering_nodes, fold_tree
from raypar.plan.microbatches import DEFAULT_MAX_BLOCKS, contiguous_part, contiguous_part_index

pytestmark = pytest.mark.part(4)

SIZES = list(product(range(1, 12), range(25)))


@pytest.mark.parametrize("parts, total", SIZES)
def test_parts_are_contiguous_complete_and_differ_by_one_at_most(parts: int, total: int):
    runs = [contiguous_part(i, parts, total) for i in range(parts)]
    assert [x for run in runs for x in run] == list(range(total))
    assert max(map(len, runs)) - min(map(len, runs)) <= 1
    assert [contiguous_part_index(x, parts, total) for x in range(total)] == [i for i, run in enumerate(runs) for _ in run]


@pytest.mark.parametrize("count, blocks", [*product(range(1, 20), range(1, 20))])
def test_every_microbatch_lies_in_the_block_that_holds_it(count: int, blocks: int):
    cut = Microbatches(count, blocks)
    assert [cut.block_of(m) for m in range(count)] == [b for b in range(blocks) for _ in cut.microbatches_of_block(b)]


def test_blocks_default_to_the_microbatches_but_sixteen_at_most():
    assert [Microbatches(m).blocks for m in (1, 5, 16, 17, 500)] == [1, 5, 16, 16, DEFAULT_MAX_BLOCKS]


def test_ragged_microbatches_differ_by_one_sample():
    cut = Microbatches(4, 2, batch_size=10)
    assert [len(cut.samples(m)) for m in range(4)] == [2, 3, 2, 3]


@pytest.mark.parametrize("arguments", [(0,), (-1,), (4, -1), (5, 0, 4)])
def test_a_cut_that_cannot_be_made_is_refused_with_a_cure(arguments: tuple[int, ...]):
    with pytest.raises(PlanError) as caught:
        Microbatches(*arguments)
    assert caught.value.cure


@pytest.mark.parametrize("size", range(2, 40))
def test_the_left_child_is_the_largest_power_of_two_below_the_size(size: int):
    (lo, middle), (same, hi) = addition_tree_children((3, 3 + size))
    left = middle - lo
    assert (lo, same, hi) == (3, middle, 3 + size)
    assert left & (left - 1) == 0 and left < size <= 2 * left


@pytest.mark.parametrize("blocks", range(1, 18))
def test_any_cut_into_runs_performs_the_additions_of_one_holder(blocks: int):
    """Strings make the order of additions visible: "(0+1)" is another sum than "(1+0)"."""

    def add(a: str, b: str) -> str:
        return f"({a}+{b})"

    leaves = {(b, b + 1): str(b) for b in range(blocks)}
    whole = fold_tree(leaves, (0, blocks), add)
    for replicas in range(1, blocks + 3):
        sums = {
            node: fold_tree(leaves, node, add)
            for r in range(replicas)
            for node in covering_nodes(contiguous_part(r, replicas, blocks), blocks)
        }
        assert fold_tree(sums, (0, blocks), add) == whole


@pytest.mark.parametrize("blocks", range(1, 34))
def test_a_run_is_covered_by_few_nodes_left_to_right(blocks: int):
    for lo in range(blocks):
        for hi in range(lo, blocks + 1):
            nodes = covering_nodes(range(lo, hi), blocks)
            assert [b for node in nodes for b in range(*node)] == list(range(lo, hi))
            assert len(nodes) <= 2 * blocks.bit_length()


def test_empty_blocks_are_skipped_not_added():
    def add(a: str, b: str) -> str:
        return f"({a}+{b})"

    assert fold_tree({(0, 1): "0", (1, 2): None, (2, 3): "2", (3, 4): None}, (0, 4), add) == "(0+2)"
    assert fold_tree({}, (0, 4), add) is None
