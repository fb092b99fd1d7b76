"""Messages between the ranks of an `nccl` transport, matched by tag.

NCCL knows no tags: what one rank sends another arrives in the order of the sends. So the sender enqueues at once, and
announces tag, dtype, shape and layout over the control transport. The receiver enqueues the receives in the order of the
announcements, each into the memory of the posted receive that it matches, if that may be written already, or into fresh memory,
from which it is copied later (`late_message`): so a receive stands in its communicator's stream and waits for its sender only.

Therefore tags may overtake, a send never waits for others' receives, and shapes travel, as over TCP. Tensors in host memory
travel among the announcements, so that they match alike.

Fresh memory comes from the device's allocator, which serves nobody while PyTorch frees memory because there is too little:
`cudaFree` waits for all that the device was given. Two ranks that do so at once, each before it has memory for the other's
message, wait for each other until the step's deadline aborts them.
"""

from __future__ import annotations

import json
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack

import torch
from torch import Tensor

from raypar.comm.buffer_pool import ALIGNED_ON_CUDA
from raypar.comm.nccl.communicator_stream import CommunicatorStream
from raypar.comm.nccl.device import StreamEvent
from raypar.comm.nccl.late_message import LateMessage
from raypar.comm.nccl.operation_handle import NcclHandle
from raypar.comm.nccl.pending_operations import PendingOperations
from raypar.comm.operation_phase import OperationPhase, Phases
from raypar.comm.phased_operation import PhasedOperation, take_oldest
from raypar.comm.sent_tensor_layout import (
    TensorLayout,
    empty_message,
    fill_from_message,
    tensor_for_message,
    tensor_of_message,
)
from raypar.comm.tcp.message_header import (
    LAID_OUT,
    announced_message_bytes,
    announced_tensor_bytes,
    dtype_code,
    dtype_of_code,
)
from raypar.comm.tcp.transport import TcpTransport
from raypar.comm.transport import CommunicatorKey
from raypar.errors import CommError

ANNOUNCEMENTS = 1
"""Channel of the control transport that announcements use; collectives of a transport use others."""

ON_DEVICE, ON_HOST, GOODBYE = range(3)
"""What a frame announces: a message in its communicator; a message whose bytes follow the frame; that the sender closes, with
its operation counts, which follow the frame."""

MAX_ANNOUNCED_DIMS = 16
ANNOUNCEMENT = struct.Struct(f"<BBBxIQ{MAX_ANNOUNCED_DIMS}Q")
"""Kind (one of the above), dtype code, number of dims, bytes of a goodbye, tag, dims.

A layout follows the frame if the dtype code has `LAID_OUT`."""

LAYOUT = struct.Struct(f"<Q{MAX_ANNOUNCED_DIMS}Q")
"""Place (`TensorLayout.offset`), strides."""

MAX_GOODBYE_BYTES = 1 << 20
"""Size limit of a goodbye: some tens of bytes for each communicator that two ranks share."""

SourceTag = tuple[int, int]
"""(source, tag)"""


class AnnouncementSend(PhasedOperation):
    """An announcement on its way to a peer. With `handle`, a message in host memory follows it."""

    def __init__(self, control: TcpTransport, peer: int, handle: NcclHandle | None) -> None:
        super().__init__(control, "announcement", (peer,), ANNOUNCEMENTS)
        self._handle = handle

    def fail(self, error: CommError) -> None:
        """See `PhasedOperation.fail`; the handle of the message fails too."""
        if self._handle is not None:
            reason = error.what.removeprefix(f"{self.describe()}: ")
            self._handle.fail(type(error)(f"{self._handle.describe()}: {reason}", error.cure))
        super().fail(error)


class HostMessageEvent:
    """See `StreamEvent`: the event of a message in host memory, once it has left or arrived. Streams need not wait for it."""

    def __init__(self, sending: AnnouncementSend | None) -> None:
        self._sending = sending

    def query(self) -> bool:
        """See `StreamEvent.query`. When the message is lost, its handle has failed before."""
        return self._sending is None or self._sending.settled

    def make_stream_wait(self, check: Callable[[], None]) -> None:
        """See `StreamEvent.make_stream_wait`: only the host uses the memory, after `query`."""


ARRIVED = HostMessageEvent(None)
"""The event of a message that is in host memory already."""


class AnnouncementReceive(PhasedOperation):
    """The endless operation that takes a peer's announcements as they come; it fails when the peer is lost."""

    def __init__(self, mailbox: Mailbox, owner: PendingOperations, peer: int) -> None:
        super().__init__(owner.control, "announcements", (peer,), ANNOUNCEMENTS, mailbox.take_announcements(peer))
        self._owner = owner
        self._peer = peer

    def fail(self, error: CommError) -> None:
        """See `PhasedOperation.fail`; the peer is lost."""
        super().fail(error)
        self._owner.peer_lost(self._peer, error.what.removeprefix(f"{self.describe()}: "))


class Mailbox:
    """One rank's messages: posted receives, and messages that came before their receive was posted."""

    def __init__(self, owner: PendingOperations) -> None:
        self._owner = owner
        self._announcing = [threading.Lock() for _ in range(owner.size)]
        """By peer: held while a message is launched and announced, so that both have one order."""
        self._matching = threading.Lock()
        """Guards `_posted` and `_arrived`."""
        self._posted: dict[SourceTag, deque[NcclHandle]] = {}
        """Receives whose messages have not been announced."""
        self._arrived: dict[SourceTag, deque[NcclHandle]] = {}
        """Announced messages whose receives are not posted."""

    def receive_announcements(self) -> None:
        """Take the announcements of the ranks with which this one is connected, from here on."""
        for peer in sorted(self._owner.control.peers):
            AnnouncementReceive(self, self._owner, peer).start()

    def clear(self) -> None:
        """Forget all messages: the generation is over."""
        self._posted.clear()
        self._arrived.clear()

    def send(
        self, tensor: Tensor, to: int, tag: int, requires_grad: bool = False, layout: TensorLayout | None = None
    ) -> NcclHandle:
        """See `Transport.send`. `tensor` is the message, without history; `requires_grad` and `layout`: of the sender's own."""
        handle = NcclHandle(self._owner, f"send tag {tag}", (to,), (tensor,))
        self._owner.ledger.count("send", sent=tensor.nbytes)
        if to == self._owner.rank:
            self._send_to_self(tensor, tag, requires_grad, layout)
            handle.mark_launched(self._event_behind(tensor))
            return handle
        if not self._owner.device.owns(tensor):
            frame = pack_announcement(ON_HOST, tensor, tag, requires_grad, layout)
            with self._owner.hold_lock(self._announcing[to]):
                if self._owner.track(handle):
                    handle.via_control_transport = True
                    handle.mark_launched(HostMessageEvent(self._announce(to, frame, tensor, handle, layout)))
            return handle
        frame = pack_announcement(ON_DEVICE, tensor, tag, requires_grad, layout)
        stream = self._owner.stream_of(CommunicatorKey((self._owner.rank, to), "message"))
        with self._owner.hold_lock(self._announcing[to]), self._owner.hold_lock(stream.lock):
            handle.assign_sequence_number(stream)
            if self._owner.track(handle):
                self._owner.launch(stream, handle, lambda: stream.send_or_receive(tensor))
                self._announce(to, frame, layout=layout)
        return handle

    def _send_to_self(self, tensor: Tensor, tag: int, requires_grad: bool, layout: TensorLayout | None) -> None:
        def allocate(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=tensor.device)

        with torch.no_grad():
            copy = tensor.clone()
            if layout is not None:
                copy = tensor_of_message(empty_message(layout, copy.dtype, allocate).copy_(copy), layout, allocate)
        arrived = NcclHandle(self._owner, f"message tag {tag}", (self._owner.rank,), (copy,), out=copy)
        arrived.requires_grad = requires_grad
        arrived.mark_launched(self._event_behind(copy))
        with self._matching:
            handle = take_oldest(self._posted, (self._owner.rank, tag))
            if handle is None:
                self._arrived.setdefault((self._owner.rank, tag), deque()).append(arrived)
            else:
                self._give(handle, arrived)

    def _event_behind(self, tensor: Tensor) -> StreamEvent:
        """Of what the caller has just done with a tensor: in the current stream, or, in host memory, by itself."""
        return self._owner.device.record_event() if self._owner.device.owns(tensor) else ARRIVED

    def recv(self, given: Tensor | None, out: Tensor | None, source: int, tag: int) -> NcclHandle:
        """See `Transport.recv`. `given` is the caller's tensor, `out` the same memory without its history."""
        handle = NcclHandle(self._owner, f"recv tag {tag}", (source,), () if out is None else (out,), out=given)
        if out is not None and self._owner.device.owns(out):
            handle.writable_event = self._owner.device.record_event()
            if source != self._owner.rank:
                self._owner.stream_of(CommunicatorKey((source, self._owner.rank), "message"))
        with self._owner.hold_lock(
            self._matching
        ):  # a thread that launches an announced receive holds it, and may hang inside NCCL
            arrived = take_oldest(self._arrived, (source, tag))
            if arrived is not None:
                self._give(handle, arrived)
            elif self._owner.track(handle):
                self._posted.setdefault((source, tag), deque()).append(handle)
        return handle

    def _give(self, handle: NcclHandle, arrived: NcclHandle) -> None:
        """Give a message that has arrived, or is on its way in its communicator, to its receive. `_matching` is held."""
        came, event = arrived.out, arrived.event
        assert came is not None and event is not None
        handle.stream_name, handle.sequence_number = arrived.stream_name, arrived.sequence_number
        if handle.out is None:
            handle.out = came
            handle.kept = (came,)
            handle.requires_grad = arrived.requires_grad
        elif not self._fits(handle, came.dtype, came.shape, self._owner.device.owns(came)):
            self._owner.wake()
            return
        else:
            (out,) = handle.kept
            if handle.writable_event is None:
                with torch.no_grad():
                    out.copy_(came)
            else:
                handle.late_message = LateMessage(
                    self._owner.device, self._owner.copies, came, event, out, handle.writable_event
                )
        self._owner.ledger.count("recv", received=came.nbytes if arrived.message_bytes is None else arrived.message_bytes)
        if handle.late_message is None:
            handle.mark_launched(event)
        self._owner.track(handle)
        self._owner.wake()

    def take_announcements(self, peer: int) -> Phases:
        """The phases of `AnnouncementReceive`: take the peer's announcements, one after the other."""
        frame = torch.empty(ANNOUNCEMENT.size, dtype=torch.uint8)
        while True:
            yield OperationPhase((), [(frame, peer, 0)])
            kind, dtype, shape, more, tag, requires_grad, laid_out = unpack_announcement(bytes(frame.numpy()))
            layout = None
            if laid_out:
                lies = torch.empty(LAYOUT.size, dtype=torch.uint8)
                yield OperationPhase((), [(lies, peer, 2)])
                layout = unpack_layout(bytes(lies.numpy()), shape, dtype)
            if kind == GOODBYE:
                text = torch.empty(more, dtype=torch.uint8)
                yield OperationPhase((), [(text, peer, 1)])
                self._owner.peer_closed(peer, unpack_goodbye(bytes(text.numpy())))
            elif layout is not None:
                if kind == ON_DEVICE:
                    self._launch_laid_out(peer, tag, dtype, layout, requires_grad)
                    continue
                into = empty_message(layout, dtype, self._owner.control.pool.empty)
                yield OperationPhase((), [(into, peer, 1)])
                tensor = tensor_of_message(into, layout, self._owner.control.pool.empty)
                self._arrived_on_host(None, True, peer, tag, tensor, requires_grad, into.nbytes)
            elif kind == ON_HOST:
                with self._matching:
                    handle, wanted = self._take_posted(peer, tag, dtype, shape, on_device=False)
                if handle is not None and handle.out is not None:
                    (into,) = handle.kept
                else:
                    into = self._owner.control.pool.empty(shape, dtype)
                yield OperationPhase((), [(into, peer, 1)])
                self._arrived_on_host(handle, wanted, peer, tag, into, requires_grad)
            else:
                self._launch_announced(peer, tag, dtype, shape, requires_grad)

    def _take_posted(
        self, source: int, tag: int, dtype: torch.dtype, shape: Sequence[int], *, on_device: bool
    ) -> tuple[NcclHandle | None, bool]:
        """(posted receive, wanted) for an announced message: the receive that it matches, if one is posted.

        `wanted` is False if the message does not fit its receive, which has failed. `_matching` is held.
        """
        handle = take_oldest(self._posted, (source, tag))
        if handle is None or handle.out is None or self._fits(handle, dtype, shape, on_device):
            return handle, True
        self._owner.wake()
        return None, False

    def _launch_announced(self, source: int, tag: int, dtype: torch.dtype, shape: Sequence[int], requires_grad: bool) -> None:
        """Launch the receive of the next message in the communicator from `source`. Runs in the thread that read it."""
        stream = self._owner.stream_of(CommunicatorKey((source, self._owner.rank), "message"))
        self._owner.device.bind()
        with self._matching, self._owner.hold_lock(stream.lock):
            self._owner.check_alive()
            posted, wanted = self._take_posted(source, tag, dtype, shape, on_device=True)
            handle = posted
            if handle is None or (handle.writable_event is not None and not handle.writable_event.query()):
                handle = NcclHandle(self._owner, f"message tag {tag}", (source,))
                if posted is None and wanted:
                    self._arrived.setdefault((source, tag), deque()).append(handle)
                self._owner.track(handle)
            if handle.out is None:
                handle.out = self._owner.device.empty(shape, dtype, stream.device_stream)
                handle.kept = (handle.out,)
                handle.requires_grad = requires_grad
            (into,) = handle.kept
            self._owner.launch(stream, handle, lambda: stream.send_or_receive(into), after_current=False)
            if posted is not None and posted is not handle:
                self._give(posted, handle)
        if posted is handle:
            self._owner.ledger.count("recv", received=into.nbytes)
        self._owner.wake()

    def _launch_laid_out(self, source: int, tag: int, dtype: torch.dtype, layout: TensorLayout, requires_grad: bool) -> None:
        """As `_launch_announced`, of a message whose tensor has a layout: received in memory of its own, then given away."""
        stream = self._owner.stream_of(CommunicatorKey((source, self._owner.rank), "message"))
        self._owner.device.bind()

        def allocate(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
            return self._owner.device.empty(shape, dtype, stream.device_stream)

        with self._matching, self._owner.hold_lock(stream.lock):
            self._owner.check_alive()
            arrived = NcclHandle(self._owner, f"message tag {tag}", (source,))
            arrived.requires_grad = requires_grad
            self._owner.track(arrived)
            message = empty_message(layout, dtype, allocate)
            arrived.out = tensor = tensor_for_message(message, layout, allocate)
            arrived.kept, arrived.message_bytes = (message, tensor), message.nbytes

            def receive() -> Sequence[Tensor]:
                kept = stream.send_or_receive(message)
                stream.device_stream.run(lambda: fill_from_message(tensor, message, layout))
                return kept

            self._owner.launch(stream, arrived, receive, after_current=False)
            posted = take_oldest(self._posted, (source, tag))
            if posted is None:
                self._arrived.setdefault((source, tag), deque()).append(arrived)
            else:
                self._give(posted, arrived)
        self._owner.wake()

    def _arrived_on_host(
        self,
        handle: NcclHandle | None,
        wanted: bool,
        source: int,
        tag: int,
        tensor: Tensor,
        requires_grad: bool,
        message_bytes: int | None = None,
    ) -> None:
        """A whole message in host memory has arrived in `tensor`: the posted receive's own one, if that has one."""
        if not wanted:
            return
        with self._matching:
            if handle is None:
                arrived = NcclHandle(self._owner, f"message tag {tag}", (source,), (tensor,), out=tensor)
                arrived.requires_grad, arrived.message_bytes = requires_grad, message_bytes
                arrived.mark_launched(ARRIVED)
                posted = take_oldest(self._posted, (source, tag))
                if posted is None:
                    self._arrived.setdefault((source, tag), deque()).append(arrived)
                else:
                    self._give(posted, arrived)
                return
        self._owner.ledger.count("recv", received=tensor.nbytes)
        if handle.out is None:
            handle.out = tensor
            handle.requires_grad = requires_grad
        handle.mark_launched(ARRIVED)
        self._owner.wake()

    def _fits(self, handle: NcclHandle, dtype: torch.dtype, shape: Sequence[int], on_device: bool) -> bool:
        """Whether a message has the dtype, shape and device of its posted receive, which fails if not."""
        out = handle.out
        assert out is not None
        if out.dtype == dtype and out.shape == torch.Size(shape) and self._owner.device.owns(out) == on_device:
            return True
        places = {True: self._owner.device.name, False: "the host"}
        where = "" if self._owner.device.owns(out) == on_device else f" on {places[on_device]}, not {places[not on_device]}"
        handle.fail(
            CommError(
                f"{handle.describe()} expects {out.dtype} {tuple(out.shape)}, "
                f"rank {handle.peers[0]} sent {dtype} {tuple(shape)}{where}",
                cure="both ends must agree on dtype, shape and device; tags must be unique among pending messages of a pair",
            )
        )
        return False

    def _announce(
        self,
        to: int,
        frame: bytearray,
        following: Tensor | None = None,
        handle: NcclHandle | None = None,
        layout: TensorLayout | None = None,
    ) -> AnnouncementSend:
        """Send an announcement, and what follows it; the peer's lock in `_announcing` is held.

        A lost announcement needs no report of its own: its peer is lost too.
        """
        messages = [(torch.frombuffer(frame, dtype=torch.uint8), to, 0)]
        if layout is not None:
            messages.append((torch.frombuffer(pack_layout(layout), dtype=torch.uint8), to, 2))
        if following is not None:
            messages.append((following, to, 1))
        sending = AnnouncementSend(self._owner.control, to, handle)
        sending.post(OperationPhase(messages, ()))
        sending.end_posting()
        return sending

    def send_goodbye(self, streams: Collection[CommunicatorStream], patience_s: float) -> bool:
        """Tell each rank how many operations this rank has posted in the communicators that both share.

        Returns False if some thread is still posting, and does not finish within `patience_s`.
        """
        until = time.monotonic() + patience_s
        with ExitStack() as stack:
            for lock in (*self._announcing, *(stream.lock for stream in streams)):
                if not lock.acquire(timeout=max(0.0, until - time.monotonic())):
                    return False
                stack.callback(lock.release)
            for peer in sorted(self._owner.control.peers):
                shared = {stream.name: stream.operation_count for stream in streams if peer in stream.key.members}
                text = torch.frombuffer(bytearray(json.dumps(shared).encode()), dtype=torch.uint8)
                frame = ANNOUNCEMENT.pack(GOODBYE, 0, 0, text.numel(), 0, *[0] * MAX_ANNOUNCED_DIMS)
                self._announce(peer, bytearray(frame), text)
        return True


def pack_announcement(
    kind: int, tensor: Tensor, tag: int, requires_grad: bool = False, layout: TensorLayout | None = None
) -> bytearray:
    """The announcement of one message; `layout` is that of the tensor whose message `tensor` is.

    Raises `CommError` for a dtype, shape or tag that cannot travel.
    """
    shape: Sequence[int] = tensor.shape if layout is None else layout.shape
    code, dims = dtype_code(tensor.dtype, requires_grad), len(shape)
    if code is None or dims > MAX_ANNOUNCED_DIMS or not 0 <= tag < 1 << 64:
        raise CommError(
            f"cannot send {tensor.dtype} with {dims} dims and tag {tag}",
            cure=f"tags are 64-bit unsigned, dtypes plain numbers, tensors have at most {MAX_ANNOUNCED_DIMS} dims",
        )
    code |= LAID_OUT if layout is not None else 0
    return bytearray(ANNOUNCEMENT.pack(kind, code, dims, 0, tag, *shape, *[0] * (MAX_ANNOUNCED_DIMS - dims)))


def pack_layout(layout: TensorLayout) -> bytearray:
    """What follows the announcement of a message whose tensor has a layout."""
    return bytearray(LAYOUT.pack(layout.offset, *layout.strides, *[0] * (MAX_ANNOUNCED_DIMS - len(layout.strides))))


def unpack_layout(frame: bytes, shape: tuple[int, ...], dtype: torch.dtype) -> TensorLayout:
    """The layout that follows an announcement. Raises `CommError` for a damaged one."""
    offset, *strides = LAYOUT.unpack(frame)
    layout = TensorLayout(shape, tuple(strides[: len(shape)]), offset)
    if any(strides[len(shape) :]):
        raise CommError(f"the layout of an announcement is damaged ({strides} for shape {shape})", cure="abort the group")
    announced_message_bytes(layout, dtype, ALIGNED_ON_CUDA)
    return layout


def unpack_announcement(frame: bytes) -> tuple[int, torch.dtype, tuple[int, ...], int, int, bool, bool]:
    """(kind, dtype, shape, bytes of a goodbye, tag, whether the tensor requires a gradient, whether its layout follows).

    Raises `CommError` for a damaged one.
    """
    kind, code, dims, more, tag, *shape = ANNOUNCEMENT.unpack(frame)
    laid_out = bool(code & LAID_OUT)
    found = dtype_of_code(code & ~LAID_OUT)
    if (
        kind > GOODBYE
        or (laid_out and kind == GOODBYE)
        or found is None
        or dims > MAX_ANNOUNCED_DIMS
        or any(shape[dims:])
        or more > MAX_GOODBYE_BYTES
    ):
        raise CommError(
            f"an announcement is damaged (kind {kind}, dtype code {code}, {dims} dims, {more} bytes)", cure="abort the group"
        )
    dtype, requires_grad = found
    announced_tensor_bytes(shape[:dims], dtype)
    return kind, dtype, tuple(shape[:dims]), more, tag, requires_grad, laid_out


def unpack_goodbye(text: bytes) -> dict[str, int]:
    """Communicator -> operations that the closing rank has posted in it. Raises `CommError` for a damaged goodbye."""
    try:
        counts = json.loads(text)
    except ValueError:
        counts = None
    if not isinstance(counts, dict) or not all(type(count) is int for count in counts.values()):
        raise CommError("a goodbye is damaged", cure="abort the group")
    return counts
