"""The transport protocol over NCCL: device memory moves in streams, words about it over the sockets of a `cpu` transport.

Collectives need no words: each (operation, group, channel) has a lane of its own (`nccl_lane`), in which the order of
calls is the order of matching.

Messages are `nccl_messages`. Host tensors' collectives, and barriers, which are about calls and not about memory, are the
control transport's.

A lost peer is noticed by the control transport, whose connections a dying process closes; NCCL itself would wait for it
for ever. Whoever ends says goodbye with the numbers of what it has posted, so that others fail what can never complete
and nothing else.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from raypar.comm.collectives import ONE_PHASE_BYTES, even_slices
from raypar.comm.communication_ledger import CommunicationLedger
from raypar.comm.communicator_key import CommunicatorKey
from raypar.comm.nccl.communicator_stream import CommunicatorStream
from raypar.comm.nccl.device import Device
from raypar.comm.nccl.handle import NcclBatchHandle, NcclHandle
from raypar.comm.nccl.messages import Mailbox
from raypar.comm.tcp.transport import TcpTransport
from raypar.comm.transport import Handle
from raypar.errors import CommError, GroupAborted

log = logging.getLogger("raypar")

ABORT_S = 5.0
"""How long `abort` and `close` wait for NCCL; after that the process has to be replaced (`stuck` says so)."""

LAUNCH_S = 1.0
"""Whoever is just launching something gets so long before its communicator is aborted. A launch that hangs is freed by that."""

LOOK_S = 0.02
"""Who waits for another thread's launch looks so often whether it is still worth it."""

POLL_S = 0.01
"""Errors that NCCL found in the background are asked for at most so often."""


class NcclTransport:
    """One rank's end of a generation. Made by `nccl_connect.connect`; owns `control`, and closes it.

    Tensors lie on `device` or in host memory. `stuck`: what `abort` or `close` could not end within `ABORT_S`; if there is
    anything, this process is to be killed.
    """

    carries_shapes = True

    def __init__(self, control: TcpTransport, device: Device, lanes: Mapping[CommunicatorKey, CommunicatorStream]) -> None:
        self.rank = control.rank
        self.size = control.size
        self.generation = control.generation
        self.control = control
        self.ledger = control.ledger = CommunicationLedger()
        self.device = device
        self.stuck: tuple[str, ...] = ()
        self._lanes = dict(lanes)
        self._changed = threading.Condition()
        self._flights: list[NcclHandle] = []
        self._flights_lock = threading.Lock()
        self.mailbox = Mailbox(self)
        self._ending = threading.Lock()
        self._aborted: str | None = None
        self._broken: CommError | None = None
        self._closed = False
        self._gone: dict[int, str] = {}
        self._left: dict[int, dict[str, int]] = {}
        """Of those who have said goodbye: how many operations they have posted in each lane that we share."""
        self._next_poll_s = 0.0
        self.mailbox.listen()

    def near(self, rank: int) -> bool:
        """See `Transport.near`: the memory is a device's, nobody may read it without a message."""
        return False

    # -- messages

    def send(self, tensor: Tensor, *, to: int, tag: int) -> NcclHandle:
        """See `Transport.send`."""
        self.check_alive()
        return self.mailbox.send(self.checked(tensor, to), to, tag)

    def recv(self, out: Tensor | None, *, source: int, tag: int) -> NcclHandle:
        """See `Transport.recv`."""
        self.check_alive()
        return self.mailbox.recv(out, self._out(out, source), source, tag)

    def batch(
        self, sends: Sequence[tuple[Tensor, int, int]], recvs: Sequence[tuple[Tensor | None, int, int]]
    ) -> NcclBatchHandle:
        """See `Transport.batch`: its messages have lanes of their own, so that they never wait for each other."""
        self.check_alive()
        outs = [(out, self._out(out, source), source, tag) for out, source, tag in recvs]
        tensors = [(self.checked(tensor, to), to, tag) for tensor, to, tag in sends]
        flights = [self.mailbox.recv(*recv) for recv in outs] + [self.mailbox.send(*send) for send in tensors]
        tags = sorted({tag for _, _, tag in (*sends, *recvs)})
        peers = sorted({peer for _, peer, _ in (*sends, *recvs)})
        return NcclBatchHandle(self, f"batch tags {tags}", peers, flights)

    def _out(self, out: Tensor | None, source: int) -> Tensor | None:
        self._check_rank(source)
        return None if out is None else self.checked(out, source)

    # -- collectives

    def all_reduce(self, flat: Tensor, *, group: Sequence[int], channel: int = 0) -> Handle:
        """See `Transport.all_reduce`."""
        if self._on_host(flat):
            return self.control.all_reduce(flat, group=group, channel=channel)
        wire, me, (flat,) = self._entered("all_reduce", group, channel, flat)
        sent, received = all_reduce_bytes(flat, len(wire.members), me)
        return self._run(wire, [flat], sent, received, lambda: None, lambda lane: lane.all_reduce(flat))

    def reduce_scatter(self, out: Tensor, pieces: Sequence[Tensor], *, group: Sequence[int], channel: int = 0) -> Handle:
        """See `Transport.reduce_scatter`."""
        if self._on_host(out):
            return self.control.reduce_scatter(out, pieces, group=group, channel=channel)
        wire, me, (out, *parts) = self._entered("reduce_scatter", group, channel, out, *pieces)
        check_count(wire, parts)
        check_same(wire, out, parts[me])
        sent = sum(part.nbytes for part in parts) - parts[me].nbytes
        received = out.nbytes * (len(parts) - 1)
        kept = [out, *parts]
        return self._run(
            wire, kept, sent, received, lambda: copy_in_stream(parts[0], out), lambda lane: lane.reduce_scatter(out, parts)
        )

    def all_gather(self, pieces: Sequence[Tensor], mine: Tensor, *, group: Sequence[int], channel: int = 0) -> Handle:
        """See `Transport.all_gather`."""
        if self._on_host(mine):
            return self.control.all_gather(pieces, mine, group=group, channel=channel)
        wire, me, (mine, *outs) = self._entered("all_gather", group, channel, mine, *pieces)
        check_count(wire, outs)
        check_same(wire, mine, outs[me])
        sent = mine.nbytes * (len(outs) - 1)
        received = sum(out.nbytes for out in outs) - outs[me].nbytes
        kept = [mine, *outs]
        return self._run(
            wire, kept, sent, received, lambda: copy_in_stream(mine, outs[0]), lambda lane: lane.all_gather(outs, mine)
        )

    def all_to_all(self, outs: Sequence[Tensor], pieces: Sequence[Tensor], *, group: Sequence[int], channel: int = 0) -> Handle:
        """See `Transport.all_to_all`."""
        if self._on_host(*pieces[:1]):
            return self.control.all_to_all(outs, pieces, group=group, channel=channel)
        wire, me, both = self._entered("all_to_all", group, channel, *outs, *pieces)
        into, parts = both[: len(outs)], both[len(outs) :]
        check_count(wire, into)
        check_count(wire, parts)
        check_same(wire, into[me], parts[me])
        sent = sum(part.nbytes for part in parts) - parts[me].nbytes
        received = sum(out.nbytes for out in into) - into[me].nbytes
        return self._run(
            wire, both, sent, received, lambda: copy_in_stream(parts[0], into[0]), lambda lane: lane.all_to_all(into, parts)
        )

    def broadcast(self, tensor: Tensor, *, root: int, group: Sequence[int], channel: int = 0) -> Handle:
        """See `Transport.broadcast`. Counted as if the root sent to each rank."""
        if self._on_host(tensor):
            return self.control.broadcast(tensor, root=root, group=group, channel=channel)
        wire, me, (tensor,) = self._entered("broadcast", group, channel, tensor)
        if root not in wire.members:
            raise CommError(f"broadcast root {root} is not in group {wire.members}", cure="give a rank of the group")
        index = wire.members.index(root)
        sent, received = (tensor.nbytes * (len(wire.members) - 1), 0) if me == index else (0, tensor.nbytes)
        return self._run(wire, [tensor], sent, received, lambda: None, lambda lane: lane.broadcast(tensor, index))

    def barrier(self, *, group: Sequence[int], channel: int = 0) -> Handle:
        """See `Transport.barrier`."""
        self.check_alive()
        return self.control.barrier(group=group, channel=channel)

    def _on_host(self, *tensors: Tensor) -> bool:
        """Whether a collective is the control transport's."""
        self.check_alive()
        return any(t.device.type == "cpu" and not self.device.owns(t) for t in tensors)

    def _entered(
        self, name: str, group: Sequence[int], channel: int, *tensors: Tensor
    ) -> tuple[CommunicatorKey, int, list[Tensor]]:
        """A collective call, checked: what it is, our index in the group, the tensors without their history."""
        self.check_alive()
        members = tuple(group)
        ascending = list(members) == sorted(set(members) & set(range(self.size)))
        if not ascending or self.rank not in members:
            raise CommError(
                f"{name} of rank {self.rank} (of {self.size}) over group {members}",
                cure="a group is an ascending list of ranks that contains the caller",
            )
        wire = CommunicatorKey(members, name, channel)
        return wire, members.index(self.rank), [self.checked(tensor, self.rank) for tensor in tensors]

    def _run(
        self,
        wire: CommunicatorKey,
        kept: Sequence[Tensor],
        sent: int,
        received: int,
        alone: Callable[[], None],
        together: Callable[[CommunicatorStream], Sequence[Tensor]],
    ) -> NcclHandle:
        """Post a collective: `alone` in a group of one, else `together` in its lane, which returns more to be kept."""
        flight = NcclHandle(self, wire.operation, [r for r in wire.members if r != self.rank], kept)
        if len(wire.members) == 1:
            alone()
            flight.launch(self.device.mark())
        else:
            lane = self.lane(wire)
            with self.hold(lane.lock):
                flight.take_turn(lane)
                if self.track(flight):
                    self.launch(lane, flight, lambda: together(lane))
        self.ledger.count(wire.operation, sent=sent, received=received)
        return flight

    # -- parts of the above

    @contextmanager
    def hold(self, lock: threading.Lock) -> Iterator[None]:
        """With a lock that a launch which hangs inside NCCL may keep: an abort frees those who wait for it."""
        while not lock.acquire(timeout=LOOK_S):
            self.check_alive()
        try:
            yield
        finally:
            lock.release()

    def launch(
        self, lane: CommunicatorStream, flight: NcclHandle, work: Callable[[], Sequence[Tensor]], *, after_current: bool = True
    ) -> None:
        """Enqueue an operation of a lane whose lock is held; after what the current stream has, or after `flight.start`."""
        start = self.device.mark() if after_current else flight.start
        if start is not None:
            lane.stream.follow(start)
        flight.take_turn(lane)
        lane.calls += 1
        try:
            flight.kept = (*flight.kept, *work())
        except CommError as error:
            self._break(error)
            flight.launch(lane.stream.mark())  # some of it may be under way: its memory is kept until it is over
            raise
        flight.launch(lane.stream.mark())

    def lane(self, wire: CommunicatorKey) -> CommunicatorStream:
        """The lane that was made for it."""
        lane = self._lanes.get(wire)
        if lane is None:
            raise CommError(
                f"no communicator was made for {wire} (generation {self.generation})",
                cure=f"name it when the group is connected: Wire({wire.members}, {wire.operation!r}, {wire.channel})",
            )
        return lane

    def _check_rank(self, peer: int) -> None:
        if not 0 <= peer < self.size:
            raise CommError(f"rank {peer} is not in a mesh of {self.size}", cure=f"use a rank from 0 to {self.size - 1}")

    def checked(self, tensor: Tensor, peer: int) -> Tensor:
        """A tensor that can travel to or from `peer`, without its history."""
        self._check_rank(peer)
        if not tensor.is_contiguous() or not (self.device.owns(tensor) or tensor.device.type == "cpu"):
            strides = tuple(tensor.stride())
            raise CommError(
                f"a tensor of shape {tuple(tensor.shape)} with strides {strides} on {tensor.device} cannot be moved",
                cure=f"pass a contiguous tensor on {self.device.name} or the host (tensor.contiguous())",
            )
        return tensor.detach()

    def check_alive(self) -> None:
        """Raise what has ended this transport, if anything has."""
        if self._aborted is not None:
            raise GroupAborted(self._aborted, cure="this generation is over; connect the next one")
        if self._broken is not None:
            raise CommError(*self._broken.args)

    def track(self, flight: NcclHandle) -> bool:
        """Remember a flight until it is over, and fail it if it can never be; whether it may still be launched."""
        with self._flights_lock:
            self._flights = [f for f in self._flights if not f.over]
            if flight not in self._flights:
                self._flights.append(flight)
        self._settle(flight)
        return flight.good

    def _settle(self, flight: NcclHandle) -> None:
        """Fail a flight that can never complete."""
        error = self._verdict(flight)
        if error is not None:
            flight.fail(error)

    def _settle_all(self) -> None:
        with self._flights_lock:
            flights = list(self._flights)
        for flight in flights:
            self._settle(flight)
        self.wake()

    def _verdict(self, flight: NcclHandle) -> CommError | None:
        if self._aborted is not None:
            return GroupAborted(self._aborted, cure="this generation is over; connect the next one")
        cure = "abort this group; the ranks that are left form the next generation"
        if self._broken is not None:
            return CommError(f"{flight.describe()}: {self._broken.what}", cure=self._broken.cure or cure)
        for peer in flight.peers:
            if peer not in self._gone:
                continue
            posted = self._left.get(peer)
            if posted is not None and flight.told:
                continue  # who leaves may have it already, before we have looked whether it is out: a lost one fails by itself
            if posted is None or not flight.lane or flight.number > posted.get(flight.lane, 0):
                return CommError(f"{flight.describe()}: {self._gone[peer]}", cure=cure)
        return None

    def wake(self) -> None:
        """Those who wait for flights shall look again."""
        with self._changed:
            self._changed.notify_all()

    def attend(self, pause_s: float) -> None:
        """Somebody waits for a flight: sleep until something may have changed."""
        with self._changed:
            self._changed.wait(pause_s)

    def poll(self) -> None:
        """Ask NCCL for errors it has found in the background; at most every `POLL_S`. One breaks the whole group."""
        now = time.monotonic()
        if now < self._next_poll_s or self._broken is not None:
            return
        self._next_poll_s = now + POLL_S
        for lane in self._lanes.values():
            if not lane.lock.acquire(False):
                continue  # it is being used, and the next turn comes soon
            try:
                if self._aborted is None:
                    lane.communicator.check()
            except CommError as error:
                self._break(CommError(f"{lane.name}: {error.what}", error.cure))
                return
            finally:
                lane.lock.release()

    def _break(self, error: CommError) -> None:
        if self._broken is None:
            self._broken = error
        self._settle_all()

    # -- ending

    def lose(self, peer: int, reason: str) -> None:
        """The control transport has lost a peer. Who has said goodbye before is not lost."""
        if self._aborted is None and peer not in self._gone:
            self._gone[peer] = reason
            self._settle_all()

    def part(self, peer: int, posted: dict[str, int]) -> None:
        """A peer says goodbye: what it has posted will complete, nothing else."""
        self._left[peer] = posted
        self._gone[peer] = f"rank {peer} closed its end"
        self._settle_all()

    def abort(self, reason: str) -> None:
        """See `Transport.abort`. Waiting calls are freed first; then all communicators are aborted together."""
        with self._ending:
            if self._aborted is not None:
                return
            self._aborted = reason
            self._settle_all()
            self.control.abort(reason)
            self._end_lanes(gently=False)

    def close(self) -> None:
        """See `Transport.close`. A rank that has nothing in flight leaves without disturbing the others."""
        with self._ending:
            if self._closed:
                return
            self._closed = True
            if self._aborted is None:
                lost = any(peer not in self._left for peer in self._gone)
                gently = self._broken is None and not lost and not any(f.in_flight for f in self._flights)
                gently = gently and self.mailbox.goodbye(self._lanes.values(), LAUNCH_S)
                self._aborted = "the transport was closed"
                self._settle_all()
                self._end_lanes(gently=gently)
            for lane in self._lanes.values():
                if lane.name not in self.stuck:
                    lane.stream.close()
            self.mailbox.clear()
            if self.stuck:
                self.control.abort(self._aborted)  # its thread may be the one that is inside NCCL: it is not waited for
            else:
                self.control.close()
                self._flights.clear()

    def _end_lanes(self, *, gently: bool) -> None:
        """Destroy or abort all communicators at the same time: one alone may wait for what another one holds."""
        ended: set[str] = set()
        deadline = time.monotonic() + ABORT_S
        ending = [
            threading.Thread(target=self._end_lane, args=(lane, gently, deadline, ended), daemon=True)
            for lane in self._lanes.values()
        ]
        for thread in ending:
            thread.start()
        for thread in ending:
            thread.join(max(0.0, deadline - time.monotonic()))
        self.stuck = tuple(lane.name for lane in self._lanes.values() if lane.name not in ended)
        if self.stuck:
            log.error(
                "rank %d, generation %d: NCCL has not ended %s within %g s; this process has to be replaced",
                self.rank, self.generation, ", ".join(self.stuck), ABORT_S,
            )  # fmt: skip

    def _end_lane(self, lane: CommunicatorStream, gently: bool, deadline: float, ended: set[str]) -> None:
        """`ended` gets its name when nothing of it is left: of NCCL, and of what the lane's stream does after NCCL (additions,
        copies), whose memory would else be given to others while it is still written to."""
        try:
            self.device.bind()
            locked = lane.lock.acquire(timeout=LAUNCH_S)
            try:
                if gently:
                    lane.communicator.destroy()
                else:
                    lane.communicator.abort()
            except CommError as error:
                log.warning("rank %d, generation %d, %s: %s", self.rank, self.generation, lane.name, error.what)
            finally:
                if locked:
                    lane.lock.release()
            if not lane.lock.acquire(timeout=max(0.0, deadline - time.monotonic())):
                return  # a launch is still inside NCCL
            lane.lock.release()
            last = lane.stream.mark()
            while not last.done():
                if time.monotonic() > deadline:
                    return
                time.sleep(LOOK_S / 10)
            ended.add(lane.name)
        except RuntimeError as error:  # PyTorch's, of a device that has failed
            log.warning("rank %d, generation %d, %s: %s", self.rank, self.generation, lane.name, error)


def copy_in_stream(source: Tensor, target: Tensor) -> None:
    """In the current stream."""
    if source.data_ptr() != target.data_ptr():
        with torch.no_grad():
            target.copy_(source)


def check_count(wire: CommunicatorKey, tensors: Sequence[Tensor]) -> None:
    """One tensor for each rank of the group."""
    if len(tensors) != len(wire.members):
        raise CommError(
            f"{wire.operation} got {len(tensors)} tensors for a group of {len(wire.members)}", cure="give one for each rank"
        )


def check_same(wire: CommunicatorKey, one: Tensor, other: Tensor) -> None:
    """What is one rank's own part in two places. NCCL asks for one size and believes it: it would write over other memory."""
    if one.numel() != other.numel() or one.dtype != other.dtype:
        found = [f"{tensor.dtype} {tuple(tensor.shape)}" for tensor in (one, other)]
        raise CommError(
            f"{wire.operation} got {found[0]} and {found[1]} for this rank's own part",
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
