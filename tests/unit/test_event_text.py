"""What the driver tells of workers and generations."""

import pytest

from raypar.actors import worker_and_generation_events
from raypar.actors.node_loss import NodeLossTracker
from raypar.elastic.actions import AdoptPlan, ReportStraggler
from raypar.plan import ParallelPlan
from raypar.plan.pieces import Piece, PieceMove

MOVES = (PieceMove(0, 4, Piece("w", 0, 1500)), PieceMove(1, 4, Piece("b", 0, 10)))
WHO = {"worker": 3, "node": "0a1b2c3d", "pid": 77, "host": "10.0.0.1"}


def order(done: int = 7, **more) -> AdoptPlan:
    return AdoptPlan(2, ParallelPlan.mesh(dp=2), (0, 4), (1,), done, MOVES, **more)


@pytest.mark.parametrize(
    "given, state, text",
    [
        ({}, "live", "2 workers, 1 stage x 2 replicas; 1,510 parameters and their optimizer state move"),
        (
            {"from_mirror": True},
            "cut",
            "the last copy was lost, so all go back to the mirror's cut after 7 steps; 1,510 parameters",
        ),
        ({"from_checkpoint": True}, "checkpoint", "so all begin again from the checkpoint after 7 steps"),
        ({"from_checkpoint": True, "done": 0}, "beginning", "so all begin again from the initial weights"),
    ],
)
def test_a_new_generation_says_where_its_state_comes_from(given, state, text):
    facts = worker_and_generation_events.generation_facts(order(**given), "1f1b")
    assert text in worker_and_generation_events.describe_generation(order(**given))
    assert facts["state"] == state
    assert (facts["workers"], facts["moved_elements"], facts["step"]) == ([0, 4], 1510, given.get("done", 7))


def test_shards_are_told_by_layer_whatever_the_stages():
    uniform = ParallelPlan.mesh(dp=2, pp=2, tp=2, layers=4)
    assert worker_and_generation_events.format_shards(uniform) == "2"
    assert worker_and_generation_events.format_shards(ParallelPlan.of((1, 1, 1), (2, 1, 2), layers=4)) == "2/1/2"
    assert uniform.shards_by_layer == ParallelPlan.mesh(tp=2, layers=4).shards_by_layer == (2, 2, 2, 2)
    assert worker_and_generation_events.generation_facts(order(), "1f1b")["shards"] == "1"


def test_steps_that_are_executed_again_are_told_only_where_there_are_any():
    assert worker_and_generation_events.recovery_finished_text(order(), 0.5, 0).endswith("after 0.50 s")
    said = worker_and_generation_events.recovery_finished_text(order(), 0.5, 3)
    assert said.endswith("after 0.50 s; 3 steps are executed again")


def test_a_worker_that_is_lost_before_it_has_started_has_no_node():
    assert worker_and_generation_events.worker_lost_event("worker 3 (stage 1)", WHO, "it died").text == (
        "worker 3 (stage 1) (worker 3, node 0a1b2c3d, pid 77) is lost: it died"
    )
    facts = {"kind": "lost", "worker": 3, "coordinate": "worker 3", "why": "it died"}
    assert worker_and_generation_events.worker_lost_event("worker 3", {"worker": 3}, "it died").facts() == facts | {
        "text": "worker 3 (worker 3) is lost: it died"
    }


@pytest.mark.parametrize(
    "found, text",
    [
        ({}, "takes 2.0 times as long as its replicas for 20 steps"),
        ({"alone": True}, "takes 2.0 times as long as in its first steps for 20 steps"),
        ({"leaves": True}, "takes 2.0 times as long as its replicas for 20 steps; it is asked to leave"),
        ({"recovered": True}, "is as fast as its replicas again"),
    ],
)
def test_a_straggler_is_named_with_its_place(found, text):
    coordinate = ParallelPlan.mesh(dp=2, pp=2, layers=2).coordinate(3)
    told = worker_and_generation_events.straggler_text(ReportStraggler(3, 2.04, 20, **found), coordinate, WHO)
    assert told == f"worker 3 (stage 1, replica 1, node 0a1b2c3d) {text}"


def test_who_hangs_is_told_differently_from_who_is_dead():
    assert (
        worker_and_generation_events.describe_why_worker_given_up("did not answer")
        == "did not answer (it hangs, or cannot be reached); its process is killed"
    )
    assert worker_and_generation_events.describe_why_worker_given_up("its state differs").endswith("its process is killed")


def test_a_node_is_told_as_lost_once_all_its_workers_are_lost_together():
    fallen, node = NodeLossTracker(), "855ce93100ff"
    assert fallen.lost(0, node, [3], False, 10.0) is None, "another is still there"
    told = fallen.lost(3, node, [], False, 11.0)
    assert told is not None and told.facts() == {
        "kind": "node",
        "text": "no worker is left on node 855ce931: workers 0, 3 were lost together",
        "node": "855ce931",
        "workers": [0, 3],
    }
    assert fallen.lost(4, node, [], False, 12.0) is None, "one alone may have died of itself"
    assert fallen.lost(5, node, [], False, 60.0) is None
    said = fallen.lost(6, node, [], True, 90.0)
    assert said is not None and said.text == "node 855ce931 is lost, with worker 6"


def test_workers_of_a_node_between_whose_losses_training_went_on_were_not_lost_together():
    fallen, node = NodeLossTracker(), "855ce93100ff"
    assert fallen.lost(0, node, [3], False, 10.0) is None
    fallen.note_recovery(11.5)
    assert fallen.lost(3, node, [], False, 13.0) is None
    fallen.note_recovery(13.5)
    told = fallen.lost(4, node, [], True, 14.0)
    assert told is not None and told.workers == [4], "here Ray says that the node has died"


def test_a_node_that_ray_finds_dead_later_is_told_then_with_whom_it_took_along():
    fallen, node = NodeLossTracker(), "855ce93100ff"
    assert fallen.lost(0, node, [], False, 10.0) is None
    told = fallen.died(node, 24.0)
    assert told is not None and told.text == "node 855ce931 is lost, with worker 0"
    assert fallen.died(node, 25.0) is None
    fallen.lost(1, node, [], False, 100.0)
    assert fallen.died(node, 900.0) is None, "that worker was lost long before its node"
