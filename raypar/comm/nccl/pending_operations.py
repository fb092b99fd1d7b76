"""The pending operations of one `nccl` transport: launches, remembers, and fails those that can never complete.

The control transport notices a lost peer, whose connections are closed when its process dies; NCCL itself would wait for the
peer forever. A rank that closes sends how many operations it has posted in each communicator; its peers then fail only
operations that it never posted.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from torch import Tensor

from raypar.comm.nccl.bindings import REASON_S, PeerEnded
from raypar.comm.nccl.communicator_stream import CommunicatorStream
from raypar.comm.nccl.device import Device
from raypar.comm.nccl.late_message import CopyStream
from raypar.comm.nccl.operation_handle import NcclHandle
from raypar.comm.tcp.transport import TcpTransport
from raypar.comm.transport import CommunicationLedger, CommunicatorKey, check_peer_rank, generation_over_error
from raypar.errors import CommError

LOCK_CHECK_S = 0.02
"""A thread that waits for another one's launch looks this often whether the transport has ended."""

LOOKED_AT = 2
"""How many pending operations each new one looks at, whether they are over: more than one, so that those that are over go."""

ERROR_POLL_S = 0.01
"""Shortest time between two questions to NCCL for errors that it has found in the background."""


class PendingOperations:
    """Base of `NcclTransport`: launches and tracks operations, and fails those that can never complete. Thread-safe."""

    def __init__(self, control: TcpTransport, device: Device, streams: Mapping[CommunicatorKey, CommunicatorStream]) -> None:
        self.rank = control.rank
        self.size = control.size
        self.generation = control.generation
        self.control = control
        """Carries announcements, host memory and barriers; owned by this transport."""
        self.ledger = control.ledger = CommunicationLedger()
        self.device = device
        self._streams = dict(streams)
        """The communicators of this transport, each with its stream."""
        self.copies = CopyStream(device)
        """Copies messages that their receives could not take at once."""
        self._changed = threading.Condition()
        """Notified when a waiting thread should look at its handle again."""
        self._handles: deque[NcclHandle] = deque()
        """Operations that are not over, or have not been looked at since; those that were looked at last at the end."""
        self._handles_lock = threading.Lock()
        self._aborted: str | None = None
        """The reason, once the transport is aborted or closed."""
        self._broken: CommError | None = None
        """The first error of NCCL itself: it ends the whole group."""
        self._reason_until_s = 0.0
        """Until when the reason of a peer whose end is gone is waited for, once one is (`time.monotonic`)."""
        self._gone: dict[int, str] = {}
        """Rank -> reason, of peers that are lost or have closed."""
        self._posted_by: dict[int, dict[str, int]] = {}
        """Rank -> communicator -> operations that it has posted, of peers that have closed."""
        self._next_poll_s = 0.0
        """When NCCL may be asked for errors again (`time.monotonic`)."""

    # -- launching

    @contextmanager
    def hold_lock(self, lock: threading.Lock) -> Iterator[None]:
        """Hold a lock that another thread may keep while it hangs inside NCCL: an abort frees those that wait for it."""
        while not lock.acquire(timeout=LOCK_CHECK_S):
            self.check_alive()
        try:
            yield
        finally:
            lock.release()

    def launch(
        self,
        stream: CommunicatorStream,
        handle: NcclHandle,
        work: Callable[[], Sequence[Tensor]],
        *,
        after_current: bool = True,
    ) -> None:
        """Enqueue an operation of a communicator whose lock is held. `work` returns memory to keep until it is done.

        With `after_current` the operation runs after what the caller's current stream has been given so far.
        """
        if after_current:
            stream.device_stream.wait_event(self.device.record_event())
        handle.assign_sequence_number(stream)
        stream.operation_count += 1
        try:
            handle.kept = (*handle.kept, *work())
        except CommError as error:
            self._break(error)
            handle.mark_launched(
                stream.device_stream.record_event()
            )  # part of it may be running: its memory is kept until it ends
            raise self.with_reason(error) from error
        handle.mark_launched(stream.device_stream.record_event())

    def stream_of(self, key: CommunicatorKey) -> CommunicatorStream:
        """The communicator that was made for `key`. Raises `CommError` if there is none."""
        stream = self._streams.get(key)
        if stream is None:
            raise CommError(
                f"no communicator was made for {key} (generation {self.generation})",
                cure=f"name it when the group is connected: CommunicatorKey({key.members}, {key.operation!r}, {key.channel})",
            )
        return stream

    def check_peer(self, peer: int) -> None:
        """Raise `CommError` for a rank that is not in the group, or with which this one is not connected."""
        check_peer_rank(peer, self.size)
        self.control.check_connected(peer)

    def check_and_detach(self, tensor: Tensor, peer: int) -> Tensor:
        """The tensor without its autograd history, if it can travel to or from `peer`; raises `CommError` if not."""
        self.check_peer(peer)
        if not tensor.is_contiguous() or not (self.device.owns(tensor) or tensor.device.type == "cpu"):
            strides = tuple(tensor.stride())
            raise CommError(
                f"a tensor of shape {tuple(tensor.shape)} with strides {strides} on {tensor.device} cannot be moved",
                cure=f"pass a contiguous tensor on {self.device.name} or the host (tensor.contiguous())",
            )
        return tensor.detach()

    # -- failing

    def check_alive(self) -> None:
        """Raise what has ended this transport, if anything has."""
        if self._aborted is not None:
            raise generation_over_error(self._aborted)
        if self._broken is not None:
            raise self.with_reason(self._broken)

    def track(self, handle: NcclHandle) -> bool:
        """Remember an operation until it is over. Returns False if it has failed: then it must not be launched."""
        with self._handles_lock:
            for _ in range(min(LOOKED_AT, len(self._handles))):
                one = self._handles.popleft()
                if not one.released:
                    self._handles.append(one)
            if not handle.tracked:
                handle.tracked = True
                self._handles.append(handle)
        self._fail_if_hopeless(handle)
        return not handle.failed

    def _fail_if_hopeless(self, handle: NcclHandle) -> None:
        error = self._reason_to_fail(handle)
        if error is not None:
            handle.fail(error)

    def tracked(self) -> list[NcclHandle]:
        """The operations that are remembered at present; other threads may add to them meanwhile."""
        with self._handles_lock:
            return list(self._handles)

    def fail_hopeless(self) -> None:
        """Fail every operation that can never complete, and wake the threads that wait."""
        for handle in self.tracked():
            self._fail_if_hopeless(handle)
        self.wake()

    def _reason_to_fail(self, handle: NcclHandle) -> CommError | None:
        if self._aborted is not None:
            return generation_over_error(self._aborted)
        cure = "abort this group; the ranks that are left form the next generation"
        if self._broken is not None:
            return type(self._broken)(f"{handle.describe()}: {self._broken.what}", self._broken.cure or cure)
        for peer in handle.peers if handle.needs_peers else ():
            if peer not in self._gone:
                continue
            posted = self._posted_by.get(peer)
            if posted is not None and handle.via_control_transport:
                continue  # the closed peer may have received it; if it was lost, the control transport fails it
            if posted is None or not handle.stream_name or handle.sequence_number > posted.get(handle.stream_name, 0):
                return CommError(f"{handle.describe()}: {self._gone[peer]}", cure=cure)
        return None

    def _break(self, error: CommError) -> None:
        if self._broken is None:
            self._reason_until_s = time.monotonic() + REASON_S
            self._broken = error
        self.fail_hopeless()

    def with_reason(self, error: CommError) -> CommError:
        """A copy of an error that says which peers are gone, if NCCL has said only that a peer's end is.

        NCCL may notice before the control transport does, which is waited for, but not in a thread that reads from peers.
        """
        if not isinstance(error, PeerEnded):
            return type(error)(*error.args)
        if not self.control.reads_in_this_thread():
            with self._changed:
                left_s = self._reason_until_s - time.monotonic()
                self._changed.wait_for(lambda: bool(self._gone) or self._aborted is not None, max(0.0, left_s))
        return CommError("; ".join([error.what, *tuple(self._gone.values())]), error.cure)

    def peer_lost(self, peer: int, reason: str) -> None:
        """The control transport has lost a peer. A peer that has closed before is not lost."""
        if self._aborted is None and peer not in self._gone:
            self._gone[peer] = reason
            self.fail_hopeless()

    def peer_closed(self, peer: int, posted: dict[str, int]) -> None:
        """A peer has closed: what it has posted (communicator -> operations) will complete, nothing else."""
        self._posted_by[peer] = posted
        self._gone[peer] = f"rank {peer} closed its end"
        self.fail_hopeless()

    # -- waiting (see `handle.HandleOwner`)

    def wake(self) -> None:
        """Make threads that wait look at their handles again."""
        with self._changed:
            self._changed.notify_all()

    def sleep(self, pause_s: float) -> None:
        """See `HandleOwner.sleep`."""
        with self._changed:
            self._changed.wait(pause_s)

    def poll(self) -> None:
        """See `HandleOwner.poll`: at most every `ERROR_POLL_S`. One error breaks the whole group."""
        now = time.monotonic()
        if now < self._next_poll_s or self._broken is not None:
            return
        self._next_poll_s = now + ERROR_POLL_S
        for stream in self._streams.values():
            if not stream.lock.acquire(False):
                continue  # it is being used, and the next poll comes soon
            try:
                if self._aborted is None:
                    stream.communicator.raise_background_error()
            except CommError as error:
                self._break(type(error)(f"{stream.name}: {error.what}", error.cure))
                return
            finally:
                stream.lock.release()
