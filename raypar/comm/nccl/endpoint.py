"""One GPU worker's endpoint: connects through a `TcpEndpoint`, and makes NCCL's communicators over these connections."""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Sequence

from raypar.comm.nccl import connect
from raypar.comm.nccl.device import Device
from raypar.comm.nccl.transport import NcclTransport
from raypar.comm.tcp.endpoint import TcpEndpoint
from raypar.comm.tcp.handshake import RunCredential
from raypar.comm.tcp.transport import TcpTransport
from raypar.comm.transport import CommunicatorKey
from raypar.errors import GroupAborted

MAKING_S = 60.0
"""Limit of making a generation's communicators, some tens of them. Deadlines of those who wait for this worker are longer."""


class NcclEndpoint:
    """See `comm.transport.WorkerEndpoint`: NCCL for tensors on `device`, TCP for those in host memory and for control."""

    def __init__(self, endpoint: TcpEndpoint, device: Device, *, exact: bool = True) -> None:
        """`exact`: whether sums are added over the tree of ranks; else by NCCL, in an order of its own."""
        self._tcp = endpoint
        self._device = device
        self._exact = exact
        self._lock = threading.Lock()
        """Guards all attributes below."""
        self._aborts = 0
        """Calls of `abort_connect` so far."""
        self._reason = ""
        """Of the last of them."""
        self._control: TcpTransport | None = None
        """The connected sockets, while NCCL's communicators are being made over them."""
        self._unended: tuple[str, ...] = ()
        """Communicators that NCCL has not ended, of all generations."""

    @classmethod
    def listen(
        cls, host: str, device: Device, *, credential: RunCredential, unix_sockets: bool = True, exact: bool = True
    ) -> NcclEndpoint:
        """See `TcpEndpoint.listen`, and `__init__`."""
        return cls(TcpEndpoint.listen(host, credential=credential, unix_sockets=unix_sockets), device, exact=exact)

    @property
    def address(self) -> str:
        """See `WorkerEndpoint.address`."""
        return self._tcp.address

    @property
    def unended_communicators(self) -> tuple[str, ...]:
        """See `WorkerEndpoint.unended_communicators`: of transports, and of a `connect` that failed."""
        with self._lock:
            return self._unended

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
    ) -> NcclTransport:
        """See `WorkerEndpoint.connect`. Raises what `TcpEndpoint.connect` and `connect_nccl` raise."""
        deadline = time.monotonic() + deadline_s
        with self._lock:
            aborts = self._aborts
        control = self._tcp.connect(
            rank=rank, size=size, addresses=addresses, generation=generation, deadline_s=deadline_s, peers=peers
        )
        with self._lock:
            aborted = self._aborts != aborts
            self._control = None if aborted else control
        if aborted:
            control.close()
            raise GroupAborted(self._reason, cure="connect the next generation")
        try:
            left_s = max(0.0, deadline - time.monotonic())
            return connect.connect_nccl(
                control,
                device=self._device,
                communicators=communicators,
                deadline_s=min(left_s, MAKING_S),
                exact=self._exact,
                report_unended=self._add_unended,
            )
        finally:
            with self._lock:
                self._control = None

    def _add_unended(self, names: Sequence[str]) -> None:
        with self._lock:
            self._unended = (*self._unended, *names)

    def abort_connect(self, reason: str) -> None:
        """See `WorkerEndpoint.abort_connect`; also ends a `connect` that waits inside NCCL."""
        with self._lock:
            self._aborts += 1
            self._reason = reason
            control = self._control
        self._tcp.abort_connect(reason)
        if control is not None:
            control.abort(reason)

    def close(self) -> None:
        """See `WorkerEndpoint.close`."""
        self._tcp.close()
