"""Connects the ranks of one generation over TCP: every worker listens all the time, higher ranks dial lower ones.

Between two processes of one machine the connection is a Unix socket, which takes half the processor time of TCP for the same
bytes. Its name is in Linux's abstract namespace: no file is left behind, and processes that share the name share the network
namespace. The name is made of the TCP address and the run's secret, so that no other program can have taken it.

Both ends prove that they belong to the run (`handshake`). A peer that has, but wants into an older generation, is refused; one
that wants into a newer generation is kept until this worker is told of that generation too.
"""

from __future__ import annotations

import contextlib
import errno
import os
import selectors
import socket
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from raypar.comm.tcp.acceptor import Acceptor, peer_user_id
from raypar.comm.tcp.handshake import DialerHandshake, RankClaim, RunCredential, pack_answer
from raypar.errors import CommError, CommTimeout, GroupAborted

SOCKET_BUFFER_BYTES = 4 << 20
CONNECT_SOCKET_S = 4.0
"""Limit of connecting a socket, less than `RunPolicy.adopt_s`. A machine that cannot be reached refuses nothing, it is silent.
Linux repeats the first packet after 1 and 3 s."""
CHALLENGE_S = 30.0
"""Limit from HELLO to CHALLENGE. A worker's acceptor thread answers at once, whatever the worker computes; its process may be
stopped for this long."""
MAX_DIALS = 12
"""Attempts to connect to a peer that closes the connection. A flood of strangers may close a few, but not so many."""
REDIAL_S, MAX_REDIAL_S = 0.01, 0.5
"""Pause before the second attempt, doubled each time, and the longest pause."""


@dataclass(frozen=True, slots=True)
class GenerationRank:
    """One rank's place in a generation."""

    generation: int
    rank: int
    size: int
    """Number of ranks."""


class Listener:
    """One worker's listening sockets (TCP and Unix), open for all generations of a run."""

    def __init__(self, host: str, credential: RunCredential, unix_sockets: bool = True) -> None:
        listening = socket.create_server((host, 0), family=address_family(host), backlog=1024)
        listening.setblocking(False)
        tune_socket(listening)  # accepted sockets inherit the buffers, in time for the window scale of the handshake
        shown = f"[{host}]" if ":" in host else host
        self.address = f"{shown}:{listening.getsockname()[1]}"
        """`host:port`"""
        self._credential = credential
        listeners = [listening]
        if unix_sockets:
            unix = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                unix.bind(unix_socket_name(self.address, credential))
                unix.listen(1024)
                unix.setblocking(False)
                listeners.append(unix)
            except OSError:  # the name is taken: all peers connect over TCP
                unix.close()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        """Wakes `connect`: a peer has arrived, or `abort` was called."""
        self._reason: str | None = None
        """Of the last `abort`."""
        self._closed = False
        self._acceptor = Acceptor(listeners, credential, lambda: os.eventfd_write(self._wake, 1))

    def abort(self, reason: str) -> None:
        """From any thread: make a `connect` that is under way raise `GroupAborted(reason)`; without one, nothing."""
        if not self._closed:
            self._reason = reason
            os.eventfd_write(self._wake, 1)

    def connect(
        self, me: GenerationRank, addresses: Sequence[str], deadline_s: float, peers: Collection[int] | None = None
    ) -> dict[int, socket.socket]:
        """Connected, non-blocking sockets of the ranks `peers`; None: of all others.

        Raises `CommTimeout` naming the ranks that did not come, `CommError` naming one that cannot be reached,
        `GroupAborted` when a peer is already in a newer generation, or after `abort`.
        """
        if len(addresses) != me.size or not 0 <= me.rank < me.size:
            raise CommError(f"rank {me.rank} of {me.size} got {len(addresses)} addresses", cure="give one address per rank")
        if self._closed:
            raise GroupAborted("the listener was closed", cure="listen again")
        others = frozenset(range(me.size)) - {me.rank}
        rendezvous = Rendezvous(self, me, addresses, others if peers is None else others & frozenset(peers))
        try:
            return rendezvous.run(time.monotonic() + deadline_s, deadline_s)
        except BaseException:
            rendezvous.close_connections()
            raise

    def close(self) -> None:
        """Stop listening; idempotent."""
        if self._closed:
            return
        self._closed = True
        self._acceptor.close()
        os.close(self._wake)


class DialAttempt:
    """A connection to a lower rank that has not answered with a welcome yet."""

    __slots__ = ("attempt", "connecting", "handshake", "rank", "started_s")

    def __init__(self, rank: int, handshake: DialerHandshake, since_s: float, times: int, connecting: bool) -> None:
        self.rank = rank
        self.handshake = handshake
        self.started_s = since_s
        """When this attempt began; once its socket is connected, when that was."""
        self.connecting = connecting
        """Whether its socket is not connected yet."""
        self.attempt = times
        """Which attempt it is, from 1."""


class Rendezvous:
    """Connects this worker with other ranks of one generation, in one thread."""

    def __init__(self, listener: Listener, me: GenerationRank, addresses: Sequence[str], peers: frozenset[int]) -> None:
        self.listener = listener
        self.me = me
        """This worker's rank in the generation."""
        self.addresses = addresses
        """By rank."""
        self.peers = peers
        """The ranks to connect with."""
        self.connected: dict[int, socket.socket] = {}
        """Rank -> its connection, once both ends have proven themselves."""
        self.dialing: dict[socket.socket, DialAttempt] = {}
        """Connections to lower ranks that are in the handshake."""
        self.redials: list[tuple[float, int, int]] = []
        """(time, rank, attempts so far) of peers that are to be dialed again, because they closed the connection."""
        self.selector = selectors.DefaultSelector()

    def run(self, deadline: float, deadline_s: float) -> dict[int, socket.socket]:
        """See `Listener.connect`."""
        listener, me = self.listener, self.me
        self.selector.register(listener._wake, selectors.EVENT_READ)
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(listener._wake)  # an abort from before this call was meant for another generation
        listener._reason = None
        self.answer_arrivals()
        for rank in sorted(self.peers):
            if rank < me.rank:
                self.dial(rank, 1)
        while len(self.connected) < len(self.peers):
            now = time.monotonic()
            if now >= deadline:
                missing = sorted(self.peers - self.connected.keys())
                raise CommTimeout(
                    f"rank {me.rank} of generation {me.generation}: ranks {missing} did not connect within {deadline_s:.3g} s",
                    cure="probe those workers; form the next generation without them",
                )
            for due in [due for due in self.redials if due[0] <= now]:
                self.redials.remove(due)
                self.dial(due[1], due[2] + 1)
            for key, _ in self.selector.select(min(deadline, self.next_due(now)) - now):
                if isinstance(key.fileobj, int):
                    self.handle_wake_up()
                elif isinstance(key.fileobj, socket.socket) and key.fileobj in self.dialing:
                    if self.dialing[key.fileobj].connecting:
                        self.finish_connecting(key.fileobj)
                    else:
                        self.read(key.fileobj)
        self.selector.close()
        return self.connected

    def next_due(self, now: float) -> float:
        """When a peer must be dialed again or its silence becomes an error. Raises `CommError` if that time has passed."""
        due = min((when for when, _, _ in self.redials), default=float("inf"))
        for dialing in self.dialing.values():
            if dialing.connecting:
                if dialing.started_s + CONNECT_SOCKET_S <= now:
                    raise self.unreachable_error(dialing.rank, f"no connection within {CONNECT_SOCKET_S:.3g} s")
                due = min(due, dialing.started_s + CONNECT_SOCKET_S)
            elif not dialing.handshake.challenged:
                if dialing.started_s + CHALLENGE_S <= now:
                    raise CommTimeout(
                        f"rank {dialing.rank} at {self.addresses[dialing.rank]} has not answered the greeting of rank "
                        f"{self.me.rank} within {CHALLENGE_S:.3g} s",
                        cure="its process is stopped, or another program has its port; form the next generation without it",
                    )
                due = min(due, dialing.started_s + CHALLENGE_S)
        return due

    def handle_wake_up(self) -> None:
        """Handle a wake-up: a peer has arrived, or `abort` was called."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.listener._wake)
        if self.listener._reason is not None:
            raise GroupAborted(self.listener._reason, cure="connect the next generation")
        self.answer_arrivals()

    def dial(self, rank: int, times: int) -> None:
        """Begin to connect to a lower rank. `times`: which attempt this is, from 1.

        Nothing here waits: while a machine cannot be reached, `abort` must still end this call, and the other ranks connect.
        """
        address = self.addresses[rank]
        host, _, port = address.rpartition(":")
        host = host.strip("[]")
        handshake = DialerHandshake(self.listener._credential, RankClaim(self.me.generation, self.me.rank, rank, self.me.size))
        try:
            # It listens already, so connecting is one round trip; the answer may take until it hears of this generation.
            try:
                sock, connecting = connect_unix_socket(unix_socket_name(address, self.listener._credential)), False
            except (ConnectionRefusedError, PermissionError, BlockingIOError):  # no worker of this run here, or a flood
                sock, connecting = begin_tcp_connection(host, int(port)), True
        except OSError as error:
            raise self.unreachable_error(rank, error) from error
        self.dialing[sock] = DialAttempt(rank, handshake, time.monotonic(), times, connecting)
        if connecting:
            self.selector.register(sock, selectors.EVENT_WRITE)
        else:
            self.greet(sock)

    def finish_connecting(self, sock: socket.socket) -> None:
        """Greet a lower rank, now that the socket to it is connected, or has failed."""
        dialing = self.dialing[sock]
        self.selector.unregister(sock)
        number = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if number:
            raise self.unreachable_error(dialing.rank, OSError(number, os.strerror(number)))
        dialing.connecting, dialing.started_s = False, time.monotonic()
        self.greet(sock)

    def greet(self, sock: socket.socket) -> None:
        """Send HELLO on a connected socket."""
        dialing = self.dialing[sock]
        try:
            sock.sendall(dialing.handshake.hello)
            sock.setblocking(False)
        except (BrokenPipeError, ConnectionResetError):
            self.redial_later(sock)
            return
        except OSError as error:
            raise self.unreachable_error(dialing.rank, error) from error
        self.selector.register(sock, selectors.EVENT_READ)

    def unreachable_error(self, rank: int, why: OSError | str) -> CommError:
        """The error when a lower rank cannot be reached."""
        error = CommError(
            f"rank {self.me.rank} cannot reach rank {rank} at {self.addresses[rank]}: {why}",
            cure="the worker has died or its host is not reachable from here; form the next generation without it",
        )
        error.unreachable_ranks = (rank,)
        return error

    def read(self, sock: socket.socket) -> None:
        """Read bytes of a lower rank's challenge or answer."""
        dialing = self.dialing[sock]
        handshake = dialing.handshake
        try:
            data = sock.recv(handshake.wanted_bytes)
            reply = handshake.feed(data) if data else b""
            if reply and sock.send(reply) < len(reply):
                data = b""  # treated as a connection that was closed
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
            self.redial_later(sock)
            return
        if handshake.answer:
            raise GroupAborted(
                f"rank {dialing.rank} refused rank {self.me.rank}: {handshake.answer}",
                cure="ask the driver for the next plan",
            )
        if handshake.answer is not None:
            self.selector.unregister(sock)
            del self.dialing[sock]
            self.connected[dialing.rank] = sock

    def redial_later(self, sock: socket.socket) -> None:
        """Plan to dial again a peer that closed its connection. Raises `CommError` after `MAX_DIALS` attempts.

        It has dropped us in a flood of strangers, or its process has died: dialing again tells which.
        """
        dialing = self.dialing.pop(sock)
        sock.close()
        if dialing.attempt >= MAX_DIALS:
            raise CommError(
                f"rank {dialing.rank} closed the connection while rank {self.me.rank} was connecting, {MAX_DIALS} times",
                cure="form the next generation without it",
            )
        pause_s = min(MAX_REDIAL_S, REDIAL_S * 2 ** (dialing.attempt - 1))
        self.redials.append((time.monotonic() + pause_s, dialing.rank, dialing.attempt))

    def answer_arrivals(self) -> None:
        """Welcome or refuse peers that have proven that they belong to the run, of this generation or an older one."""
        for sock, claim in self.listener._acceptor.take(self.me.generation):
            self.answer_peer(sock, claim)

    def answer_peer(self, sock: socket.socket, claim: RankClaim) -> None:
        """Welcome a proven peer that claims its rank of this generation; refuse another one, with the reason."""
        me = self.me
        refusal = ""
        if claim.generation < me.generation:
            refusal = f"generation {claim.generation} is over, this is {me.generation}"
        elif (
            (claim.size, claim.dialed_rank) != (me.size, me.rank)
            or not (me.rank < claim.rank and claim.rank in self.peers)
            or claim.rank in self.connected
        ):
            refusal = f"rank {claim.rank} of {claim.size} is not expected by rank {me.rank} of {me.size}"
        try:
            tune_socket(sock)
            sock.send(pack_answer(refusal))
        except OSError:
            refusal = refusal or "it has closed the connection"
        if refusal:
            sock.close()
        else:
            self.connected[claim.rank] = sock

    def close_connections(self) -> None:
        """Close all connections, because connecting has failed."""
        self.selector.close()
        for sock in (*self.connected.values(), *self.dialing):
            sock.close()


def address_family(host: str) -> socket.AddressFamily:
    """The address family of a host: IPv6 for addresses with colons, else IPv4."""
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def unix_socket_name(address: str, credential: RunCredential) -> bytes:
    """The abstract Unix name that belongs to a TCP address."""
    public = address.encode()[-80:]
    return b"\0raypar/" + public + b"/" + credential.label(public).encode()


def connect_unix_socket(name: bytes) -> socket.socket:
    """A connection to a Unix socket of this machine. Raises `OSError`; `PermissionError` where the name is another user's."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        tune_socket(sock)
        sock.settimeout(CONNECT_SOCKET_S)
        sock.connect(name)
        if peer_user_id(sock) != os.getuid():
            raise PermissionError(f"{name!r} belongs to user {peer_user_id(sock)}")
    except BaseException:
        sock.close()
        raise
    return sock


def begin_tcp_connection(host: str, port: int) -> socket.socket:
    """A non-blocking socket that has begun to connect: once it is writable, `SO_ERROR` says how that went."""
    sock = socket.socket(address_family(host), socket.SOCK_STREAM)
    try:
        tune_socket(sock)
        sock.setblocking(False)
        number = sock.connect_ex((host, port))
        if number not in (0, errno.EINPROGRESS):
            raise OSError(number, os.strerror(number))
    except BaseException:
        sock.close()
        raise
    return sock


def tune_socket(sock: socket.socket) -> None:
    """Send small messages at once, and give large ones large buffers."""
    if sock.family != socket.AF_UNIX:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BUFFER_BYTES)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SOCKET_BUFFER_BYTES)
