"""Initial values of a run that begins with weights from a file: each tensor is read when it is asked for, and not kept."""

from __future__ import annotations

import socket
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from raypar.errors import CheckpointError
from raypar.worker.weights_file import FLOATING, open_weights


class Values(Protocol):
    """What the model begins with by itself."""

    def stream(self, names: Collection[str], dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        """(name, whole tensor in memory of its own) of each of `names` once, in any order; floating point in `dtype`."""

    def release(self) -> None:
        """Free what is kept for `stream`."""


@dataclass(frozen=True)
class WeightsFromFile:
    """Values by name: those of a file, and the model's `own` where the file has none."""

    path: Path
    """As `resolve` has found it."""
    fingerprint: str
    """`WeightsFile.fingerprint` of the file with which `names` were matched."""
    names: Mapping[str, str]
    """The model's name -> the file's (`Matching.names`)."""
    own: Values

    def stream(self, names: Collection[str], dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        """(name, whole tensor in memory of its own) of each of `names` once: on the CPU, contiguous, floating point in `dtype`.

        The model's own values are made only where some of `names` need them. Raises `CheckpointError` for another file under
        the same path, as another node may have it.
        """
        with open_weights(self.path) as file:
            found = file.fingerprint()
            if found != self.fingerprint:
                raise CheckpointError(
                    f"{self.path} is another file on {socket.gethostname()} than where the run was started: its fingerprint is "
                    f"{found[:12]}, not {self.fingerprint[:12]}",
                    cure="put one file in a place that all nodes share, or the same file on each of them",
                )
            for name in names:
                if name in self.names:
                    stored = self.names[name]
                    yield name, file.read(stored, dtype if file.names[stored].dtype in FLOATING else None)
        rest = [name for name in names if name not in self.names]
        if rest:
            yield from self.own.stream(rest, dtype)

    def release(self) -> None:
        """Free what the model's own values keep."""
        self.own.release()
