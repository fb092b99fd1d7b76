"""What happens to a run: facts the driver reports to the machine. Frozen; carry no clock of their own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["user", "lost", "error", "aborted"]
"""Who is to blame: user code; a worker that died; raypar or its input; or a consequence of somebody else's failure."""


@dataclass(frozen=True, slots=True)
class WorkersReady:
    """Every worker has built its stages and is connected to all others."""


@dataclass(frozen=True, slots=True)
class StepReported:
    """A worker holds the whole vote of `step` and has applied it. `seconds`: how long the step took there."""

    rank: int
    step: int
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class CallFailed:
    """A worker's call, the start-up (rank None) or a side effect of the driver failed with `error`."""

    kind: Kind
    error: Exception
    rank: int | None = None


@dataclass(frozen=True, slots=True)
class Journalled:
    """Step `step` is in the journal: whoever takes over knows that it is committed."""

    step: int


@dataclass(frozen=True, slots=True)
class Emitted:
    """Metrics of `step` are written and its callbacks have returned; `stop` is the reason one of them asked to stop."""

    step: int
    stop: str | None = None


@dataclass(frozen=True, slots=True)
class ValidationReported:
    """A worker has finished the validation pass after `done` steps."""

    rank: int
    done: int


@dataclass(frozen=True, slots=True)
class ValidationEmitted:
    """The validation loss after `done` steps is written and its callbacks have returned."""

    done: int
    stop: str | None = None


@dataclass(frozen=True, slots=True)
class SnapshotTaken:
    """Every worker has its own copy of the state after `done` steps and writes it in the background; training may go on."""

    done: int


@dataclass(frozen=True, slots=True)
class Saved:
    """The checkpoint after `done` steps is complete under its final name."""

    done: int


@dataclass(frozen=True, slots=True)
class SaveFailed:
    """The checkpoint after `done` steps could not be written; earlier ones are untouched."""

    done: int
    error: Exception


@dataclass(frozen=True, slots=True)
class StopRequested:
    """Somebody wants the run to end with its state saved.

    `interrupt`: Ctrl-C; the steps in flight get `grace_s` seconds, then they are aborted, which makes them void.
    """

    reason: str
    interrupt: bool = False
    grace_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Aborted:
    """All groups are aborted; `done[rank]`: steps that worker has applied, None where it did not answer."""

    done: tuple[int | None, ...]


@dataclass(frozen=True, slots=True)
class Probed:
    """What the workers that are overdue were doing: text for the error (stacks, or that they do not answer)."""

    text: str


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed: deadlines are looked at."""


Event = (
    WorkersReady
    | StepReported
    | CallFailed
    | Journalled
    | Emitted
    | ValidationReported
    | ValidationEmitted
    | SnapshotTaken
    | Saved
    | SaveFailed
    | StopRequested
    | Aborted
    | Probed
    | Tick
)
