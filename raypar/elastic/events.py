"""What happens to a run: facts the driver reports to the machine. Frozen; carry no clock of their own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from raypar.elastic.holdings import Digest
from raypar.elastic.member import WorkerStatus
from raypar.plan import ParallelPlan

FailureKind = Literal["user", "lost", "error", "aborted"]
"""Who is to blame: user code; a worker that died; raypar or its input; or a consequence of somebody else's failure."""


@dataclass(frozen=True, slots=True)
class WorkersReady:
    """Every worker of the first plan has built its stages and is connected to all others."""


@dataclass(frozen=True, slots=True)
class StepReported:
    """A worker holds the whole vote of `step` and has applied it. `seconds`: how long the step took there.

    `mirror_seconds`: what of the mirror (copies, exchange) it spent beside them. `digest`: of the state, where a cut was taken.
    `busy_s`: how long it computed for one microbatch; None where that is not known.
    """

    worker: int
    step: int
    seconds: float = 0.0
    generation: int = 1
    mirror_seconds: float = 0.0
    digest: Digest | None = None
    busy_s: float | None = None


@dataclass(frozen=True, slots=True)
class CallFailed:
    """A worker's call, the start-up (worker None) or a side effect of the driver failed with `error`.

    `generation`: that of the call; None for what has none (a worker's death, a side effect). `preempted`: it died because its
    machine was taken away or lost.
    """

    kind: FailureKind
    error: Exception
    worker: int | None = None
    generation: int | None = None
    preempted: bool = False


@dataclass(frozen=True, slots=True)
class StepJournalled:
    """Step `step` is in the journal: whoever takes over knows that it is committed."""

    step: int


@dataclass(frozen=True, slots=True)
class StepEmitted:
    """Metrics of `step` are written and its callbacks have returned; `stop` is the reason one of them asked to stop."""

    step: int
    stop: str | None = None


@dataclass(frozen=True, slots=True)
class ValidationReported:
    """A worker has finished the validation pass after `done` steps."""

    worker: int
    done: int
    generation: int = 1


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
class CheckpointSaved:
    """The checkpoint after `done` steps is complete under its final name."""

    done: int


@dataclass(frozen=True, slots=True)
class CheckpointFailed:
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
class WorkerSilent:
    """A worker has answered no ping for `seconds`, told once; `WorkerAnswered` follows if it answers again."""

    worker: int
    seconds: float


@dataclass(frozen=True, slots=True)
class WorkerAnswered:
    """A worker whose silence was told has answered a ping."""

    worker: int


@dataclass(frozen=True, slots=True)
class GroupsAborted:
    """All groups are aborted; `done`: steps that each worker has applied, None where it did not answer."""

    done: tuple[int | None, ...]


@dataclass(frozen=True, slots=True)
class StacksReported:
    """What the workers that are overdue were doing: text for the error (stacks, or that they do not answer)."""

    text: str


# -- recovery and rescaling ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class DriverTakenOver:
    """This driver takes over from one that is gone: `workers` were found, `plan` was that of `generation`.

    `seen`: steps that people have seen; `validated`, `saved`: after how many steps that was done last; all from the run folder.
    `starting`: workers that were hired and have not joined yet; `hired`: how many numbers have been given to workers; `idle_s`:
    how long ago people have seen a step.
    """

    workers: tuple[int, ...]
    generation: int
    seen: int
    plan: ParallelPlan
    members: tuple[int, ...]
    validated: int | None = None
    saved: int | None = None
    starting: tuple[int, ...] = ()
    hired: int = 0
    idle_s: float | None = None


@dataclass(frozen=True, slots=True)
class GenerationClaimed:
    """The journal's answer to a claim: `ok` False when another driver was first, which is the end of this one."""

    generation: int
    ok: bool


@dataclass(frozen=True, slots=True)
class WorkerStatusReported:
    """A worker has left what it did, obeys nothing older than `generation`, and says where it stands."""

    generation: int
    stand: WorkerStatus


@dataclass(frozen=True, slots=True)
class WorkerSettled:
    """A worker has applied the step whose votes it had missed; where it stands now (what a former plan left there is gone)."""

    generation: int
    stand: WorkerStatus


@dataclass(frozen=True, slots=True)
class PlanChosen:
    """The planner's answer for that many workers; None when no plan fits them, and why.

    `step_s`, `now_s`: predicted seconds of a step under it and under the present plan; 0 where nothing is predicted.
    """

    generation: int
    plan: ParallelPlan | None
    why: str = ""
    step_s: float = 0.0
    now_s: float = 0.0


@dataclass(frozen=True, slots=True)
class PlanAdopted:
    """A worker holds its part of the new plan and is connected to the others of `generation`."""

    worker: int
    generation: int


@dataclass(frozen=True, slots=True)
class WorkerPlaced:
    """There is room for one more worker: its process starts, and will be there in seconds."""

    worker: int


@dataclass(frozen=True, slots=True)
class WorkerJoined:
    """A new worker has started, loaded torch and the model's code, and waits for a seat."""

    worker: int


@dataclass(frozen=True, slots=True)
class WorkerStartFailed:
    """A worker that was to start did not; its number is not used again."""

    worker: int
    error: Exception


@dataclass(frozen=True, slots=True)
class DrainAsked:
    """A worker has to leave (preemption, maintenance); it may still be asked for what it holds."""

    worker: int
    why: str


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed: deadlines are looked at.

    `stalled_s`: how much of it no deadline counts, because the driver itself stood still and heard nobody, or workers wanted to
    compute and got no processor. `unheard`: workers that have not even answered a ping for a while, although others had the
    time to. `ended`: those of them whose process or machine is known to be gone, though Ray has not said so yet.
    """

    stalled_s: float = 0.0
    unheard: frozenset[int] = frozenset()
    ended: frozenset[int] = frozenset()


RunEvent = (
    WorkersReady
    | StepReported
    | CallFailed
    | StepJournalled
    | StepEmitted
    | ValidationReported
    | ValidationEmitted
    | SnapshotTaken
    | CheckpointSaved
    | CheckpointFailed
    | StopRequested
    | WorkerSilent
    | WorkerAnswered
    | GroupsAborted
    | StacksReported
    | DriverTakenOver
    | GenerationClaimed
    | WorkerStatusReported
    | WorkerSettled
    | PlanChosen
    | PlanAdopted
    | WorkerPlaced
    | WorkerJoined
    | WorkerStartFailed
    | DrainAsked
    | Tick
)
