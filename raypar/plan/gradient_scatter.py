"""How gradients that are never whole are added up: which replica runs which microbatch, and what owners have at which time.

`plan.gradients: scatter` gives microbatches to replicas in turn, and each gradient goes to the owners of its elements as it
leaves a layer. So all replicas are at about the same microbatches, and an owner adds over the tree of blocks
(`addition_tree.py`) in index order, with few open sums: not more than floor(log2 blocks) + 1, of its own elements alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import Literal, NamedTuple

from raypar.plan.addition_tree import TreeNode, addition_tree_children
from raypar.plan.microbatches import Microbatches

GradientRoute = Literal["fold", "scatter"]
"""`fold`: replicas have runs of blocks, add up whole gradients of these, and reduce the sums. `scatter`: as above."""


def replicas_by_share(count: int, shares: Sequence[int]) -> tuple[int, ...]:
    """By microbatch: its replica. Each goes to the one with the smallest (given + 1) / share, of equal ones to the lowest; with
    equal shares, that is i mod n."""
    if len(set(shares)) == 1:
        return tuple(m % len(shares) for m in range(count))
    given = [0] * len(shares)
    found = []
    for _ in range(count):
        replica = min(range(len(shares)), key=lambda r: (Fraction(given[r] + 1, shares[r]), r))
        given[replica] += 1
        found.append(replica)
    return tuple(found)


def rounds_of(replicas: Sequence[int]) -> tuple[range, ...]:
    """Consecutive microbatches, each of another replica, as many as there are before one comes again. `replicas`: by
    microbatch."""
    found: list[range] = []
    first, seen = 0, set[int]()
    for microbatch, replica in enumerate(replicas):
        if replica in seen:
            found.append(range(first, microbatch))
            first, seen = microbatch, set()
        seen.add(replica)
    return (*found, range(first, len(replicas)))


class StackStep(NamedTuple):
    """What is done with a microbatch's gradient, the open sums being a stack."""

    opens: bool
    """Whether it is put on the stack, as the first of its block; else it is added to what is on top."""
    merges: int
    """How often, after that, the two sums on top are added: a block, and then subtrees of the tree, are complete."""


def stack_steps(microbatches: Microbatches) -> tuple[StackStep, ...]:
    """By microbatch, in index order: the additions of rule 6 of the numerics contract. In the end one sum is left."""
    steps: list[StackStep] = []

    def add_below(node: TreeNode) -> bool:
        """Whether there is anything below a node of the tree over blocks."""
        if node[1] - node[0] == 1:
            count = len(microbatches.microbatches_of_block(node[0]))
            steps.extend(StackStep(index == 0, 0) for index in range(count))
            return count > 0
        left, right = (add_below(child) for child in addition_tree_children(node))
        if left and right:
            steps[-1] = steps[-1]._replace(merges=steps[-1].merges + 1)
        return left or right

    add_below((0, microbatches.blocks))
    return tuple(steps)


def most_open_sums(steps: Sequence[StackStep], rounds: Sequence[range]) -> int:
    """The most sums on the stack after any round. Inside a round sums lie where its gradients have arrived."""
    most = depth = 0
    for of_round in rounds:
        depth += sum(steps[m].opens - steps[m].merges for m in of_round)
        most = max(most, depth)
    return most
