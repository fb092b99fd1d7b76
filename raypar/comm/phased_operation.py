"""One posted operation of a message transport: messages, posted phase after phase, behind one `Handle`.

A collective is written as *phases*: a generator that yields an `OperationPhase` (messages to post) and goes on when all of them
are done. The thread that completes the last message of a phase (a waiting thread or the I/O thread) runs the next phase at
once, so that a posted operation needs nothing more from its caller.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from raypar.comm.operation_phase import OperationPhase, Phases
from raypar.comm.sent_tensor_layout import TensorLayout
from raypar.comm.transport import CommunicationLedger, describe_operation
from raypar.errors import CommError, CommTimeout

K = TypeVar("K")
T = TypeVar("T")


class MessageCarrier(Protocol):
    """What an operation needs of its transport (`comm.collectives.MessageBasedTransport`)."""

    rank: int
    generation: int
    ledger: CommunicationLedger

    def post_send(self, message: OperationMessage) -> None:
        """Start sending; `message.complete()` once the tensor may be changed. Never blocks."""

    def post_recv(self, message: OperationMessage) -> None:
        """Start receiving into `message.tensor`, or into a fresh tensor put there. Never blocks."""

    def wait_for(self, operation: PhasedOperation, timeout_s: float | None) -> bool:
        """Block until `operation.settled`; False after `timeout_s`."""

    def notify_settled(self, operation: PhasedOperation) -> None:
        """Wake the threads that wait for `operation`, which has just finished or failed in any thread."""


def take_oldest(table: dict[K, deque[T]], key: K) -> T | None:
    """Take out the oldest message (or receive) under `key`; None if there is none. Each queue is in order of arrival."""
    queue = table.get(key)
    if queue is None:
        return None
    found = queue.popleft()
    if not queue:
        del table[key]
    return found


class OperationMessage:
    """One message of an operation. It matches by `(peer, channel, tag)`."""

    __slots__ = ("channel", "is_early", "operation", "peer", "tag", "tensor")

    def __init__(
        self, operation: PhasedOperation, tensor: Tensor | None, peer: int, channel: int, tag: int, early: bool
    ) -> None:
        self.operation = operation
        self.tensor = tensor
        """What is sent, or where it is received; None until the shape of a received message is known."""
        self.peer = peer
        self.channel = channel
        """0 is point to point; others belong to collectives."""
        self.tag = tag
        self.is_early = early
        """Whether it is one of `OperationPhase.early_recvs`."""

    def complete(self) -> None:
        """Report that all bytes of the message have left or arrived."""
        self.operation.message_done(self)

    def fail(self, error: CommError) -> None:
        """Fail the operation: this message will never complete."""
        self.operation.fail(error)


def tensor_mismatch_error(message: OperationMessage, dtype: torch.dtype, shape: Sequence[int]) -> CommError:
    """The error of a receive when a tensor of another dtype or shape arrives."""
    assert message.tensor is not None
    return CommError(
        f"{message.operation.describe()} expects {message.tensor.dtype} {tuple(message.tensor.shape)}, "
        f"rank {message.peer} sent {dtype} {tuple(shape)}",
        cure="both ends must agree on dtype and shape; tags must be unique among pending messages of a pair",
    )


class PhasedOperation:
    """The `Handle` of message transports: done when all its messages are. Thread-safe."""

    __slots__ = (
        "_early",
        "_error",
        "_finished",
        "_left",
        "_lock",
        "_phases",
        "_received",
        "_tensors",
        "channel",
        "layout",
        "name",
        "peers",
        "transport",
    )

    def __init__(
        self,
        transport: MessageCarrier,
        name: str,
        peers: Sequence[int],
        channel: int = 0,
        phases: Phases | None = None,
        *,
        layout: TensorLayout | None = None,
    ) -> None:
        self.transport = transport
        self.name = name
        """The operation, for messages."""
        self.peers = peers
        """Ranks that it sends to or receives from."""
        self.channel = channel
        """See `OperationMessage.channel`."""
        self.layout = layout
        """Of a send: how the tensor lies whose message is sent; None: as a new tensor."""
        self._phases = phases
        """The phases that are still to come; None of an operation without phases, and after the last one."""
        self._lock = threading.Lock()
        """Guards the counts, the error and the change to finished."""
        self._left = 0
        """Messages of this phase that are not done."""
        self._early = 0
        """Early receives that are not done."""
        self._received: list[OperationMessage] = []
        """Point to point: posted receives."""
        self._tensors: list[Tensor] = []
        """Point to point: received tensors, once finished."""
        self._finished = False
        self._error: CommError | None = None

    # -- Handle

    def done(self) -> bool:
        """True once completed; raises what the operation failed with."""
        if self._error is not None:
            raise type(self._error)(*self._error.args) from self._error.__cause__
        return self._finished

    def wait(self, timeout_s: float | None = None) -> None:
        """Block until done, at most `timeout_s` seconds (None: without a limit)."""
        if not self._finished and self._error is None and not self.transport.wait_for(self, timeout_s) and not self.settled:
            raise CommTimeout(
                f"{self.describe()} was not done after {timeout_s:.3g} s",
                cure="a peer is slow, stopped or out of step; abort the group and probe the peer",
            )
        self.done()

    def wait_on_stream(self, timeout_s: float | None = None) -> None:
        """See `Handle.wait_on_stream`: the memory is the host's, so the host waits."""
        self.wait(timeout_s)

    def tensor(self) -> Tensor:
        """The tensor of a completed operation with one receive."""
        return self.tensors()[0]

    def tensors(self) -> list[Tensor]:
        """The received tensors of a completed operation, in the order of its receives."""
        if not self.done():
            raise CommError(f"{self.describe()} is not done", cure="wait for the handle before reading its tensor")
        return list(self._tensors)

    # -- for transports

    @property
    def settled(self) -> bool:
        """Whether the operation has finished or failed."""
        return self._finished or self._error is not None

    def describe(self) -> str:
        """The operation and its ranks, for messages."""
        return describe_operation(self.name, self.transport.rank, self.peers, self.transport.generation)

    def start(self) -> PhasedOperation:
        """Post the first phase of a collective."""
        self._advance()
        return self

    def post(self, phase: OperationPhase) -> None:
        """Post the messages of one phase. Receives first, so that a peer's answer is received in place."""
        recvs = [OperationMessage(self, t, peer, self.channel, tag, False) for t, peer, tag in phase.recvs]
        early = [OperationMessage(self, t, peer, self.channel, tag, True) for t, peer, tag in phase.early_recvs]
        sends = [OperationMessage(self, t, peer, self.channel, tag, False) for t, peer, tag in phase.sends]
        self._left += len(recvs) + len(sends) + 1  # one more, so that it cannot reach zero while we are posting
        self._early += len(early)
        if self.channel == 0:
            self._received += recvs
        for message in recvs:
            self.transport.post_recv(message)
        for message in early:
            self.transport.post_recv(message)
        for message in sends:
            self.transport.post_send(message)

    def end_posting(self) -> None:
        """End posting: drop the extra count of `post`, and go on if all messages have completed meanwhile."""
        with self._lock:
            self._left -= 1
            last = self._left == 0
        if last:
            self._advance()

    def message_done(self, message: OperationMessage) -> None:
        """Count a completed message; called once for each, in the thread that completed it."""
        with self._lock:
            if message.is_early:
                self._early -= 1
                last = self._phases is None and self._left == 0 and self._early == 0
            else:
                self._left -= 1
                last = self._left == 0
        if last:
            self._advance()

    def fail(self, error: CommError) -> None:
        """Settle with an error, unless it is settled already."""
        with self._lock:
            if self.settled:
                return
            self._error = error
            self._phases = None
            self._received = []
        self.transport.notify_settled(self)

    def _advance(self) -> None:
        """Post the next phase, or finish; called when all messages of the current phase are done."""
        while True:
            phases = self._phases
            if self._error is not None:
                return
            phase = None
            if phases is not None:
                try:
                    with torch.no_grad():
                        phase = next(phases, None)
                    if phase is not None:
                        self.post(phase)
                except CommError as error:
                    self.fail(error)
                    return
                except Exception as error:
                    what = f"{self.describe()} failed: {type(error).__name__}: {error}"
                    failed = CommError(what, cure="abort this group; the tensors of its ranks may not fit together")
                    failed.__cause__ = error
                    self.fail(failed)
                    return
            with self._lock:
                if phase is not None:
                    self._left -= 1
                    if self._left:
                        return
                    continue
                self._phases = None
                if self._early or self._finished:
                    return
                # Messages refer to this operation: the cycle would hold their tensors until Python's collector comes.
                self._tensors = [m.tensor for m in self._received if m.tensor is not None]
                self._received = []
                self._finished = True
            self.transport.notify_settled(self)
            return
