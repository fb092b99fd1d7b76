"""What a stage drops after a forward pass and makes again before the backward pass: saved tensors of recomputed layers.

The graph of the first forward stays, without the tensors that it has saved. The second forward makes the same calls in the same
order, so it saves the same tensors; the n-th of them takes the place of the n-th that was dropped, and the second graph goes.
So hooks, aliases, the age of the graph's nodes and the order of additions are those of a stage that drops nothing. A layer
notices nothing of either forward: gradients are on, as in training.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from raypar.errors import ModelError, UserCodeError
from raypar.model.graph import Graph, Layer


@dataclass(frozen=True)
class StageRecomputation:
    """The layers of a stage that are recomputed, and what they need for that."""

    positions: tuple[int, ...] = ()
    """Positions in the stage of the layers whose activations are dropped, ascending."""
    loss: bool = False
    """Whether the loss is recomputed: where it follows a recomputed layer."""
    reads: tuple[str, ...] = ()
    """Values that recomputed layers and the loss read, and that no recomputed layer makes again."""

    @staticmethod
    def of(graph: Graph, layers: Sequence[Layer], positions: Sequence[int], target: str | None) -> StageRecomputation:
        """`positions`: of the layers to recompute. `target`: what the loss reads beside the output; None without a loss."""
        loss = target is not None and bool(positions) and graph.output in layers[positions[-1]].outputs
        read = [name for position in positions for name in layers[position].inputs]
        if loss:
            read += [graph.output, str(target)]
        made = {name for position in positions for name in layers[position].outputs}
        return StageRecomputation(tuple(positions), loss, tuple(dict.fromkeys(name for name in read if name not in made)))


class SavedTensors:
    """The tensors that one call of a layer (or of the loss) saves for its backward, in order.

    While `recording`, autograd saves numbers in their place. They can be dropped, and made again by a second call.
    """

    label: str
    """What is called, for messages: `layer 'block3'`."""
    _tensors: list[Tensor]
    """The saved tensors; empty once they are dropped."""
    _versions: list[int]
    """Version counters of the tensors when they were saved."""
    _layouts: list[tuple[torch.Size, torch.dtype]]
    """(shape, dtype) of each saved tensor; kept when the tensors are dropped."""

    def __init__(self, label: str) -> None:
        self.label = label
        self._tensors, self._versions, self._layouts = [], [], []

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Context in which what autograd saves comes here."""
        with torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack):
            yield

    def drop(self) -> None:
        """Let go of the tensors."""
        self._tensors, self._versions = [], []

    def refill(self, again: SavedTensors) -> None:
        """Take over the tensors that a second call has saved, whose graph then holds none: a layer may keep its output.

        Raises `UserCodeError` if it has saved others.
        """
        if again._layouts != self._layouts:
            first = next((n for n, (a, b) in enumerate(zip(self._layouts, again._layouts, strict=False)) if a != b), None)
            what = f"{len(again._layouts)} tensors where it had saved {len(self._layouts)}"
            if first is not None:
                (shape, dtype), (now, now_dtype) = self._layouts[first], again._layouts[first]
                what = f"{list(now)} {now_dtype} as tensor {first} where it had saved {list(shape)} {dtype}"
            raise UserCodeError(
                f"{self.label} computes something else when it is run again: for its backward it saves {what}",
                cure="leave it out of plan.recompute, or let its forward depend on its inputs and parameters only",
            )
        self._tensors, self._versions = again._tensors, again._versions
        again.drop()

    def _pack(self, tensor: Tensor) -> int:
        # Detached, because a saved output would hold its own graph. It shares memory and version counter.
        self._tensors.append(tensor.detach())
        self._versions.append(tensor._version)
        self._layouts.append((tensor.shape, tensor.dtype))
        return len(self._tensors) - 1

    def _unpack(self, number: int) -> Tensor:
        if number >= len(self._tensors):
            raise ModelError(
                f"a gradient goes back through {self.label} after its forward and before its activations are recomputed",
                cure="leave the layer out of plan.recompute, or keep no tensor of its graph beyond its forward",
            )
        tensor = self._tensors[number]
        if tensor._version != self._versions[number]:
            raise RuntimeError(  # as autograd, which does not look at tensors that hooks keep
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"{list(tensor.shape)} {tensor.dtype}, saved by {self.label}, is at version {tensor._version}; expected "
                f"version {self._versions[number]} instead"
            )
        return tensor
