"""Workers that compute slower than those who do the same, for long: told once, and when it is over; replaced if asked for."""

import random
import statistics

from helpers.machine_steps import begin

from raypar.elastic.actions import AdoptShares, ClaimGeneration, PrepareShares, ReportShares, ReportStraggler, TellUser
from raypar.elastic.events import (
    CallFailed,
    GenerationClaimed,
    PlanAdopted,
    SharesAdopted,
    SharesPrepared,
    StepEmitted,
    StepJournalled,
    StepReported,
    StopRequested,
    WorkerStatusReported,
)
from raypar.elastic.generation_guard import WorkerStatus
from raypar.elastic.phases import Phase
from raypar.elastic.run_machine import RunMachine
from raypar.elastic.run_policy import RunPolicy
from raypar.elastic.seating import plans_after_one_loss
from raypar.elastic.stragglers import StragglerWatch, median_of_others
from raypar.errors import WorkerLost
from raypar.plan import ParallelPlan, StagePlan

PAIRS = [(0, 1), (2, 3)]


def steps(watch, count, **busy_ms):
    """`w3=20`: worker 3 takes 20 ms, all others 10."""
    found = []
    for _ in range(count):
        found += watch.step({w: busy_ms.get(f"w{w}", 10) / 1000 for w in range(4)})
    return found


def watching(places=PAIRS, steps=20):
    watch = StragglerWatch(1.5, steps)
    watch.begin(places)
    return watch


def test_a_straggler_is_told_once_after_20_slow_steps_and_once_when_it_is_over():
    watch = watching()
    assert steps(watch, 19, w3=21) == []
    (found,) = steps(watch, 1, w3=21)
    assert (found.worker, round(found.slowdown, 3), found.steps, found.alone, found.recovered) == (3, 2.1, 20, False, False)
    assert steps(watch, 50, w3=21) == [], "told once"
    assert steps(watch, 19) == []
    (over,) = steps(watch, 1)
    assert over.worker == 3 and over.recovered
    assert steps(watch, 50) == []


def test_one_step_that_is_not_slow_begins_the_count_again():
    watch = watching()
    assert steps(watch, 19, w3=21) + steps(watch, 1) + steps(watch, 19, w3=21) == []
    assert [f.worker for f in steps(watch, 1, w3=21)] == [3]


def test_stages_that_take_longer_than_others_are_no_stragglers():
    assert steps(watching(), 100, w2=50, w3=50) == []


def test_the_only_replica_of_a_stage_is_compared_with_its_own_first_steps():
    watch = watching([(0,), (1,), (2,), (3,)])
    assert steps(watch, 20, w1=30) == []
    assert steps(watch, 100, w1=30) == [], "it has been like this from the beginning"
    found = steps(watch, 20, w1=30, w2=16)
    assert [(f.worker, f.alone) for f in found] == [(2, True)]


def test_half_of_the_replicas_being_slow_does_not_hide_them():
    watch = watching([(0, 1, 2, 3)])
    assert [f.worker for f in steps(watch, 20, w3=40)] == [3]
    assert watching([(0, 1, 2, 3)]).step({0: 0.01, 1: 0.01, 2: 0.04, 3: 0.04}) == []
    assert [f.worker for f in steps(watching([(0, 1), (2, 3)]), 20, w1=40, w3=40)] == [1, 3]


def test_less_than_a_millisecond_is_noise():
    watch = watching()
    for _ in range(50):
        assert watch.step({0: 0.0001, 1: 0.0009, 2: 0.0, 3: 0.0002}) == []


def test_a_new_generation_counts_anew_and_does_not_tell_again_what_people_know():
    watch = watching()
    assert len(steps(watch, 20, w3=21)) == 1
    watch.begin([(0, 1), (2, 3)])
    assert watch.now() == [] and steps(watch, 19, w3=21) == [] and watch.now() == []
    assert steps(watch, 1, w3=21) == []
    assert [f.worker for f in watch.now()] == [3], "still known, and slow in all steps of this generation"


# -- in a run --------------------------------------------------------------------------------------------------------------


def run(machine, count, slow=(3,), first=0):
    """So many steps; the slow ones take twice as long. What was decided about stragglers, and whether a recovery began."""
    found = []
    for step in range(first, first + count):
        events = [
            StepReported((w,), step, 0.1, machine.membership.generation, busy_s={w: 0.02 if w in slow else 0.01})
            for w in machine.membership.members
        ]
        for event in (*events, StepJournalled(step), StepEmitted(step)):
            actions = [decision.action for decision in machine.handle(event, 0.1 * step)]
            found += [a for a in actions if isinstance(a, (ReportStraggler, ClaimGeneration))]
    return found


def machine(**policy):
    plan = ParallelPlan.mesh(dp=2, pp=2, layers=2)
    made = RunMachine(RunPolicy(workers=4, job_steps=500, **({"elastic": True, "hires": True} | policy)), plan=plan)
    begin(made)
    return made


def test_a_straggler_is_only_reported_unless_the_job_wants_it_replaced():
    made = machine()
    assert run(made, 60) == [ReportStraggler(3, 2.0, 20)]
    assert run(made, 20, slow=(), first=60) == [ReportStraggler(3, 1.0, 20, recovered=True)]
    assert run(machine(elastic=False), 60) == [ReportStraggler(3, 2.0, 20)], "also where nobody could be replaced"


def test_a_straggler_that_is_to_be_replaced_is_drained():
    made = machine(replace_stragglers=True)
    found = run(made, 21)
    assert found == [ReportStraggler(3, 2.0, 20, leaves=True), ClaimGeneration(2)]
    assert made.membership.leaving == {3} and made.health.attempts <= 1


def test_nobody_leaves_below_min_workers_or_where_nobody_can_come_or_while_the_run_ends():
    for policy in ({"min_workers": 4}, {"hires": False}):
        assert run(machine(replace_stragglers=True, **policy), 60) == [ReportStraggler(3, 2.0, 20)]
    made = machine(replace_stragglers=True)
    run(made, 10)
    made.handle(StopRequested("enough"), 1.0)
    assert not made.membership.leaving


def test_one_straggler_leaves_at_a_time():
    made = machine(replace_stragglers=True)
    found = run(made, 21, slow=(1, 3))
    assert sorted((f.worker, f.leaves) for f in found if isinstance(f, ReportStraggler)) == [(1, True), (3, False)]
    assert made.membership.leaving == {1}


def test_a_node_that_was_found_slow_before_is_not_left_again():
    made = machine(replace_stragglers=True)
    made.membership.nodes = {0: "a", 1: "b", 2: "a", 3: "b"}
    made.health.slow_nodes = {"b"}
    assert run(made, 60) == [ReportStraggler(3, 2.0, 20)]


def test_the_median_of_the_others_is_that_of_all_numbers_but_ones_own():
    chance = random.Random(3)
    for _ in range(300):
        numbers = [float(chance.randrange(6)) for _ in range(chance.randrange(2, 9))]
        for place, own in enumerate(numbers):
            others = numbers[:place] + numbers[place + 1 :]
            assert median_of_others(sorted(numbers), own) == statistics.median(others)
    assert median_of_others([1.0], 1.0) is None


# -- other shares of the blocks --------------------------------------------------------------------------------------------


def sharing(dp=3, pp=1, tp=1, blocks=12, plan=None, **policy):
    """A run whose stragglers get fewer blocks, after its first generation has begun."""
    plan = plan or ParallelPlan.mesh(dp=dp, pp=pp, tp=tp, layers=pp)
    fixed = {"workers": plan.world, "job_steps": 5000, "elastic": True, "hires": True, "rebalance_stragglers": True}
    made = RunMachine(RunPolicy(**(fixed | {"block_work": (1,) * blocks} | policy)), plan=plan)
    begin(made)
    return made


def train(machine, count, speeds, fits=True, why="", idle=()):
    """So many steps, with times of workers as `speeds` says; what is decided about stragglers, shares and generations.

    `fits`: whether the workers can take other blocks with the connections that they have; `why`: why no plan can be made;
    `idle`: workers without blocks.
    """
    found = []

    def handle(event):
        now = 0.1 * machine.progress.committed
        for action in [decision.action for decision in machine.handle(event, now)]:
            if isinstance(action, PrepareShares):
                later.append(SharesPrepared(action.generation, action.plan, why))
            elif isinstance(action, AdoptShares):
                later.extend(SharesAdopted(worker, action.generation, fits) for worker in machine.membership.members)
            elif isinstance(action, (ReportStraggler, ClaimGeneration, ReportShares, TellUser)):
                found.append(action)

    end, later = machine.progress.committed + count, []
    while machine.progress.committed < end and machine.phase in (Phase.RUNNING, Phase.FLUSHING, Phase.REBALANCING):
        while later:
            handle(later.pop(0))
        who, step = machine.membership, machine.progress.committed
        if machine.phase is not Phase.RUNNING or machine.progress.issued == step:
            break
        for worker in who.members:
            busy = {} if worker in idle else {worker: 0.01 * speeds.get(worker, 1.0)}
            handle(StepReported((worker,), step, 0.1, who.generation, busy_s=busy))
        handle(StepJournalled(step))
        handle(StepEmitted(step))
    while later:
        handle(later.pop(0))
    return found


def shares(machine):
    return [stage.share for stage in machine.membership.plan.stages]


def texts(found):
    return [action.text for action in found if isinstance(action, (ReportShares, TellUser))]


def test_a_worker_that_takes_twice_as_long_gets_fewer_blocks_and_even_ones_again_when_it_is_fast():
    made = sharing()
    found = train(made, 30, {2: 2.0})
    assert texts(found) == ["worker 2 takes 2.0 times as long as the others: it gets 2 of 12 blocks, they 5"]
    assert found[0] == ReportStraggler(2, 2.0, 20) and found[1].step <= 23
    assert shares(made) == [(5, 5, 2)] and made.membership.generation == 1
    assert train(made, 200, {2: 2.0}) == [], "and that is all"
    found = train(made, 30, {})
    assert texts(found) == ["the replicas are equally fast again: they get 4 of 12 blocks each"]
    assert shares(made) == [()] and made.membership.generation == 1


def test_only_the_slow_workers_stage_has_other_shares_and_the_slowest_shard_decides():
    made = sharing(dp=2, pp=2, tp=2, blocks=16)
    slow = made.membership.plan.rank(1, 0, 1)
    (text,) = texts(train(made, 60, {slow: 3.0}))
    assert text == f"worker {slow} takes 3.0 times as long as the others: its replica gets 4 of 16 blocks, the others 12"
    assert shares(made) == [(), (4, 12)]
    made = sharing(dp=5, blocks=30)
    (text,) = texts(train(made, 60, {1: 2.0, 3: 4.0}))
    assert text == "workers 1, 3 take 2.0 and 4.0 times as long as the others: they get 2 to 4 of 30 blocks, the others 8"
    assert shares(made) == [(8, 4, 8, 2, 8)]


def test_shares_do_not_flap():
    """A worker that is slow for 30 steps, then fast for 30, and so on: changes come further and further apart."""
    made = sharing()
    changes = []
    for turn in range(60):
        before = made.progress.committed
        changes += [before] * len(texts(train(made, 30, {2: 2.0} if turn % 2 == 0 else {})))
    assert 4 <= len(changes) <= 12, changes
    assert texts(train(sharing(), 400, {2: 1.45})) == [], "no straggler, no change"


def test_a_straggler_that_becomes_slower_gets_fewer_still():
    made = sharing(blocks=24)
    train(made, 40, {2: 2.0})
    assert shares(made) == [(10, 10, 4)] or shares(made) == [(9, 10, 5)]
    train(made, 100, {2: 6.0})
    assert shares(made)[0][2] == 2


def test_where_no_share_helps_one_line_says_so_and_it_is_replaced_as_today():
    made = sharing(blocks=3)
    found = train(made, 40, {2: 2.0})
    assert texts(found) == [
        "worker 2 takes 2.0 times as long as the others: whatever its share of the 3 blocks, a step takes as long as without it"
    ]
    assert [a for a in found if isinstance(a, ReportStraggler)] == [ReportStraggler(2, 2.0, 20, leaves=True)]
    assert made.membership.leaving == {2}
    alone = sharing(blocks=3, hires=False)
    found = train(alone, 200, {2: 2.0})
    assert len(texts(found)) == 1 and ReportStraggler(2, 2.0, 20) in found and not alone.membership.leaving


def test_where_there_is_no_other_share_a_straggler_is_replaced_as_today():
    """It has no replicas, or there are more replicas than blocks, so that one has none."""
    made = sharing(dp=1, pp=3)
    assert train(made, 20, {}) == []
    found = train(made, 40, {1: 2.0})
    assert found[0] == ReportStraggler(1, 2.0, 20, alone=True, leaves=True) and made.membership.leaving == {1}
    made = sharing(plan=ParallelPlan((StagePlan(0, 1, ((0,), (1,))), StagePlan(1, 2, ((0, 1),)))))
    assert train(made, 20, {}) == []
    found = train(made, 40, {1: 2.0})
    assert found[0].leaves and shares(made) == [(), ()], "as a shard of the second stage it has all blocks"
    made = sharing(dp=3, blocks=2)
    found = train(made, 40, {2: 2.0}, idle={0})
    assert found[0] == ReportStraggler(2, 2.0, 20, leaves=True) and made.membership.leaving == {2}


def test_a_straggler_that_holds_the_others_up_with_one_block_gets_that_first_and_is_asked_to_leave_then():
    made = sharing()
    found = train(made, 100, {2: 10.0})
    assert shares(made)[0][2] == 1
    assert [type(a) for a in found][:2] == [ReportStraggler, ReportShares]
    assert found[-2:] == [ReportStraggler(2, 10.0, 20, leaves=True), ClaimGeneration(2)]


def test_workers_that_need_other_connections_begin_a_new_generation_with_the_same_seats():
    made = sharing()
    found = train(made, 30, {2: 2.0}, fits=False)
    assert found[-1] == ClaimGeneration(2)
    assert made.planned.members == (0, 1, 2) and made.planned.plan.stages[0].share == (5, 5, 2)


def test_where_more_blocks_do_not_fit_into_memory_the_straggler_is_asked_to_leave():
    made = sharing()
    found = train(made, 40, {2: 2.0}, why="worker 0 (stage 0, replica 0) would need 9 MiB")
    assert texts(found) == ["shares stay as they are: worker 0 (stage 0, replica 0) would need 9 MiB"]
    assert shares(made) == [()] and made.membership.leaving == {2}


def test_a_new_generation_begins_with_fewer_blocks_for_who_is_known_to_be_slow():
    made = sharing(dp=4, hires=False)
    train(made, 30, {3: 2.0})
    assert shares(made) == [(3, 3, 4, 2)]
    assert [plan.stages[0].share for plan in plans_after_one_loss(made)] == [(5, 5, 2), ()], "of another worker, of this one"
    lose(made, 0)
    assert made.membership.members == (1, 2, 3) and shares(made) == [(5, 5, 2)]
    lose(made, 3)
    assert made.membership.members == (1, 2) and shares(made) == [()]


def lose(machine, worker):
    """A worker dies, and the others go on."""
    generation = machine.membership.generation + 1
    machine.handle(CallFailed("lost", WorkerLost("it is gone", cure="none"), worker), 1.0)
    left = [other for other in machine.membership.members if other != worker]
    done = machine.progress.committed
    stands = [WorkerStatusReported(generation, WorkerStatus(other, done)) for other in left]
    for event in (GenerationClaimed(generation, True), *stands, *(PlanAdopted(other, generation) for other in left)):
        machine.handle(event, 1.0)


def test_a_job_that_reports_stragglers_keeps_its_shares():
    assert texts(train(sharing(rebalance_stragglers=False), 100, {2: 2.0})) == []
    assert texts(train(sharing(elastic=False), 100, {2: 2.0})) == []
