"""Messages between the ranks of an `nccl` transport, matched by tag.

NCCL knows no tags: what one rank sends another arrives in order. So the sender enqueues at once, and announces tag, dtype
and shape over the control transport; the receiver enqueues every announced message in that order, into the posted receive it
belongs to, else into fresh memory until one is posted. Tags may overtake, a send never waits for others' receives, and
shapes travel, as over TCP. Tensors in host memory travel among the announcements, so that they match as all do.
"""

from __future__ import annotations

import json
import struct
import threading
import time
from collections import deque
from collections.abc import Collection, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from raypar.comm.communicator_key import CommunicatorKey
from raypar.comm.message_operation import MessageOperation, MessagePhase, Phases, take_oldest
from raypar.comm.nccl.communicator_stream import CommunicatorStream
from raypar.comm.nccl.handle import NcclHandle
from raypar.comm.tcp.message_header import CODES, DTYPES, check_tensor_bytes
from raypar.comm.tcp.transport import TcpTransport
from raypar.errors import CommError

if TYPE_CHECKING:
    from raypar.comm.nccl.transport import NcclTransport

ANNOUNCEMENTS = 1
"""The channel of the control transport that they use; collectives of a transport take others."""

ON_DEVICE, ON_HOST, GOODBYE = range(3)
"""What a frame announces: a message in its lane, one that follows here, or the counts of one who leaves, which follow here."""

MAX_DIMS = 16
FRAME = struct.Struct(f"<BBBxIQ{MAX_DIMS}Q")
"""One of the above, dtype code, number of dims, bytes of a goodbye, tag, dims."""

MAX_GOODBYE_BYTES = 1 << 20
"""Size limit of a goodbye: some tens of bytes for each lane that two ranks share."""

Key = tuple[int, int]
"""(source, tag)"""


class AnnouncementSend(MessageOperation):
    """Words on their way to a peer; with `flight`, a message in host memory among them."""

    def __init__(self, control: TcpTransport, peer: int, flight: NcclHandle | None) -> None:
        super().__init__(control, "telling", (peer,), ANNOUNCEMENTS)
        self._flight = flight

    def fail(self, error: CommError) -> None:
        """See `MessageOperation.fail`."""
        if self._flight is not None:
            reason = error.what.removeprefix(f"{self.describe()}: ")
            self._flight.fail(type(error)(f"{self._flight.describe()}: {reason}", error.cure))
        super().fail(error)


class HostMessageEvent:
    """The mark of a message in host memory (see `Mark`): once it has left, or is here. Streams need not wait for it."""

    def __init__(self, telling: AnnouncementSend | None) -> None:
        self._telling = telling

    def done(self) -> bool:
        """See `Mark.done`. When the message is lost, its flight has failed before."""
        return self._telling is None or self._telling.settled

    def hold_current(self) -> None:
        """See `Mark.hold_current`."""


HERE = HostMessageEvent(None)
"""The mark of what is in host memory already."""


class AnnouncementReceive(MessageOperation):
    """The endless operation that takes a peer's announcements as they come; it ends when the peer is lost."""

    def __init__(self, mailbox: Mailbox, owner: NcclTransport, peer: int) -> None:
        super().__init__(owner.control, "hearing", (peer,), ANNOUNCEMENTS, mailbox.hear(peer))
        self._owner = owner
        self._peer = peer

    def fail(self, error: CommError) -> None:
        """See `MessageOperation.fail`."""
        super().fail(error)
        self._owner.lose(self._peer, error.what.removeprefix(f"{self.describe()}: "))


class Mailbox:
    """One rank's messages: posted receives, and what came before its receive was posted."""

    def __init__(self, owner: NcclTransport) -> None:
        self._owner = owner
        self._telling = [threading.Lock() for _ in range(owner.size)]
        self._matching = threading.Lock()
        self._posted: dict[Key, deque[NcclHandle]] = {}
        self._arrived: dict[Key, deque[NcclHandle]] = {}

    def listen(self) -> None:
        """Take what the others say, from here on."""
        for peer in range(self._owner.size):
            if peer != self._owner.rank:
                AnnouncementReceive(self, self._owner, peer).start()

    def clear(self) -> None:
        """Forget everything: the generation is over."""
        self._posted.clear()
        self._arrived.clear()

    def send(self, tensor: Tensor, to: int, tag: int) -> NcclHandle:
        """See `Transport.send`."""
        flight = NcclHandle(self._owner, f"send tag {tag}", (to,), (tensor,))
        self._owner.ledger.count("send", sent=tensor.nbytes)
        if to == self._owner.rank:
            self._send_to_self(tensor, tag)
            flight.launch(self._owner.device.mark())
            return flight
        if not self._owner.device.owns(tensor):
            frame = pack_announcement(ON_HOST, tensor, tag)
            with self._owner.hold(self._telling[to]):
                if self._owner.track(flight):
                    flight.told = True
                    flight.launch(HostMessageEvent(self._tell(to, frame, tensor, flight)))
            return flight
        frame = pack_announcement(ON_DEVICE, tensor, tag)
        lane = self._owner.lane(CommunicatorKey((self._owner.rank, to), "message"))
        with self._owner.hold(self._telling[to]), self._owner.hold(lane.lock):
            flight.take_turn(lane)
            if self._owner.track(flight):
                self._owner.launch(lane, flight, lambda: lane.message(tensor))
                self._tell(to, frame)
        return flight

    def _send_to_self(self, tensor: Tensor, tag: int) -> None:
        with torch.no_grad():
            copy = tensor.clone()
        arrived = NcclHandle(self._owner, f"message tag {tag}", (self._owner.rank,), (copy,), out=copy)
        arrived.launch(self._owner.device.mark())
        with self._matching:
            flight = take_oldest(self._posted, (self._owner.rank, tag))
            if flight is None:
                self._arrived.setdefault((self._owner.rank, tag), deque()).append(arrived)
            else:
                self._give(flight, arrived)

    def recv(self, given: Tensor | None, out: Tensor | None, source: int, tag: int) -> NcclHandle:
        """See `Transport.recv`. `given` is the caller's tensor, `out` the same memory without its history."""
        flight = NcclHandle(self._owner, f"recv tag {tag}", (source,), () if out is None else (out,), out=given)
        if out is not None:
            flight.start = self._owner.device.mark()
            if source != self._owner.rank and self._owner.device.owns(out):
                self._owner.lane(CommunicatorKey((source, self._owner.rank), "message"))
        with self._owner.hold(self._matching):  # whoever launches an announced one has it, and may hang inside NCCL
            arrived = take_oldest(self._arrived, (source, tag))
            if arrived is not None:
                self._give(flight, arrived)
            elif self._owner.track(flight):
                self._posted.setdefault((source, tag), deque()).append(flight)
        return flight

    def _give(self, flight: NcclHandle, arrived: NcclHandle) -> None:
        """A message that is here, or on its way in its lane, gets to its receive. Holds `_matching`."""
        came, mark = arrived.out, arrived.mark
        assert came is not None and mark is not None
        flight.lane, flight.number = arrived.lane, arrived.number
        if flight.out is None:
            flight.out = came
            flight.kept = (came,)
        elif not self._fits(flight, came.dtype, came.shape, self._owner.device.owns(came)):
            self._owner.wake()
            return
        else:
            (out,) = flight.kept
            flight.kept = (out, came)
            assert flight.start is not None
            if flight.peers[0] == self._owner.rank or not self._owner.device.owns(came):
                flight.start.hold_current()
                mark.hold_current()
                with torch.no_grad():
                    out.copy_(came)
                mark = self._owner.device.mark()
            else:
                stream = self._owner.lane(CommunicatorKey((flight.peers[0], self._owner.rank), "message")).stream
                stream.follow(flight.start)  # and `mark` is in this stream already
                stream.run(lambda: out.copy_(came))
                mark = stream.mark()
        self._owner.ledger.count("recv", received=came.nbytes)
        flight.launch(mark)
        self._owner.track(flight)
        self._owner.wake()

    def hear(self, peer: int) -> Phases:
        """What `AnnouncementReceive` does: take the peer's words, one after the other."""
        frame = torch.empty(FRAME.size, dtype=torch.uint8)
        while True:
            yield MessagePhase((), [(frame, peer, 0)])
            kind, dtype, shape, more, tag = unpack_announcement(bytes(frame.numpy()))
            if kind == GOODBYE:
                text = torch.empty(more, dtype=torch.uint8)
                yield MessagePhase((), [(text, peer, 1)])
                self._owner.part(peer, unpack_goodbye(bytes(text.numpy())))
            elif kind == ON_HOST:
                with self._matching:
                    flight, wanted = self._posted_for(peer, tag, dtype, shape, on_device=False)
                if flight is not None and flight.out is not None:
                    (into,) = flight.kept
                else:
                    into = self._owner.control.pool.empty(shape, dtype)
                yield MessagePhase((), [(into, peer, 1)])
                self._came_on_host(flight, wanted, peer, tag, into)
            else:
                self._coming(peer, tag, dtype, shape)

    def _posted_for(
        self, source: int, tag: int, dtype: torch.dtype, shape: Sequence[int], *, on_device: bool
    ) -> tuple[NcclHandle | None, bool]:
        """The posted receive that an announced message belongs to, and whether anybody may ever want it. Holds `_matching`."""
        flight = take_oldest(self._posted, (source, tag))
        if flight is None or flight.out is None or self._fits(flight, dtype, shape, on_device):
            return flight, True
        self._owner.wake()
        return None, False

    def _coming(self, source: int, tag: int, dtype: torch.dtype, shape: Sequence[int]) -> None:
        """The next message in the lane of `source` is this one. Runs in whatever thread has read it."""
        lane = self._owner.lane(CommunicatorKey((source, self._owner.rank), "message"))
        self._owner.device.bind()
        with self._matching, self._owner.hold(lane.lock):
            self._owner.check_alive()
            flight, wanted = self._posted_for(source, tag, dtype, shape, on_device=True)
            posted = flight is not None
            if flight is None:
                flight = NcclHandle(self._owner, f"message tag {tag}", (source,))
                if wanted:
                    self._arrived.setdefault((source, tag), deque()).append(flight)
                self._owner.track(flight)
            if flight.out is None:
                flight.out = self._owner.device.empty(shape, dtype, lane.stream)
                flight.kept = (flight.out,)
            (into,) = flight.kept
            self._owner.launch(lane, flight, lambda: lane.message(into), after_current=False)
        if posted:
            self._owner.ledger.count("recv", received=into.nbytes)
        self._owner.wake()

    def _came_on_host(self, flight: NcclHandle | None, wanted: bool, source: int, tag: int, tensor: Tensor) -> None:
        """All of a message in host memory is here, in `tensor`, which is the posted receive's own if that has one."""
        if not wanted:
            return
        with self._matching:
            if flight is None:
                arrived = NcclHandle(self._owner, f"message tag {tag}", (source,), (tensor,), out=tensor)
                arrived.launch(HERE)
                posted = take_oldest(self._posted, (source, tag))
                if posted is None:
                    self._arrived.setdefault((source, tag), deque()).append(arrived)
                else:
                    self._give(posted, arrived)
                return
        self._owner.ledger.count("recv", received=tensor.nbytes)
        if flight.out is None:
            flight.out = tensor
        flight.launch(HERE)
        self._owner.wake()

    def _fits(self, flight: NcclHandle, dtype: torch.dtype, shape: Sequence[int], on_device: bool) -> bool:
        """Whether what came is what a posted receive is for; else it fails."""
        out = flight.out
        assert out is not None
        if out.dtype == dtype and out.shape == torch.Size(shape) and self._owner.device.owns(out) == on_device:
            return True
        places = {True: self._owner.device.name, False: "the host"}
        where = "" if self._owner.device.owns(out) == on_device else f" on {places[on_device]}, not {places[not on_device]}"
        flight.fail(
            CommError(
                f"{flight.describe()} expects {out.dtype} {tuple(out.shape)}, "
                f"rank {flight.peers[0]} sent {dtype} {tuple(shape)}{where}",
                cure="both ends must agree on dtype, shape and device; tags must be unique among pending messages of a pair",
            )
        )
        return False

    def _tell(
        self, to: int, frame: bytearray, more: Tensor | None = None, flight: NcclHandle | None = None
    ) -> AnnouncementSend:
        """Words for a peer; its lock in `_telling` is held. Of announcements that are lost the loss of the peer tells."""
        words = [(torch.frombuffer(frame, dtype=torch.uint8), to, 0)]
        if more is not None:
            words.append((more, to, 1))
        telling = AnnouncementSend(self._owner.control, to, flight)
        telling.post(MessagePhase(words, ()))
        telling.posted()
        return telling

    def goodbye(self, lanes: Collection[CommunicatorStream], patience_s: float) -> bool:
        """Tell everybody how many operations this rank has posted in the lanes that it shares with them. False: somebody is
        still posting, and does not come to an end within `patience_s`."""
        until = time.monotonic() + patience_s
        with ExitStack() as stack:
            for lock in (*self._telling, *(lane.lock for lane in lanes)):
                if not lock.acquire(timeout=max(0.0, until - time.monotonic())):
                    return False
                stack.callback(lock.release)
            for peer in range(self._owner.size):
                if peer != self._owner.rank:
                    shared = {lane.name: lane.calls for lane in lanes if peer in lane.wire.members}
                    text = torch.frombuffer(bytearray(json.dumps(shared).encode()), dtype=torch.uint8)
                    frame = FRAME.pack(GOODBYE, 0, 0, text.numel(), 0, *[0] * MAX_DIMS)
                    self._tell(peer, bytearray(frame), text)
        return True


def pack_announcement(kind: int, tensor: Tensor, tag: int) -> bytearray:
    """The announcement of one message. Raises `CommError` for a dtype, shape or tag that cannot travel."""
    code, dims = CODES.get(tensor.dtype), tensor.dim()
    if code is None or dims > MAX_DIMS or not 0 <= tag < 1 << 64:
        raise CommError(
            f"cannot send {tensor.dtype} with {dims} dims and tag {tag}",
            cure=f"tags are 64-bit unsigned, dtypes plain numbers, tensors have at most {MAX_DIMS} dims",
        )
    return bytearray(FRAME.pack(kind, code, dims, 0, tag, *tensor.shape, *[0] * (MAX_DIMS - dims)))


def unpack_announcement(frame: bytes) -> tuple[int, torch.dtype, tuple[int, ...], int, int]:
    """(kind, dtype, shape, bytes of a goodbye, tag) of a frame. Raises `CommError` for a damaged one."""
    kind, code, dims, more, tag, *shape = FRAME.unpack(frame)
    if kind > GOODBYE or code >= len(DTYPES) or dims > MAX_DIMS or any(shape[dims:]) or more > MAX_GOODBYE_BYTES:
        raise CommError(
            f"an announcement is damaged (kind {kind}, dtype code {code}, {dims} dims, {more} bytes)", cure="abort the group"
        )
    check_tensor_bytes(shape[:dims], DTYPES[code])
    return kind, DTYPES[code], tuple(shape[:dims]), more, tag


def unpack_goodbye(text: bytes) -> dict[str, int]:
    """Lane -> number of operations that the rank of this goodbye has posted. Raises `CommError` for a damaged one."""
    try:
        counts = json.loads(text)
    except ValueError:
        counts = None
    if not isinstance(counts, dict) or not all(type(count) is int for count in counts.values()):
        raise CommError("a goodbye is damaged", cure="abort the group")
    return counts
