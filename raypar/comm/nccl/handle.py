"""One posted operation of the `nccl` transport: the memory it uses, and the mark behind it in a stream."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from raypar.comm.nccl.device import StreamEvent
from raypar.errors import CommError, CommTimeout

if TYPE_CHECKING:
    from raypar.comm.nccl.communicator_stream import CommunicatorStream
    from raypar.comm.nccl.transport import NcclTransport

SHORTEST_PAUSE_S = 20e-6
LONGEST_PAUSE_S = 0.5e-3
"""A waiting host looks again after pauses that double: events cannot be waited for with a limit, or interrupted."""


class PolledHandle(ABC):
    """What `NcclHandle` and `NcclBatchHandle` share: the `Handle`."""

    def __init__(self, transport: NcclTransport, name: str, peers: Sequence[int]) -> None:
        self.transport = transport
        self.name = name
        self.peers = tuple(peers)
        self._ordered = False

    @abstractmethod
    def done(self) -> bool:
        """See `Handle.done`."""

    @abstractmethod
    def launched(self) -> bool:
        """Whether everything has been given to the device; raises what the operation failed with."""

    @abstractmethod
    def hold_current(self) -> None:
        """The current stream goes on after all of it."""

    @abstractmethod
    def received(self) -> list[Tensor]:
        """The received tensors, in the order of the receives."""

    def wait(self, timeout_s: float | None = None) -> None:
        """See `Handle.wait`."""
        self._until(self.done, timeout_s)

    def wait_on_stream(self, timeout_s: float | None = None) -> None:
        """The caller's current stream waits for the operation; the host only until it has been given to the device.

        A send or collective has been since it was posted, a receive is once its sender has posted the send. Raises as `wait`
        does; what goes wrong later is raised by a later `done` or `wait`.
        """
        self._until(self.launched, timeout_s)
        self.hold_current()
        self._ordered = True

    def _until(self, reached: Callable[[], bool], timeout_s: float | None) -> None:
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        pause = SHORTEST_PAUSE_S
        while not reached():
            if deadline is not None:
                left = deadline - time.monotonic()
                if left <= 0:
                    raise CommTimeout(
                        f"{self.describe()} was not done after {timeout_s:.3g} s",
                        cure="a peer is slow, stopped or out of step; abort the group and probe the peer",
                    )
                pause = min(pause, left)
            self.transport.attend(pause)
            pause = min(2 * pause, LONGEST_PAUSE_S)

    def tensor(self) -> Tensor:
        """See `Handle.tensor`."""
        return self.tensors()[0]

    def tensors(self) -> list[Tensor]:
        """See `Handle.tensors`; also after `wait_on_stream`, for work on the stream that waits."""
        if not self._ordered and not self.done():
            raise CommError(f"{self.describe()} is not done", cure="wait for the handle before reading its tensor")
        return self.received()

    def describe(self) -> str:
        """For messages: operation, ranks and, for one message, its tag."""
        peers = ", ".join(str(p) for p in self.peers)
        return f"{self.name} of rank {self.transport.rank} with {peers or 'nobody'} (generation {self.transport.generation})"


class NcclHandle(PolledHandle):
    """One send, receive or collective. `kept`: tensors that the device may still read or write, held until it has.

    `lane` and `number`: it is the number-th operation of that communicator on this rank. `start`: where a posted receive
    lies in the current stream, which may still be using the memory. `told`: a message in host memory whose fate the control
    transport tells, from before its first byte is out.
    """

    def __init__(
        self,
        transport: NcclTransport,
        name: str,
        peers: Sequence[int],
        kept: Sequence[Tensor] = (),
        *,
        out: Tensor | None = None,
    ) -> None:
        super().__init__(transport, name, peers)
        self.kept: Sequence[Tensor] = kept
        self.out = out
        self.start: StreamEvent | None = None
        self.lane = ""
        self.number = 0
        self.told = False
        self._mark: StreamEvent | None = None
        self._finished = False
        self._error: CommError | None = None

    def done(self) -> bool:
        """See `Handle.done`."""
        if self.look():
            return True
        if self._error is None:
            self.transport.poll()
        self._raise()
        return False

    def launched(self) -> bool:
        """See `PolledHandle.launched`."""
        self._raise()
        return self._mark is not None

    def hold_current(self) -> None:
        """See `PolledHandle.hold_current`."""
        if self._mark is not None and not self._finished:
            self._mark.hold_current()

    def received(self) -> list[Tensor]:
        """See `PolledHandle.received`."""
        if self.out is None:
            return []
        if self.transport.device.owns(self.out):
            self.transport.device.hand_over(self.out)
        return [self.out]

    def look(self) -> bool:
        """Whether it has succeeded; lets go of its memory when the device is done with it."""
        mark = self._mark
        if not self._finished and mark is not None and mark.done():
            self.kept = ()
            self._finished = self._error is None
        return self._finished

    @property
    def in_flight(self) -> bool:
        """The device has it, and is not done."""
        return self._mark is not None and not self._finished and not self._mark.done()

    @property
    def over(self) -> bool:
        """Neither the device nor the transport has anything more to do with it."""
        return self.look() or (not self.in_flight and self._error is not None)

    @property
    def good(self) -> bool:
        """It has not failed."""
        return self._error is None

    @property
    def mark(self) -> StreamEvent | None:
        """Behind it in its stream, once the device has it."""
        return self._mark

    def take_turn(self, lane: CommunicatorStream) -> None:
        """It is the next operation of a lane, whose lock is held."""
        self.lane, self.number = lane.name, lane.calls + 1

    def launch(self, mark: StreamEvent) -> None:
        """The device has it; it is done at `mark`."""
        self._mark = mark

    def fail(self, error: CommError) -> None:
        """Settle with an error; the first one stays, and success too."""
        if not self.look() and self._error is None:
            self._error = error

    def _raise(self) -> None:
        if self._error is not None:
            raise type(self._error)(*self._error.args)


class NcclBatchHandle(PolledHandle):
    """Several flights behind one handle."""

    def __init__(self, transport: NcclTransport, name: str, peers: Sequence[int], flights: Sequence[NcclHandle]) -> None:
        super().__init__(transport, name, peers)
        self._flights = flights

    def done(self) -> bool:
        """See `Handle.done`."""
        pending = [flight for flight in self._flights if not flight.done()]  # all are asked: one may have failed
        return not pending

    def launched(self) -> bool:
        """See `PolledHandle.launched`."""
        pending = [flight for flight in self._flights if not flight.launched()]
        return not pending

    def hold_current(self) -> None:
        """See `PolledHandle.hold_current`."""
        for flight in self._flights:
            flight.hold_current()

    def received(self) -> list[Tensor]:
        """See `PolledHandle.received`."""
        return [tensor for flight in self._flights for tensor in flight.received()]
