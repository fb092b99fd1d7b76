"""The fixed addition tree over a step's blocks (DESIGN 4.5): the one order in which block gradients are combined.

A node is a half-open range of blocks `(lo, hi)`; its left child is the largest power of two below its size (the shape of
a Merkle tree in RFC 6962, section 2.1). Whoever holds a contiguous run of blocks adds the complete subtrees inside the
run; whoever owns a slice adds the subtree sums of all runs. Both ends therefore perform the same additions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

TreeNode = tuple[int, int]
T = TypeVar("T")


def tree_children(node: TreeNode) -> tuple[TreeNode, TreeNode]:
    """Left and right child of a node of at least two blocks."""
    lo, hi = node
    size = hi - lo
    left = 1 << ((size - 1).bit_length() - 1)
    return (lo, lo + left), (lo + left, hi)


def covering_nodes(run: range, blocks: int) -> tuple[TreeNode, ...]:
    """The fewest tree nodes over `blocks` leaves that together are exactly `run`, left to right."""

    def inside(node: TreeNode) -> tuple[TreeNode, ...]:
        lo, hi = node
        if hi <= run.start or run.stop <= lo:
            return ()
        if run.start <= lo and hi <= run.stop:
            return (node,)
        left, right = tree_children(node)
        return inside(left) + inside(right)

    return inside((0, blocks)) if len(run) else ()


def fold_tree(sums: Mapping[TreeNode, T | None], node: TreeNode, add: Callable[[T, T], T]) -> T | None:
    """Combine the subtree sums below `node` in tree order; a missing or None sum (an empty block) is skipped, not added."""
    if node in sums:
        return sums[node]
    if node[1] - node[0] <= 1:
        return None
    left, right = (fold_tree(sums, child, add) for child in tree_children(node))
    if left is None or right is None:
        return right if left is None else left
    return add(left, right)
