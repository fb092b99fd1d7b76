"""The transport protocol over NCCL: device memory moves in streams, words about it over the sockets of a `cpu` transport.

Messages. NCCL knows no tags: what one rank sends another arrives in order. So the sender enqueues at once, and announces
tag, dtype and shape over the control transport; the receiver enqueues every announced message in that order, into the
posted receive it belongs to, else into fresh memory until one is posted. Tags may overtake, a send never waits for others'
receives, and shapes travel, as over TCP.

Collectives need no words: each (operation, group, channel) has a lane of its own (`nccl_lane`), in which the order of
calls is the order of matching.

Tensors in host memory go over the control transport, messages among the announcements, so that they match as all do. Barriers
too: they are about calls, not about memory.

A lost peer is noticed by the control transport, whose connections a dying process closes; NCCL itself would wait for it
for ever. Whoever ends says goodbye with the numbers of what it has posted, so that others fail what can never complete
and nothing else.
"""

from __future__ import annotations

import json
import logging
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import Tensor

from raypar.comm.collectives import ONE_PHASE_BYTES, slices
from raypar.comm.cpu import CpuTransport
from raypar.comm.ledger import Ledger
from raypar.comm.nccl_device import Device
from raypar.comm.nccl_flight import Batch, Flight
from raypar.comm.nccl_lane import Lane, Wire
from raypar.comm.operation import Exchange, Operation, Phases
from raypar.comm.tcp_wire import CODES, DTYPES
from raypar.comm.transport import Handle
from raypar.errors import CommError, GroupAborted

log = logging.getLogger("raypar")

ABORT_S = 5.0
"""How long `abort` and `close` wait for NCCL; after that the process has to be replaced (`stuck` says so)."""

LAUNCH_S = 1.0
"""Whoever is just launching something gets so long before its communicator is aborted. A launch that hangs is freed by that."""

LOOK_S = 0.02
POLL_S = 0.01
"""Errors that NCCL found in the background are asked for at most so often."""

ANNOUNCEMENTS = 1
"""The channel of the control transport that they use; collectives of a transport take others."""

ON_DEVICE, ON_HOST, GOODBYE = range(3)
"""What a frame announces: a message in its lane, one that follows here, or the counts of one who leaves, which follow here."""

MOST_DIMS = 16
FRAME = struct.Struct(f"<BBBxIQ{MOST_DIMS}Q")
"""One of the above, dtype code, number of dims, bytes of a goodbye, tag, dims."""

T = TypeVar("T")
Key = tuple[int, int]
"""(source, tag)"""


class Telling(Operation):
    """Words on their way to a peer; with `flight`, a message in host memory among them."""

    def __init__(self, control: CpuTransport, peer: int, flight: Flight | None) -> None:
        super().__init__(control, "telling", (peer,), ANNOUNCEMENTS)
        self._flight = flight

    def fail(self, error: CommError) -> None:
        """See `Operation.fail`."""
        if self._flight is not None:
            reason = error.what.removeprefix(f"{self.describe()}: ")
            self._flight.fail(type(error)(f"{self._flight.describe()}: {reason}", error.cure))
        super().fail(error)


class Told:
    """The mark of a message in host memory (see `Mark`): once it has left, or is here. Streams need not wait for it."""

    def __init__(self, telling: Telling | None) -> None:
        self._telling = telling

    def done(self) -> bool:
        """See `Mark.done`. When the message is lost, its flight has failed before."""
        return self._telling is None or self._telling.settled

    def hold_current(self) -> None:
        """See `Mark.hold_current`."""


HERE = Told(None)


class Listening(Operation):
    """The endless operation that takes a peer's announcements as they come; it ends when the peer is lost."""

    def __init__(self, transport: NcclTransport, peer: int) -> None:
        super().__init__(transport.control, "hearing", (peer,), ANNOUNCEMENTS, transport.hear(peer))
        self._owner = transport
        self._peer = peer

    def fail(self, error: CommError) -> None:
        """See `Operation.fail`."""
        super().fail(error)
        self._owner.lose(self._peer, error.what.removeprefix(f"{self.describe()}: "))


class NcclTransport:
    """One rank's end of a generation. Made by `nccl_connect.connect`; owns `control`, and closes it.

    Tensors lie on `device` or in host memory. `stuck`: what `abort` or `close` could not end within `ABORT_S`; if there is
    anything, this process is to be killed.
    """

    carries_shapes = True

    def __init__(self, control: CpuTransport, device: Device, lanes: Mapping[Wire, Lane]) -> None:
        self.rank = control.rank
        self.size = control.size
        self.generation = control.generation
        self.control = control
        self.ledger = control.ledger = Ledger()
        self.device = device
        self.stuck: tuple[str, ...] = ()
        self._lanes = dict(lanes)
        self._changed = threading.Condition()
        self._flights: list[Flight] = []
        self._flights_lock = threading.Lock()
        self._telling = [threading.Lock() for _ in range(self.size)]
        self._matching = threading.Lock()
        self._posted: dict[Key, deque[Flight]] = {}
        self._arrived: dict[Key, deque[Flight]] = {}
        self._ending = threading.Lock()
        self._aborted: str | None = None
        self._broken: CommError | None = None
        self._closed = False
        self._gone: dict[int, str] = {}
        self._left: dict[int, dict[str, int]] = {}
        """Of those who have said goodbye: how many operations they have posted in each lane that we share."""
        self._next_poll_s = 0.0
        for peer in range(self.size):
            if peer != self.rank:
                Listening(self, peer).start()

    def near(self, rank: int) -> bool:
        """See `Transport.near`: the memory is a device's, nobody may read it without a message."""
        return False

    # -- messages

    def send(self, tensor: Tensor, *, to: int, tag: int) -> Flight:
        """See `Transport.send`."""
        self._check_alive()
        return self._send(self._checked(tensor, to), to, tag)

    def recv(self, out: Tensor | None, *, source: int, tag: int) -> Flight:
        """See `Transport.recv`."""
        self._check_alive()
        return self._recv(out, None if out is None else self._checked(out, source), source, tag)

    def batch(self, sends: Sequence[tuple[Tensor, int, int]], recvs: Sequence[tuple[Tensor | None, int, int]]) -> Batch:
        """See `Transport.batch`: its messages have lanes of their own, so that they never wait for each other."""
        self._check_alive()
        outs = [(out, None if out is None else self._checked(out, source), source, tag) for out, source, tag in recvs]
        tensors = [(self._checked(tensor, to), to, tag) for tensor, to, tag in sends]
        flights = [self._recv(*recv) for recv in outs] + [self._send(*send) for send in tensors]
        tags = sorted({tag for _, _, tag in (*sends, *recvs)})
        peers = sorted({peer for _, peer, _ in (*sends, *recvs)})
        return Batch(self, f"batch tags {tags}", peers, flights)

    def _send(self, tensor: Tensor, to: int, tag: int) -> Flight:
        flight = Flight(self, f"send tag {tag}", (to,), (tensor,))
        self.ledger.count("send", sent=tensor.nbytes)
        if to == self.rank:
            self._send_to_self(tensor, tag)
            flight.launch(self.device.mark())
            return flight
        if not self.device.owns(tensor):
            frame = pack(ON_HOST, tensor, tag)
            with self._held(self._telling[to]):
                if self._track(flight):
                    flight.launch(Told(self._tell(to, frame, tensor, flight)))
            return flight
        frame = pack(ON_DEVICE, tensor, tag)
        lane = self._lane(Wire((self.rank, to), "message"))
        with self._held(self._telling[to]), self._held(lane.lock):
            if self._track(flight):
                self._launch(lane, flight, lambda: lane.message(tensor))
                self._tell(to, frame)
        return flight

    def _send_to_self(self, tensor: Tensor, tag: int) -> None:
        with torch.no_grad():
            copy = tensor.clone()
        arrived = Flight(self, f"message tag {tag}", (self.rank,), (copy,), out=copy)
        arrived.launch(self.device.mark())
        with self._matching:
            flight = take(self._posted, (self.rank, tag))
            if flight is None:
                self._arrived.setdefault((self.rank, tag), deque()).append(arrived)
            else:
                self._give(flight, arrived)

    def _recv(self, given: Tensor | None, out: Tensor | None, source: int, tag: int) -> Flight:
        """`given` is the caller's tensor, `out` the same memory without its history."""
        if not 0 <= source < self.size:
            raise outside(source, self.size)
        flight = Flight(self, f"recv tag {tag}", (source,), () if out is None else (out,), out=given)
        if out is not None:
            flight.start = self.device.mark()
            if source != self.rank and self.device.owns(out):
                self._lane(Wire((source, self.rank), "message"))
        with self._matching:
            arrived = take(self._arrived, (source, tag))
            if arrived is not None:
                self._give(flight, arrived)
            elif self._track(flight):
                self._posted.setdefault((source, tag), deque()).append(flight)
        return flight

    def _give(self, flight: Flight, arrived: Flight) -> None:
        """A message that is here, or on its way in its lane, gets to its receive. Holds `_matching`."""
        came, mark = arrived.out, arrived.mark
        assert came is not None and mark is not None
        flight.lane, flight.number = arrived.lane, arrived.number
        if flight.out is None:
            flight.out = came
            flight.kept = (came,)
        elif not self._fits(flight, came.dtype, came.shape, self.device.owns(came)):
            self._wake()
            return
        else:
            (out,) = flight.kept
            flight.kept = (out, came)
            assert flight.start is not None
            if flight.peers[0] == self.rank or not self.device.owns(came):
                flight.start.hold_current()
                mark.hold_current()
                with torch.no_grad():
                    out.copy_(came)
                mark = self.device.mark()
            else:
                stream = self._lane(Wire((flight.peers[0], self.rank), "message")).stream
                stream.follow(flight.start)  # and `mark` is in this stream already
                stream.run(lambda: out.copy_(came))
                mark = stream.mark()
        self.ledger.count("recv", received=came.nbytes)
        flight.launch(mark)
        self._track(flight)
        self._wake()

    def hear(self, peer: int) -> Phases:
        """What `Listening` does: take the peer's words, one after the other."""
        frame = torch.empty(FRAME.size, dtype=torch.uint8)
        while True:
            yield Exchange((), [(frame, peer, 0)])
            kind, code, dims, more, tag, *shape = FRAME.unpack(bytes(frame.numpy()))
            if kind == GOODBYE:
                text = torch.empty(more, dtype=torch.uint8)
                yield Exchange((), [(text, peer, 1)])
                self._part(peer, json.loads(bytes(text.numpy())))
            elif kind == ON_HOST:
                dtype = DTYPES[code]
                with self._matching:
                    flight, wanted = self._posted_for(peer, tag, dtype, shape[:dims], on_device=False)
                fresh = flight is None or flight.out is None
                into = self.control.pool.empty(shape[:dims], dtype) if fresh else flight.kept[0]  # type: ignore[union-attr]
                yield Exchange((), [(into, peer, 1)])
                self._came_on_host(flight, wanted, peer, tag, into)
            else:
                self._coming(peer, tag, DTYPES[code], shape[:dims])

    def _posted_for(
        self, source: int, tag: int, dtype: torch.dtype, shape: Sequence[int], *, on_device: bool
    ) -> tuple[Flight | None, bool]:
        """The posted receive that an announced message belongs to, and whether anybody may ever want it. Holds `_matching`."""
        flight = take(self._posted, (source, tag))
        if flight is None or flight.out is None or self._fits(flight, dtype, shape, on_device):
            return flight, True
        self._wake()
        return None, False

    def _coming(self, source: int, tag: int, dtype: torch.dtype, shape: Sequence[int]) -> None:
        """The next message in the lane of `source` is this one. Runs in whatever thread has read it."""
        lane = self._lane(Wire((source, self.rank), "message"))
        self.device.bind()
        with self._matching, self._held(lane.lock):
            self._check_alive()
            flight, wanted = self._posted_for(source, tag, dtype, shape, on_device=True)
            posted = flight is not None
            if flight is None:
                flight = Flight(self, f"message tag {tag}", (source,))
                if wanted:
                    self._arrived.setdefault((source, tag), deque()).append(flight)
                self._track(flight)
            if flight.out is None:
                flight.out = self.device.empty(shape, dtype, lane.stream)
                flight.kept = (flight.out,)
            (into,) = flight.kept
            self._launch(lane, flight, lambda: lane.message(into), after_current=False)
        if posted:
            self.ledger.count("recv", received=into.nbytes)
        self._wake()

    def _came_on_host(self, flight: Flight | None, wanted: bool, source: int, tag: int, tensor: Tensor) -> None:
        """All of a message in host memory is here, in `tensor`, which is the posted receive's own if that has one."""
        if not wanted:
            return
        with self._matching:
            if flight is None:
                arrived = Flight(self, f"message tag {tag}", (source,), (tensor,), out=tensor)
                arrived.launch(HERE)
                posted = take(self._posted, (source, tag))
                if posted is None:
                    self._arrived.setdefault((source, tag), deque()).append(arrived)
                else:
                    self._give(posted, arrived)
                return
        self.ledger.count("recv", received=tensor.nbytes)
        if flight.out is None:
            flight.out = tensor
        flight.launch(HERE)
        self._wake()

    def _fits(self, flight: Flight, dtype: torch.dtype, shape: Sequence[int], on_device: bool) -> bool:
        """Whether what came is what a posted receive is for; else it fails."""
        out = flight.out
        assert out is not None
        if out.dtype == dtype and out.shape == torch.Size(shape) and self.device.owns(out) == on_device:
            return True
        places = {True: self.device.name, False: "the host"}
        where = "" if self.device.owns(out) == on_device else f" on {places[on_device]}, not {places[not on_device]}"
        flight.fail(
            CommError(
                f"{flight.describe()} expects {out.dtype} {tuple(out.shape)}, "
                f"rank {flight.peers[0]} sent {dtype} {tuple(shape)}{where}",
                cure="both ends must agree on dtype, shape and device; tags must be unique among pending messages of a pair",
            )
        )
        return False

    def _tell(self, to: int, frame: bytearray, more: Tensor | None = None, flight: Flight | None = None) -> Telling:
        """Words for a peer; its lock in `_telling` is held. Of announcements that are lost the loss of the peer tells."""
        words = [(torch.frombuffer(frame, dtype=torch.uint8), to, 0)]
        if more is not None:
            words.append((more, to, 1))
        telling = Telling(self.control, to, flight)
        telling.post(Exchange(words, ()))
        telling.posted()
        return telling

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
        sent = sum(part.nbytes for part in parts) - parts[me].nbytes
        received = out.nbytes * (len(parts) - 1)
        kept = [out, *parts]
        return self._run(wire, kept, sent, received, lambda: copy(parts[0], out), lambda lane: lane.reduce_scatter(out, parts))

    def all_gather(self, pieces: Sequence[Tensor], mine: Tensor, *, group: Sequence[int], channel: int = 0) -> Handle:
        """See `Transport.all_gather`."""
        if self._on_host(mine):
            return self.control.all_gather(pieces, mine, group=group, channel=channel)
        wire, me, (mine, *outs) = self._entered("all_gather", group, channel, mine, *pieces)
        check_count(wire, outs)
        sent = mine.nbytes * (len(outs) - 1)
        received = sum(out.nbytes for out in outs) - outs[me].nbytes
        kept = [mine, *outs]
        return self._run(wire, kept, sent, received, lambda: copy(mine, outs[0]), lambda lane: lane.all_gather(outs, mine))

    def all_to_all(self, outs: Sequence[Tensor], pieces: Sequence[Tensor], *, group: Sequence[int], channel: int = 0) -> Handle:
        """See `Transport.all_to_all`."""
        if self._on_host(*pieces[:1]):
            return self.control.all_to_all(outs, pieces, group=group, channel=channel)
        wire, me, both = self._entered("all_to_all", group, channel, *outs, *pieces)
        into, parts = both[: len(outs)], both[len(outs) :]
        check_count(wire, into)
        check_count(wire, parts)
        sent = sum(part.nbytes for part in parts) - parts[me].nbytes
        received = sum(out.nbytes for out in into) - into[me].nbytes
        return self._run(wire, both, sent, received, lambda: copy(parts[0], into[0]), lambda lane: lane.all_to_all(into, parts))

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
        self._check_alive()
        return self.control.barrier(group=group, channel=channel)

    def _on_host(self, *tensors: Tensor) -> bool:
        """Whether a collective is the control transport's."""
        self._check_alive()
        return any(t.device.type == "cpu" and not self.device.owns(t) for t in tensors)

    def _entered(self, name: str, group: Sequence[int], channel: int, *tensors: Tensor) -> tuple[Wire, int, list[Tensor]]:
        """A collective call, checked: what it is, our index in the group, the tensors without their history."""
        self._check_alive()
        members = tuple(group)
        ascending = list(members) == sorted(set(members) & set(range(self.size)))
        if not ascending or self.rank not in members:
            raise CommError(
                f"{name} of rank {self.rank} (of {self.size}) over group {members}",
                cure="a group is an ascending list of ranks that contains the caller",
            )
        wire = Wire(members, name, channel)
        return wire, members.index(self.rank), [self._checked(tensor, self.rank) for tensor in tensors]

    def _run(
        self,
        wire: Wire,
        kept: Sequence[Tensor],
        sent: int,
        received: int,
        alone: Callable[[], None],
        together: Callable[[Lane], Sequence[Tensor]],
    ) -> Flight:
        """Post a collective: `alone` in a group of one, else `together` in its lane, which returns more to be kept."""
        flight = Flight(self, wire.operation, [r for r in wire.members if r != self.rank], kept)
        if len(wire.members) == 1:
            alone()
            flight.launch(self.device.mark())
        else:
            lane = self._lane(wire)
            with self._held(lane.lock):
                if self._track(flight):
                    self._launch(lane, flight, lambda: together(lane))
        self.ledger.count(wire.operation, sent=sent, received=received)
        return flight

    # -- parts of the above

    @contextmanager
    def _held(self, lock: threading.Lock) -> Iterator[None]:
        """With a lock that a launch which hangs inside NCCL may keep: an abort frees those who wait for it."""
        while not lock.acquire(timeout=LOOK_S):
            self._check_alive()
        try:
            yield
        finally:
            lock.release()

    def _launch(self, lane: Lane, flight: Flight, work: Callable[[], Sequence[Tensor]], *, after_current: bool = True) -> None:
        """Enqueue an operation of a lane whose lock is held; after what the current stream has, or after `flight.start`."""
        start = self.device.mark() if after_current else flight.start
        if start is not None:
            lane.stream.follow(start)
        lane.calls += 1
        flight.lane, flight.number = lane.name, lane.calls
        try:
            flight.kept = (*flight.kept, *work())
        except CommError as error:
            self._break(error)
            raise
        flight.launch(lane.stream.mark())

    def _lane(self, wire: Wire) -> Lane:
        lane = self._lanes.get(wire)
        if lane is None:
            raise CommError(
                f"no communicator was made for {wire} (generation {self.generation})",
                cure=f"name it when the group is connected: Wire({wire.members}, {wire.operation!r}, {wire.channel})",
            )
        return lane

    def _checked(self, tensor: Tensor, peer: int) -> Tensor:
        if not 0 <= peer < self.size:
            raise outside(peer, self.size)
        if not tensor.is_contiguous() or not (self.device.owns(tensor) or tensor.device.type == "cpu"):
            strides = tuple(tensor.stride())
            raise CommError(
                f"a tensor of shape {tuple(tensor.shape)} with strides {strides} on {tensor.device} cannot be moved",
                cure=f"pass a contiguous tensor on {self.device.name} or the host (tensor.contiguous())",
            )
        return tensor.detach()

    def _check_alive(self) -> None:
        if self._aborted is not None:
            raise GroupAborted(self._aborted, cure="this generation is over; connect the next one")
        if self._broken is not None:
            raise CommError(*self._broken.args)

    def _track(self, flight: Flight) -> bool:
        """Remember a flight until it is over, and fail it if it can never be; whether it may still be launched."""
        with self._flights_lock:
            self._flights = [f for f in self._flights if not f.over]
            if flight not in self._flights:
                self._flights.append(flight)
        self._settle(flight)
        return flight.good

    def _settle(self, flight: Flight) -> None:
        """Fail a flight that can never complete."""
        error = self._verdict(flight)
        if error is not None:
            flight.fail(error)

    def _settle_all(self) -> None:
        with self._flights_lock:
            flights = list(self._flights)
        for flight in flights:
            self._settle(flight)
        self._wake()

    def _verdict(self, flight: Flight) -> CommError | None:
        if self._aborted is not None:
            return GroupAborted(self._aborted, cure="this generation is over; connect the next one")
        cure = "abort this group; the ranks that are left form the next generation"
        if self._broken is not None:
            return CommError(f"{flight.describe()}: {self._broken.what}", cure=self._broken.cure or cure)
        for peer in flight.peers:
            if peer not in self._gone:
                continue
            posted = self._left.get(peer)
            if posted is None or not flight.lane or flight.number > posted.get(flight.lane, 0):
                return CommError(f"{flight.describe()}: {self._gone[peer]}", cure=cure)
        return None

    def _wake(self) -> None:
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

    def _part(self, peer: int, posted: dict[str, int]) -> None:
        """A peer says goodbye: what it has posted will complete, nothing else."""
        self._left[peer] = posted
        self._gone[peer] = f"rank {peer} closed its end"
        self._settle_all()

    def _goodbye(self) -> None:
        for peer in range(self.size):
            if peer != self.rank:
                shared = {lane.name: lane.calls for wire, lane in self._lanes.items() if peer in wire.members}
                text = torch.frombuffer(bytearray(json.dumps(shared).encode()), dtype=torch.uint8)
                frame = FRAME.pack(GOODBYE, 0, 0, text.numel(), 0, *[0] * MOST_DIMS)
                with self._telling[peer]:
                    self._tell(peer, bytearray(frame), text)

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
                if gently:
                    self._goodbye()
                self._aborted = "the transport was closed"
                self._settle_all()
                self._end_lanes(gently=gently)
            self.control.close()
            for lane in self._lanes.values():
                if lane.name not in self.stuck:
                    lane.stream.close()
            if not self.stuck:
                self._flights.clear()
            self._posted.clear()
            self._arrived.clear()

    def _end_lanes(self, *, gently: bool) -> None:
        """Destroy or abort all communicators at the same time: one alone may wait for what another one holds."""
        ending = {}
        for lane in self._lanes.values():
            ending[lane.name] = threading.Thread(target=self._end_lane, args=(lane, gently), daemon=True)
        for thread in ending.values():
            thread.start()
        deadline = time.monotonic() + ABORT_S
        for thread in ending.values():
            thread.join(max(0.0, deadline - time.monotonic()))
        self.stuck = tuple(name for name, thread in ending.items() if thread.is_alive())
        if self.stuck:
            log.error(
                "rank %d, generation %d: NCCL has not ended %s within %g s; this process has to be replaced",
                self.rank, self.generation, ", ".join(self.stuck), ABORT_S,
            )  # fmt: skip

    def _end_lane(self, lane: Lane, gently: bool) -> None:
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


def pack(kind: int, tensor: Tensor, tag: int) -> bytearray:
    """The announcement of one message. Raises `CommError` for a dtype, shape or tag that cannot travel."""
    code, dims = CODES.get(tensor.dtype), tensor.dim()
    if code is None or dims > MOST_DIMS or not 0 <= tag < 1 << 64:
        raise CommError(
            f"cannot send {tensor.dtype} with {dims} dims and tag {tag}",
            cure=f"tags are 64-bit unsigned, dtypes plain numbers, tensors have at most {MOST_DIMS} dims",
        )
    return bytearray(FRAME.pack(kind, code, dims, 0, tag, *tensor.shape, *[0] * (MOST_DIMS - dims)))


def take(table: dict[Key, deque[T]], key: Key) -> T | None:
    """The oldest entry under `key`, taken out; None if there is none."""
    queue = table.get(key)
    if queue is None:
        return None
    found = queue.popleft()
    if not queue:
        del table[key]
    return found


def copy(source: Tensor, target: Tensor) -> None:
    """In the current stream."""
    if source.data_ptr() != target.data_ptr():
        with torch.no_grad():
            target.copy_(source)


def outside(rank: int, size: int) -> CommError:
    """A peer that does not exist."""
    return CommError(f"rank {rank} is not in a mesh of {size}", cure=f"use a rank from 0 to {size - 1}")


def check_count(wire: Wire, tensors: Sequence[Tensor]) -> None:
    """One tensor for each rank of the group."""
    if len(tensors) != len(wire.members):
        raise CommError(
            f"{wire.operation} got {len(tensors)} tensors for a group of {len(wire.members)}", cure="give one for each rank"
        )


def all_reduce_bytes(flat: Tensor, size: int, me: int) -> tuple[int, int]:
    """(sent, received) of an all-reduce as `comm.collectives` does it; for large ones those of a ring."""
    if flat.nbytes <= ONE_PHASE_BYTES:
        return flat.nbytes * (size - 1), flat.nbytes * (size - 1)
    cut = slices(flat.numel(), size)
    mine = (cut[me][1] - cut[me][0]) * flat.itemsize
    others = flat.nbytes - mine
    return others + (size - 1) * mine, (size - 1) * mine + others
