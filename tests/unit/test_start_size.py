"""With how many workers a run begins, and when; what it asks of nodes; who gets which seat then."""

from dataclasses import replace

import pytest

from raypar.elastic.desired_capacity import StartInputs, StartLimits, decide_start, least_workers_at_start
from raypar.elastic.placement_constraints import PlacementConstraints, is_label_selector, match_labels
from raypar.elastic.seating import WorkerPlaces, spread_replicas_over_nodes
from raypar.plan import ParallelPlan

LIMITS = StartLimits(wanted=4, least=1, grow_after_s=5.0, wait_s=300.0)


def step(placed, limits=LIMITS, **more):
    return decide_start(StartInputs(placed, **more), limits).step


def test_a_run_begins_at_once_when_all_of_its_workers_have_a_place():
    assert step(4) == step(5, limits=replace(LIMITS, least=4)) == "begin"


def test_a_run_begins_small_when_no_more_have_come_for_a_while_and_a_plan_fits():
    assert step(2, quiet_s=4.9) == "wait"
    assert step(2, quiet_s=5.0) == "ask_planner"
    assert step(2, quiet_s=5.0, fits=True) == "begin"
    assert step(2, quiet_s=50.0, fits=False) == "wait"
    assert (
        decide_start(StartInputs(2, quiet_s=5.0), LIMITS).reason
        == "2 of 4 workers have a place, and for 5.0 s no more have got one"
    )


def test_below_the_least_number_it_waits_up_to_its_deadline():
    two = replace(LIMITS, least=2)
    assert step(1, two, quiet_s=100.0) == "wait"
    assert step(1, two, quiet_s=300.0, waited_s=300.0) == "too_late"
    assert step(2, two, quiet_s=0.1, waited_s=300.0, fits=True) == "begin", "at the deadline with what there is"
    assert step(2, two, waited_s=300.0, fits=False) == "too_late"
    assert step(3, replace(LIMITS, least=4), quiet_s=100.0) == "wait", "not elastic: it waits for all"


def test_what_no_node_can_hold_is_an_error_only_if_the_run_can_never_begin():
    assert step(0, infeasible=1) == step(0, infeasible=3) == "wait"
    assert step(0, infeasible=4) == "impossible"
    assert step(3, replace(LIMITS, least=4), infeasible=1) == "impossible"
    assert step(0, replace(LIMITS, least=2), infeasible=3) == "impossible"


def test_workers_that_must_be_on_demand_are_waited_for():
    assert step(2, quiet_s=60.0, fits=True, on_demand_lacking=1) == "wait"
    assert step(2, quiet_s=60.0, fits=True, on_demand_lacking=1, waited_s=300.0) == "too_late"
    assert step(2, quiet_s=60.0, infeasible=1, on_demand_lacking=1, on_demand_infeasible=True) == "impossible"


def test_the_least_number_is_one_of_whole_replicas_with_the_jobs_shards():
    plan = ParallelPlan.mesh(dp=2, pp=2, tp=2, layers=4)
    assert [least_workers_at_start(plan, least, 0) for least in (1, 2, 3, 8)] == [2, 2, 4, 8]
    assert least_workers_at_start(ParallelPlan.mesh(pp=3, layers=3), 2, 0) == 2
    assert least_workers_at_start(ParallelPlan.of([1, 1], shards=[1, 2], layers=2), 1, 0) == 3, "results depend on shards"
    assert least_workers_at_start(plan.with_virtual_shards(4), 1, 4) == 1, "and here on virtual shards alone"


# -- seats of a first plan ------------------------------------------------------------------------------------------------


def seated(plan, nodes, zones=None, on_demand=(), size=1):
    groups = [tuple(range(first, first + size)) for first in range(0, len(nodes) * size, size)]
    places = WorkerPlaces({n: node for group, node in zip(groups, nodes, strict=True) for n in group}, zones or {}, on_demand)
    return spread_replicas_over_nodes(plan, places, groups)


GRID = ParallelPlan.mesh(dp=2, pp=2, layers=2)


def test_replicas_of_a_stage_are_spread_over_nodes():
    assert seated(GRID, "aabb") == (0, 2, 1, 3)
    assert seated(GRID, "aaaa") == (0, 1, 2, 3)
    assert seated(ParallelPlan.mesh(dp=2, layers=2), "aab") == (0, 2), "one of three gets no seat"


def test_replicas_of_a_stage_are_spread_over_zones_before_nodes():
    zones = {"a": "z1", "b": "z1", "c": "z2", "d": "z2"}
    members = seated(GRID, "abcd", zones)
    assert [{zones["abcd"[w]] for w in members[i : i + 2]} for i in (0, 2)] == [{"z1", "z2"}] * 2


def test_the_shards_of_a_replica_stay_together():
    plan = ParallelPlan.mesh(dp=2, pp=2, tp=2, layers=2)
    assert seated(plan, "aabb", size=2) == (0, 1, 4, 5, 2, 3, 6, 7)


def test_replicas_with_different_numbers_of_shards_get_the_groups_of_their_size():
    plan = ParallelPlan.of([1, 1], shards=[2, 1], layers=2)
    places = WorkerPlaces({0: "b", 1: "b", 2: "a"})
    assert spread_replicas_over_nodes(plan, places, [(0, 1), (2,)]) == (0, 1, 2)


def test_on_demand_nodes_get_one_copy_of_every_stage():
    members = seated(GRID, "abcd", on_demand={1, 3})
    assert {members[0], members[2]} == {1, 3}, "the first replicas"
    assert set(seated(GRID, "abcd", on_demand={2})) == {0, 1, 2, 3} and seated(GRID, "abcd", on_demand={2})[0] == 2


# -- what is asked of a node ------------------------------------------------------------------------------------------------


def test_a_bundle_and_its_labels():
    spot = PlacementConstraints(
        gpus=1, accelerator_type="H100", label_selector={"market": "spot", "zone": "!in(c,d)"}, on_demand=1
    )
    assert spot.bundle == {"CPU": 1, "GPU": 1, "accelerator_type:H100": 0.001}
    assert spot.selector() == {"market": "spot", "zone": "!in(c,d)"}
    assert spot.selector(True, {"b", "a"}) == {
        "market": "spot",
        "zone": "!in(c,d)",
        "ray.io/market-type": "on-demand",
        "ray.io/node-id": "!in(a,b)",
    }
    assert PlacementConstraints().selector() == {} and PlacementConstraints().bundle == {"CPU": 1}
    assert PlacementConstraints(label_selector={"market": "spot"}).describe(2) == "2 x {CPU: 1} with market=spot on one node"


def test_labels_are_compared_as_ray_does():
    labels = {"market": "spot", "zone": "a"}
    fits = [{}, {"market": "spot"}, {"zone": "in(a, b)"}, {"zone": "!in(b,c)"}, {"other": "!x"}, {"market": "!on-demand"}]
    assert all(match_labels(labels, one) for one in fits)
    assert not any(match_labels(labels, one) for one in [{"market": "x"}, {"zone": "!a"}, {"zone": "in(b)"}, {"other": "x"}])


def test_a_node_that_is_busy_could_hold_a_worker_and_one_that_is_too_small_could_not():
    pair, room = PlacementConstraints(label_selector={"market": "spot"}), {"CPU": 2.0}
    assert pair.fits_node(room, {"market": "spot"}, 2, False) and not pair.fits_node(room, {"market": "spot"}, 3, False)
    assert not pair.fits_node(room, {}, 1, False)
    assert pair.fits_node(room, {"market": "spot"}, 1, False, already=1), "the rest belongs to others"
    assert not pair.fits_node(room, {"market": "spot"}, 1, False, already=2), "ours stay"


@pytest.mark.parametrize("label, value", [("market", "spot"), ("ray.io/zone", "!in(a, b)"), ("a", "!b"), ("a", "in(b)")])
def test_selectors_that_ray_takes(label, value):
    assert is_label_selector(label, value)


@pytest.mark.parametrize(
    "label, value", [("", "x"), ("a b", "x"), ("a", ""), ("a", "in()"), ("a", "!!b"), ("a", "in(a,"), ("/a", "b")]
)
def test_selectors_that_ray_refuses(label, value):
    assert not is_label_selector(label, value)
