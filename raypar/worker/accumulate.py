"""Gradients of one stage replica, summed by the contract: in index order inside a block, by the fixed tree over blocks."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from raypar.errors import ModelError
from raypar.plan.tree import Node, children, cover

Ready = Callable[[int, dict[Node, Tensor]], None]


class Accumulator:
    """One per stage. `leaves[i]` is the leaf of use i; autograd adds into its `.grad`, which belongs to one block at a time.

    `sizes[b]`: microbatches of block b in this replica's `run`. Buffers: one per open block, and at most
    floor(log2 V) + 1 complete subtrees, as blocks are merged with their siblings at once.
    """

    def __init__(self, leaves: Sequence[Tensor], names: Sequence[str], run: range, blocks: int, sizes: dict[int, int]) -> None:
        self.leaves = list(leaves)
        self.names = list(names)
        self.sizes = sizes
        self.on_ready: Ready | None = None
        self._merges = {block: _path(block, run, blocks) for block in run}
        self._empty = [block for block in run if not sizes[block]]
        self._total = 2 * sum(sizes.values())

    def begin(self) -> None:
        """A new step: nothing is accumulated."""
        count = len(self.leaves)
        for leaf in self.leaves:
            leaf.grad = None
        self._current: int | None = None
        self._open: dict[int, list[Tensor | None]] = {}
        self._deferred: dict[int, dict[int, Tensor]] = {}
        self._left = {block: 2 * size for block, size in self.sizes.items()}
        self._steps_left = self._total
        self._sums: list[dict[Node, Tensor | None]] = [{} for _ in range(count)]
        self._reported = [False] * count
        for block in self._empty:
            for use in range(count):
                self._insert(use, block, None)

    def final(self, work: int) -> bool:
        """Whether an instruction of `work` halves (B: 2, I or W: 1) is the last that produces weight gradients."""
        return self._steps_left == work

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
        if self._left[block] == 0:
            self.enter(block)
            for use in range(len(self.leaves)):
                self._close(block, use)
            self._current = None
            self._deferred.pop(block, None)
        if self._steps_left == 0:
            for use in range(len(self.leaves)):
                self._report(use)

    def settle(self, block: int, use: int) -> None:
        """Inside the final instruction: use `use`, not put off, has all its gradients of its last block; report it at once."""
        if self._left[block] and not self._reported[use] and use not in self._deferred.get(block, {}):
            self._close(block, use)
            self._report(use)

    def _close(self, block: int, use: int) -> None:
        leaf = self.leaves[use]
        if self._reported[use]:
            if leaf.grad is not None:
                raise ModelError(
                    f"{self.names[use]} got a gradient after autograd had completed it, as in two reentrant checkpoints",
                    cure="call torch.utils.checkpoint with use_reentrant=False",
                )
            return
        gradient, deferred = leaf.grad, self._deferred.get(block, {}).get(use)
        if gradient is not None and deferred is not None:
            raise ModelError(
                f"{self.names[use]} is used by its Linear module and apart from it, so its gradient cannot be split",
                cure="use a schedule without weight-gradient instructions (1f1b, interleaved, gpipe)",
            )
        leaf.grad = None
        self._insert(use, block, deferred if gradient is None else gradient)

    def _insert(self, use: int, block: int, gradient: Tensor | None) -> None:
        sums = self._sums[use]
        sums[block, block + 1] = gradient
        for parent, left, right in self._merges[block]:
            if left not in sums or right not in sums:
                return
            a, b = sums.pop(left), sums.pop(right)
            sums[parent] = b if a is None else a if b is None else a.add_(b)

    def _report(self, use: int) -> None:
        if not self._reported[use]:
            self._reported[use] = True
            if self.on_ready is not None:
                self.on_ready(use, {node: t for node, t in self._sums[use].items() if t is not None})


def _path(block: int, run: range, blocks: int) -> list[tuple[Node, Node, Node]]:
    """(parent, left, right) from the leaf up to the complete subtree of `run` that holds the block."""
    node = next(n for n in cover(run, blocks) if n[0] <= block < n[1])
    path = []
    while node[1] - node[0] > 1:
        left, right = children(node)
        path.append((node, left, right))
        node = left if block < left[1] else right
    return path[::-1]
