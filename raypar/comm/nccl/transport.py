"""The transport protocol over NCCL: device memory moves in streams, everything else over the sockets of a TCP transport.

Each (operation, group, channel) has a communicator of its own (`communicator`), in which collectives match in the order
of the calls. Messages are announced over the control transport (`tagged_messages`). Collectives on host memory, and
barriers, which move no memory, are the control transport's.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from raypar.comm.collectives import ONE_PHASE_BYTES, even_slices
from raypar.comm.nccl.communicator_stream import CommunicatorStream
from raypar.comm.nccl.device import Device
from raypar.comm.nccl.late_message import CopyStream
from raypar.comm.nccl.operation_handle import NcclBatchHandle, NcclHandle
from raypar.comm.nccl.pending_operations import PendingOperations
from raypar.comm.nccl.tagged_messages import Mailbox
from raypar.comm.operation_phase import Phases
from raypar.comm.recursive_halving import halving_steps
from raypar.comm.sent_tensor_layout import layout_of, message_of
from raypar.comm.tcp.transport import TcpTransport
from raypar.comm.transport import (
    CommunicatorKey,
    Handle,
    check_collective_group,
    check_one_tensor_per_rank,
    check_power_of_two,
)
from raypar.errors import CommError

log = logging.getLogger("raypar")

ABORT_S = 5.0
"""How long `abort` waits for NCCL; what takes longer goes on ending beside whatever comes next."""

END_S = 60.0
"""How long NCCL may take to end communicators, from the abort on; `close` waits for the rest of it, so that no next generation
connects before. After that the process has to be replaced (`unended_communicators`).

Long, because an abort that is slow often is so on all workers of a group: they would end together, with all the state."""

LAUNCH_S = 1.0
"""How long a thread that is just launching something may take before its communicator is aborted, which frees it."""

END_CHECK_S = 0.002
"""Pause between two looks whether a stream has done its last work."""


class NcclTransport(PendingOperations):
    """One rank's end of a generation. Made by `connect_nccl`; owns `control`, and closes it.

    Tensors lie on `device` or in host memory. `report_unended` is called with the names of communicators that NCCL has
    not ended within `END_S`.
    """

    def __init__(
        self,
        control: TcpTransport,
        device: Device,
        streams: Mapping[CommunicatorKey, CommunicatorStream],
        report_unended: Callable[[Sequence[str]], None] = lambda names: None,
    ) -> None:
        super().__init__(control, device, streams)
        self.unended_communicators: tuple[str, ...] = ()
        """Communicators that could not be ended within `END_S`. If there are any, this process has to be replaced."""
        self.mailbox = Mailbox(self)
        """Sends and receives messages, matched by tag."""
        self._report_unended = report_unended
        self._ending = threading.Lock()
        """Held by `abort` and `close`."""
        self._ending_threads: list[threading.Thread] = []
        """They end the communicators."""
        self._ended: set[str] = set()
        """Names of the communicators that have ended."""
        self._end_deadline = 0.0
        """Until when NCCL may take over it."""
        self._closed = False
        self.mailbox.receive_announcements()

    def can_share_memory(self, rank: int) -> bool:
        """See `Transport.can_share_memory`: the memory is a device's, nobody may read it without a message."""
        return False

    # -- messages

    def send(self, tensor: Tensor, *, to: int, tag: int, keep_layout: bool = False) -> NcclHandle:
        """See `Transport.send`."""
        self.check_alive()
        layout = layout_of(tensor) if keep_layout else None
        message = self.check_and_detach(message_of(tensor, layout), to)
        return self.mailbox.send(message, to, tag, tensor.requires_grad, layout)

    def recv(self, out: Tensor | None, *, source: int, tag: int) -> NcclHandle:
        """See `Transport.recv`."""
        self.check_alive()
        return self.mailbox.recv(out, self._out(out, source), source, tag)

    def batch(
        self, sends: Sequence[tuple[Tensor, int, int]], recvs: Sequence[tuple[Tensor | None, int, int]]
    ) -> NcclBatchHandle:
        """See `Transport.batch`: messages of different pairs have communicators of their own, and never wait for each other."""
        self.check_alive()
        outs = [(out, self._out(out, source), source, tag) for out, source, tag in recvs]
        tensors = [(self.check_and_detach(tensor, to), to, tag, tensor.requires_grad) for tensor, to, tag in sends]
        handles = [self.mailbox.recv(*recv) for recv in outs] + [self.mailbox.send(*send) for send in tensors]
        tags = sorted({tag for _, _, tag in (*sends, *recvs)})
        peers = sorted({peer for _, peer, _ in (*sends, *recvs)})
        return NcclBatchHandle(self, f"batch tags {tags}", peers, handles)

    def _out(self, out: Tensor | None, source: int) -> Tensor | None:
        if out is not None:
            return self.check_and_detach(out, source)
        self.check_peer(source)
        return None

    # -- collectives

    def all_reduce(self, flat: Tensor, *, group: Sequence[int], channel: int = 0) -> Handle:
        """See `Transport.all_reduce`."""
        if self._on_host(flat):
            return self.control.all_reduce(flat, group=group, channel=channel)
        key, me, (flat,) = self._enter("all_reduce", group, channel, flat)
        sent, received = all_reduce_bytes(flat, len(key.members), me)
        return self._run(key, [flat], sent, received, lambda: None, lambda stream: stream.all_reduce(flat))

    def halving_all_reduce(self, flat: Tensor, scratch: Tensor, *, group: Sequence[int], channel: int = 0) -> Handle:
        """See `Transport.halving_all_reduce`."""
        if self._on_host(flat):
            return self.control.halving_all_reduce(flat, scratch, group=group, channel=channel)
        check_power_of_two("halving_all_reduce", group)
        key, me, (flat, scratch) = self._enter("halving_all_reduce", group, channel, flat, scratch)
        flat = flat.view(-1)
        steps = halving_steps(even_slices(flat.numel(), len(key.members)), me)
        given = sum(flat[step.given].nbytes for step in steps)
        kept = sum(flat[step.kept].nbytes for step in steps)
        run = lambda stream: stream.halving_all_reduce(flat, scratch)  # noqa: E731
        return self._run(key, [flat, scratch], given + kept, kept + given, lambda: None, run)

    def reduce_scatter(self, out: Tensor, pieces: Sequence[Tensor], *, group: Sequence[int], channel: int = 0) -> Handle:
        """See `Transport.reduce_scatter`."""
        if self._on_host(out):
            return self.control.reduce_scatter(out, pieces, group=group, channel=channel)
        key, me, (out, *parts) = self._enter("reduce_scatter", group, channel, out, *pieces)
        check_one_tensor_per_rank(key.operation, parts, key.members)
        check_own_tensors_match(key, out, parts[me])
        sent = sum(part.nbytes for part in parts) - parts[me].nbytes
        received = out.nbytes * (len(parts) - 1)
        kept = [out, *parts]
        return self._run(
            key, kept, sent, received, lambda: copy_in_stream(parts[0], out), lambda stream: stream.reduce_scatter(out, parts)
        )

    def all_gather(self, pieces: Sequence[Tensor], mine: Tensor, *, group: Sequence[int], channel: int = 0) -> Handle:
        """See `Transport.all_gather`."""
        if self._on_host(mine):
            return self.control.all_gather(pieces, mine, group=group, channel=channel)
        key, me, (mine, *outs) = self._enter("all_gather", group, channel, mine, *pieces)
        check_one_tensor_per_rank(key.operation, outs, key.members)
        check_own_tensors_match(key, mine, outs[me])
        sent = mine.nbytes * (len(outs) - 1)
        received = sum(out.nbytes for out in outs) - outs[me].nbytes
        kept = [mine, *outs]
        return self._run(
            key, kept, sent, received, lambda: copy_in_stream(mine, outs[0]), lambda stream: stream.all_gather(outs, mine)
        )

    def all_to_all(self, outs: Sequence[Tensor], pieces: Sequence[Tensor], *, group: Sequence[int], channel: int = 0) -> Handle:
        """See `Transport.all_to_all`."""
        if self._on_host(*pieces[:1]):
            return self.control.all_to_all(outs, pieces, group=group, channel=channel)
        key, me, both = self._enter("all_to_all", group, channel, *outs, *pieces)
        into, parts = both[: len(outs)], both[len(outs) :]
        check_one_tensor_per_rank(key.operation, into, key.members)
        check_one_tensor_per_rank(key.operation, parts, key.members)
        check_own_tensors_match(key, into[me], parts[me])
        sent = sum(part.nbytes for part in parts) - parts[me].nbytes
        received = sum(out.nbytes for out in into) - into[me].nbytes
        return self._run(
            key, both, sent, received, lambda: copy_in_stream(parts[0], into[0]), lambda stream: stream.all_to_all(into, parts)
        )

    def broadcast(self, tensor: Tensor, *, root: int, group: Sequence[int], channel: int = 0) -> Handle:
        """See `Transport.broadcast`. Counted as if the root sent to each rank."""
        if self._on_host(tensor):
            return self.control.broadcast(tensor, root=root, group=group, channel=channel)
        key, me, (tensor,) = self._enter("broadcast", group, channel, tensor)
        if root not in key.members:
            raise CommError(f"broadcast root {root} is not in group {key.members}", cure="give a rank of the group")
        index = key.members.index(root)
        sent, received = (tensor.nbytes * (len(key.members) - 1), 0) if me == index else (0, tensor.nbytes)
        return self._run(key, [tensor], sent, received, lambda: None, lambda stream: stream.broadcast(tensor, index))

    def run_before(
        self,
        operation: str,
        work: Callable[[], None],
        *,
        group: Sequence[int],
        channel: int = 0,
        after: Handle | None = None,
        keep: Sequence[Tensor] = (),
    ) -> NcclHandle | None:
        """See `Transport.run_before`. It has no stream of its own (see `run_after`): it runs in that of the collectives."""
        if self._on_host(*keep[:1]) or not (after is None or isinstance(after, NcclHandle)):
            return None
        if after is not None and after.event is None:
            after.done()  # it has failed, which this raises
        key = CommunicatorKey(tuple(group), operation, channel)
        return self._enqueue(f"copies before {operation}", key, work, after, keep, after_current=True)

    def run_after(
        self,
        after: Handle,
        work: Callable[[], None],
        *,
        group: Sequence[int],
        channel: int = 0,
        operation: str = "all_gather",
    ) -> NcclHandle | None:
        """See `Transport.run_after`. It has no stream of its own, which might share a hardware queue with a communicator's and
        hold that up while it waits: it runs in the stream of the group's all-gathers, or of other collectives."""
        if not isinstance(after, NcclHandle) or after.event is None:
            return None
        key = CommunicatorKey(tuple(group), operation, channel)
        return self._enqueue(f"additions after {after.name}", key, work, after, (), after_current=False)

    def _enqueue(
        self,
        name: str,
        key: CommunicatorKey,
        work: Callable[[], None],
        after: NcclHandle | None,
        keep: Sequence[Tensor],
        *,
        after_current: bool,
    ) -> NcclHandle:
        """Enqueue work in a communicator's stream, behind `after` and with `after_current` behind the current stream."""
        self.check_alive()
        stream = self.stream_of(key)
        handle = NcclHandle(self, name, after.peers if after is not None else (), tuple(keep))
        if after is not None:
            handle.stream_name, handle.sequence_number = after.stream_name, after.sequence_number  # it fails when that fails
        with self.hold_lock(stream.lock):
            if self.track(handle):
                if after_current:
                    stream.device_stream.wait_event(self.device.record_event())
                if after is not None and after.event is not None:
                    stream.device_stream.wait_event(after.event)
                stream.device_stream.run(work)
                handle.mark_launched(stream.device_stream.record_event())
        return handle

    def run_phases(self, phases: Phases, *, group: Sequence[int], channel: int = 0) -> Handle:
        """See `Transport.run_phases`: messages lie in host memory."""
        self.check_alive()
        return self.control.run_phases(phases, group=group, channel=channel)

    def barrier(self, *, group: Sequence[int], channel: int = 0) -> Handle:
        """See `Transport.barrier`."""
        self.check_alive()
        return self.control.barrier(group=group, channel=channel)

    def _on_host(self, *tensors: Tensor) -> bool:
        """Whether a collective on these tensors is the control transport's."""
        self.check_alive()
        return any(t.device.type == "cpu" and not self.device.owns(t) for t in tensors)

    def _enter(
        self, name: str, group: Sequence[int], channel: int, *tensors: Tensor
    ) -> tuple[CommunicatorKey, int, list[Tensor]]:
        """Check a collective call. Returns its key, this rank's index in the group, the tensors without autograd history."""
        self.check_alive()
        members = tuple(group)
        check_collective_group(name, members, self.rank, self.size)
        self.control.check_connected(*members)
        key = CommunicatorKey(members, name, channel)
        return key, members.index(self.rank), [self.check_and_detach(tensor, self.rank) for tensor in tensors]

    def _run(
        self,
        key: CommunicatorKey,
        kept: Sequence[Tensor],
        sent: int,
        received: int,
        alone: Callable[[], None],
        together: Callable[[CommunicatorStream], Sequence[Tensor]],
    ) -> NcclHandle:
        """Post a collective: `alone` in a group of one, else `together` in its communicator, which returns memory to keep."""
        handle = NcclHandle(self, key.operation, [r for r in key.members if r != self.rank], kept)
        if len(key.members) == 1:
            alone()
            handle.mark_launched(self.device.record_event())
        else:
            stream = self.stream_of(key)
            with self.hold_lock(stream.lock):
                handle.assign_sequence_number(stream)
                if self.track(handle):
                    self.launch(stream, handle, lambda: together(stream))
        self.ledger.count(key.operation, sent=sent, received=received)
        return handle

    # -- ending

    def abort(self, reason: str) -> None:
        """See `Transport.abort`. Waiting calls are freed first; then all communicators are aborted together."""
        with self._ending:
            if self._aborted is not None:
                return
            self._aborted = reason
            self.fail_hopeless()
            self.control.abort(reason)
            self._begin_to_end_streams(gently=False)
            ending = self._wait_for_streams(min(time.monotonic() + ABORT_S, self._end_deadline))
            if ending and time.monotonic() < self._end_deadline:
                log.warning(
                    "rank %d, generation %d: NCCL has not ended %s within %g s; the next generation waits for it, %g s at most",
                    self.rank, self.generation, ", ".join(ending), ABORT_S, END_S,
                )  # fmt: skip
            elif ending:
                self._wait_until_streams_have_ended()

    def forget_freed_memory(self) -> None:
        """See `Transport.forget_freed_memory`: in host memory. That of devices is PyTorch's allocator's."""
        self.control.forget_freed_memory()

    def close(self) -> None:
        """See `Transport.close`. A rank that has nothing in flight leaves without disturbing the others."""
        with self._ending:
            if self._closed:
                return
            self._closed = True
            if self._aborted is None:
                lost = any(peer not in self._posted_by for peer in tuple(self._gone))  # threads may add to it
                gently = self._broken is None and not lost and not any(one.in_flight for one in self.tracked())
                gently = gently and self.mailbox.send_goodbye(self._streams.values(), LAUNCH_S)
                self._aborted = "the transport was closed"
                self.fail_hopeless()
                self._begin_to_end_streams(gently=gently)
            if not self.unended_communicators:
                self._wait_until_streams_have_ended()
            for stream in self._all_streams():
                if stream.name not in self.unended_communicators:
                    stream.device_stream.close()
            self.mailbox.clear()
            if self.unended_communicators:
                self.control.abort(self._aborted)  # its thread may be the one that is inside NCCL: it is not waited for
            else:
                self.control.close()
                self._handles.clear()

    def _begin_to_end_streams(self, *, gently: bool) -> None:
        """Destroy or abort all communicators at the same time: one alone may wait for what another one holds."""
        self._end_deadline = time.monotonic() + END_S
        self._ending_threads = [
            threading.Thread(target=self._end_stream, args=(stream, gently), daemon=True) for stream in self._streams.values()
        ]
        if self.copies.end():
            self._ending_threads.append(threading.Thread(target=self._end_copies, daemon=True))
        for thread in self._ending_threads:
            thread.start()

    def _all_streams(self) -> list[CommunicatorStream | CopyStream]:
        """All that may hold work: the communicators', and that of copies if there were any."""
        return [*self._streams.values(), *([self.copies] if self.copies.used else [])]

    def _wait_for_streams(self, until: float) -> tuple[str, ...]:
        """Wait until the communicators have ended, or until a moment; the names of those that have not."""
        for thread in self._ending_threads:
            thread.join(max(0.0, until - time.monotonic()))
        return tuple(stream.name for stream in self._all_streams() if stream.name not in self._ended)

    def _wait_until_streams_have_ended(self) -> None:
        self.unended_communicators = self._wait_for_streams(self._end_deadline)
        if self.unended_communicators:
            self._report_unended(self.unended_communicators)
            log.error(
                "rank %d, generation %d: NCCL has not ended %s within %g s; this process has to be replaced",
                self.rank, self.generation, ", ".join(self.unended_communicators), END_S,
            )  # fmt: skip

    def _end_stream(self, stream: CommunicatorStream, gently: bool) -> None:
        """End one communicator; add its name to `_ended` once nothing of it is left.

        That includes the work of its stream after NCCL (additions, copies), whose memory would otherwise be given to others
        while it is still written to.
        """
        try:
            self.device.bind()
            locked = stream.lock.acquire(timeout=LAUNCH_S)
            try:
                if gently:
                    stream.communicator.destroy()
                else:
                    stream.communicator.abort()
            except CommError as error:
                log.warning("rank %d, generation %d, %s: %s", self.rank, self.generation, stream.name, error.what)
            finally:
                if locked:
                    stream.lock.release()
            if not stream.lock.acquire(timeout=max(0.0, self._end_deadline - time.monotonic())):
                return  # a launch is still inside NCCL
            stream.lock.release()
            self._finish_work(stream)
        except RuntimeError as error:  # PyTorch's, of a device that has failed
            log.warning("rank %d, generation %d, %s: %s", self.rank, self.generation, stream.name, error)

    def _end_copies(self) -> None:
        try:
            self.device.bind()
            self._finish_work(self.copies)
        except RuntimeError as error:  # as above
            log.warning("rank %d, generation %d, %s: %s", self.rank, self.generation, self.copies.name, error)

    def _finish_work(self, of: CommunicatorStream | CopyStream) -> None:
        """Wait until a stream has done its last work, then add its name to `_ended`."""
        last = of.device_stream.record_event()
        while not last.query():
            if time.monotonic() > self._end_deadline:
                return
            time.sleep(END_CHECK_S)
        self._ended.add(of.name)


def copy_in_stream(source: Tensor, target: Tensor) -> None:
    """Copy in the current stream, unless source and target are one."""
    if source.data_ptr() != target.data_ptr():
        with torch.no_grad():
            target.copy_(source)


def check_own_tensors_match(key: CommunicatorKey, one: Tensor, other: Tensor) -> None:
    """Raise `CommError` unless a rank's own part has one size and dtype in both places.

    NCCL is given one size for both, and would write over other memory.
    """
    if one.numel() != other.numel() or one.dtype != other.dtype:
        found = [f"{tensor.dtype} {tuple(tensor.shape)}" for tensor in (one, other)]
        raise CommError(
            f"{key.operation} got {found[0]} and {found[1]} for this rank's own part",
            cure="give it the same size and dtype in both",
        )


def all_reduce_bytes(flat: Tensor, size: int, me: int) -> tuple[int, int]:
    """(sent, received) of an all-reduce as `comm.collectives` does it; for large ones those of a ring."""
    if flat.nbytes <= ONE_PHASE_BYTES:
        return flat.nbytes * (size - 1), flat.nbytes * (size - 1)
    cut = even_slices(flat.numel(), size)
    mine = (cut[me][1] - cut[me][0]) * flat.itemsize
    others = flat.nbytes - mine
    return others + (size - 1) * mine, (size - 1) * mine + others
