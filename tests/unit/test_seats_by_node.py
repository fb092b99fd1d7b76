"""Copies of a stage sit on different nodes where that moves nothing more."""

import random
from itertools import combinations, permutations

import pytest
from helpers.machine_steps import begin

from raypar.elastic.actions import AdoptPlan, StartWorkers
from raypar.elastic.events import (
    CallFailed,
    GenerationClaimed,
    PlanAdopted,
    StepEmitted,
    StepJournalled,
    StepReported,
    Tick,
    WorkerJoined,
    WorkerStatusReported,
)
from raypar.elastic.generation_guard import WorkerStatus
from raypar.elastic.run_machine import RunMachine
from raypar.elastic.run_policy import RunPolicy
from raypar.elastic.seating import WorkerPlaces, free_seats_for_on_demand_workers, match_workers_to_seats
from raypar.errors import PlanError, WorkerLost
from raypar.plan import ParallelPlan
from raypar.plan.pieces import Piece, count_shared_elements

A, B = (Piece("a", 0, 8),), (Piece("b", 0, 8),)
STAGES = [A, A, B, B]
POSITIONS = [0, 0, 1, 1]


def shared(members, nodes, positions=POSITIONS):
    """Pairs of copies of a stage that would die with one node."""
    return sum(
        positions[i] == positions[j] and nodes[members[i]] == nodes[members[j]] for i, j in combinations(range(len(members)), 2)
    )


def moved(members, need, have):
    return sum(p.size for pieces in need for p in pieces) - sum(
        count_shared_elements(pieces, have.get(worker, ())) for worker, pieces in zip(members, need, strict=True)
    )


def test_seats_go_to_those_who_hold_most_of_what_they_need():
    a, b = (Piece("a", 0, 8),), (Piece("b", 0, 8),)
    assert match_workers_to_seats([a, b], {5: b, 7: (Piece("a", 0, 3),)}, [5, 6, 7]) == (7, 5)
    with pytest.raises(PlanError, match="2 seats but 1 workers"):
        match_workers_to_seats([a, b], {}, [5])


def test_new_workers_take_seats_beside_copies_on_other_nodes():
    nodes = {0: "x", 1: "y", 2: "x", 3: "y"}
    assert match_workers_to_seats(STAGES, {0: A, 1: B}, [0, 1, 2, 3], WorkerPlaces(nodes), POSITIONS) == (0, 3, 1, 2)
    assert match_workers_to_seats(STAGES, {0: A, 1: B}, [0, 1, 2, 3]) == (0, 2, 1, 3), "without nodes: the lowest numbers"


def test_an_idle_worker_is_taken_instead_of_one_that_would_share_the_node():
    nodes = {0: "x", 1: "x", 2: "y"}
    assert match_workers_to_seats([A, A], {0: A}, [0, 1, 2], WorkerPlaces(nodes), [0, 0]) == (0, 2)


def test_nobody_who_holds_a_stage_leaves_it_for_the_sake_of_nodes():
    nodes = {0: "x", 1: "x", 2: "y", 3: "y"}
    assert match_workers_to_seats(STAGES, {0: A, 1: A, 2: B, 3: B}, [0, 1, 2, 3], WorkerPlaces(nodes), POSITIONS) == (
        0,
        1,
        2,
        3,
    )


@pytest.mark.parametrize("seed", range(60))
def test_moves_are_the_fewest_and_nodes_are_shared_no_more_than_those_allow(seed: int):
    """Against all assignments; workers hold one stage or nothing, as after a loss, and are anywhere."""
    dice = random.Random(seed)
    workers = list(range(dice.choice([4, 5])))
    nodes = {w: dice.choice("xyz") for w in workers}
    have = {w: dice.choice([A, B]) for w in workers if dice.random() < 0.5}
    found = match_workers_to_seats(STAGES, have, workers, WorkerPlaces(nodes), POSITIONS)
    best = min((moved(m, STAGES, have), shared(m, nodes)) for m in permutations(workers, 4))
    assert len(set(found)) == 4 and (moved(found, STAGES, have), shared(found, nodes)) == best


def layout(plan):
    return tuple((A, B)[role.grid] for (role,) in plan.roles)


def test_a_lost_worker_is_replaced_by_one_that_does_not_share_the_node_of_the_copy_that_is_left():
    plan = ParallelPlan.mesh(dp=2, pp=2, layers=2)
    machine = RunMachine(RunPolicy(workers=4, job_steps=9, elastic=True, grow=False), plan=plan, held_pieces=layout)
    machine.membership.nodes = {0: "x", 1: "y", 2: "y", 3: "x", 4: "x", 5: "y"}
    begin(machine)
    events = [
        WorkerJoined(4),
        WorkerJoined(5),
        CallFailed("lost", WorkerLost("worker 1 died"), 1),
        GenerationClaimed(2, True),
    ]
    events += [
        WorkerStatusReported(2, WorkerStatus(w, 0 if w < 4 else None, pieces=(A, A, B, B, (), ())[w])) for w in (0, 2, 3, 4, 5)
    ]
    actions = [decision.action for event in events for decision in machine.handle(event, 0.0)]
    (order,) = [a for a in actions if isinstance(a, AdoptPlan)]
    assert order.members == (0, 5, 2, 3), "worker 4 is on worker 0's node"


def test_a_new_worker_takes_the_copy_in_another_zone_and_an_on_demand_worker_one_copy_of_every_stage():
    nodes, zones = {n: "abcd"[n] for n in range(4)}, {"a": "z1", "b": "z1", "c": "z2", "d": "z2"}
    members = match_workers_to_seats(STAGES, {}, [0, 1, 2, 3], WorkerPlaces(nodes, zones), POSITIONS)
    assert [{zones[nodes[w]] for w in pair} for pair in (members[:2], members[2:])] == [{"z1", "z2"}] * 2
    members = match_workers_to_seats(STAGES, {}, [0, 1, 2, 3], WorkerPlaces(nodes, {}, {2, 3}), POSITIONS)
    assert all({2, 3} & set(pair) for pair in (members[:2], members[2:]))
    members = match_workers_to_seats(STAGES, {0: A, 1: A, 2: B, 3: B}, [0, 1, 2, 3], WorkerPlaces(nodes, {}, {2, 3}), POSITIONS)
    assert members in ((2, 1, 0, 3), (3, 1, 2, 0)), "one of each stage moves for it, and no more"
    members = match_workers_to_seats(STAGES, {0: A, 2: A, 1: B, 3: B}, [0, 1, 2, 3], WorkerPlaces(nodes, {}, {2, 3}), POSITIONS)
    assert members == (0, 2, 1, 3), "nothing moves where a copy of each is safe"


def running_on_demand(on_demand, nodes=None, zones=None):
    """Two stages with two replicas: workers 0 and 1 hold the first, 2 and 3 the second. `on_demand`: those who are."""
    plan = ParallelPlan.mesh(dp=2, pp=2, layers=2)
    policy = RunPolicy(workers=4, job_steps=1000, elastic=True, standbys=1, on_demand=2, hires=True)
    machine = RunMachine(policy, plan=plan, held_pieces=layout)
    machine.hiring.on_demand.update(on_demand)
    machine.membership.nodes, machine.membership.zones = nodes or {}, zones or {}
    begin(machine)
    return machine


def orders(machine, *events, now_s=0.0):
    actions = [decision.action for event in events for decision in machine.handle(event, now_s)]
    return [action.members for action in actions if isinstance(action, AdoptPlan)]


def stands(generation, steps):
    pieces = {0: A, 1: A, 2: B, 3: B}
    return [WorkerStatusReported(generation, WorkerStatus(w, steps[w], pieces=pieces.get(w, ()))) for w in steps]


LOST_0 = CallFailed("lost", WorkerLost("worker 0 died"), 0)


def test_a_lost_on_demand_worker_is_replaced_by_an_on_demand_worker():
    machine = running_on_demand({0, 2, 5})
    joined = [WorkerJoined(4), WorkerJoined(5), LOST_0, GenerationClaimed(2, True)]
    assert orders(machine, *joined, *stands(2, {1: 0, 2: 0, 3: 0, 4: None, 5: None})) == [(1, 5, 2, 3)]
    machine = running_on_demand({0, 2, 5})
    lost_3 = CallFailed("lost", WorkerLost("worker 3 died"), 3)
    joined[2] = lost_3
    assert orders(machine, *joined, *stands(2, {0: 0, 1: 0, 2: 0, 4: None, 5: None})) == [(0, 1, 2, 4)], "it may be needed"


def test_a_lost_worker_is_replaced_by_one_in_another_zone_than_its_copy():
    nodes, zones = dict(enumerate("abcdef")), dict.fromkeys("abc", "z1") | dict.fromkeys("df", "z2") | {"e": "z1"}
    machine = running_on_demand((), nodes, zones)
    joined = [WorkerJoined(4), WorkerJoined(5), LOST_0, GenerationClaimed(2, True)]
    assert orders(machine, *joined, *stands(2, {1: 0, 2: 0, 3: 0, 4: None, 5: None})) == [(1, 5, 2, 3)]


def test_a_worker_on_a_spot_node_holds_the_seat_of_an_on_demand_worker_until_one_comes():
    machine = running_on_demand({0, 2})
    joined = [WorkerJoined(4), LOST_0, GenerationClaimed(2, True)]
    assert orders(machine, *joined, *stands(2, {1: 0, 2: 0, 3: 0, 4: None})) == [(1, 4, 2, 3)]
    actions = [d.action for w in (1, 2, 3, 4) for d in machine.handle(PlanAdopted(w, 2), 0.0)]
    reports = [StepReported((w,), 0, 0.3, generation=2) for w in (1, 2, 3, 4)]
    actions += [d.action for event in (*reports, StepJournalled(0), StepEmitted(0), Tick()) for d in machine.handle(event, 1.0)]
    assert [(a.workers, a.on_demand) for a in actions if isinstance(a, StartWorkers)] == [((5,), True)]
    machine.handle(WorkerJoined(5), 2.0)
    machine.handle(Tick(), 2.1)
    assert machine.planned.reason == "worker 4 gives its seat to an on-demand worker: the stage has no other"
    reports = [StepReported((w,), step, 0.3, generation=2) for step in (1, 2) for w in (1, 2, 3, 4)]
    steps = [*reports[:4], StepJournalled(1), StepEmitted(1), *reports[4:], GenerationClaimed(3, True)]
    assert orders(machine, *steps, *stands(3, dict.fromkeys((1, 2, 3), 3) | {4: 3, 5: None}), now_s=3.0) == [(1, 5, 2, 3)]
    for w in (1, 2, 3, 5):
        machine.handle(PlanAdopted(w, 3), 3.0)
    assert machine.membership.spares == {4} and machine.handle(Tick(), 3.1) == [] and machine.planned.reason is None


def test_shards_give_up_their_seats_together():
    plan = ParallelPlan.mesh(dp=2, tp=2, layers=2)
    first, second = plan.compute_keys[:2]
    at = {first: [0, 2], second: [1, 3]}
    assert free_seats_for_on_demand_workers(plan, at, idle := [4, 5], {4, 5}) == (2, 3)
    assert at == {first: [0], second: [1]} and idle == [4, 5, 2, 3]
    at = {first: [0, 2], second: [1, 3]}
    assert free_seats_for_on_demand_workers(plan, at, [4, 5], {4}) == (), "half a replica"
    assert free_seats_for_on_demand_workers(plan, at, [4, 5], {0, 1, 4, 5}) == (), "there is one"
