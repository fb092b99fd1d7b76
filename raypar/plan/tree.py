"""The fixed addition tree over a step's blocks (DESIGN 4.5): the one order in which block gradients are combined.

A node is a half-open range of blocks `(lo, hi)`; its left child is the largest power of two below its size (the shape of
a Merkle tree in RFC 6962, section 2.1). Whoever holds a contiguous run of blocks adds the complete subtrees inside the
run; whoever owns a slice adds the subtree sums of all runs. Both ends therefore perform the same additions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

Node = tuple[int, int]
T = TypeVar("T")


def children(node: Node) -> tuple[Node, Node]:
    """Left and right child of a node of at least two blocks."""
    lo, hi = node
    size = hi - lo
    left = 1 << ((size - 1).bit_length() - 1)
    return (lo, lo + left), (lo + left, hi)


def cover(run: range, blocks: int) -> tuple[Node, ...]:
    """The fewest tree nodes over `blocks` leaves that together are exactly `run`, left to right."""

    def inside(node: Node) -> tuple[Node, ...]:
        lo, hi = node
        if hi <= run.start or run.stop <= lo:
            return ()
        if run.start <= lo and hi <= run.stop:
            return (node,)
        left, right = children(node)
        return inside(left) + inside(right)

    return inside((0, blocks)) if len(run) else ()


def fold(sums: Mapping[Node, T | None], node: Node, add: Callable[[T, T], T]) -> T | None:
    """Combine the subtree sums below `node` in tree order; a missing or None sum (an empty block) is skipped, not added."""
    if node in sums:
        return sums[node]
    if node[1] - node[0] <= 1:
        return None
    left, right = (fold(sums, child, add) for child in children(node))
    if left is None or right is None:
        return right if left is None else left
    return add(left, right)
