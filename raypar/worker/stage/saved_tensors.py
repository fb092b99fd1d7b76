"""The tensors that a layer's call saves for its backward: recorded, dropped and refilled, or offloaded."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator

import torch
from torch import Tensor

from raypar.errors import ModelError, UserCodeError
from raypar.plan.wording import count_noun
from raypar.worker.stage.activation_offloading import OffloadedActivations, OffloadedTensor


class SavedTensors:
    """The tensors that one call of a layer (or of the loss) saves for its backward, in order.

    Inside `recording` autograd saves their numbers in their place. So the tensors can be dropped and taken from a second call,
    or be out of memory until the backward.
    """

    label: str
    """Name of the call in messages: `layer 'block3'`."""
    _tensors: list[Tensor | OffloadedTensor]
    """The saved tensors; empty once they are dropped."""
    _versions: list[int]
    """Version counters of the tensors when they were saved."""
    _layouts: list[tuple[torch.Size, torch.dtype]]
    """(shape, dtype) of each saved tensor; kept when the tensors are dropped."""
    _coordinate: str
    """Microbatch and stage, in messages about offloaded tensors; empty without any."""

    def __init__(self, label: str) -> None:
        self.label, self._coordinate = label, ""
        self._tensors, self._versions, self._layouts = [], [], []

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Context in which tensors that autograd saves are kept here, in place of those of a call that is made again."""
        self._tensors, self._versions, self._layouts = [], [], []
        with torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack):
            yield

    def drop(self) -> None:
        """Release the tensors."""
        self._tensors, self._versions = [], []

    def offload(self, to: OffloadedActivations, position: int, stays: Collection[int]) -> None:
        """Have the tensors of the layer at `position` written out of memory. `stays`: addresses of storages that are no
        activations. A tensor into which the layer has written since it was saved stays, too: the backward refuses it, as
        autograd does."""
        for number, tensor in enumerate(self._tensors):
            if isinstance(tensor, Tensor) and tensor._version == self._versions[number]:
                self._tensors[number] = to.take(tensor, position, stays) or tensor
        self._coordinate = to.coordinate

    def refill(self, again: SavedTensors) -> None:
        """Take over the tensors of a second call, whose graph then holds none: a layer may keep its output.

        Raises `UserCodeError` if their number, shapes or dtypes differ.
        """
        if again._layouts != self._layouts:
            first = next((n for n, (a, b) in enumerate(zip(self._layouts, again._layouts, strict=False)) if a != b), None)
            what = f"{count_noun(len(again._layouts), 'tensor')} where it had saved {len(self._layouts)}"
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
        if isinstance(tensor, OffloadedTensor):
            return tensor.tensor(f"activations of {self.label}, {self._coordinate},")
        if tensor._version != self._versions[number]:
            raise RuntimeError(  # as autograd, which does not look at tensors that hooks keep
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"{list(tensor.shape)} {tensor.dtype}, saved by {self.label}, is at version {tensor._version}; expected "
                f"version {self._versions[number]} instead"
            )
        return tensor
