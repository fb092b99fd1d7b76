"""What workers answer, and what the client hears of an error. Importable without torch, so that the driver starts quickly."""

from __future__ import annotations

import pickle
from dataclasses import dataclass

from raypar.elastic.events import FailureKind
from raypar.errors import RayparError


@dataclass(frozen=True)
class CallFailure:
    """A call that failed, and who is to blame."""

    kind: FailureKind
    error: Exception


@dataclass(frozen=True)
class WorkerHello:
    """What a worker says of itself before it knows its plan. `lifeline`: address of its `LifelineListener`; empty: none."""

    address: str
    node: str
    pid: int
    fingerprint: dict[str, str]
    lifeline: str = ""


def pickle_error(error: Exception | None) -> bytes | None:
    """The error for the client, or its text when it cannot be pickled."""
    if error is None:
        return None
    try:
        return pickle.dumps(error)
    except Exception:
        return pickle.dumps(RayparError(f"{type(error).__name__}: {error}"))
