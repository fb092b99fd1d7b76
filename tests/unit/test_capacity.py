"""How many workers a run wants: the decision that an autoscaler would replace."""

from dataclasses import replace

import pytest

from raypar.elastic.desired_capacity import CapacityInputs, WorkerCountLimits, compute_desired_capacity, retry_pause_s

LIMITS = WorkerCountLimits(wanted=4, minimum=2, hires=True)


def view(members=4, spares=(), starting=(), placed=(), **more):
    """A plan with a seat for each of the members, whose numbers are 0, 1, ..."""
    there = CapacityInputs(frozenset(range(members)), frozenset(spares), frozenset(starting), frozenset(placed), seats=members)
    return replace(there, **({"available": members + len(spares)} | more))


def test_a_full_run_wants_nothing():
    decision = compute_desired_capacity(view(), LIMITS, 0.0)
    assert (decision.seats, decision.workers_to_start, decision.workers_lacking, decision.grow) == (4, 0, 0, False)
    assert decision.reason == "4 of 4 workers are there or on their way"


def test_missing_workers_are_started_and_those_on_their_way_count():
    decision = compute_desired_capacity(view(members=2, starting={5}), LIMITS, 0.0)
    assert decision.workers_to_start == 1 and decision.reason == "3 of 4 workers are there or on their way"
    assert compute_desired_capacity(view(members=2, spares={4}, starting={5}), LIMITS, 0.0).workers_to_start == 0


def test_standbys_are_started_beyond_the_wanted_number_and_get_no_seat():
    decision = compute_desired_capacity(view(spares={4}), replace(LIMITS, standbys=2), 0.0)
    assert (decision.workers_to_start, decision.seats) == (1, 4)


@pytest.mark.parametrize(
    "why, there, limits",
    [
        ("the job starts no workers", {}, {"hires": False}),
        ("the run has been asked to end", {"stopping": True}, {}),
        ("the last attempt has just failed", {"start_after_s": 5.1}, {}),
    ],
)
def test_nobody_is_started_where(why, there, limits):
    assert compute_desired_capacity(view(members=2, **there), replace(LIMITS, **limits), 5.0).workers_to_start == 0, why


def test_each_failed_start_doubles_the_pause_up_to_32_times():
    assert [retry_pause_s(LIMITS, failures) for failures in (0, 1, 2, 5, 6, 100)] == [5.0, 10.0, 20.0, 160.0, 160.0, 160.0]


def test_below_the_minimum_the_run_waits_for_those_that_are_lacking():
    decision = compute_desired_capacity(view(members=1), LIMITS, 0.0)
    assert (decision.workers_lacking, decision.reason) == (1, "1 worker is left, min_workers is 2")
    assert compute_desired_capacity(view(members=0), LIMITS, 0.0).reason == "0 workers are left, min_workers is 2"
    assert compute_desired_capacity(view(members=2), LIMITS, 0.0).workers_lacking == 0


def growing(members=2, spares=(4,), **more):
    return view(members, spares, **({"grow_at_s": 10.0, "may_grow": True} | more))


def test_a_spare_waits_for_others_that_are_on_their_way():
    assert not compute_desired_capacity(growing(placed={5}), LIMITS, 9.9).grow
    assert compute_desired_capacity(growing(placed={5}), LIMITS, 10.0).grow, "not for ever"
    assert compute_desired_capacity(growing(), LIMITS, 0.0).grow, "nobody is on the way"
    decision = compute_desired_capacity(growing(spares={4, 5}, placed={6}), LIMITS, 0.0)
    assert decision.grow and decision.seats == 4, "for more there is no room"
    assert decision.reason == "workers 4, 5 wait for a seat"
    assert compute_desired_capacity(growing(members=1, placed={5}), LIMITS, 0.0).grow, "a worker that is alone waits for nobody"


@pytest.mark.parametrize(
    "why, there, limits",
    [
        ("the job does not grow", {}, {"grows": False}),
        ("all seats that are wanted are there", {"members": 4}, {}),
        ("a change is under way already", {"may_grow": False}, {}),
        ("the run has been asked to end", {"stopping": True}, {}),
        ("the spares have been considered", {"grow_at_s": None}, {}),
        ("nobody waits", {"spares": ()}, {}),
    ],
)
def test_no_larger_plan_is_asked_for_where(why, there, limits):
    assert not compute_desired_capacity(growing(**there), replace(LIMITS, **limits), 100.0).grow, why


def giving(members=4, spares=(), **more):
    return view(members, spares, **({"may_release": True} | more))


def test_workers_beyond_what_helps_and_the_standbys_are_given_back_the_last_one_first():
    decision = compute_desired_capacity(giving(spares={4, 5, 6}), LIMITS, 0.0)
    assert decision.workers_to_release == (6, 5, 4) and decision.workers_to_start == 0
    assert compute_desired_capacity(giving(spares={4, 5, 6}), replace(LIMITS, standbys=2), 0.0).workers_to_release == (6,)
    assert compute_desired_capacity(giving(), LIMITS, 0.0).workers_to_release == ()


def test_what_the_planner_has_declined_is_given_back_and_not_asked_for_again():
    eight = replace(LIMITS, wanted=8)
    there = giving(spares={4, 5}, starting={6, 7}, placed={6}, useful=4)
    assert compute_desired_capacity(there, eight, 0.0).workers_to_release == (7, 6, 5, 4), "demand first, then processes"
    assert compute_desired_capacity(there, replace(eight, standbys=1), 0.0).workers_to_release == (7, 6, 5)
    after = compute_desired_capacity(giving(useful=4), eight, 1e6)
    assert (after.workers_to_start, after.workers_to_release) == (0, ())
    assert compute_desired_capacity(giving(members=3, useful=4), eight, 0.0).workers_to_start == 1, "a lost one is replaced"


@pytest.mark.parametrize(
    "why, there, limits",
    [
        ("the run does not train, or something else is under way", {"may_release": False}, {}),
        ("the job starts no workers", {}, {"hires": False}),
        ("the run has been asked to end: all are removed then", {"stopping": True}, {}),
        ("they may hold the only mirror snapshot", {"needed_spares": {4, 5}}, {}),
    ],
)
def test_nobody_is_given_back_where(why, there, limits):
    there = giving(spares={4, 5}, **there)
    assert compute_desired_capacity(there, replace(LIMITS, **limits), 0.0).workers_to_release == (), why


def test_a_replica_is_asked_for_and_given_back_whole():
    halves = replace(LIMITS, wanted=8, replica_size=2)
    groups = compute_desired_capacity(view(members=4, starting={4}), halves, 0.0).groups_to_start
    assert [group.workers for group in groups] == [2, 1], "the last one takes the place of a shard"
    pairs = {worker: {worker & ~1, worker | 1} for worker in range(4, 8)}
    there = giving(spares={4, 5, 6}, starting={7}, useful=4, asked_together=pairs)
    assert compute_desired_capacity(there, halves, 0.0).workers_to_release == (6, 7, 4, 5)
    odd = giving(spares={4, 5}, useful=5, asked_together=pairs)
    assert compute_desired_capacity(odd, halves, 0.0).workers_to_release == (), "of two that share a group one is useful"
    seated = replace(giving(spares={5}, useful=4, asked_together=pairs), members=frozenset({0, 1, 2, 4}))
    assert compute_desired_capacity(seated, halves, 0.0).workers_to_release == (), "the group of a member stays"


def test_the_first_workers_that_are_missing_are_asked_for_on_demand_nodes():
    safe = replace(LIMITS, on_demand=2)
    groups = compute_desired_capacity(view(members=1, on_demand={0, 9}), safe, 0.0).groups_to_start
    assert [group.on_demand for group in groups] == [True, False, False], "worker 9 is gone"
    assert not any(g.on_demand for g in compute_desired_capacity(view(members=2, on_demand={0, 1}), safe, 0.0).groups_to_start)
