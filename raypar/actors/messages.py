"""What workers answer. Importable without torch, so that the driver starts quickly."""

from __future__ import annotations

from dataclasses import dataclass

from raypar.elastic.events import Kind


@dataclass(frozen=True)
class Failed:
    """A call that failed, and who is to blame."""

    kind: Kind
    error: Exception


@dataclass(frozen=True)
class Hello:
    """What a worker says of itself before it knows its plan."""

    address: str
    node: str
    pid: int
    fingerprint: dict[str, str]
