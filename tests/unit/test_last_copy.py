"""Silence alone does not kill a worker that holds the only copy of a state: it is waited for, and the others are not."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
from helpers.machine_steps import first_generation
from test_recovery_rules import WHOLE, do, elastic, lost

from raypar.actors.members_file_text import MembersFileText
from raypar.elastic.actions import (
    AdoptPlan,
    ChoosePlan,
    ClaimGeneration,
    FenceWorkers,
    KillWorker,
    StartCheckpoint,
    Teardown,
    TellUser,
    WarnUser,
)
from raypar.elastic.deadlines import silent_deadline_s
from raypar.elastic.events import (
    AllWorkersCopiedState,
    CheckpointSaved,
    GenerationClaimed,
    PlanAdopted,
    PlanChosen,
    StepEmitted,
    StepJournalled,
    StepReported,
    StopRequested,
    Tick,
    WorkerJoined,
    WorkerStatusReported,
)
from raypar.elastic.generation_guard import WorkerStatus
from raypar.elastic.phases import Phase
from raypar.elastic.run_policy import RunPolicy
from raypar.errors import ConfigError
from raypar.job import ElasticConfig
from raypar.plan import ParallelPlan

LONE, LINE, PAIR = ParallelPlan.mesh(layers=2), ParallelPlan.mesh(pp=2, layers=2), ParallelPlan.mesh(dp=2, layers=2)
LIMITS = {"step_deadline_s": 3.0, "step_deadline_times": 5.0, "capacity_s": 60.0}


def trained(plan, steps=4, **policy):
    """A run in the step after `steps`, each of 0.1 s; nobody has reported that one. The time is 0."""
    machine = elastic(plan, **(LIMITS | policy))
    machine.policy = replace(machine.policy, job_steps=1000)
    do(machine, *first_generation(machine))
    for step in range(steps):
        reports = [StepReported((worker,), step, 0.1) for worker in range(plan.world)]
        saved = [AllWorkersCopiedState(step + 1), CheckpointSaved(step + 1)] * bool(policy.get("save_every") == step + 1)
        do(machine, *reports, StepJournalled(step), StepEmitted(step), *saved)
    return machine


def late(machine, unheard=()):
    """The step is overdue: a new generation is claimed, and all are asked where they stand."""
    silent = frozenset(unheard)
    assert do(machine, Tick(unheard=silent), now_s=3.1) == [ClaimGeneration(2)]
    assert do(machine, GenerationClaimed(2, True), now_s=3.2) == [FenceWorkers(2, machine.membership.members)]


def stand(machine, worker, done=4, generation=2, **more):
    pieces = machine.held_pieces(machine.membership.plan)[machine.membership.members.index(worker)]
    return WorkerStatusReported(generation, WorkerStatus(worker, done, pieces=pieces, **more))


def told(actions):
    return [action.text for action in actions if isinstance(action, WarnUser)]


@pytest.mark.parametrize("unheard", [(), (0,)])
@pytest.mark.parametrize("applied", [0, 1])
def test_a_worker_that_is_alone_with_the_state_is_waited_for_and_goes_on(applied, unheard):
    """A sample that took 25 s to read ended the run: both when pings were answered meanwhile and when they were not."""
    machine = trained(LONE)
    late(machine, unheard)
    silent = Tick(unheard=frozenset(unheard))
    (line,) = told(do(machine, silent, now_s=4.3))
    assert line.startswith("waiting for worker 0") and "after 4 steps" in line
    assert "600 s left" in line and "elastic.last_copy_wait_s" in line and "w0[0:4]" in line
    assert ("answers pings" in line) == (not unheard) and ("answers no pings" in line) == bool(unheard)
    for now_s in (5.0, 15.0, 25.0):
        assert do(machine, silent, now_s=now_s) == []
    assert machine.phase is Phase.STANDING and not machine.membership.gone
    note, *_, order = do(machine, stand(machine, 0, 4 + applied), now_s=27.0)
    assert note == TellUser("worker 0 has answered, after a wait of 22.7 s; its state is whole")
    assert isinstance(order, AdoptPlan) and order.members == (0,) and order.done == 4 + applied and not order.from_checkpoint
    do(machine, PlanAdopted(0, 2), now_s=27.1)
    assert machine.phase in (Phase.RUNNING, Phase.FLUSHING) and not machine.membership.gone


def test_people_are_told_again_what_is_waited_for_and_how_long():
    machine = trained(LONE, last_copy_wait_s=100.0)
    late(machine)
    lines = [line for s in range(43, 1040, 5) for line in told(do(machine, Tick(), now_s=s / 10))]
    assert [line[line.index("s left") - 4 :][:6] for line in lines] == ["100 s ", " 70 s ", " 40 s ", " 10 s "]


@pytest.mark.parametrize("checkpoint", [False, True])
def test_when_the_wait_is_over_the_answer_is_that_of_before_and_says_how_long_it_was(checkpoint):
    """The state is lost, or all go back to the checkpoint."""
    machine = trained(LONE, last_copy_wait_s=60.0, save_every=3 if checkpoint else 0)
    late(machine)
    (line,) = told(do(machine, Tick(), now_s=4.3))
    assert line.endswith("then all go back to the checkpoint after 3 steps" if checkpoint else "then the run is lost")
    assert ClaimGeneration(3) not in do(machine, Tick(), now_s=64.2)
    assert ClaimGeneration(3) in do(machine, Tick(), now_s=64.4)
    actions = do(machine, WorkerJoined(1), GenerationClaimed(3, True), now_s=64.5)
    assert KillWorker(0, "did not answer") in actions
    actions = do(machine, WorkerStatusReported(3, WorkerStatus(1)), now_s=64.6)
    while not isinstance(actions[-1], (Teardown, AdoptPlan)):
        assert isinstance(actions[-1], ChoosePlan), actions
        actions = do(machine, PlanChosen(3, LONE), now_s=64.7)
    if checkpoint:
        assert actions[-1].from_checkpoint and actions[-1].done == 3
    else:
        text = str(actions[-1].error)
        assert "state after 4 steps is lost" in text
        assert "worker 0 (stage 0, replica 0) held it and did not answer, in a wait of 60 s (elastic.last_copy_wait_s)" in text


def test_the_key_of_the_job_file_is_the_wait_and_ten_minutes_by_default():
    for elastic_section, wait_s in (({}, 600.0), ({"last_copy_wait_s": 5}, 5.0), ({"last_copy_wait_s": 0}, 0.0)):
        policy = ElasticConfig(**elastic_section).to_policy_fields(300.0)
        assert RunPolicy(workers=1, job_steps=1, **policy).last_copy_wait_s == wait_s
    with pytest.raises(ConfigError, match="last_copy_wait_s"):
        ElasticConfig(last_copy_wait_s=-1)


def test_members_json_says_who_is_waited_for():
    machine = trained(LONE)
    late(machine)
    status = MembersFileText(SimpleNamespace(plan=LONE, policy=machine.policy))
    seen = [json.loads(status.text_if_changed(machine, lambda n: {}, lambda plan: "1f1b"))]
    do(machine, Tick(), now_s=4.3)
    seen.append(json.loads(status.text_if_changed(machine, lambda n: {}, lambda plan: "1f1b")))
    assert [facts["phase"] for facts in seen] == ["recovering", "waiting"]
    assert seen[1]["why"].startswith("worker 0: no other memory has the state after 4 steps")


def test_no_wait_is_asked_for():
    machine = trained(LONE, last_copy_wait_s=0.0)
    late(machine)
    assert ClaimGeneration(3) in do(machine, Tick(), now_s=4.3)


@pytest.mark.parametrize("mirror", [0, 1])
def test_one_of_two_stages_is_waited_for_unless_the_mirror_has_a_copy(mirror):
    machine = trained(LINE, mirror_every=mirror)
    late(machine)
    cuts = {4: WHOLE} if mirror else {}
    assert do(machine, stand(machine, 1, mirror_snapshots=cuts), now_s=3.3) == []
    actions = do(machine, Tick(), now_s=4.3)
    if mirror:
        assert actions == [ClaimGeneration(3)] and machine.membership.hung == {0}, "as fast as ever"
        return
    (line,) = told(actions)
    assert line.startswith("waiting for worker 0") and "w0[0:4]" in line and "w1" not in line
    (*_, order) = do(machine, stand(machine, 0), now_s=30.0)
    assert isinstance(order, AdoptPlan) and order.members == (0, 1) and order.done == 4


def test_a_cut_of_the_mirror_that_only_the_silent_have_is_waited_for():
    """Worker 1 died; worker 0 has the only other copy of what it held, and is silent for a while."""
    plan = ParallelPlan.mesh(pp=2, layers=2)
    machine = trained(plan, mirror_every=1)
    machine.mirror.complete = True
    do(machine, lost(1), now_s=1.0)
    do(machine, WorkerJoined(2), GenerationClaimed(2, True), WorkerStatusReported(2, WorkerStatus(2)), now_s=1.1)
    (line,) = told(do(machine, Tick(unheard=frozenset({0})), now_s=2.5))
    assert line.startswith("waiting for worker 0")


def test_of_two_silent_replicas_one_is_enough_and_the_other_is_then_given_up():
    machine = trained(PAIR)
    late(machine, (0, 1))
    both = Tick(unheard=frozenset({0, 1}))
    (line,) = told(do(machine, both, now_s=4.3))
    assert line.startswith("waiting for workers 0, 1")
    assert do(machine, both, now_s=20.0) == []
    assert told(do(machine, stand(machine, 1), now_s=21.0)) == []
    assert do(machine, Tick(unheard=frozenset({0})), now_s=21.2) == [ClaimGeneration(3)]
    assert machine.membership.hung == {0} and machine.membership.gone == {0}


def test_who_has_a_replica_that_answers_is_given_up_as_fast_as_ever():
    machine = trained(PAIR)
    late(machine, (0,))
    do(machine, stand(machine, 1), now_s=3.3)
    assert do(machine, Tick(unheard=frozenset({0})), now_s=3.5) == [ClaimGeneration(3)], "hopeless_s"


@pytest.mark.parametrize("how", ["Ray says it", "its connection is closed"])
def test_a_death_during_the_wait_ends_it_at_once(how):
    machine = trained(LONE)
    late(machine, (0,))
    assert told(do(machine, Tick(unheard=frozenset({0})), now_s=4.3))
    if how == "Ray says it":
        actions = do(machine, lost(0), now_s=9.0)
    else:
        assert do(machine, Tick(unheard=frozenset({0}), ended=frozenset({0})), now_s=9.0) == [ClaimGeneration(3)]
        actions = do(machine, GenerationClaimed(3, True), now_s=9.0)
    assert isinstance(actions[-1], Teardown) and "state after 4 steps is lost" in str(actions[-1].error)


def test_nobody_waits_for_a_process_that_has_ended():
    """With its node, which Ray takes 14 s to notice; the checkpoint is read as fast as ever."""
    machine = trained(LONE)
    late(machine, (0,))
    assert do(machine, Tick(unheard=frozenset({0}), ended=frozenset({0})), now_s=3.5) == [ClaimGeneration(3)]


def test_ctrl_c_ends_the_wait():
    machine = trained(LONE)
    late(machine)
    do(machine, Tick(), now_s=4.3)
    assert do(machine, StopRequested("Ctrl-C", interrupt=True, grace_s=1.5), now_s=10.0) == []
    assert do(machine, Tick(), now_s=14.9) == []
    (end,) = do(machine, Tick(), now_s=15.1)
    assert isinstance(end, Teardown) and end.end == "interrupted" and "nothing is saved" in end.why


def test_who_answers_after_ctrl_c_is_saved():
    machine = trained(LONE)
    late(machine)
    do(machine, Tick(), now_s=4.3)
    do(machine, StopRequested("Ctrl-C", interrupt=True, grace_s=1.5), now_s=10.0)
    do(machine, stand(machine, 0), now_s=12.0)
    assert StartCheckpoint(4) in do(machine, PlanAdopted(0, 2), now_s=12.1)


@pytest.mark.parametrize("steps, save_every", [(0, 0), (4, 4)])
def test_a_state_that_can_be_made_again_or_read_has_another_copy(steps, save_every):
    """Before the first step, or where the last checkpoint is of this very state, nobody is waited for; only the very last."""
    machine = trained(LINE, steps, save_every=save_every, start_deadline_s=3.0)
    late(machine)
    do(machine, stand(machine, 1, steps), now_s=3.3)
    assert ClaimGeneration(3) in do(machine, Tick(), now_s=4.3)
    machine = trained(LONE, steps, save_every=save_every, start_deadline_s=3.0)
    late(machine)
    assert told(do(machine, Tick(), now_s=4.3))


def test_a_step_that_was_waited_for_has_the_time_when_it_is_executed_again():
    """Each attempt would be found late again, and after eight of them the run would be given up although all live."""
    machine = trained(LONE)
    late(machine)
    do(machine, Tick(), now_s=4.3)
    do(machine, stand(machine, 0), now_s=28.0)
    do(machine, PlanAdopted(0, 2), now_s=28.0)
    assert do(machine, Tick(), now_s=28.0 + 40.0) == [], "it took 25 s before"
    do(machine, StepReported((0,), 4, 41.0, 2), StepJournalled(4), StepEmitted(4), now_s=69.0)
    assert silent_deadline_s(machine) == 1.5, "who is silent is found as fast as ever"


def test_who_answers_while_a_plan_is_adopted_is_not_given_up_with_who_hangs():
    """All that had not adopted in time were given up, also those that waited for the one that hung: two replicas, both lost."""
    machine = trained(PAIR)
    do(machine, WorkerJoined(2), lost(0), now_s=1.0)
    do(machine, GenerationClaimed(2, True), WorkerStatusReported(2, WorkerStatus(2)), stand(machine, 1), now_s=1.1)
    assert machine.phase is Phase.ADOPTING
    assert do(machine, Tick(unheard=frozenset({2})), now_s=7.0) == [ClaimGeneration(3)]
    assert machine.membership.hung == {2}
    assert do(machine, GenerationClaimed(3, True), now_s=7.1) == [KillWorker(2, "did not answer"), FenceWorkers(3, (1,))]


def test_time_in_which_workers_got_no_processor_counts_neither_for_a_step_nor_for_an_answer():
    machine = trained(PAIR)
    for now in range(1, 58):  # 14 s, less than 3 of which count
        assert do(machine, Tick(stalled_s=0.2), now_s=now / 4) == []
    assert ClaimGeneration(2) in do(machine, Tick(), now_s=14.75)
    machine = trained(PAIR)
    silent = frozenset({0})
    for now in range(1, 24):
        assert do(machine, Tick(stalled_s=0.2, unheard=silent), now_s=now / 4) == []


@pytest.mark.parametrize("then", ["it answers", "it stays silent", "it has ended"])
def test_the_others_have_time_to_answer_too_once_the_first_of_all_does(then):
    """The driver was cut off for 5.5 s. A hundredth of a second after the first answer the others were given up, alive, and all
    went back to the mirror's snapshot."""
    machine = trained(LINE)
    late(machine, unheard=(0, 1))
    (warning,) = told(do(machine, Tick(unheard=frozenset({0, 1})), now_s=3.5))
    assert "waiting for workers 0, 1" in warning
    (note,) = do(machine, stand(machine, 0, mirror_snapshots={2: machine.held_pieces(LONE)[0]}), now_s=9.0)
    assert isinstance(note, TellUser)
    other = frozenset({1})
    if then == "it has ended":
        assert do(machine, Tick(unheard=other, ended=other), now_s=9.3)[-1] == ClaimGeneration(3)
        return
    assert do(machine, Tick(unheard=other), now_s=9.3) == []
    if then == "it answers":
        *_, order = do(machine, stand(machine, 1), now_s=11.0)
        assert isinstance(order, AdoptPlan) and (order.members, order.done, order.from_mirror) == ((0, 1), 4, False)
        return
    assert do(machine, Tick(unheard=other), now_s=14.4) == []
    assert ClaimGeneration(3) in do(machine, Tick(unheard=other), now_s=14.6) and machine.membership.hung == other


@pytest.mark.parametrize("claimed_s, patient", [(3.2, False), (13.1, True)])
def test_a_claim_that_took_long_means_that_the_driver_was_cut_off_and_the_workers_have_time_too(claimed_s, patient):
    machine = trained(LINE)
    assert do(machine, Tick(unheard=frozenset({0, 1})), now_s=3.1) == [ClaimGeneration(2)]
    assert do(machine, GenerationClaimed(2, True), now_s=claimed_s) == [FenceWorkers(2, (0, 1))]
    do(machine, stand(machine, 0, mirror_snapshots={2: machine.held_pieces(LONE)[0]}), now_s=claimed_s)
    silent = Tick(unheard=frozenset({1}))
    assert (do(machine, silent, now_s=claimed_s + 9.0) == []) == patient
    if patient:
        assert ClaimGeneration(3) in do(machine, silent, now_s=claimed_s + 10.1)
