"""Activation offloading inside a stage: saved tensors are written out of memory after the forward, read before the backward.

As in recomputation the autograd graph stays, without the tensors that it saved. Storages are written, not tensors: each once,
however many saved tensors are views of it. Small storages stay in memory, and those that are not the microbatch's own:
parameters, buffers, and values of other stages, which the graph keeps. A storage that something else still holds when it would
be read is not read.

In a backward pass the activations of two layers are in memory: the hook of the gradient of a layer's output releases the
activations of the layers behind it, and begins to read those of the next one, while the layer computes. A storage that several
layers have saved is there from the last of them down to the first.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from raypar.comm.buffer_pool import ALIGNED
from raypar.errors import ModelError
from raypar.plan import offloading
from raypar.worker.stage.layer_tensors import memory_begin
from raypar.worker.state.activation_place import ActivationPlace, OffloadedPiece


@dataclass
class StageOffload:
    """Which layers of a stage are offloaded, and where to."""

    positions: tuple[int, ...]
    """Positions in the stage of the layers whose activations are offloaded, ascending."""
    place: ActivationPlace
    """The worker's place for them."""
    layer_bytes: int = 0
    """The most that a layer has written of a microbatch."""
    waited_ns: int = 0
    """How long backward passes have waited in this step for activations that were not read yet."""
    backward_of: OffloadedActivations | None = None
    """What the microbatch has offloaded whose backward pass is under way; None outside of one."""

    def enter_backward(self, position: int) -> None:
        """A hook: a backward pass has left the layers behind this position. In other passes than the stage's own, as of a
        gradient that a layer takes in forward, there is nothing to do."""
        if self.backward_of is not None:
            self.backward_of.enter(position)

    def next_position(self, position: int) -> int | None:
        """The offloaded layer that a backward pass comes to after the layer at a position."""
        return max((each for each in self.positions if each < position), default=None)


class OffloadedTensor(NamedTuple):
    """A saved tensor whose storage is offloaded."""

    storage: _OffloadedStorage
    dtype: torch.dtype
    shape: torch.Size
    strides: tuple[int, ...]
    offset: int
    """Its first element in the storage, in elements."""

    def tensor(self, what: str) -> Tensor:
        """The tensor, with shape, strides and offset as it was saved, once it is read. `what`: whose it is, in messages."""
        return tensor_in(self.storage.restored_bytes(what), self)


@dataclass(eq=False)
class _OffloadedStorage:
    """A storage that saved tensors of one microbatch share."""

    stage: StageOffload
    first: int
    """Position of the first layer that has saved any of it: the last one whose backward needs it."""
    storage: weakref.ReferenceType[torch.UntypedStorage]
    """The storage itself, as long as anything holds it."""
    memory: OffloadedPiece
    """Its bytes where they are offloaded to."""
    restored: Tensor | None = None
    """The storage as bytes [nbytes], uint8, once it is back."""
    is_released: bool = False

    def fetch(self) -> None:
        """Begin to read it, unless something has held it all the time."""
        if self.restored is not None or self.is_released:
            return
        held = self.storage()
        if held is None:
            self.memory.fetch()
        else:
            self.restored = as_bytes(held)
            self.memory.release()

    def restored_bytes(self, what: str) -> Tensor:
        """See `restored`; waits until it is read."""
        if self.is_released:
            raise ModelError(
                f"a gradient goes back once more through {what} which were let go when the backward pass had left the layer",
                cure="leave the layer out of plan.offload, or keep no tensor of its graph beyond its forward",
            )
        self.fetch()
        if self.restored is None:
            start = time.perf_counter_ns()
            self.restored = self.memory.wait(what)
            self.stage.waited_ns += time.perf_counter_ns() - start
        return self.restored

    def release(self) -> None:
        """Drop it, in memory and in the file."""
        if not self.is_released:
            self.is_released, self.restored = True, None
            self.memory.release()


@dataclass(eq=False)
class OffloadedActivations:
    """What one microbatch of a stage has offloaded."""

    stage: StageOffload
    coordinate: str
    """Whose activations they are, in messages: `of microbatch 2 on stage 1`."""
    _of_layer: dict[int, list[_OffloadedStorage]] = field(default_factory=dict)
    """Position of a layer -> the storages of what it has saved, in that order."""
    _written: dict[int, int] = field(default_factory=dict)
    """Position of a layer -> how many bytes of it are written."""
    _by_begin: dict[int, _OffloadedStorage] = field(default_factory=dict)
    """Address -> the last storage there."""

    def take(self, tensor: Tensor, position: int, stays: Collection[int]) -> OffloadedTensor | None:
        """Begin to offload the storage of a tensor that the layer at `position` has saved; None if it stays. `stays`: addresses
        of storages that do."""
        storage = storage_of(tensor)
        if storage is None or storage.nbytes() < offloading.SMALLEST_OFFLOADED_BYTES:
            return None
        begin = memory_begin(tensor)
        if begin in stays or begin % ALIGNED:
            return None
        found = self._by_begin.get(begin)
        if found is None or found.storage() is not storage:  # what was there before is written, and gone
            self._written[position] = of_layer = self._written.get(position, 0) + storage.nbytes()
            self.stage.layer_bytes = max(self.stage.layer_bytes, of_layer)
            memory = self.stage.place.write(as_bytes(storage), self.stage.layer_bytes)
            found = self._by_begin[begin] = _OffloadedStorage(self.stage, position, weakref.ref(storage), memory)
        if found not in (saved := self._of_layer.setdefault(position, [])):
            saved.append(found)
        return OffloadedTensor(found, tensor.dtype, tensor.shape, tensor.stride(), int(tensor.storage_offset()))

    def fetch(self) -> None:
        """Begin to read what the backward pass needs first."""
        self._fetch_layer(max(self.stage.positions, default=None))

    def enter(self, position: int) -> None:
        """The backward pass comes to the layer at `position`: release what only layers behind it have saved, and begin to read
        what this layer and the next one have saved."""
        for storage in (each for of_layer in self._of_layer.values() for each in of_layer):
            if storage.first > position:
                storage.release()
        self._fetch_layer(position)
        self._fetch_layer(self.stage.next_position(position))

    def _fetch_layer(self, position: int | None) -> None:
        """Begin to read what the layer at a position has saved, in the order in which its backward needs it; None: no layer."""
        for storage in reversed(self._of_layer.get(position, ()) if position is not None else ()):
            storage.fetch()

    def release(self) -> None:
        """Drop all, in memory and in the file."""
        for storage in (each for of_layer in self._of_layer.values() for each in of_layer):
            storage.release()
        self._of_layer.clear()
        self._by_begin.clear()


# A device that only pretends to be one has another kind of memory in the place of these three (`tests/helpers/late_runs.py`).


def storage_of(tensor: Tensor) -> torch.UntypedStorage | None:
    """The storage of a tensor; None if it has none that could be written as it is."""
    if type(tensor) is not Tensor or tensor.layout is not torch.strided or tensor.is_conj() or tensor.is_neg():
        return None
    try:
        tensor.data_ptr()
        return tensor.untyped_storage()
    except RuntimeError:  # a wrapper inside `torch.func`, without memory of its own
        return None


def as_bytes(storage: torch.UntypedStorage) -> Tensor:
    """All of a storage, as bytes."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def tensor_in(memory: Tensor, saved: OffloadedTensor) -> Tensor:
    """A saved tensor in other memory (uint8)."""
    made = torch.empty(0, dtype=saved.dtype, device=memory.device)
    return made.set_(memory.untyped_storage(), saved.offset, saved.shape, saved.strides)
