"""The actions that the run machine decides on. The driver carries them out and answers with events."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from raypar.plan import ParallelPlan
from raypar.plan.pieces import PieceMove
from raypar.plan.vote_result import VoteResult

EndKind = Literal["done", "stopped", "interrupted", "failed", "deposed"]
"""How a run ends. `deposed`: another driver has taken over and goes on; this one removes nothing."""


@dataclass(frozen=True, slots=True)
class RunStep:
    """Call every worker for a step, queued behind a step that may still run. Answer: `StepReported` of each worker."""

    step: int
    """The step."""
    into_mirror: bool = False
    """Whether the mirror takes a snapshot of the state after the step."""


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
    """Call every worker for a validation pass. Answer: `ValidationReported` of each worker."""

    done: int
    """Steps before the pass."""
    number: int = 0
    """Which of the run's forward passes it is, from 0; 0 for a validation of training."""


@dataclass(frozen=True, slots=True)
class EmitValidation:
    """Write the validation loss and call the callbacks. Answer: `ValidationEmitted`."""

    done: int
    """Steps before the validation."""
    number: int = 0
    """As in `Validate`."""
    again: bool = False
    """Whether the validation is one of a replay: its value is kept for the learning rates, without metrics or callbacks."""


@dataclass(frozen=True, slots=True)
class ForgetValidations:
    """Forget the values that learning rates follow, of validations after `done` steps or more: they run again. No answer."""

    done: int
    """Steps before the first of these validations."""


@dataclass(frozen=True, slots=True)
class StartCheckpoint:
    """Call every worker to copy its state and write the copy in the background.

    Answers: `AllWorkersCopiedState`, later `CheckpointSaved` or `CheckpointFailed`; or `CheckpointFailed` alone.
    """

    done: int
    """Steps that the copied state has had."""


@dataclass(frozen=True, slots=True)
class AbortGroups:
    """Abort the transport of every worker, so that no call waits for ever. Answer: `GroupsAborted`."""

    why: str
    """The reason that the calls fail with."""


@dataclass(frozen=True, slots=True)
class RequestStacks:
    """Ask workers for the stacks of their threads. Answer: `StacksReported`."""

    ranks: tuple[int, ...]
    """The workers."""


@dataclass(frozen=True, slots=True)
class WarnUser:
    """Show people a warning about something that does not end the run. No answer."""

    text: str
    """The sentence."""


@dataclass(frozen=True, slots=True)
class TellUser:
    """Show people a decision; nothing is wrong. No answer."""

    text: str
    """The sentence."""


@dataclass(frozen=True, slots=True)
class ReportStraggler:
    """Tell people of a worker that computes too slowly. No answer."""

    worker: int
    """The worker."""
    slowdown: float
    """Its computing time divided by the time that it should take."""
    steps: int
    """Number of steps in a row in which it was slow."""
    alone: bool = False
    """Whether it was compared with its own first steps, not with its replicas."""
    recovered: bool = False
    """Whether it was a straggler and is fast again."""
    leaves: bool = False
    """Whether it is asked to leave; the worker that replaces it should start on another node."""


# -- recovery and rescaling ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ClaimGeneration:
    """Claim a generation in the journal by compare-and-set. Answer: `GenerationClaimed`."""

    generation: int
    """The generation."""


@dataclass(frozen=True, slots=True)
class FenceWorkers:
    """Abort what workers do, make them refuse calls of older generations, and ask for their status.

    Answer: `WorkerStatusReported` of each worker.
    """

    generation: int
    """The new generation."""
    workers: tuple[int, ...]
    """The workers."""


@dataclass(frozen=True, slots=True)
class ApplyKeptGradients:
    """Have workers apply a step late, from the gradients that they kept. Answer: `KeptGradientsApplied` of each worker."""

    generation: int
    """The new generation."""
    workers: tuple[int, ...]
    """The workers."""
    step: int
    """The step."""
    vote_result: VoteResult
    """The result of the vote on the step, as a worker that applied it has reported it."""


@dataclass(frozen=True, slots=True)
class ChoosePlan:
    """Ask the planner for the best plan for up to `workers` workers. Answer: `PlanChosen`.

    It is asked during a recovery, and also while training goes on if the run might grow.
    """

    generation: int
    """The present generation."""
    workers: int
    """The most workers that the plan may use."""


@dataclass(frozen=True, slots=True)
class AdoptPlan:
    """Connect the workers and give them their parts of a plan. Answer: `PlanAdopted` of each worker."""

    generation: int
    """The new generation."""
    plan: ParallelPlan
    """The plan."""
    members: tuple[int, ...]
    """`members[rank]`: the worker that takes the seat `rank` of the plan."""
    seatless_sources: tuple[int, ...]
    """Workers without a seat that send pieces of state to the members."""
    done: int
    """Number of steps after which all members start."""
    moves: tuple[PieceMove, ...]
    """The pieces of state that go from one worker to another, over the new transport."""
    from_mirror: bool = False
    """Whether the state comes from a mirror snapshot, not from the state that workers compute with."""
    from_checkpoint: bool = False
    """Whether the state is read from the checkpoint; if `done` is 0, it is the initial values."""
    skipped_steps: tuple[int, ...] = ()
    """The steps before `done` that were skipped, ascending, where the loss is scaled; a checkpoint has its own."""


@dataclass(frozen=True, slots=True)
class PrepareShares:
    """Lower the present plan with other shares of the blocks, while training goes on. Answer: `SharesPrepared`."""

    generation: int
    """The present generation."""
    plan: ParallelPlan
    """The plan with these shares."""


@dataclass(frozen=True, slots=True)
class AdoptShares:
    """Have the members run the blocks that a plan with other shares gives them, from the next step on. No step is in flight.

    Answer: `SharesAdopted` of each member.
    """

    generation: int
    """The present generation."""
    plan: ParallelPlan
    """The plan, which differs from the present one in the shares alone."""
    done: int
    """Number of steps that all members have applied."""


@dataclass(frozen=True, slots=True)
class ReportShares:
    """Tell people that the replicas have other shares. No answer."""

    text: str
    """Why, and who has how many blocks now."""
    plan: ParallelPlan
    """The plan with these shares."""
    seconds: float
    """Time from the last committed step."""
    step: int
    """The first step with these shares."""


@dataclass(frozen=True, slots=True)
class StartWorkers:
    """Ask the cluster for a place for these workers, all on one node, and start them there once it is found.

    An autoscaler adds a node for them. Answers: of each worker `WorkerPlaced` and `WorkerJoined`, or `WorkerStartFailed`.
    """

    workers: tuple[int, ...]
    """Their numbers, which no other workers ever get: one worker, or all shards of one replica of a stage."""
    on_demand: bool = False
    """Whether they need an on-demand node."""


@dataclass(frozen=True, slots=True)
class ReleaseWorkers:
    """Withdraw the demand for workers that have no seat, and end those that run, so that their nodes can go. No answer."""

    workers: tuple[int, ...]
    """The workers."""


@dataclass(frozen=True, slots=True)
class StoreUsefulWorkers:
    """Store in the journal that the planner can use no more than `workers` workers. No answer.

    A driver that takes over then does not ask the cluster for workers that the planner has declined.
    """

    workers: int
    """The largest number of workers that the planner can use."""


@dataclass(frozen=True, slots=True)
class ReportFirstStepAfterRecovery:
    """Report that the first step after a disturbance is committed. No answer."""

    step: int
    """The step."""
    seconds: float
    """Time since the last step before the disturbance."""
    steps_again: int = 0
    """Steps that are executed again because of the disturbance."""


@dataclass(frozen=True, slots=True)
class CompareReplayedStep:
    """Compare a replayed step with the journal, without metrics or callbacks.

    Answer: `CallFailed` if the step differs although `doubted` is false, else none.
    """

    step: int
    """The step."""
    doubted: bool = False
    """Whether the step may differ: a worker's state was wrong the first time, or the number of shards was another."""


@dataclass(frozen=True, slots=True)
class KillWorker:
    """Kill a worker without waiting for it. Its later answers are ignored."""

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
    """Steps that were emitted."""
    error: Exception | None = None
    """What it failed with."""


Action = (
    RunStep
    | WriteJournal
    | EmitStep
    | Validate
    | EmitValidation
    | ForgetValidations
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
    | PrepareShares
    | AdoptShares
    | ReportShares
    | StartWorkers
    | ReleaseWorkers
    | StoreUsefulWorkers
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
