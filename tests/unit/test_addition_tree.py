"""The addition tree: covers are exact and minimal, and folding covers is folding leaves."""

from itertools import pairwise

import pytest

from raypar.plan.addition_tree import addition_tree_children, covering_nodes, fold_tree
from raypar.plan.microbatches import contiguous_part


def text(left, right):
    """Addition that remembers its order."""
    return f"({left}+{right})"


def leaves(blocks, missing=()):
    return {(b, b + 1): None if b in missing else str(b) for b in range(blocks)}


@pytest.mark.parametrize(
    "blocks, drawn",
    [
        (1, "0"),
        (2, "(0+1)"),
        (3, "((0+1)+2)"),
        (4, "((0+1)+(2+3))"),
        (5, "(((0+1)+(2+3))+4)"),
        (6, "(((0+1)+(2+3))+(4+5))"),
        (7, "(((0+1)+(2+3))+((4+5)+6))"),
    ],
)
def test_the_tree_is_the_one_drawn(blocks, drawn):
    assert fold_tree(leaves(blocks), (0, blocks), text) == drawn


def test_the_left_child_is_the_largest_power_of_two_below_the_size():
    assert addition_tree_children((0, 8)) == ((0, 4), (4, 8))
    assert addition_tree_children((3, 10)) == ((3, 7), (7, 10))


@pytest.mark.parametrize("blocks", range(1, 18))
def test_every_run_is_covered_exactly_and_by_whole_subtrees(blocks):
    nodes = set()

    def collect(node):
        nodes.add(node)
        if node[1] - node[0] > 1:
            for child in addition_tree_children(node):
                collect(child)

    collect((0, blocks))
    for start in range(blocks + 1):
        for stop in range(start, blocks + 1):
            found = covering_nodes(range(start, stop), blocks)
            assert [b for lo, hi in found for b in range(lo, hi)] == list(range(start, stop))
            assert set(found) <= nodes
            parents = [n for n in nodes if n[1] - n[0] > 1 and set(addition_tree_children(n)) <= set(found)]
            assert not parents, "two children instead of their parent"


@pytest.mark.parametrize("blocks", range(1, 18))
def test_folding_subtree_sums_of_replicas_is_folding_all_blocks(blocks):
    for missing in ((), (0,), (blocks - 1,), tuple(range(0, blocks, 2)), tuple(range(blocks))):
        sums = leaves(blocks, missing)
        whole = fold_tree(sums, (0, blocks), text)
        for replicas in range(1, 7):
            runs = [contiguous_part(r, replicas, blocks) for r in range(replicas)]
            assert all(a.stop == b.start for a, b in pairwise(runs))
            subtrees = {n: fold_tree(sums, n, text) for run in runs for n in covering_nodes(run, blocks)}
            assert fold_tree(subtrees, (0, blocks), text) == whole


def test_at_equal_powers_of_two_every_replica_holds_one_subtree():
    for blocks in (1, 2, 4, 8, 16):
        for replicas in (1, 2, 4, 8, 16):
            if replicas <= blocks:
                assert all(len(covering_nodes(contiguous_part(r, replicas, blocks), blocks)) == 1 for r in range(replicas))
