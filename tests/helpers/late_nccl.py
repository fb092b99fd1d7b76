"""The `nccl` transport over late devices (`helpers.late_device`): what of NCCL and of the sockets it needs, in one thread.

Work of a communicator goes on when its peers' work is at the head of their streams; sends read and receives write at moments of
their own. Messages between hosts leave and arrive late, in the order of their pair, in the thread that reads the sockets.
"""

from __future__ import annotations

import ctypes
import functools
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from helpers.late_device import LateDevice, LateStream, World, launch_at
from torch import Tensor

from raypar.comm.collectives import MessageBasedTransport
from raypar.comm.local_transport import deliver_message, peer_left_error
from raypar.comm.nccl.communicator_stream import CommunicatorStream
from raypar.comm.nccl.transport import NcclTransport
from raypar.comm.phased_operation import OperationMessage, PhasedOperation
from raypar.comm.transport import CommunicatorKey, generation_over_error
from raypar.errors import CommError

BUFFERED_BYTES = 2048
"""Up to this size NCCL may take a send before its receiver is there, in worlds where it does at all."""


# -- NCCL


@dataclass
class Wires:
    """What the ranks of one communicator share."""

    buffers: bool
    """Whether small sends are taken at once."""
    members: dict[int, LateCommunicator] = field(default_factory=dict)
    """Index of a rank -> its end."""
    sent: dict[tuple[int, int], deque[bytes]] = field(default_factory=lambda: defaultdict(deque))
    """(from, to) -> messages that have left and not arrived."""
    given: dict[int, dict[int, bytes]] = field(default_factory=lambda: defaultdict(dict))
    """Number of a collective -> index of a rank -> what it contributes."""


class NcclWork:
    """One operation of a communicator, or a group of them: parts that go on by themselves, in any order."""

    def __init__(self, owner: LateCommunicator) -> None:
        self._owner = owner
        self.sends: dict[int, tuple[int, int]] = {}
        """Index of a rank -> (address, bytes)."""
        self.recvs: dict[int, tuple[int, int]] = {}
        self.gives: tuple[int, int] | None = None
        """(address, bytes) of what it contributes to a collective."""
        self.takes: Callable[[dict[int, bytes]], None] | None = None
        """Writes a collective's result, once all needed contributions are there."""
        self.needs: Sequence[int] = ()
        self.number = 0
        self._next: Callable[[], None] | None = None

    def _parts(self) -> Iterator[Callable[[], None]]:
        owner, wires = self._owner, self._owner.wires
        for peer, (_, nbytes) in self.sends.items():
            if (wires.buffers and nbytes <= BUFFERED_BYTES) or wires.members[peer].is_receiving_from(owner.index):
                yield functools.partial(self._send, peer)
        for peer in self.recvs:
            if wires.sent[peer, owner.index]:
                yield functools.partial(self._receive, peer)
        if self.gives is not None:
            yield self._give
        elif self.takes is not None and all(one in wires.given[self.number] for one in self.needs):
            yield self._take

    def ready(self) -> bool:
        """See `Work.ready`."""
        return self._owner.aborted or next(self._parts(), None) is not None

    def advance(self) -> bool:
        """See `Work.advance`: one part."""
        if self._owner.aborted:
            return True
        self._owner.world.random.choice(list(self._parts()))()
        return not (self.sends or self.recvs or self.gives or self.takes)

    def _send(self, peer: int) -> None:
        self._owner.wires.sent[self._owner.index, peer].append(ctypes.string_at(*self.sends.pop(peer)))

    def _receive(self, peer: int) -> None:
        content = self._owner.wires.sent[peer, self._owner.index].popleft()
        address, nbytes = self.recvs.pop(peer)
        assert nbytes == len(content), f"{nbytes} bytes wait for {len(content)}"
        ctypes.memmove(address, content, nbytes)

    def _give(self) -> None:
        assert self.gives is not None
        self._owner.wires.given[self.number][self._owner.index] = ctypes.string_at(*self.gives)
        self.gives = None

    def _take(self) -> None:
        assert self.takes is not None
        self.takes(self._owner.wires.given[self.number])
        self.takes = None


class LateCommunicator:
    """See `bindings.NcclCommunicator`."""

    def __init__(self, world: World, wires: Wires, index: int, size: int) -> None:
        self.world, self.wires, self.index, self.size = world, wires, index, size
        wires.members[index] = self
        self.aborted = False
        self._stream: LateStream | None = None
        self._group: NcclWork | None = None
        self._collectives = 0

    def is_receiving_from(self, peer: int) -> bool:
        """Whether the work at the head of its stream waits for a message of that rank."""
        head = self._stream.queue[0] if self._stream is not None and self._stream.queue else None
        return isinstance(head, NcclWork) and peer in head.recvs and not self.wires.sent[peer, self.index]

    @contextmanager
    def group_calls(self) -> Iterator[None]:
        """See `NcclCommunicator.group_calls`."""
        self._group = NcclWork(self)
        yield
        work, self._group = self._group, None
        if work.sends or work.recvs:
            self._enqueue("group", work)

    def _enqueue(self, name: str, work: NcclWork, reads: Sequence[int] = (), writes: Sequence[int] = ()) -> None:
        assert self._stream is not None
        read = [*reads, *(address for address, _ in work.sends.values())]
        launch_at(self._stream, f"nccl {name}", read, [*writes, *(address for address, _ in work.recvs.values())], work)

    def _one(self, name: str, stream: int, change: Callable[[NcclWork], None]) -> None:
        self._stream = self.world.streams[stream]
        work = self._group or NcclWork(self)
        change(work)
        if self._group is None:
            self._enqueue(name, work)

    def send(self, pointer: int, nbytes: int, peer: int, stream: int) -> None:
        """See `NcclCommunicator.send`."""
        self._one("send", stream, lambda work: work.sends.update({peer: (pointer, nbytes)}))

    def recv(self, pointer: int, nbytes: int, peer: int, stream: int) -> None:
        """See `NcclCommunicator.recv`."""
        self._one("recv", stream, lambda work: work.recvs.update({peer: (pointer, nbytes)}))

    def _collective(
        self,
        name: str,
        stream: int,
        gives: tuple[int, int] | None,
        needs: Sequence[int],
        out: int,
        result: Callable[[dict[int, bytes]], bytes] | None,
    ) -> None:
        self._stream = self.world.streams[stream]
        self._collectives += 1
        work = NcclWork(self)
        work.gives, work.needs, work.number = gives, needs, self._collectives
        if result is not None:

            def take(given: dict[int, bytes]) -> None:
                content = result(given)
                ctypes.memmove(out, content, len(content))

            work.takes = take
        self._enqueue(name, work, [gives[0]] if gives else [], [out] if result else [])

    def all_reduce(self, pointer: int, count: int, dtype: torch.dtype, stream: int) -> None:
        """See `NcclCommunicator.all_reduce`."""
        everybody = range(self.size)
        self._collective(
            "all-reduce", stream, (pointer, count * dtype.itemsize), everybody, pointer,
            lambda given: added([given[i] for i in everybody], dtype),
        )  # fmt: skip

    def reduce_scatter(self, source: int, out: int, count: int, dtype: torch.dtype, stream: int) -> None:
        """See `NcclCommunicator.reduce_scatter`."""
        everybody, nbytes = range(self.size), count * dtype.itemsize
        mine = slice(self.index * nbytes, (self.index + 1) * nbytes)
        self._collective(
            "reduce-scatter", stream, (source, self.size * nbytes), everybody, out,
            lambda given: added([given[i][mine] for i in everybody], dtype),
        )  # fmt: skip

    def all_gather(self, mine: int, out: int, nbytes: int, stream: int) -> None:
        """See `NcclCommunicator.all_gather`."""
        everybody = range(self.size)
        self._collective(
            "all-gather", stream, (mine, nbytes), everybody, out, lambda given: b"".join(given[i] for i in everybody)
        )

    def broadcast(self, pointer: int, nbytes: int, root: int, stream: int) -> None:
        """See `NcclCommunicator.broadcast`."""
        if self.index == root:
            self._collective("broadcast", stream, (pointer, nbytes), (), 0, None)
        else:
            self._collective("broadcast", stream, None, (root,), pointer, lambda given: given[root])

    def raise_background_error(self) -> None:
        """See `NcclCommunicator.raise_background_error`."""

    def destroy(self) -> None:
        """See `NcclCommunicator.destroy`."""
        self.abort()

    def abort(self) -> None:
        """See `NcclCommunicator.abort`: its kernels end."""
        self.aborted = True


def added(parts: Sequence[bytes], dtype: torch.dtype) -> bytes:
    """The sum, in the order of the ranks; of 16-bit floats rounded once."""
    wide = torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype
    total, *more = (
        torch.frombuffer(bytearray(part), dtype=dtype).to(wide) if part else torch.empty(0, dtype=wide) for part in parts
    )
    for one in more:
        total = total + one
    return bytes(total.to(dtype).view(torch.uint8).numpy()) if total.numel() else b""


# -- messages between hosts


@dataclass
class Letter:
    """A message between hosts, on its way."""

    message: OperationMessage
    content: Tensor | None = None
    """What it says, once it has left."""


class Link:
    """Messages from one host to another, in order."""

    def __init__(self, mesh: LateMesh, source: int, to: int) -> None:
        self._mesh, self._source, self._to = mesh, source, to
        self.weight = mesh.world.any_weight(mesh.spread)
        self.letters: deque[Letter] = deque()
        self.ended = ""
        """Why its source has left, behind all letters."""

    def ready(self) -> bool:
        """Whether a message can leave or arrive."""
        return bool(self.letters or self.ended)

    def advance(self) -> None:
        """Let the next one leave, or the first one that has left arrive."""
        staying = next((letter for letter in self.letters if letter.content is None), None)
        arriving = bool(self.letters) and self.letters[0].content is not None
        source, target = self._mesh.transports[self._source], self._mesh.transports[self._to]
        if staying is not None and (not arriving or self._mesh.world.random.random() < 0.5):
            tensor = staying.message.tensor
            assert tensor is not None
            staying.content = tensor.detach().clone().requires_grad_(tensor.requires_grad)
            with source.reading():
                staying.message.complete()
        elif arriving:
            with target.reading():
                target.arrived(self.letters.popleft())
        else:
            with target.reading():
                target.lost(self._source)
            self.ended = ""


class LateControl(MessageBasedTransport):
    """A control transport, as TCP's."""

    def __init__(self, mesh: LateMesh, rank: int, size: int) -> None:
        super().__init__(rank, size, 1)
        self._mesh = mesh
        self._posted: dict[tuple[int, int, int], deque[OperationMessage]] = defaultdict(deque)
        self._early: dict[tuple[int, int, int], deque[Letter]] = defaultdict(deque)
        self._lost: set[int] = set()

    def can_share_memory(self, rank: int) -> bool:
        """See `Transport.can_share_memory`."""
        return False

    @contextmanager
    def reading(self) -> Iterator[None]:
        """The thread that reads the sockets, whose current stream is the default one."""
        device = self._mesh.world.devices[self.rank]
        with self._mesh.world.at(device, device.default):
            yield

    def post_send(self, message: OperationMessage) -> None:
        """See `MessageBasedTransport.post_send`."""
        self.check_alive()
        self._mesh.links[self.rank, message.peer].letters.append(Letter(message))

    def post_recv(self, message: OperationMessage) -> None:
        """See `MessageBasedTransport.post_recv`."""
        self.check_alive()
        address = (message.peer, message.channel, message.tag)
        if self._early[address]:
            self._deliver(self._early[address].popleft(), message)
        elif message.peer in self._lost:
            message.fail(peer_left_error(message))
        else:
            self._posted[address].append(message)

    def arrived(self, letter: Letter) -> None:
        """A message is here."""
        sent = letter.message
        address = (sent.operation.transport.rank, sent.channel, sent.tag)
        if self._aborted is not None:
            return
        if self._posted[address]:
            self._deliver(letter, self._posted[address].popleft())
        else:
            self._early[address].append(letter)

    def _deliver(self, letter: Letter, message: OperationMessage) -> None:
        sent: Any = SimpleNamespace(
            tensor=letter.content,
            operation=SimpleNamespace(layout=letter.message.operation.layout),
            channel=letter.message.channel,
            complete=lambda: None,
        )
        deliver_message(sent, message)

    def lost(self, peer: int) -> None:
        """A peer's sockets are closed."""
        self._lost.add(peer)
        for address in [address for address in self._posted if address[0] == peer]:
            for message in self._posted.pop(address):
                message.fail(peer_left_error(message))

    def wait_for(self, operation: PhasedOperation, timeout_s: float | None) -> bool:
        """See `MessageBasedTransport.wait_for`."""
        while not operation.settled:
            self._mesh.world.step()
        return True

    def notify_settled(self, operation: PhasedOperation) -> None:
        """See `MessageBasedTransport.notify_settled`: whoever waits looks again by itself."""

    def abort(self, reason: str) -> None:
        """See `Transport.abort`."""
        if self._aborted is None:
            self._aborted = reason
            mine = [message for queue in self._posted.values() for message in queue]
            for (source, _), link in self._mesh.links.items():
                if source == self.rank:
                    mine += [letter.message for letter in link.letters if letter.content is None]
                    link.letters = deque(letter for letter in link.letters if letter.content is not None)
                    link.ended = reason
            self._posted.clear()
            for message in mine:
                message.fail(generation_over_error(reason))

    def close(self) -> None:
        """See `Transport.close`."""
        self.abort("the transport was closed")


class LateMesh:
    """The control transports of all ranks."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.spread = world.random.choice((7.0, 14.0))
        """Networks may be slower than any device."""
        ranks = range(len(world.devices))
        self.links = {(a, b): Link(self, a, b) for a in ranks for b in ranks}
        world.links += self.links.values()
        self.transports = [LateControl(self, rank, len(ranks)) for rank in ranks]


def connected(world: World, keys: Sequence[CommunicatorKey], *, exact: bool = True) -> list[NcclTransport]:
    """A generation of all ranks, with these communicators."""
    mesh = LateMesh(world)
    wires = {key: Wires(world.random.random() < 0.5) for key in keys}
    ends = []
    for control in mesh.transports:
        device = world.devices[control.rank]
        mine: dict[CommunicatorKey, CommunicatorStream] = {}
        with world.at(device):
            for key in sorted(key for key in keys if control.rank in key.members):
                index = key.members.index(control.rank)
                made: Any = LateCommunicator(world, wires[key], index, len(key.members))
                mine[key] = CommunicatorStream(key, index, made, device, exact=exact)
                mine[key].warm_up()
            ends.append(NcclTransport(control, device, mine))  # type: ignore[arg-type]
    return ends


__all__ = ["CommError", "LateDevice", "connected"]
