"""The phases of an operation on messages: what is posted together."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass

from torch import Tensor

Tagged = tuple[Tensor, int, int]
"""(tensor, peer, tag)"""


@dataclass(frozen=True, slots=True)
class OperationPhase:
    """Messages that an operation posts together."""

    sends: Sequence[Tagged]
    """(tensor, to, tag)"""
    recvs: Sequence[tuple[Tensor | None, int, int]]
    """(out, source, tag)"""
    early_recvs: Sequence[Tagged] = ()
    """Receives of the last phase that are posted already now, so that their data is received in place whenever it comes. The
    next phase does not wait for them; the operation does."""


Phases = Generator[OperationPhase, None, None]
