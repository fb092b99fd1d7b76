"""Sums the gradients of one stage replica: in index order inside a block, by the fixed tree over blocks (rule 6)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from raypar.errors import ModelError
from raypar.plan.addition_tree import TreeNode, addition_tree_children, covering_nodes
from raypar.torch_compat.multi_tensor import add_all, copy_all

Row = list[Tensor | None]
"""One tensor for each use of a parameter; None: no gradient."""
Ready = Callable[[Sequence[int], Mapping[TreeNode, Row]], None]
"""Called with some uses, and the sums of all uses by subtree; those of the uses named are final, and belong to the callee."""
Merge = tuple[TreeNode, TreeNode, TreeNode]
"""(parent, left child, right child): one addition of the tree."""


class WiderSum:
    """Where the gradients of one use are added up in another dtype than that of the leaf, which autograd adds to."""

    grad: Tensor | None = None
    """The sum; None: no gradient."""


class BlockAddedToSibling(NamedTuple):
    """A block whose gradients autograd adds straight to the sum of its left sibling."""

    block: int
    """The block, of one microbatch."""
    sums: Row
    """The sibling's sums, which are the leaves' `.grad` meanwhile."""
    versions: list[int]
    """Version counters of `sums` before the backward pass."""


class GradientAccumulator:
    """Adds up the gradients of one stage's uses of parameters over the microbatches and blocks of a step.

    Autograd adds into the `.grad` of the leaves, which belongs to one block at a time. Memory: a row of gradients for each open
    block, and for at most floor(log2 V) + 1 subtrees of V blocks in order, the block under way among them, if the run is one
    subtree of the tree: a block is merged with its sibling at once. The last block's last addition is left to the reduction,
    which writes the result to where it is sent from.

    A block of one microbatch whose left sibling is complete may be *joined*: autograd adds to the sibling's sum in place. The
    addition is the same one, made while the new gradient is in the cache. A block may only be joined if autograd adds once to
    each leaf in a microbatch. An earlier block shows whether it does (it adds several times, for example, for a parameter
    inside two reentrant checkpoints), and the joined block has to confirm it.

    Where each microbatch's gradients are handed over by themselves (`scatters`), every microbatch counts as a block here, and
    nothing is added up.

    A leaf in a lower precision than its sum (`rounded`) holds the gradient of one microbatch at most: `add_rounded` adds it to
    the sum, in the sum's dtype, as soon as it is complete.
    """

    leaves: list[Tensor | WiderSum]
    """By use: what has the sum over the microbatches of a block as its `.grad`; as a rule the leaf that autograd adds to."""
    rounded: dict[int, tuple[Tensor, torch.dtype]]
    """Use -> (leaf that autograd adds to, dtype of the sum), where these have different dtypes."""
    names: list[str]
    """By use: the parameter's name, for messages."""
    sizes: dict[int, int]
    """Block of this replica -> number of its microbatches."""
    on_ready: Ready | None
    """Called when the sums of some uses are final, once for each use and step."""
    scatters: bool
    """Whether the gradients of each microbatch are handed over by themselves, as they leave a layer."""
    has_only_empty_blocks: bool
    """Whether the replica has blocks but no microbatch, so that no instruction will come that could report anything."""

    # What follows from the plan.
    _joins: dict[int, tuple[TreeNode, TreeNode]]
    """Block that may be joined -> (parent, left sibling)."""
    _merges: dict[int, list[Merge]]
    """Block -> the merges on its way up to the root of its complete subtree."""
    _roots: list[TreeNode]
    """The nodes that are reported: complete subtrees, and the children of the one whose last addition is the reduction's."""
    _empty: list[int]
    """Blocks without microbatches."""
    _total: int
    """Halves of backward passes in a step: two for each microbatch."""
    _all: range
    """All uses, last first."""

    # What is known of the model, across steps.
    _once: bool | None
    """Whether a microbatch adds to each leaf only once; None: not known yet."""

    # The state of the step under way.
    _current: int | None
    """The block whose gradients the leaves hold."""
    _open: dict[int, Row]
    """Other open blocks -> their gradients."""
    _deferred: dict[int, dict[int, Tensor]]
    """Block -> use -> sum of weight gradients that were computed apart."""
    _left: dict[int, int]
    """Block -> halves of backward passes to come."""
    _halves_left: int
    """Halves of backward passes to come in all blocks."""
    _sums: dict[TreeNode, Row]
    """Node -> sums of the uses that have arrived there."""
    _complete: set[TreeNode]
    """Nodes at which all uses have arrived."""
    _added: set[int]
    """Uses with rounded leaves whose gradient of the backward pass under way was added."""
    _settled: set[int]
    """Uses of the current block that were added up inside the backward pass, or its weight half."""
    _joined: BlockAddedToSibling | None
    """The current block, if it is joined."""

    def __init__(
        self,
        leaves: Sequence[Tensor],
        names: Sequence[str],
        dtypes: Sequence[torch.dtype],
        run: range,
        blocks: int,
        sizes: dict[int, int],
        *,
        scatters: bool = False,
    ) -> None:
        """`dtypes`: of the sums, by use; `run`: this replica's blocks, of `blocks` in all; `scatters`: `sizes` has
        microbatches, each as a block of one."""
        uses = enumerate(zip(leaves, dtypes, strict=True))
        self.rounded = {use: (leaf, dtype) for use, (leaf, dtype) in uses if leaf.dtype != dtype}
        self.leaves = [WiderSum() if use in self.rounded else leaf for use, leaf in enumerate(leaves)]
        self.names, self._added = list(names), set()
        self.on_ready, self._once = None, None
        self._all = range(len(self.leaves) - 1, -1, -1)
        self.take_run(run, blocks, sizes, scatters=scatters)

    def take_run(self, run: range, blocks: int, sizes: dict[int, int], *, scatters: bool = False) -> None:
        """Add up the gradients of these blocks from the next step on."""
        self.sizes, self.scatters = sizes, scatters
        if scatters:
            run = range(0)
        subtrees = covering_nodes(run, blocks)
        self._joins = {
            node[1][0]: (parent, node[0])
            for parent in _inner(subtrees)
            if (node := addition_tree_children(parent))[1][1] - node[1][0] == 1 and sizes[node[1][0]] == 1
        }
        self._merges = {block: _path(block, subtrees) for block in run} if not scatters else {block: [] for block in sizes}
        self._roots = [
            n for root in subtrees for n in ((root, *addition_tree_children(root)) if root[1] - root[0] > 1 else (root,))
        ]
        self._empty = [block for block in run if not sizes[block]]
        self._total = 2 * sum(sizes.values())
        self.has_only_empty_blocks = bool(run) and not self._total

    def begin(self) -> None:
        """Begin a step with nothing accumulated."""
        for leaf in (*self.leaves, *(leaf for leaf, _ in self.rounded.values())):
            leaf.grad = None
        self._added.clear()
        self._current, self._joined = None, None
        self._open, self._deferred, self._sums = {}, {}, {}
        self._complete, self._settled = set(), set()
        self._left = {block: 2 * size for block, size in self.sizes.items()}
        self._halves_left = self._total
        for block in self._empty:
            self._add(block, (), [])
            self._completed(block)

    def settles_inside_backward(self, block: int) -> bool:
        """Whether `settle` should be called inside the next whole backward pass on the block.

        It should if that pass closes the block, and uses are then added up or reported. Otherwise all uses are taken at once
        when the pass is over.
        """
        if self._left[block] != 2:
            return False
        merges = self._path_of(block)
        return self.scatters or self._halves_left == 2 or bool(merges and self._complete.intersection(merges[0][1:]))

    def settles_inside_weight_half(self, block: int) -> bool:
        """Whether `settle` should be called for layer after layer inside the next weight half (instruction W) on the block: if
        that closes the block, and uses are then reported."""
        return self._left[block] == 1 and (self.scatters or self._halves_left == 1)

    def switch_to_block(self, block: int, *, join: bool = False) -> None:
        """Let autograd add to this block from now on. `join`: in one whole backward pass, with nothing put off."""
        if block == self._current:
            return
        if self._current is not None:
            self._open[self._current] = [leaf.grad for leaf in self.leaves]
        if self._current is not None or block in self._open:  # otherwise the leaves hold nothing: a block was closed
            for leaf, gradient in zip(self.leaves, self._open.pop(block, [None] * len(self.leaves)), strict=True):
                leaf.grad = gradient
        self._current = block
        if join and self._once and block in self._joins and self._joins[block][1] in self._complete:
            row = [_with_own_version(total) for total in self._sums.pop(self._joins[block][1])]
            self._complete.remove(self._joins[block][1])
            for leaf, total in zip(self.leaves, row, strict=True):
                leaf.grad = total
            self._joined = BlockAddedToSibling(block, row, [0 if total is None else total._version for total in row])

    def add_rounded(self, uses: Iterable[int]) -> None:
        """Add the gradients of leaves in a lower precision to the sums of the present block, where they are complete: once in
        each backward pass."""
        first, into, added = list[tuple[Tensor, Tensor]](), list[Tensor](), list[Tensor]()
        for use in self.rounded.keys() & uses:
            leaf, dtype = self.rounded[use]
            gradient, total, leaf.grad = leaf.grad, self.leaves[use].grad, None
            if gradient is None:
                continue
            if use in self._added:
                raise self._late_gradient(use)
            self._added.add(use)
            if total is None:
                self.leaves[use].grad = wider = torch.empty_like(gradient, dtype=dtype)
                first.append((wider, gradient))
            else:
                into.append(total)
                added.append(gradient)
        if first:
            copy_all(*zip(*first, strict=True))
        if into:
            add_all(into, added)

    def _late_gradient(self, use: int) -> ModelError:
        return ModelError(
            f"{self.names[use]} got a gradient after autograd had completed it, as with a backward pass of its own",
            cure="call torch.utils.checkpoint with use_reentrant=False; call no backward() inside a layer",
        )

    def add_deferred(self, block: int, contributions: dict[int, Tensor]) -> None:
        """Add weight gradients of one microbatch that were computed apart (instruction W), by use."""
        sums = self._deferred.setdefault(block, {})
        for use, contribution in contributions.items():
            if use in sums:
                sums[use].add_(contribution)
            else:
                sums[use] = contribution

    def record_finished_halves(self, block: int, halves: int) -> None:
        """Note that so many halves of a backward pass of one of the block's microbatches are over; the last close the block."""
        if self.rounded:
            self.add_rounded(self.rounded)
            self._added.clear()
        self._left[block] -= halves
        self._halves_left -= halves
        if self._left[block]:
            return
        self.switch_to_block(block)
        for use in self._settled:
            if self.leaves[use].grad is not None:
                raise self._late_gradient(use)
        self._close(block, [use for use in self._all if use not in self._settled], last=self._halves_left == 0)
        self._completed(block)
        self._settled.clear()
        self._joined = None
        self._current = None
        self._deferred.pop(block, None)

    def settle(self, block: int, uses: Sequence[int]) -> None:
        """Take the block's gradients of these uses, which are complete; called inside the pass that closes the block."""
        self.add_rounded(uses)
        self._settled.update(uses)
        self._close(block, uses, last=self._halves_left == self._left[block])

    def _close(self, block: int, uses: Sequence[int], *, last: bool) -> None:
        """Move the block's gradients of some uses into the tree; `last`: report them, because no other block is to come."""
        leaves = self.leaves
        gradients: Row = [leaves[use].grad for use in uses]
        for use in uses:
            leaves[use].grad = None
        if self._joined is not None and self._joined.block == block:
            self._confirm_once(self._joined, uses, gradients)
        elif self.sizes[block] == 1 and self._once is not False:
            # Autograd's first addition takes the gradient over (version 0), later ones write to it.
            self._once = not any(gradient is not None and gradient._version for gradient in gradients)
        deferred = self._deferred.get(block)
        if deferred:
            for i, use in enumerate(uses):
                if use not in deferred:
                    continue
                if gradients[i] is not None:
                    raise ModelError(
                        f"{self.names[use]} is used by its module and apart from it, so its gradient cannot be split",
                        cure="use a schedule without weight-gradient instructions (1f1b, interleaved, gpipe)",
                    )
                gradients[i] = deferred.pop(use)
        self._add(block, uses, gradients)
        if (last or self.scatters) and self.on_ready is not None:
            roots = self._roots if not self.scatters else [(block, block + 1)]
            rows = {node: self._sums[node] for node in roots if node in self._sums}
            self.on_ready(uses, rows)
            for row in rows.values():
                for use in uses:
                    row[use] = None

    def _add(self, block: int, uses: Sequence[int], gradients: Row) -> None:
        """Put gradients of some uses at the block's node, and add them up the tree as far as siblings are complete."""
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
                add_all(into, added)
            node = parent

    def _confirm_once(self, joined: BlockAddedToSibling, uses: Sequence[int], gradients: Row) -> None:
        """Raises `ModelError` if autograd has added to a joined leaf several times."""
        for use, gradient in zip(uses, gradients, strict=True):
            total = joined.sums[use]
            if total is not None and (gradient is not total or total._version > joined.versions[use] + 1):
                raise ModelError(
                    f"{self.names[use]} got its gradient of one microbatch in several parts, though not in the one before",
                    cure="call torch.utils.checkpoint with use_reentrant=False; call no backward() inside a layer",
                )

    def _start_of(self, block: int) -> TreeNode:
        """The node at which the block's gradients enter the tree."""
        return self._joins[block][0] if self._joined is not None and self._joined.block == block else (block, block + 1)

    def _path_of(self, block: int) -> list[Merge]:
        """The merges from `_start_of` upwards; of the last block without the root's, which is the reduction's."""
        merges, is_joined = self._merges[block], self._joined is not None and self._joined.block == block
        is_last = self._halves_left == self._left[block]
        return merges[int(is_joined) : len(merges) - is_last]

    def _completed(self, block: int) -> None:
        """All uses of the block are in the tree: mark the highest node that they complete."""
        node = self._start_of(block)
        if self.scatters:
            del self._sums[node]
            return
        for parent, left, right in self._path_of(block):
            sibling = right if node == left else left
            if sibling not in self._complete:
                break
            self._complete.remove(sibling)
            del self._sums[left], self._sums[right]
            node = parent
        self._complete.add(node)


def _with_own_version(total: Tensor | None) -> Tensor | None:
    """The same memory, as a tensor with a version counter of its own.

    Gradients that are views of one tensor (`torch.cat` of parameters gives such) share one counter: adding to the first would
    seem to change the others.
    """
    if total is None or total.untyped_storage().nbytes() == total.nbytes:
        return total
    return total.data


def _inner(nodes: Sequence[TreeNode]) -> list[TreeNode]:
    """All nodes of more than one block below and among `nodes`."""
    found = [node for node in nodes if node[1] - node[0] > 1]
    return found + [inner for node in found for inner in _inner(addition_tree_children(node))]


def _path(block: int, subtrees: Sequence[TreeNode]) -> list[Merge]:
    """The merges from the block's leaf up to the root of its complete subtree."""
    node = next(n for n in subtrees if n[0] <= block < n[1])
    path: list[Merge] = []
    while node[1] - node[0] > 1:
        left, right = addition_tree_children(node)
        path.append((node, left, right))
        node = left if block < left[1] else right
    return path[::-1]
