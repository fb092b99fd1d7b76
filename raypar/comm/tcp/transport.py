"""The TCP transport (Unix sockets inside one machine), written for few thread switches on a busy machine.

A send goes straight into the socket from the calling thread; bytes that do not fit are left to the I/O thread. A thread that
waits for an operation takes over the sockets of the operation's peers and reads from them itself, so that a message needs no
hand-over between threads. The I/O thread serves all other sockets: it receives while the owner computes, and carries
collectives from phase to phase. Each connection has one reader and one writer at a time (`read_lock`, `write_lock`); no thread
blocks while it holds either.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

from raypar.comm.collectives import MessageBasedTransport
from raypar.comm.phased_operation import OperationMessage, PhasedOperation, take_oldest, tensor_mismatch_error
from raypar.comm.sent_tensor_layout import TensorLayout, empty_message, tensor_of_message
from raypar.comm.tcp.message_header import MessageHeader, pack_header, tensor_memory, unpack_header
from raypar.comm.transport import generation_over_error
from raypar.errors import CommError

STAGING_BYTES = 16 << 10
"""Headers, and messages up to about this size, are read through a buffer: one system call for several of them."""

SourceChannelTag = tuple[int, int, int]
"""(source, channel, tag)"""


class OutgoingMessage:
    """A message on its way into a socket."""

    __slots__ = ("buffers", "message")

    def __init__(self, message: OperationMessage, buffers: list[bytes | memoryview]) -> None:
        self.message = message
        """Keeps the tensor alive."""
        self.buffers = buffers
        """Bytes that are still to be sent."""


class EarlyMessage:
    """A message that is received in memory of its own: it came before its receive was posted, or its tensor has a layout."""

    __slots__ = ("complete", "header", "receive", "tensor")

    def __init__(self, tensor: Tensor, header: MessageHeader | None = None, complete: bool = False) -> None:
        self.tensor = tensor
        """Where it is received."""
        self.header = header
        """Its header; None of a message from the same rank."""
        self.complete = complete
        """Whether all of it has arrived."""
        self.receive: OperationMessage | None = None
        """Its receive, if that is posted."""


class PeerConnection:
    """One peer's socket, and the messages that are partly sent or received through it."""

    __slots__ = (
        "bytes_to_skip",
        "fd",
        "lost_cause",
        "lost_reason",
        "mask",
        "mask_lock",
        "payload",
        "payload_received",
        "queue",
        "rank",
        "read_by_waiter",
        "read_lock",
        "receiving",
        "socket",
        "socket_full",
        "staged_bytes",
        "staging",
        "write_error",
        "write_lock",
    )

    def __init__(self, rank: int, sock: socket.socket) -> None:
        self.rank = rank
        self.socket = sock
        self.fd = sock.fileno()
        self.lost_reason: str | None = None
        """Why the peer is lost; None while it is not."""
        self.lost_cause: BaseException | None = None
        """The error of this process for which it was given up, if that was the reason: no memory for a message."""
        self.read_lock = threading.Lock()
        """Held by the thread that reads; guards the attributes up to `bytes_to_skip`."""
        self.staging = memoryview(bytearray(STAGING_BYTES))
        """Headers and small messages are read into it."""
        self.staged_bytes = 0
        """Bytes in `staging` that are not parsed."""
        self.receiving: OperationMessage | EarlyMessage | None = None
        """The message that is being received."""
        self.payload: memoryview | None = None
        """The memory of its tensor, if it did not come whole with its header."""
        self.payload_received = 0
        """Bytes of `payload` received."""
        self.bytes_to_skip = 0
        """Bytes still to come of a message that does not fit its receive."""
        self.write_lock = threading.Lock()
        """Held by the thread that sends."""
        self.queue: deque[OutgoingMessage] = deque()
        """Messages that are not wholly in the socket, in order."""
        self.socket_full = False
        """Whether the rest of the queue has to wait until the socket is writable."""
        self.write_error: str | None = None
        """Why nothing more can be sent. The peer is lost when all that it had sent before has been read."""
        self.mask_lock = threading.Lock()
        """Guards `mask` and `lost_reason`."""
        self.read_by_waiter = False
        """Whether a waiting thread reads this socket itself."""
        self.mask = select.EPOLLIN
        """The epoll events that wake the I/O thread."""


class TcpTransport(MessageBasedTransport):
    """One rank's connections to other ranks of a generation over TCP or Unix sockets.

    The I/O thread keeps it alive until `close`.
    """

    def __init__(self, rank: int, size: int, generation: int, sockets: dict[int, socket.socket]) -> None:
        super().__init__(rank, size, generation)
        self.peers = frozenset(sockets)
        self._match = threading.Lock()
        """Guards `_posted` and `_arrived`."""
        self._posted: dict[SourceChannelTag, deque[OperationMessage]] = {}
        """Receives whose messages have not come."""
        self._arrived: dict[SourceChannelTag, deque[EarlyMessage]] = {}
        """Messages whose receives are not posted."""
        self._connections = {r: PeerConnection(r, s) for r, s in sockets.items()}
        """By rank."""
        self._by_fd = {c.fd: c for c in self._connections.values()}
        self._ending = threading.Lock()
        """Held by `abort` and `close`."""
        self._closed = False
        self._waiter = threading.Lock()
        """Held by the waiting thread that does its own I/O; further ones wait for `_settled`."""
        self._waiter_thread = 0
        """Identity of the thread that holds `_waiter`."""
        self._waited: PhasedOperation | None = None
        """The operation that this thread waits for."""
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        """Wakes this thread when another one has settled the operation."""
        self._settled = threading.Condition()
        """Notified of settled operations while `_others_waiting`."""
        self._others_waiting = 0
        """Number of threads that wait for `_settled`."""
        self._stop = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        """Ends the I/O thread."""
        self._epoll = select.epoll()
        self._epoll.register(self._stop, select.EPOLLIN)
        for connection in self._connections.values():
            self._epoll.register(connection.fd, connection.mask)
        self._thread = threading.Thread(target=self._serve, name=f"raypar-io-{generation}.{rank}", daemon=True)
        self._thread.start()

    def can_share_memory(self, rank: int) -> bool:
        """See `Transport.can_share_memory`: true for peers that are connected through a Unix socket."""
        return rank == self.rank or self._connections[rank].socket.family == socket.AF_UNIX

    # -- sending

    def post_send(self, message: OperationMessage) -> None:
        """See `MessageBasedTransport.post_send`."""
        tensor = message.tensor
        assert tensor is not None
        if message.peer == self.rank:
            self._send_to_self(message, tensor)
            return
        connection = self._connections[message.peer]
        header = pack_header(tensor, self.generation, message.channel, message.tag, message.operation.layout)
        nbytes = tensor.nbytes
        outgoing = OutgoingMessage(message, [header, tensor_memory(tensor, nbytes)] if nbytes else [header])
        if self._aborted is None and connection.lost_reason is None:
            connection.queue.append(outgoing)
            self._flush(connection)
        if self._aborted is not None or connection.lost_reason is not None:
            # Also if the peer got lost right after queueing: the thread that saw it may have emptied the queue before. Under
            # the lock, because the peer may have taken the message and left while its sender waits for the interpreter.
            with connection.write_lock:
                unsent = bool(outgoing.buffers)
            if unsent:
                message.fail(self._gone(connection, message))

    def _send_to_self(self, message: OperationMessage, tensor: Tensor) -> None:
        needs, layout = tensor.requires_grad and message.channel == 0, message.operation.layout
        copy = tensor.detach().clone()
        if layout is not None:
            copy = tensor_of_message(empty_message(layout, copy.dtype, self.pool.empty).copy_(copy), layout, self.pool.empty)
        arrival = EarlyMessage(copy.requires_grad_(needs), complete=True)
        key = (self.rank, message.channel, message.tag)
        with self._match:
            posted = take_oldest(self._posted, key)
            if posted is None:
                self._arrived.setdefault(key, deque()).append(arrival)
        if posted is not None:
            self._hand_over(posted, arrival)
        message.complete()

    def _flush(self, connection: PeerConnection) -> None:
        """Send queued messages until the socket is full. Any thread; one at a time."""
        queue = connection.queue
        while queue and not connection.socket_full and not connection.write_error and connection.write_lock.acquire(False):
            sent: list[OperationMessage] = []
            try:
                while queue:
                    outgoing = queue[0]
                    buffers = outgoing.buffers
                    length = sum(len(b) for b in buffers)
                    count = connection.socket.sendmsg(buffers)
                    if count < length:
                        while count >= len(buffers[0]):
                            count -= len(buffers.pop(0))
                        buffers[0] = memoryview(buffers[0])[count:]
                        continue
                    queue.popleft()
                    outgoing.buffers = []
                    sent.append(outgoing.message)
            except BlockingIOError:
                connection.socket_full = True
                self._watch(connection)
            except OSError as error:
                connection.write_error = error.strerror or str(error)
                # What the peer sent before it left, its goodbye included, may not have been read: the readers find the end.
                with contextlib.suppress(OSError):
                    connection.socket.shutdown(socket.SHUT_RDWR)
            finally:
                connection.write_lock.release()
            for message in sent:
                message.complete()

    def _watch(self, connection: PeerConnection) -> None:
        """Set what the I/O thread is woken for on this connection."""
        with connection.mask_lock:
            if connection.lost_reason is not None or self._closed:
                return
            mask = (0 if connection.read_by_waiter else select.EPOLLIN) | (select.EPOLLOUT if connection.socket_full else 0)
            if mask != connection.mask:
                connection.mask = mask
                with contextlib.suppress(OSError):
                    self._epoll.modify(connection.fd, mask)

    # -- receiving

    def post_recv(self, message: OperationMessage) -> None:
        """See `MessageBasedTransport.post_recv`."""
        key = (message.peer, message.channel, message.tag)
        with self._match:
            arrival = take_oldest(self._arrived, key)
            if arrival is None:
                self._posted.setdefault(key, deque()).append(message)
            elif not arrival.complete:
                arrival.receive = message
        if arrival is not None and arrival.complete and arrival.receive is None:
            self._hand_over(message, arrival)
        elif message.peer != self.rank:
            connection = self._connections[message.peer]
            if self._aborted is not None or connection.lost_reason is not None:
                message.fail(self._gone(connection, message))

    def _hand_over(self, message: OperationMessage, arrival: EarlyMessage) -> None:
        """Complete a receive with a message that has arrived in a tensor of its own."""
        tensor = arrival.tensor
        if message.tensor is None:
            message.tensor = tensor
        elif not self._fits(message, tensor.dtype, tensor.shape):
            return
        else:
            with torch.no_grad():
                message.tensor.copy_(tensor)
        self._received(message, tensor.nbytes if arrival.header is None else arrival.header.nbytes)

    def _fits(self, message: OperationMessage, dtype: torch.dtype, shape: Sequence[int]) -> bool:
        out = message.tensor
        if out is None or (out.dtype == dtype and out.shape == torch.Size(shape)):
            return True
        message.fail(tensor_mismatch_error(message, dtype, shape))
        return False

    def _received(self, message: OperationMessage, nbytes: int) -> None:
        if message.channel == 0:
            self.ledger.count("recv", received=nbytes)
        message.complete()

    def _drain(self, connection: PeerConnection, until: PhasedOperation | None = None) -> None:
        """Read all that has arrived (or until the operation `until` is settled). Any thread; one at a time."""
        with connection.read_lock:
            reason = None
            try:
                while connection.lost_reason is None and (until is None or not until.settled):
                    payload = connection.payload
                    if payload is not None:
                        received = connection.payload_received
                        count = connection.socket.recv_into(payload[received:] if received else payload)
                        connection.payload_received += count
                        if connection.payload_received == len(payload):
                            self._payload_done(connection)
                    elif connection.bytes_to_skip:
                        count = connection.socket.recv_into(connection.staging[: connection.bytes_to_skip])
                        connection.bytes_to_skip -= count
                    else:
                        room = STAGING_BYTES - connection.staged_bytes
                        count = connection.socket.recv_into(connection.staging[connection.staged_bytes :])
                        connection.staged_bytes += count
                        self._parse(connection)
                        if 0 < count < room and connection.payload is None:
                            return  # a short read: there was no more
                    if count == 0:
                        reason = connection.write_error or "it closed the connection"
                        break
            except BlockingIOError:
                return
            except OSError as error:
                reason = error.strerror or str(error)
            except CommError as error:
                reason, connection.lost_cause = error.what, error.__cause__
        if reason is not None:
            self._lose(connection, reason)

    def _parse(self, connection: PeerConnection) -> None:
        """Take whole messages, and the beginning of the last one, out of the staging buffer."""
        staging, at, end = connection.staging, 0, connection.staged_bytes
        while at < end:
            found = unpack_header(staging[at:end])
            if found is None:
                break
            header, length = found
            at += length
            tensor = self._begin(connection, header)
            have = min(header.nbytes, end - at)
            if tensor is None:
                at += have
                connection.bytes_to_skip = header.nbytes - have
                continue
            if header.nbytes:
                payload = tensor_memory(tensor, header.nbytes)
                payload[:have] = staging[at : at + have]
                at += have
            if have < header.nbytes:
                connection.payload = payload
                connection.payload_received = have
            else:
                self._payload_done(connection)
        if at < end and at:
            staging[: end - at] = bytes(staging[at:end])
        connection.staged_bytes = end - at

    def _begin(self, connection: PeerConnection, header: MessageHeader) -> Tensor | None:
        """Find the receive of a header that has come, or keep the message as an early one. Returns the tensor for the payload.

        None for a message that does not fit its receive, which has failed: nothing is allocated for it.
        """
        if header.generation != self.generation:
            raise CommError(
                f"it sent a message of generation {header.generation} in generation {self.generation}",
                cure="abort this group; the next generation has connections of its own",
            )
        key = (connection.rank, header.channel, header.tag)
        with self._match:
            message = take_oldest(self._posted, key)
            if message is None:
                arrival = EarlyMessage(self._room_for(header), header)
                self._arrived.setdefault(key, deque()).append(arrival)
                connection.receiving = arrival
                return arrival.tensor
        if not self._fits(message, header.dtype, header.shape):
            return None
        if header.layout is not None:
            connection.receiving = message  # the receive fails with the connection if there is no room
            arrival = EarlyMessage(self._room_for(header), header)
            arrival.receive = message
            connection.receiving = arrival
            return arrival.tensor
        connection.receiving = message  # the receive fails with the connection if there is no room
        if message.tensor is None:
            message.tensor = self._room_for(header)
        return message.tensor

    def _room_for(self, header: MessageHeader) -> Tensor:
        """Memory for a message. Raises `CommError` if there is not enough."""
        try:
            if header.layout is not None:
                return empty_message(header.layout, header.dtype, self.pool.empty)
            return self.pool.empty(header.shape, header.dtype).requires_grad_(header.requires_grad)
        except (MemoryError, RuntimeError) as error:
            raise self._no_memory_error(header, error) from error

    def _no_memory_error(self, header: MessageHeader, error: Exception) -> CommError:
        return CommError(
            f"it sent {header.dtype} {header.shape}, {header.nbytes:,} bytes for which there is no memory here: {error}",
            cure="use workers with more memory, or a model that is cut smaller",
        )

    def _lay_out(self, message: EarlyMessage, header: MessageHeader, layout: TensorLayout) -> None:
        """Put the tensor in the place of its message. Raises `CommError` if there is no memory for its gaps."""
        try:
            tensor = tensor_of_message(message.tensor, layout, self.pool.empty)
        except (MemoryError, RuntimeError) as error:
            raise self._no_memory_error(header, error) from error
        message.tensor = tensor.requires_grad_(header.requires_grad)

    def _payload_done(self, connection: PeerConnection) -> None:
        """Finish the message that has been received whole."""
        message = connection.receiving
        if isinstance(message, EarlyMessage) and message.header is not None and message.header.layout is not None:
            self._lay_out(message, message.header, message.header.layout)
        connection.receiving, connection.payload, connection.payload_received = None, None, 0
        if isinstance(message, OperationMessage):
            assert message.tensor is not None
            self._received(message, message.tensor.nbytes)
            return
        assert message is not None
        with self._match:
            message.complete = True
            receive = message.receive
        if receive is not None:
            self._hand_over(receive, message)

    # -- waiting

    def wait_for(self, operation: PhasedOperation, timeout_s: float | None) -> bool:
        """See `MessageBasedTransport.wait_for`: the caller itself reads from the operation's peers."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        if not self._waiter.acquire(False):
            return self._wait_beside(operation, deadline)
        self._waiter_thread = threading.get_ident()
        self._waited = operation
        mine = [c for r in operation.peers if (c := self._connections.get(r)) is not None and c.lost_reason is None]
        try:
            poller = select.poll()
            poller.register(self._wake, select.POLLIN)
            for connection in mine:
                connection.read_by_waiter = True
                self._watch(connection)
                poller.register(connection.fd, select.POLLIN)
            readable = mine
            while True:
                for connection in readable:
                    self._drain(connection, operation)
                    if connection.lost_reason is not None:
                        poller.unregister(connection.fd)
                if operation.settled:
                    return True
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    return False
                ready = [fd for fd, _ in poller.poll(None if left is None else left * 1000 + 1)]
                if self._wake in ready:
                    ready.remove(self._wake)
                    with contextlib.suppress(BlockingIOError):
                        os.eventfd_read(self._wake)
                readable = [self._by_fd[fd] for fd in ready]
        finally:
            self._waited = None
            for connection in mine:
                connection.read_by_waiter = False
                self._watch(connection)
            self._waiter.release()

    def _wait_beside(self, operation: PhasedOperation, deadline: float | None) -> bool:
        """Wait while another thread does I/O of its own: it and the I/O thread read from this operation's peers."""
        with self._settled:
            self._others_waiting += 1
            try:
                left = None if deadline is None else max(0.0, deadline - time.monotonic())
                return self._settled.wait_for(lambda: operation.settled, left)
            finally:
                self._others_waiting -= 1

    def reads_in_this_thread(self) -> bool:
        """Whether the calling thread is one that reads from peers: it must not wait for what they say."""
        waits_here = self._waited is not None and self._waiter_thread == threading.get_ident()
        return waits_here or threading.current_thread() is self._thread

    def notify_settled(self, operation: PhasedOperation) -> None:
        """See `MessageBasedTransport.notify_settled`."""
        if self._waited is operation and self._waiter_thread != threading.get_ident() and not self._closed:
            os.eventfd_write(self._wake, 1)
        if self._others_waiting:
            with self._settled:
                self._settled.notify_all()

    def _serve(self) -> None:
        """Run the I/O thread. A mistake in it would leave all ranks waiting, so it aborts the group."""
        try:
            self._turn()
        except Exception as error:
            self.abort(f"the I/O thread of rank {self.rank} failed: {type(error).__name__}: {error}")
            raise

    def _turn(self) -> None:
        while True:
            for fd, event in self._epoll.poll():
                if fd == self._stop:
                    return
                connection = self._by_fd[fd]
                if event & select.EPOLLOUT and connection.socket_full:
                    connection.socket_full = False
                    self._flush(connection)
                    self._watch(connection)
                if event & ~select.EPOLLOUT:
                    self._drain(connection)

    # -- ending

    def _gone(self, connection: PeerConnection, message: OperationMessage) -> CommError:
        if self._aborted is not None:
            return generation_over_error(self._aborted)
        lost = CommError(
            f"{message.operation.describe()}: lost rank {connection.rank}: {connection.lost_reason}",
            cure="abort this group; the ranks that are left form the next generation",
        )
        lost.__cause__ = connection.lost_cause
        return lost

    def _lose(self, connection: PeerConnection, reason: str) -> None:
        """Fail all that is pending with a lost peer; messages of others are not touched."""
        with connection.mask_lock:
            if connection.lost_reason is not None:
                return
            connection.lost_reason = reason
            if not self._closed:
                with contextlib.suppress(OSError, ValueError):
                    self._epoll.unregister(connection.fd)
        with connection.write_lock:  # see `post_send`
            pending = [outgoing.message for outgoing in connection.queue]
            connection.queue.clear()
        partial = connection.receiving
        if isinstance(partial, OperationMessage):
            pending.append(partial)
        elif partial is not None and partial.receive is not None:
            pending.append(partial.receive)
        with self._match:
            for key in [k for k in self._posted if k[0] == connection.rank]:
                pending += self._posted.pop(key)
        for message in pending:
            message.fail(self._gone(connection, message))

    def abort(self, reason: str) -> None:
        """See `Transport.abort`."""
        with self._ending:
            if self._aborted is not None:
                return
            self._aborted = reason
        for connection in self._connections.values():
            with contextlib.suppress(OSError):
                connection.socket.shutdown(socket.SHUT_RDWR)
            self._lose(connection, reason)
        with self._match:
            alone = [m for key in list(self._posted) for m in self._posted.pop(key)]
        for message in alone:  # receives from ourselves
            message.fail(generation_over_error(reason))

    def close(self) -> None:
        """See `Transport.close`."""
        self.abort("the transport was closed")
        with self._ending:
            if self._closed:
                return
            os.eventfd_write(self._stop, 1)
            if threading.current_thread() is not self._thread:
                self._thread.join()
            # A thread that was waiting has been woken by the abort and leaves the sockets before it lets go of this lock.
            with self._waiter:
                self._closed = True
            for connection in self._connections.values():
                connection.socket.close()
            self._epoll.close()
            os.close(self._stop)
            os.close(self._wake)
            self._arrived.clear()
            self.pool.clear()
