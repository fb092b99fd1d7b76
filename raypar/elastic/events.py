"""The events that the driver reports to the run machine."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Literal

from raypar.elastic.generation_guard import WorkerStatus
from raypar.plan import ParallelPlan
from raypar.plan.pieces import Digest

FailureKind = Literal["user", "lost", "error", "aborted"]
"""The cause of a failure. `user`: user code. `lost`: a dead worker. `error`: raypar, its input. `aborted`: another failure."""


@dataclass(frozen=True, slots=True)
class FirstWorkersPlaced:
    """The cluster has found room for the workers that the run begins with; they are started now."""

    plan: ParallelPlan
    """The first generation's plan: the job's own, or one for fewer workers."""
    members: tuple[int, ...]
    """`members[rank]`: the worker in the seat `rank` of the plan."""
    placed: tuple[int, ...] = ()
    """Further workers that are placed and are being started; they have no seat yet."""
    groups: tuple[tuple[int, ...], ...] = ()
    """All workers that are asked for, by placement group."""
    on_demand: tuple[int, ...] = ()
    """Workers that were asked for on on-demand nodes."""
    claimed: int = 0
    """The newest generation that a former driver has claimed, which ended before its first one had members; 0: none."""


@dataclass(frozen=True, slots=True)
class WorkersReady:
    """All workers of the first plan have started. They have no stages yet: the first generation is to be claimed."""


@dataclass(frozen=True, slots=True)
class StepReported:
    """Workers have received all votes on a step and have applied the step. Of many workers those that answer together."""

    workers: Collection[int]
    """The workers."""
    step: int
    """The step."""
    seconds: float = 0.0
    """How long the step took on the slowest of them."""
    generation: int = 1
    """The generation whose call this answers."""
    mirror_seconds: float = 0.0
    """The longest time that one spent on the mirror (copies, exchange) beside `seconds`."""
    digests: Mapping[int, Digest] = field(default_factory=dict, repr=False)
    """Worker -> digest of its state, if the mirror took a snapshot after the step."""
    busy_s: Mapping[int, float] = field(default_factory=dict, repr=False)
    """Worker -> seconds that it computed for one microbatch; of those of which that is known."""


@dataclass(frozen=True, slots=True)
class CallFailed:
    """A worker's call, the start-up, or a side effect of the driver has failed."""

    kind: FailureKind
    """The kind of cause."""
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
    """A step is in the journal: a driver that takes over knows that the step is committed."""

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
    """Workers have finished a validation pass."""

    workers: Collection[int]
    """The workers."""
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
    is_best: bool = False
    """Whether the state is to be saved because a metric is among its best values."""


@dataclass(frozen=True, slots=True)
class AllWorkersCopiedState:
    """All workers have copied their state and write the copy in the background. Training may go on."""

    done: int
    """Steps that the copied state has had."""


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
    """Somebody, or a callback, has asked the run to end early, with its state saved."""

    reason: str
    """Why, for people."""
    interrupt: bool = False
    """Whether it was Ctrl-C: steps in flight get `grace_s` to end, then they are aborted and do not count."""
    grace_s: float = 0.0
    """Seconds after Ctrl-C in which steps in flight may end."""


@dataclass(frozen=True, slots=True)
class WorkerSilent:
    """A worker has answered no ping for a while. Reported once; `WorkerAnswered` follows if it answers again."""

    worker: int
    """The worker."""
    seconds: float
    """How long it has been silent."""


@dataclass(frozen=True, slots=True)
class WorkerAnswered:
    """A worker whose silence was reported has answered a ping."""

    worker: int
    """The worker."""


@dataclass(frozen=True, slots=True)
class GroupsAborted:
    """All workers have been told to abort their steps, and have answered or run out of time."""

    done: tuple[int | None, ...]
    """By rank, the steps that the worker has applied; None: it did not answer."""


@dataclass(frozen=True, slots=True)
class StacksReported:
    """Overdue workers were asked for their stacks."""

    text: str
    """The stacks, or a sentence that the workers do not answer; for the error message."""


# -- recovery and rescaling ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class DriverFailover:
    """This driver replaces one that is gone. The facts are from the run folder and from the workers that were found."""

    workers: tuple[int, ...]
    """The workers that were found."""
    generation: int
    """The last generation that was claimed."""
    seen: int
    """Steps that were emitted."""
    plan: ParallelPlan
    """The plan of that generation."""
    members: tuple[int, ...]
    """`members[rank]`: the worker in the seat `rank` of the plan."""
    validated: int | None = None
    """Steps of the last validation."""
    saved: int | None = None
    """Steps of the last checkpoint."""
    starting: tuple[int, ...] = ()
    """Workers that were started and have not joined yet."""
    pending: tuple[int, ...] = ()
    """Workers that were asked for and have not been started, because they had no place or the driver was lost."""
    groups: tuple[tuple[int, ...], ...] = ()
    """The workers that share a placement group, of each group."""
    on_demand: tuple[int, ...] = ()
    """Workers that were asked for on on-demand nodes."""
    useful_workers: int | None = None
    """The largest number of workers that the planner can use; None: it has declined none."""
    next_worker_number: int = 0
    """The number that the next worker gets."""
    idle_s: float | None = None
    """Seconds since the last step was emitted; None: no step was."""
    best: int | None = None
    """Steps of the last validation, if the state is to be saved because a metric is among its best values there."""


@dataclass(frozen=True, slots=True)
class GenerationClaimed:
    """The journal has answered this driver's claim of a generation."""

    generation: int
    """The generation."""
    ok: bool
    """Whether the claim was granted. If not, another driver was first, and this driver ends."""


@dataclass(frozen=True, slots=True)
class WorkerStatusReported:
    """A worker has ended its older calls, refuses calls older than `generation`, and reports its status."""

    generation: int
    """The generation."""
    status: WorkerStatus
    """The worker's status."""


@dataclass(frozen=True, slots=True)
class KeptGradientsApplied:
    """A worker has applied late the step whose votes it had missed."""

    generation: int
    """The generation that asked for it."""
    status: WorkerStatus
    """The worker's status after that; pieces of a former plan are gone."""


@dataclass(frozen=True, slots=True)
class PlanChosen:
    """The planner has answered a `ChoosePlan`."""

    generation: int
    """The generation in which the planner was asked."""
    plan: ParallelPlan | None
    """The best plan; None: no plan fits the workers."""
    why: str = ""
    """Why no plan fits."""
    step_s: float = 0.0
    """Predicted seconds of a step under the chosen plan; 0: not predicted."""
    now_s: float = 0.0
    """Predicted seconds of a step under the present plan; 0: not predicted."""


@dataclass(frozen=True, slots=True)
class PlanAdopted:
    """A worker holds its part of the new plan and is connected to the others."""

    worker: int
    """The worker."""
    generation: int
    """The generation of the plan."""
    not_kept: str = ""
    """What optimizer state could not be moved, and why: the worker has its parameters and buffers only."""


@dataclass(frozen=True, slots=True)
class SharesPrepared:
    """The programs of a plan with other shares are made (`PrepareShares`)."""

    generation: int
    """The generation in which they were asked for."""
    plan: ParallelPlan
    """The plan."""
    why: str = ""
    """Why they could not be made; empty: they could."""


@dataclass(frozen=True, slots=True)
class SharesAdopted:
    """A member runs its blocks of the plan with other shares from the next step on."""

    worker: int
    """The worker."""
    generation: int
    """The generation."""
    fits: bool = True
    """False: it would need other stages, or other connections, and goes on as before."""


@dataclass(frozen=True, slots=True)
class WorkerPlaced:
    """The cluster has found room for a new worker: its process starts, which takes seconds."""

    worker: int
    """The worker's number."""


@dataclass(frozen=True, slots=True)
class WorkerJoined:
    """A new worker has started, loaded torch and the model's code, and waits for a seat."""

    worker: int
    """The worker's number."""


@dataclass(frozen=True, slots=True)
class WorkerStartFailed:
    """A worker could not be started. Its number is not used again."""

    worker: int
    """The worker's number."""
    error: Exception
    """Why it could not."""


@dataclass(frozen=True, slots=True)
class DrainRequested:
    """A worker has to leave soon (preemption, maintenance); before that it may send its state to others."""

    worker: int
    """The worker."""
    why: str
    """Why, for people."""


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed: time limits are checked."""

    stalled_s: float = 0.0
    """Seconds that no time limit counts: the driver was stopped, or workers got no processor."""
    unheard: frozenset[int] = frozenset()
    """Workers that have answered no ping for a while, although there was time to."""
    ended: frozenset[int] = frozenset()
    """Workers of `unheard` whose process or machine is known to be gone, before Ray has reported it."""
    reading: frozenset[int] = frozenset()
    """Workers that were reading samples, or waiting for their data processes, when they last answered a ping."""
    searching: frozenset[int] = frozenset()
    """Workers of `reading` that read streams to find a place, and come further."""


RunEvent = (
    FirstWorkersPlaced
    | WorkersReady
    | StepReported
    | CallFailed
    | StepJournalled
    | StepEmitted
    | ValidationReported
    | ValidationEmitted
    | AllWorkersCopiedState
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
    | SharesPrepared
    | SharesAdopted
    | WorkerPlaced
    | WorkerJoined
    | WorkerStartFailed
    | DrainRequested
    | Tick
)
