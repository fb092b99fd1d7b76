"""Nodes of a cluster die, hang, are drained under a running job; each is a raylet of its own on this machine."""

import os
import signal
from pathlib import Path

import psutil
import pytest
import ray
from helpers.node_loss import assert_undisturbed, worker_node
from helpers.trainee import Trainee, Undisturbed

from raypar.actors.ray_connection import connect_ray
from raypar.ray_compat.nodes import drain_node, list_live_nodes

LONG = ("steps=250", "elastic.min_workers=1", "plan.stages=2", "plan.replicas=2")


@pytest.fixture
def cluster():
    with connect_ray(None, 4, Path(__file__).parents[1], nodes=3) as connection:
        yield connection


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> Undisturbed:
    return Undisturbed.of(tmp_path_factory.mktemp("undisturbed"), *LONG)


@pytest.mark.chaos  # the default suite kills one with one worker in test_local_nodes.py
def test_a_node_dies_with_its_workers_and_the_others_go_on(cluster, tmp_path):
    trainee, undisturbed = Trainee(tmp_path, *LONG, "steps=60"), Undisturbed.of(tmp_path, "steps=60")

    def act(pids):
        node, workers = worker_node(trainee, cluster)
        trainee.hit = {m["worker"] for m in workers}
        os.kill(node.pid, signal.SIGKILL)

    trainee.result = trainee.run(act, at=20)
    assert_undisturbed(trainee, undisturbed)
    assert {event["worker"] for event in trainee.told("lost")} == trainee.hit
    first = trainee.told("generation")[0]
    assert set(first["workers"]) == {0, 1, 2, 3} - trainee.hit, "who was not there was not started again"


@pytest.mark.chaos
def test_a_node_that_freezes_with_its_workers_is_given_up(cluster, undisturbed, tmp_path):
    trainee = Trainee(tmp_path, *LONG)
    stopped = []

    def act(pids):
        node, workers = worker_node(trainee, cluster)
        stopped.extend([node.pid, *(m["pid"] for m in workers)])
        for pid in stopped:
            os.kill(pid, signal.SIGSTOP)

    try:
        trainee.result = trainee.run(act, at=20)
    finally:
        for pid in stopped:
            if psutil.pid_exists(pid):
                os.kill(pid, signal.SIGCONT)
    assert_undisturbed(trainee, undisturbed)


@pytest.mark.chaos  # the default suite drains one in test_local_nodes.py
def test_a_drained_node_is_left_without_a_step_done_again(cluster, undisturbed, tmp_path):
    trainee = Trainee(tmp_path, *LONG)

    def act(pids):
        node, workers = worker_node(trainee, cluster)
        trainee.hit = {m["worker"] for m in workers}
        named = next(n for n in list_live_nodes(cluster.address) if n.node == node.node)
        drain_node(cluster.address, named, 60.0, "maintenance")

    trainee.result = trainee.run(act, at=20)
    assert_undisturbed(trainee, undisturbed)
    assert {event["worker"] for event in trainee.told("draining")} == trainee.hit
    assert {event["worker"] for event in trainee.told("left")} == trainee.hit
    assert not trainee.told("lost")
    assert all(event["again"] == 0 for event in trainee.told("generation"))


@pytest.mark.chaos
def test_a_worker_that_gets_sigterm_hands_over_and_leaves(cluster, undisturbed, tmp_path):
    trainee = Trainee(tmp_path, *LONG)
    trainee.result = trainee.run(lambda pids: os.kill(pids[1], signal.SIGTERM), at=20)
    assert_undisturbed(trainee, undisturbed)
    assert [event["worker"] for event in trainee.told("left")] == [event["worker"] for event in trainee.told("draining")]
    assert not trainee.told("lost")


@pytest.mark.chaos
def test_a_node_that_joins_gets_the_workers_that_are_wanted(tmp_path):
    """Two nodes for four workers, one of them lost: the run waits for nobody, and grows when another node comes."""
    with connect_ray(None, 4, Path(__file__).parents[1], nodes=2) as cluster:
        from raypar.ray_compat.local_cluster import start_raylet

        trainee = Trainee(tmp_path, *LONG, "steps=500")
        late = []

        def act(pids):
            node, _ = worker_node(trainee, cluster)
            os.kill(node.pid, signal.SIGKILL)

        def grow():
            late.append(
                start_raylet(cluster.address, 3, 150 * 2**20, Path(ray._private.worker._global_node.get_temp_dir_path()))
            )

        try:
            trainee.result = trainee.run(act, at=20, then={60: grow})
        finally:
            for node in late:
                node.kill_all_processes(check_alive=False, allow_graceful=True, wait=True)
    assert trainee.result.end == "done", trainee.result.why
    assert len(trainee.members["members"]) == 4
    assert [len(event["workers"]) for event in trainee.told("generation")] == [2, 4]
