"""Activation offloading inside a stage: saved tensors are written out of memory after the forward, read before the backward.

As in recomputation the autograd graph stays, without the tensors that it saved. What is written is memory, not tensors: each
piece once, however many layers have saved views of it. What takes few bytes stays, and what is not the microbatch's own:
parameters, buffers, and values of other stages, which the graph keeps. What something else still holds when it would be read is
not read.

A backward has two layers' at a time: the hook of the gradient of a layer's output lets those of the layers behind it go, and
begins to read those of the next one, while the layer computes. What several layers have saved is there from the last of them
down to the first.
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
from raypar.worker.state.activation_file import ActivationFile, OffloadedMemory


@dataclass
class StageOffload:
    """Which layers of a stage are offloaded, and where to."""

    positions: tuple[int, ...]
    """Positions in the stage of the layers whose activations are offloaded, ascending."""
    file: ActivationFile
    """The worker's file."""
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
    """A saved tensor whose memory is offloaded."""

    memory: _Memory
    dtype: torch.dtype
    shape: torch.Size
    strides: tuple[int, ...]
    offset: int
    """Its first element in the memory, in elements."""

    def tensor(self, what: str) -> Tensor:
        """The tensor, with shape, strides and place in its memory as it was saved. `what`: whose it is, in words."""
        made = torch.empty(0, dtype=self.dtype)
        return made.set_(self.memory.bytes_again(what).untyped_storage(), self.offset, self.shape, self.strides)


@dataclass(eq=False)
class _Memory:
    """A piece of memory that saved tensors of one microbatch share."""

    stage: StageOffload
    first: int
    """Position of the first layer that has saved any of it: the last one whose backward needs it."""
    storage: weakref.ReferenceType[torch.UntypedStorage]
    """The memory itself, as long as anything holds it."""
    offloaded: OffloadedMemory
    again: Tensor | None = None
    """It again, as bytes [nbytes], uint8."""
    is_gone: bool = False
    """Whether it has been let go."""

    def fetch(self) -> None:
        """Begin to bring it back, unless something has held it all the time."""
        if self.again is not None or self.is_gone:
            return
        held = self.storage()
        if held is None:
            self.offloaded.fetch()
        else:
            self.again = _as_bytes(held)
            self.offloaded.release()

    def bytes_again(self, what: str) -> Tensor:
        """It again; waits until it is there."""
        if self.is_gone:
            raise ModelError(
                f"a gradient goes back once more through {what} which were let go when the backward pass had left the layer",
                cure="leave the layer out of plan.offload, or keep no tensor of its graph beyond its forward",
            )
        self.fetch()
        if self.again is None:
            start = time.perf_counter_ns()
            self.again = self.offloaded.wait(what)
            self.stage.waited_ns += time.perf_counter_ns() - start
        return self.again

    def release(self) -> None:
        """Let it go, wherever it is."""
        if not self.is_gone:
            self.is_gone, self.again = True, None
            self.offloaded.release()


@dataclass(eq=False)
class OffloadedActivations:
    """What one microbatch of a stage has offloaded."""

    stage: StageOffload
    what: str
    """Whose activations they are, in words: `of microbatch 2 on stage 1`."""
    _of_layer: dict[int, list[_Memory]] = field(default_factory=dict)
    """Position of a layer -> what it has saved, in that order."""
    _written: dict[int, int] = field(default_factory=dict)
    """Position of a layer -> how many bytes of it are written."""
    _by_begin: dict[int, _Memory] = field(default_factory=dict)
    """Address -> the last one there."""

    def take(self, tensor: Tensor, position: int, stays: Collection[int]) -> OffloadedTensor | None:
        """Begin to offload the memory of a tensor that the layer at `position` has saved; None if it is to stay. `stays`:
        addresses of memory that does."""
        if type(tensor) is not Tensor or tensor.layout is not torch.strided or tensor.is_conj() or tensor.is_neg():
            return None
        try:
            storage, begin = tensor.untyped_storage(), memory_begin(tensor)
        except RuntimeError:  # a wrapper inside `torch.func`, without memory of its own
            return None
        if storage.nbytes() < offloading.SMALLEST_OFFLOADED_BYTES or begin in stays or begin % ALIGNED:
            return None
        memory = self._by_begin.get(begin)
        if memory is None or memory.storage() is not storage:  # what was there before is written, and gone
            self._written[position] = of_layer = self._written.get(position, 0) + storage.nbytes()
            self.stage.layer_bytes = max(self.stage.layer_bytes, of_layer)
            offloaded = self.stage.file.write(_as_bytes(storage), self.stage.layer_bytes)
            memory = self._by_begin[begin] = _Memory(self.stage, position, weakref.ref(storage), offloaded)
        if memory not in (saved := self._of_layer.setdefault(position, [])):
            saved.append(memory)
        return OffloadedTensor(memory, tensor.dtype, tensor.shape, tensor.stride(), int(tensor.storage_offset()))

    def fetch(self) -> None:
        """Begin to read what the backward pass needs first."""
        self._fetch_layer(max(self.stage.positions, default=None))

    def enter(self, position: int) -> None:
        """The backward pass comes to the layer at `position`: let go what only layers behind it have saved, and begin to read
        what the layer has, and the next one."""
        for memory in (each for of_layer in self._of_layer.values() for each in of_layer):
            if memory.first > position:
                memory.release()
        self._fetch_layer(position)
        self._fetch_layer(self.stage.next_position(position))

    def _fetch_layer(self, position: int | None) -> None:
        """Begin to read what the layer at a position has saved, what its backward needs first first."""
        for memory in reversed(self._of_layer.get(-1 if position is None else position, ())):
            memory.fetch()

    def release(self) -> None:
        """Forget all, wherever it is."""
        for memory in (each for of_layer in self._of_layer.values() for each in of_layer):
            memory.release()
        self._of_layer.clear()
        self._by_begin.clear()


def _as_bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(storage)
