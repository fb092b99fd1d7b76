"""The thread that accepts a worker's connections, at any time, and keeps only those that prove that they belong to the run.

Connections of strangers are cheap: each has `HANDSHAKE_S` to prove itself, at most `MAX_PENDING` may try at once (a further
one replaces the oldest, silent ones first), and no more is read than the handshake has. A peer that is dropped in a flood
dials again. Between two generations no other thread of a worker accepts connections: without this thread, strangers would fill
the kernel's queue.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence

from raypar.comm.tcp.handshake import AcceptorHandshake, RankClaim, RunCredential
from raypar.errors import CommError

log = logging.getLogger("raypar")

THREAD = "raypar-accept"
HANDSHAKE_S = 5.0
"""Limit from accepting a connection to its proof. A peer that was stopped for longer dials again."""
MAX_PENDING = 256
"""Most connections that have not proven themselves yet."""
ACCEPTS_PER_TURN = 64
"""Most connections accepted before those already there are read again."""
PAUSE_S = 0.05
"""How long nothing is accepted after the process or the machine has run out of descriptors or memory."""
EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class UnauthenticatedConnection:
    """A connection that has not proven itself, and is dropped at the deadline."""

    __slots__ = ("deadline", "handshake", "socket")

    def __init__(self, sock: socket.socket, handshake: AcceptorHandshake, deadline: float) -> None:
        self.socket = sock
        self.handshake = handshake
        self.deadline = deadline


class Acceptor:
    """Owns `listeners` (listening, non-blocking sockets) and all connections until they are taken.

    `arrived` is called, in the thread, when there is something to `take`.
    """

    def __init__(self, listeners: Sequence[socket.socket], credential: RunCredential, arrived: Callable[[], None]) -> None:
        self._listeners = {listener.fileno(): listener for listener in listeners}
        self._credential = credential
        self._arrived = arrived
        self._pending: dict[int, UnauthenticatedConnection] = {}
        """By descriptor, the oldest first; only the thread touches it."""
        self._lock = threading.Lock()
        """Guards `_proven` and `_by_fd`."""
        self._proven: dict[tuple[int, int], tuple[socket.socket, RankClaim]] = {}
        """By (generation, rank): connections that wait for this worker to be told of that generation."""
        self._by_fd: dict[int, tuple[int, int]] = {}
        """Descriptor -> key in `_proven`."""
        self._paused_until = 0.0
        """When accepting resumes; 0 if it is not paused."""
        self._bug_logged = False
        """Whether a mistake of raypar's own has been logged; only the first one is."""
        self._closed = False
        self._stop = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._epoll = select.epoll()
        self._epoll.register(self._stop, select.EPOLLIN)
        for fd in self._listeners:
            self._epoll.register(fd, select.EPOLLIN)
        self._thread = threading.Thread(target=self._serve, name=THREAD, daemon=True)
        self._thread.start()

    def take(self, generation: int) -> list[tuple[socket.socket, RankClaim]]:
        """(connection, claim) of every proven peer of this generation or an older one; the caller owns them from now on."""
        with self._lock:
            found = [self._proven.pop(key) for key in sorted(self._proven) if key[0] <= generation]
            for sock, _ in found:
                self._forget(sock)
        return found

    def close(self) -> None:
        """Stop listening, close what nobody has taken, end the thread. Idempotent."""
        if self._closed:
            return
        self._closed = True
        os.eventfd_write(self._stop, 1)
        self._thread.join()
        for listener in self._listeners.values():
            listener.close()
        for pending in self._pending.values():
            pending.socket.close()
        self._pending.clear()
        with self._lock:
            for sock, _ in self._proven.values():
                sock.close()
            self._proven.clear()
            self._by_fd.clear()
        self._epoll.close()
        os.close(self._stop)

    # -- the thread

    def _serve(self) -> None:
        while True:
            for fd, _ in self._epoll.poll(self._poll_timeout_s()):
                if fd == self._stop:
                    return
                if fd in self._listeners:
                    self._accept(self._listeners[fd])
                elif (pending := self._pending.get(fd)) is not None:
                    self._read(pending)
                else:
                    self._closed_by_peer(fd)
            now = time.monotonic()
            for pending in [p for p in self._pending.values() if p.deadline <= now]:
                self._drop(pending)
            if self._paused_until and self._paused_until <= now:
                self._paused_until = 0.0
                for fd in self._listeners:
                    self._epoll.modify(fd, select.EPOLLIN)

    def _poll_timeout_s(self) -> float | None:
        """Seconds until the next deadline; None if there is none. Of the connections, the oldest has the earliest deadline."""
        deadlines = [next(iter(self._pending.values())).deadline] if self._pending else []
        if self._paused_until:
            deadlines.append(self._paused_until)
        return max(0.0, min(deadlines) - time.monotonic()) + 0.001 if deadlines else None

    def _accept(self, listener: socket.socket) -> None:
        for _ in range(ACCEPTS_PER_TURN):
            try:
                sock, _ = listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in EXHAUSTED:
                    self._make_room()
                    self._paused_until = time.monotonic() + PAUSE_S
                    for fd in self._listeners:
                        self._epoll.modify(fd, 0)
                    return
                continue  # that connection is gone already
            if listener.family == socket.AF_UNIX and peer_user_id(sock) != os.getuid():
                sock.close()
                continue
            if len(self._pending) >= MAX_PENDING:
                self._make_room()
            sock.setblocking(False)
            pending = UnauthenticatedConnection(sock, AcceptorHandshake(self._credential), time.monotonic() + HANDSHAKE_S)
            self._pending[sock.fileno()] = pending
            self._epoll.register(sock, select.EPOLLIN)
            self._read(pending)  # its HELLO has usually come already

    def _make_room(self) -> None:
        """Drop the oldest connection that has not sent its HELLO; if all have, the oldest."""
        if self._pending:
            silent = (p for p in self._pending.values() if not p.handshake.challenged)
            self._drop(next(silent, None) or next(iter(self._pending.values())))

    def _read(self, pending: UnauthenticatedConnection) -> None:
        """Read bytes of a handshake. Nothing that a stranger sends may end this thread."""
        sock, handshake = pending.socket, pending.handshake
        try:
            data = sock.recv(handshake.wanted_bytes)
            reply = handshake.feed(data) if data else b""
            if not data or (reply and sock.send(reply) < len(reply)):
                self._drop(pending)
                return
        except BlockingIOError:
            return
        except (OSError, CommError):
            self._drop(pending)
            return
        except Exception:
            if not self._bug_logged:
                self._bug_logged = True
                log.warning("a connection was dropped by a mistake of raypar's own; please report it", exc_info=True)
            self._drop(pending)
            return
        if handshake.claim is not None:
            self._admit(pending, handshake.claim)

    def _admit(self, pending: UnauthenticatedConnection, claim: RankClaim) -> None:
        """Keep a proven connection until it is taken. It replaces an earlier one of the same rank, which that peer has lost."""
        fd, key = pending.socket.fileno(), (claim.generation, claim.rank)
        del self._pending[fd]
        with self._lock:
            if key in self._proven:
                former, _ = self._proven.pop(key)
                self._forget(former)
                former.close()
            self._proven[key] = pending.socket, claim
            self._by_fd[fd] = key
        self._arrived()

    def _closed_by_peer(self, fd: int) -> None:
        """Close a proven connection that became readable: a peer sends nothing before its answer, so it has closed its end."""
        with self._lock:
            key = self._by_fd.get(fd)
            if key is None:
                return  # it was taken meanwhile
            sock, _ = self._proven.pop(key)
            self._forget(sock)
        sock.close()

    def _forget(self, sock: socket.socket) -> None:
        """Stop polling a proven connection. The caller holds `_lock`."""
        del self._by_fd[sock.fileno()]
        with contextlib.suppress(OSError):
            self._epoll.unregister(sock.fileno())

    def _drop(self, pending: UnauthenticatedConnection) -> None:
        """Close a connection that has not proven itself."""
        fd = pending.socket.fileno()
        del self._pending[fd]
        self._epoll.unregister(fd)  # not by closing alone: a process that was forked meanwhile holds the connection too
        pending.socket.close()


def peer_user_id(sock: socket.socket) -> int:
    """The user id of the process at the other end of a Unix socket."""
    _, uid, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return int(uid)
