"""Workers that compute slower than those who do the same, for long: told once, and when it is over; replaced if asked for."""

import random
import statistics

from helpers.machine_steps import begin

from raypar.elastic.actions import ClaimGeneration, ReportStraggler
from raypar.elastic.events import StepEmitted, StepJournalled, StepReported, StopRequested
from raypar.elastic.run_machine import RunMachine
from raypar.elastic.run_policy import RunPolicy
from raypar.elastic.stragglers import StragglerWatch, median_of_others
from raypar.plan import ParallelPlan

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
