"""How the ranks of one generation find each other over TCP: every worker listens once, higher ranks connect to lower ones.

Between two processes of one machine the connection is a Unix socket, which takes half the processor time of TCP for the same
bytes. Its name is the TCP address in Linux's abstract namespace: there is no file to be left behind, and who shares the name
shares the network namespace, so a name that answers is the listener of that very address, if it is the same user's.

A connecting rank presents (run, generation, rank, size). Whoever comes from another run or an older generation is refused;
one from a newer generation is kept until this worker is told of that generation too.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import struct
import time
from collections.abc import Sequence

from raypar.comm.tcp_wire import Greeting, missing_of_answer, pack_answer, unpack_answer, unpack_greeting
from raypar.errors import CommError, CommTimeout, GroupAborted

SOCKET_BUFFER_BYTES = 4 << 20
DIAL_S = 5.0


class Listener:
    """One worker's listening socket, for all its generations."""

    def __init__(self, host: str, near: bool = True) -> None:
        self._socket = socket.create_server((host, 0), family=family_of(host), backlog=1024)
        self._socket.setblocking(False)
        tune(self._socket)  # accepted sockets inherit the buffers, in time for the window scale of the handshake
        shown = f"[{host}]" if ":" in host else host
        self.address = f"{shown}:{self._socket.getsockname()[1]}"
        self._doors = [self._socket]
        if near:
            door = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                door.bind(near_name(self.address))
                door.listen(1024)
                door.setblocking(False)
                self._doors.append(door)
            except OSError:  # the name is taken by somebody else: everybody comes over TCP
                door.close()
        self._early: list[tuple[socket.socket, Greeting]] = []
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._reason: str | None = None
        self._closed = False

    def abort(self, reason: str) -> None:
        """From any thread: make a `connect` that is under way raise `GroupAborted(reason)`; without one, nothing."""
        if not self._closed:
            self._reason = reason
            os.eventfd_write(self._wake, 1)

    def connect(self, me: Greeting, addresses: Sequence[str], deadline_s: float) -> dict[int, socket.socket]:
        """Connected, non-blocking sockets of all other ranks.

        Raises `CommTimeout` naming the ranks that did not come, `CommError` naming one that cannot be reached,
        `GroupAborted` when a peer is already in a newer generation, or after `abort`.
        """
        if len(addresses) != me.size or not 0 <= me.rank < me.size:
            raise CommError(f"rank {me.rank} of {me.size} got {len(addresses)} addresses", cure="give one address per rank")
        if self._closed:
            raise GroupAborted("the listener was closed", cure="listen again")
        meeting = Meeting(self, me)
        try:
            return meeting.run(addresses, time.monotonic() + deadline_s, deadline_s)
        except BaseException:
            meeting.drop()
            raise

    def close(self) -> None:
        """Stop listening; idempotent."""
        if self._closed:
            return
        self._closed = True
        for early, _ in self._early:
            early.close()
        for door in self._doors:
            door.close()
        os.close(self._wake)


class Meeting:
    """One generation's connecting, in one thread."""

    def __init__(self, listener: Listener, me: Greeting) -> None:
        self.listener = listener
        self.me = me
        self.found: dict[int, socket.socket] = {}
        self.pending: dict[socket.socket, tuple[int | None, bytearray]] = {}
        self.selector = selectors.DefaultSelector()

    def run(self, addresses: Sequence[str], deadline: float, deadline_s: float) -> dict[int, socket.socket]:
        """See `Listener.connect`."""
        listener, me = self.listener, self.me
        for door in listener._doors:
            self.selector.register(door, selectors.EVENT_READ)
        self.selector.register(listener._wake, selectors.EVENT_READ)
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(listener._wake)  # an abort from before this call was meant for another generation
        listener._reason = None
        early, listener._early = listener._early, []
        for sock, greeting in early:
            self.judge(sock, greeting)
        for rank in range(me.rank):
            self.dial(rank, addresses[rank])
        while len(self.found) < me.size - 1:
            left = deadline - time.monotonic()
            if left <= 0:
                missing = [r for r in range(me.size) if r != me.rank and r not in self.found]
                raise CommTimeout(
                    f"rank {me.rank} of generation {me.generation}: ranks {missing} did not connect within {deadline_s:.3g} s",
                    cure="probe those workers; form the next generation without them",
                )
            for key, _ in self.selector.select(left):
                self.turn(key)
        self.selector.close()
        return self.found

    def turn(self, key: selectors.SelectorKey) -> None:
        """Something is ready."""
        if key.fileobj in self.listener._doors:
            with contextlib.suppress(BlockingIOError, ConnectionAbortedError):
                sock, _ = key.fileobj.accept()  # type: ignore[union-attr]
                sock.setblocking(False)
                self.pending[sock] = (None, bytearray())
                self.selector.register(sock, selectors.EVENT_READ)
        elif isinstance(key.fileobj, int):
            raise GroupAborted(self.listener._reason or "connecting was aborted", cure="connect the next generation")
        elif isinstance(key.fileobj, socket.socket) and key.fileobj in self.pending:
            self.read(key.fileobj)

    def dial(self, rank: int, address: str) -> None:
        """Connect to a lower rank and present ourselves."""
        host, _, port = address.rpartition(":")
        host = host.strip("[]")
        try:
            # It listens already, so connecting is one round trip; the answer may take until it hears of this generation.
            try:
                sock = connected(socket.AF_UNIX, near_name(address))
            except (ConnectionRefusedError, PermissionError):  # nobody of ours here: another machine, or nobody at all
                sock = connected(family_of(host), (host, int(port)))
            self.pending[sock] = (rank, bytearray())
            sock.sendall(self.me.pack())
            sock.setblocking(False)
        except OSError as error:
            raise CommError(
                f"rank {self.me.rank} cannot reach rank {rank} at {address}: {error}",
                cure="the worker has died or its host is not reachable from here; form the next generation without it",
            ) from error
        self.selector.register(sock, selectors.EVENT_READ)

    def read(self, sock: socket.socket) -> None:
        """Bytes of a greeting (accepted) or an answer (dialled)."""
        rank, data = self.pending[sock]
        try:
            got = sock.recv(4096 if rank is None else missing_of_answer(data))
        except BlockingIOError:
            return
        except OSError:
            got = b""
        data += got
        if rank is None:
            try:
                greeting = unpack_greeting(bytes(data))
            except CommError:
                greeting, got = None, b""
            if greeting is None and got:
                return
            self.selector.unregister(sock)
            del self.pending[sock]
            if greeting is None:
                sock.close()
            else:
                self.judge(sock, greeting)
            return
        refusal = unpack_answer(bytes(data))
        if refusal:
            raise GroupAborted(f"rank {rank} refused rank {self.me.rank}: {refusal}", cure="ask the driver for the next plan")
        if refusal is None:
            if not got:
                raise CommError(
                    f"rank {rank} closed the connection while rank {self.me.rank} was connecting",
                    cure="form the next generation without it",
                )
            return
        self.selector.unregister(sock)
        del self.pending[sock]
        self.found[rank] = sock

    def judge(self, sock: socket.socket, greeting: Greeting) -> None:
        """Welcome, keep for later, or refuse."""
        me = self.me
        if greeting.run == me.run and greeting.generation > me.generation:
            self.listener._early.append((sock, greeting))
            return
        refusal = ""
        if greeting.run != me.run:
            refusal = f"this is run {me.run!r}, not {greeting.run!r}"
        elif greeting.generation < me.generation:
            refusal = f"generation {greeting.generation} is over, this is {me.generation}"
        elif greeting.size != me.size or not me.rank < greeting.rank < me.size or greeting.rank in self.found:
            refusal = f"rank {greeting.rank} of {greeting.size} is not expected by rank {me.rank} of {me.size}"
        try:
            sock.send(pack_answer(refusal))
        except OSError:
            refusal = refusal or "it has gone"
        if refusal:
            sock.close()
        else:
            tune(sock)
            self.found[greeting.rank] = sock

    def drop(self) -> None:
        """Connecting has failed: close what there is."""
        self.selector.close()
        for sock in (*self.found.values(), *self.pending):
            sock.close()


def family_of(host: str) -> socket.AddressFamily:
    """IPv6 for addresses with colons."""
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def near_name(address: str) -> bytes:
    """The abstract Unix name that belongs to a TCP address."""
    return b"\0raypar/" + address.encode()[-90:]


def connected(family: socket.AddressFamily, name: bytes | tuple[str, int]) -> socket.socket:
    """A connection within `DIAL_S`. Raises `OSError`; `PermissionError` where a Unix name is another user's."""
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        tune(sock)
        sock.settimeout(DIAL_S)
        sock.connect(name)
        if family == socket.AF_UNIX:
            _, uid, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
            if uid != os.getuid():
                raise PermissionError(f"{name!r} belongs to user {uid}")
    except BaseException:
        sock.close()
        raise
    return sock


def tune(sock: socket.socket) -> None:
    """Small messages leave at once; large ones find room."""
    if sock.family != socket.AF_UNIX:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BUFFER_BYTES)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SOCKET_BUFFER_BYTES)
