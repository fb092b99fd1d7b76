"""The transport inside one process: the executable specification of all others.

`LocalMesh` connects ranks that are threads, or routines of one thread that `CooperativeScheduler` interleaves on a virtual
clock. A send is done only when its receiver has the bytes (a rendezvous), so that code that relies on buffering hangs here.
"""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

import torch
from torch import Tensor

from raypar.comm.collectives import MessageBasedTransport
from raypar.comm.nonblocking_operation import PhasedOperation, PostedMessage, tensor_mismatch_error
from raypar.comm.tensor_layout import TensorLayout, empty_message, tensor_of_message
from raypar.comm.transport import Handle, Routine, RoutineWait, generation_over_error
from raypar.errors import CommError, GroupAborted

T = TypeVar("T")

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
        self.sends: dict[Address, deque[PostedMessage]] = {}
        """Posted sends without their receives."""
        self.recvs: dict[Address, deque[PostedMessage]] = {}
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

    def match(self, message: PostedMessage, address: Address, sending: bool) -> None:
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


def peer_left_error(message: PostedMessage) -> CommError:
    """The error of an operation with a rank that has left."""
    return CommError(
        f"{message.operation.describe()}: rank {message.peer} closed its end",
        cure="abort this group; the ranks that are left form the next generation",
    )


def deliver_message(send: PostedMessage, recv: PostedMessage) -> None:
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

    def post_send(self, message: PostedMessage) -> None:
        """See `MessageBasedTransport.post_send`."""
        self._check_alive()
        self.mesh.match(message, (message.peer, self.rank, message.channel, message.tag), sending=True)

    def post_recv(self, message: PostedMessage) -> None:
        """See `MessageBasedTransport.post_recv`."""
        self._check_alive()
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


@dataclass(frozen=True, slots=True)
class RoutineSpan:
    """One interval of a cooperative run, in virtual milliseconds, in which a routine worked or waited."""

    routine: int
    label: str
    start_ms: float
    end_ms: float
    kind: Literal["work", "wait"]


class CooperativeScheduler:
    """Interleaves routines in one thread, on a virtual clock.

    The runnable routine with the lowest clock goes next; among equals the lowest index, or with a `seed` a random one, so
    that many seeds explore many interleavings. A routine runs until it yields: `RoutineWork` advances its clock, `RoutineWait`
    blocks it until the handle is done.
    """

    def __init__(self, seed: int | None = None, trace: bool = False) -> None:
        self._random = None if seed is None else random.Random(seed)
        self._trace = trace
        """Whether to record `spans`."""
        self.spans: list[RoutineSpan] = []
        """Of the last run."""
        self.makespan_ms = 0.0
        """Of the last run."""

    def run(self, routines: Sequence[Routine[T]], mesh: LocalMesh | None = None) -> list[T]:
        """Run all to their end and return their results.

        The first exception of a routine aborts `mesh` (if given), is thrown as `GroupAborted` into the other routines and
        is raised again. Raises `CommError` with the list of all waits when no routine can go on.
        """
        self.spans = []
        clocks = [0.0] * len(routines)
        results: dict[int, T] = {}
        runnable: dict[int, Exception | None] = dict.fromkeys(range(len(routines)))
        blocked: dict[int, RoutineWait] = {}
        while runnable or blocked:
            if not runnable:
                raise self._stop(routines, list(blocked), mesh, deadlock_error(blocked, clocks))
            soonest = min(clocks[i] for i in runnable)
            ready = sorted(i for i in runnable if clocks[i] == soonest)
            index = ready[0] if self._random is None else self._random.choice(ready)
            failed = runnable.pop(index)
            now = clocks[index]
            try:
                operation = next(routines[index]) if failed is None else routines[index].throw(failed)
            except StopIteration as end:
                results[index] = end.value
            except Exception as error:
                raise self._stop(routines, [*runnable, *blocked], mesh, error) from None
            else:
                if isinstance(operation, RoutineWait):
                    blocked[index] = operation
                else:
                    clocks[index] = now + operation.cost_ms
                    runnable[index] = None
                    self._span(index, str(operation.instruction), now, clocks[index], "work")
            for other, wait in list(blocked.items()):
                settled, error_of_wait = poll_handle(wait.handle)
                if settled:
                    del blocked[other]
                    runnable[other] = error_of_wait
                    self._span(other, wait.what, clocks[other], now, "wait")
                    clocks[other] = max(clocks[other], now)
        self.makespan_ms = max(clocks, default=0.0)
        return [results[index] for index in range(len(routines))]

    def _span(self, routine: int, label: str, start_ms: float, end_ms: float, kind: Literal["work", "wait"]) -> None:
        if self._trace and end_ms > start_ms:
            self.spans.append(RoutineSpan(routine, label, start_ms, end_ms, kind))

    def _stop(
        self, routines: Sequence[Routine[T]], others: Sequence[int], mesh: LocalMesh | None, error: Exception
    ) -> Exception:
        """End all other routines as an abort would; returns the error to raise."""
        reason = f"another routine of the group stopped: {type(error).__name__}: {error}"
        if mesh is not None:
            mesh.abort(reason)
        for index in others:
            # Errors raised while they are stopped are consequences; only the first error is reported.
            try:
                routines[index].throw(GroupAborted(reason))
            except (Exception, StopIteration):
                continue
            routines[index].close()
        return error


def poll_handle(handle: Handle) -> tuple[bool, Exception | None]:
    """(settled, error) of a handle, without blocking."""
    try:
        return handle.done(), None
    except Exception as error:
        return True, error


def deadlock_error(blocked: dict[int, RoutineWait], clocks: Sequence[float]) -> CommError:
    """The error when no routine can go on: what each of them waits for."""
    lines = [f"routine {i} at {clocks[i]:g} ms waits for {wait.what}" for i, wait in sorted(blocked.items())]
    return CommError(
        "deadlock: nobody can go on\n    " + "\n    ".join(lines),
        cure="a send or receive is missing, or two ranks post them in orders that wait for each other",
    )
