"""The thread behind a worker's listening sockets: it lets in who proves to be of the run, at any time, and nobody else.

Strangers cost little: a connection has `HANDSHAKE_S` to prove itself; `PENDING_MOST` are given that chance at once (a further
one takes the place of the oldest, the silent ones first); no more is read of one than the handshake has. A peer that is put
out by a flood dials again. Between two generations no worker waits for connections: without this thread strangers would fill
the kernel's queue by then.
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

from raypar.comm.handshake import Acceptance, Claim, Credential
from raypar.errors import CommError

log = logging.getLogger("raypar")

THREAD = "raypar-accept"
HANDSHAKE_S = 5.0
"""From accepting a connection to its proof. A peer that stood still for longer dials again."""
PENDING_MOST = 256
"""Connections that have not proven themselves yet."""
ACCEPTS_A_TURN = 64
"""Between two looks at those that are connected already."""
PAUSE_S = 0.05
"""How long nobody is accepted when the process or the machine has no descriptor or memory left."""
EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class Pending:
    """A connection that has not proven itself."""

    __slots__ = ("acceptance", "deadline", "socket")

    def __init__(self, sock: socket.socket, acceptance: Acceptance, deadline: float) -> None:
        self.socket, self.acceptance, self.deadline = sock, acceptance, deadline


class Acceptor:
    """Owns `doors` (listening, non-blocking) and all connections that nobody has taken.

    `arrived` is called, in the thread, when there is something to `take`.
    """

    def __init__(self, doors: Sequence[socket.socket], credential: Credential, arrived: Callable[[], None]) -> None:
        self._doors = {door.fileno(): door for door in doors}
        self._credential = credential
        self._arrived = arrived
        self._pending: dict[int, Pending] = {}
        """By descriptor, the oldest first; only the thread touches it."""
        self._lock = threading.Lock()
        """Of `_proven` and `_by_fd`."""
        self._proven: dict[tuple[int, int], tuple[socket.socket, Claim]] = {}
        """By (generation, rank): waiting for this worker to be told of that generation."""
        self._by_fd: dict[int, tuple[int, int]] = {}
        self._paused_until = 0.0
        self._mistaken = False
        self._closed = False
        self._stop = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._epoll = select.epoll()
        self._epoll.register(self._stop, select.EPOLLIN)
        for fd in self._doors:
            self._epoll.register(fd, select.EPOLLIN)
        self._thread = threading.Thread(target=self._serve, name=THREAD, daemon=True)
        self._thread.start()

    def take(self, generation: int) -> list[tuple[socket.socket, Claim]]:
        """Peers that have proven themselves and ask for a place in this generation or an older one; they are the caller's from
        here on. Those of newer generations stay."""
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
        for door in self._doors.values():
            door.close()
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
            for fd, _ in self._epoll.poll(self._patience_s()):
                if fd == self._stop:
                    return
                if fd in self._doors:
                    self._accept(self._doors[fd])
                elif (pending := self._pending.get(fd)) is not None:
                    self._read(pending)
                else:
                    self._left(fd)
            now = time.monotonic()
            for pending in [p for p in self._pending.values() if p.deadline <= now]:
                self._drop(pending)
            if self._paused_until and self._paused_until <= now:
                self._paused_until = 0.0
                for fd in self._doors:
                    self._epoll.modify(fd, select.EPOLLIN)

    def _patience_s(self) -> float | None:
        """Until the first deadline; None while there is none. The oldest connection's comes first."""
        deadlines = [next(iter(self._pending.values())).deadline] if self._pending else []
        if self._paused_until:
            deadlines.append(self._paused_until)
        return max(0.0, min(deadlines) - time.monotonic()) + 0.001 if deadlines else None

    def _accept(self, door: socket.socket) -> None:
        for _ in range(ACCEPTS_A_TURN):
            try:
                sock, _ = door.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in EXHAUSTED:
                    self._make_room()
                    self._paused_until = time.monotonic() + PAUSE_S
                    for fd in self._doors:
                        self._epoll.modify(fd, 0)
                    return
                continue  # that connection is gone already
            if door.family == socket.AF_UNIX and peer_user(sock) != os.getuid():
                sock.close()
                continue
            if len(self._pending) >= PENDING_MOST:
                self._make_room()
            sock.setblocking(False)
            pending = Pending(sock, Acceptance(self._credential), time.monotonic() + HANDSHAKE_S)
            self._pending[sock.fileno()] = pending
            self._epoll.register(sock, select.EPOLLIN)
            self._read(pending)  # its HELLO is here, mostly

    def _make_room(self) -> None:
        """Put out the oldest connection that has not even said HELLO; else the oldest."""
        if self._pending:
            silent = (p for p in self._pending.values() if not p.acceptance.challenged)
            self._drop(next(silent, None) or next(iter(self._pending.values())))

    def _read(self, pending: Pending) -> None:
        """Bytes of a handshake. Whatever a stranger sends must not end this thread."""
        sock, acceptance = pending.socket, pending.acceptance
        try:
            data = sock.recv(acceptance.wanted)
            reply = acceptance.feed(data) if data else b""
            if not data or (reply and sock.send(reply) < len(reply)):
                self._drop(pending)
                return
        except BlockingIOError:
            return
        except (OSError, CommError):
            self._drop(pending)
            return
        except Exception:
            if not self._mistaken:
                self._mistaken = True
                log.warning("a connection was dropped by a mistake of raypar's own; please report it", exc_info=True)
            self._drop(pending)
            return
        if acceptance.claim is not None:
            self._admit(pending, acceptance.claim)

    def _admit(self, pending: Pending, claim: Claim) -> None:
        """It has proven itself: it waits for who takes it. One that comes a second time has lost its first connection."""
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

    def _left(self, fd: int) -> None:
        """Of a peer that waits for its answer nothing is expected: it has closed its end, because its own waiting is over."""
        with self._lock:
            key = self._by_fd.get(fd)
            if key is None:
                return  # it was taken meanwhile
            sock, _ = self._proven.pop(key)
            self._forget(sock)
        sock.close()

    def _forget(self, sock: socket.socket) -> None:
        """The thread looks at it no more. Holds `_lock`."""
        del self._by_fd[sock.fileno()]
        with contextlib.suppress(OSError):
            self._epoll.unregister(sock.fileno())

    def _drop(self, pending: Pending) -> None:
        fd = pending.socket.fileno()
        del self._pending[fd]
        self._epoll.unregister(fd)  # closing would not do: a process that was forked meanwhile holds the connection too
        pending.socket.close()


def peer_user(sock: socket.socket) -> int:
    """The user id of the process at the other end of a Unix socket."""
    _, uid, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return int(uid)
