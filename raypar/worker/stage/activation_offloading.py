"""Activation offloading inside a stage: saved tensors are written out of memory after the forward, read before the backward.

As in recomputation the autograd graph stays, without the tensors that it saved. What is written is memory, not tensors: each
piece once, however many layers have saved views of it. What takes few bytes stays, and what is not the microbatch's own:
parameters, buffers, and values of other stages, which the graph keeps. What something else still holds when it would be read is
not read.
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
    waited_ns: int = 0
    """How long backward passes have waited in this step for activations that were not read yet."""


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
    storage: weakref.ReferenceType[torch.UntypedStorage]
    """The memory itself, as long as anything holds it."""
    offloaded: OffloadedMemory
    again: Tensor | None = None
    """It again, as bytes [nbytes], uint8."""

    def fetch(self) -> None:
        """Begin to bring it back, unless something has held it all the time."""
        held = self.storage()
        if held is None:
            self.offloaded.fetch()
        else:
            self.again = _as_bytes(held)
            self.offloaded.release()

    def bytes_again(self, what: str) -> Tensor:
        """It again; waits until it is there."""
        if self.again is None:
            start = time.perf_counter_ns()
            self.again = self.offloaded.wait(what)
            self.stage.waited_ns += time.perf_counter_ns() - start
        return self.again


@dataclass(eq=False)
class OffloadedActivations:
    """What one microbatch of a stage has offloaded."""

    stage: StageOffload
    what: str
    """Whose activations they are, in words: `of microbatch 2 on stage 1`."""
    _memories: list[_Memory] = field(default_factory=list)
    """In the order in which they were saved."""
    _by_begin: dict[int, _Memory] = field(default_factory=dict)
    """Address -> the last one there."""

    def take(self, tensor: Tensor, stays: Collection[int]) -> OffloadedTensor | None:
        """Begin to offload the memory of a saved tensor; None if it is to stay. `stays`: addresses of memory that does."""
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
            offloaded = self.stage.file.write(_as_bytes(storage))
            memory = self._by_begin[begin] = _Memory(self.stage, weakref.ref(storage), offloaded)
            self._memories.append(memory)
        return OffloadedTensor(memory, tensor.dtype, tensor.shape, tensor.stride(), int(tensor.storage_offset()))

    def fetch(self) -> None:
        """Begin to read all, what the backward needs first first."""
        for memory in reversed(self._memories):
            memory.fetch()

    def release(self) -> None:
        """Forget all, wherever it is."""
        for memory in self._memories:
            memory.offloaded.release()
        self._memories.clear()
        self._by_begin.clear()


def _as_bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(storage)
