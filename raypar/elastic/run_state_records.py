"""What the run machine remembers: small records, one for each subject. The rules read and change them."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from raypar.elastic.actions import AdoptPlan
from raypar.elastic.events import CallFailed, StopRequested
from raypar.elastic.generation_guard import WorkerStatus
from raypar.elastic.stragglers import StragglerWatch
from raypar.plan import ParallelPlan
from raypar.plan.pieces import Digest

Due = Literal["save", "validate", "end"]
"""What can be due at a flush point, between two steps."""


@dataclass(slots=True)
class PhaseTimeLimit:
    """The time of the present event, and the time limit of the present phase."""

    now_s: float = 0.0
    """Time of the event that is being handled, by any monotonic clock."""
    since_s: float = 0.0
    """When the present phase, or the oldest step in flight, began."""
    deadline_s: float | None = None
    """When the phase's time-out applies; None: never."""

    @property
    def elapsed_s(self) -> float:
        """Seconds since `since_s`."""
        return self.now_s - self.since_s

    @property
    def expired(self) -> bool:
        """Whether the phase has outlasted its time limit."""
        return self.deadline_s is not None and self.now_s >= self.deadline_s

    def begin_phase(self, deadline_s: float | None) -> None:
        """Start to count anew; the limit is `deadline_s` from now."""
        self.since_s = self.now_s
        self.deadline_s = None if deadline_s is None else self.now_s + deadline_s

    def skip(self, seconds: float) -> None:
        """Leave `seconds` out of account: the driver stood still, or the workers got no processor."""
        self.since_s = min(self.now_s, self.since_s + seconds)
        if self.deadline_s is not None:
            self.deadline_s += seconds


@dataclass(slots=True)
class RunProgress:
    """How far the run is. Numbers of steps count from the start of the job: step n is the (n+1)-th."""

    issued: int
    """Steps that the workers have been called for."""
    committed: int
    """Steps that every worker has applied. A roll-back lowers this number; those below stay."""
    emitted: int
    """Steps that people have seen: journalled, and their callbacks have returned."""
    journalled: int
    """Steps that have been given to the journal."""
    served_flush_point: int
    """The flush point whose saving and validation were begun last, in steps."""
    saved: int | None = None
    """Steps of the last complete checkpoint."""
    saving: int | None = None
    """Steps of the checkpoint that is being written."""
    save_error: Exception | None = None
    """Why the last checkpoint failed; None after one that was written."""
    validated: int | None = None
    """Steps of the last complete validation pass."""
    due: deque[Due] = field(default_factory=deque)
    """What is still to be done at the present flush point, in order."""
    reports: dict[int, set[int]] = field(default_factory=dict)
    """Step in flight -> workers that have reported it."""
    digests: dict[int, dict[int, Digest]] = field(default_factory=dict)
    """Step with a mirror snapshot -> worker -> digest of its state."""
    busy_s: dict[int, dict[int, float]] = field(default_factory=dict)
    """Step in flight -> worker -> seconds that it computed for a microbatch."""
    answers: set[int] = field(default_factory=set)
    """Workers that have finished the present validation pass."""
    last_commit_s: float | None = None
    """When the last step was committed."""

    def forget_open_steps(self) -> None:
        """Drop what has been reported of steps and passes in flight: a new generation begins."""
        self.due.clear()
        self.reports.clear()
        self.digests.clear()
        self.busy_s.clear()


@dataclass(slots=True)
class Membership:
    """The workers of the run. A worker's number is never used again for another one."""

    plan: ParallelPlan | None
    """The plan that trains now; None in runs that are not elastic and need none."""
    members: tuple[int, ...]
    """`members[rank]` is the worker in that seat of the plan."""
    generation: int = 1
    """The number of the present generation: plan and members change only from one to the next."""
    spares: set[int] = field(default_factory=set)
    """Workers that have joined and wait for a seat."""
    leaving: set[int] = field(default_factory=set)
    """Workers that leave as soon as others hold what they held."""
    gone: set[int] = field(default_factory=set)
    """Workers that were lost, have left, or could not be started."""
    hung: set[int] = field(default_factory=set)
    """Those of `gone` whose processes may still exist: they are killed once the next generation is claimed."""
    nodes: Mapping[int, str] = field(default_factory=dict)
    """Worker -> its node, as far as the driver knows."""

    def mark_lost(self, worker: int) -> None:
        """Count the worker as gone for good."""
        self.gone.add(worker)
        self.spares.discard(worker)
        self.leaving.discard(worker)


@dataclass(slots=True)
class WorkerStarts:
    """Workers that this run starts by itself."""

    next_number: int
    """The number of the next worker that is started."""
    starting: set[int] = field(default_factory=set)
    """Workers that have been asked for and have not joined yet."""
    placed: set[int] = field(default_factory=set)
    """Those of them for which the cluster has found room."""
    failures: int = 0
    """Workers in a row that could not be started."""
    retry_at_s: float = 0.0
    """No worker is started before this time."""

    def forget(self, worker: int) -> None:
        """Count the worker as no longer on its way."""
        self.starting.discard(worker)
        self.placed.discard(worker)


@dataclass(slots=True)
class PlannedChange:
    """A change of plan or members that nobody's failure forces: it happens between two steps."""

    reason: str | None = None
    """Why a new generation begins as soon as no step is in flight; None: none is planned."""
    plan: ParallelPlan | None = None
    """The plan that it is to have, where one was chosen before."""
    workers: int = 0
    """The number of workers for which that plan was chosen."""
    asking: bool = False
    """Whether the planner has been asked for a larger plan and has not answered."""
    ask_at_s: float | None = None
    """When the planner is asked for the spares, at the latest; None: there is no spare that was not considered."""


@dataclass(slots=True)
class PendingStop:
    """A request to end the run early."""

    request: StopRequested | None = None
    """The first request, or the Ctrl-C that came after it."""
    stop_step: int | None = None
    """After so many steps the run ends; None: not decided, or the run ends by itself."""
    abandon_at_s: float | None = None
    """When a recovery is broken off because of Ctrl-C."""

    @property
    def interrupted(self) -> bool:
        """Whether it was Ctrl-C: what is in flight gets its grace, and nobody is waited for."""
        return self.request is not None and self.request.interrupt


@dataclass(slots=True)
class WorkerHealth:
    """Silence, slowness and failures of the workers."""

    stragglers: StragglerWatch
    """Finds workers that compute too slowly."""
    slow_nodes: set[str] = field(default_factory=set)
    """Nodes on which a straggler has been replaced: the next one there stays."""
    unheard_since_s: dict[int, float] = field(default_factory=dict)
    """Worker without an answer to the last pings -> time at which its silence was first noticed."""
    silent_since_s: dict[int, float] = field(default_factory=dict)
    """Silent worker that a run which is not elastic waits for -> time at which the wait began."""
    silence_told_s: float = 0.0
    """When people were last told about that wait."""
    probing: bool = False
    """Whether overdue workers have been asked for their stacks."""
    aborted_by_us: bool = False
    """Whether the machine itself has broken off the steps in flight: failures that follow are no news."""
    aborts: int = 0
    """How often it has done so."""
    applied_after_abort: tuple[int | None, ...] | None = None
    """Steps that each worker had applied after the abort; None: not answered yet."""
    failures: list[CallFailed] = field(default_factory=list)
    """Failures since the last committed step; the cause is one of them."""
    deaths: list[CallFailed] = field(default_factory=list)
    """Deaths since the last new step that the step may have caused."""
    attempts: int = 0
    """Recoveries since the last new step that count as attempts at the next."""
    disturbed_at_s: float | None = None
    """When the machine heard of the disturbance after which no step has been committed yet."""
    next_step_least_limit_s: float = 0.0
    """Least limit for the next step: twice the time of its last attempt, if that was waited for."""
    waited_s: float = 0.0
    """How long silent workers with an only copy were last waited for in vain."""
    out_of_memory_at: set[tuple[ParallelPlan, int]] = field(default_factory=set)
    """(plan, position) at which a worker was killed because memory was short."""


@dataclass(slots=True)
class StateTrust:
    """Which state is known to be right: what the comparison of replicas has found."""

    agreed: int
    """Steps after which the replicas' digests were equal last."""
    doubt: str = ""
    """Why nothing newer than `agreed` may be used until the next generation runs; empty: no doubt."""
    doubts: int = 0
    """Times in a row that the digests differed."""
    tainted: set[int] = field(default_factory=set)
    """Workers that hold state newer than `agreed` which has not been replaced yet."""
    wrong: set[int] = field(default_factory=set)
    """Workers whose state differed from that of a majority; they leave."""
    untrusted_snapshots: set[int] = field(default_factory=set)
    """Steps whose mirror snapshot is not trusted."""
    doubted_steps: range = range(0)
    """Steps whose numbers people may have seen wrongly, or computed with other shards."""


@dataclass(slots=True)
class RecoveryState:
    """What is known on the way from one generation to the next."""

    why: str
    """What made the new generation necessary."""
    expected: set[int] = field(default_factory=set)
    """Workers whose answer the phase waits for."""
    statuses: dict[int, WorkerStatus] = field(default_factory=dict)
    """Worker -> where it stands, by its last answer."""
    done: int = 0
    """Steps of the newest state that some worker holds."""
    order: AdoptPlan | None = None
    """The plan that the workers have been told to adopt."""
    former_order: AdoptPlan | None = None
    """The last such order of earlier recoveries: some workers may have adopted that plan."""
    symptom: bool = False
    """Whether it began with the consequence of a death, before it was known who had died and why."""
    awaited: str = ""
    """What the run waits for, in words."""
    told_s: float = 0.0
    """When people were last told about that wait."""
    waited_from_s: float | None = None
    """When the wait for silent workers with an only copy began; None: nobody is waited for."""
    holders: tuple[int, ...] = ()
    """The workers with an only copy that are waited for."""
