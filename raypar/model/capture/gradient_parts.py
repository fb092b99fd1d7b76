"""Counts the gradients that autograd adds up for each leaf of a graph: one for each use of it in an operation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from torch import Tensor


def count_gradient_parts(roots: Iterable[Any]) -> Counter[int]:
    """`id` of a leaf -> the number of gradients that a backward pass from these tensors adds up for it."""
    found = Counter[int]()
    pending: list[Any] = [root.grad_fn for root in roots if isinstance(root, Tensor) and root.grad_fn is not None]
    seen = set()
    while pending:
        node = pending.pop()
        if node in seen:
            continue
        seen.add(node)
        for following, _ in node.next_functions:
            if type(following).__name__ == "AccumulateGrad":
                found[id(following.variable)] += 1
            elif following is not None:
                pending.append(following)
    return found
