"""The run's state machine: drawn scenes first, then many random orders of events, each with the same promises."""

import random
import re
from collections import Counter, deque
from dataclasses import replace
from itertools import pairwise

import pytest
from helpers.machine_steps import begin, commit, do, first_generation

from raypar.elastic.actions import (
    AbortGroups,
    CompareReplayedStep,
    EmitStep,
    EmitValidation,
    RequestStacks,
    RunStep,
    StartCheckpoint,
    Teardown,
    Validate,
    WarnUser,
    WriteJournal,
)
from raypar.elastic.events import (
    AllWorkersCopiedState,
    CallFailed,
    CheckpointFailed,
    CheckpointSaved,
    GroupsAborted,
    StacksReported,
    StepEmitted,
    StepJournalled,
    StepReported,
    StopRequested,
    Tick,
    ValidationEmitted,
    ValidationReported,
    WorkersReady,
)
from raypar.elastic.phases import Phase, UnexpectedEvent
from raypar.elastic.run_machine import RunMachine
from raypar.elastic.run_policy import RunPolicy
from raypar.elastic.step_flow_rules import MAX_OPEN_STEPS
from raypar.errors import (
    CheckpointError,
    CommTimeout,
    ConfigError,
    GroupAborted,
    LeaseLostError,
    StateNotKeptError,
    UnreadableStateError,
    UserCodeError,
    WorkerLost,
)
from raypar.plan import ParallelPlan


def test_two_steps_are_issued_ahead_and_the_next_when_one_has_been_seen():
    machine = RunMachine(RunPolicy(workers=2, job_steps=10))
    assert begin(machine) == [RunStep(0), RunStep(1)]
    assert do(machine, StepReported((0,), 0)) == []
    assert do(machine, StepReported((0,), 1)) == []
    assert do(machine, StepReported((1,), 0)) == [WriteJournal(0)]
    assert do(machine, StepJournalled(0)) == [EmitStep(0)]
    assert do(machine, StepEmitted(0)) == [RunStep(2)]


def test_no_step_is_issued_beyond_a_validation_and_both_follow_in_order():
    machine = RunMachine(RunPolicy(workers=2, job_steps=4, validates=True, validate_every=2, save_every=2))
    begin(machine)
    assert commit(machine, 0) == []
    assert machine.phase is Phase.FLUSHING
    assert commit(machine, 1) == [StartCheckpoint(2)], "first: a validation may fail"
    assert do(machine, AllWorkersCopiedState(2)) == [Validate(2)]
    assert do(machine, ValidationReported((1,), 2)) == []
    assert do(machine, ValidationReported((0,), 2)) == [EmitValidation(2)]
    assert do(machine, ValidationEmitted(2)) == [RunStep(2), RunStep(3)], "training goes on while the files are written"
    assert do(machine, CheckpointSaved(2)) == []


def test_a_resumed_run_whose_rates_follow_a_validation_that_its_checkpoint_lacks_validates_first():
    """The checkpoint after 2 steps was saved before the validation there, which an undisturbed run has."""
    policy = RunPolicy(workers=2, job_steps=4, steps_before_run=2, validates=True, validate_every=2, save_every=2)
    assert begin(RunMachine(policy)) == [RunStep(2), RunStep(3)]
    machine = RunMachine(replace(policy, validates_first=True))
    assert begin(machine) == [Validate(2)]
    do(machine, ValidationReported((1,), 2))
    assert do(machine, ValidationReported((0,), 2)) == [EmitValidation(2)]
    assert do(machine, ValidationEmitted(2)) == [RunStep(2), RunStep(3)]


@pytest.mark.parametrize("stopped", [False, True])
def test_a_replay_runs_a_validation_in_doubt_again_before_the_steps_that_follow_it(stopped: bool):
    """Six steps were seen; silent corruption was found before the validation after four. Who stops the run in that validation
    gets what was seen, too."""
    policy = RunPolicy(
        workers=1, job_steps=9, steps_before_run=3, validates=True, validate_every=4, rates_follow_validations=True
    )
    machine = RunMachine(policy, ParallelPlan.mesh(layers=1))
    p, trust = machine.progress, machine.trust
    p.emitted = p.journalled = 6
    p.issued = p.committed = trust.agreed = 3
    p.served_flush_point, p.validated, trust.doubted_steps, p.doubted_validations = 4, 4, range(3, 6), (4,)
    assert begin(machine) == [RunStep(3)]
    assert do(machine, StepReported((0,), 3)) == [CompareReplayedStep(3, True), Validate(4)]
    assert do(machine, ValidationReported((0,), 4)) == [EmitValidation(4, again=True)]
    if stopped:
        assert do(machine, StopRequested("enough")) == []
    assert do(machine, ValidationEmitted(4)) == [RunStep(4), RunStep(5)]
    assert do(machine, StepReported((0,), 4))[:1] == [CompareReplayedStep(4, True)]
    compared, *then = do(machine, StepReported((0,), 5))
    assert compared == CompareReplayedStep(5, True)
    assert then == ([StartCheckpoint(6)] if stopped else [RunStep(7)]) and p.validated == 4


def test_the_run_ends_when_its_last_checkpoint_is_complete():
    machine = RunMachine(RunPolicy(workers=2, job_steps=1))
    begin(machine)
    assert commit(machine, 0) == [StartCheckpoint(1)]
    assert do(machine, AllWorkersCopiedState(1)) == []
    assert do(machine, CheckpointSaved(1)) == [Teardown("done", "the only step is done", 1)]


def test_a_stop_asked_for_in_a_callback_ends_the_run_after_exactly_one_more_step():
    machine = RunMachine(RunPolicy(workers=2, job_steps=100))
    begin(machine)
    assert commit(machine, 0, stop="early stop") == []
    assert commit(machine, 1) == [StartCheckpoint(2)]
    do(machine, AllWorkersCopiedState(2))
    assert do(machine, CheckpointSaved(2)) == [Teardown("stopped", "early stop", 2)]


def test_stop_at_step_ends_with_a_checkpoint_and_without_the_last_validation():
    machine = RunMachine(RunPolicy(workers=2, job_steps=100, stop_at=2, validates=True))
    assert begin(machine) == [RunStep(0), RunStep(1)]
    commit(machine, 0)
    assert commit(machine, 1) == [StartCheckpoint(2)]


@pytest.mark.parametrize(("stop_at", "said"), [(1, "1 step"), (2, "2 steps")])
def test_a_run_that_stops_at_a_step_says_after_how_many(stop_at: int, said: str):
    machine = RunMachine(RunPolicy(workers=2, job_steps=100, stop_at=stop_at))
    begin(machine)
    for step in range(stop_at):
        commit(machine, step)
    do(machine, AllWorkersCopiedState(stop_at))
    assert do(machine, CheckpointSaved(stop_at)) == [Teardown("stopped", f"asked to stop after {said}", stop_at)]


def test_a_finished_job_that_is_resumed_ends_without_training_or_saving_again():
    machine = RunMachine(RunPolicy(workers=2, job_steps=5, steps_before_run=5, validates=True, validate_every=5))
    assert begin(machine) == [Teardown("done", "all 5 steps are done", 5)]


def test_an_interrupt_finishes_the_steps_in_flight_and_saves():
    machine = RunMachine(RunPolicy(workers=2, job_steps=100))
    begin(machine)
    assert do(machine, StopRequested("Ctrl-C", interrupt=True, grace_s=2)) == []
    commit(machine, 0)
    assert commit(machine, 1) == [StartCheckpoint(2)]
    do(machine, AllWorkersCopiedState(2))
    assert do(machine, CheckpointSaved(2)) == [Teardown("interrupted", "Ctrl-C", 2)]


def test_an_interrupted_step_that_outlasts_its_grace_is_aborted_and_never_happened():
    machine = RunMachine(RunPolicy(workers=2, job_steps=100))
    begin(machine)
    commit(machine, 0)
    do(machine, StopRequested("Ctrl-C", interrupt=True, grace_s=2), 10.0)
    assert do(machine, Tick(), 11.9) == []
    assert do(machine, Tick(), 12.1) == [AbortGroups("interrupted")]
    assert do(machine, CallFailed("aborted", GroupAborted("interrupted"), 0), 12.2) == []
    assert do(machine, GroupsAborted((1, 1)), 12.3) == [StartCheckpoint(1)]


def applied(machine: RunMachine, step: int) -> None:
    """Both workers report the step, and it is journalled; its callbacks have not returned."""
    for worker in (0, 1):
        do(machine, StepReported((worker,), step))
    do(machine, StepJournalled(step))


def test_slow_callbacks_of_steps_that_all_workers_have_applied_are_waited_for_after_an_interrupt_and_the_state_is_saved():
    """They had 1.5 s; then nothing was saved of the steps since the last checkpoint."""
    machine = RunMachine(RunPolicy(workers=2, job_steps=100))
    begin(machine)
    do(machine, StopRequested("Ctrl-C", interrupt=True, grace_s=2), 10.0)
    for step in (0, 1):
        applied(machine, step)
    assert do(machine, Tick(), 12.1) == []
    assert do(machine, StepEmitted(0), 20.0) == [] and do(machine, Tick(), 21.0) == []
    assert do(machine, StepEmitted(1), 22.0) == [StartCheckpoint(2)]


def test_a_callback_that_hangs_after_an_interrupt_ends_the_run_which_says_what_was_waited_for():
    machine = RunMachine(RunPolicy(workers=2, job_steps=100, elastic=True))
    begin(machine)
    commit(machine, 0)
    do(machine, StopRequested("Ctrl-C", interrupt=True, grace_s=2), 10.0)
    for step in (1, 2):
        applied(machine, step)
    assert do(machine, Tick(), 12.1) == [] and do(machine, Tick(), 22.0) == []
    why = "interrupted; callbacks of step 2 have not returned within 10 s: nothing is saved"
    assert do(machine, Tick(), 22.2) == [Teardown("interrupted", why, 1)]


def test_callbacks_of_a_validation_have_no_deadline_until_an_interrupt():
    """After ten minutes the workers, which had all answered, were blamed."""
    machine = RunMachine(RunPolicy(workers=2, job_steps=100, validates=True, validate_every=1, elastic=True))
    begin(machine)
    assert commit(machine, 0) == [Validate(1)]
    do(machine, ValidationReported((0,), 1))
    assert do(machine, ValidationReported((1,), 1)) == [EmitValidation(1)]
    assert do(machine, Tick(), 1000.0) == []
    do(machine, StopRequested("Ctrl-C", interrupt=True, grace_s=2), 1000.0)
    assert do(machine, Tick(), 1002.1) == [] and do(machine, Tick(), 1012.0) == []
    (teardown,) = do(machine, Tick(), 1013.0)
    assert "callbacks of the validation have not returned" in teardown.why


def test_long_steps_end_and_are_saved_after_an_interrupt():
    """Steps of 8 s were aborted after 1.5 s, which one worker cannot follow before their end; nothing was saved."""
    machine = RunMachine(RunPolicy(workers=1, job_steps=100))
    begin(machine)
    commit(machine, 0, workers=1, seconds=8.0)
    do(machine, StopRequested("Ctrl-C", interrupt=True, grace_s=1.5), 10.0)
    assert not any(isinstance(action, AbortGroups) for action in do(machine, Tick(), 19.0))
    assert machine.phase is Phase.FLUSHING
    assert any(isinstance(action, AbortGroups) for action in do(machine, Tick(), 60.0))


def test_workers_that_stand_at_different_steps_after_an_abort_save_nothing_new():
    machine = RunMachine(RunPolicy(workers=2, job_steps=100))
    begin(machine)
    commit(machine, 0)
    do(machine, StopRequested("Ctrl-C", interrupt=True, grace_s=2), 10.0)
    do(machine, Tick(), 12.1)
    assert do(machine, GroupsAborted((2, 1)), 12.3) == []
    (teardown,) = do(machine, Tick(), 14.0)
    assert teardown.end == "interrupted" and "(2, 1)" in teardown.why


def test_the_cause_of_a_failure_is_the_user_code_not_the_workers_that_waited_for_it():
    machine = RunMachine(RunPolicy(workers=3, job_steps=10))
    begin(machine)
    (abort,) = do(machine, CallFailed("aborted", GroupAborted("connection closed"), 0))
    assert isinstance(abort, AbortGroups)
    assert do(machine, CallFailed("aborted", GroupAborted("connection closed"), 2)) == []
    (teardown,) = do(machine, CallFailed("user", UserCodeError("division by zero"), 1))
    assert teardown.end == "failed" and isinstance(teardown.error, UserCodeError)


def test_a_lost_worker_ends_the_run_at_once():
    machine = RunMachine(RunPolicy(workers=2, job_steps=10))
    begin(machine)
    abort, teardown = do(machine, CallFailed("lost", WorkerLost("worker 1 died"), 1))
    assert isinstance(abort, AbortGroups) and isinstance(teardown.error, WorkerLost)


def test_without_a_cause_the_symptom_is_reported_after_a_while():
    machine = RunMachine(RunPolicy(workers=2, job_steps=10))
    begin(machine)
    do(machine, CallFailed("aborted", GroupAborted("connection closed"), 0), 5.0)
    assert do(machine, Tick(), 6.0) == []
    (teardown,) = do(machine, Tick(), 8.5)
    assert isinstance(teardown.error, GroupAborted)


def test_a_hung_worker_is_named_and_its_stack_is_in_the_error():
    machine = RunMachine(RunPolicy(workers=2, job_steps=10))
    begin(machine, 0.0)
    commit(machine, 0)
    do(machine, StepReported((0,), 1, 0.1), 1.0)
    assert do(machine, Tick(), 59.0) == []
    assert do(machine, Tick(), 61.0) == [RequestStacks((1,))]
    assert do(machine, Tick(), 61.3) == []
    _, teardown = do(machine, StacksReported("worker 1: in time.sleep"), 61.4)
    assert isinstance(teardown.error, CommTimeout) and "in time.sleep" in str(teardown.error)
    assert "worker 1 has not reported within" in str(teardown.error)


@pytest.mark.parametrize("elastic", [True, False])
def test_a_callback_that_takes_long_makes_no_worker_late(elastic):
    """The next step is issued when the one before has been seen: its time begins then, not with the last report."""
    machine = RunMachine(RunPolicy(workers=2, job_steps=100, step_deadline_s=3.0, step_deadline_times=5.0, elastic=elastic))
    begin(machine)
    for step in range(2):
        for rank in range(2):
            do(machine, StepReported((rank,), step, 0.1), now_s=0.1 * (step + 1))
        do(machine, StepJournalled(step), now_s=0.1 * (step + 1))
    assert machine.progress.issued == machine.progress.committed == 2, "both steps are done, people look at the first"
    assert do(machine, Tick(), now_s=60.0) == []
    assert do(machine, StepEmitted(0), now_s=60.1) == [RunStep(2)]
    assert do(machine, Tick(), now_s=60.3) == []
    assert do(machine, Tick(), now_s=63.0) == []
    late = do(machine, Tick(), now_s=63.2)
    assert late and (machine.phase is not Phase.RUNNING if elastic else late == [RequestStacks((0, 1))])


def test_a_disk_that_is_full_costs_a_checkpoint_and_not_the_run():
    machine = RunMachine(RunPolicy(workers=2, job_steps=4, save_every=2))
    begin(machine)
    commit(machine, 0)
    assert commit(machine, 1) == [StartCheckpoint(2)]
    warn, *steps = do(machine, CheckpointFailed(2, OSError("no space left on device")))
    assert isinstance(warn, WarnUser) and "no space" in warn.text and steps == [RunStep(2), RunStep(3)]


FULL = CheckpointFailed(1, OSError("no space left on device"))


def unsaved(when: str, **policy) -> RunMachine:
    """A run whose last checkpoint has failed: as the state was copied, or as it was written."""
    machine = RunMachine(RunPolicy(workers=2, job_steps=1, **policy))
    begin(machine)
    commit(machine, 0)
    if when == "written":
        do(machine, AllWorkersCopiedState(1), 1.0)
    failed, waits = do(machine, FULL, 2.0)
    assert "could not be written" in failed.text
    assert waits.text.startswith("the state after 1 step is in the workers' memory only: it is saved as soon as")
    assert "300 s left" in waits.text and "nothing is saved" in waits.text and "cure: free disk space" in waits.text
    return machine


def test_a_run_that_waits_names_the_folder_that_has_no_room_for_the_copy_of_its_state():
    machine = RunMachine(RunPolicy(workers=2, job_steps=1))
    begin(machine)
    commit(machine, 0)
    full = ConfigError("plan.optimizer_in /fast takes no 0.2 MiB of optimizer state: no space", cure="give another")
    _, waits = do(machine, CheckpointFailed(1, full), 2.0)
    assert waits.text.endswith(f"\n  cure: make room there while the run waits: {full.what}")


@pytest.mark.parametrize("when", ["copied", "written"])
def test_a_run_whose_last_checkpoint_cannot_be_written_waits_for_the_disk_and_is_saved(when):
    """It had failed, with all its state in memory; the disk was full, or read-only, for a minute."""
    machine = unsaved(when)
    for now_s in (12.0, 22.0, 32.0):
        assert do(machine, Tick(), now_s - 0.5) == []
        assert do(machine, Tick(), now_s) == [StartCheckpoint(1)]
        if when == "written":
            assert do(machine, AllWorkersCopiedState(1), now_s) == []
        assert do(machine, FULL, now_s) == [], "people know"
    assert do(machine, Tick(), 42.0) == [StartCheckpoint(1)]
    do(machine, AllWorkersCopiedState(1), 42.1)
    assert do(machine, CheckpointSaved(1), 42.2) == [Teardown("done", "the only step is done", 1)]


def test_a_checkpoint_that_fails_is_told_with_the_cure_in_its_own_line():
    machine = RunMachine(RunPolicy(workers=2, job_steps=9, save_every=1))
    begin(machine)
    commit(machine, 0)
    do(machine, AllWorkersCopiedState(1))
    told, *_ = do(machine, CheckpointFailed(1, CheckpointError("cannot write c: No space left", "free disk space")))
    text = "the checkpoint after 1 step could not be written (cannot write c: No space left); there is none yet"
    assert told == WarnUser(f"{text}\n  cure: free disk space")


def test_a_run_whose_last_checkpoint_fails_for_five_minutes_has_failed():
    machine, told = unsaved("written"), []
    for quarter in range(12, 4 * 400):
        for action in do(machine, Tick(), quarter / 4):
            told.append((quarter / 4, action))
            if isinstance(action, StartCheckpoint):
                do(machine, AllWorkersCopiedState(1), quarter / 4)
                told += [(quarter / 4, action) for action in do(machine, FULL, quarter / 4)]
    lines = [action.text for _, action in told if isinstance(action, WarnUser)]
    assert [re.search(r"(\d+) s left", line)[1] for line in lines] == ["240", "180", "120", "60"]
    assert {type(action) for _, action in told} == {StartCheckpoint, WarnUser, Teardown}
    at_s, teardown = told[-1]
    assert 300.0 <= at_s <= 315.0 and teardown.end == "failed" and "no earlier checkpoint" in teardown.why
    text = "the last checkpoint could not be written within 300 s, and the only step is lost: no space left on device"
    assert (teardown.error.what, teardown.error.cure, teardown.error.__cause__) == (text, "free disk space", FULL.error)


def test_the_error_of_a_run_that_was_not_saved_says_what_is_lost_and_from_where_it_goes_on():
    """It named the file that could not be written."""
    machine = RunMachine(RunPolicy(workers=2, job_steps=2, save_every=1, save_wait_s=0.0))
    begin(machine)
    commit(machine, 0)
    do(machine, AllWorkersCopiedState(1))
    do(machine, CheckpointSaved(1))
    commit(machine, 1)
    _, teardown = do(machine, CheckpointFailed(2, CheckpointError("cannot write c: read-only", "make it writable")))
    assert (
        teardown.error.what == "the last checkpoint could not be written, and 1 of 2 steps is lost: cannot write c: read-only"
    )
    assert teardown.error.cure == "make it writable; then `raypar resume` goes on from the checkpoint after 1 step"
    lease = LeaseLostError("another process has the lease")
    machine = RunMachine(RunPolicy(workers=2, job_steps=1, save_wait_s=0.0))
    begin(machine)
    commit(machine, 0)
    assert do(machine, CheckpointFailed(1, lease))[-1].error is lease


def test_a_run_whose_last_checkpoint_fails_ends_at_once_where_nobody_is_to_wait():
    machine = unsaved("written")
    assert do(machine, StopRequested("Ctrl-C", interrupt=True, grace_s=2), 5.0) == []
    (teardown,) = do(machine, Tick(), 5.2)
    assert teardown.end == "failed" and teardown.error.__cause__ is FULL.error
    machine = RunMachine(RunPolicy(workers=2, job_steps=1, save_wait_s=0.0))
    begin(machine)
    commit(machine, 0)
    _, teardown = do(machine, FULL)
    assert teardown.end == "failed" and "no earlier checkpoint" in teardown.why


def test_a_run_whose_state_cannot_be_saved_waits_for_no_disk():
    machine = RunMachine(RunPolicy(workers=2, job_steps=1))
    begin(machine)
    commit(machine, 0)
    error = StateNotKeptError("a list", cure="a tensor")
    warning, teardown = do(machine, CheckpointFailed(1, error))
    assert "a list" in warning.text and teardown.end == "failed" and teardown.error is error


def test_a_run_whose_state_makes_no_readable_checkpoint_waits_for_no_disk():
    """It tried for 300 s, and advised to free disk space."""
    machine = RunMachine(RunPolicy(workers=2, job_steps=1))
    begin(machine)
    commit(machine, 0)
    warning, teardown = do(machine, CheckpointFailed(1, UnreadableStateError("slices overlap", cure="report this")))
    assert "slices overlap" in warning.text and teardown.end == "failed" and teardown.error.cure == "report this"
    assert teardown.error.what == "the last checkpoint could not be written, and the only step is lost: slices overlap"


def test_an_event_without_a_rule_raises_with_the_story():
    machine = RunMachine(RunPolicy(workers=2, job_steps=4))
    begin(machine)
    with pytest.raises(UnexpectedEvent, match=r"WorkersReady\(\) while running(.|\n)*RunStep\(step=1"):
        do(machine, WorkersReady())


class World:
    """A driver and workers that answer every action in a random order; what one worker says stays in its order."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        pick = self.random.choice
        last = self.random.randint(1, 9)
        self.policy = RunPolicy(
            workers=self.random.randint(1, 4),
            job_steps=last,
            steps_before_run=self.random.randint(0, last),
            validates=pick([True, False]),
            validate_every=pick([0, 1, 2, 3]),
            save_every=pick([0, 1, 2, 3]),
            stop_at=pick([None, None, last, max(1, last - 1)]),
        )
        if self.policy.stop_at is not None and self.policy.stop_at < self.policy.steps_before_run:
            self.policy = RunPolicy(workers=2, job_steps=last)
        self.machine = RunMachine(self.policy)
        self.lines: dict[str, deque] = {}
        self.log: list = []
        self.now_s = 0.0
        self.applied = [self.policy.steps_before_run] * self.policy.workers
        self.fault = pick([None, None, None, "user", "lost", "stop", "interrupt", "hang"])
        self.disk_full = pick([0.0, 0.0, 0.5])
        self.put("start", *first_generation(self.machine))
        if self.fault in ("user", "lost"):
            error = UserCodeError("boom") if self.fault == "user" else WorkerLost("gone")
            self.put("fault", *[None] * self.random.randint(0, 30), CallFailed(self.fault, error, 0))
        elif self.fault in ("stop", "interrupt"):
            stop = StopRequested("asked", interrupt=self.fault == "interrupt", grace_s=2.0)
            self.put("fault", *[None] * self.random.randint(0, 30), stop)
        self.hangs_from = self.random.randint(0, last) if self.fault == "hang" else None

    def put(self, line: str, *events) -> None:
        """None is a pause: it only lets other lines go first."""
        self.lines.setdefault(line, deque()).extend(events)

    def carry_out(self, action) -> None:
        self.log.append(action)
        workers = range(self.policy.workers)
        match action:
            case RunStep(step):
                for rank in workers:
                    if not (self.hangs_from is not None and step >= self.hangs_from and rank == workers[-1]):
                        self.put(f"worker {rank}", StepReported((rank,), step, 0.1))
            case WriteJournal(step):
                self.put("driver", StepJournalled(step))
            case EmitStep(step):
                stop = "asked in a callback" if self.random.random() < 0.03 else None
                self.put("driver", StepEmitted(step, stop))
            case Validate(done):
                for rank in workers:
                    self.put(f"worker {rank}", ValidationReported((rank,), done))
            case EmitValidation(done):
                self.put("driver", ValidationEmitted(done))
            case StartCheckpoint(done):
                full = self.random.random() < self.disk_full
                self.put(
                    "disk",
                    AllWorkersCopiedState(done),
                    CheckpointFailed(done, OSError("full")) if full else CheckpointSaved(done),
                )
            case RequestStacks(ranks):
                self.put("driver", StacksReported(f"stacks of {ranks}"))
            case AbortGroups():
                for rank in workers:
                    self.put(f"worker {rank}", *[CallFailed("aborted", GroupAborted("aborted"), rank)])
                self.put("abort", None, None, GroupsAborted(tuple(self.applied)))

    def run(self) -> None:
        for _ in range(3000):
            waiting = [line for line, events in self.lines.items() if events]
            if self.machine.phase is Phase.OVER and not waiting:
                return
            if not waiting:
                self.now_s += 100.0
                event = Tick()
            else:
                event = self.lines[self.random.choice(waiting)].popleft()
                self.now_s += 0.01
                if event is None:
                    continue
                if isinstance(event, (StepReported, ValidationReported)):
                    event = self.with_others(event)
                if isinstance(event, StepReported):
                    for worker in event.workers:
                        self.applied[worker] = event.step + 1
            for decision in self.machine.handle(event, self.now_s):
                assert decision.reason
                self.carry_out(decision.action)
        pytest.fail(f"the run does not end: {list(self.machine.story)[-5:]}")

    def with_others(self, event):
        """A report, perhaps with other workers' reports of the same step or validation."""
        alike = [
            events
            for events in self.lines.values()
            if events and type(events[0]) is type(event) and replace(events[0], workers=event.workers) == event
        ]
        joined = [events.popleft() for events in alike if self.random.random() < 0.5]
        return replace(event, workers=tuple(worker for one in (event, *joined) for worker in one.workers))


@pytest.mark.parametrize("block", range(10))
def test_every_order_of_events_keeps_the_promises(block):
    for seed in range(block * 100, block * 100 + 100):
        world = World(seed)
        world.run()
        log, policy = world.log, world.policy
        steps = [a.step for a in log if isinstance(a, RunStep)]
        seen = [a.step for a in log if isinstance(a, EmitStep)]
        assert steps == list(range(policy.steps_before_run, policy.steps_before_run + len(steps))), "issued once each, in order"
        assert seen == steps[: len(seen)], "seen once each, in order"
        assert [type(a) for a in log].count(Teardown) == 1
        after = log[log.index(next(a for a in log if isinstance(a, Teardown))) + 1 :]
        assert after == [], f"seed {seed}: {after} after the end"
        ahead = 0
        for action in log:
            ahead += isinstance(action, RunStep) - isinstance(action, EmitStep)
            assert ahead <= MAX_OPEN_STEPS
        for index, action in enumerate(log):
            if isinstance(action, (Validate, StartCheckpoint)):
                before = log[:index]
                issued = policy.steps_before_run + sum(isinstance(a, RunStep) for a in before)
                if action.done == issued:
                    continue
                assert world.fault == "interrupt", "the state is settled, or the steps in flight were aborted"
        snapshots = Counter(a.done for a in log if isinstance(a, StartCheckpoint))
        end = log[-1]
        assert all(count == 1 or (world.disk_full and done == end.done) for done, count in snapshots.items())
        if world.fault in (None, "stop") and not world.disk_full:
            assert end.end in ("done", "stopped"), f"seed {seed}: {end}"
            assert end.done == policy.steps_before_run or snapshots[end.done] == 1, "ends with a checkpoint"
        if world.fault is None and policy.validates and end.done == policy.job_steps > policy.steps_before_run:
            assert Validate(policy.job_steps) in log
        if world.fault == "hang" and policy.steps_before_run <= world.hangs_from < len(steps) + policy.steps_before_run:
            assert end.end == "failed" and isinstance(end.error, CommTimeout)


def cuts_of(policy, steps, seconds, mirror_seconds):
    """Which steps of an undisturbed run take a cut; a cut costs `mirror_seconds` in the step after it."""
    machine = RunMachine(policy)
    pending, taken = deque(first_generation(machine)), []
    while pending:
        for action in do(machine, pending.popleft()):
            match action:
                case RunStep(step, cut):
                    if cut:
                        taken.append(step)
                    spent = mirror_seconds if step - 1 in taken else 0.0
                    pending.extend(StepReported((w,), step, seconds, 1, spent * w) for w in range(policy.workers))
                case WriteJournal(step):
                    pending.append(StepJournalled(step))
                case EmitStep(step):
                    pending.append(StepEmitted(step))
    assert machine.progress.committed == steps
    return taken


def test_the_mirror_takes_a_cut_in_the_first_step_and_then_every_k_steps():
    last = "the last step too, so that what is saved has been compared"
    assert cuts_of(RunPolicy(workers=2, job_steps=10, mirror_every=4), 10, 0.1, 0.0) == [0, 3, 7, 9], last
    assert cuts_of(RunPolicy(workers=2, job_steps=10), 10, 0.1, 0.0) == []
    assert cuts_of(RunPolicy(workers=1, job_steps=10, mirror_every=4), 10, 0.1, 0.0) == [], "nobody would keep the copy"


def test_the_mirror_takes_a_cut_as_often_as_its_cost_allows():
    cuts = cuts_of(RunPolicy(workers=2, job_steps=200, mirror_cost=0.02), 200, 0.1, 0.1)
    gaps = [b - a for a, b in pairwise(cuts[1:-1])]
    assert cuts[0] == 0 and gaps and all(50 <= gap <= 50 + MAX_OPEN_STEPS for gap in gaps), cuts
    free = cuts_of(RunPolicy(workers=2, job_steps=9, mirror_cost=0.02), 9, 0.1, 0.0)
    assert all(gap <= MAX_OPEN_STEPS for gap in (b - a for a, b in pairwise(free))), free
