"""Who takes which seat of a plan with shards after a loss: replicas that are left go on, on one node where that can be."""

from helpers.machine_steps import begin, first_generation

from raypar.elastic.actions import AdoptPlan, ChoosePlan
from raypar.elastic.events import (
    CallFailed,
    GenerationClaimed,
    StepEmitted,
    StepJournalled,
    StepReported,
    WorkerJoined,
    WorkerStatusReported,
)
from raypar.elastic.generation_guard import WorkerStatus
from raypar.elastic.run_machine import RunMachine
from raypar.elastic.run_policy import RunPolicy
from raypar.elastic.seating import WorkerPlaces, match_workers_to_seats
from raypar.errors import WorkerLost
from raypar.plan import ModelOutline, ParallelPlan
from raypar.plan.ownership import Ownership
from raypar.plan.shard_ranges import TensorCut, even_ranges_by_shard

OUTLINE = ModelOutline(
    (), elements=({"a": 8}, {"b": 8}), shardings={2: {name: TensorCut(0, 4, even_ranges_by_shard(4, 2)) for name in "ab"}}
)


def held(plan):
    return Ownership(plan, OUTLINE).held


def after(plan, dead, nodes=None, new=()):
    """What is decided once all others stand."""
    machine = RunMachine(RunPolicy(workers=plan.world, job_steps=9, elastic=True, grow=False), plan=plan, held_pieces=held)
    machine.membership.nodes = nodes or {}
    events = [
        *first_generation(machine),
        *map(WorkerJoined, new),
        *(CallFailed("lost", WorkerLost("died"), w) for w in dead),
        GenerationClaimed(2, True),
    ]
    pieces = held(plan)
    left = [w for w in range(plan.world) if w not in dead]
    events += [WorkerStatusReported(2, WorkerStatus(w, 0, pieces=pieces[w])) for w in left] + [
        WorkerStatusReported(2, WorkerStatus(w)) for w in new
    ]
    return [decision.action for event in events for decision in machine.handle(event, 0.0)][-1]


def test_the_replicas_that_are_left_go_on_and_nothing_moves():
    order = after(ParallelPlan.mesh(dp=2, pp=2, tp=2, layers=2), [5])
    assert isinstance(order, AdoptPlan) and not order.moves
    assert order.plan == ParallelPlan.of([2, 1], [2, 2], layers=2) and order.members[:4] == (0, 1, 2, 3)
    assert order.members[4:] == (4, 7) or order.members[4:] == (6, 7)


def test_shards_of_two_replicas_make_one_that_is_whole():
    order = after(ParallelPlan.mesh(dp=2, tp=2, layers=2), [0, 3])
    assert (order.plan, order.members, order.moves) == (ParallelPlan.mesh(tp=2, layers=2), (2, 1), ())


def test_uneven_shards_keep_their_numbers():
    """A plan of the planner's has as many in every stage, and so other bits."""
    order = after(ParallelPlan.of([2, 2], [1, 2], layers=2), [0])
    assert [(s.replicas, s.shards) for s in order.plan.stages] == [(1, 1), (2, 2)] and not order.moves


def test_where_a_shard_has_nobody_left_the_planner_is_asked():
    assert after(ParallelPlan.mesh(dp=2, tp=2, layers=2), [0, 2]) == ChoosePlan(2, 2)


def test_a_worker_that_waits_takes_the_seat_of_the_shard_that_was_lost():
    order = after(ParallelPlan.mesh(dp=2, tp=2, layers=2), [1], new=[4])
    assert order.plan == ParallelPlan.mesh(dp=2, tp=2, layers=2) and order.members == (0, 3, 2, 4)
    assert [(move.source, move.dest) for move in order.moves] == [(3, 4)] * 2


def test_those_on_one_node_are_put_together():
    nodes = {0: "x", 1: "x", 2: "y", 3: "y", 4: "y", 5: "x"}
    order = after(ParallelPlan.mesh(dp=2, tp=2, layers=2), [1], nodes)
    assert order.members == (2, 3)
    assert after(ParallelPlan.mesh(dp=2, tp=2, layers=2), [1], nodes, new=[4, 5]).members in [(0, 5, 2, 3), (2, 3, 0, 5)]


def test_a_new_plan_puts_the_shards_of_a_replica_on_one_node_and_replicas_on_several():
    plan, nodes = ParallelPlan.mesh(dp=2, tp=2), {0: "x", 1: "y", 2: "x", 3: "y"}
    seats = [(role.grid, role.replica) for (role,) in plan.roles]
    members = match_workers_to_seats([()] * 4, {}, range(4), WorkerPlaces(nodes), plan.compute_keys, seats)
    assert [nodes[w] for w in members] in [list("xxyy"), list("yyxx")]
    found = match_workers_to_seats([()] * 2, {}, [0, 1, 2, 3], WorkerPlaces(nodes), plan.compute_keys[:2], seats[:2])
    assert found in [(0, 2), (2, 0), (1, 3), (3, 1)]


def test_stragglers_are_compared_with_replicas_of_the_same_shard():
    """Shards of a ragged split have unequal work."""
    plan = ParallelPlan.mesh(dp=2, tp=2, layers=2)
    machine = RunMachine(RunPolicy(workers=4, job_steps=9, straggler_steps=3), plan=plan)
    begin(machine)
    actions = []
    for step in range(3):
        for worker, busy_s in enumerate((0.01, 0.05, 0.04, 0.05)):
            event = StepReported((worker,), step, 0.1, machine.membership.generation, busy_s={worker: busy_s})
            actions += [decision.action for decision in machine.handle(event, 0.1 * step)]
        for event in (StepJournalled(step), StepEmitted(step)):
            machine.handle(event, 0.1 * step)
    assert [action.worker for action in actions if hasattr(action, "slowdown")] == [2]
