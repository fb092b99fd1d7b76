"""Scenes of a recovery, event by event: what the membership histories and the fault points have found."""

from dataclasses import replace

import pytest
from helpers.machine_steps import first_generation

from raypar.elastic.actions import (
    AdoptPlan,
    ChoosePlan,
    ClaimGeneration,
    EmitStep,
    EmitValidation,
    FenceWorkers,
    KillWorker,
    StartCheckpoint,
    StartWorkers,
    Teardown,
    WarnUser,
    WriteJournal,
)
from raypar.elastic.events import (
    AllWorkersCopiedState,
    CallFailed,
    CheckpointFailed,
    CheckpointSaved,
    DrainRequested,
    GenerationClaimed,
    PlanAdopted,
    PlanChosen,
    StepEmitted,
    StepJournalled,
    StepReported,
    StopRequested,
    Tick,
    ValidationEmitted,
    ValidationReported,
    WorkerJoined,
    WorkerPlaced,
    WorkerStartFailed,
    WorkerStatusReported,
)
from raypar.elastic.generation_guard import GenerationGuard, StaleGeneration, WorkerStatus
from raypar.elastic.phases import Phase
from raypar.elastic.run_machine import RunMachine
from raypar.elastic.run_policy import RunPolicy
from raypar.elastic.state_sources import may_restart
from raypar.errors import CommError, GroupAborted, WorkerLost
from raypar.plan import ParallelPlan
from raypar.plan.pieces import Piece

WHOLE = (Piece("w0", 0, 4), Piece("w1", 0, 4))


def layout(plan):
    """Two layers, one parameter each."""
    stages = [[plan.stages[i] for i in plan.stages_of(rank)] for rank in range(plan.world)]
    return tuple(tuple(p for stage in held for p in WHOLE[stage.first : stage.last]) for held in stages)


def elastic(plan, **policy):
    return RunMachine(RunPolicy(workers=plan.world, job_steps=1, elastic=True, **policy), plan=plan, held_pieces=layout)


def do(machine, *events, now_s=0.0):
    return [decision.action for event in events for decision in machine.handle(event, now_s)]


def lost(worker):
    return CallFailed("lost", WorkerLost(f"worker {worker} died"), worker)


def stood(machine, worker, done):
    """The first generation's answer to the second, with all that its seat holds."""
    return WorkerStatusReported(
        2, WorkerStatus(worker, done, pieces=layout(machine.membership.plan)[machine.membership.members.index(worker)])
    )


def test_a_plan_that_the_workers_cannot_fill_any_more_is_chosen_again():
    machine = elastic(ParallelPlan.mesh(pp=2, dp=2, layers=2))
    do(machine, *first_generation(machine), lost(0), lost(1), GenerationClaimed(2, True))
    assert machine.phase is Phase.STANDING
    asked = do(machine, WorkerStatusReported(2, WorkerStatus(2, 0, pieces=WHOLE)), stood(machine, 3, 0))
    assert asked == [ChoosePlan(2, 2)], "nobody is left of the first stage's seats"
    assert do(machine, DrainRequested(3, "preempted")) == []
    assert do(machine, PlanChosen(2, ParallelPlan.mesh(dp=2, layers=2))) == [ChoosePlan(2, 1)]
    (order,) = do(machine, PlanChosen(2, ParallelPlan.mesh(layers=2)))
    assert isinstance(order, AdoptPlan) and order.members == (2,)


def divided(lacking, level=1, **policy):
    """Three replicas that divide state, of which one is lost; `lacking(plan)`: who has too little memory for a plan."""
    plan = ParallelPlan.mesh(dp=3, layers=2).with_zero(level, 2)
    machine = RunMachine(RunPolicy(workers=3, job_steps=9, elastic=True, **policy), plan, layout, lacking)
    do(machine, *first_generation(machine), lost(1), GenerationClaimed(2, True), stood(machine, 0, 0))
    return machine, machine.handle(stood(machine, 2, 0), 0.0)


def too_little(plan):
    return "worker 0 (replica 0) would need 9 MiB, and a worker has 7 MiB" if plan.world < 3 else ""


def test_replicas_that_are_left_do_not_take_more_state_than_they_have_memory_for():
    machine, asked = divided(too_little, capacity_s=60.0)
    assert [decision.action for decision in asked] == [
        WarnUser(f"with 2 workers {too_little(ParallelPlan.mesh())}"),
        ChoosePlan(2, 2),
    ]
    (waits,) = [action for action in do(machine, PlanChosen(2, None, "no plan fits 7 MiB")) if isinstance(action, WarnUser)]
    assert waits.text == "waiting for more workers of 1 CPU each (no plan fits 7 MiB); 60 s left" and machine.waits
    do(machine, WorkerJoined(3), GenerationClaimed(3, True))
    for worker in (0, 2, 3):
        actions = do(machine, WorkerStatusReported(3, WorkerStatus(worker, 0, pieces=WHOLE if worker != 3 else ())))
    (order,) = actions
    assert isinstance(order, AdoptPlan) and order.members == (0, 3, 2)


def test_another_plan_that_has_room_is_adopted():
    machine, _ = divided(too_little)
    (order,) = do(machine, PlanChosen(2, ParallelPlan.mesh(pp=2, layers=2)))
    assert isinstance(order, AdoptPlan) and set(order.members) == {0, 2}


def test_without_room_and_without_a_wait_the_run_ends_and_says_why():
    machine, _ = divided(too_little, capacity_s=0.0)
    (end,) = do(machine, PlanChosen(2, None, "no plan fits 7 MiB"))
    assert isinstance(end, Teardown) and end.end == "failed" and "no plan fits 7 MiB" in str(end.error)


@pytest.mark.parametrize("lacking, level", [(None, 1), (lambda plan: "", 1), (lambda plan: "in any plan", 1), (too_little, 0)])
def test_what_is_not_known_or_was_wrong_before_keeps_nobody_from_going_on(lacking, level):
    _, (decision,) = divided(lacking, level)
    assert isinstance(decision.action, AdoptPlan) and decision.action.plan.world == 2


def test_a_drained_worker_without_a_seat_leaves_at_once_and_is_not_lost():
    machine = elastic(ParallelPlan.mesh(dp=2, layers=2))
    do(machine, *first_generation(machine), WorkerJoined(2))
    (decision,) = machine.handle(DrainRequested(2, "node b09ad58f is being drained"), 0.0)
    assert (decision.action, decision.reason) == (KillWorker(2, "drained"), "it had no work")
    assert machine.membership.members == (0, 1) and machine.membership.generation == 1 and 2 in machine.membership.gone


def test_nobody_is_killed_before_the_next_generation_is_claimed():
    """A driver that stood still for a while takes everybody for hung: another one may have gone on with them."""
    machine = elastic(ParallelPlan.mesh(dp=3, layers=2))
    do(machine, *first_generation(machine), lost(0), GenerationClaimed(2, True), stood(machine, 1, 0))
    assert do(machine, Tick(), now_s=100.0) == [ClaimGeneration(3)]
    (end,) = do(machine, GenerationClaimed(3, False), now_s=100.0)
    assert isinstance(end, Teardown) and end.end == "deposed"

    machine = elastic(ParallelPlan.mesh(dp=3, layers=2))
    do(machine, *first_generation(machine), lost(0), GenerationClaimed(2, True), stood(machine, 1, 0))
    do(machine, Tick(), now_s=100.0)
    assert do(machine, GenerationClaimed(3, True), now_s=100.0) == [KillWorker(2, "did not answer"), FenceWorkers(3, (1,))]


@pytest.mark.parametrize(
    "replicas, die, mirror, more",
    [
        (2, (0, 1), 0, ""),
        (1, (1,), 0, ", or with elastic.mirror: auto, or with two replicas of every stage"),
        (1, (1,), 4, ", or with two replicas of every stage"),
    ],
)
def test_whose_state_is_lost_for_good_is_told_only_what_would_have_helped(replicas, die, mirror, more):
    machine = elastic(ParallelPlan.mesh(pp=3 - replicas, dp=replicas, layers=2), mirror_every=mirror, capacity_s=60.0)
    machine.policy = replace(machine.policy, job_steps=9)
    do(machine, *first_generation(machine), *(StepReported((w,), 0, 0.1) for w in (0, 1)), StepJournalled(0), StepEmitted(0))
    machine.mirror.complete = True  # the way back to the beginning is too long
    actions = do(machine, *map(lost, die), GenerationClaimed(2, True), *(stood(machine, w, 1) for w in (0, 1) if w not in die))
    if len(die) == 1:
        actions = do(machine, PlanChosen(2, ParallelPlan.mesh(layers=2)))
    end = actions[-1]
    assert isinstance(end, Teardown) and end.end == "failed" and isinstance(end.error, WorkerLost)
    assert end.error.cure == f"start again with checkpoint.every set, or with elastic.lost_state: restart{more}"


def lose_all_after_a_step(**policy):
    """Two replicas that divide state, of which both are lost after the first step; what the run does when others have come."""
    plan = ParallelPlan.mesh(dp=2, layers=2).with_zero(3)
    machine = RunMachine(RunPolicy(2, 9, elastic=True, hires=True, min_workers=2, mirror_every=1, **policy), plan, layout)
    do(machine, *first_generation(machine), *(StepReported((w,), 0, 0.1) for w in (0, 1)), StepJournalled(0), StepEmitted(0))
    machine.mirror.complete = True
    actions = do(machine, lost(0), GenerationClaimed(2, True), lost(1))
    if machine.ending is None:
        actions += do(machine, WorkerJoined(2), GenerationClaimed(3, True), WorkerStatusReported(3, WorkerStatus(2)))
        actions += do(machine, WorkerJoined(3), GenerationClaimed(4, True))
        actions += do(machine, *(WorkerStatusReported(4, WorkerStatus(worker)) for worker in (2, 3)))
    return machine, actions


BOTH_LOST = (
    "state after 1 step is lost: w0[0:4], w1[0:4]; worker 0 (stage 0, replica 0) and worker 1 (stage 0, replica 1) held it, "
    "no mirror and no checkpoint has it"
)


def test_a_run_without_a_checkpoint_that_has_lost_all_begins_again_and_says_whom_it_has_lost():
    machine, actions = lose_all_after_a_step(restarts=True)
    (order,) = [action for action in actions if isinstance(action, AdoptPlan)]
    assert order.from_checkpoint and order.done == 0 and order.members == (2, 3)
    told = [action.text for action in actions if isinstance(action, WarnUser) and "is lost" in action.text]
    assert told == [f"{BOTH_LOST}; all begin again with the first step"]
    do(machine, *(PlanAdopted(worker, 4) for worker in (2, 3)))
    assert (machine.progress.committed, machine.progress.emitted) == (0, 1), "what was seen is not seen again"


def test_a_run_that_must_not_begin_again_ends_and_says_whom_it_has_lost():
    _, actions = lose_all_after_a_step()
    (end,) = [action for action in actions if isinstance(action, Teardown)]
    assert isinstance(end.error, WorkerLost) and end.error.what == BOTH_LOST
    assert "elastic.lost_state: restart" in end.error.cure


def test_a_resumed_run_does_not_begin_again_with_the_first_step_of_all():
    assert not may_restart(elastic(ParallelPlan.mesh(layers=2), restarts=True, steps_before_run=1))
    machine = elastic(ParallelPlan.mesh(layers=2), restarts=True)
    assert may_restart(machine)
    machine.progress.saved = 1
    assert not may_restart(machine), "it goes back to the checkpoint"


def test_who_joins_while_the_others_are_asked_where_they_stand_is_not_waited_for():
    """Two workers were to be replaced and came at nearly the same time: the second was there, and the run waited for it."""
    machine = elastic(ParallelPlan.mesh(dp=2, layers=2), hires=True, min_workers=2, capacity_s=60.0)
    do(machine, *first_generation(machine), lost(0), GenerationClaimed(2, True), WorkerJoined(2))
    assert do(machine, stood(machine, 1, 0)) == [ClaimGeneration(3)]
    assert do(machine, GenerationClaimed(3, True)) == [FenceWorkers(3, (1, 2))]
    *_, order = do(machine, WorkerStatusReported(3, WorkerStatus(1, 0, pieces=WHOLE)), WorkerStatusReported(3, WorkerStatus(2)))
    assert isinstance(order, AdoptPlan) and sorted(order.members) == [1, 2]


def finish(machine, workers):
    """The only step, up to the moment when it has been seen."""
    *_, last = do(machine, *first_generation(machine), *(StepReported((w,), 0, 0.1) for w in workers))
    assert last == WriteJournal(0)
    assert do(machine, StepJournalled(0)) == [EmitStep(0)]
    return do(machine, StepEmitted(0))


def test_a_worker_that_dies_while_the_last_checkpoint_is_written_costs_nothing():
    machine = elastic(ParallelPlan.mesh(dp=2, layers=2))
    assert finish(machine, (0, 1)) == [StartCheckpoint(1)]
    assert do(machine, AllWorkersCopiedState(1)) == []
    assert do(machine, lost(0)) == [ClaimGeneration(2)]
    do(machine, CheckpointFailed(1, WorkerLost("worker 0 died")), GenerationClaimed(2, True))
    (order,) = do(machine, stood(machine, 1, 1))
    assert order.members == (1,)
    assert do(machine, PlanAdopted(1, 2)) == [StartCheckpoint(1)], "the other one holds the same state"
    (end,) = do(machine, AllWorkersCopiedState(1), CheckpointSaved(1))
    assert end.end == "done"


@pytest.mark.parametrize("error", [WorkerLost("worker 0 died"), GroupAborted("worker 0 has left"), StaleGeneration("too old")])
def test_a_share_of_the_last_checkpoint_that_is_missed_before_the_death_is_known_is_written_again(error):
    machine = elastic(ParallelPlan.mesh(dp=2, layers=2))
    finish(machine, (0, 1))
    do(machine, AllWorkersCopiedState(1))
    *_, claim = do(machine, CheckpointFailed(1, error))
    assert claim == ClaimGeneration(2)
    do(machine, lost(0), GenerationClaimed(2, True), stood(machine, 1, 1))
    assert do(machine, PlanAdopted(1, 2)) == [StartCheckpoint(1)]


def test_a_worker_that_dies_after_ctrl_c_does_not_take_the_last_checkpoint_with_it():
    """Before Ctrl-C it would have cost nothing; after it the run failed and nothing was saved."""
    machine = elastic(ParallelPlan.mesh(dp=2, layers=2))
    machine.policy = replace(machine.policy, job_steps=9)
    do(machine, *first_generation(machine), *(StepReported((w,), 0, 0.1) for w in (0, 1)), StepJournalled(0), StepEmitted(0))
    ctrl_c = StopRequested("Ctrl-C", interrupt=True, grace_s=1.5)
    assert do(machine, ctrl_c, lost(0)) == [ClaimGeneration(2)]
    do(machine, GenerationClaimed(2, True), stood(machine, 1, 1))
    assert do(machine, PlanAdopted(1, 2)) == [StartCheckpoint(1)], "no step more"
    (end,) = do(machine, AllWorkersCopiedState(1), CheckpointSaved(1))
    assert end.end == "interrupted"

    machine = elastic(ParallelPlan.mesh(dp=2, layers=2))
    machine.policy = replace(machine.policy, job_steps=9)
    do(
        machine,
        *first_generation(machine),
        *(StepReported((w,), 0, 0.1) for w in (0, 1)),
        StepJournalled(0),
        StepEmitted(0),
        ctrl_c,
        lost(0),
    )
    assert do(machine, Tick(), now_s=1.0) == []
    (end,) = do(machine, Tick(), now_s=machine.policy.interrupt_s)
    assert end.end == "interrupted", "but nobody waits long"


class Body:
    """What `GenerationGuard.save` asks of it."""

    def applied(self):
        return 4

    def abort(self, reason):
        pass


def test_a_worker_copies_the_state_of_the_step_and_generation_that_were_asked_for_and_no_other():
    """A driver that stood still asked for a checkpoint of a step that the others had left behind, and got one."""
    member = GenerationGuard(0, Body())
    member.enter_generation(2, "a new driver")
    member.generation = 2
    assert member.save(2, 4, lambda: "a copy") == "a copy"
    with pytest.raises(StaleGeneration):
        member.save(1, 4, lambda: "a copy")
    with pytest.raises(GroupAborted, match="after 4 steps of generation 2, not after 3 steps"):
        member.save(2, 3, lambda: "a copy")


def test_a_validation_whose_callbacks_outlast_a_recovery_is_still_seen():
    machine = elastic(ParallelPlan.mesh(dp=2, layers=2), validates=True, validate_every=1)
    machine.policy = replace(machine.policy, job_steps=3)
    do(machine, *first_generation(machine), *(StepReported((w,), 0, 0.1) for w in (0, 1)), StepJournalled(0), StepEmitted(0))
    assert machine.phase is Phase.VALIDATING
    assert do(machine, *(ValidationReported((w,), 1) for w in (0, 1))) == [EmitValidation(1)]
    do(machine, lost(0), GenerationClaimed(2, True), stood(machine, 1, 1), PlanAdopted(1, 2))
    assert machine.phase in (Phase.RUNNING, Phase.FLUSHING)
    do(machine, ValidationEmitted(1, stop="good enough"))
    assert machine.stopping.request is not None and machine.stopping.request.reason == "good enough"


@pytest.mark.parametrize("phase", [Phase.VALIDATING, Phase.ENDING])
def test_who_answers_no_pings_in_a_validation_or_a_checkpoint_is_given_up_as_soon_as_in_a_step(phase):
    """A worker that was stopped in a validation held the others up for 10 s."""
    validates = phase is Phase.VALIDATING
    machine = elastic(ParallelPlan.mesh(dp=2, layers=2), step_deadline_s=3.0, validates=validates, save_every=not validates)
    finish(machine, (0, 1))
    assert machine.phase in (phase, Phase.SAVING)
    do(machine, AllWorkersCopiedState(1))
    assert machine.phase is phase
    both, silent = Tick(unheard=frozenset({0, 1})), Tick(unheard=frozenset({1}))
    assert not any(do(machine, both, now_s=now_s) for now_s in (0.1, 0.5, 2.5)), "it is what they do"
    do(machine, Tick(), now_s=2.6)
    assert not any(do(machine, silent, now_s=now_s) for now_s in (3.0, 4.0)), "it may have much to do"
    assert do(machine, Tick(), silent, now_s=4.4) == [], "one answer, and the silence begins anew"
    assert do(machine, silent, now_s=6.0) == [ClaimGeneration(2)]


@pytest.mark.parametrize("came", [True, False])
def test_a_worker_that_comes_at_the_end_is_there_when_the_last_checkpoint_has_to_be_written_again(came):
    machine = elastic(ParallelPlan.mesh(dp=2, layers=2), hires=True, min_workers=2)
    machine.hiring.starting, machine.hiring.next_number = {2}, 3
    finish(machine, (0, 1))
    do(machine, AllWorkersCopiedState(1), WorkerJoined(2) if came else WorkerStartFailed(2, WorkerLost("no room")))
    assert machine.phase is Phase.ENDING
    actions = do(
        machine, lost(0), CheckpointFailed(1, WorkerLost("worker 0 died")), GenerationClaimed(2, True), stood(machine, 1, 1)
    )
    if came:
        (order,) = [*actions, *do(machine, WorkerStatusReported(2, WorkerStatus(2)))][-1:]
        assert isinstance(order, AdoptPlan) and order.members == (1, 2)
    else:
        assert any(
            isinstance(action, StartWorkers) and action.workers == (3,)
            for action in [*actions, *do(machine, Tick(), now_s=60.0)]
        )


def in_a_step(seconds):
    """Two replicas in the step after those that took so long; the time of the last of them is 0."""
    machine = elastic(ParallelPlan.mesh(dp=2, layers=2), step_deadline_s=3.0, step_deadline_times=5.0)
    machine.policy = replace(machine.policy, job_steps=1000)
    do(machine, *first_generation(machine))
    for step, spent in enumerate(seconds):
        do(machine, *(StepReported((w,), step, spent) for w in (0, 1)), StepJournalled(step), StepEmitted(step))
    assert do(machine, StepReported((0,), len(seconds), 0.3)) == [], "worker 1 is awaited"
    return machine


@pytest.mark.parametrize(
    ("seconds", "silent_s", "slow_s"),
    [
        ([0.3] * 10, 1.5, 3.0),
        ([0.3] * 9 + [4.0], 1.5, 20.0),  # one long step says nothing of who does not answer at all
        ([1.0] * 10, 2.5, 5.0),
        ([1.0] * 9 + [4.0], 3.0, 20.0),
    ],
)
def test_who_answers_no_pings_is_given_up_before_who_is_only_slow(seconds, silent_s, slow_s):
    for unheard, limit_s in ((frozenset({1}), silent_s), (frozenset(), slow_s)):
        machine = in_a_step(seconds)
        assert do(machine, Tick(unheard=unheard), now_s=limit_s - 0.01) == []
        assert do(machine, Tick(unheard=unheard), now_s=limit_s + 0.01) == [ClaimGeneration(2)]


def test_a_seat_is_weighed_once_a_step_has_been_measured():
    """A new driver has measured none: what a seat would save looked like nothing, and the worker stayed in reserve."""
    machine = elastic(ParallelPlan.mesh(layers=2), max_workers=2)
    machine.policy = replace(machine.policy, job_steps=1000)
    assert not any(
        isinstance(action, ChoosePlan)
        for action in do(machine, *first_generation(machine), WorkerJoined(1), Tick(), now_s=10.0)
    )
    do(machine, StepReported((0,), 0, 0.3), StepJournalled(0), StepEmitted(0), now_s=10.3)
    assert ChoosePlan(1, 2) in do(machine, Tick(), now_s=10.5)


def growing(members):
    """That many replicas after a step; four are wanted."""
    machine = elastic(ParallelPlan.mesh(dp=members, layers=2), max_workers=4, hires=True)
    machine.policy = replace(machine.policy, job_steps=1000)
    reports = [StepReported((worker,), 0, 0.3) for worker in range(members)]
    actions = do(machine, *first_generation(machine), *reports, StepJournalled(0), StepEmitted(0), Tick())
    assert [action.workers for action in actions if isinstance(action, StartWorkers)] == [(n,) for n in range(members, 4)]
    return machine


def chosen(machine, *events, now_s):
    return [action for action in do(machine, *events, now_s=now_s) if isinstance(action, ChoosePlan)]


def test_who_joins_waits_for_those_that_are_on_the_way_and_for_nobody_for_whom_there_is_no_room():
    machine = growing(2)
    do(machine, WorkerPlaced(2))
    assert chosen(machine, WorkerJoined(2), now_s=1.0) == [ChoosePlan(1, 3)], "for worker 3 there is no room"
    machine = growing(2)
    do(machine, WorkerPlaced(2), WorkerPlaced(3))
    assert chosen(machine, WorkerJoined(2), Tick(), now_s=1.0) == []
    assert chosen(machine, WorkerJoined(3), now_s=1.5) == [ChoosePlan(1, 4)]
    machine = growing(2)
    do(machine, WorkerPlaced(2), WorkerPlaced(3), WorkerJoined(2), now_s=1.0)
    assert chosen(machine, WorkerStartFailed(3, WorkerLost("no room after all")), Tick(), now_s=1.5) == [ChoosePlan(1, 3)]
    machine = growing(2)
    do(machine, WorkerPlaced(2), WorkerPlaced(3), WorkerJoined(2), now_s=1.0)
    assert chosen(machine, Tick(), now_s=3.1) == [ChoosePlan(1, 3)], "it has waited for grow_after_s"


def test_a_worker_that_is_alone_with_the_state_does_not_wait_for_more_than_one_other():
    """It was stopped while the first to come waited for others, and with it went the only copy."""
    machine = growing(1)
    do(machine, WorkerPlaced(1), WorkerPlaced(2))
    assert chosen(machine, WorkerJoined(1), now_s=1.0) == [ChoosePlan(1, 2)]


def test_those_who_have_hung_are_told_in_the_right_number():
    told = {}
    for late in ({3}, {1, 3}):
        machine = elastic(ParallelPlan.mesh(dp=4, layers=2), step_deadline_s=3.0, start_deadline_s=3.0)
        do(machine, *first_generation(machine), *(StepReported((worker,), 0, 0.1) for worker in {0, 1, 2, 3} - late))
        do(machine, Tick(unheard=frozenset(late)), now_s=50.0)
        told[len(late)] = machine.recovery.why
    assert told[1] == "step 1: worker 3 has not reported for 50.0 s and answers no pings"
    assert told[2] == "step 1: workers 1, 3 have not reported for 50.0 s and answer no pings"


@pytest.mark.parametrize("answers_at_s", [40.0, None])
def test_a_claim_waits_while_the_network_to_the_control_store_is_broken(answers_at_s):
    """After 10 s the run was given up, with all of its state alive in the workers."""
    machine = elastic(ParallelPlan.mesh(dp=2, layers=2))
    do(machine, *first_generation(machine))
    assert do(machine, lost(1), now_s=1.0) == [ClaimGeneration(2)]
    assert do(machine, Tick(), now_s=5.0) == []
    (warning,) = do(machine, Tick(), now_s=6.5)
    assert "waiting for Ray's control store, which does not answer" in warning.text and "; 84 s left" in warning.text
    assert do(machine, Tick(), now_s=39.0) == []
    if answers_at_s is not None:
        assert do(machine, GenerationClaimed(2, True), now_s=answers_at_s) == [FenceWorkers(2, (0,))]
        return
    (end,) = do(machine, Tick(), now_s=92.0)
    assert end.end == "failed" and "control store does not answer; `raypar resume`" in end.error.cure


def cannot_reach(worker, rank, generation):
    error = CommError(f"rank {worker} cannot reach rank {rank}: no connection within 4 s")
    error.unreachable_ranks = (rank,)
    return CallFailed("aborted", error, worker, generation)


def failed_generations(machine, generations, pieces):
    """Everybody answers, and in every generation one worker cannot reach another one; the last actions."""
    actions = do(machine, CallFailed("aborted", CommError("rank 0 has gone silent"), 0, 1))
    for generation, (worker, rank) in generations.items():
        assert actions[-1] == ClaimGeneration(generation), actions
        expected = sorted(set(machine.membership.members) - machine.membership.gone)
        do(machine, GenerationClaimed(generation, True))
        for number in expected:
            actions = do(machine, WorkerStatusReported(generation, WorkerStatus(number, 0, pieces=pieces(number))))
        assert isinstance(actions[-1], AdoptPlan), actions
        actions = do(machine, cannot_reach(worker, rank, generation))
    return actions


def test_a_worker_that_others_cannot_reach_is_gone_on_without_after_two_generations():
    """The driver reaches all three, so none of them is silent; the run ended after eight generations of the same three."""
    machine = elastic(ParallelPlan.mesh(dp=3, layers=2))
    machine.policy = replace(machine.policy, job_steps=9)
    do(machine, *first_generation(machine))
    machine.policy = replace(machine.policy, steps_before_run=-1)
    actions = failed_generations(machine, {2: (2, 1), 3: (1, 0)}, lambda number: WHOLE)
    assert actions == [ClaimGeneration(4)] and machine.membership.gone == {1}, "without it the others reach each other"
    killed, fenced = do(machine, GenerationClaimed(4, True))
    assert killed == KillWorker(1, "did not answer") and fenced == FenceWorkers(4, (0, 2))


def test_a_worker_with_the_only_copy_is_not_gone_on_without_and_the_error_names_the_network():
    plan = ParallelPlan.mesh(pp=2, layers=2)
    machine = elastic(plan)
    machine.policy = replace(machine.policy, job_steps=9)
    do(machine, *first_generation(machine))
    machine.policy = replace(machine.policy, steps_before_run=-1)
    actions = failed_generations(machine, dict.fromkeys(range(2, 10), (1, 0)), lambda n: layout(plan)[n])
    (end,) = actions
    assert not machine.membership.gone and end.end == "failed"
    assert "workers 0 and 1 cannot reach each other" in end.error.what and "network" in end.error.cure


def test_one_interruption_while_connecting_costs_no_worker():
    machine = elastic(ParallelPlan.mesh(dp=2, layers=2))
    do(machine, *first_generation(machine))
    assert failed_generations(machine, {2: (1, 0)}, lambda number: WHOLE) == [ClaimGeneration(3)]
    assert not machine.membership.gone
