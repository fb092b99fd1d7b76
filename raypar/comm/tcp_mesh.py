"""How the ranks of one generation find each other over TCP: every worker listens once, higher ranks connect to lower ones.

Between two processes of one machine the connection is a Unix socket, which takes half the processor time of TCP for the same
bytes. Its name is in Linux's abstract namespace: there is no file to be left behind, and who shares the name shares the network
namespace. It is made of the TCP address and the run's secret, so that nobody else can have taken it.

Both ends prove that they are of the run (`handshake`). Of those that have, one from an older generation is refused; one from a
newer generation is kept until this worker is told of that generation too.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass

from raypar.comm.handshake import Claim, Credential, DialerHandshake, pack_answer
from raypar.comm.tcp_accept import Acceptor, peer_user
from raypar.errors import CommError, CommTimeout, GroupAborted

SOCKET_BUFFER_BYTES = 4 << 20
DIAL_S = 5.0
CHALLENGE_S = 30.0
"""A worker's own thread answers a dialer at once, whatever the worker is doing; for so long its process may stand still."""
DIALS = 12
"""How often a connection that the other end closes is made again; then that is no matter of too many connections any more."""
DIAL_AGAIN_S, DIAL_AGAIN_MOST_S = 0.01, 0.5
"""Pause before the second dial, doubled each time, and the longest one."""


@dataclass(frozen=True, slots=True)
class Place:
    """Rank `rank` of `size` in a generation."""

    generation: int
    rank: int
    size: int


class Listener:
    """One worker's listening socket, for all its generations."""

    def __init__(self, host: str, credential: Credential, near: bool = True) -> None:
        listening = socket.create_server((host, 0), family=family_of(host), backlog=1024)
        listening.setblocking(False)
        tune(listening)  # accepted sockets inherit the buffers, in time for the window scale of the handshake
        shown = f"[{host}]" if ":" in host else host
        self.address = f"{shown}:{listening.getsockname()[1]}"
        self._credential = credential
        doors = [listening]
        if near:
            door = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                door.bind(near_name(self.address, credential))
                door.listen(1024)
                door.setblocking(False)
                doors.append(door)
            except OSError:  # the name is taken by somebody else: everybody comes over TCP
                door.close()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._reason: str | None = None
        self._closed = False
        self._acceptor = Acceptor(doors, credential, lambda: os.eventfd_write(self._wake, 1))

    def abort(self, reason: str) -> None:
        """From any thread: make a `connect` that is under way raise `GroupAborted(reason)`; without one, nothing."""
        if not self._closed:
            self._reason = reason
            os.eventfd_write(self._wake, 1)

    def connect(self, me: Place, addresses: Sequence[str], deadline_s: float) -> dict[int, socket.socket]:
        """Connected, non-blocking sockets of all other ranks.

        Raises `CommTimeout` naming the ranks that did not come, `CommError` naming one that cannot be reached,
        `GroupAborted` when a peer is already in a newer generation, or after `abort`.
        """
        if len(addresses) != me.size or not 0 <= me.rank < me.size:
            raise CommError(f"rank {me.rank} of {me.size} got {len(addresses)} addresses", cure="give one address per rank")
        if self._closed:
            raise GroupAborted("the listener was closed", cure="listen again")
        meeting = Meeting(self, me, addresses)
        try:
            return meeting.run(time.monotonic() + deadline_s, deadline_s)
        except BaseException:
            meeting.drop()
            raise

    def close(self) -> None:
        """Stop listening; idempotent."""
        if self._closed:
            return
        self._closed = True
        self._acceptor.close()
        os.close(self._wake)


class Dialing:
    """One lower rank that has not welcomed us yet."""

    __slots__ = ("dial", "rank", "since", "times")

    def __init__(self, rank: int, dial: DialerHandshake, since: float, times: int) -> None:
        self.rank, self.dial, self.since, self.times = rank, dial, since, times


class Meeting:
    """One generation's connecting, in one thread."""

    def __init__(self, listener: Listener, me: Place, addresses: Sequence[str]) -> None:
        self.listener = listener
        self.me = me
        self.addresses = addresses
        self.found: dict[int, socket.socket] = {}
        self.dialing: dict[socket.socket, Dialing] = {}
        self.again: list[tuple[float, int, int]] = []
        """(when, rank, how often it was dialed): whose connection was closed."""
        self.selector = selectors.DefaultSelector()

    def run(self, deadline: float, deadline_s: float) -> dict[int, socket.socket]:
        """See `Listener.connect`."""
        listener, me = self.listener, self.me
        self.selector.register(listener._wake, selectors.EVENT_READ)
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(listener._wake)  # an abort from before this call was meant for another generation
        listener._reason = None
        self.judge_arrivals()
        for rank in range(me.rank):
            self.dial(rank, 1)
        while len(self.found) < me.size - 1:
            now = time.monotonic()
            if now >= deadline:
                missing = [r for r in range(me.size) if r != me.rank and r not in self.found]
                raise CommTimeout(
                    f"rank {me.rank} of generation {me.generation}: ranks {missing} did not connect within {deadline_s:.3g} s",
                    cure="probe those workers; form the next generation without them",
                )
            for due in [due for due in self.again if due[0] <= now]:
                self.again.remove(due)
                self.dial(due[1], due[2] + 1)
            for key, _ in self.selector.select(min(deadline, self.next_due(now)) - now):
                if isinstance(key.fileobj, int):
                    self.woken()
                elif isinstance(key.fileobj, socket.socket) and key.fileobj in self.dialing:
                    self.read(key.fileobj)
        self.selector.close()
        return self.found

    def next_due(self, now: float) -> float:
        """When somebody is to be dialed again, or has been silent for too long. Raises `CommTimeout` naming one that has."""
        due = min((when for when, _, _ in self.again), default=float("inf"))
        for dialing in self.dialing.values():
            if not dialing.dial.challenged:
                if dialing.since + CHALLENGE_S <= now:
                    raise CommTimeout(
                        f"rank {dialing.rank} at {self.addresses[dialing.rank]} has not answered the greeting of rank "
                        f"{self.me.rank} within {CHALLENGE_S:.3g} s",
                        cure="its process stands still, or another program has its port; form the next generation without it",
                    )
                due = min(due, dialing.since + CHALLENGE_S)
        return due

    def woken(self) -> None:
        """Somebody has arrived, or `abort` was called."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.listener._wake)
        if self.listener._reason is not None:
            raise GroupAborted(self.listener._reason, cure="connect the next generation")
        self.judge_arrivals()

    def dial(self, rank: int, times: int) -> None:
        """Connect to a lower rank and present ourselves."""
        address = self.addresses[rank]
        host, _, port = address.rpartition(":")
        host = host.strip("[]")
        dial = DialerHandshake(self.listener._credential, Claim(self.me.generation, self.me.rank, rank, self.me.size))
        try:
            # It listens already, so connecting is one round trip; the answer may take until it hears of this generation.
            try:
                sock = connected(socket.AF_UNIX, near_name(address, self.listener._credential))
            except (ConnectionRefusedError, PermissionError, BlockingIOError):  # nobody of ours here, or a flood
                sock = connected(family_of(host), (host, int(port)))
            self.dialing[sock] = Dialing(rank, dial, time.monotonic(), times)
            try:
                sock.sendall(dial.hello)
            except (BrokenPipeError, ConnectionResetError):
                self.closed(sock)
                return
            sock.setblocking(False)
        except OSError as error:
            raise CommError(
                f"rank {self.me.rank} cannot reach rank {rank} at {address}: {error}",
                cure="the worker has died or its host is not reachable from here; form the next generation without it",
            ) from error
        self.selector.register(sock, selectors.EVENT_READ)

    def read(self, sock: socket.socket) -> None:
        """Bytes of a lower rank's challenge or answer."""
        dialing = self.dialing[sock]
        try:
            data = sock.recv(dialing.dial.wanted)
            reply = dialing.dial.feed(data) if data else b""
            if reply and sock.send(reply) < len(reply):
                data = b""
        except BlockingIOError:
            return
        except OSError:
            data = b""
        except CommError as error:
            address = self.addresses[dialing.rank]
            raise CommError(
                f"rank {self.me.rank} cannot reach rank {dialing.rank} at {address}: {error.what}", cure=error.cure
            ) from None
        if not data:
            self.selector.unregister(sock)
            self.closed(sock)
            return
        if dialing.dial.answer:
            raise GroupAborted(
                f"rank {dialing.rank} refused rank {self.me.rank}: {dialing.dial.answer}",
                cure="ask the driver for the next plan",
            )
        if dialing.dial.answer is not None:
            self.selector.unregister(sock)
            del self.dialing[sock]
            self.found[dialing.rank] = sock

    def closed(self, sock: socket.socket) -> None:
        """Put out by a flood of strangers, or its process has died: dialing again tells which."""
        dialing = self.dialing.pop(sock)
        sock.close()
        if dialing.times >= DIALS:
            raise CommError(
                f"rank {dialing.rank} closed the connection while rank {self.me.rank} was connecting, {DIALS} times",
                cure="form the next generation without it",
            )
        pause_s = min(DIAL_AGAIN_MOST_S, DIAL_AGAIN_S * 2 ** (dialing.times - 1))
        self.again.append((time.monotonic() + pause_s, dialing.rank, dialing.times))

    def judge_arrivals(self) -> None:
        """Welcome or refuse those that have proven to be of the run and want into this generation, or an older one."""
        for sock, claim in self.listener._acceptor.take(self.me.generation):
            self.judge(sock, claim)

    def judge(self, sock: socket.socket, claim: Claim) -> None:
        """Welcome, or refuse."""
        me = self.me
        refusal = ""
        if claim.generation < me.generation:
            refusal = f"generation {claim.generation} is over, this is {me.generation}"
        elif (claim.size, claim.to) != (me.size, me.rank) or not me.rank < claim.rank < me.size or claim.rank in self.found:
            refusal = f"rank {claim.rank} of {claim.size} is not expected by rank {me.rank} of {me.size}"
        try:
            tune(sock)
            sock.send(pack_answer(refusal))
        except OSError:
            refusal = refusal or "it has gone"
        if refusal:
            sock.close()
        else:
            self.found[claim.rank] = sock

    def drop(self) -> None:
        """Connecting has failed: close what there is."""
        self.selector.close()
        for sock in (*self.found.values(), *self.dialing):
            sock.close()


def family_of(host: str) -> socket.AddressFamily:
    """IPv6 for addresses with colons."""
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def near_name(address: str, credential: Credential) -> bytes:
    """The abstract Unix name that belongs to a TCP address."""
    public = address.encode()[-80:]
    return b"\0raypar/" + public + b"/" + credential.label(public).encode()


def connected(family: socket.AddressFamily, name: bytes | tuple[str, int]) -> socket.socket:
    """A connection within `DIAL_S`. Raises `OSError`; `PermissionError` where a Unix name is another user's."""
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        tune(sock)
        sock.settimeout(DIAL_S)
        sock.connect(name)
        if family == socket.AF_UNIX and peer_user(sock) != os.getuid():
            raise PermissionError(f"{name!r} belongs to user {peer_user(sock)}")
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
