"""The device whose memory an `nccl` transport moves: streams, marks in them, and memory that outlives both.

The transport asks nothing else of a device, so that its tests run the same code on host memory (`tests/helpers/standin.py`).
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from raypar.comm.nccl import bindings
from raypar.errors import ClusterError

QUEUES, MOST_QUEUES = 8, 32
"""Hardware queues of a process for a GPU's streams (CUDA_DEVICE_MAX_CONNECTIONS): the default, and what there can be."""

BLOCKS = 32
"""Thread blocks of one NCCL kernel at most (NCCL_MAX_CTAS), by default. Each takes up to a whole multiprocessor."""

MAX_COMMUNICATORS = MOST_QUEUES - 1
"""Communicators of a process, on any GPU: one queue is the computation's."""

WORKER_ENVIRONMENT = {
    "CUDA_DEVICE_MAX_CONNECTIONS": "32",
    "NCCL_MAX_CTAS": "4",
    "NCCL_RUNTIME_CONNECT": "0",
    "CUDA_MODULE_LOADING": "EAGER",
}
"""What a GPU worker's process is to be started with: many communicators make progress beside each other, and have all their
connections before the first step.

Kernels are loaded before as well. Loading one may wait for all kernels that run (CUDA programming guide, hazards of lazy
loading); one of NCCL's runs until its peer does its part, and the peer may be waiting for what this worker computes next."""


class StreamEvent(Protocol):
    """A point in a stream's work."""

    def done(self) -> bool:
        """Whether the stream has come by it; never blocks."""

    def hold_current(self) -> None:
        """What is given to the caller's current stream from here on waits for the mark; the host does not."""


class Stream(Protocol):
    """Work in order, beside the host and other streams."""

    handle: int
    """What NCCL is told: a cudaStream_t as a number."""

    def follow(self, mark: StreamEvent) -> None:
        """Later work of this stream waits for `mark`."""

    def run(self, work: Callable[[], object]) -> None:
        """The tensor operations that `work` calls are done in this stream's turn; `work` may be called later."""

    def mark(self) -> StreamEvent:
        """After all that the stream has been given so far."""

    def close(self) -> None:
        """No more work will come."""


class Device(Protocol):
    """One rank's device."""

    name: str
    """For messages."""
    device: torch.device
    """Where PyTorch puts tensors that `owns` is true of."""
    identity: str
    """Differs between any two ranks that do not share a device."""
    most_lanes: int
    """How many communicators surely make progress beside each other and the computation."""

    def bind(self) -> None:
        """Work of the calling thread is for this device (what CUDA calls current is each thread's own)."""

    def owns(self, tensor: Tensor) -> bool:
        """Whether the tensor lies in its memory."""

    def stream(self) -> Stream:
        """A new stream."""

    def mark(self) -> StreamEvent:
        """After all that the caller's current stream has been given so far."""

    def empty(self, shape: Sequence[int], dtype: torch.dtype, stream: Stream) -> Tensor:
        """Uninitialised memory for work on `stream`."""

    def hand_over(self, tensor: Tensor) -> None:
        """The caller's current stream will use a tensor that was made for another one."""


class CudaEvent:
    """An event of CUDA."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._device = stream.device
        self._event = torch.cuda.Event()
        self._event.record(stream)

    def done(self) -> bool:
        """See `Mark.done`."""
        return bool(self._event.query())

    def hold_current(self) -> None:
        """See `Mark.hold_current`."""
        torch.cuda.current_stream(self._device).wait_event(self._event)

    def hold(self, stream: torch.cuda.Stream) -> None:
        """Later work of `stream` waits."""
        stream.wait_event(self._event)


class CudaStream:
    """A stream of PyTorch's pool, which hands out 32 of this priority before it gives one twice.

    A high one: a kernel that waits for a peer shall not wait for room beside the computation's as well.
    """

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device, priority=-1)
        self.handle = int(self.stream.cuda_stream)

    def follow(self, mark: StreamEvent) -> None:
        """See `Stream.follow`."""
        assert isinstance(mark, CudaEvent)
        mark.hold(self.stream)

    def run(self, work: Callable[[], object]) -> None:
        """See `Stream.run`: the work is enqueued at once."""
        with torch.cuda.stream(self.stream), torch.no_grad():
            work()

    def mark(self) -> CudaEvent:
        """See `Stream.mark`."""
        return CudaEvent(self.stream)

    def close(self) -> None:
        """See `Stream.close`: the pool keeps it."""


class CudaDevice:
    """GPU number `index` of those this process sees. Raises `ClusterError` when there is none, or no CuPy or NCCL for it."""

    def __init__(self, index: int = 0) -> None:
        found = bindings.nccl_library()
        bindings.check_library(found)
        bindings.check_cuda(found)
        if not torch.cuda.is_available() or index >= torch.cuda.device_count():
            count = torch.cuda.device_count() if torch.cuda.is_available() else 0
            raise ClusterError(
                f"this process on {socket.gethostname()} wants GPU {index} and sees {count} "
                f"(CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES', 'not set')})",
                cure="give the worker a GPU (`nvidia-smi` lists those of the node), or plan for CPU workers",
            )
        self.device = torch.device("cuda", index)
        properties = torch.cuda.get_device_properties(self.device)
        self.name = f"{self.device} ({properties.name})"
        torch.empty(1, device=self.device)  # from here on threads that bind to it find its context
        # With NCCL_HOSTID NCCL takes two processes of a machine for two machines, and a GPU that they share for two.
        host = os.environ.get("NCCL_HOSTID")
        self.identity = f"GPU {properties.uuid}" + (f" of NCCL_HOSTID {host}" if host else "")
        self.most_lanes = max_concurrent_communicators(properties.multi_processor_count)

    def bind(self) -> None:
        """See `Device.bind`."""
        torch.cuda.set_device(self.device)

    def owns(self, tensor: Tensor) -> bool:
        """See `Device.owns`."""
        return tensor.device == self.device

    def stream(self) -> CudaStream:
        """See `Device.stream`."""
        return CudaStream(self.device)

    def mark(self) -> CudaEvent:
        """See `Device.mark`."""
        return CudaEvent(torch.cuda.current_stream(self.device))

    def empty(self, shape: Sequence[int], dtype: torch.dtype, stream: Stream) -> Tensor:
        """See `Device.empty`: PyTorch's allocator gives the memory to others of that stream only after its work."""
        assert isinstance(stream, CudaStream)
        with torch.cuda.stream(stream.stream):
            return torch.empty(shape, dtype=dtype, device=self.device)

    def hand_over(self, tensor: Tensor) -> None:
        """See `Device.hand_over`."""
        tensor.record_stream(torch.cuda.current_stream(self.device))


def max_concurrent_communicators(processors: int) -> int:
    """Communicators of this process that make progress beside each other and the computation, on so many multiprocessors.

    One queue is the computation's (PyTorch's pool has as many streams as there can be queues), and one multiprocessor: all
    others may be taken by kernels that wait for peers, which may wait for what is computed here.
    """
    queues = positive_setting("CUDA_DEVICE_MAX_CONNECTIONS", QUEUES) - 1
    return min(MAX_COMMUNICATORS, queues, (processors - 1) // positive_setting("NCCL_MAX_CTAS", BLOCKS))


def positive_setting(name: str, default: int) -> int:
    """A positive number of the environment. Raises `ClusterError` for anything else."""
    text = os.environ.get(name, "")
    if not text:
        return default
    if not (text.isascii() and text.isdigit() and int(text) > 0):
        raise ClusterError(f"{name}={text} is no positive number", cure=f"unset {name} for the workers, or give a number")
    return int(text)
