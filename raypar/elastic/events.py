"""What happens to a run: the facts that the driver reports to the machine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from raypar.elastic.generation_guard import WorkerStatus
from raypar.plan import ParallelPlan
from raypar.plan.pieces import Digest

FailureKind = Literal["user", "lost", "error", "aborted"]
"""Who is to blame: user code; a worker that died; raypar or its input; or nobody, as it follows from another failure."""


@dataclass(frozen=True, slots=True)
class WorkersReady:
    """All workers of the first plan have built their stages and are connected."""


@dataclass(frozen=True, slots=True)
class StepReported:
    """A worker holds the whole vote of a step and has applied it."""

    worker: int
    """The worker."""
    step: int
    """The step."""
    seconds: float = 0.0
    """How long the step took there."""
    generation: int = 1
    """The generation whose call this answers."""
    mirror_seconds: float = 0.0
    """Time spent on the mirror (copies, exchange) beside `seconds`."""
    digest: Digest | None = None
    """Digest of its state, where the step took a snapshot for the mirror."""
    busy_s: float | None = None
    """How long it computed for one microbatch; None: not known."""


@dataclass(frozen=True, slots=True)
class CallFailed:
    """A worker's call, the start-up, or a side effect of the driver has failed."""

    kind: FailureKind
    """Who is to blame."""
    error: Exception
    """What it failed with."""
    worker: int | None = None
    """The worker; None: the start-up or a side effect."""
    generation: int | None = None
    """The generation of the call; None where there is none (a worker's death, a side effect)."""
    preempted: bool = False
    """Whether the worker died because its machine was taken away or lost."""


@dataclass(frozen=True, slots=True)
class StepJournalled:
    """A step is in the journal: a driver that takes over knows that it is committed."""

    step: int
    """The step."""


@dataclass(frozen=True, slots=True)
class StepEmitted:
    """The metrics of a step are written, and its callbacks have returned."""

    step: int
    """The step."""
    stop: str | None = None
    """Why a callback asked to stop; None: none did."""


@dataclass(frozen=True, slots=True)
class ValidationReported:
    """A worker has finished a validation pass."""

    worker: int
    """The worker."""
    done: int
    """Steps before the pass."""
    generation: int = 1
    """The generation whose call this answers."""


@dataclass(frozen=True, slots=True)
class ValidationEmitted:
    """The validation loss is written, and its callbacks have returned."""

    done: int
    """Steps before the validation."""
    stop: str | None = None
    """Why a callback asked to stop; None: none did."""


@dataclass(frozen=True, slots=True)
class CheckpointStateCopied:
    """All workers have copied their state and write the copy in the background. Training may go on."""

    done: int
    """Steps of that state."""


@dataclass(frozen=True, slots=True)
class CheckpointSaved:
    """A checkpoint is complete under its final name."""

    done: int
    """Steps of its state."""


@dataclass(frozen=True, slots=True)
class CheckpointFailed:
    """A checkpoint could not be written. Earlier ones are untouched."""

    done: int
    """Steps of its state."""
    error: Exception
    """Why it failed."""


@dataclass(frozen=True, slots=True)
class StopRequested:
    """The run is to end early, with its state saved."""

    reason: str
    """Why, for people."""
    interrupt: bool = False
    """Whether it was Ctrl-C: what is in flight gets `grace_s`, then it is aborted and has never happened."""
    grace_s: float = 0.0
    """Seconds of that grace."""


@dataclass(frozen=True, slots=True)
class WorkerSilent:
    """A worker has answered no ping for a while. Told once; `WorkerAnswered` follows if it answers again."""

    worker: int
    """The worker."""
    seconds: float
    """How long it has been silent."""


@dataclass(frozen=True, slots=True)
class WorkerAnswered:
    """A worker whose silence was told has answered a ping."""

    worker: int
    """The worker."""


@dataclass(frozen=True, slots=True)
class GroupsAborted:
    """All workers have been told to leave what they do."""

    done: tuple[int | None, ...]
    """By rank, the steps that the worker has applied; None: it did not answer."""


@dataclass(frozen=True, slots=True)
class StacksReported:
    """Overdue workers were asked what they are doing."""

    text: str
    """Their stacks, or that they do not answer; for the error."""


# -- recovery and rescaling ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class DriverFailover:
    """This driver follows one that is gone; the facts are from the run folder and from the workers that it found."""

    workers: tuple[int, ...]
    """The workers that were found."""
    generation: int
    """The last generation that was claimed."""
    seen: int
    """Steps that people have seen."""
    plan: ParallelPlan
    """The plan of that generation."""
    members: tuple[int, ...]
    """`members[rank]` has that seat of the plan."""
    validated: int | None = None
    """Steps of the last validation."""
    saved: int | None = None
    """Steps of the last checkpoint."""
    starting: tuple[int, ...] = ()
    """Workers that were started and have not joined yet."""
    next_worker_number: int = 0
    """How many numbers have been given to workers."""
    idle_s: float | None = None
    """How long ago people have seen a step; None: never."""


@dataclass(frozen=True, slots=True)
class GenerationClaimed:
    """The journal has answered a claim."""

    generation: int
    """The generation."""
    ok: bool
    """False: another driver was first, which ends this one."""


@dataclass(frozen=True, slots=True)
class WorkerStatusReported:
    """A worker has left what it did, obeys nothing older than `generation`, and says where it stands."""

    generation: int
    """The generation."""
    status: WorkerStatus
    """Where it stands."""


@dataclass(frozen=True, slots=True)
class KeptGradientsApplied:
    """A worker has applied the step whose votes it had missed."""

    generation: int
    """The generation that asked for it."""
    status: WorkerStatus
    """Where it stands now; what a former plan left there is gone."""


@dataclass(frozen=True, slots=True)
class PlanChosen:
    """The planner has answered."""

    generation: int
    """The generation in which it was asked."""
    plan: ParallelPlan | None
    """The best plan; None: none fits the workers."""
    why: str = ""
    """Why none fits."""
    step_s: float = 0.0
    """Predicted seconds of a step under the plan; 0: nothing is predicted."""
    now_s: float = 0.0
    """The same under the present plan."""


@dataclass(frozen=True, slots=True)
class PlanAdopted:
    """A worker holds its part of the new plan and is connected to the others."""

    worker: int
    """The worker."""
    generation: int
    """The generation of the plan."""


@dataclass(frozen=True, slots=True)
class WorkerPlaced:
    """The cluster has room for one more worker: its process starts, and will be there in seconds."""

    worker: int
    """The worker's number."""


@dataclass(frozen=True, slots=True)
class WorkerJoined:
    """A new worker has started, loaded torch and the model's code, and waits for a seat."""

    worker: int
    """The worker's number."""


@dataclass(frozen=True, slots=True)
class WorkerStartFailed:
    """A worker that was to start did not. Its number is not used again."""

    worker: int
    """The worker's number."""
    error: Exception
    """Why it did not."""


@dataclass(frozen=True, slots=True)
class DrainRequested:
    """A worker has to leave (preemption, maintenance); until then it may hand over what it holds."""

    worker: int
    """The worker."""
    why: str
    """Why, for people."""


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed: time limits are checked."""

    stalled_s: float = 0.0
    """Seconds that no limit counts: the driver stood still and heard nobody, or workers got no processor."""
    unheard: frozenset[int] = frozenset()
    """Workers that have answered no ping for a while, although others had the time to."""
    ended: frozenset[int] = frozenset()
    """Those of them whose process or machine is known to be gone, before Ray has said so."""


RunEvent = (
    WorkersReady
    | StepReported
    | CallFailed
    | StepJournalled
    | StepEmitted
    | ValidationReported
    | ValidationEmitted
    | CheckpointStateCopied
    | CheckpointSaved
    | CheckpointFailed
    | StopRequested
    | WorkerSilent
    | WorkerAnswered
    | GroupsAborted
    | StacksReported
    | DriverFailover
    | GenerationClaimed
    | WorkerStatusReported
    | KeptGradientsApplied
    | PlanChosen
    | PlanAdopted
    | WorkerPlaced
    | WorkerJoined
    | WorkerStartFailed
    | DrainRequested
    | Tick
)
