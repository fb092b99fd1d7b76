"""Counts the gradients that autograd sums for each leaf of a graph: one for each operation that uses it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn


@dataclass
class UnitsOnRandomNumbers:
    """Units that a recording ran on random numbers. Autograd's graph of the recording does not pass through them."""

    parts: Counter[int] = field(default_factory=Counter)
    """`id` of a parameter -> number of gradients that autograd would sum for its uses in these units."""
    arguments: list[Any] = field(default_factory=list)
    """All arguments of these units, at which the graph of what comes before them ends."""

    def gradient_parts(self, model: nn.Module, outputs: Iterable[Any]) -> dict[str, int]:
        """Parameter's name -> number of gradients that autograd sums for it in a backward pass from the model's outputs."""
        parts = self.parts + count_gradient_parts((*outputs, *self.arguments))
        return {name: parts[id(parameter)] for name, parameter in model.named_parameters() if id(parameter) in parts}


def count_gradient_parts(roots: Iterable[Any]) -> Counter[int]:
    """`id` of a leaf -> number of gradients that a backward pass from these tensors sums for it."""
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
