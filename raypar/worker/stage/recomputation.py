"""Activation recomputation inside a stage: saved tensors are dropped after the forward and refilled before the backward.

The autograd graph of the first forward stays, without the tensors that it saved. The second forward makes the same calls in the
same order, so it saves the same tensors: the n-th fills the place of the n-th that was dropped. The second graph is discarded.
So hooks, aliases, the age of graph nodes and the order of additions are those of a stage that drops nothing. Both forwards run
with gradients on, as in training, so a layer cannot tell them apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from raypar.model.graph import Graph, Layer


@dataclass(frozen=True)
class StageRecomputation:
    """Which layers of a stage are recomputed, and which values must be kept for that."""

    positions: tuple[int, ...] = ()
    """Positions in the stage of the layers whose activations are dropped, ascending."""
    with_loss: bool = False
    """Whether the loss is recomputed too: it is if a layer is that makes something that the loss reads."""
    inputs: tuple[str, ...] = ()
    """Values that recomputed layers and a recomputed loss read, except those that recomputed layers write."""

    @staticmethod
    def of(graph: Graph, layers: Sequence[Layer], positions: Sequence[int], of_loss: Sequence[str]) -> StageRecomputation:
        """`positions`: of the layers to recompute. `of_loss`: what the loss reads beside the graph's; empty: there is no
        loss."""
        read = [name for position in positions for name in layers[position].inputs]
        made = {name for position in positions for name in layers[position].outputs}
        loss = bool(of_loss) and not made.isdisjoint(graph.loss_inputs)
        if loss:
            read += [*graph.loss_inputs, *of_loss]
        return StageRecomputation(tuple(positions), loss, tuple(dict.fromkeys(name for name in read if name not in made)))


NO_RECOMPUTATION = StageRecomputation()
"""No layer is recomputed."""
