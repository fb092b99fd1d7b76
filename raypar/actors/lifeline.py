"""Whether a process that does not answer still exists: a connection that its kernel keeps open, and closes when it ends.

A stopped process, or one that is deep in C code, answers nothing; but connections to it stay. So the driver holds one to every
worker, over which nothing is ever said. When it is closed, that process has ended; when its machine does not acknowledge any
more, that is gone. Ray says both too, but takes 14 s or more where the raylet died with the worker.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket

DIAL_S = 5.0
WAITING = 64
"""Connections that nobody accepts: one of each driver that the run has had."""
IDLE_S, EVERY_S, TIMES = 2, 2, 5
"""The kernel asks a silent machine after 2 s, then every 2 s, and gives the connection up after 12 s: a network that is away
for a moment is no death."""


class Door:
    """A worker's end: listens and never accepts, which takes no thread; closed by the kernel when the process ends."""

    def __init__(self, host: str) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.create_server((host, 0), family=family, backlog=WAITING)
        shown = f"[{host}]" if ":" in host else host
        self.address = f"{shown}:{self._socket.getsockname()[1]}"

    def close(self) -> None:
        """Idempotent."""
        self._socket.close()


class Lifelines:
    """The driver's ends. `ended`: whose process, or machine, is gone. A worker that cannot be reached from here in the first
    place is never in it."""

    def __init__(self) -> None:
        self.ended: set[int] = set()
        self._held: dict[int, asyncio.Task[None]] = {}

    def hold(self, number: int, address: str) -> None:
        """Connect, in the background, and keep it."""
        if address and number not in self._held:
            self._held[number] = asyncio.ensure_future(self._hold(number, address))

    def drop(self, number: int) -> None:
        """It is not watched any more."""
        task = self._held.pop(number, None)
        if task is not None:
            task.cancel()

    async def _hold(self, number: int, address: str) -> None:
        host, _, port = address.rpartition(":")
        try:
            reader, writer = await asyncio.wait_for(asyncio.open_connection(host.strip("[]"), int(port)), DIAL_S)
        except (OSError, ValueError, asyncio.TimeoutError):
            return
        try:
            with contextlib.suppress(OSError):
                keep_asking(writer.get_extra_info("socket"))
            with contextlib.suppress(OSError):
                await reader.read()
            self.ended.add(number)
        finally:
            writer.close()


def keep_asking(sock: socket.socket) -> None:
    """Let the kernel find out when the other machine does not answer any more."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, IDLE_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, EVERY_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, TIMES)
