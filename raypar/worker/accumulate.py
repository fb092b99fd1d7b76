"""Gradients of one stage replica, summed by the contract: in index order inside a block, by the fixed tree over blocks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from raypar.errors import ModelError
from raypar.plan.tree import Node, children, cover

Row = list[Tensor | None]
"""One tensor per use."""
Ready = Callable[[Sequence[int], Mapping[Node, Row]], None]
"""Some uses, and the sums of all uses by subtree; those of these uses are final."""


class Accumulator:
    """One per stage. `leaves[i]` is the leaf of use i; autograd adds into its `.grad`, which belongs to one block at a time.

    `sizes[b]`: microbatches of block b in this replica's `run`. Buffers: one per open block, and at most
    floor(log2 V) + 2 subtrees, as blocks are merged with their siblings at once. The last addition of each complete
    subtree of the run is left to the reduction, which writes its result straight to where it is sent from.
    """

    def __init__(self, leaves: Sequence[Tensor], names: Sequence[str], run: range, blocks: int, sizes: dict[int, int]) -> None:
        self.leaves = list(leaves)
        self.names = list(names)
        self.sizes = sizes
        self.on_ready: Ready | None = None
        subtrees = cover(run, blocks)
        self._merges = {block: _path(block, subtrees) for block in run}
        self._roots = [part for node in subtrees for part in (children(node) if node[1] - node[0] > 1 else (node,))]
        self._empty = [block for block in run if not sizes[block]]
        self._total = 2 * sum(sizes.values())
        self._all = range(len(self.leaves) - 1, -1, -1)

    def begin(self) -> None:
        """A new step: nothing is accumulated."""
        for leaf in self.leaves:
            leaf.grad = None
        self._current: int | None = None
        self._open: dict[int, Row] = {}
        self._deferred: dict[int, dict[int, Tensor]] = {}
        self._left = {block: 2 * size for block, size in self.sizes.items()}
        self._steps_left = self._total
        self._sums: dict[Node, Row] = {}
        self._complete: set[Node] = set()
        self._settled: set[int] = set()
        for block in self._empty:
            self._add(block, (), [])
            self._completed(block)

    def settles(self, block: int) -> bool:
        """Whether uses should be settled inside a whole backward on the block: it closes the block, and they are added up
        or reported then. Otherwise all are taken at once when it is over."""
        if self._left[block] != 2:
            return False
        merges = self._merges[block]
        return self._steps_left == 2 or bool(merges and self._complete.intersection(merges[0][1:]))

    def enter(self, block: int) -> None:
        """Autograd's additions go to this block from now on."""
        if block == self._current:
            return
        if self._current is not None:
            self._open[self._current] = [leaf.grad for leaf in self.leaves]
        for leaf, gradient in zip(self.leaves, self._open.pop(block, [None] * len(self.leaves)), strict=True):
            leaf.grad = gradient
        self._current = block

    def add_deferred(self, block: int, contributions: dict[int, Tensor]) -> None:
        """Weight gradients of one microbatch that were computed apart (W), by use."""
        sums = self._deferred.setdefault(block, {})
        for use, contribution in contributions.items():
            if use in sums:
                sums[use].add_(contribution)
            else:
                sums[use] = contribution

    def finished(self, block: int, work: int) -> None:
        """An instruction of `work` halves on one microbatch of `block` is over; closes the block when it was the last."""
        self._left[block] -= work
        self._steps_left -= work
        if self._left[block]:
            return
        self.enter(block)
        for use in self._settled:
            if self.leaves[use].grad is not None:
                raise ModelError(
                    f"{self.names[use]} got a gradient after autograd had completed it, as with a backward pass of its own",
                    cure="call torch.utils.checkpoint with use_reentrant=False; call no backward() inside a layer",
                )
        self._close(block, [use for use in self._all if use not in self._settled], last=self._steps_left == 0)
        self._completed(block)
        self._settled.clear()
        self._current = None
        self._deferred.pop(block, None)

    def settle(self, block: int, uses: Sequence[int]) -> None:
        """Inside the instruction that closes the block: these uses, not put off, have all their gradients of it."""
        self._settled.update(uses)
        self._close(block, uses, last=self._steps_left == 2)

    def _close(self, block: int, uses: Sequence[int], *, last: bool) -> None:
        """Move the block's gradients of some uses into the tree; report them if no other block is to come."""
        leaves = self.leaves
        gradients: Row = [leaves[use].grad for use in uses]
        for use in uses:
            leaves[use].grad = None
        deferred = self._deferred.get(block)
        if deferred:
            for i, use in enumerate(uses):
                if use not in deferred:
                    continue
                if gradients[i] is not None:
                    raise ModelError(
                        f"{self.names[use]} is used by its Linear module and apart from it, so its gradient cannot be split",
                        cure="use a schedule without weight-gradient instructions (1f1b, interleaved, gpipe)",
                    )
                gradients[i] = deferred[use]
        self._add(block, uses, gradients)
        if last and self.on_ready is not None:
            self.on_ready(uses, {node: self._sums[node] for node in self._roots})

    def _add(self, block: int, uses: Sequence[int], gradients: Row) -> None:
        """Put gradients at the block's leaf of the tree and add them to what is complete beside it, upwards."""
        node = (block, block + 1)
        row = self._sums.setdefault(node, [None] * len(self.leaves))
        for use, gradient in zip(uses, gradients, strict=True):
            row[use] = gradient
        for parent, left, right in self._merges[block]:
            if (right if node == left else left) not in self._complete:
                return
            a, b = self._sums[left], self._sums[right]
            out = self._sums.setdefault(parent, [None] * len(self.leaves))
            into: list[Tensor] = []
            added: list[Tensor] = []
            for use in uses:
                x, y = a[use], b[use]
                out[use] = y if x is None else x
                if x is not None and y is not None:
                    into.append(x)
                    added.append(y)
                a[use] = b[use] = None
            if into:
                torch._foreach_add_(into, added)
            node = parent

    def _completed(self, block: int) -> None:
        """All uses of the block are in the tree."""
        node = (block, block + 1)
        for parent, left, right in self._merges[block]:
            sibling = right if node == left else left
            if sibling not in self._complete:
                break
            self._complete.remove(sibling)
            del self._sums[left], self._sums[right]
            node = parent
        self._complete.add(node)


def _path(block: int, subtrees: Sequence[Node]) -> list[tuple[Node, Node, Node]]:
    """(parent, left, right) from the leaf up to below the complete subtree that holds the block."""
    node = next(n for n in subtrees if n[0] <= block < n[1])
    path = []
    while node[1] - node[0] > 1:
        left, right = children(node)
        path.append((node, left, right))
        node = left if block < left[1] else right
    return path[:0:-1]
