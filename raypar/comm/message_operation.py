"""One posted operation of a message transport: messages in flight, phase after phase, behind one `Handle`.

A collective is written as *phases*: a generator that yields an `MessagePhase` (messages to post) and goes on when all of them
are done. Whoever completes the last message of a phase (a waiting thread or the I/O thread) runs the next phase at once,
so a posted operation needs nothing more from its caller.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor

from raypar.errors import CommError, CommTimeout

if TYPE_CHECKING:
    from raypar.comm.collectives import MessageTransport

K, T = TypeVar("K"), TypeVar("T")
Tagged = tuple[Tensor, int, int]
"""(tensor, peer, tag)"""


@dataclass(frozen=True, slots=True)
class MessagePhase:
    """One phase: `sends` (tensor, to, tag) and `recvs` (out, source, tag) to post together.

    `early`: receives of the last phase posted already now, so that their data lands in place whenever it comes; the next
    phase does not wait for them, the operation does.
    """

    sends: Sequence[Tagged]
    recvs: Sequence[tuple[Tensor | None, int, int]]
    early: Sequence[Tagged] = ()


Phases = Generator[MessagePhase, None, None]


def take_oldest(table: dict[K, deque[T]], key: K) -> T | None:
    """Of messages (or receives) in the order in which they came: the oldest under `key`, taken out; None if there is none."""
    queue = table.get(key)
    if queue is None:
        return None
    found = queue.popleft()
    if not queue:
        del table[key]
    return found


class OperationMessage:
    """One message of an operation. `tensor` is what is sent, or where it is received (None until a shape is known).

    `(peer, channel, tag)` is the address it matches by; channel 0 is point to point, others belong to collectives.
    """

    __slots__ = ("channel", "early", "operation", "peer", "tag", "tensor")

    def __init__(
        self, operation: MessageOperation, tensor: Tensor | None, peer: int, channel: int, tag: int, early: bool
    ) -> None:
        self.operation = operation
        self.tensor = tensor
        self.peer = peer
        self.channel = channel
        self.tag = tag
        self.early = early

    def complete(self) -> None:
        """All bytes have left or arrived."""
        self.operation.message_done(self)

    def fail(self, error: CommError) -> None:
        """The message will never complete."""
        self.operation.fail(error)


class MessageOperation:
    """The `Handle` of message transports. Counts its messages down; thread-safe."""

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
        "name",
        "peers",
        "transport",
    )

    def __init__(
        self, transport: MessageTransport, name: str, peers: Sequence[int], channel: int = 0, phases: Phases | None = None
    ) -> None:
        self.transport = transport
        self.name = name
        self.peers = peers
        self.channel = channel
        self._phases = phases
        self._lock = threading.Lock()
        self._left = 0
        self._early = 0
        self._received: list[OperationMessage] = []
        self._tensors: list[Tensor] = []
        self._finished = False
        self._error: CommError | None = None

    # -- Handle

    def done(self) -> bool:
        """True once completed; raises what the operation failed with."""
        if self._error is not None:
            raise type(self._error)(*self._error.args)
        return self._finished

    def wait(self, timeout_s: float | None = None) -> None:
        """Block until done, at most `timeout_s` seconds (None: the transport's own limit does not exist)."""
        if not self._finished and self._error is None and not self.transport.wait_for(self, timeout_s) and not self.settled:
            raise CommTimeout(
                f"{self.describe()} was not done after {timeout_s:.3g} s",
                cure="a peer is slow, stopped or out of step; abort the group and probe the peer",
            )
        self.done()

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
        """Finished or failed."""
        return self._finished or self._error is not None

    def describe(self) -> str:
        """For messages: operation, ranks and, for one message, its tag."""
        peers = ", ".join(str(p) for p in self.peers)
        return f"{self.name} of rank {self.transport.rank} with {peers or 'nobody'} (generation {self.transport.generation})"

    def start(self) -> MessageOperation:
        """Post the first phase of a collective."""
        self._advance()
        return self

    def post(self, exchange: MessagePhase) -> None:
        """Post the messages of one phase. Receives first: then a peer's answer finds its place."""
        recvs = [OperationMessage(self, t, peer, self.channel, tag, False) for t, peer, tag in exchange.recvs]
        early = [OperationMessage(self, t, peer, self.channel, tag, True) for t, peer, tag in exchange.early]
        sends = [OperationMessage(self, t, peer, self.channel, tag, False) for t, peer, tag in exchange.sends]
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

    def posted(self) -> None:
        """Posting is over: drop the extra count of `post`, go on if everything has completed meanwhile."""
        with self._lock:
            self._left -= 1
            last = self._left == 0
        if last:
            self._advance()

    def message_done(self, message: OperationMessage) -> None:
        """Called once for each message, by whoever completed it."""
        with self._lock:
            if message.early:
                self._early -= 1
                last = self._phases is None and self._left == 0 and self._early == 0
            else:
                self._left -= 1
                last = self._left == 0
        if last:
            self._advance()

    def fail(self, error: CommError) -> None:
        """Settle with an error; the first one stays."""
        with self._lock:
            if self.settled:
                return
            self._error = error
            self._phases = None
            self._received = []
        self.transport.settled(self)

    def _advance(self) -> None:
        """All messages of the current phase are done: post the next phase, or finish."""
        while True:
            phases = self._phases
            if self._error is not None:
                return
            exchange = None
            if phases is not None:
                try:
                    with torch.no_grad():
                        exchange = next(phases, None)
                    if exchange is not None:
                        self.post(exchange)
                except CommError as error:
                    self.fail(error)
                    return
                except Exception as error:
                    what = f"{self.describe()} failed: {type(error).__name__}: {error}"
                    self.fail(CommError(what, cure="abort this group; the tensors of its ranks may not fit together"))
                    return
            with self._lock:
                if exchange is not None:
                    self._left -= 1
                    if self._left:
                        return
                    continue
                self._phases = None
                if self._early or self._finished:
                    return
                # Messages refer to us: without this the cycle would hold their tensors until Python's collector comes.
                self._tensors = [m.tensor for m in self._received if m.tensor is not None]
                self._received = []
                self._finished = True
            self.transport.settled(self)
            return
