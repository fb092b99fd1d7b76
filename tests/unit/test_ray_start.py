"""A Ray that does not start, cannot be joined or has no GPU is one clear error, whatever Ray itself raises."""

import json
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import ray
from helpers.tiny_job import write_job
from ray.exceptions import AuthenticationError, RayTaskError

from raypar.actors import driver_client
from raypar.actors import local_nodes as nodes
from raypar.actors.cluster_info import ClusterCapacity, require_capacity, require_processor_for_ray_data
from raypar.actors.first_placement import (
    impossible_placement_error,
    make_groups,
    placement_timeout_error,
    placement_wait_text,
)
from raypar.actors.ray_connection import join_cluster
from raypar.cli import main
from raypar.elastic.desired_capacity import StartInputs, StartLimits
from raypar.elastic.placement_constraints import PlacementConstraints
from raypar.elastic.run_policy import RunPolicy
from raypar.errors import ClusterError
from raypar.plan import ParallelPlan
from raypar.ray_compat.autoscaler import autoscaler_has_node_types
from raypar.ray_compat.local_cluster import without_idle_ray_processes
from raypar.ray_compat.ray_log_filter import without_autoscaler_lines


@pytest.mark.parametrize("error", [Exception("The current node timed out during startup. This\ncould"), OSError("no memory")])
def test_a_second_local_node_that_does_not_start_in_time_is_one_clear_error(error, monkeypatch, tmp_path):
    """Ray raises a bare `Exception`; the nodes that did start are ended."""
    from ray._private import worker

    ended = []
    process = SimpleNamespace(pid=7, wait=lambda: None)
    node = SimpleNamespace(node_id="ab", gcs_address="here:1", all_processes={"raylet": [SimpleNamespace(process=process)]})
    node.kill_all_processes = lambda **how: ended.append(node)

    to_start = [node]

    def raylet(*given):
        if not to_start:
            raise error
        return to_start.pop()

    monkeypatch.setattr(worker, "_global_node", node)
    monkeypatch.setattr(nodes, "start_raylet", raylet)
    with pytest.raises(ClusterError) as found, nodes.start_local_nodes(4, 2, 10**8, tmp_path):
        pass
    assert found.value.what == f"local node 3 of 4 did not start: {str(error).splitlines()[0]}"
    assert "--local-nodes" in found.value.cure and ended == [node]


NAME = "a" * 56
STATUS = {"autoscaler_report": {"active_nodes": {f"node_{NAME}": 1}, "idle_nodes": None, "pending_launches": {}}, "time": 1.0}


@pytest.mark.parametrize(
    "changed, grows",
    [
        ({}, False),
        ({"active_nodes": {"ray.head.default": 1}}, True),
        ({"active_nodes": {}, "idle_nodes": {"head": 1}}, True),
        ({"active_nodes": {}, "pending_launches": {"small": 2}}, True),
        ({"active_nodes": {"node_small": 1}}, True),
        ({"active_nodes": {}}, False),
    ],
)
def test_an_autoscaler_is_known_by_the_node_types_that_somebody_has_defined(changed, grows):
    """Every head has a monitor; without a configuration it makes up a type for each node and only reads."""
    status = {**STATUS, "autoscaler_report": STATUS["autoscaler_report"] | changed}
    assert autoscaler_has_node_types(json.dumps(status).encode()) is grows


@pytest.mark.parametrize("status", [None, b"", b"{", b"{}", b'{"autoscaler_report": null}'])
def test_where_there_is_no_status_there_is_no_autoscaler(status):
    assert not autoscaler_has_node_types(status)


def test_more_workers_than_there_are_is_refused_only_where_nothing_grows():
    """An autoscaler of Ray 2.60 does not say how far it goes."""
    has = ClusterCapacity(nodes=1, cpus=1, free_cpus=1, max_cpus=None)
    with pytest.raises(ClusterError, match=r"the plan needs 4 workers .* but the cluster has 1 CPU .* no autoscaler adds any"):
        require_capacity(4, has)
    require_capacity(4, replace(has, may_add_nodes=True))
    require_capacity(4, replace(has, may_add_nodes=True), gpus=1)
    with pytest.raises(ClusterError, match="its autoscaler stops at 3"):
        require_capacity(4, replace(has, may_add_nodes=True, max_cpus=3))


def test_workers_that_leave_no_processor_to_ray_data_are_refused_before_the_run():
    has = ClusterCapacity(nodes=1, cpus=4, free_cpus=4, max_cpus=None)
    says = (
        r"tasks that compute its rows need a CPU, and of the 4 CPUs of the cluster 4 workers of 1 CPU each leave none\n  cure: "
    )
    with pytest.raises(ClusterError, match=says + r"let the run have at most 3 workers, .*add a node; .*write_parquet"):
        require_processor_for_ray_data(4, has)
    require_processor_for_ray_data(3, has)
    require_processor_for_ray_data(4, replace(has, may_add_nodes=True))
    require_processor_for_ray_data(4, replace(has, may_add_nodes=True, max_cpus=5))
    with pytest.raises(
        ClusterError, match=r"of the 1 CPU of the cluster 1 worker of 1 CPU each leave none\n  cure: add a node"
    ):
        require_processor_for_ray_data(1, replace(has, cpus=1))


def test_what_is_waited_for_is_said_and_at_the_end_why_it_was_in_vain():
    has = ClusterCapacity(nodes=1, cpus=1, free_cpus=0, max_cpus=None, may_add_nodes=True)
    all_of_them, some = StartLimits(4, 4, 5.0, 300.0), StartLimits(4, 1, 5.0, 300.0)
    assert (
        placement_wait_text(StartInputs(1, waited_s=20.0), all_of_them, True)
        == "waiting for 3 more workers: the cluster has a place for 1 of 4, an autoscaler is running; 280 s left"
    )
    assert (
        placement_wait_text(StartInputs(3), all_of_them, False)
        == "waiting for 1 more worker: the cluster has a place for 3 of 4; 300 s left"
    )
    assert (
        placement_wait_text(StartInputs(0, infeasible=1), some, True)
        == "waiting for 4 more workers: the cluster has a place for 0 of 4, an autoscaler is running, but it adds no node for "
        "1 of them; the run begins with 1 or more when no others come for 5 s; 300 s left"
    )
    assert "; no plan for 2 workers fits into memory;" in placement_wait_text(StartInputs(2, fits=False), some, True)
    error = placement_timeout_error(1, all_of_them, has, False)
    assert "only 1 of 4 workers could be placed within 300 s" in error.what and "its autoscaler has added no more" in error.what
    assert "`ray status`" in error.cure and "max_workers" in error.cure
    assert "add nodes" in placement_timeout_error(1, all_of_them, replace(has, may_add_nodes=False), False).cure


def test_the_lines_of_rays_autoscaler_are_left_out_unless_the_user_has_asked_for_them(monkeypatch):
    from ray._private import ray_constants

    monkeypatch.delenv("RAY_SCHEDULER_EVENTS", raising=False)
    before = ray_constants.AUTOSCALER_EVENTS
    with without_autoscaler_lines():
        assert not ray_constants.AUTOSCALER_EVENTS
    assert before == ray_constants.AUTOSCALER_EVENTS
    monkeypatch.setenv("RAY_SCHEDULER_EVENTS", "1")
    with without_autoscaler_lines():
        assert before == ray_constants.AUTOSCALER_EVENTS


def test_what_no_node_can_hold_is_named_with_its_size_and_labels():
    groups = make_groups(ParallelPlan.mesh(dp=2, tp=2, layers=2))
    spot = PlacementConstraints(label_selector={"market": "spot"})
    error = impossible_placement_error(groups, spot, StartLimits(4, 2, 5.0, 300.0))
    assert "no node for 4 of 4 workers, and the run needs at least 2" in error.what
    assert error.what.endswith("2 x {CPU: 1} with market=spot on one node") and "max_workers" in error.cure


def test_a_plans_workers_are_asked_for_a_replica_at_a_time_the_first_replicas_on_demand():
    groups = make_groups(ParallelPlan.mesh(dp=2, pp=2, tp=2, layers=2), on_demand=3)
    assert [group.numbers for group in groups] == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert [group.on_demand for group in groups] == [True, False, True, False], "the first replica of each stage"
    assert not any(group.on_demand for group in make_groups(ParallelPlan.mesh(dp=2, layers=2)))


def test_a_job_for_gpus_on_a_machine_without_is_bad_input_before_ray_starts(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(Path(__file__).parents[1])
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    monkeypatch.setattr("raypar.actors.ray_connection.start_local_ray", lambda *given: pytest.fail("a Ray was started"))
    assert main(["train", str(write_job(tmp_path)), "--set", "device=gpu", "--set", "plan.replicas=1"]) == 2
    err = capfd.readouterr().err
    assert "the job asks for GPUs (device: gpu), and PyTorch finds none on this machine\n  cure: set device: cpu" in err
    assert err.count("error: ") == 1 and not (tmp_path / "runs").exists()


AT_EXIT = """
import atexit, os, signal, sys, time
from raypar.cli import main
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.argv = ["raypar"]
def second():
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(5)
atexit.register(second)
sys.exit(main())
"""


def test_a_ctrl_c_while_python_exits_ends_it_without_a_traceback():
    ended = subprocess.run([sys.executable, "-c", AT_EXIT], capture_output=True, text=True, timeout=30)
    assert ended.returncode == -signal.SIGINT
    assert "Traceback" not in ended.stderr and "KeyboardInterrupt" not in ended.stderr


def test_a_cluster_that_lets_nobody_in_may_have_a_token(monkeypatch, tmp_path):
    """Ray 2.60 says no more when the token is missing or another one."""

    def init(**given):
        raise ConnectionError("Failed to connect to Ray cluster at 192.0.2.2:6379")

    monkeypatch.setattr("raypar.actors.ray_connection.check_address_answers", lambda address: None)
    monkeypatch.setattr(ray, "init", init)
    with pytest.raises(ClusterError) as found, join_cluster("127.0.0.1:6379", tmp_path):
        pass
    assert found.value.what.endswith("at '127.0.0.1:6379': Failed to connect to Ray cluster at 192.0.2.2:6379")
    assert "if the cluster has a token, set RAY_AUTH_MODE=token" in found.value.cure


def test_a_driver_of_another_raypar_that_cannot_begin_is_one_clear_error(monkeypatch):
    def get(asked):
        raise RayTaskError("DriverActor.start", "a traceback", AttributeError("'Course' object has no attribute 'x'"))

    monkeypatch.setattr(driver_client.ray, "wait", lambda asked, timeout: (asked, []))
    monkeypatch.setattr(driver_client.ray, "get", get)
    remote = SimpleNamespace(remote=lambda *given: object())
    request = SimpleNamespace(policy=RunPolicy(workers=2, job_steps=9, elastic=True))
    with pytest.raises(
        ClusterError, match=r"the driver could not begin: AttributeError.*'Course' object has no attribute"
    ) as found:
        driver_client._follow(SimpleNamespace(start=remote, events=remote), request, print, [])
    assert "another raypar than this machine" in found.value.cure


@pytest.mark.parametrize("mode", ["no token was found", "the token is wrong"])
def test_a_cluster_that_asks_for_a_token_is_one_clear_error(mode, monkeypatch, tmp_path):
    def init(**given):
        raise AuthenticationError(mode)

    monkeypatch.setattr("raypar.actors.ray_connection.check_address_answers", lambda address: None)
    monkeypatch.setattr(ray, "init", init)
    with pytest.raises(ClusterError) as found, join_cluster("127.0.0.1:6379", tmp_path):
        pass
    assert found.value.what == f"the Ray cluster at '127.0.0.1:6379' lets nobody in without its token: {mode}"
    assert "RAY_AUTH_MODE=token" in found.value.cure and "RAY_AUTH_TOKEN" in found.value.cure


def test_processes_of_a_local_ray_that_nobody_needs_are_not_started_and_ray_is_left_as_it_was(monkeypatch):
    """Their names are private to Ray: where there are none any more, Ray starts what it likes."""
    from ray._private import node, services

    before = services.start_api_server, node.Node.start_monitor
    with pytest.raises(OSError), without_idle_ray_processes():
        assert services.start_api_server(False, raise_on_failure=False) == ("", None)
        assert node.Node.start_monitor(None) is None
        raise OSError
    assert (services.start_api_server, node.Node.start_monitor) == before
    monkeypatch.delattr(services, "start_api_server")
    with without_idle_ray_processes():
        assert not hasattr(services, "start_api_server") and node.Node.start_monitor(None) is None
    assert node.Node.start_monitor is before[1]
