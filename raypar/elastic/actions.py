"""What the machine decides; the driver carries it out and answers with events. Frozen."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from raypar.elastic.holdings import Move
from raypar.plan import ParallelPlan

EndKind = Literal["done", "stopped", "interrupted", "failed", "deposed"]
"""`deposed`: another driver has taken over; the run goes on without this one, which removes nothing."""


@dataclass(frozen=True, slots=True)
class RunStep:
    """Call every worker for `step`, queued behind the step that may still run. Answer: `StepReported` of each.

    `cut`: the state after it goes into the mirror.
    """

    step: int
    cut: bool = False


@dataclass(frozen=True, slots=True)
class WriteJournal:
    """Write `step` to the journal by compare-and-set. Answer: `StepJournalled`."""

    step: int


@dataclass(frozen=True, slots=True)
class Emit:
    """Write the metrics of `step` and call the callbacks. Answer: `StepEmitted`."""

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
class TakeSnapshot:
    """Call every worker to copy its state and write it in the background.

    Answers: `SnapshotTaken`, later `CheckpointSaved` or `CheckpointFailed`; or `CheckpointFailed` alone.
    """

    done: int


@dataclass(frozen=True, slots=True)
class AbortGroups:
    """Abort every worker's transport, so that no call waits for ever. Answer: `GroupsAborted`."""

    why: str


@dataclass(frozen=True, slots=True)
class Probe:
    """Ask these ranks for their stacks. Answer: `StacksReported`."""

    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Warn:
    """Tell the user something that does not end the run."""

    text: str


@dataclass(frozen=True, slots=True)
class Notice:
    """Tell the user what was decided, where nothing is wrong."""

    text: str


@dataclass(frozen=True, slots=True)
class ReportStraggler:
    """Tell people that `worker` takes `times` as long as its replicas (`alone`: as in its own first steps) for `steps` steps.

    `over`: it does no longer. `leaves`: it is going to be drained; the next one should be hired on another node. No answer.
    """

    worker: int
    times: float
    steps: int
    alone: bool = False
    over: bool = False
    leaves: bool = False


# -- recovery and rescaling ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ClaimGeneration:
    """Claim `generation` in the journal by compare-and-set. Answer: `GenerationClaimed`."""

    generation: int


@dataclass(frozen=True, slots=True)
class FenceWorkers:
    """Abort what these workers do, make them deaf to older generations, ask where they stand.

    Answer: `WorkerStatusReported` of each."""

    generation: int
    workers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ApplyKeptGradients:
    """Let these workers apply `step` from the gradients they kept; `outcome` is the vote's. Answer: `WorkerSettled` of each."""

    generation: int
    workers: tuple[int, ...]
    step: int
    outcome: Any


@dataclass(frozen=True, slots=True)
class ChoosePlan:
    """Ask the planner for the best plan of up to `workers` workers. Answer: `PlanChosen`.

    Asked in the old generation while it trains, when it might grow; else on the way to a new one.
    """

    generation: int
    workers: int


@dataclass(frozen=True, slots=True)
class AdoptPlan:
    """Connect the workers and give them their parts of `plan`. Answer: `PlanAdopted` of each of `members` and `sources`.

    `members[rank]` takes seat `rank`; `sources` have no seat but hand over what they hold. Everybody starts from the state
    after `done` steps: that in memory, or the mirror's cut of `done` when `cut`, or, when `load`, that of the checkpoint (of
    the very beginning: as it is initialised). `moves` go over the
    new generation's transport.
    """

    generation: int
    plan: ParallelPlan
    members: tuple[int, ...]
    sources: tuple[int, ...]
    done: int
    moves: tuple[Move, ...]
    cut: bool = False
    load: bool = False


@dataclass(frozen=True, slots=True)
class StartWorker:
    """Start a worker called `worker` in the background, wherever there is room.

    Answer, some day: `WorkerJoined` or `WorkerStartFailed`."""

    worker: int


@dataclass(frozen=True, slots=True)
class FirstStepAfterRecovery:
    """The first step after a disturbance is committed, `seconds` after the last one before it; `again`: steps that have to be
    executed again because of it. No answer."""

    step: int
    seconds: float
    again: int = 0


@dataclass(frozen=True, slots=True)
class CheckReplay:
    """Step `step` was executed again after a roll-back: compare with the journal, emit nothing. No answer if it is the same.

    `doubted`: it may differ from what people saw, because a worker's state was wrong then, or because there were other shards.
    """

    step: int
    doubted: bool = False


@dataclass(frozen=True, slots=True)
class KillWorker:
    """Kill this worker and do not wait for it; what it still says is ignored."""

    worker: int
    why: str


@dataclass(frozen=True, slots=True)
class Teardown:
    """The run is over: remove actors, placement groups and journal, and report. Always the last action of a run.

    `done`: steps whose side effects people have seen.
    """

    end: EndKind
    why: str
    done: int
    error: Exception | None = None


Action = (
    RunStep
    | WriteJournal
    | Emit
    | Validate
    | EmitValidation
    | TakeSnapshot
    | AbortGroups
    | Probe
    | Warn
    | Notice
    | ReportStraggler
    | ClaimGeneration
    | FenceWorkers
    | ApplyKeptGradients
    | ChoosePlan
    | AdoptPlan
    | StartWorker
    | FirstStepAfterRecovery
    | CheckReplay
    | KillWorker
    | Teardown
)


@dataclass(frozen=True, slots=True)
class Decision:
    """An action and its reason: the sentence for the log."""

    action: Action
    reason: str
