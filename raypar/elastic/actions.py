"""What the machine decides. The driver carries it out and answers with events."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from raypar.plan import ParallelPlan
from raypar.plan.pieces import PieceMove

EndKind = Literal["done", "stopped", "interrupted", "failed", "deposed"]
"""How a run ends. `deposed`: another driver has taken over and goes on; this one removes nothing."""


@dataclass(frozen=True, slots=True)
class RunStep:
    """Call every worker for a step, queued behind the one that may still run. Answer: `StepReported` of each."""

    step: int
    """The step."""
    into_mirror: bool = False
    """Whether the state after it goes into the mirror."""


@dataclass(frozen=True, slots=True)
class WriteJournal:
    """Write a step to the journal by compare-and-set. Answer: `StepJournalled`."""

    step: int
    """The step."""


@dataclass(frozen=True, slots=True)
class EmitStep:
    """Write the metrics of a step and call the callbacks. Answer: `StepEmitted`."""

    step: int
    """The step."""


@dataclass(frozen=True, slots=True)
class Validate:
    """Call every worker for a validation pass. Answer: `ValidationReported` of each."""

    done: int
    """Steps before it."""


@dataclass(frozen=True, slots=True)
class EmitValidation:
    """Write the validation loss and call the callbacks. Answer: `ValidationEmitted`."""

    done: int
    """Steps before the validation."""


@dataclass(frozen=True, slots=True)
class StartCheckpoint:
    """Call every worker to copy its state and write the copy in the background.

    Answers: `CheckpointStateCopied`, later `CheckpointSaved` or `CheckpointFailed`; or `CheckpointFailed` alone.
    """

    done: int
    """Steps of that state."""


@dataclass(frozen=True, slots=True)
class AbortGroups:
    """Abort the transport of every worker, so that no call waits for ever. Answer: `GroupsAborted`."""

    why: str
    """The reason that the calls fail with."""


@dataclass(frozen=True, slots=True)
class RequestStacks:
    """Ask workers for their stacks. Answer: `StacksReported`."""

    ranks: tuple[int, ...]
    """The workers."""


@dataclass(frozen=True, slots=True)
class WarnUser:
    """Tell people of something that does not end the run. No answer."""

    text: str
    """The sentence."""


@dataclass(frozen=True, slots=True)
class TellUser:
    """Tell people what was decided, where nothing is wrong. No answer."""

    text: str
    """The sentence."""


@dataclass(frozen=True, slots=True)
class ReportStraggler:
    """Tell people of a worker that computes too slowly. No answer."""

    worker: int
    """The worker."""
    slowdown: float
    """How many times as long as it should it takes."""
    steps: int
    """For so many steps."""
    alone: bool = False
    """Whether it was compared with its own first steps, not with its replicas."""
    recovered: bool = False
    """Whether it is a straggler no longer."""
    leaves: bool = False
    """Whether it is going to be drained; the next worker should be started on another node."""


# -- recovery and rescaling ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ClaimGeneration:
    """Claim a generation in the journal by compare-and-set. Answer: `GenerationClaimed`."""

    generation: int
    """The generation."""


@dataclass(frozen=True, slots=True)
class FenceWorkers:
    """Abort what workers do, let them refuse calls of older generations, and ask where they stand.

    Answer: `WorkerStatusReported` of each.
    """

    generation: int
    """The new generation."""
    workers: tuple[int, ...]
    """The workers."""


@dataclass(frozen=True, slots=True)
class ApplyKeptGradients:
    """Let workers apply a step late, from the gradients that they kept. Answer: `KeptGradientsApplied` of each."""

    generation: int
    """The new generation."""
    workers: tuple[int, ...]
    """The workers."""
    step: int
    """The step."""
    vote_result: Any
    """The result of the whole vote."""


@dataclass(frozen=True, slots=True)
class ChoosePlan:
    """Ask the planner for the best plan of up to so many workers. Answer: `PlanChosen`.

    Asked while the old generation trains, where the run might grow; else on the way to a new one.
    """

    generation: int
    """The present generation."""
    workers: int
    """The number of workers."""


@dataclass(frozen=True, slots=True)
class AdoptPlan:
    """Connect the workers and give them their parts of a plan. Answer: `PlanAdopted` of each."""

    generation: int
    """The new generation."""
    plan: ParallelPlan
    """The plan."""
    members: tuple[int, ...]
    """`members[rank]` takes that seat of the plan."""
    seatless_sources: tuple[int, ...]
    """Workers without a seat that hand over what they hold."""
    done: int
    """All start from the state after so many steps."""
    moves: tuple[PieceMove, ...]
    """The pieces of state that go from one worker to another, over the new transport."""
    from_mirror: bool = False
    """Whether that state is the mirror's, not the one that the workers compute with."""
    from_checkpoint: bool = False
    """Whether it is the checkpoint's (after no steps: the initial values)."""


@dataclass(frozen=True, slots=True)
class StartWorker:
    """Start a worker in the background, wherever there is room. Answer, some day: `WorkerJoined` or `WorkerStartFailed`."""

    worker: int
    """Its number."""


@dataclass(frozen=True, slots=True)
class ReportFirstStepAfterRecovery:
    """Tell that the first step after a disturbance is committed. No answer."""

    step: int
    """The step."""
    seconds: float
    """Time since the last step before the disturbance."""
    steps_again: int = 0
    """Steps that have to be executed again because of it."""


@dataclass(frozen=True, slots=True)
class CompareReplayedStep:
    """Compare a step that was executed again after a roll-back with the journal; emit nothing.

    Answer: `CallFailed` if it differs without a reason, else none.
    """

    step: int
    """The step."""
    doubted: bool = False
    """Whether it may differ from what people saw: a worker's state was wrong then, or the number of shards was another."""


@dataclass(frozen=True, slots=True)
class KillWorker:
    """Kill a worker without waiting for it. What it still says is ignored."""

    worker: int
    """The worker."""
    why: str
    """Why, for people."""


@dataclass(frozen=True, slots=True)
class Teardown:
    """The run is over: remove actors, placement groups and journal, and report. Always the last action."""

    end: EndKind
    """How it has ended."""
    why: str
    """Why, for people."""
    done: int
    """Steps that people have seen."""
    error: Exception | None = None
    """What it failed with."""


Action = (
    RunStep
    | WriteJournal
    | EmitStep
    | Validate
    | EmitValidation
    | StartCheckpoint
    | AbortGroups
    | RequestStacks
    | WarnUser
    | TellUser
    | ReportStraggler
    | ClaimGeneration
    | FenceWorkers
    | ApplyKeptGradients
    | ChoosePlan
    | AdoptPlan
    | StartWorker
    | ReportFirstStepAfterRecovery
    | CompareReplayedStep
    | KillWorker
    | Teardown
)


@dataclass(frozen=True, slots=True)
class ActionWithReason:
    """An action and its reason."""

    action: Action
    """What the driver carries out."""
    reason: str
    """Why: the sentence for the log."""
