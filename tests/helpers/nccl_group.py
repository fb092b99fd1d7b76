"""Groups of `nccl` transports in one process, a thread for each rank while they connect, over the stand-in for NCCL."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence
from typing import Any

from helpers.standin import HostDevice
from helpers.transport_cases import CREDENTIAL, LIMIT_S

from raypar.comm.nccl.connect import connect_nccl
from raypar.comm.tcp.endpoint import TcpEndpoint
from raypar.comm.transport import CommunicatorKey

PAIR = (CommunicatorKey((0, 1), "message"), CommunicatorKey((1, 0), "message"))


def in_threads(size: int, body: Callable[[int], Any]) -> list[Any]:
    """`body(rank)` in a thread per rank: what it returned or raised."""
    results: list[Any] = [None] * size

    def run(rank: int) -> None:
        try:
            results[rank] = body(rank)
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * LIMIT_S)
        assert not thread.is_alive(), "a rank hangs"
    return results


class Group:
    """`size` ends in this process; `ends` holds what each rank's `connect` returned or raised."""

    def __init__(
        self,
        size: int,
        keys: Any,
        deadline_s: float = LIMIT_S,
        device: Callable[[int], Any] = lambda rank: HostDevice(f"device {rank}"),
        exact: bool = True,
        peers: Callable[[int], Collection[int] | None] = lambda rank: None,
    ) -> None:
        """`peers`: see `WorkerEndpoint.connect`."""
        self.meshes = [TcpEndpoint.listen(credential=CREDENTIAL) for _ in range(size)]
        addresses = [mesh.address for mesh in self.meshes]

        def end(rank: int) -> Any:
            given: Any = {"rank": rank, "size": size, "addresses": addresses, "generation": 1, "deadline_s": LIMIT_S}
            control = self.meshes[rank].connect(**given, peers=peers(rank))
            mine = keys(rank) if callable(keys) else keys
            return connect_nccl(control, device=device(rank), communicators=mine, deadline_s=deadline_s, exact=exact)

        self.ends = in_threads(size, end)

    def __enter__(self) -> list[Any]:
        assert not [end for end in self.ends if isinstance(end, Exception)], self.ends
        return self.ends

    def __exit__(self, *exc: object) -> None:
        for end in (*self.ends, *self.meshes):
            if not isinstance(end, Exception):
                end.close()


def every(ends: Sequence[Any], call: Callable[[Any], Any]) -> None:
    """`call(end)` on all ranks, then wait for all."""
    for handle in [call(end) for end in ends]:
        handle.wait(LIMIT_S)
