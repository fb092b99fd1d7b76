"""How the ranks of one generation make their NCCL communicators: over a `cpu` transport that is connected already.

Everybody tells everybody its library, device and lanes, with a fresh unique id for each lane whose first rank it is. What
cannot work is refused by all before NCCL is asked. CuPy's communicators are blocking: making one can neither be interrupted
nor given a limit, so a thread does it, which is left behind at the deadline, inside NCCL. All ranks make their communicators
in one order, so that none waits for a rank that waits for it.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from raypar.comm.communicator_key import COLLECTIVES, CommunicatorKey
from raypar.comm.nccl import bindings
from raypar.comm.nccl.communicator_stream import CommunicatorStream
from raypar.comm.nccl.device import WORKER_ENVIRONMENT, Device
from raypar.comm.nccl.transport import NcclTransport
from raypar.comm.tcp.transport import TcpTransport
from raypar.comm.transport import Handle
from raypar.errors import ClusterError, CommError, CommTimeout, GroupAborted

HELLO, READY = 1, 2
"""Tags on the control transport."""
MAX_WORDS_BYTES = 4 << 20
"""Size limit of what a rank tells: some hundred bytes for each of its communicators."""
MAX_TEXT = 10_000
"""Characters of another rank's error that are passed on."""
UNIQUE_ID_BYTES = 128
"""Size of NCCL's `ncclUniqueId`."""
LOOK_S = 0.002
GAVE_UP = "gave up connecting"
SLICE_S = 0.05
"""Who waits for one rank's word looks so often at what the others say."""

SHARED_GPU_SINCE = 23000
"""NCCL 2.30 knows NCCL_MULTI_RANK_GPU_ENABLE."""


def connect_nccl(
    control: TcpTransport,
    *,
    device: Device,
    wires: Iterable[CommunicatorKey],
    deadline_s: float,
    stuck: Callable[[Sequence[str]], None] = lambda names: None,
) -> NcclTransport:
    """An `nccl` transport with a lane for each of `wires` that names this rank; it owns `control` from here on.

    All members of a wire give it; groups of one need none. Raises `ClusterError` for what the ranks' libraries or devices
    cannot do, `CommTimeout` at the deadline, `CommError` when a rank is lost meanwhile. `control` is closed then, a thread may
    be left that waits for other ranks inside NCCL, and `stuck` is told what was made but could not be ended
    (`NcclTransport.stuck`).
    """
    deadline = time.monotonic() + deadline_s
    try:
        mine = sorted({wire for wire in wires if control.rank in wire.members and len(wire.members) > 1})
        check_communicator_keys(mine, control.rank, control.size, device)
        hellos = exchange_hellos(control, device, mine, deadline, deadline_s)
        check_compatible(hellos, mine, control.rank)
    except BaseException:
        control.close()
        raise
    ids = {name: bytes.fromhex(text) for hello in hellos for name, text in hello["ids"].items()}
    making = CommunicatorSetup(control.rank, device, mine, ids)
    others = [rank for rank in range(control.size) if rank != control.rank]
    try:
        ready = {rank: control.recv(None, source=rank, tag=READY) for rank in others}
        making.wait(ready, deadline, deadline_s)
        send_to_all(control, {})
        receive_from_all(ready, deadline, deadline_s, "made all communicators", lambda: raise_peer_failure(ready))
    except BaseException as error:
        if isinstance(error, CommError) and not isinstance(error, GroupAborted):
            with contextlib.suppress(CommError):
                send_to_all(control, {"what": error.what, "cure": error.cure})
        transport = NcclTransport(control, device, making.give_up())
        transport.abort(f"rank {control.rank} gave up connecting: {error}")
        transport.close()
        stuck(transport.stuck)
        raise
    return NcclTransport(control, device, making.lanes)


def check_communicator_keys(wires: Sequence[CommunicatorKey], rank: int, size: int, device: Device) -> None:
    """Raise for wires that no lane can be made of, or more than the device can serve beside each other."""
    for wire in wires:
        ascending = list(wire.members) == sorted(set(wire.members) & set(range(size)))
        pair = len(set(wire.members) & set(range(size))) == len(wire.members) == 2
        if not (pair if wire.operation == "message" else ascending and wire.operation in COLLECTIVES):
            raise CommError(
                f"{wire!r} names nothing that {size} ranks can do",
                cure=f"messages have two ranks, (source, destination); collectives are {', '.join(COLLECTIVES)}, ranks ascend",
            )
    if len(wires) > device.most_lanes:
        settings = " ".join(f"{name}={value}" for name, value in WORKER_ENVIRONMENT.items())
        raise ClusterError(
            f"rank {rank} would use {len(wires)} communicators; of more than {device.most_lanes} on {device.name}, one may "
            "wait for another that waits for it",
            cure=f"start the workers with {settings}, or plan for fewer groups and neighbours",
        )


def exchange_hellos(
    control: TcpTransport, device: Device, wires: Sequence[CommunicatorKey], deadline: float, deadline_s: float
) -> list[dict[str, Any]]:
    """What every rank says of itself, by rank."""
    device.bind()
    hello = {
        "version": bindings.nccl_version(),
        "device": device.identity,
        "shares": os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1",
        "wires": [[list(wire.members), wire.operation, wire.channel] for wire in wires],
        "ids": {str(wire): bindings.new_unique_id().hex() for wire in wires if wire.members[0] == control.rank},
    }
    send_to_all(control, hello, HELLO)
    others = [rank for rank in range(control.size) if rank != control.rank]
    handles = {rank: control.recv(None, source=rank, tag=HELLO) for rank in others}
    receive_from_all(handles, deadline, deadline_s, "said what NCCL and device it has")
    return [hello if rank == control.rank else receive_hello(handles[rank], rank) for rank in range(control.size)]


def check_compatible(hellos: Sequence[Mapping[str, Any]], wires: Sequence[CommunicatorKey], rank: int) -> None:
    """Raise for what the ranks cannot do together; the same on all ranks, but for wires."""
    versions: dict[int, list[int]] = {}
    devices: dict[str, list[int]] = {}
    for other, hello in enumerate(hellos):
        versions.setdefault(hello["version"], []).append(other)
        devices.setdefault(hello["device"], []).append(other)
    if len(versions) > 1:
        who = "; ".join(f"{bindings.format_version(version)}: ranks {ranks}" for version, ranks in sorted(versions.items()))
        raise ClusterError(
            f"the ranks have different versions of NCCL, which do not understand each other ({who})",
            cure="install the same PyTorch, or the same nvidia-nccl package, on all nodes",
        )
    for name, ranks in devices.items():
        can_share = hellos[0]["version"] >= SHARED_GPU_SINCE and all(hellos[r]["shares"] for r in ranks)
        if len(ranks) > 1 and not can_share:
            raise ClusterError(
                f"ranks {ranks} are on one device, {name}, which NCCL refuses",
                cure="give every worker a GPU of its own; to try things out, give each process another NCCL_HOSTID"
                " (with NCCL_SOCKET_IFNAME=lo), or set NCCL_MULTI_RANK_GPU_ENABLE=1 (NCCL 2.30 and later)",
            )
    known = {str(wire) for wire in wires}
    for other, hello in enumerate(hellos):
        theirs = {
            str(wire): wire
            for members, name, channel in hello["wires"]
            if (wire := CommunicatorKey(tuple(members), name, channel))
        }
        missing = [str(w) for w in wires if other in w.members and str(w) not in theirs]
        strange = [name for name, wire in theirs.items() if rank in wire.members and name not in known]
        if missing or strange:
            raise CommError(
                f"ranks {rank} and {other} disagree about what they do together: only rank {rank} names "
                f"{missing or 'nothing'}, only rank {other} {strange or 'nothing'}",
                cure="connect all ranks with the wires of one plan",
            )


class CommunicatorSetup(threading.Thread):
    """Makes this rank's communicators, one after the other, and their connections. `lanes`: those that are made."""

    def __init__(self, rank: int, device: Device, wires: Sequence[CommunicatorKey], ids: Mapping[str, bytes]) -> None:
        super().__init__(name=f"raypar-nccl-{rank}", daemon=True)
        self.lanes: dict[CommunicatorKey, CommunicatorStream] = {}
        self._given_up = False
        self._deciding = threading.Lock()
        self._rank = rank
        self._device = device
        self._wires = wires
        self._ids = ids
        self._under_way = "nothing"
        self._error: BaseException | None = None
        self._over = threading.Event()
        self.start()

    def run(self) -> None:
        """The thread. What it makes after it was given up it aborts itself."""
        try:
            self._device.bind()
            for wire in self._wires:
                self._under_way = str(wire)
                me = wire.members.index(self._rank)
                communicator = bindings.NcclCommunicator(len(wire.members), self._ids[str(wire)], me)
                with self._deciding:
                    if self._given_up:
                        communicator.abort()
                        return
                    lane = self.lanes[wire] = self._lane(wire, me, communicator)
                with lane.lock:
                    lane.warm_up()
                    mark = lane.stream.mark()
                while not mark.done() and not self._given_up:
                    with lane.lock:
                        if not self._given_up:
                            communicator.check()
                    time.sleep(LOOK_S / 10)
        except CommError as error:
            self._error = CommError(f"{self._under_way}: {error.what}", error.cure)
        except BaseException as error:
            self._error = error
        finally:
            self._over.set()

    def _lane(self, wire: CommunicatorKey, me: int, communicator: bindings.NcclCommunicator) -> CommunicatorStream:
        try:
            return CommunicatorStream(wire, me, communicator, self._device)
        except BaseException:
            communicator.abort()  # else Python's collector ends it, gently, which may wait for the others for ever
            raise

    def give_up(self) -> dict[CommunicatorKey, CommunicatorStream]:
        """Make no more; what is made."""
        with self._deciding:
            self._given_up = True
            return dict(self.lanes)

    def wait(self, others: Mapping[int, Handle], deadline: float, deadline_s: float) -> None:
        """Until all are made. `others`: what they will say, which fails when a rank is lost."""
        while not self._over.wait(LOOK_S):
            raise_peer_failure(others)
            if time.monotonic() > deadline:
                raise CommTimeout(
                    f"rank {self._rank} could not make the NCCL communicator for {self._under_way} within {deadline_s:g} s",
                    cure="replace the worker (NCCL cannot be interrupted here); NCCL_DEBUG=INFO in the workers' environment "
                    "says what it waits for, NCCL_SOCKET_IFNAME chooses the network",
                )
        if self._error is not None:
            raise self._error


def send_to_all(control: TcpTransport, words: Mapping[str, Any], tag: int = READY) -> None:
    """To all other ranks."""
    text = torch.frombuffer(bytearray(json.dumps(words).encode()), dtype=torch.uint8)
    for rank in range(control.size):
        if rank != control.rank:
            control.send(text, to=rank, tag=tag)


def receive_document(handle: Handle, rank: int) -> dict[str, Any]:
    """What a rank has told (`tell`). Raises `CommError` naming the rank if that is damaged or too long."""
    tensor = handle.tensor()
    try:
        if tensor.dtype != torch.uint8 or tensor.nbytes > MAX_WORDS_BYTES:
            raise ValueError(f"{tensor.nbytes:,} bytes of {tensor.dtype}")
        found = json.loads(bytes(tensor.numpy()))
        if not isinstance(found, dict):
            raise ValueError(f"a {type(found).__name__}")
    except ValueError as error:
        raise CommError(f"what rank {rank} tells is damaged: {error}", cure="form the next generation without it") from None
    return found


def receive_hello(handle: Handle, rank: int) -> dict[str, Any]:
    """A rank's hello (`greet`), checked: its fields have their types, and it has a unique id for each of its own wires.

    Raises `CommError` naming the rank.
    """
    found = receive_document(handle, rank)
    try:
        wires = [CommunicatorKey(tuple(members), operation, channel) for members, operation, channel in found["wires"]]
        ids = {name: bytes.fromhex(text) for name, text in found["ids"].items()}
        good = (
            [type(found[key]) for key in ("version", "device", "shares")] == [int, str, bool]
            and all(type(number) is int for wire in wires for number in (*wire.members, wire.channel))
            and set(ids) == {str(wire) for wire in wires if wire.members[0] == rank}
            and all(len(id_) == UNIQUE_ID_BYTES for id_ in ids.values())
        )
    except (KeyError, TypeError, ValueError, AttributeError, IndexError):
        good = False
    if not good:
        raise CommError(f"what rank {rank} says of itself is damaged", cure="form the next generation without it")
    return found


def raise_peer_failure(ready: Mapping[int, Handle]) -> None:
    """Raise what another rank has given up with: all say the same, whoever was the first. Raises when one is lost, too."""
    for rank, handle in ready.items():
        if handle.done() and (words := receive_document(handle, rank)):
            what, cure = (str(words.get(key, ""))[:MAX_TEXT] for key in ("what", "cure"))
            raise CommError(what if GAVE_UP in what else f"rank {rank} {GAVE_UP}: {what}", cure=cure)


def receive_from_all(
    handles: Mapping[int, Handle], deadline: float, deadline_s: float, what: str, look: Callable[[], None] = lambda: None
) -> None:
    """Wait for a message of each rank; raises `CommTimeout` with those that did not come. `look` is called now and then."""
    late = dict(handles)
    while True:
        look()
        late = {rank: handle for rank, handle in late.items() if not handle.done()}
        if not late:
            return
        if time.monotonic() > deadline:
            raise CommTimeout(
                f"ranks {list(late)} have not {what} within {deadline_s:g} s",
                cure="these workers are slow, stopped, or hang in NCCL",
            )
        with contextlib.suppress(CommTimeout):
            next(iter(late.values())).wait(SLICE_S)
