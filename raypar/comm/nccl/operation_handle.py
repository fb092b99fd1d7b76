"""Handles of the `nccl` transport: one posted operation, the memory it uses, and the event behind it in a stream."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor

from raypar.comm.nccl.communicator_stream import CommunicatorStream
from raypar.comm.nccl.device import Device, StreamEvent
from raypar.comm.nccl.late_message import LateMessage
from raypar.comm.transport import describe_operation
from raypar.errors import CommError, CommTimeout

SHORTEST_PAUSE_S = 20e-6
LONGEST_PAUSE_S = 0.5e-3
"""A waiting host looks again after pauses that double: events cannot be waited for with a limit, or interrupted."""


class HandleOwner(Protocol):
    """What a handle needs of its transport (`comm.nccl.pending_operations.PendingOperations`)."""

    rank: int
    generation: int
    device: Device

    def poll(self) -> None:
        """Look for errors that NCCL has found in the background."""

    def sleep(self, pause_s: float) -> None:
        """Wait at most `pause_s`, until something may have changed."""

    def with_reason(self, error: CommError) -> CommError:
        """A copy of an error to raise; one that a lost peer has caused names it."""


class PolledHandle(ABC):
    """What `NcclHandle` and `NcclBatchHandle` share. See `comm.transport.Handle`."""

    def __init__(self, owner: HandleOwner, name: str, peers: Sequence[int]) -> None:
        self.owner = owner
        self.name = name
        """The operation, for messages."""
        self.peers = tuple(peers)
        """Ranks without which the operation cannot complete."""
        self._ordered = False
        """Whether a stream has been made to wait for the operation (`wait_on_stream`)."""

    @abstractmethod
    def done(self) -> bool:
        """See `Handle.done`."""

    @abstractmethod
    def launched(self) -> bool:
        """Whether everything has been given to the device; raises what the operation failed with."""

    @abstractmethod
    def order_current_stream(self, check: Callable[[], None]) -> None:
        """Make the caller's current stream wait for all of a launched operation (`StreamEvent.make_stream_wait`)."""

    @abstractmethod
    def received(self) -> list[Tensor]:
        """The received tensors, in the order of the receives."""

    def wait(self, timeout_s: float | None = None) -> None:
        """See `Handle.wait`."""
        self._until(self.done, timeout_s)

    def wait_on_stream(self, timeout_s: float | None = None) -> None:
        """See `Handle.wait_on_stream`: the host waits only until the operation has been given to the device.

        A send or collective is given to the device when it is posted, a receive once its sender has posted the send.
        """
        started_s = time.monotonic()

        def check() -> None:
            if not self.done() and timeout_s is not None and time.monotonic() - started_s > timeout_s:
                raise self._timeout(timeout_s)

        self._until(self.launched, timeout_s)
        self.order_current_stream(check)
        self._ordered = True

    def _until(self, reached: Callable[[], bool], timeout_s: float | None) -> None:
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        pause = SHORTEST_PAUSE_S
        while not reached():
            if deadline is not None and timeout_s is not None:
                left = deadline - time.monotonic()
                if left <= 0:
                    raise self._timeout(timeout_s)
                pause = min(pause, left)
            self.owner.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_S)

    def _timeout(self, timeout_s: float) -> CommTimeout:
        return CommTimeout(
            f"{self.describe()} was not done after {timeout_s:.3g} s",
            cure="a peer is slow, stopped or out of step; abort the group and probe the peer",
        )

    def tensor(self) -> Tensor:
        """See `Handle.tensor`."""
        return self.tensors()[0]

    def tensors(self) -> list[Tensor]:
        """See `Handle.tensors`; also after `wait_on_stream`, for work on the stream that waits."""
        if not self._ordered and not self.done():
            raise CommError(f"{self.describe()} is not done", cure="wait for the handle before reading its tensor")
        return self.received()

    def describe(self) -> str:
        """The operation and its ranks, for messages."""
        return describe_operation(self.name, self.owner.rank, self.peers, self.owner.generation)


class NcclHandle(PolledHandle):
    """One send, receive or collective."""

    def __init__(
        self,
        owner: HandleOwner,
        name: str,
        peers: Sequence[int],
        kept: Sequence[Tensor] = (),
        *,
        out: Tensor | None = None,
    ) -> None:
        super().__init__(owner, name, peers)
        self.kept: Sequence[Tensor] = kept
        """Tensors that the device may still read or write, held until it no longer does."""
        self.out = out
        """The received tensor; None for other operations, and until a receive without one has got its message."""
        self.message_bytes: int | None = None
        """Bytes of the message of `out`, where they are others than those of `out`."""
        self.requires_grad = False
        """Whether the message says that its tensor requires a gradient, which a fresh `out` then does too."""
        self.writable_event: StreamEvent | None = None
        """Of a receive into memory of the device: the point in the caller's stream after which that may be written."""
        self.late_message: LateMessage | None = None
        """Of such a receive: its message, if that is received elsewhere and copied."""
        self.stream_name = ""
        """Name of the communicator that carries the operation."""
        self.sequence_number = 0
        """Number of the operation in that communicator on this rank, from 1."""
        self.via_control_transport = False
        """Whether it is a message in host memory: only the control transport, which carries it, knows whether it arrived."""
        self.tracked = False
        """Whether its transport has been told of it (`PendingOperations.track`)."""
        self._event: StreamEvent | None = None
        """Behind the operation in its stream; None until the device has it."""
        self._finished = False
        self._error: CommError | None = None

    def done(self) -> bool:
        """See `Handle.done`."""
        if self.release_if_done():
            return True
        if self._error is None:
            self.owner.poll()
        self._raise()
        return False

    def launched(self) -> bool:
        """See `PolledHandle.launched`."""
        self._raise()
        if self.via_control_transport:
            return self.done()
        return self._event is not None or self.late_message is not None

    def order_current_stream(self, check: Callable[[], None]) -> None:
        """See `PolledHandle.order_current_stream`."""
        late = self.late_message
        if self._event is None and late is not None:
            self._event = late.copy_in_current_stream(check)
        if self._event is not None and not self._finished:
            self._event.make_stream_wait(check)

    def received(self) -> list[Tensor]:
        """See `PolledHandle.received`."""
        if self.out is None:
            return []
        if self.owner.device.owns(self.out):
            self.owner.device.record_stream(self.out)
        if self.requires_grad:
            self.out.requires_grad_()
        return [self.out]

    def release_if_done(self) -> bool:
        """Release the memory if the device is done with it. Returns whether the operation has succeeded."""
        late = self.late_message
        if self._event is None and late is not None and self._error is None:
            self._event = late.copy_if_possible()
        event = self._event
        if not self._finished and event is not None and event.query():
            self.kept, self.late_message = (), None
            self._finished = self._error is None
        return self._finished

    @property
    def in_flight(self) -> bool:
        """Whether the device has the operation and has not finished it."""
        return self._event is not None and not self._finished and not self._event.query()

    @property
    def needs_peers(self) -> bool:
        """Whether it may still need something of a peer; not once its message is on this device."""
        late = self.late_message
        return late is None or not late.arrived.query()

    @property
    def released(self) -> bool:
        """Whether neither the device nor the transport has anything more to do with the operation."""
        return self.release_if_done() or (not self.in_flight and self._error is not None)

    @property
    def failed(self) -> bool:
        """Whether the operation has failed."""
        return self._error is not None

    @property
    def event(self) -> StreamEvent | None:
        """The event behind the operation in its stream; None until the device has the operation."""
        return self._event

    def assign_sequence_number(self, stream: CommunicatorStream) -> None:
        """Set the communicator's name and the next sequence number in it; the caller holds the lock of `stream`."""
        self.stream_name, self.sequence_number = stream.name, stream.operation_count + 1

    def mark_launched(self, event: StreamEvent) -> None:
        """Note that the device has the operation, and has finished it once `event` has passed."""
        self._event = event

    def fail(self, error: CommError) -> None:
        """Settle with an error, unless it has succeeded or failed before."""
        if not self.release_if_done() and self._error is None:
            self._error = error

    def _raise(self) -> None:
        if self._error is not None:
            raise self.owner.with_reason(self._error)


class NcclBatchHandle(PolledHandle):
    """Several operations behind one handle."""

    def __init__(self, owner: HandleOwner, name: str, peers: Sequence[int], handles: Sequence[NcclHandle]) -> None:
        super().__init__(owner, name, peers)
        self._handles = handles

    def done(self) -> bool:
        """See `Handle.done`."""
        pending = [handle for handle in self._handles if not handle.done()]  # all are asked: one may have failed
        return not pending

    def launched(self) -> bool:
        """See `PolledHandle.launched`."""
        pending = [handle for handle in self._handles if not handle.launched()]
        return not pending

    def order_current_stream(self, check: Callable[[], None]) -> None:
        """See `PolledHandle.order_current_stream`."""
        for handle in self._handles:
            handle.order_current_stream(check)

    def received(self) -> list[Tensor]:
        """See `PolledHandle.received`."""
        return [tensor for handle in self._handles for tensor in handle.received()]
