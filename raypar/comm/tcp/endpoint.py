"""One worker's TCP endpoint: listens for the other workers and connects to them in each generation."""

from __future__ import annotations

import select
from collections.abc import Collection, Sequence

from raypar.comm.tcp.handshake import RunCredential
from raypar.comm.tcp.rendezvous import GenerationRank, Listener
from raypar.comm.tcp.transport import TcpTransport
from raypar.comm.transport import CommunicatorKey
from raypar.errors import CommError


class TcpEndpoint:
    """See `comm.transport.WorkerEndpoint`: TCP between machines, Unix sockets inside one."""

    unended_communicators: tuple[str, ...] = ()
    """See `WorkerEndpoint.unended_communicators`: a socket can always be closed."""

    def __init__(self, host: str, credential: RunCredential, unix_sockets: bool) -> None:
        self._listener = Listener(host, credential, unix_sockets)

    @classmethod
    def listen(cls, host: str = "127.0.0.1", *, credential: RunCredential, unix_sockets: bool = True) -> TcpEndpoint:
        """Listen on a free port of `host` (an IP address or name of this machine that the other workers can reach).

        `credential`: only workers that have the same one are let in. `unix_sockets`: workers of this machine connect
        through a Unix socket instead.
        """
        if not hasattr(select, "epoll"):
            raise CommError("the cpu transport needs Linux (epoll, eventfd)", cure="run the workers in a Linux container")
        return cls(host, credential, unix_sockets)

    @property
    def address(self) -> str:
        """See `WorkerEndpoint.address`."""
        return self._listener.address

    def connect(
        self,
        *,
        rank: int,
        size: int,
        addresses: Sequence[str],
        generation: int,
        deadline_s: float,
        communicators: Collection[CommunicatorKey] = (),
        peers: Collection[int] | None = None,
    ) -> TcpTransport:
        """See `WorkerEndpoint.connect`. `communicators` are not needed: one socket between two ranks carries all their
        operations."""
        me = GenerationRank(generation, rank, size)
        return TcpTransport(rank, size, generation, self._listener.connect(me, addresses, deadline_s, peers))

    def abort_connect(self, reason: str) -> None:
        """See `WorkerEndpoint.abort_connect`."""
        self._listener.abort(reason)

    def close(self) -> None:
        """See `WorkerEndpoint.close`."""
        self._listener.close()
