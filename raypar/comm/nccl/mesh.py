"""One GPU worker's address for all its generations: as `TcpMesh`, whose transports it hands over to NCCL."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Sequence

from raypar.comm.communicator_key import CommunicatorKey
from raypar.comm.nccl import connect
from raypar.comm.nccl.device import Device
from raypar.comm.nccl.transport import NcclTransport
from raypar.comm.tcp.handshake import RunCredential
from raypar.comm.tcp.transport import TcpMesh, TcpTransport
from raypar.errors import GroupAborted

MAKING_S = 60.0
"""How long the communicators of a generation may take, some tens of them; whoever waits for this worker waits longer."""


class NcclMesh:
    """`listen`, tell the address to everybody, `connect` each generation with what this rank will do in it."""

    def __init__(self, mesh: TcpMesh, device: Device) -> None:
        self._mesh, self._device = mesh, device
        self._changing = threading.Lock()
        self._aborts = 0
        self._reason = ""
        self._control: TcpTransport | None = None
        """Connected, while NCCL's communicators are being made over it."""
        self.stuck: tuple[str, ...] = ()
        """Of a `connect` that failed: what NCCL did not let go of. If there is anything, this process is to be killed."""

    @classmethod
    def listen(cls, host: str, device: Device, *, credential: RunCredential, near: bool = True) -> NcclMesh:
        """See `TcpMesh.listen`; tensors that are moved lie on `device`, or in host memory."""
        return cls(TcpMesh.listen(host, credential=credential, near=near), device)

    @property
    def address(self) -> str:
        """`host:port`."""
        return self._mesh.address

    def connect(
        self,
        *,
        rank: int,
        size: int,
        addresses: Sequence[str],
        generation: int,
        deadline_s: float,
        wires: Iterable[CommunicatorKey],
    ) -> NcclTransport:
        """Meet all other ranks of `generation` and make a communicator for each of `wires` (`worker.communicators`).

        Raises what `TcpMesh.connect` and `nccl_connect.connect` raise, and `GroupAborted` after `abort_connect`.
        """
        until = time.monotonic() + deadline_s
        with self._changing:
            before = self._aborts
        control = self._mesh.connect(rank=rank, size=size, addresses=addresses, generation=generation, deadline_s=deadline_s)
        with self._changing:
            aborted = self._aborts != before
            self._control = None if aborted else control
        if aborted:
            control.close()
            raise GroupAborted(self._reason, cure="connect the next generation")
        try:
            left = max(0.0, until - time.monotonic())
            return connect.connect_nccl(
                control, device=self._device, wires=wires, deadline_s=min(left, MAKING_S), stuck=self._keeps
            )
        finally:
            with self._changing:
                self._control = None

    def _keeps(self, names: Sequence[str]) -> None:
        self.stuck = (*self.stuck, *names)

    def abort_connect(self, reason: str) -> None:
        """From any thread: a `connect` that is under way raises `GroupAborted(reason)`, also while NCCL itself is waiting."""
        with self._changing:
            self._aborts += 1
            self._reason = reason
            control = self._control
        self._mesh.abort_connect(reason)
        if control is not None:
            control.abort(reason)

    def close(self) -> None:
        """See `TcpMesh.close`."""
        self._mesh.close()
