"""The endpoint protocol: one worker's address for all generations of a run, and how it connects in each of them.

`comm.tcp.endpoint.TcpEndpoint` carries every operation over sockets; `comm.nccl.endpoint.NcclEndpoint` moves device memory by
NCCL.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol

from raypar.comm.communicator_key import CommunicatorKey
from raypar.comm.transport import Transport


class WorkerEndpoint(Protocol):
    """One worker's listening address, and its way to connect with the other workers of a generation.

    Listens from its creation (`listen` of each class) until `close`. At most one `connect` runs at a time.
    """

    @property
    def address(self) -> str:
        """`host:port`, which the driver sends to all other workers."""

    @property
    def unended_communicators(self) -> tuple[str, ...]:
        """Names of communicators that an abort could not end. If there are any, the process must be replaced."""

    def connect(
        self,
        *,
        rank: int,
        size: int,
        addresses: Sequence[str],
        generation: int,
        deadline_s: float,
        communicators: Collection[CommunicatorKey] = (),
    ) -> Transport:
        """Meet all other ranks of `generation` and return this rank's transport.

        `communicators`: what `worker.backend.DeviceBackend.communicators` says this rank needs. Raises `CommTimeout` naming the
        ranks that did not come, `CommError` naming one that cannot be reached, `GroupAborted` when a peer is in a newer
        generation already, or after `abort_connect`.
        """

    def abort_connect(self, reason: str) -> None:
        """From any thread: a `connect` that is under way raises `GroupAborted(reason)`."""

    def close(self) -> None:
        """Stop listening; transports that are connected go on. Idempotent."""
