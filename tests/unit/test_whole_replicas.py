"""Replicas with shards are asked for, seated and given back whole; small first plans; workers that the planner declines.

The machine alone, event by event; `tests/chaos/test_growing_start.py` runs it against a cluster on a virtual clock.
"""

from dataclasses import replace

from helpers.machine_steps import begin, first_generation

from raypar.elastic.actions import (
    AdoptPlan,
    ChoosePlan,
    KillWorker,
    ReleaseWorkers,
    RunStep,
    StartWorkers,
    StoreUsefulWorkers,
    TellUser,
)
from raypar.elastic.events import (
    CheckpointSaved,
    DrainRequested,
    DriverFailover,
    FirstWorkersPlaced,
    GenerationClaimed,
    PlanAdopted,
    PlanChosen,
    StepEmitted,
    StepJournalled,
    StepReported,
    Tick,
    WorkerJoined,
    WorkerPlaced,
    WorkerStartFailed,
    WorkerStatusReported,
)
from raypar.elastic.generation_guard import WorkerStatus
from raypar.elastic.run_machine import RunMachine
from raypar.elastic.run_policy import RunPolicy
from raypar.elastic.seating import keep_replica_numbers, refill_seats, seat_whole_replicas
from raypar.errors import WorkerLost
from raypar.plan import ParallelPlan

PAIR, FOUR = (ParallelPlan.mesh(dp=dp, tp=2, layers=2) for dp in (1, 2))


def do(machine, *events, now_s=0.0):
    return [decision.action for event in events for decision in machine.handle(event, now_s)]


def made(plan, **policy):
    limits = {"workers": plan.world, "job_steps": 1000, "elastic": True, "hires": True, "grow_after_s": 0.0}
    shards = max(stage.shards for stage in plan.stages)
    return RunMachine(RunPolicy(**(limits | {"replica_size": shards} | policy)), plan, lambda plan: ((),) * plan.world)


def started(first, plan=FOUR, groups=((0, 1), (2, 3)), **policy):
    """A run whose first plan has been trained for a step; the workers of `groups` without a seat have no place yet."""
    machine = made(plan, **policy)
    members = tuple(range(first.world))
    do(machine, *first_generation(machine, FirstWorkersPlaced(first, members, (), groups)))
    do(machine, *(StepReported((worker,), 0, 0.3) for worker in members), StepJournalled(0), StepEmitted(0))
    return machine


def test_a_run_begins_with_the_first_plan_and_grows_when_the_others_have_joined():
    machine = started(PAIR)
    assert machine.membership.members == (0, 1) and machine.membership.plan == PAIR
    assert machine.hiring.starting == {2, 3} and do(machine, Tick()) == [], "nobody else is asked for"
    do(machine, WorkerPlaced(2), WorkerPlaced(3))
    assert do(machine, WorkerJoined(2)) == do(machine, Tick()) == [], "half a replica gets no seat"
    assert do(machine, WorkerJoined(3)) == [ChoosePlan(1, 4)]


def test_half_a_replica_is_not_seated_before_its_other_half_has_joined_unless_a_seat_is_empty():
    machine = started(PAIR)
    do(machine, WorkerPlaced(2), WorkerPlaced(3), WorkerJoined(2), DrainRequested(1, "its machine is wanted"))
    do(machine, StepReported((0,), 1, 0.3), StepReported((1,), 1, 0.3), StepReported((0,), 2, 0.3), StepReported((1,), 2, 0.3))
    stands = [WorkerStatusReported(2, WorkerStatus(worker, 3)) for worker in (0, 1, 2)]
    (order,) = [a for a in do(machine, GenerationClaimed(2, True), *stands) if isinstance(a, AdoptPlan)]
    assert order.members == (0, 2)


def test_missing_replicas_are_asked_for_whole():
    machine = started(PAIR, plan=PAIR, groups=((0, 1),), max_workers=5)
    assert do(machine, Tick()) == [], "they were asked for when the first step was committed"
    assert machine.hiring.asked_together == {0: {0, 1}, 1: {0, 1}, 2: {2, 3}, 3: {2, 3}} and machine.hiring.starting == {
        2,
        3,
        4,
    }
    fresh = made(PAIR, max_workers=5)
    do(fresh, *first_generation(fresh, FirstWorkersPlaced(PAIR, (0, 1))))
    assert [a for a in do(fresh, Tick()) if isinstance(a, StartWorkers)] == [StartWorkers((2, 3)), StartWorkers((4,))]


def test_workers_that_join_before_the_first_step_wait_for_a_seat():
    machine = made(FOUR)
    do(machine, FirstWorkersPlaced(PAIR, (0, 1), (2, 3), ((0, 1), (2, 3))), WorkerJoined(2), WorkerJoined(3))
    assert machine.membership.spares == {2, 3}
    assert {type(action) for action in begin(machine)} == {RunStep}


def test_before_the_first_step_a_worker_without_a_seat_is_drained_and_a_failed_start_is_tried_again():
    machine = made(FOUR)
    do(machine, FirstWorkersPlaced(PAIR, (0, 1), (), ((0, 1), (2, 3))))
    assert do(machine, DrainRequested(2, "its machine is wanted")) == [KillWorker(2, "drained")]
    do(machine, WorkerStartFailed(3, WorkerLost("its placement group was removed")))
    assert machine.hiring.starting == set() and machine.hiring.retry_at_s > 0.0
    do(machine, *first_generation(machine))
    assert [a for a in do(machine, Tick(), now_s=60.0) if isinstance(a, StartWorkers)] == [StartWorkers((4, 5))]


def test_a_replica_without_a_place_fails_once_and_a_shard_that_has_one_goes_on():
    machine = started(PAIR)
    failed = [WorkerStartFailed(worker, WorkerLost("its placement group was removed")) for worker in (2, 3)]
    (warned,) = do(machine, *failed)
    assert warned.text.startswith("workers 2, 3 could not be started") and machine.hiring.failures == 1
    machine = started(PAIR)
    do(machine, WorkerPlaced(2), WorkerPlaced(3), failed[0])
    assert machine.hiring.starting == {3}


def declined(machine, world, now_s=0.0):
    """What the planner's answer and the next tick lead to."""
    plan = replace(FOUR, stages=ParallelPlan.mesh(dp=world, layers=2).stages)
    return [*do(machine, PlanChosen(1, plan, "", 0.3, 0.3), now_s=now_s), *do(machine, Tick(), now_s=now_s)]


def test_a_seat_that_is_not_worth_the_move_is_declined_and_its_worker_given_back_once():
    pair = ParallelPlan.mesh(dp=2, layers=2)
    machine = started(pair, plan=pair, groups=(), max_workers=3)
    assert machine.hiring.starting == {2}
    assert do(machine, WorkerPlaced(2), WorkerJoined(2)) == [ChoosePlan(1, 3)]
    told, stored, released = declined(machine, 3)
    assert isinstance(told, TellUser) and "stays in reserve" in told.text and stored == StoreUsefulWorkers(2)
    assert released == ReleaseWorkers((2,)) and machine.membership.spares == set()
    assert do(machine, Tick(), now_s=2.0) == [], "neither asked for again nor given back again"
    assert do(machine, WorkerJoined(2), Tick(), now_s=2.0) == [], "its message came too late"


def test_a_worker_that_may_keep_the_only_mirror_snapshot_is_not_given_back():
    pair = ParallelPlan.mesh(dp=2, layers=2)
    machine = started(pair, plan=pair, groups=(), max_workers=3, mirror_every=2)
    do(machine, WorkerPlaced(2), WorkerJoined(2))
    machine.membership.had_seat.add(2)
    assert [a for a in declined(machine, 2) if isinstance(a, ReleaseWorkers)] == []
    for step in (1, 2, 3, 4):
        do(machine, *(StepReported((worker,), step, 0.3) for worker in (0, 1)), StepJournalled(step), StepEmitted(step))
    assert do(machine, Tick()) == [ReleaseWorkers((2,))], "two snapshots have been taken since"


def test_nobody_is_given_back_while_a_checkpoint_is_written():
    """One that had a seat before may still write its share."""
    pair = ParallelPlan.mesh(dp=2, layers=2)
    machine = started(pair, plan=pair, groups=(), max_workers=3)
    do(machine, WorkerPlaced(2), WorkerJoined(2))
    machine.progress.saving = 1
    assert [a for a in declined(machine, 2) if isinstance(a, ReleaseWorkers)] == []
    assert do(machine, CheckpointSaved(1), Tick()) == [ReleaseWorkers((2,))]


def test_a_new_driver_knows_which_workers_have_no_place_yet():
    machine = made(FOUR)
    found = DriverFailover((0, 1, 2), 1, 3, PAIR, (0, 1), pending=(4, 5), groups=((0, 1), (4, 5)), next_worker_number=6)
    do(machine, found)
    assert (machine.hiring.starting, machine.hiring.placed, machine.membership.spares) == ({4, 5}, set(), {2})
    assert machine.hiring.asked_together[4] == {4, 5} and machine.membership.had_seat == {0, 1, 2}


def test_a_new_driver_is_told_what_the_planner_has_declined_and_asks_for_no_more_workers():
    pair, asked = ParallelPlan.mesh(dp=2, layers=2), {}
    machine = started(pair, plan=pair, groups=(), max_workers=3)
    do(machine, WorkerPlaced(2), WorkerJoined(2))
    assert [a for a in declined(machine, 2) if isinstance(a, StoreUsefulWorkers)] == [StoreUsefulWorkers(2)]
    for useful in (2, None):
        machine = made(pair, max_workers=3)
        do(machine, DriverFailover((0, 1), 1, 3, pair, (0, 1), useful_workers=useful, next_worker_number=2))
        status = [WorkerStatusReported(2, WorkerStatus(worker, 3)) for worker in (0, 1)]
        do(machine, GenerationClaimed(2, True), *status, PlanAdopted(0, 2), PlanAdopted(1, 2))
        steps = [
            StepReported((0,), 3, 0.3, generation=2),
            StepReported((1,), 3, 0.3, generation=2),
            StepJournalled(3),
            StepEmitted(3),
        ]
        asked[useful] = [a.workers for a in do(machine, *steps, Tick()) if isinstance(a, StartWorkers)]
    assert asked == {2: [], None: [(2,)]}


def test_replicas_keep_their_numbers_and_the_last_one_takes_that_of_one_that_is_gone():
    before = {worker: worker // 2 for worker in range(8)}
    assert keep_replica_numbers([[0, 1], [4, 5], [6, 7]], before) == [[0, 1], [6, 7], [4, 5]]
    assert keep_replica_numbers([[0, 1], [4, 5], [6, 7], [8, 9]], before) == [[0, 1], [8, 9], [4, 5], [6, 7]], "a new one"
    assert keep_replica_numbers([[6, 7], [2, 3]], before) == [[6, 7], [2, 3]]
    assert keep_replica_numbers([[2, 1], [4, 3]], before) == [[4, 3], [2, 1]], "shards of several replicas"


def test_the_last_replica_takes_the_seats_of_a_lost_one_where_replicas_divide_state():
    plan = ParallelPlan.mesh(dp=4, tp=2, layers=2)
    for level, members in ((0, (0, 1, 4, 5, 6, 7)), (1, (0, 1, 6, 7, 4, 5))):
        machine = started(plan.with_zero(level), plan.with_zero(level), groups=((0, 1), (2, 3), (4, 5), (6, 7)))
        assert refill_seats(machine, [0, 1, 4, 5, 6, 7])[1] == members


def test_many_replicas_are_seated_with_few_looks_at_where_workers_are():
    """1,024 workers took a driver three seconds at the start of a run: each was compared with each, once for each replica."""

    class Nodes(dict):
        looks = 0

        def get(self, worker, default=None):
            self.looks += 1
            return super().get(worker, default)

    count = 64
    nodes = Nodes({worker: f"node{worker // 8}" for worker in range(2 * count)})
    found = seat_whole_replicas([range(0, 2 * count, 2), range(1, 2 * count, 2)], nodes)
    assert found == [[worker, worker + 1] for worker in range(0, 2 * count, 2)]
    assert nodes.looks <= 4 * count**2
