"""What the machine decides; the driver carries it out and answers with events. Frozen."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

End = Literal["done", "stopped", "interrupted", "failed"]


@dataclass(frozen=True, slots=True)
class RunStep:
    """Call every worker for `step`, queued behind the step that may still run. Answer: `StepReported` of each."""

    step: int


@dataclass(frozen=True, slots=True)
class Journal:
    """Write `step` to the journal by compare-and-set. Answer: `Journalled`."""

    step: int


@dataclass(frozen=True, slots=True)
class Emit:
    """Write the metrics of `step` and call the callbacks. Answer: `Emitted`."""

    step: int


@dataclass(frozen=True, slots=True)
class Validate:
    """Call every worker for a validation pass. Answer: `ValidationReported` of each."""

    done: int


@dataclass(frozen=True, slots=True)
class EmitValidation:
    """Write the validation loss and call the callbacks. Answer: `ValidationEmitted`."""

    done: int


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Call every worker to copy its state and write it in the background.

    Answers: `SnapshotTaken`, later `Saved` or `SaveFailed`; or `SaveFailed` alone.
    """

    done: int


@dataclass(frozen=True, slots=True)
class AbortGroups:
    """Abort every worker's transport, so that no call waits for ever. Answer: `Aborted`."""

    why: str


@dataclass(frozen=True, slots=True)
class Probe:
    """Ask these ranks for their stacks. Answer: `Probed`."""

    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Warn:
    """Tell the user something that does not end the run."""

    text: str


@dataclass(frozen=True, slots=True)
class Teardown:
    """The run is over: remove actors, placement groups and journal, and report. Always the last action of a run.

    `done`: steps whose side effects people have seen.
    """

    end: End
    why: str
    done: int
    error: Exception | None = None


Action = RunStep | Journal | Emit | Validate | EmitValidation | Snapshot | AbortGroups | Probe | Warn | Teardown


@dataclass(frozen=True, slots=True)
class Decision:
    """An action and its reason: the sentence for the log."""

    action: Action
    reason: str
