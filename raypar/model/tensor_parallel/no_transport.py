"""A transport without peers, for passes on the meta device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from raypar.comm.transport import CommunicationLedger
from raypar.errors import CommError


class _Done:
    """The handle of an operation that is done at once."""

    def done(self) -> bool:
        return True

    def wait(self, timeout_s: float | None = None) -> None:
        return None

    def wait_on_stream(self, timeout_s: float | None = None) -> None:
        return None

    def tensor(self) -> Tensor:
        return self.tensors()[0]

    def tensors(self) -> list[Tensor]:
        return []


class NoTransport:
    """A transport without peers: collectives leave their tensors, which have no numbers anyway, as they are."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size, self.generation, self.ledger = rank, size, 0, CommunicationLedger()

    def can_share_memory(self, rank: int) -> bool:
        return True

    def all_reduce(self, flat: Tensor, *, group: Sequence[int], channel: int = 0) -> _Done:
        return _Done()

    def reduce_scatter(self, out: Tensor, pieces: Sequence[Tensor], *, group: Sequence[int], channel: int = 0) -> _Done:
        return _Done()

    def all_gather(self, pieces: Sequence[Tensor], mine: Tensor, *, group: Sequence[int], channel: int = 0) -> _Done:
        return _Done()

    def __getattr__(self, name: str) -> Any:
        raise CommError(f"{name} has nobody at its other end", cure="report this: a layer may use collectives only")
