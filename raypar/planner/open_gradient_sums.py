"""How many sums of a stage's gradients a worker holds at once: counted in the order of its backward passes."""

from __future__ import annotations

from collections.abc import Iterable

from raypar.plan import MicrobatchRouting
from raypar.plan.addition_tree import TreeNode, addition_tree_children, covering_nodes
from raypar.plan.gradient_scatter import most_open_sums, stack_steps
from raypar.schedule.instructions import WEIGHT_GRADIENTS, Compute, Instruction


def open_sums(routing: MicrobatchRouting, stage: int, rank: int, order: Iterable[Instruction]) -> int:
    """The most sums of gradients that a rank holds of a stage at once, in its order of instructions; those of blocks under way
    are among them.

    Replicas add up blocks: one is under way from its first backward pass to its last, and then waits for its sibling in the
    tree. Of blocks in order, all of one subtree, these are floor(log2 blocks) + 1; a stage that gets microbatches of several
    replicas in turn has a block of each under way. A block of a split backward pass is taken to begin with its first weight
    gradients. Where gradients are scattered owners add them up.
    """
    if routing.scatters(stage):
        return most_open_sums(stack_steps(routing.microbatches), routing.rounds_of_stage[stage])
    batching, run = routing.microbatches, routing.blocks_of_worker(stage, rank)
    left = {block: len(batching.microbatches_of_block(block)) for block in run}
    sibling_of = _siblings(covering_nodes(run, batching.blocks))
    complete: dict[TreeNode, bool] = {}  # whether the sum has memory: that of a block without microbatches has none
    for block in run:
        if not left[block]:
            _complete(block, complete, sibling_of, has_memory=False)
    begun, most = set[int](), 1
    for instruction in order:
        if isinstance(instruction, Compute) and WEIGHT_GRADIENTS in instruction.makes and instruction.stage == stage:
            block = batching.block_of(instruction.microbatch)
            begun.add(block)
            most = max(most, len(begun) + sum(complete.values()))
            left[block] -= 1
            if not left[block]:
                begun.remove(block)
                _complete(block, complete, sibling_of, has_memory=True)
    return most


def _complete(
    block: int, complete: dict[TreeNode, bool], sibling_of: dict[TreeNode, tuple[TreeNode, TreeNode]], *, has_memory: bool
) -> None:
    """Add a block to the tree, and up in it as far as siblings are complete."""
    node: TreeNode = (block, block + 1)
    while node in sibling_of and sibling_of[node][0] in complete:
        sibling, node = sibling_of[node]
        has_memory |= complete.pop(sibling)
    complete[node] = has_memory


def _siblings(subtrees: Iterable[TreeNode]) -> dict[TreeNode, tuple[TreeNode, TreeNode]]:
    """Node -> (its sibling, their parent), of all nodes below `subtrees`."""
    found: dict[TreeNode, tuple[TreeNode, TreeNode]] = {}
    below = list(subtrees)
    while below:
        node = below.pop()
        if node[1] - node[0] > 1:
            left, right = addition_tree_children(node)
            found |= {left: (right, node), right: (left, node)}
            below += (left, right)
    return found
