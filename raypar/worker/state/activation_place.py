"""What a stage asks of the place to which its activations are offloaded: a file, or the host's memory."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class OffloadedPiece(Protocol):
    """Memory that is written to the place, and brought back once."""

    nbytes: int
    """Its size."""

    @property
    def is_back(self) -> bool:
        """Whether the memory is there again, or on its way back."""

    def fetch(self) -> None:
        """Begin to bring the memory back. What is not written yet is still there."""

    def wait(self, what: str) -> Tensor:
        """The memory (uint8), for the work that follows; waits until it is back. `what`: whose it is, in words."""

    def release(self) -> None:
        """Forget it, wherever it is."""


class ActivationPlace(Protocol):
    """One worker's place for activations."""

    nbytes: int
    """What was in it when that was most."""
    most_unwritten: int
    """Bytes that were still to be written when these were most."""

    def write(self, memory: Tensor, limit: int | None = None) -> OffloadedPiece:
        """Have some memory (uint8) written, once no more than `limit` waits for that (at most `MOST_UNWRITTEN_BYTES`).

        Raises `ConfigError` if the place does not take it.
        """

    def settle(self) -> None:
        """Wait until all is written, and read that is to be."""

    def close(self) -> None:
        """End; what is not written yet is not."""
