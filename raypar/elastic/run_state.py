"""The state of a run: a record for each subject, and the two operations of rules: decide on an action, end the run."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from raypar.elastic.actions import Action, ActionWithReason, AdoptPlan, EndKind, Teardown
from raypar.elastic.events import CallFailed, RunEvent, StopRequested
from raypar.elastic.generation_guard import WorkerStatus
from raypar.elastic.mirror_schedule_and_buddies import MirrorSchedule
from raypar.elastic.phases import Phase
from raypar.elastic.run_policy import RunPolicy
from raypar.elastic.stragglers import StragglerWatch
from raypar.plan import ParallelPlan
from raypar.plan.pieces import Digest, Piece

MOST_DOUBLINGS = 4
"""How often the least number of steps between two changes of shares doubles."""
Due = Literal["save", "validate", "end"]
"""Work that can be due at a flush point, which is a moment without steps in flight."""
KEPT_STEPS = 100
"""Steps whose times are remembered."""
MIN_OWN_STEPS = 3
"""Least steps with the present number of workers whose median is used alone: a generation's first step is longer."""


@dataclass
class StepTimes:
    """The seconds of the last steps, each with the number of workers that executed it.

    Measured times are kept unscaled. So a run that shrinks and grows again expects the times of its beginning.
    """

    _steps: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=KEPT_STEPS))
    """(seconds, number of workers) of each step."""

    def add(self, seconds: float, workers: int) -> None:
        """Add a step that `workers` workers have executed."""
        self._steps.append((seconds, workers))

    @property
    def known(self) -> bool:
        """Whether a step has been measured."""
        return bool(self._steps)

    def longest_s(self, workers: int) -> float | None:
        """The longest step, scaled to `workers` workers; None before the first step.

        Fewer workers are taken to need more time in proportion; more workers are not taken to be faster.
        """
        return max((self._scaled_s(seconds, had, workers) for seconds, had in self._steps), default=None)

    def usual_s(self, workers: int) -> float:
        """The median of the steps of so many workers, or of all steps scaled to that number; 0 before the first step."""
        own = [seconds for seconds, had in self._steps if had == workers]
        found = own if len(own) >= MIN_OWN_STEPS else [self._scaled_s(s, had, workers) for s, had in self._steps]
        return statistics.median(found) if found else 0.0

    @staticmethod
    def _scaled_s(seconds: float, had: int, workers: int) -> float:
        return seconds * max(1.0, had / workers)


Shards = tuple[int, ...]
"""The number of shards of every layer (`ParallelPlan.shards_by_layer`)."""


class ShardCountHistory:
    """Remembers the number of shards of every layer with which each step was executed last."""

    def __init__(self, first: int, shards: Shards | None) -> None:
        """`shards`: numbers of shards for the steps from `first` on; None: not known, which counts as different from any."""
        self._since: list[tuple[int, Shards | None]] = [(first, shards)]
        """(step, shards of the steps from there on), in ascending order."""

    def begin(self, done: int, shards: Shards, seen: int) -> range:
        """Record that the run goes on after `done` steps with `shards`. Returns the steps whose results may change.

        They are the first replayed step that was executed with other shards, and all steps after it that were seen, up to
        step number `seen`.
        """
        ends = [*(start for start, _ in self._since[1:]), seen]
        others = (max(start, done) for (start, was), end in zip(self._since, ends, strict=True) if was != shards and end > done)
        first = next(others, seen)
        self._since = [part for part in self._since if part[0] < done]
        if not self._since or self._since[-1][1] != shards:
            self._since.append((done, shards))
        return range(min(first, seen), seen)


@dataclass(slots=True)
class PhaseTimeLimit:
    """The time of the present event, and the time limit of the present phase."""

    now_s: float = 0.0
    """Time of the event that is being handled, by any monotonic clock."""
    since_s: float = 0.0
    """When the present phase, or the oldest step in flight, began; later if time was skipped."""
    deadline_s: float | None = None
    """When the phase's time limit is over; None: it has no limit."""

    @property
    def elapsed_s(self) -> float:
        """Seconds since `since_s`."""
        return self.now_s - self.since_s

    @property
    def expired(self) -> bool:
        """Whether the phase has outlasted its time limit."""
        return self.deadline_s is not None and self.now_s >= self.deadline_s

    def begin_phase(self) -> None:
        """Start a new phase now, without a limit."""
        self.since_s = self.now_s
        self.deadline_s = None

    def limit(self, seconds: float | None) -> None:
        """End the phase in so many seconds from now; None: it has no limit."""
        self.deadline_s = None if seconds is None else self.now_s + seconds

    def skip(self, seconds: float) -> None:
        """Do not count `seconds`: the driver was stopped, or the workers got no processor."""
        self.since_s = min(self.now_s, self.since_s + seconds)
        if self.deadline_s is not None:
            self.deadline_s += seconds


@dataclass(slots=True)
class RunProgress:
    """The run's progress. All counts are of steps since the start of the job. Steps are numbered from 0."""

    issued: int
    """Steps that the workers have been called for."""
    committed: int
    """Steps that every worker has applied. A roll-back lowers this number, but not `emitted` and `journalled`."""
    emitted: int
    """Steps that people have seen: they are journalled, and their callbacks have returned."""
    journalled: int
    """Steps that have been given to the journal."""
    served_flush_point: int
    """Steps at the last flush point whose saving and validation were begun."""
    saved: int | None = None
    """Steps of the last complete checkpoint."""
    saving: int | None = None
    """Steps of the checkpoint that is being written."""
    save_error: Exception | None = None
    """Why the last checkpoint failed; None after one that was written."""
    unsaved_since_s: float | None = None
    """Since when the run is over but for its last checkpoint, which could not be written; None: it waits for no disk."""
    retry_save_at_s: float | None = None
    """When that checkpoint is begun again; None while it is being written."""
    validated: int | None = None
    """Steps of the last complete validation pass."""
    doubted_validations: tuple[int, ...] = ()
    """Steps of the validations that a replay runs again: learning rates follow them, and the state may have been wrong."""
    passes: int = 0
    """Forward passes that are made, of a run that makes nothing else (`RunPolicy.forward_passes`)."""
    best: int | None = None
    """Steps of the last validation in which a metric was among its best values: that state is saved too."""
    due: deque[Due] = field(default_factory=deque)
    """Work that is still to be done at the present flush point, in order."""
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

    @property
    def ends_at(self) -> int:
        """Steps that are seen and applied. At a flush point fewer than `emitted` only if a roll-back has lost optimizer state.

        Then the steps after it cannot be made again.
        """
        return min(self.emitted, self.committed)

    def forget_open_steps(self) -> None:
        """Drop the reports of steps in flight and the work that is due, because a new generation begins."""
        self.due.clear()
        self.reports.clear()
        self.digests.clear()
        self.busy_s.clear()


@dataclass(slots=True)
class Membership:
    """The workers of the run. A worker's number is never used again for another worker."""

    plan: ParallelPlan | None
    """The plan that trains now, or is to train first; None: not known yet."""
    members: tuple[int, ...]
    """`members[rank]`: the worker in the seat `rank` of the plan."""
    generation: int = 0
    """The number of the present generation: plan and members change only from one to the next. 0 before the first."""
    spares: set[int] = field(default_factory=set)
    """Workers that have joined and wait for a seat."""
    leaving: set[int] = field(default_factory=set)
    """Workers that leave as soon as others hold their state."""
    gone: set[int] = field(default_factory=set)
    """Workers that were lost, have left, or could not be started."""
    hung: set[int] = field(default_factory=set)
    """Workers of `gone` whose processes may still exist; they are killed once the next generation is claimed."""
    had_seat: set[int] = field(default_factory=set)
    """Workers that have had a seat in some generation."""
    nodes: Mapping[int, str] = field(default_factory=dict)
    """Worker -> its node, as far as the driver knows."""
    zones: Mapping[str, str] = field(default_factory=dict)
    """Node -> its availability zone, where nodes say theirs."""


@dataclass(slots=True)
class WorkerStarts:
    """Workers that this run asks the cluster for."""

    next_number: int
    """The number of the next worker that is started."""
    starting: set[int] = field(default_factory=set)
    """Workers that have been asked for and have not joined yet."""
    placed: set[int] = field(default_factory=set)
    """Workers of `starting` for which the cluster has found room."""
    asked_together: dict[int, set[int]] = field(default_factory=dict)
    """Worker -> all workers that share its placement group, where these are several."""
    on_demand: set[int] = field(default_factory=set)
    """Workers on on-demand nodes, or asked for there."""
    useful: int | None = None
    """The largest number of workers that the planner can use; None: it has declined none yet."""
    useful_is_final: bool = False
    """Whether `useful` holds for all plans, because the planner was asked for all workers that are wanted."""
    failures: int = 0
    """Number of failed starts in a row."""
    retry_at_s: float = 0.0
    """No worker is started before this time."""

    def ask_for(self, workers: tuple[int, ...], *, on_demand: bool = False) -> None:
        """Note that these workers have been asked for together."""
        self.next_number = max(self.next_number, workers[-1] + 1)
        self.starting.update(workers)
        self.note_placement_group(workers)
        if on_demand:
            self.on_demand.update(workers)

    def note_placement_group(self, workers: tuple[int, ...]) -> None:
        """Note that these workers share a placement group."""
        if len(workers) > 1:
            self.asked_together.update({worker: set(workers) for worker in workers})


@dataclass(slots=True)
class PlannedChange:
    """A change of plan or members that no failure forces: it happens between two steps."""

    reason: str | None = None
    """Why a new generation begins as soon as no step is in flight; None: none is planned."""
    plan: ParallelPlan | None = None
    """The plan for the new generation, if it was chosen before; else None."""
    workers: int = 0
    """The number of workers for which that plan was chosen."""
    members: tuple[int, ...] = ()
    """By rank, who is to have that plan's seats; empty: whoever holds most of the state."""
    asking: bool = False
    """Whether the planner has been asked for a larger plan and has not answered."""
    asked_workers: int = 0
    """The number of workers that the planner was last asked about."""
    declined_at_s: float | None = None
    """When the planner last declined spares under the present plan; None: it has not."""
    ask_at_s: float | None = None
    """Latest time to ask the planner for a plan with seats for the spares; None: all spares have been considered."""
    failed_moves: int = 0
    """Number of moves in a row that failed although they were to give newcomers seats."""
    not_before_s: float = 0.0
    """No larger plan is asked for before this time, because the last move to one has failed."""
    unreachable: dict[int, set[frozenset[int]]] = field(default_factory=dict)
    """Generation -> its pairs of a newcomer and another worker that could not reach each other. Emptied when newcomers get
    seats."""


@dataclass(slots=True)
class ShareChange:
    """A change of the replicas' shares of the blocks, because a worker is slow, or fast again."""

    asked: ParallelPlan | None = None
    """The plan with other shares that is being lowered; None: none is."""
    plan: ParallelPlan | None = None
    """The plan that the members are to take on as soon as no step is in flight; None: none is ready."""
    text: str = ""
    """Why, and who gets how many blocks, for people."""
    expected: set[int] = field(default_factory=set)
    """Members that have not taken their blocks yet."""
    fits: bool = True
    """Whether all others could, with the stages and connections that they have."""
    changes: int = 0
    """Number of changes in this run."""
    not_before: int = 0
    """No change comes before so many steps are committed."""
    of_no_use: set[int] = field(default_factory=set)
    """Stragglers whom no share makes useful, when workers' times were last looked at."""
    told_of_no_use: set[int] = field(default_factory=set)
    """Those that people have been told of."""

    @property
    def pending(self) -> bool:
        """Whether a change is under way."""
        return self.asked is not None or self.plan is not None

    def forget(self) -> None:
        """Drop a change that is under way, because a new generation begins."""
        self.asked = self.plan = None

    def note_change(self, done: int, steps: int) -> None:
        """Note a change after `done` steps: the next one comes after `steps` more at the soonest, then after twice as many."""
        self.not_before = done + (steps << min(self.changes, MOST_DOUBLINGS))
        self.changes += 1


@dataclass(slots=True)
class PendingStop:
    """A request to end the run early."""

    request: StopRequested | None = None
    """The first request, or the Ctrl-C that came after it."""
    stop_step: int | None = None
    """Number of steps after which the run ends; None: not decided, or the run ends by itself."""
    waits_for_callbacks: bool = False
    """Whether Ctrl-C has found all steps applied and none in flight, but callbacks that have not returned."""
    abandon_at_s: float | None = None
    """When a recovery is broken off because of Ctrl-C."""

    @property
    def interrupted(self) -> bool:
        """Whether Ctrl-C was pressed: steps in flight get a grace period, and the run waits for no silent worker."""
        return self.request is not None and self.request.interrupt


@dataclass(slots=True)
class WorkerHealth:
    """Silence, slowness and failures of the workers."""

    stragglers: StragglerWatch
    """Finds workers that compute too slowly."""
    slow_nodes: set[str] = field(default_factory=set)
    """Nodes on which a straggler has been replaced; a further straggler there is not replaced."""
    unheard_since_s: dict[int, float] = field(default_factory=dict)
    """Worker that has not answered the last pings -> time at which its silence was first noticed."""
    silent_since_s: dict[int, float] = field(default_factory=dict)
    """Silent worker that a run which is not elastic waits for -> time at which the wait began."""
    ended_since_s: float | None = None
    """Since when the process of one of these is known to be gone; None: of none."""
    silence_told_s: float = 0.0
    """When people were last told about the wait in `silent_since_s`."""
    probing: bool = False
    """Whether overdue workers have been asked for their stacks."""
    aborted_by_us: bool = False
    """Whether the machine itself has aborted the steps in flight; failures that follow are expected."""
    aborts: int = 0
    """How often the machine has aborted steps in flight."""
    applied_after_abort: tuple[int | None, ...] | None = None
    """By rank, the steps that the worker had applied after the abort (None: no answer); None before the answers."""
    failures: list[CallFailed] = field(default_factory=list)
    """Failures since the last committed step; the cause is one of them."""
    deaths: list[CallFailed] = field(default_factory=list)
    """Deaths of workers since the last new step that the step itself may have caused."""
    attempts: int = 0
    """Recoveries since the last new step that count as attempts at the next step."""
    unreachable: dict[int, set[frozenset[int]]] = field(default_factory=dict)
    """Generation since the last new step -> pairs of workers that could not reach each other in it."""
    patient_until_s: float = 0.0
    """Until this time silent workers are not given up: the driver's own network was interrupted until recently."""
    disturbed_at_s: float | None = None
    """When the present disturbance began: a recovery after which no step is committed yet; None: there is none."""
    next_step_least_limit_s: float = 0.0
    """Least limit for the next step: twice the time of its last attempt, if the run waited for a silent worker in it."""
    slow_sample_from_s: float | None = None
    """When the wait for a worker that reads samples began, in a step that is over its limit or a recovery; None: none is
    waited for."""
    waited_s: float = 0.0
    """Duration of the last wait in vain for silent workers that hold an only copy."""
    out_of_memory_at: set[tuple[ParallelPlan, tuple[int, ...]]] = field(default_factory=set)
    """(plan, stages of a worker) at which a worker was killed because memory was short."""


@dataclass(slots=True)
class StateTrust:
    """Which state can be trusted: the findings of the comparison of replicas' digests."""

    agreed: int
    """Steps after which the replicas' digests were last found equal."""
    doubt: str = ""
    """Why nothing newer than `agreed` may be used until the next generation runs; empty: no doubt."""
    doubts: int = 0
    """Number of comparisons in a row in which digests differed."""
    tainted: set[int] = field(default_factory=set)
    """Workers whose state is not trusted and has not been replaced yet."""
    wrong: set[int] = field(default_factory=set)
    """Workers whose state differed from that of a majority of replicas; they leave."""
    untrusted_snapshots: set[int] = field(default_factory=set)
    """Steps whose mirror snapshot is not trusted."""
    doubted_steps: range = range(0)
    """Emitted steps whose results may be wrong, or were computed with other numbers of shards."""


RUN_BEGINS = "the run begins"
"""The reason for the first generation."""


@dataclass(slots=True)
class RecoveryState:
    """The state of one recovery, which leads from one generation to the next; of the start, which leads to the first."""

    why: str = RUN_BEGINS
    """The reason for the new generation."""
    expected: set[int] = field(default_factory=set)
    """Workers whose answers the phase waits for."""
    statuses: dict[int, WorkerStatus] = field(default_factory=dict)
    """Worker -> the status that it reported last."""
    done: int = 0
    """Steps of the newest state that some worker holds."""
    order: AdoptPlan | None = None
    """The plan that the workers have been told to adopt."""
    largest_part: int = 0
    """Elements of state that a member has to hold under that plan, of the member with the most."""
    former_order: AdoptPlan | None = None
    """The last order of earlier recoveries: some workers may have adopted its plan."""
    symptom: bool = False
    """Whether the recovery began with a consequence of a death, before the dead worker was known."""
    not_kept: str = ""
    """What optimizer state could not be moved to the new plan, and why: the run ends with the weights that were moved."""
    awaited: str = ""
    """What the run waits for, as text for people."""
    told_s: float = 0.0
    """When people were last told what the run waits for."""
    waited_from_s: float | None = None
    """When the wait for silent workers with an only copy began; None: the run does not wait for any."""
    holders: tuple[int, ...] = ()
    """The workers with an only copy that the run waits for."""


HeldPieces = Callable[[ParallelPlan], tuple[tuple[Piece, ...], ...]]
"""The pieces of state that each rank of a plan has to hold."""

MemoryLacking = Callable[[ParallelPlan], str]
"""Which worker of a plan is predicted to need more memory than a worker has, as text; empty: none, or it is not known."""


class RunState:
    """The state of the run machine for one run. Rules read and change it."""

    def __init__(
        self,
        policy: RunPolicy,
        plan: ParallelPlan | None = None,
        held_pieces: HeldPieces | None = None,
        memory_lacking: MemoryLacking | None = None,
    ) -> None:
        """Start in the phase `STARTING`. Without `held_pieces` no worker has to hold any state."""
        first = policy.steps_before_run
        self.policy = policy
        """The limits of the run."""
        self.held_pieces = held_pieces or (lambda plan: ((),) * plan.world)
        """Plan -> by rank, the pieces of state that it has to hold."""
        self.memory_lacking = memory_lacking or (lambda plan: "")
        """Plan -> which worker is predicted to have too little memory for it."""
        self.phase = Phase.STARTING
        """The present phase."""
        self.timer = PhaseTimeLimit()
        """The time of the present event, and the phase's time limit."""
        served = first - 1 if policy.validates_first else first
        self.progress = RunProgress(first, first, first, first, served, saved=first or None)
        """How many steps are issued, committed, emitted and saved."""
        self.membership = Membership(plan, tuple(range(policy.workers)))
        """The workers, their seats and their generation."""
        self.hiring = WorkerStarts(policy.workers)
        """Workers that are being started."""
        self.planned = PlannedChange()
        """The change of plan or members that is planned for the next moment between two steps."""
        self.sharing = ShareChange()
        """The change of shares that is under way, and what is known of earlier ones."""
        self.stopping = PendingStop()
        """The request to end early."""
        self.health = WorkerHealth(StragglerWatch(policy.straggler_times, policy.straggler_steps))
        """Silence, slowness and failures."""
        self.trust = StateTrust(agreed=first)
        """Which state can be trusted, by the comparison of replicas' digests."""
        self.recovery = RecoveryState()
        """The recovery that is under way, or the last one."""
        self.mirror = MirrorSchedule(policy.mirror_every, policy.mirror_cost)
        """Which steps end with a snapshot for the mirror."""
        self.replay = ShardCountHistory(first, plan.shards_by_layer if plan is not None else None)
        """The numbers of shards with which steps were executed."""
        self.step_times = StepTimes()
        """How long steps take."""
        self.decisions: list[ActionWithReason] = []
        """The actions that the present event has led to so far."""
        self.ending: Teardown | None = None
        """The last action of the run, once a rule has ended it."""
        self.next_event: RunEvent | None = None
        """An event that a rule derives from the present one; it is handled next."""

    def decide(self, action: Action, reason: str) -> None:
        """Add an action for the driver to carry out."""
        self.decisions.append(ActionWithReason(action, reason))

    def end_run(self, end: EndKind, why: str, error: Exception | None = None) -> Phase:
        """Say how the run ends; returns the phase `OVER`, for the rule to return."""
        self.ending = Teardown(end, why, self.progress.emitted, error)
        return Phase.OVER

    @property
    def begins(self) -> bool:
        """Whether the present generation is the run's first, or leads to it: there was nothing to recover from."""
        return self.recovery.why == RUN_BEGINS

    @property
    def waits(self) -> bool:
        """Whether the run waits for workers to join, or for a silent worker that holds the only copy of some state."""
        standing = self.phase is Phase.STANDING and self.recovery.waited_from_s is not None
        return self.phase is Phase.WAITING or standing or bool(self.health.silent_since_s)
