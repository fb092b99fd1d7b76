"""The division of a step's batch, samples into microbatches into blocks, and the order in which sums over them are made.

Replicas get whole blocks. Inside a block gradients are added in order of microbatches, over blocks by a fixed tree, whatever
the plan is (rule 6 of raypar/NUMERICS.md): the bits depend on the number of blocks, not on that of replicas.

A node of the tree is a half-open range of blocks `(lo, hi)`. Its left child has the largest power of two below its size (the
shape of a Merkle tree in RFC 6962, section 2.1). A replica with a contiguous run of blocks adds the complete subtrees inside
the run; the owner of a slice adds the subtree sums of all runs. Together they make the additions of one process.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeVar

from raypar.errors import PlanError

DEFAULT_MAX_BLOCKS = 16


def contiguous_part(index: int, parts: int, total: int) -> range:
    """Part `index` of `total` things cut into `parts` contiguous runs: [floor(i t/p), floor((i+1) t/p))."""
    return range(index * total // parts, (index + 1) * total // parts)


def contiguous_part_index(item: int, parts: int, total: int) -> int:
    """The part that holds `item`: the inverse of `contiguous_part`."""
    return ((item + 1) * parts - 1) // total


@dataclass(frozen=True, slots=True)
class BatchesOfSteps:
    """The batches of consecutive steps of a run that was resumed with others since."""

    steps: int
    """Number of these steps."""
    count: int
    """Number of microbatches in each of them."""
    batch_size: int
    """Samples in each of them."""


@dataclass(frozen=True, slots=True)
class Microbatches:
    """The microbatches of a step's batch, in contiguous blocks."""

    count: int
    """Number of microbatches in a step."""
    blocks: int = 0
    """Number of blocks (`virtual_replicas` in the job file); given as 0, it becomes `count`, but at most 16."""
    batch_size: int = 0
    """Samples in a step, over the whole job; 0 if only the order of microbatches matters (simulation)."""
    former: tuple[BatchesOfSteps, ...] = ()
    """The batches of the first steps, in order, where a resume has changed them; those of all later steps are as above."""

    def __post_init__(self) -> None:
        if self.count < 1:
            raise PlanError(f"{self.count} microbatches a step", cure="set microbatches >= 1")
        if self.batch_size and self.count > self.batch_size:
            raise PlanError(
                f"{self.count} microbatches cannot be cut from a batch of {self.batch_size} samples",
                cure=f"set microbatches <= {self.batch_size}, or raise batch_size",
            )
        if self.blocks < 0:
            raise PlanError(f"virtual_replicas is {self.blocks}", cure="set virtual_replicas >= 1")
        if self.blocks == 0:
            object.__setattr__(self, "blocks", min(self.count, DEFAULT_MAX_BLOCKS))

    def samples(self, microbatch: int) -> range:
        """Offsets of the microbatch's samples inside the step's batch."""
        return contiguous_part(microbatch, self.count, self.batch_size)

    def samples_before(self, step: int) -> int:
        """Samples of all steps before a step (from 0): the place of its first one in the stream of samples (rule 1)."""
        return sum(steps * batching.batch_size for steps, batching in self.steps_before(step))

    def steps_before(self, step: int) -> Iterator[tuple[int, Microbatches]]:
        """(number of steps, their batches) of all steps before a step (from 0), in order."""
        for one in self.former:
            first = min(step, one.steps)
            yield first, Microbatches(one.count, batch_size=one.batch_size)
            step -= first
        yield step, self

    def microbatches_of_block(self, block: int) -> range:
        """The microbatches of a block; a block may have none."""
        return contiguous_part(block, self.blocks, self.count)

    def block_of(self, microbatch: int) -> int:
        """The block of a microbatch."""
        return contiguous_part_index(microbatch, self.blocks, self.count)


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


def mean_loss(losses: Mapping[int, tuple[float, float]]) -> tuple[float, float]:
    """(mean, count) of microbatch -> (sum, count), added in microbatch order (rule 8 of the numerics contract); the mean is
    NaN where no term counts."""
    total = count = 0.0
    for microbatch in sorted(losses):
        total += losses[microbatch][0]
        count += losses[microbatch][1]
    return total / count if count else math.nan, count


@dataclass(frozen=True, slots=True)
class VoteResult:
    """The combined votes of all workers on a step; the same on every worker, bit for bit."""

    loss: float
    """Sum of the microbatches' loss sums, divided by `count`."""
    count: float
    """Sum of the microbatches' counts, over which the loss is a mean."""
    norm: float
    """Norm of the gradient, divided by `count`, before clipping."""
    factor: float
    """Factor by which every gradient is multiplied once: 1 / `count`, or less if the norm is clipped."""
    skipped: bool
    """Whether the step is skipped because the loss or the norm is not finite."""
