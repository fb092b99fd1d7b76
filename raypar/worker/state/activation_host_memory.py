"""The host memory to which a GPU worker's activations are offloaded: pinned, copied to and from by streams of their own.

The host waits for nothing. The stream that copies memory out waits for what computes it. The memory goes when the computing
stream has waited for the copy, which it does once more than so much is on its way: so which memory the next layer gets does not
depend on how fast copies are. The stream that copies memory back waits for what used the new memory before, and the computing
stream for that copy. Pinned memory is kept for later copies.
"""

from __future__ import annotations

from collections import deque
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from raypar.comm.nccl.device import CudaEvent, CudaStream, Stream, StreamEvent
from raypar.errors import ConfigError, error_first_line
from raypar.plan import offloading


class CopyStreams(Protocol):
    """What of a device (`comm.nccl.device.Device`) copies need."""

    def stream(self) -> Stream:
        """A new stream."""

    def record_event(self) -> StreamEvent:
        """An event after all work that the caller's current stream has been given so far."""


class CudaStreams:
    """See `CopyStreams`: those of a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def stream(self) -> CudaStream:
        """See `CopyStreams.stream`."""
        return CudaStream(self._device)

    def record_event(self) -> CudaEvent:
        """See `CopyStreams.record_event`."""
        return CudaEvent(torch.cuda.current_stream(self._device))


class HostActivations:
    """One worker's pinned memory for activations. See `ActivationPlace`."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._streams = device, CudaStreams(device)
        self._out, self._back = self._streams.stream(), self._streams.stream()
        """In which memory is copied to the host, and from it."""
        self._free: list[Tensor] = []
        """Pinned memory that holds nothing: whoever read or wrote it has ended for the computing stream."""
        self._leaving: deque[HostMemory] = deque()
        """What is on its way out and still in the device's memory, oldest first."""
        self._unwritten = 0
        self.nbytes = self.most_unwritten = 0
        """Pinned bytes; bytes on their way out when these were most."""

    def close(self) -> None:
        """See `ActivationPlace.close`: PyTorch keeps pinned memory until its copies are over."""
        self._free.clear()
        self._leaving.clear()

    def settle(self) -> None:
        """See `ActivationPlace.settle`: the computing stream waits for all that is on its way out."""
        while self._leaving:
            self._leaving[0].leave()

    def write(self, memory: Tensor, limit: int | None = None) -> HostMemory:
        """See `ActivationPlace.write`. Raises `ConfigError` if the host has no pinned memory for it."""
        nbytes, most = memory.numel(), offloading.MOST_UNWRITTEN_BYTES
        most = most if limit is None else min(most, limit)
        while self._leaving and self._unwritten + nbytes > most:
            self._leaving[0].leave()
        pinned, computed = self._take(nbytes), self._streams.record_event()
        self._out.wait_event(computed)
        self._out.run(partial(pinned[:nbytes].copy_, memory, non_blocking=True))
        made = HostMemory(self, memory, pinned, self._out.record_event())
        self._leaving.append(made)
        self._unwritten += nbytes
        self.most_unwritten = max(self.most_unwritten, self._unwritten)
        return made

    def leaves(self, memory: HostMemory) -> None:
        """Count what no longer is on its way out."""
        self._leaving.remove(memory)
        self._unwritten -= memory.nbytes

    def begin_reading(self, pinned: Tensor, nbytes: int) -> tuple[Tensor, StreamEvent]:
        """Begin to copy pinned memory back: new memory of the device, and when it is filled."""
        again = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        self._back.wait_event(self._streams.record_event())  # who had this memory before may still use it
        self._back.run(partial(again.copy_, pinned[:nbytes], non_blocking=True))
        return again, self._back.record_event()

    def give_back(self, pinned: Tensor) -> None:
        """Let pinned memory be used for something else."""
        self._free.append(pinned)

    def _take(self, nbytes: int) -> Tensor:
        """Pinned memory (uint8): the smallest free one that is large enough, and no more than twice as large; else new one."""
        fits = [each for each in self._free if nbytes <= each.numel() <= 2 * nbytes]
        if fits:
            found = min(fits, key=Tensor.numel)
            self._free = [each for each in self._free if each is not found]
            return found
        try:
            made = torch.empty(nbytes, dtype=torch.uint8).pin_memory()
        except RuntimeError as error:
            raise ConfigError(
                f"plan.activations_in: host has {self.nbytes / 2**20:,.1f} MiB of pinned memory, and gets no "
                f"{nbytes / 2**20:,.1f} MiB more: {error_first_line(error)}",
                cure="leave plan.activations_in out, or name fewer layers in plan.offload",
            ) from error
        self.nbytes += nbytes
        return made


class HostMemory:
    """Memory of a device that is copied to the host, and back once. See `OffloadedPiece`."""

    def __init__(self, place: HostActivations, memory: Tensor, pinned: Tensor, written: StreamEvent) -> None:
        """`memory`: the device's; `pinned`: where it is copied to; `written`: when that is over."""
        self._place, self.nbytes, self._written = place, memory.numel(), written
        self._source: Tensor | None = memory
        """The device's memory, until the computing stream has waited for its copy."""
        self._pinned: Tensor | None = pinned
        """None once the computing stream is done with it."""
        self._again: Tensor | None = None
        self._arrived: StreamEvent | None = None
        """When the memory that comes back is filled; None: nothing is on its way back."""

    @property
    def is_back(self) -> bool:
        """See `OffloadedPiece.is_back`."""
        return self._again is not None

    def leave(self) -> None:
        """Have the computing stream wait for the copy: what it does afterwards may use the memory for something else."""
        if self._source is not None:
            self._written.make_stream_wait(_go_on)
            self._source = None
            self._place.leaves(self)

    def fetch(self) -> None:
        """See `OffloadedPiece.fetch`. What has not left is still there."""
        if self._again is None and self._source is not None:
            self._again = self._source
        elif self._again is None and self._pinned is not None:
            self._again, self._arrived = self._place.begin_reading(self._pinned, self.nbytes)

    def wait(self, what: str) -> Tensor:
        """See `OffloadedPiece.wait`: the computing stream waits, and not the host."""
        self.fetch()
        assert self._again is not None
        self._await_arrival()
        return self._again

    def release(self) -> None:
        """See `OffloadedPiece.release`."""
        self.leave()
        self._await_arrival()
        if self._pinned is not None:
            self._place.give_back(self._pinned)
        self._again = self._pinned = None

    def _await_arrival(self) -> None:
        if self._arrived is not None:
            self._arrived.make_stream_wait(_go_on)
            self._arrived = None


def _go_on() -> None:
    """A stream that waits for a copy waits for no other worker: there is nothing to check meanwhile."""
