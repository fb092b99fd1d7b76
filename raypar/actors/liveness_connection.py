"""Tells whether a silent process still exists, by a connection that its kernel keeps open until the process ends.

A process that is stopped, or busy in C code, answers no pings, but its connections stay open. The driver holds one to every
worker, and nothing is ever sent on it. If it closes, the process has ended. Ray reports that too, but takes 14 s or more if the
raylet died with the worker.

If keepalive probes are not acknowledged, the machine cannot be reached: it has lost its power, or only the network is broken.
The driver cannot tell which, so it does not count the worker as dead but tries to connect again. If the machine is gone, Ray
reports the worker's death.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket

DIAL_S = 5.0
BACKLOG = 64
"""Listen backlog. Connections are never accepted; each driver that the run has had leaves one here."""
KEEPALIVE_IDLE_S, KEEPALIVE_INTERVAL_S, KEEPALIVE_PROBES = 2, 2, 5
"""TCP keepalive: the first probe after 2 s, then one every 2 s; the connection is given up after 12 s, and made anew."""
REDIAL_S = 1.0
"""Time between two attempts to connect to a worker that cannot be reached any more."""


class LivenessListener:
    """The worker's side: a listening socket that never accepts, so that it needs no thread. The kernel closes it when the
    process ends."""

    def __init__(self, host: str) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.create_server((host, 0), family=family, backlog=BACKLOG)
        shown = f"[{host}]" if ":" in host else host
        self.address = f"{shown}:{self._socket.getsockname()[1]}"
        """Where the driver connects: `host:port`."""

    def close(self) -> None:
        """Stop listening. Idempotent."""
        self._socket.close()


class LivenessConnections:
    """The driver's connections to the workers."""

    def __init__(self) -> None:
        self.ended: set[int] = set()
        """Workers whose machine has closed the connection: their process has ended. Unreachable workers are not in it."""
        self._held: dict[int, asyncio.Task[None]] = {}
        """Worker -> the task that watches its connection."""

    def hold(self, number: int, address: str) -> None:
        """Connect to a worker in the background, and watch the connection."""
        if address and number not in self._held:
            self._held[number] = asyncio.ensure_future(self._hold(number, address))

    def drop(self, number: int) -> None:
        """Stop watching a worker."""
        task = self._held.pop(number, None)
        if task is not None:
            task.cancel()

    async def _hold(self, number: int, address: str) -> None:
        """Hold a connection until the process at its other end has ended; give up if there never was one."""
        host, _, port = address.rpartition(":")
        reached = False
        while True:
            try:
                reader, writer = await asyncio.wait_for(asyncio.open_connection(host.strip("[]"), int(port)), DIAL_S)
            except ConnectionRefusedError:
                if reached:  # the machine answers again, but the process is gone
                    self.ended.add(number)
                return
            except (OSError, ValueError, asyncio.TimeoutError):
                if not reached:
                    return
                await asyncio.sleep(REDIAL_S)
                continue
            reached = True
            if await wait_for_end_of_process(reader, writer):
                self.ended.add(number)
                return


async def wait_for_end_of_process(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
    """Wait until a connection ends. True if the other machine closed it; False if the other machine cannot be reached."""
    try:
        with contextlib.suppress(OSError):
            enable_tcp_keepalive(writer.get_extra_info("socket"))
        await reader.read()
        return True
    except ConnectionError:  # reset by the other machine
        return True
    except OSError:  # no keepalive probe was acknowledged, or there is no route
        return False
    finally:
        writer.close()


def enable_tcp_keepalive(sock: socket.socket) -> None:
    """Make the kernel probe the connection, and close it when the other machine does not answer."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_IDLE_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_INTERVAL_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, KEEPALIVE_PROBES)
