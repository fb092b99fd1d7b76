"""Gradients of one stage replica, summed by the contract: in index order inside a block, by the fixed tree over blocks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from raypar.errors import ModelError
from raypar.plan.addition_tree import TreeNode, covering_nodes, tree_children

Row = list[Tensor | None]
"""One tensor per use."""
Ready = Callable[[Sequence[int], Mapping[TreeNode, Row]], None]
"""Some uses, and the sums of all uses by subtree; those of these uses are final."""


class GradientAccumulator:
    """One per stage. `leaves[i]` is the leaf of use i; autograd adds into its `.grad`, which belongs to one block at a time.

    `sizes[b]`: microbatches of block b in this replica's `run`. Buffers: one per open block, and at most
    floor(log2 V) + 2 subtrees, as blocks are merged with their siblings at once. The last addition of each complete
    subtree of the run is left to the reduction, which writes its result straight to where it is sent from.

    A block of one microbatch whose left sibling is complete may be *joined*: autograd adds to the sibling's sum in place, the
    same addition, while the new gradient is in the cache. That holds if autograd adds once to each leaf in a microbatch, which
    an earlier block shows (several times: a parameter inside two reentrant checkpoints) and the joined one has to confirm.
    """

    def __init__(self, leaves: Sequence[Tensor], names: Sequence[str], run: range, blocks: int, sizes: dict[int, int]) -> None:
        self.leaves = list(leaves)
        self.names = list(names)
        self.sizes = sizes
        self.on_ready: Ready | None = None
        subtrees = covering_nodes(run, blocks)
        self._joins = {
            node[1][0]: (parent, node[0])
            for parent in _inner(subtrees)
            if (node := tree_children(parent))[1][1] - node[1][0] == 1 and sizes[node[1][0]] == 1
        }
        """right sibling, one block of one microbatch -> (parent, left sibling)"""
        self._once: bool | None = None
        """whether a microbatch adds to each leaf only once, as far as is known"""
        self._merges = {block: _path(block, subtrees) for block in run}
        self._roots = [n for root in subtrees for n in ((root, *tree_children(root)) if root[1] - root[0] > 1 else (root,))]
        self._empty = [block for block in run if not sizes[block]]
        self._total = 2 * sum(sizes.values())
        self._all = range(len(self.leaves) - 1, -1, -1)
        self.has_only_empty_blocks = bool(run) and not self._total
        """No instruction will come that could report anything."""

    def begin(self) -> None:
        """A new step: nothing is accumulated."""
        for leaf in self.leaves:
            leaf.grad = None
        self._current: int | None = None
        self._open: dict[int, Row] = {}
        self._deferred: dict[int, dict[int, Tensor]] = {}
        self._left = {block: 2 * size for block, size in self.sizes.items()}
        self._steps_left = self._total
        self._sums: dict[TreeNode, Row] = {}
        self._complete: set[TreeNode] = set()
        self._settled: set[int] = set()
        self._joined: tuple[int, Row, list[int]] | None = None
        for block in self._empty:
            self._add(block, (), [])
            self._completed(block)

    def settles(self, block: int) -> bool:
        """Whether uses should be settled inside a whole backward on the block: it closes the block, and they are added up
        or reported then. Otherwise all are taken at once when it is over."""
        if self._left[block] != 2:
            return False
        merges = self._path_of(block)
        return self._steps_left == 2 or bool(merges and self._complete.intersection(merges[0][1:]))

    def enter(self, block: int, *, join: bool = False) -> None:
        """Autograd's additions go to this block from now on. `join`: they are of its one whole backward, nothing is put off."""
        if block == self._current:
            return
        if self._current is not None:
            self._open[self._current] = [leaf.grad for leaf in self.leaves]
        if self._current is not None or block in self._open:  # else: closing a block has left nothing behind
            for leaf, gradient in zip(self.leaves, self._open.pop(block, [None] * len(self.leaves)), strict=True):
                leaf.grad = gradient
        self._current = block
        if join and self._once and block in self._joins and self._joins[block][1] in self._complete:
            row = [_with_own_version(total) for total in self._sums.pop(self._joins[block][1])]
            self._complete.remove(self._joins[block][1])
            for leaf, total in zip(self.leaves, row, strict=True):
                leaf.grad = total
            self._joined = (block, row, [0 if total is None else total._version for total in row])

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
        self._joined = None
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
        if self._joined is not None and self._joined[0] == block:
            self._confirm_once(uses, gradients)
        elif self.sizes[block] == 1 and self._once is not False:
            # A gradient's first addition takes it over, later ones write to it.
            self._once = not any(gradient is not None and gradient._version for gradient in gradients)
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
            self.on_ready(uses, {node: self._sums[node] for node in self._roots if node in self._sums})

    def _add(self, block: int, uses: Sequence[int], gradients: Row) -> None:
        """Put gradients at the block's leaf of the tree and add them to what is complete beside it, upwards."""
        node = self._start_of(block)
        row = self._sums.setdefault(node, [None] * len(self.leaves))
        for use, gradient in zip(uses, gradients, strict=True):
            row[use] = gradient
        for parent, left, right in self._path_of(block):
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

    def _confirm_once(self, uses: Sequence[int], gradients: Row) -> None:
        assert self._joined is not None
        _, row, versions = self._joined
        for use, gradient in zip(uses, gradients, strict=True):
            total = row[use]
            if total is not None and (gradient is not total or total._version > versions[use] + 1):
                raise ModelError(
                    f"{self.names[use]} got its gradient of one microbatch in several parts, though not in the one before",
                    cure="call torch.utils.checkpoint with use_reentrant=False; call no backward() inside a layer",
                )

    def _start_of(self, block: int) -> TreeNode:
        """The node at which the block's gradients enter the tree."""
        return self._joins[block][0] if self._joined is not None and self._joined[0] == block else (block, block + 1)

    def _path_of(self, block: int) -> list[tuple[TreeNode, TreeNode, TreeNode]]:
        """The merges from there upwards."""
        return self._merges[block][1:] if self._joined is not None and self._joined[0] == block else self._merges[block]

    def _completed(self, block: int) -> None:
        """All uses of the block are in the tree."""
        node = self._start_of(block)
        for parent, left, right in self._path_of(block):
            sibling = right if node == left else left
            if sibling not in self._complete:
                break
            self._complete.remove(sibling)
            del self._sums[left], self._sums[right]
            node = parent
        self._complete.add(node)


def _with_own_version(total: Tensor | None) -> Tensor | None:
    """The same memory, as a tensor whose `_version` is its own: gradients that are views of one tensor (as `torch.cat` of
    parameters gives) share one, and adding to the first would seem to change the others."""
    if total is None or total.untyped_storage().nbytes() == total.nbytes:
        return total
    return total.data


def _inner(nodes: Sequence[TreeNode]) -> list[TreeNode]:
    """All nodes of more than one block below and among `nodes`."""
    found = [node for node in nodes if node[1] - node[0] > 1]
    return found + [inner for node in found for inner in _inner(tree_children(node))]


def _path(block: int, subtrees: Sequence[TreeNode]) -> list[tuple[TreeNode, TreeNode, TreeNode]]:
    """(parent, left, right) from the leaf up to below the complete subtree that holds the block."""
    node = next(n for n in subtrees if n[0] <= block < n[1])
    path = []
    while node[1] - node[0] > 1:
        left, right = tree_children(node)
        path.append((node, left, right))
        node = left if block < left[1] else right
    return path[:0:-1]
