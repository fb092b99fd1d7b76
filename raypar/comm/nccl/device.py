"""The device whose memory an `nccl` transport moves: its memory, streams and events, in CUDA's terms.

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

DEFAULT_QUEUES, MAX_QUEUES = 8, 32
"""Hardware queues of a process for a GPU's streams (CUDA_DEVICE_MAX_CONNECTIONS): by default, and at most."""

DEFAULT_BLOCKS = 32
"""Most thread blocks of one NCCL kernel (NCCL_MAX_CTAS), by default. Each takes up to a whole multiprocessor."""

MAX_COMMUNICATORS = MAX_QUEUES - 1
"""Most communicators of a process, on any GPU: the computation has a queue of its own."""

BLOCKS = (16, 8, 4)
"""Most blocks of a kernel that raypar chooses, by preference. NCCL itself takes up to 32. Between GPUs that NVLink joins sums
become faster with each block (others have measured 134 GB/s with 4 and 234 with 8, on eight H200), up to about 16 (for sums in
NVLink's switches, says its source, more give nothing). NCCL makes the channels of messages a power of two."""

COMMUNICATORS = "RAYPAR_NCCL_COMMUNICATORS"
"""Variable with the most communicators that a worker of the run will ever have, set where `limit_blocks` is to decide."""

WORKER_ENVIRONMENT = {
    "CUDA_DEVICE_MAX_CONNECTIONS": "32",
    "NCCL_MAX_CTAS": "4",
    "NCCL_RUNTIME_CONNECT": "0",
    "CUDA_MODULE_LOADING": "EAGER",
}
"""Variables that a GPU worker's process is started with: many communicators make progress beside each other, and all
connections are made before the first step.

Kernels are loaded before the first step too. Loading a kernel may wait for all kernels that run (CUDA programming guide,
hazards of lazy loading). A kernel of NCCL runs until its peer does its part, and the peer may be waiting for what this worker
computes next."""


class StreamEvent(Protocol):
    """A point in a stream's work (a CUDA event)."""

    def query(self) -> bool:
        """Whether the stream has passed this point; never blocks."""

    def make_stream_wait(self, check: Callable[[], None]) -> None:
        """Work that the caller gives to its current stream from here on runs after this event; the host goes on.

        On host memory the calling thread itself is the stream: then the host waits, and calls `check` meanwhile, which raises
        when waiting is in vain.
        """


class Stream(Protocol):
    """Work in order, beside the host and other streams (a CUDA stream)."""

    cuda_stream: int
    """The stream as NCCL is given it: a cudaStream_t as a number."""

    def wait_event(self, event: StreamEvent) -> None:
        """Later work of this stream waits for `event`."""

    def run(self, work: Callable[[], Tensor | None]) -> None:
        """Enqueue the tensor operations that `work` calls; `work` itself may be called later."""

    def record_event(self) -> StreamEvent:
        """An event after all work that the stream has been given so far."""

    def close(self) -> None:
        """Release the stream; no more work will come."""


class Device(Protocol):
    """One rank's device."""

    name: str
    """The device as messages name it."""
    device: torch.device
    """The device of tensors for which `owns` is true."""
    identity: str
    """A text that differs between any two ranks that do not share a device."""
    max_communicators: int
    """How many communicators surely make progress beside each other and the computation."""

    def bind(self) -> None:
        """Make this the calling thread's device (CUDA's current device is each thread's own)."""

    def owns(self, tensor: Tensor) -> bool:
        """Whether the tensor lies in this device's memory."""

    def stream(self) -> Stream:
        """A new stream."""

    def record_event(self) -> StreamEvent:
        """An event after all work that the caller's current stream has been given so far."""

    def empty(self, shape: Sequence[int], dtype: torch.dtype, stream: Stream) -> Tensor:
        """Uninitialised memory for work on `stream`."""

    def record_stream(self, tensor: Tensor) -> None:
        """Announce that the caller's current stream will use a tensor whose memory belongs to another stream."""


class CudaEvent:
    """See `StreamEvent`: an event recorded in `stream`."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._device = stream.device
        self.event = torch.cuda.Event()
        self.event.record(stream)

    def query(self) -> bool:
        """See `StreamEvent.query`."""
        return bool(self.event.query())

    def make_stream_wait(self, check: Callable[[], None]) -> None:
        """See `StreamEvent.make_stream_wait`."""
        self.event.wait(torch.cuda.current_stream(self._device))


class CudaStream:
    """See `Stream`: one of PyTorch's pool, which hands out 32 of this priority before it gives one twice.

    The priority is high, so that a kernel that waits for a peer need not wait for free multiprocessors too.
    """

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device, priority=-1)
        self.cuda_stream = int(self.stream.cuda_stream)

    def wait_event(self, event: StreamEvent) -> None:
        """See `Stream.wait_event`."""
        assert isinstance(event, CudaEvent)
        self.stream.wait_event(event.event)

    def run(self, work: Callable[[], Tensor | None]) -> None:
        """See `Stream.run`: `work` is called, and enqueues, at once."""
        with torch.cuda.stream(self.stream), torch.no_grad():
            work()

    def record_event(self) -> CudaEvent:
        """See `Stream.record_event`."""
        return CudaEvent(self.stream)

    def close(self) -> None:
        """See `Stream.close`: the pool keeps the stream."""


class CudaDevice:
    """GPU number `index` of those this process sees. Raises `ClusterError` when there is none, or no CuPy or NCCL for it."""

    def __init__(self, index: int = 0) -> None:
        found = bindings.find_nccl_installation()
        bindings.check_nccl_installation(found)
        bindings.check_cuda_versions(found)
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
        torch.empty(1, device=self.device)  # creates the context that threads will find when they bind to the device
        # With NCCL_HOSTID NCCL takes two processes of a machine for two machines, and a GPU that they share for two.
        host = os.environ.get("NCCL_HOSTID")
        self.identity = f"GPU {properties.uuid}" + (f" of NCCL_HOSTID {host}" if host else "")
        limit_blocks(properties.multi_processor_count)
        self.max_communicators = max_concurrent_communicators(properties.multi_processor_count)

    def bind(self) -> None:
        """See `Device.bind`."""
        torch.cuda.set_device(self.device)

    def owns(self, tensor: Tensor) -> bool:
        """See `Device.owns`."""
        return tensor.device == self.device

    def stream(self) -> CudaStream:
        """See `Device.stream`."""
        return CudaStream(self.device)

    def record_event(self) -> CudaEvent:
        """See `Device.record_event`."""
        return CudaEvent(torch.cuda.current_stream(self.device))

    def empty(self, shape: Sequence[int], dtype: torch.dtype, stream: Stream) -> Tensor:
        """See `Device.empty`: PyTorch's allocator reuses the memory in that stream only after the stream's work on it."""
        assert isinstance(stream, CudaStream)
        with torch.cuda.stream(stream.stream):
            return torch.empty(shape, dtype=dtype, device=self.device)

    def record_stream(self, tensor: Tensor) -> None:
        """See `Device.record_stream`."""
        tensor.record_stream(torch.cuda.current_stream(self.device))


def max_concurrent_communicators(processors: int) -> int:
    """Communicators of this process that make progress beside each other and the computation, on so many multiprocessors.

    The computation needs a queue (PyTorch's pool has as many streams as there can be queues) and a multiprocessor of its own:
    all others may be taken by kernels that wait for peers, which may wait for what is computed here.
    """
    queues = positive_setting("CUDA_DEVICE_MAX_CONNECTIONS", DEFAULT_QUEUES) - 1
    return min(MAX_COMMUNICATORS, queues, (processors - 1) // positive_setting("NCCL_MAX_CTAS", DEFAULT_BLOCKS))


def blocks_that_fit(communicators: int, processors: int) -> int:
    """How many blocks a kernel of NCCL may have when so many communicators are to make progress beside each other and the
    computation on so many multiprocessors: the most of `BLOCKS` that fit, else the fewest."""
    return next((blocks for blocks in BLOCKS if communicators * blocks < processors), BLOCKS[-1])


def limit_blocks(processors: int) -> None:
    """Set NCCL_MAX_CTAS for this process if `COMMUNICATORS` is set and nobody has set it.

    To be called before NCCL's first communicator, with which it reads the variable, once for all.
    """
    if communicators := os.environ.get(COMMUNICATORS):
        os.environ.setdefault("NCCL_MAX_CTAS", str(blocks_that_fit(int(communicators), processors)))


def positive_setting(name: str, default: int) -> int:
    """A positive number from the environment. Raises `ClusterError` for anything else."""
    text = os.environ.get(name, "")
    if not text:
        return default
    if not (text.isascii() and text.isdigit() and int(text) > 0):
        raise ClusterError(f"{name}={text} is no positive number", cure=f"unset {name} for the workers, or give a number")
    return int(text)
