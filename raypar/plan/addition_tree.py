"""The order of additions over the blocks of a batch: a binary tree, the same in every plan (raypar/NUMERICS.md, rule 6).

A node of the tree is a half-open range of blocks `(lo, hi)`. Its left child has the largest power of two below its size (the
shape of a Merkle tree in RFC 6962, section 2.1). A replica with a contiguous run of blocks adds the complete subtrees inside
the run; the owner of a slice adds the subtree sums of all runs. Together they make the additions of one process.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

TreeNode = tuple[int, int]

_Sum = TypeVar("_Sum")


def addition_tree_children(node: TreeNode) -> tuple[TreeNode, TreeNode]:
    """The left and right child of a node of at least two blocks."""
    lo, hi = node
    size = hi - lo
    left = 1 << ((size - 1).bit_length() - 1)
    return (lo, lo + left), (lo + left, hi)


def covering_nodes(run: range, blocks: int) -> tuple[TreeNode, ...]:
    """The fewest nodes of the tree over `blocks` blocks that together cover exactly `run`, left to right."""

    def inside(node: TreeNode) -> tuple[TreeNode, ...]:
        lo, hi = node
        if hi <= run.start or run.stop <= lo:
            return ()
        if run.start <= lo and hi <= run.stop:
            return (node,)
        left, right = addition_tree_children(node)
        return inside(left) + inside(right)

    return inside((0, blocks)) if len(run) else ()


def fold_tree(sums: Mapping[TreeNode, _Sum | None], node: TreeNode, add: Callable[[_Sum, _Sum], _Sum]) -> _Sum | None:
    """The sum of the subtree sums below `node`, added in tree order; a missing or None sum (an empty block) is skipped."""
    if node in sums:
        return sums[node]
    if node[1] - node[0] <= 1:
        return None
    left, right = (fold_tree(sums, child, add) for child in addition_tree_children(node))
    if left is None or right is None:
        return right if left is None else left
    return add(left, right)
