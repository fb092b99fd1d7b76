"""Messages between driver and workers, and errors as bytes for the client. Imports no torch, so the driver starts quickly."""

from __future__ import annotations

import pickle
from dataclasses import dataclass

from raypar.elastic.events import FailureKind
from raypar.errors import RayparError, error_message


@dataclass(frozen=True)
class CallFailure:
    """The failure of a call, sent as a value so that the error arrives whole and of its own class."""

    kind: FailureKind
    """Who is to blame: user code, raypar, a lost worker, or an abort."""
    error: Exception
    """The error itself."""


@dataclass(frozen=True)
class StepCall:
    """The arguments with which the driver calls `WorkerActor.step` of every member."""

    generation: int
    """The generation in which the step is executed."""
    step: int
    """The step, from 0."""
    trace: bool
    """Whether the report has the times of all instructions."""
    into_mirror: bool
    """Whether the mirror gets a snapshot of the state after this step."""

    def to_bytes(self) -> bytes:
        """It as one argument for all members: Ray would serialize every other argument anew for each of them."""
        return pickle.dumps(self)

    @staticmethod
    def from_bytes(data: bytes) -> StepCall:
        """The call that `to_bytes` has encoded."""
        call: StepCall = pickle.loads(data)
        return call


@dataclass(frozen=True)
class WorkerHello:
    """What a worker reports about itself when it has started, before it knows a plan."""

    address: str
    """Where other workers connect: `host:port`."""
    node: str
    """Ray's id of its node, in hex."""
    pid: int
    """Id of its process."""
    fingerprint: dict[str, str]
    """The libraries and hardware with which it computes (`numerics_fingerprint.py`)."""
    liveness_address: str = ""
    """Address of its `LivenessListener`; empty if it has none."""


def pickle_error_for_client(error: Exception | None) -> bytes | None:
    """The error as bytes for the client; if it cannot be pickled, an error with its text."""
    if error is None:
        return None
    try:
        return pickle.dumps(error)
    except Exception:
        return pickle.dumps(RayparError(f"{type(error).__name__}: {error_message(error)}"))
