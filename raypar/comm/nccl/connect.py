"""Makes the NCCL communicators of one generation, over a TCP transport that is connected already.

Every rank sends all others a hello: its library, its device, its communicators, and a fresh unique id for each communicator
whose first rank it is. All ranks refuse what cannot work before NCCL is asked.

CuPy's communicators are blocking: making one can neither be interrupted nor given a limit. So a thread makes them; at the
deadline the thread is left behind, inside NCCL. All ranks make their communicators in one order, so that no two wait for each
other.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypedDict

import torch

from raypar.comm.nccl import bindings
from raypar.comm.nccl.communicator_stream import CommunicatorStream
from raypar.comm.nccl.device import BLOCKS, DEFAULT_BLOCKS, WORKER_ENVIRONMENT, Device, positive_setting
from raypar.comm.nccl.transport import NcclTransport
from raypar.comm.nccl.tree_sum import compile_ahead
from raypar.comm.tcp.transport import TcpTransport
from raypar.comm.transport import COLLECTIVES, CommunicatorKey, Handle
from raypar.errors import ClusterError, CommError, CommTimeout, GroupAborted


class Hello(TypedDict):
    """What a rank says of itself before communicators are made, as JSON."""

    version: int
    """The number of its NCCL's release."""
    device: str
    """Tells its device from all others."""
    blocks: int
    """Most thread blocks of its kernels (NCCL_MAX_CTAS)."""
    shares: bool
    """Whether its NCCL may share a device with other ranks'."""
    communicators: Sequence[tuple[Sequence[int], str, int]]
    """(members, operation, channel) of each communicator that it will be in."""
    ids: Mapping[str, str]
    """Communicator whose first rank it is -> the unique id, in hexadecimal."""


HELLO_TAG, READY_TAG = 1, 2
"""Tags on the control transport."""
MAX_DOCUMENT_BYTES = 4 << 20
"""Size limit of a rank's document: some hundred bytes for each of its communicators."""
MAX_TEXT = 10_000
"""Characters of another rank's error that are passed on."""
UNIQUE_ID_BYTES = 128
"""Size of NCCL's `ncclUniqueId`."""
CHECK_S = 0.002
"""Pause between two looks whether the communicators are made."""
EVENT_CHECK_S = 0.0002
"""Pause between two looks whether a communicator's first work is done."""
GAVE_UP = "gave up connecting"
"""In the error of a rank that gives up, and of those that pass it on: it names the rank already."""
SLICE_S = 0.05
"""How long to wait for one rank's message before looking at the others'."""

SHARED_GPU_SINCE = 23000
"""NCCL 2.30 knows NCCL_MULTI_RANK_GPU_ENABLE."""


def connect_nccl(
    control: TcpTransport,
    *,
    device: Device,
    communicators: Iterable[CommunicatorKey],
    deadline_s: float,
    exact: bool = True,
    report_unended: Callable[[Sequence[str]], None] = lambda names: None,
) -> NcclTransport:
    """An `nccl` transport with those of `communicators` that name this rank; it owns `control` from here on.

    All members of a communicator name it; groups of one need none. Raises `ClusterError` for what the ranks' libraries or
    devices cannot do, `CommTimeout` at the deadline, `CommError` when a rank is lost meanwhile. `control` is closed then, and a
    thread may be left behind that waits for other ranks inside NCCL. `exact`: see `CommunicatorStream`; one for all ranks;
    `report_unended`: see `NcclTransport`.
    """
    deadline = time.monotonic() + deadline_s
    try:
        mine = sorted({key for key in communicators if control.rank in key.members and len(key.members) > 1})
        check_communicator_keys(mine, control, device)
        hellos = exchange_hellos(control, device, mine, deadline, deadline_s)
        check_ranks_compatible(hellos, mine, control.rank)
    except BaseException:
        control.close()
        raise
    ids = {name: bytes.fromhex(text) for hello in hellos.values() for name, text in hello["ids"].items()}
    making = CommunicatorSetup(control.rank, device, mine, ids, exact)
    others = sorted(control.peers)
    try:
        ready = {rank: control.recv(None, source=rank, tag=READY_TAG) for rank in others}
        making.wait(ready, deadline, deadline_s)
        send_document_to_all(control, {})
        wait_for_message_from_each_rank(
            ready, deadline, deadline_s, "made all communicators", lambda: raise_peer_failure(ready)
        )
    except BaseException as error:
        if isinstance(error, CommError) and not isinstance(error, GroupAborted):
            with contextlib.suppress(CommError):
                send_document_to_all(control, {"what": error.what, "cure": error.cure})
        transport = NcclTransport(control, device, making.give_up(), report_unended)
        transport.abort(f"rank {control.rank} gave up connecting: {error}")
        transport.close()
        raise
    return NcclTransport(control, device, making.streams, report_unended)


def check_communicator_keys(keys: Sequence[CommunicatorKey], control: TcpTransport, device: Device) -> None:
    """Raise an error for a key that names no possible communicator, or ranks that are not connected with this one, which would
    get no hello from them; and for more keys than the device can serve at once."""
    rank, size = control.rank, control.size
    for key in keys:
        ascending = list(key.members) == sorted(set(key.members) & set(range(size)))
        pair = len(set(key.members) & set(range(size))) == len(key.members) == 2
        if not (pair if key.operation == "message" else ascending and key.operation in COLLECTIVES):
            raise CommError(
                f"{key!r} names nothing that {size} ranks can do",
                cure=f"messages have two ranks, (source, destination); collectives are {', '.join(COLLECTIVES)}, ranks ascend",
            )
        lacking = sorted(set(key.members) - control.peers - {rank})
        if lacking:
            raise CommError(
                f"a communicator is named for {key} with ranks {lacking}, with which rank {rank} has no connection",
                cure="report this: the connections of the plan (worker/connected_ranks.py) leave them out",
            )
    if len(keys) > device.max_communicators:
        settings = " ".join(f"{name}={value}" for name, value in WORKER_ENVIRONMENT.items())
        raise ClusterError(
            f"rank {rank} would use {len(keys)} communicators; of more than {device.max_communicators} on {device.name}, "
            "one may wait for another that waits for it",
            cure=f"start the workers with {settings}, or plan for fewer groups and neighbours",
        )


def exchange_hellos(
    control: TcpTransport, device: Device, keys: Sequence[CommunicatorKey], deadline: float, deadline_s: float
) -> dict[int, Hello]:
    """Rank -> the hello of each rank with which this one is connected, and its own, ascending."""
    device.bind()
    hello: Hello = {
        "version": bindings.nccl_version(),
        "device": device.identity,
        "blocks": positive_setting("NCCL_MAX_CTAS", DEFAULT_BLOCKS),
        "shares": os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1",
        "communicators": [(list(key.members), key.operation, key.channel) for key in keys],
        "ids": {str(key): bindings.new_unique_id().hex() for key in keys if key.members[0] == control.rank},
    }
    send_document_to_all(control, hello, HELLO_TAG)
    others = sorted(control.peers)
    handles = {rank: control.recv(None, source=rank, tag=HELLO_TAG) for rank in others}
    wait_for_message_from_each_rank(handles, deadline, deadline_s, "said what NCCL and device it has")
    known = {rank: receive_hello(handle, rank) for rank, handle in handles.items()} | {control.rank: hello}
    return dict(sorted(known.items()))


def check_ranks_compatible(hellos: Mapping[int, Hello], keys: Sequence[CommunicatorKey], rank: int) -> None:
    """Raise an error if versions and settings of NCCL, devices or communicators of the ranks do not fit together.

    All ranks that are connected with all others raise alike, except about communicators.
    """
    devices: dict[str, list[int]] = {}
    for other, hello in hellos.items():
        devices.setdefault(hello["device"], []).append(other)
    check_same_nccl(hellos)
    for name, ranks in devices.items():
        can_share = hellos[rank]["version"] >= SHARED_GPU_SINCE and all(hellos[r]["shares"] for r in ranks)
        if len(ranks) > 1 and not can_share:
            raise ClusterError(
                f"ranks {ranks} are on one device, {name}, which NCCL refuses",
                cure="give every worker a GPU of its own; to try things out, give each process another NCCL_HOSTID"
                " (with NCCL_SOCKET_IFNAME=lo), or set NCCL_MULTI_RANK_GPU_ENABLE=1 (NCCL 2.30 and later)",
            )
    known = {str(key) for key in keys}
    for other, hello in hellos.items():
        theirs = {
            str(key): key
            for members, name, channel in hello["communicators"]
            if (key := CommunicatorKey(tuple(members), name, channel))
        }
        missing = [str(w) for w in keys if other in w.members and str(w) not in theirs]
        unknown = [name for name, key in theirs.items() if rank in key.members and name not in known]
        if missing or unknown:
            raise CommError(
                f"ranks {rank} and {other} disagree about what they do together: only rank {rank} names "
                f"{missing or 'nothing'}, only rank {other} {unknown or 'nothing'}",
                cure="connect all ranks with the communicators of one plan",
            )


def check_same_nccl(hellos: Mapping[int, Hello]) -> None:
    """Raise `ClusterError` if ranks have different versions of NCCL, or number their kernels' blocks differently."""
    versions: dict[int, list[int]] = {}
    blocks: dict[int, list[int]] = {}
    for other, hello in hellos.items():
        versions.setdefault(hello["version"], []).append(other)
        blocks.setdefault(hello["blocks"], []).append(other)
    if len(versions) > 1:
        who = "; ".join(
            f"{bindings.format_nccl_version(version)}: ranks {ranks}" for version, ranks in sorted(versions.items())
        )
        raise ClusterError(
            f"the ranks have different versions of NCCL, which do not understand each other ({who})",
            cure="install the same PyTorch, or the same nvidia-nccl package, on all nodes",
        )
    if len(blocks) > 1:
        who = "; ".join(f"{count}: ranks {ranks}" for count, ranks in sorted(blocks.items()))
        raise ClusterError(
            f"the ranks cut what NCCL sends in different numbers of parts, by NCCL_MAX_CTAS: {who}",
            cure=f"set NCCL_MAX_CTAS={BLOCKS[-1]} for all workers: their GPUs are of different kinds, or only some set it",
        )


class CommunicatorSetup(threading.Thread):
    """A thread that makes this rank's communicators, one after the other, and their connections."""

    def __init__(
        self, rank: int, device: Device, keys: Sequence[CommunicatorKey], ids: Mapping[str, bytes], exact: bool
    ) -> None:
        super().__init__(name=f"raypar-nccl-{rank}", daemon=True)
        self.streams: dict[CommunicatorKey, CommunicatorStream] = {}
        """Communicators made so far."""
        self._given_up = False
        self._deciding = threading.Lock()
        """Guards `_given_up` and `streams`."""
        self._rank = rank
        self._device = device
        self._keys = keys
        self._ids = ids
        """Name of a communicator -> its unique id."""
        self._exact = exact
        self._under_way = "nothing"
        """Name of the communicator that is being made."""
        self._error: BaseException | None = None
        self._over = threading.Event()
        self.start()

    def run(self) -> None:
        """Make all communicators; one that is made after `give_up` is aborted here."""
        try:
            self._device.bind()
            for key in self._keys:
                self._under_way = str(key)
                if self._exact and len(key.members) > 2 and key.operation in ("all_reduce", "reduce_scatter"):
                    compile_ahead(self._device.device, len(key.members))
                me = key.members.index(self._rank)
                communicator = bindings.NcclCommunicator(len(key.members), self._ids[str(key)], me)
                with self._deciding:
                    if self._given_up:
                        communicator.abort()
                        return
                    stream = self.streams[key] = self._make_stream(key, me, communicator)
                with stream.lock:
                    stream.warm_up()
                    event = stream.device_stream.record_event()
                while not event.query() and not self._given_up:
                    with stream.lock:
                        if not self._given_up:
                            communicator.raise_background_error()
                    time.sleep(EVENT_CHECK_S)
        except CommError as error:
            self._error = type(error)(f"{self._under_way}: {error.what}", error.cure)
        except BaseException as error:
            self._error = error
        finally:
            self._over.set()

    def _make_stream(self, key: CommunicatorKey, me: int, communicator: bindings.NcclCommunicator) -> CommunicatorStream:
        try:
            return CommunicatorStream(key, me, communicator, self._device, exact=self._exact)
        except BaseException:
            communicator.abort()  # else Python's collector destroys it, which may wait for the others forever
            raise

    def give_up(self) -> dict[CommunicatorKey, CommunicatorStream]:
        """Make no more communicators; return those that are made."""
        with self._deciding:
            self._given_up = True
            return dict(self.streams)

    def wait(self, others: Mapping[int, Handle], deadline: float, deadline_s: float) -> None:
        """Wait until all communicators are made. `others`: receives of the other ranks' results; they fail with a lost rank."""
        while not self._over.wait(CHECK_S):
            raise_peer_failure(others)
            if time.monotonic() > deadline:
                raise CommTimeout(
                    f"rank {self._rank} could not make the NCCL communicator for {self._under_way} within {deadline_s:g} s",
                    cure="replace the worker (NCCL cannot be interrupted here); NCCL_DEBUG=INFO in the workers' environment "
                    "says what it waits for, NCCL_SOCKET_IFNAME chooses the network",
                )
        if isinstance(self._error, bindings.PeerEnded):
            until = min(deadline, time.monotonic() + bindings.REASON_S)
            while time.monotonic() < until:
                raise_peer_failure(others)
                time.sleep(CHECK_S)
        if self._error is not None:
            raise self._error


def send_document_to_all(control: TcpTransport, document: Mapping[str, str] | Hello, tag: int = READY_TAG) -> None:
    """Send a document to all ranks with which this one is connected."""
    text = torch.frombuffer(bytearray(json.dumps(document).encode()), dtype=torch.uint8)
    for rank in sorted(control.peers):
        control.send(text, to=rank, tag=tag)


def receive_document(handle: Handle, rank: int) -> dict[str, Any]:
    """The document of a completed receive. Raises `CommError` naming the rank if it is damaged or too long."""
    tensor = handle.tensor()
    try:
        if tensor.dtype != torch.uint8 or tensor.nbytes > MAX_DOCUMENT_BYTES:
            raise ValueError(f"{tensor.nbytes:,} bytes of {tensor.dtype}")
        found = json.loads(bytes(tensor.numpy()))
        if not isinstance(found, dict):
            raise ValueError(f"a {type(found).__name__}")
    except ValueError as error:
        raise CommError(f"what rank {rank} tells is damaged: {error}", cure="form the next generation without it") from None
    return found


def receive_hello(handle: Handle, rank: int) -> Hello:
    """A rank's hello, checked: its fields have their types, and each communicator whose first rank it is has a unique id.

    Raises `CommError` naming the rank.
    """
    found = receive_document(handle, rank)
    try:
        keys = [CommunicatorKey(tuple(members), operation, channel) for members, operation, channel in found["communicators"]]
        ids = {name: bytes.fromhex(text) for name, text in found["ids"].items()}
        good = (
            [type(found[key]) for key in ("version", "device", "blocks", "shares")] == [int, str, int, bool]
            and all(type(number) is int for key in keys for number in (*key.members, key.channel))
            and set(ids) == {str(key) for key in keys if key.members[0] == rank}
            and all(len(id_) == UNIQUE_ID_BYTES for id_ in ids.values())
        )
    except (KeyError, TypeError, ValueError, AttributeError, IndexError):
        good = False
    if not good:
        raise CommError(f"what rank {rank} says of itself is damaged", cure="form the next generation without it")
    return {
        "version": found["version"],
        "device": found["device"],
        "blocks": found["blocks"],
        "shares": found["shares"],
        "communicators": found["communicators"],
        "ids": found["ids"],
    }


def raise_peer_failure(ready: Mapping[int, Handle]) -> None:
    """Raise the error with which another rank gave up: the first one, which all pass on. Raises for a lost rank too."""
    for rank, handle in ready.items():
        if handle.done() and (document := receive_document(handle, rank)):
            what, cure = (str(document.get(key, ""))[:MAX_TEXT] for key in ("what", "cure"))
            raise CommError(what if GAVE_UP in what else f"rank {rank} {GAVE_UP}: {what}", cure=cure)


def wait_for_message_from_each_rank(
    handles: Mapping[int, Handle], deadline: float, deadline_s: float, what: str, check: Callable[[], None] = lambda: None
) -> None:
    """Wait for a message of each rank; raises `CommTimeout` naming ranks that sent none. `check` is called repeatedly."""
    late = dict(handles)
    while True:
        check()
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
