"""What next: the run as a table (phase, event) -> rule. Pure: time is an argument, every decision carries its reason.

    STARTING --ready--> RUNNING --all issued up to a flush point--> FLUSHING --settled--> VALIDATING, SAVING, ENDING
                           ^                                                                  |         |       |
                           +------------------------------------------------------------------+---------+       v
    any --failure--> FAILING --cause known, saves settled--> OVER           FLUSHING --grace over--> ABORTING  OVER

Numbers of steps: `issued`, `committed` and `emitted` count steps from the start of the job; step n is the (n+1)-th. A step
is *committed* when every worker has reported it, and *emitted* when it is journalled and its callbacks have returned.
Step n+2 is issued when n is emitted, so one call always waits at each worker while another runs, and a stop asked for in a
callback of step n ends the run after exactly one more step, on every cluster.
"""

from __future__ import annotations

import enum
import statistics
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from raypar.elastic.actions import (
    AbortGroups,
    Action,
    Decision,
    Emit,
    EmitValidation,
    End,
    Journal,
    Probe,
    RunStep,
    Snapshot,
    Teardown,
    Validate,
    Warn,
)
from raypar.elastic.events import (
    Aborted,
    CallFailed,
    Emitted,
    Event,
    Journalled,
    Kind,
    Probed,
    Saved,
    SaveFailed,
    SnapshotTaken,
    StepReported,
    StopRequested,
    Tick,
    ValidationEmitted,
    ValidationReported,
    WorkersReady,
)
from raypar.errors import CommTimeout

DEPTH = 2
"""Steps a worker has been called for and not finished: one runs, one waits."""


class Phase(enum.Enum):
    """Where the run is."""

    STARTING = "starting"
    RUNNING = "running"
    FLUSHING = "flushing"
    VALIDATING = "validating"
    SAVING = "saving"
    ENDING = "ending"
    ABORTING = "aborting"
    FAILING = "failing"
    OVER = "over"


class UnexpectedEvent(Exception):
    """An event that the table has no rule for: our own mistake. The text has the story so far."""


@dataclass(frozen=True, slots=True)
class Course:
    """What the run is meant to do. `first`: steps already done (resumed); `last`: steps of the job.

    `validate_every`, `save_every`: 0 means only at the end, and never when `validates` is False.
    `stop_at`: end after that many steps, without the last validation. `save_at_end`: also when the job is done; a run that is
    stopped is always saved.
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
    step_deadline_medians: float = 20.0
    pass_deadline_s: float = 600.0
    root_cause_s: float = 3.0
    save_grace_s: float = 10.0
    abort_s: float = 1.5

    @property
    def end(self) -> int:
        """The number of steps after which this run ends by itself."""
        return self.last if self.stop_at is None else min(self.stop_at, self.last)


BLAME: dict[Kind, int] = {"user": 0, "error": 1, "lost": 2, "aborted": 3}
"""Which failure of several is the cause; smaller wins, the first of equals."""


@dataclass
class RunMachine:
    """One run of one job. `handle` is the only way in."""

    course: Course
    phase: Phase = Phase.STARTING
    story: deque[str] = field(default_factory=lambda: deque(maxlen=40))

    def __post_init__(self) -> None:
        first = self.course.first
        self.issued = self.committed = self.emitted = self.served = first
        self.saving: int | None = None
        self.saved: int | None = first or None
        self.stop: StopRequested | None = None
        self.stop_at: int | None = None
        self.failures: list[CallFailed] = []
        self._reports: dict[int, set[int]] = {}
        self._answers: set[int] = set()
        self._due: deque[str] = deque()
        self._seconds: deque[float] = deque(maxlen=50)
        self._deadline_s: float | None = None
        self._since_s = 0.0
        self._probing = self._we_aborted = False
        self._stand: tuple[int | None, ...] | None = None
        self._save_error: Exception | None = None
        self._out: list[Decision] = []
        self._now_s = 0.0

    def handle(self, event: Event, now_s: float) -> list[Decision]:
        """What to do about `event` at `now_s` (any monotonic clock). Raises `UnexpectedEvent`."""
        rule = TABLE.get((self.phase, type(event)))
        if rule is None:
            told = "\n  ".join(self.story)
            raise UnexpectedEvent(f"{event} while {self.phase.value}; the story so far:\n  {told}")
        self._now_s, self._out, before = now_s, [], self.phase
        rule(self, event)
        if self._out or before is not self.phase:
            names = ", ".join(str(d.action) for d in self._out)
            self.story.append(f"{before.value}: {event} -> {self.phase.value}" + (f": {names}" if names else ""))
        return self._out

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
        self.go(Phase.OVER)
        self.decide(Teardown(end, why, self.emitted, error), why)

    def barrier(self) -> int:
        """No step at or beyond this number is issued before what is due there has been served."""
        periods = (self.course.validate_every if self.course.validates else 0, self.course.save_every)
        end = self.course.end if self.stop_at is None else self.stop_at
        return min([end, *((self.served // every + 1) * every for every in periods if every)])

    def advance(self) -> None:
        """Issue what may be issued, or serve the flush point that has been reached."""
        barrier = max(self.barrier(), self.committed)
        while self.issued < min(barrier, self.emitted + DEPTH):
            self.decide(RunStep(self.issued), f"step {self.issued} is within {DEPTH} of the last one seen by all")
            self.issued += 1
        if self.emitted == self.issued == barrier:
            self._due = self._due_at(barrier)
            self.served = barrier
            self.serve()
        elif self.issued == barrier and self.phase is Phase.RUNNING:
            grace = self.stop.grace_s if self.stop is not None and self.stop.interrupt else None
            self.go(Phase.FLUSHING, deadline_s=grace)

    def _due_at(self, done: int) -> deque[str]:
        course, due = self.course, deque[str]()
        cut_short = self.stop_at is not None and done >= self.stop_at and done < course.last
        ends = cut_short or done >= course.end
        fresh = done > course.first
        every = course.validate_every
        # Saved first: what goes wrong in the validation, or in a callback after it, must not take the training with it.
        if done not in (self.saved, self.saving) and (
            (course.save_every and done % course.save_every == 0) or (ends and (course.save_at_end or done < course.last))
        ):
            due.append("save")
        if course.validates and fresh and ((every and done % every == 0) or done == course.last) and not self._interrupted:
            due.append("validate")
        if ends:
            due.append("end")
        return due

    @property
    def _interrupted(self) -> bool:
        return self.stop is not None and self.stop.interrupt

    def serve(self) -> None:
        """The next thing due at a flush point; the state is settled."""
        done = self.emitted
        while self._due:
            what = self._due.popleft()
            self._answers = set()
            if what == "validate":
                self.go(Phase.VALIDATING, deadline_s=self.course.pass_deadline_s)
                self.decide(Validate(done), f"{done} steps are done")
            elif what == "save":
                self.go(Phase.SAVING, deadline_s=self.course.pass_deadline_s)
                if self.saving is None:
                    self.take_snapshot()
            else:
                self.go(Phase.ENDING, deadline_s=self.course.pass_deadline_s)
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
        self.decide(Snapshot(self.emitted), f"a checkpoint is due after {self.emitted} steps")

    def end_if_saved(self) -> None:
        """The run ends once the last checkpoint is complete."""
        if self.saving is not None:
            return
        done = self.emitted
        if self._save_error is not None and self.saved != done:
            kept = f"the checkpoint after {self.saved} steps is good" if self.saved else "there is no earlier checkpoint"
            self.over("failed", f"the last checkpoint could not be written; {kept}", self._save_error)
        elif self.stop is not None:
            self.over("interrupted" if self.stop.interrupt else "stopped", self.stop.reason)
        elif done < self.course.last:
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

    def overdue(self) -> tuple[int, ...]:
        """Ranks that have not reported the running step although its deadline has passed."""
        if self.issued == self.committed:
            return ()
        missing = set(range(self.course.workers)) - self._reports.get(self.committed, set())
        return tuple(sorted(missing)) if self._now_s - self._since_s > self.step_deadline_s() else ()

    def step_deadline_s(self) -> float:
        """Generous: a multiple of the median step; the first step, which warms everything up, gets the start's."""
        if not self._seconds:
            return self.course.start_deadline_s
        return max(self.course.step_deadline_s, self.course.step_deadline_medians * statistics.median(self._seconds))


# -- rules -------------------------------------------------------------------------------------------------------------


def ignore(m: RunMachine, event: Event) -> None:
    """Came too late to matter."""


def ready(m: RunMachine, event: Event) -> None:
    """Start training, or end at once when nothing is left to do."""
    m.go(Phase.RUNNING)
    m.advance()


def reported(m: RunMachine, event: Event) -> None:
    """Count a worker's report; the last one of a step commits it."""
    assert isinstance(event, StepReported)
    if not m.committed <= event.step < m.issued:
        raise UnexpectedEvent(f"{event}: committed {m.committed}, issued {m.issued}")
    m._reports.setdefault(event.step, set()).add(event.rank)
    while len(m._reports.get(m.committed, ())) == m.course.workers:
        step = m.committed
        del m._reports[step]
        m._seconds.append(event.seconds)
        m.committed += 1
        m._since_s = m._now_s
        m.decide(Journal(step), f"all {m.course.workers} workers hold step {step}")


def journalled(m: RunMachine, event: Event) -> None:
    """Only now may people see the step."""
    assert isinstance(event, Journalled)
    m.decide(Emit(event.step), f"step {event.step} is in the journal")


def emitted(m: RunMachine, event: Event) -> None:
    """The step has been seen; go on, or stop if a callback asked for it."""
    assert isinstance(event, Emitted)
    m.emitted = event.step + 1
    if event.stop is not None and m.stop is None:
        m.stop = StopRequested(event.stop)
        m.stop_at = m.issued
    m.advance()


def validated(m: RunMachine, event: Event) -> None:
    """All workers have finished the validation pass."""
    assert isinstance(event, ValidationReported)
    m._answers.add(event.rank)
    if len(m._answers) == m.course.workers:
        m.decide(EmitValidation(event.done), "all workers have validated")


def validation_emitted(m: RunMachine, event: Event) -> None:
    """Next thing due."""
    assert isinstance(event, ValidationEmitted)
    if event.stop is not None and m.stop is None:
        m.stop = StopRequested(event.stop)
    m.serve()


def snapshot_taken(m: RunMachine, event: Event) -> None:
    """Training goes on while the files are written."""
    m.serve()


def saved(m: RunMachine, event: Event) -> None:
    """A checkpoint is complete."""
    assert isinstance(event, Saved)
    m.saving, m.saved, m._save_error = None, event.done, None
    after_save(m)


def save_failed(m: RunMachine, event: Event) -> None:
    """Training goes on; the last good checkpoint stays."""
    assert isinstance(event, SaveFailed)
    waited_for = m.phase is Phase.SAVING and event.done == m.emitted
    m.saving, m._save_error = None, event.error
    kept = f"the one after {m.saved} steps stays" if m.saved else "there is none yet"
    m.decide(Warn(f"the checkpoint after {event.done} steps could not be written ({event.error}); {kept}"), "training goes on")
    if waited_for:
        m.serve()
    else:
        after_save(m)


def after_save(m: RunMachine) -> None:
    """Who waited for the writer goes on."""
    if m.phase is Phase.SAVING:
        m.take_snapshot()
    elif m.phase is Phase.ENDING:
        m.end_if_saved()
    elif m.phase is Phase.FAILING:
        m.conclude()


def stop_running(m: RunMachine, event: Event) -> None:
    """Issue nothing more; what is in flight is finished first."""
    assert isinstance(event, StopRequested)
    if m.stop is None or (event.interrupt and not m.stop.interrupt):
        m.stop = event
        m.stop_at = m.issued
        if m.phase is Phase.FLUSHING:
            m.go(Phase.FLUSHING, deadline_s=event.grace_s if event.interrupt else None)
        m.advance()


def stop_settled(m: RunMachine, event: Event) -> None:
    """Validating, saving or ending: the state is settled, so what is left is to save and end."""
    assert isinstance(event, StopRequested)
    if m.stop is None or (event.interrupt and not m.stop.interrupt):
        m.stop = event
        if event.interrupt and m.phase is Phase.VALIDATING:
            m._deadline_s = m._now_s + event.grace_s


def stop_starting(m: RunMachine, event: Event) -> None:
    """Nothing has been done yet."""
    assert isinstance(event, StopRequested)
    m.over("interrupted" if event.interrupt else "stopped", event.reason)


def failed(m: RunMachine, event: Event) -> None:
    """Free everybody who waits for the culprit; then find out who it is."""
    assert isinstance(event, CallFailed)
    if event.kind == "aborted" and m._we_aborted:
        return
    m.failures.append(event)
    m.go(Phase.FAILING, deadline_s=m.course.root_cause_s if m.saving is None else m.course.save_grace_s)
    m.decide(AbortGroups(f"{type(event.error).__name__} elsewhere"), "no worker may wait for one that has failed")
    m.conclude()


def failed_saving(m: RunMachine, event: Event) -> None:
    """A worker that dies after the last step has nothing left to lose but the checkpoint, which fails by itself."""
    assert isinstance(event, CallFailed)
    if m.saving is None or event.kind == "user":
        failed(m, event)
    else:
        m.failures.append(event)
        m.go(Phase.FAILING, deadline_s=m.course.save_grace_s)
        m.conclude()


def failed_again(m: RunMachine, event: Event) -> None:
    """Another symptom, or the cause itself."""
    assert isinstance(event, CallFailed)
    m.failures.append(event)
    m.conclude()


def tick_steps(m: RunMachine, event: Event) -> None:
    """A step that takes too long, or an interrupted one whose grace is over."""
    if m._deadline_s is not None and m._now_s >= m._deadline_s:
        abort(m, "the steps in flight did not end within the grace; aborted, they never happened")
        return
    late = m.overdue()
    if late and not m._probing:
        m._probing = True
        m.decide(Probe(late), f"step {m.committed} is over its deadline of {m.step_deadline_s():.0f} s")


def probed(m: RunMachine, event: Event) -> None:
    """A hung worker ends the run."""
    assert isinstance(event, Probed)
    m._probing = False
    late = m.overdue()
    if late:
        names = ", ".join(str(r) for r in late)
        error = CommTimeout(
            f"step {m.committed}: worker(s) {names} have not reported within {m.step_deadline_s():.0f} s\n{event.text}",
            cure="look at the stacks above for what they wait for; `raypar resume` goes on from the last checkpoint",
        )
        failed(m, CallFailed("error", error, late[0]))


def tick_waiting(m: RunMachine, event: Event) -> None:
    """Start, validation, snapshot or last checkpoint take too long."""
    if m._deadline_s is None or m._now_s < m._deadline_s:
        return
    if m._interrupted:
        if m.phase is Phase.VALIDATING:
            abort(m, "the validation pass did not end within the grace")
        else:
            m.over(
                "interrupted",
                f"interrupted; the last checkpoint is of step {m.saved}" if m.saved else "interrupted, nothing saved",
            )
        return
    missing = sorted(set(range(m.course.workers)) - m._answers)
    error = CommTimeout(
        f"{m.phase.value} did not end within {m._now_s - m._since_s:.0f} s; no answer from worker(s) {missing}",
        cure="look at the workers' logs; `raypar resume` goes on from the last checkpoint",
    )
    failed(m, CallFailed("error", error))


def abort(m: RunMachine, reason: str) -> None:
    """Free all workers from the step or pass in flight."""
    m._we_aborted, m._stand = True, None
    m.go(Phase.ABORTING, deadline_s=m.course.abort_s)
    m.decide(AbortGroups("interrupted"), reason)


def aborted(m: RunMachine, event: Event) -> None:
    """Where the workers stand; a step that all of them had applied just before is still committed and seen."""
    assert isinstance(event, Aborted)
    m._stand = event.done
    save_where_we_stand(m)


def emitted_aborting(m: RunMachine, event: Event) -> None:
    """The last committed step has been seen."""
    assert isinstance(event, Emitted)
    m.emitted = event.step + 1
    save_where_we_stand(m)


def save_where_we_stand(m: RunMachine) -> None:
    """Save once every worker stands at the step people have seen; until then wait, up to the abort's deadline."""
    if m._stand is not None and set(m._stand) == {m.emitted}:
        m.issued = m.committed = m.served = m.stop_at = m.emitted
        m._reports.clear()
        m._due = deque(["end"] if m.emitted in (m.saved, m.saving) else ["save", "end"])
        m.serve()


def tick_aborting(m: RunMachine, event: Event) -> None:
    """A worker deep in a computation cannot be asked, or has applied a step that another has not: no new checkpoint."""
    if m._deadline_s is not None and m._now_s >= m._deadline_s:
        left = f"the last checkpoint is of step {m.saved}" if m.saved else "nothing is saved"
        stand = "not all workers answered" if m._stand is None else f"the workers stand at steps {m._stand}"
        m.over("interrupted", f"interrupted; {stand} {m.course.abort_s} s after the abort: {left}")


def tick_failing(m: RunMachine, event: Event) -> None:
    """The root cause did not show up in time: the symptom is reported."""
    m.conclude()


Rule = Callable[[RunMachine, Event], None]
P = Phase
TABLE: dict[tuple[Phase, type], Rule] = {
    (P.STARTING, WorkersReady): ready,
    (P.STARTING, CallFailed): failed,
    (P.STARTING, StopRequested): stop_starting,
    (P.STARTING, Tick): ignore,  # the pool has deadlines of its own, with better words
    **{
        (phase, kind): rule
        for phase in (P.RUNNING, P.FLUSHING)
        for kind, rule in {
            StepReported: reported,
            Journalled: journalled,
            Emitted: emitted,
            Saved: saved,
            SaveFailed: save_failed,
            StopRequested: stop_running,
            CallFailed: failed,
            Probed: probed,
            Tick: tick_steps,
        }.items()
    },
    (P.VALIDATING, ValidationReported): validated,
    (P.VALIDATING, ValidationEmitted): validation_emitted,
    (P.VALIDATING, Saved): saved,
    (P.VALIDATING, SaveFailed): save_failed,
    (P.VALIDATING, StopRequested): stop_settled,
    (P.VALIDATING, CallFailed): failed,
    (P.VALIDATING, Probed): ignore,
    (P.VALIDATING, Tick): tick_waiting,
    **{
        (phase, kind): ignore
        for phase in (P.SAVING, P.ENDING)
        for kind in (ValidationReported, ValidationEmitted, StepReported, Aborted)
    },
    (P.SAVING, SnapshotTaken): snapshot_taken,
    (P.SAVING, Saved): saved,
    (P.SAVING, SaveFailed): save_failed,
    (P.SAVING, StopRequested): stop_settled,
    (P.SAVING, CallFailed): failed,
    (P.SAVING, Probed): ignore,
    (P.SAVING, Tick): tick_waiting,
    (P.ENDING, Saved): saved,
    (P.ENDING, SaveFailed): save_failed,
    (P.ENDING, StopRequested): stop_settled,
    (P.ENDING, CallFailed): failed_saving,
    (P.ENDING, Probed): ignore,
    (P.ENDING, Tick): tick_waiting,
    (P.ABORTING, Aborted): aborted,
    (P.ABORTING, CallFailed): failed,
    (P.ABORTING, Saved): saved,
    (P.ABORTING, SaveFailed): save_failed,
    (P.ABORTING, StopRequested): ignore,
    (P.ABORTING, Tick): tick_aborting,
    (P.ABORTING, StepReported): reported,
    (P.ABORTING, Journalled): journalled,
    (P.ABORTING, Emitted): emitted_aborting,
    **{(P.ABORTING, kind): ignore for kind in (ValidationReported, ValidationEmitted, Probed)},
    (P.FAILING, CallFailed): failed_again,
    (P.FAILING, Saved): saved,
    (P.FAILING, SaveFailed): save_failed,
    (P.FAILING, Tick): tick_failing,
    **{
        (P.FAILING, kind): ignore
        for kind in (
            WorkersReady,
            StepReported,
            Journalled,
            Emitted,
            ValidationReported,
            ValidationEmitted,
            SnapshotTaken,
            StopRequested,
            Aborted,
            Probed,
        )
    },
    **{
        (P.OVER, kind): ignore
        for kind in (
            WorkersReady,
            StepReported,
            CallFailed,
            Journalled,
            Emitted,
            ValidationReported,
            ValidationEmitted,
            SnapshotTaken,
            Saved,
            SaveFailed,
            StopRequested,
            Aborted,
            Probed,
            Tick,
        )
    },
}
"""Every pair that may happen; any other is a mistake of ours and raises with the story."""
