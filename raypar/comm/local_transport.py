"""The transport inside one process: the executable specification of all others.

`LocalMesh` connects ranks that are threads, or routines of one thread that `CooperativeScheduler` interleaves on a virtual
clock. A send is done only when its receiver has the bytes (a rendezvous), so that code that relies on buffering hangs here.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

from raypar.comm.collectives import MessageBasedTransport
from raypar.comm.phased_operation import OperationMessage, PhasedOperation, tensor_mismatch_error
from raypar.comm.sent_tensor_layout import TensorLayout, empty_message, tensor_of_message
from raypar.comm.transport import generation_over_error
from raypar.errors import CommError

Address = tuple[int, int, int, int]
"""(destination, source, channel, tag)"""


class LocalMesh:
    """All ranks of one generation, in this process. Each rank's transport may be used by a thread of its own.

    It has no address and no further generations, unlike a `comm.transport.WorkerEndpoint`, which is one worker's.
    """

    def __init__(self, size: int, generation: int = 0) -> None:
        self.size = size
        self.generation = generation
        self.departed_ranks: dict[int, str] = {}
        """Rank -> reason, of ranks that have left."""
        self.changed = threading.Condition(threading.RLock())
        """Guards all of the mesh; notified when an operation is settled."""
        self.sends: dict[Address, deque[OperationMessage]] = {}
        """Posted sends without their receives."""
        self.recvs: dict[Address, deque[OperationMessage]] = {}
        """Posted receives without their sends."""
        self.transports = [LocalTransport(self, rank) for rank in range(size)]
        """By rank."""

    def abort(self, reason: str) -> None:
        """Abort every rank: each pending and later call raises `GroupAborted(reason)`."""
        with self.changed:
            for transport in self.transports:
                transport.abort(reason)

    def leave(self, rank: int, reason: str) -> None:
        """Remove a rank: its pending operations are aborted, those of others with it fail."""
        with self.changed:
            self.departed_ranks[rank] = reason
            waiting = [m for table in (self.sends, self.recvs) for queue in table.values() for m in queue]
            for message in waiting:
                if message.operation.transport.rank == rank:
                    message.fail(generation_over_error(reason))
                elif message.peer == rank:
                    message.fail(peer_left_error(message))
            for table in (self.sends, self.recvs):
                for address in [a for a in table if rank in a[:2]]:
                    del table[address]

    def match(self, message: OperationMessage, address: Address, sending: bool) -> None:
        """Deliver a message if its send and its receive are both posted; else keep this half."""
        with self.changed:
            if message.peer in self.departed_ranks:
                message.fail(peer_left_error(message))
                return
            mine, other = (self.sends, self.recvs) if sending else (self.recvs, self.sends)
            queue = other.get(address)
            if queue is None:
                mine.setdefault(address, deque()).append(message)
                return
            found = queue.popleft()
            if not queue:
                del other[address]
            deliver_message(*((message, found) if sending else (found, message)))


def peer_left_error(message: OperationMessage) -> CommError:
    """The error of an operation with a rank that has left."""
    return CommError(
        f"{message.operation.describe()}: rank {message.peer} closed its end",
        cure="abort this group; the ranks that are left form the next generation",
    )


def deliver_message(send: OperationMessage, recv: OperationMessage) -> None:
    """Copy the sent tensor into the receiver's own storage and complete both."""
    message, layout = send.tensor, send.operation.layout
    assert message is not None
    arrived = message if layout is None and recv.tensor is not None else _copy_with_layout(message, layout)
    if recv.tensor is None:
        recv.tensor = arrived.requires_grad_(message.requires_grad and send.channel == 0)
    elif recv.tensor.dtype != arrived.dtype or recv.tensor.shape != arrived.shape:
        recv.fail(tensor_mismatch_error(recv, arrived.dtype, arrived.shape))
        send.complete()
        return
    else:
        with torch.no_grad():
            recv.tensor.copy_(arrived)
    if recv.channel == 0:
        recv.operation.transport.ledger.count("recv", received=message.nbytes)
    recv.complete()
    send.complete()


def _copy_with_layout(message: Tensor, layout: TensorLayout | None) -> Tensor:
    """A copy of what was sent, which lies in memory as the sender's tensor does."""

    def allocate(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=message.device)

    with torch.no_grad():
        if layout is None:
            return allocate(message.shape, message.dtype).copy_(message)
        room = empty_message(layout, message.dtype, allocate)
        return tensor_of_message(room.copy_(message), layout, allocate)


class LocalTransport(MessageBasedTransport):
    """One rank's end of a `LocalMesh`."""

    host_only = False

    def __init__(self, mesh: LocalMesh, rank: int) -> None:
        super().__init__(rank, mesh.size, mesh.generation)
        self.mesh = mesh

    def can_share_memory(self, rank: int) -> bool:
        """See `Transport.can_share_memory`."""
        return True

    def post_send(self, message: OperationMessage) -> None:
        """See `MessageBasedTransport.post_send`."""
        self.check_alive()
        self.mesh.match(message, (message.peer, self.rank, message.channel, message.tag), sending=True)

    def post_recv(self, message: OperationMessage) -> None:
        """See `MessageBasedTransport.post_recv`."""
        self.check_alive()
        self.mesh.match(message, (self.rank, message.peer, message.channel, message.tag), sending=False)

    def wait_for(self, operation: PhasedOperation, timeout_s: float | None) -> bool:
        """See `MessageBasedTransport.wait_for`."""
        with self.mesh.changed:
            return self.mesh.changed.wait_for(lambda: operation.settled, timeout_s)

    def notify_settled(self, operation: PhasedOperation) -> None:
        """See `MessageBasedTransport.notify_settled`."""
        with self.mesh.changed:
            self.mesh.changed.notify_all()

    def abort(self, reason: str) -> None:
        """See `Transport.abort`."""
        with self.mesh.changed:
            if self._aborted is None:
                self._aborted = reason
                self.mesh.leave(self.rank, reason)

    def close(self) -> None:
        """See `Transport.close`."""
        self.abort("the transport was closed")
