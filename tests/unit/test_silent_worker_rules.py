"""A worker of a run that is not elastic holds the only copy of its state: silence alone does not end the run."""

import json
from types import SimpleNamespace

import pytest
from helpers.machine_steps import begin, commit, do

from raypar.actors.members_file_text import MembersFileText
from raypar.elastic.actions import AbortGroups, RequestStacks, StartCheckpoint, Teardown, TellUser, Validate, WarnUser
from raypar.elastic.events import (
    AllWorkersCopiedState,
    CallFailed,
    GroupsAborted,
    StacksReported,
    StepEmitted,
    StepJournalled,
    StepReported,
    StopRequested,
    Tick,
    ValidationReported,
    WorkerAnswered,
    WorkerSilent,
)
from raypar.elastic.phases import Phase
from raypar.elastic.run_machine import RunMachine
from raypar.elastic.run_policy import RunPolicy
from raypar.elastic.wait_for_last_copies import ENDED_GRACE_S
from raypar.errors import CommTimeout, GroupAborted, UserCodeError, WorkerLost
from raypar.plan import ParallelPlan


def running(**policy):
    """Two workers in the step after the second, of 0.1 s each. The time is 0."""
    machine = RunMachine(RunPolicy(workers=2, job_steps=10, **policy))
    begin(machine)
    for step in range(2):
        commit(machine, step)
    return machine


def silent(machine, now_s=10.0, worker=1):
    """It answers no pings since 10 s; the line that people are told."""
    (line,) = do(machine, WorkerSilent(worker, 10.0), now_s)
    assert isinstance(line, WarnUser)
    return line.text


def ticks(machine, since_s, until_s, **facts):
    """One a second; all actions."""
    return [action for s in range(since_s, until_s) for action in do(machine, Tick(**facts), float(s))]


def test_a_worker_that_is_only_silent_is_waited_for_with_a_line_and_training_goes_on():
    """Ten seconds without a ping ended the run."""
    machine = running()
    line = silent(machine)
    assert line.startswith("waiting for worker 1: it answers no pings, but nothing says that its process has ended")
    assert "not elastic" in line and "600 s left, then the run ends (there is no checkpoint)" in line
    assert machine.waits
    assert ticks(machine, 11, 40, unheard=frozenset({1})) == []
    (again,) = do(machine, Tick(unheard=frozenset({1})), 40.5)
    assert isinstance(again, WarnUser) and "570 s left" in again.text
    assert (
        do(machine, WorkerAnswered(1), 50.0) == [TellUser("worker 1 answers again, after a wait of 40.0 s")]
        and not machine.waits
    )
    for worker in (0, 1):
        done = do(machine, StepReported((worker,), 2, 50.0), 51.0)
    assert machine.progress.committed == 3 and done


def test_the_deadline_of_a_step_does_not_count_while_somebody_is_waited_for_and_begins_anew_then():
    machine = running(step_deadline_s=60.0)
    silent(machine)
    assert not [action for action in ticks(machine, 11, 200) if not isinstance(action, WarnUser)]
    do(machine, WorkerAnswered(1), 200.0)
    assert ticks(machine, 201, 260) == []
    assert RequestStacks((0, 1)) in do(machine, Tick(), 260.5), "a step that hangs is found as ever"
    machine = running(step_deadline_s=5.0)
    assert RequestStacks((0, 1)) in do(machine, Tick(), 9.9)
    silent(machine)
    assert do(machine, StacksReported("stacks"), 11.0) == []


@pytest.mark.parametrize("due", ["validation", "save", "end"])
def test_the_deadlines_of_a_pass_are_moved_by_the_wait(due):
    policy = {"validation": {"validates": True, "validate_every": 2}, "save": {"save_every": 2}, "end": {"save_every": 2}}[due]
    machine = RunMachine(RunPolicy(workers=2, job_steps=2 if due == "end" else 10, pass_deadline_s=30.0, **policy))
    begin(machine)
    for step in range(2):
        do(machine, StepReported((0,), step, 0.1))
        do(machine, StepReported((1,), step, 0.1))
        do(machine, StepJournalled(step))
        actions = do(machine, StepEmitted(step))
    assert actions == [Validate(2) if due == "validation" else StartCheckpoint(2)]
    if due == "end":
        do(machine, AllWorkersCopiedState(2))
        assert machine.phase is Phase.ENDING
    silent(machine)
    assert not [action for action in ticks(machine, 11, 100) if not isinstance(action, WarnUser)]
    do(machine, WorkerAnswered(1), 100.0)
    assert ticks(machine, 101, 120) == []
    assert ticks(machine, 120, 131), "30 s, of which 10 were over before"
    assert machine.phase in (Phase.FAILING, Phase.OVER)


def test_when_the_wait_is_over_the_run_ends_with_how_long_it_was():
    machine = running(last_copy_wait_s=60.0)
    silent(machine)
    actions = ticks(machine, 11, 75)
    assert [type(action) for action in actions] == [WarnUser, AbortGroups, Teardown]
    assert isinstance(actions[-1].error, CommTimeout) and "worker 1 has not answered for 60 s" in str(actions[-1].error)
    assert "raypar resume" in actions[-1].error.cure


@pytest.mark.parametrize("how", ["Ray says it", "its connection is closed"])
def test_a_death_during_the_wait_ends_the_run_at_once(how):
    machine = running()
    silent(machine)
    if how == "Ray says it":
        actions = do(machine, CallFailed("lost", WorkerLost("worker 1 was lost: The actor died"), 1), 12.0)
    else:
        gone = Tick(unheard=frozenset({1}), ended=frozenset({1}))
        assert do(machine, gone, 12.0) == do(machine, gone, 12.0 + ENDED_GRACE_S - 0.1) == [], "its call's own error says more"
        actions = do(machine, gone, 12.0 + ENDED_GRACE_S)
    assert actions[0] == AbortGroups("WorkerLost elsewhere") and isinstance(actions[-1], Teardown)
    assert "worker 1 was lost" in str(actions[-1].error)


def test_the_error_of_its_call_is_the_run_s_also_if_its_connection_was_found_closed_before():
    """Which of the two came first was chance; only the call's says which stage and replica it was."""
    machine = running()
    silent(machine)
    assert do(machine, Tick(unheard=frozenset({1}), ended=frozenset({1})), 12.0) == []
    actions = do(machine, CallFailed("lost", WorkerLost("worker 1 (stage 1, replica 0) was lost"), 1), 13.0)
    assert isinstance(actions[-1], Teardown) and "(stage 1, replica 0)" in str(actions[-1].error)


def test_no_wait_is_asked_for_and_what_is_said_then_is_that_of_before():
    machine = running(last_copy_wait_s=0.0)
    assert do(machine, WorkerSilent(1, 10.0), 10.0) == [AbortGroups("CommTimeout elsewhere")]
    (end,) = do(machine, Tick(), 13.5)
    assert "worker 1 has not answered for 10 s" in str(end.error)


@pytest.mark.parametrize("pressed", ["before", "during"])
def test_ctrl_c_ends_the_wait(pressed):
    machine = running()
    stop = StopRequested("Ctrl-C", interrupt=True, grace_s=2.0)
    if pressed == "during":
        silent(machine)
        assert do(machine, stop, 20.0) == []
        assert do(machine, Tick(unheard=frozenset({1})), 21.0) == [], "the steps in flight have their grace"
        assert do(machine, Tick(unheard=frozenset({1})), 22.1) == [AbortGroups("interrupted")]
        do(machine, GroupsAborted((2, None)), 23.0)
        (end,) = do(machine, Tick(unheard=frozenset({1})), 24.0)
        assert end.end == "interrupted"
    else:
        do(machine, stop, 9.5)
        assert isinstance(do(machine, WorkerSilent(1, 10.0), 10.0)[0], AbortGroups), "nobody is waited for any more"


def test_several_are_waited_for_and_each_has_its_own_time():
    machine = running(last_copy_wait_s=60.0)
    silent(machine, 10.0, worker=1)
    silent(machine, 50.0, worker=0)
    assert do(machine, WorkerAnswered(1), 65.0) == [TellUser("worker 1 answers again, after a wait of 55.0 s")]
    assert not [action for action in ticks(machine, 66, 109) if not isinstance(action, WarnUser)]
    assert AbortGroups("CommTimeout elsewhere") in do(machine, Tick(), 110.5)
    assert do(machine, WorkerAnswered(7), 110.6) == [], "of whom nothing was told"


def test_the_start_waits_too():
    """A stage that is built in one long call of C code answers no pings meanwhile."""
    machine = RunMachine(RunPolicy(workers=2, job_steps=10))
    silent(machine)
    assert ticks(machine, 11, 30) == []
    do(machine, WorkerAnswered(1), 30.0)
    begin(machine, 31.0)
    assert machine.phase is Phase.RUNNING


def test_an_elastic_run_begins_a_recovery_as_before():
    machine = RunMachine(RunPolicy(workers=2, job_steps=10, elastic=True), plan=ParallelPlan.mesh(dp=2, layers=2))
    begin(machine)
    do(machine, WorkerSilent(1, 10.0), 10.0)
    assert machine.phase is Phase.CLAIMING and not machine.health.silent_since_s


def test_what_comes_late_is_ignored_in_every_phase():
    """`WorkerSilent` where the run is being ended, `WorkerAnswered` anywhere: the table has both for all phases."""
    machine = running()
    do(machine, CallFailed("lost", WorkerLost("worker 0 was lost"), 0), 1.0)
    assert machine.phase is Phase.OVER
    assert do(machine, WorkerSilent(1, 10.0), 11.0) == do(machine, WorkerAnswered(1), 12.0) == []
    machine = running()
    do(machine, CallFailed("aborted", GroupAborted("a peer is gone"), 0), 1.0)
    assert machine.phase is Phase.FAILING
    assert do(machine, WorkerSilent(1, 10.0), 2.0) == do(machine, WorkerAnswered(1), 2.5) == []


def test_members_json_says_who_is_waited_for():
    machine = running()
    status = MembersFileText(SimpleNamespace(plan=ParallelPlan.mesh(dp=2, layers=2), policy=machine.policy))
    seen = [json.loads(status.text_if_changed(machine, lambda n: {}, lambda plan: "1f1b"))]
    silent(machine)
    seen.append(json.loads(status.text_if_changed(machine, lambda n: {}, lambda plan: "1f1b")))
    assert [facts["phase"] for facts in seen] == ["running", "waiting"]
    assert seen[1]["why"].startswith("worker 1: it answers no pings")


@pytest.mark.parametrize("end", [Tick(ended=frozenset({1})), CallFailed("user", UserCodeError("a layer raised"), 0)])
def test_nobody_is_waited_for_once_the_run_has_failed(end):
    """members.json went on to say so, of a process that was known to be gone."""
    machine = running()
    status = MembersFileText(SimpleNamespace(plan=ParallelPlan.mesh(dp=2, layers=2), policy=machine.policy))
    silent(machine)
    do(machine, end, 12.0)
    do(machine, end, 12.0 + ENDED_GRACE_S)
    assert machine.phase is Phase.OVER and not machine.waits
    assert json.loads(status.text_if_changed(machine, lambda n: {}, lambda plan: "1f1b"))["phase"] == "ended"


def test_a_validation_that_was_waited_for_is_completed():
    machine = running(validates=True, validate_every=2)
    silent(machine)
    do(machine, ValidationReported((0,), 2), 11.0)
    do(machine, WorkerAnswered(1), 40.0)
    assert do(machine, ValidationReported((1,), 2), 41.0)
