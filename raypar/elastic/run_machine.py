"""What next: the run as a table (phase, event) -> rule. Pure: time is an argument, every decision carries its reason.

    STARTING --ready--> RUNNING --all issued up to a flush point--> FLUSHING --settled--> VALIDATING, SAVING, ENDING
                           ^                                                                  |         |       |
                           +------------------------------------------------------------------+---------+       v
    any --failure--> FAILING --cause known, saves settled--> OVER           FLUSHING --grace over--> ABORTING  OVER
    any --loss, and the run is elastic--> the phases of `recovery.py` --> RUNNING

Numbers of steps: `issued`, `committed` and `emitted` count steps from the start of the job; step n is the (n+1)-th. A step
is *committed* when every worker has reported it, and *emitted* when it is journalled and its callbacks have returned. After a
roll-back `committed` goes back and the other two stay: what is executed again below them is compared and not seen again.
Step n+2 is issued when n is emitted, so one call always waits at each worker while another runs, and a stop asked for in a
callback of step n ends the run after exactly one more step, on every cluster.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from raypar.elastic.actions import (
    AbortGroups,
    Action,
    CheckReplay,
    Decision,
    Emit,
    End,
    FirstStepAfterRecovery,
    RunStep,
    StartWorker,
    TakeSnapshot,
    Teardown,
    Validate,
    WriteJournal,
)
from raypar.elastic.events import CallFailed, Event, Kind, StepEmitted, StopRequested, Tick
from raypar.elastic.holdings import Digest, Piece
from raypar.elastic.mirror_schedule import MirrorSchedule
from raypar.elastic.phases import Phase, UnexpectedEvent
from raypar.elastic.recovery_rules import Recovery, begin, spoilt
from raypar.elastic.replay import Replay, shards_of
from raypar.elastic.step_times import StepTimes
from raypar.elastic.stragglers import StragglerWatch
from raypar.elastic.transition_table import TABLE
from raypar.plan import ParallelPlan

EARLY, EARLY_TIMES = 0.5, 3.0
"""Who is silent in every other way too is given up after this part of the deadline, or so many usual steps."""
DEPTH = 2
"""Steps a worker has been called for and not finished: one runs, one waits."""


@dataclass(frozen=True, slots=True)
class RunPolicy:
    """What the run is meant to do. `first`: steps already done (resumed); `last`: steps of the job.

    `validate_every`, `save_every`: 0 means only at the end, and never when `validates` is False.
    `stop_at`: end after that many steps, without the last validation. `save_at_end`: also when the job is done; a run that is
    stopped is always saved. `elastic`: a lost worker is not the end; a new generation goes on with those between
    `min_workers` and `max_workers` (None: as many as the run began with), and gives up after `max_attempts` without a new
    step between them (see `recovery.begin`). `hires`: workers that are missing are replaced, and `standbys` more wait, warm,
    for a seat. `grow`: those that join get a seat once all are there for whom there is room, or `grow_after_s` after the first
    of them (at once where a single worker is left, for the second copy), if the steps that are left then gain more than
    `move_s`. A step is overdue after `step_deadline_s`, or
    `step_deadline_times` the longest of the last steps if that is more; where the worker answers no pings either, after half of
    that or three usual steps, whichever is less, and a recovery waits for such a worker no longer than `hopeless_s`.
    Nobody knows how long a validation or a checkpoint should take: there the pings alone decide, after as long a silence.
    A silent worker with the only copy of some state is waited for up to `last_copy_wait_s` more (see `last_copy`; `silence` for
    runs that are not elastic).
    `mirror_every`, `mirror_cost`: see `MirrorSchedule`. `straggler_times`, `straggler_steps`: see `StragglerWatch`;
    `replace_stragglers`: they are not only reported but leave, when another worker can come.
    """

    workers: int
    last: int
    first: int = 0
    validates: bool = False
    validate_every: int = 0
    save_every: int = 0
    save_at_end: bool = True
    stop_at: int | None = None
    start_deadline_s: float = 600.0
    step_deadline_s: float = 60.0
    step_deadline_times: float = 20.0
    pass_deadline_s: float = 600.0
    root_cause_s: float = 3.0
    save_grace_s: float = 10.0
    abort_s: float = 1.5
    interrupt_s: float = 5.0
    elastic: bool = False
    min_workers: int = 1
    max_workers: int | None = None
    hires: bool = False
    standbys: int = 0
    retry_s: float = 5.0
    grow: bool = True
    grow_after_s: float = 2.0
    move_s: float = 0.5
    max_attempts: int = 8
    claim_s: float = 10.0
    stand_s: float = 1.0
    hopeless_s: float = 0.2
    stand_medians: float = 3.0
    adopt_s: float = 5.0
    load_s: float = 60.0
    capacity_s: float = 300.0
    last_copy_wait_s: float = 600.0
    mirror_every: int = 0
    mirror_cost: float = 0.0
    straggler_times: float = 1.5
    straggler_steps: int = 20
    replace_stragglers: bool = False

    @property
    def end(self) -> int:
        """The number of steps after which this run ends by itself."""
        return self.last if self.stop_at is None else min(self.stop_at, self.last)


BLAME: dict[Kind, int] = {"user": 0, "error": 1, "lost": 2, "aborted": 3}
"""Which failure of several is the cause; smaller wins, the first of equals."""


@dataclass
class RunMachine:
    """One run of one job. `handle` is the only way in."""

    policy: RunPolicy
    phase: Phase = Phase.STARTING
    story: deque[str] = field(default_factory=lambda: deque(maxlen=40))
    plan: ParallelPlan | None = None
    layout: Callable[[ParallelPlan], tuple[tuple[Piece, ...], ...]] = lambda plan: ()
    """What each rank of a plan has to hold of the state. Both are needed by elastic runs only."""

    def __post_init__(self) -> None:
        first = self.policy.first
        self.issued = self.committed = self.emitted = self.served = first
        self.saving: int | None = None
        self.saved: int | None = first or None
        self.stop: StopRequested | None = None
        self.stop_at: int | None = None
        self.failures: list[CallFailed] = []
        self._reports: dict[int, set[int]] = {}
        self._answers: set[int] = set()
        self._due: deque[str] = deque()
        self.step_times = StepTimes()
        self._deadline_s: float | None = None
        self._since_s = 0.0
        self._unheard_s: dict[int, float] = {}
        """Since when those have answered no ping whom the last tick named."""
        self.silence: dict[int, float] = {}
        """Silent worker that is waited for -> since when, in a run that is not elastic."""
        self.silence_told_s = 0.0
        """When people were last told so."""
        self._probing = self._we_aborted = False
        self._aborts = 0
        self._stand: tuple[int | None, ...] | None = None
        self._save_error: Exception | None = None
        self.generation = 1
        self.members: tuple[int, ...] = tuple(range(self.policy.workers))
        """members[rank] is the worker in that seat."""
        self.spares: set[int] = set()
        self.leaving: set[int] = set()
        self.gone: set[int] = set()
        self.silent: set[int] = set()
        """Of those, whom nobody has killed yet: they hang."""
        self.journalled = first
        self.validated: int | None = None
        self.pause_for: str | None = None
        """Why a new generation is wanted between two steps; `next_plan`: the plan that it is to have."""
        self.next_plan: ParallelPlan | None = None
        self.next_for = 0
        """How many workers that plan was chosen for."""
        self.interrupt_at_s: float | None = None
        """When a recovery is broken off because of Ctrl-C."""
        self.last_commit_s: float | None = None
        self.hiring: set[int] = set()
        self.placed: set[int] = set()
        """Who has found room, and starts."""
        self.hired = self.policy.workers
        """Numbers given to workers so far."""
        self.hire_failures = 0
        self.hire_at_s = 0.0
        self.grow_at_s: float | None = None
        """When those that wait for a seat are looked at; None: there is nothing to look at."""
        self.choosing = False
        self.began_s: float | None = None
        """When the machine heard of what no step has been committed after yet."""
        self.attempts = 0
        """Recoveries that count since the last new step; `deaths`: those since then that may be its fault."""
        self.worker_deaths: list[CallFailed] = []
        self.patience_s = 0.0
        """Least deadline of the next step: twice the time of its last attempt, if that was waited for."""
        self.waited_s = 0.0
        """How long silent workers with an only copy were last waited for in vain."""
        self.starved: set[tuple[ParallelPlan, int]] = set()
        """Plans and their positions at which a worker was killed because memory was lacking."""
        self.recovery = Recovery("")
        self.clock = MirrorSchedule(self.policy.mirror_every, self.policy.mirror_cost)
        self._digests: dict[int, dict[int, Digest]] = {}
        self.agreed = first
        """After so many steps the replicas' digests agreed last."""
        self.doubt = ""
        """They did not: until the next generation stands, nothing newer than `agreed` may be used."""
        self.tainted: set[int] = set()
        """Workers whose state is of that kind and was not replaced yet."""
        self.doubts = 0
        self.watch = StragglerWatch(self.policy.straggler_times, self.policy.straggler_steps)
        self._busy: dict[int, dict[int, float]] = {}
        """step -> worker -> seconds of computing for a microbatch"""
        self.nodes: dict[int, str] = {}
        """worker -> the node it is on, as far as the driver has told."""
        self.slow_nodes: set[str] = set()
        """A straggler that was there has been replaced."""
        self.wrong: set[int] = set()
        """Workers whose state differed from that of a majority; they leave."""
        self.doubted = range(0)
        """Steps that people may have seen wrongly, or with other shards."""
        self.replay = Replay(first, shards_of(self.plan) if self.plan is not None else None)
        self.bad_cuts: set[int] = set()
        """After so many steps a cut was taken of state that is not to be trusted."""
        self._out: list[Decision] = []
        self._now_s = 0.0

    def handle(self, event: Event, now_s: float) -> list[Decision]:
        """What to do about `event` at `now_s` (any monotonic clock). Raises `UnexpectedEvent`."""
        rule = TABLE.get((self.phase, type(event)))
        if rule is None:
            told = "\n  ".join(self.story)
            raise UnexpectedEvent(f"{event} while {self.phase.value}; the story so far:\n  {told}")
        self._now_s, self._out, before = now_s, [], self.phase
        if isinstance(event, Tick):
            # Whoever answered while the driver stood still has not been heard yet.
            later_s = event.stalled_s
            self._unheard_s = {w: min(now_s, self._unheard_s.get(w, now_s) + later_s) for w in event.unheard}
            self._since_s = min(now_s, self._since_s + later_s)
            if self._deadline_s is not None:
                self._deadline_s += later_s
        rule(self, event)
        if self._out or before is not self.phase:
            names = ", ".join(str(d.action) for d in self._out)
            self.story.append(f"{before.value}: {event} -> {self.phase.value}" + (f": {names}" if names else ""))
        return self._out

    def handle_as(self, event: Event) -> None:
        """Apply the rule of another event that the present one amounts to."""
        TABLE[self.phase, type(event)](self, event)

    # -- words the rules are made of -----------------------------------------------------------------------------------

    def decide(self, action: Action, reason: str) -> None:
        """Add an action."""
        self._out.append(Decision(action, reason))

    def go(self, phase: Phase, *, deadline_s: float | None = None) -> None:
        """Change phase; `deadline_s` from now the phase's time-out rule runs."""
        self.phase = phase
        self._since_s = self._now_s
        self._deadline_s = None if deadline_s is None else self._now_s + deadline_s

    def over(self, end: End, why: str, error: Exception | None = None) -> None:
        """The last decision of a run."""
        self.silence.clear()
        self.go(Phase.OVER)
        self.decide(Teardown(end, why, self.emitted, error), why)

    def barrier(self) -> int:
        """No step at or beyond this number is issued before what is due there has been served."""
        periods = (self.policy.validate_every if self.policy.validates else 0, self.policy.save_every)
        end = self.policy.end if self.stop_at is None else self.stop_at
        served = max(self.served, self.emitted - 1)  # nothing beyond a barrier is issued before it has been served
        return min([end, *((served // every + 1) * every for every in periods if every)])

    def saves(self) -> tuple[int, ...]:
        """After how many steps the state is written next, so that the replicas are compared before."""
        end = self.policy.end if self.stop_at is None else self.stop_at
        every = self.policy.save_every
        return (end, (self.issued // every + 1) * every) if every else (end,)

    def advance(self) -> None:
        """Issue what may be issued, or serve the flush point that has been reached."""
        if self.pause_for is not None:
            if self.committed == self.issued:
                begin(self, self.pause_for, counts=False)
            return
        barrier = max(self.barrier(), self.committed)
        while self.issued < min(barrier, min(self.emitted, self.committed) + DEPTH):
            proof = self.issued + 1 in self.saves()
            if proof and self.clock.waits:
                return  # one cut after the other is looked at
            if self.issued == self.committed:
                self._since_s = self._now_s  # whatever people took their time for, nobody was late meanwhile
            alone = len(self.members) == 1  # nobody would keep a copy
            cut = not alone and self.clock.take(self.issued, proof)
            self.decide(RunStep(self.issued, cut), f"step {self.issued} is within {DEPTH} of the last one seen by all")
            self.issued += 1
        if self.emitted == self.committed == self.issued == barrier:
            self._due = self._due_at(barrier)
            self.served = barrier
            self.serve()
        elif self.issued == barrier and self.phase is Phase.RUNNING:
            grace = self.stop.grace_s if self.stop is not None and self.stop.interrupt else None
            self.go(Phase.FLUSHING, deadline_s=grace)

    def _due_at(self, done: int) -> deque[str]:
        policy, due = self.policy, deque[str]()
        cut_short = self.stop_at is not None and done >= self.stop_at and done < policy.last
        ends = cut_short or done >= policy.end
        fresh = done > policy.first
        every = policy.validate_every
        # Saved first: what goes wrong in the validation, or in a callback after it, must not take the training with it.
        if done not in (self.saved, self.saving) and (
            (policy.save_every and done % policy.save_every == 0) or (ends and (policy.save_at_end or done < policy.last))
        ):
            due.append("save")
        if (
            policy.validates
            and fresh
            and self.validated != done
            and ((every and done % every == 0) or done == policy.last)
            and not self.interrupted
        ):
            due.append("validate")
        if ends:
            due.append("end")
        return due

    @property
    def waits(self) -> bool:
        """Whether nothing can be done before workers join, or before one that holds an only copy answers."""
        standing = self.phase is Phase.STANDING and self.recovery.waited_from_s is not None
        return self.phase is Phase.WAITING or standing or bool(self.silence)

    @property
    def interrupted(self) -> bool:
        """Ctrl-C: what is in flight gets its grace, nothing more."""
        return self.stop is not None and self.stop.interrupt

    def serve(self) -> None:
        """The next thing due at a flush point; the state is settled."""
        done = self.emitted
        while self._due:
            what = self._due.popleft()
            self._answers = set()
            if what == "validate":
                self.go(Phase.VALIDATING, deadline_s=self.policy.pass_deadline_s)
                self.decide(Validate(done), f"{done} steps are done")
            elif what == "save":
                self.go(Phase.SAVING, deadline_s=self.policy.pass_deadline_s)
                if self.saving is None:
                    self.take_snapshot()
            else:
                self.go(Phase.ENDING, deadline_s=self.policy.pass_deadline_s)
                self.end_if_saved()
            return
        if self.stop is not None and self.stop_at is None:
            self.stop_at = done
            self._due = deque(["end"] if done in (self.saved, self.saving) else ["save", "end"])
            return self.serve()
        self.go(Phase.RUNNING)
        self.advance()

    def take_snapshot(self) -> None:
        """Only one checkpoint is written at a time."""
        self.saving = self.emitted
        self.decide(TakeSnapshot(self.emitted), f"a checkpoint is due after {self.emitted} steps")

    def end_if_saved(self) -> None:
        """The run ends once the last checkpoint is complete."""
        if self.saving is not None:
            return
        done = self.emitted
        if self._save_error is not None and self.saved != done:
            if self.policy.elastic and spoilt(self._save_error):
                self._save_error = None
                return begin(self, "a worker was lost with its share of the last checkpoint; the others hold the state")
            kept = f"the checkpoint after {self.saved} steps is good" if self.saved else "there is no earlier checkpoint"
            self.over("failed", f"the last checkpoint could not be written; {kept}", self._save_error)
        elif self.stop is not None:
            self.over("interrupted" if self.stop.interrupt else "stopped", self.stop.reason)
        elif done < self.policy.last:
            self.over("stopped", f"asked to stop after {done} steps")
        else:
            self.over("done", f"all {done} steps are done")

    def conclude(self) -> None:
        """Name the cause of a failure, once it is known and no checkpoint is being written."""
        cause = min(self.failures, key=lambda f: BLAME[f.kind])
        known = cause.kind != "aborted" or self._deadline_s is None or self._now_s >= self._deadline_s
        if known and (self.saving is None or (self._deadline_s is not None and self._now_s >= self._deadline_s)):
            self.over(
                "failed", str(cause.error).splitlines()[0] if str(cause.error) else type(cause.error).__name__, cause.error
            )

    def overdue(self, limit_s: float) -> tuple[int, ...]:
        """Workers that have not reported the running step, although it has taken longer than that."""
        if self.issued == self.committed:
            return ()
        missing = set(self.members) - self._reports.get(self.committed, set())
        return tuple(sorted(missing)) if self._now_s - self._since_s > limit_s else ()

    def mute(self) -> tuple[int, ...]:
        """Members that have answered no ping for `silent_deadline_s`, counted from when that was first noticed. Nobody where
        that is true of all: it is what they are doing that lets none of them answer."""
        limit_s = self.silent_deadline_s()
        found = tuple(w for w in self.members if self._now_s - self._unheard_s.get(w, self._now_s) > limit_s)
        return found if len(found) < len(self.members) else ()

    def step_deadline_s(self) -> float:
        """A multiple of the longest of the last 100 steps; the first step, which warms everything up, gets the start's."""
        longest_s = self.step_times.longest_s(len(self.members))
        if longest_s is None:
            return max(self.policy.start_deadline_s, self.patience_s)
        return max(self.policy.step_deadline_s, self.policy.step_deadline_times * longest_s, self.patience_s)

    def silent_deadline_s(self) -> float:
        """The same for a worker that answers no pings either. One step that was long for once does not make this one longer:
        a step that is only slow answers."""
        usual_s = (
            EARLY_TIMES * self.step_times.usual_s(len(self.members)) if self.step_times.known else self.policy.start_deadline_s
        )
        return max(EARLY * self.policy.step_deadline_s, min(usual_s, EARLY * self.step_deadline_s()), self.patience_s)

    @property
    def wanted(self) -> int:
        """How many workers the run would like to have."""
        return self.policy.max_workers or self.policy.workers

    def hire(self) -> None:
        """Replace who is missing. Not before the others train again: starting a process costs them time."""
        if not self.policy.hires or self.stop is not None or self._now_s < self.hire_at_s:
            return
        there = (set(self.members) - self.gone - self.leaving) | self.spares | self.hiring
        for _ in range(self.wanted + self.policy.standbys - len(there)):
            number, self.hired = self.hired, self.hired + 1
            self.hiring.add(number)
            self.decide(StartWorker(number), f"{len(there)} of {self.wanted} workers are there or on their way")

    def usual_step_s(self) -> float:
        """What a step takes at present."""
        return self.step_times.usual_s(len(self.members))

    def stand_deadline_s(self) -> float:
        """For leaving what is in flight: a forward or backward pass cannot be interrupted."""
        return max(self.policy.stand_s, self.policy.stand_medians * self.usual_step_s())

    def commit(self, step: int) -> None:
        """Every worker has applied `step`."""
        self.committed = step + 1
        if step >= self.journalled:  # not one that is executed again
            self.attempts = 0
            self.worker_deaths.clear()
            self.patience_s = 0.0
        self._since_s = self._now_s
        if self.began_s is not None:
            since_s = self.began_s if self.last_commit_s is None else self.last_commit_s
            self.decide(FirstStepAfterRecovery(step, self._now_s - since_s, max(0, self.journalled - step)), "training goes on")
            self.began_s = None
            self.failures.clear()
        self.last_commit_s = self._now_s
        self.hire()
        if step < self.journalled:
            self.decide(CheckReplay(step, step in self.doubted), f"step {step} was seen before the roll-back")
        else:
            self.journalled = step + 1
            self.decide(WriteJournal(step), f"all {len(self.members)} workers hold step {step}")

    def see(self, step: int) -> None:
        """`step` is in the journal: only now may people see it."""
        self.decide(Emit(step), f"step {step} is in the journal")

    def count_emitted(self, event: StepEmitted) -> None:
        """People have seen a step. None may be left out."""
        if event.step > self.emitted:
            raise UnexpectedEvent(f"{event}, but step {self.emitted} has not been seen")
        self.emitted = max(self.emitted, event.step + 1)
        if event.stop is not None and self.stop is None:
            self.stop = StopRequested(event.stop)
            self.stop_at = max(min(self.barrier(), event.step + DEPTH), self.committed, self.emitted)

    def fail(self, event: CallFailed) -> None:
        """Free everybody who waits for the culprit; then find out who it is."""
        if event.kind == "aborted" and self._we_aborted:
            return
        self.failures.append(event)
        self.silence.clear()  # nobody is waited for any more
        self.go(Phase.FAILING, deadline_s=self.policy.root_cause_s if self.saving is None else self.policy.save_grace_s)
        self.decide(AbortGroups(f"{type(event.error).__name__} elsewhere"), "no worker may wait for one that has failed")
        self.conclude()
