"""Spot and on-demand nodes of a live cluster: where the workers of a run are, what a reclaim costs, who replaces whom."""

import os
import re
import signal
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import ray
from helpers.trainee import Trainee, Undisturbed

from raypar.actors.ray_connection import connect_ray
from raypar.elastic.placement_constraints import MARKET_LABEL, ZONE_LABEL
from raypar.ray_compat.local_cluster import start_raylet, start_raylet_reaper

JOB = ("steps=250", "elastic.min_workers=1", "plan.stages=2", "plan.replicas=2")
SAFE = f"placement={{label_selector: {{{MARKET_LABEL}: spot}}, on_demand: 2}}"
"""Workers on spot nodes, but a copy of each of the two stages on on-demand nodes."""


class Cluster:
    """A Ray cluster on this machine whose head is an on-demand node in zone a; each node has one CPU."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.labels: dict[str, Mapping[str, str]] = {
            node["NodeID"][:8]: node["Labels"] for node in ray.nodes() if node["Alive"]
        }
        """Beginning of a node's id, as in events -> its labels."""
        self.pids: dict[str, int] = {}
        """The same, of nodes beside the head -> pid of the raylet."""
        self._nodes = ExitStack()

    def add(self, market: str, zone: str) -> None:
        """Start a node in another zone or on another market."""
        labels = {MARKET_LABEL: market, ZONE_LABEL: zone}
        folder = Path(ray._private.worker._global_node.get_temp_dir_path())
        node = start_raylet(self.address, 1, 100 * 2**20, folder, labels)
        self._nodes.callback(node.kill_all_processes, check_alive=False, allow_graceful=True, wait=True)
        self.labels[node.node_id[:8]], self.pids[node.node_id[:8]] = labels, start_raylet_reaper(node)

    def market(self, member: Mapping[str, str]) -> str:
        return self.labels[member["node"]][MARKET_LABEL]

    def zone(self, member: Mapping[str, str]) -> str:
        return self.labels[member["node"]][ZONE_LABEL]

    def kill(self, market: str, zone: str) -> None:
        """Nodes of this market and zone lose their power."""
        wanted = {MARKET_LABEL: market, ZONE_LABEL: zone}
        for node in [node for node in self.pids if self.labels[node] == wanted]:
            os.kill(self.pids.pop(node), signal.SIGKILL)

    def close(self) -> None:
        self._nodes.close()


@contextmanager
def spot_cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    with connect_ray_as(monkeypatch, "on-demand", "a") as address:
        cluster = Cluster(address)
        try:
            for market, zone in (("on-demand", "b"), ("spot", "a"), ("spot", "b")):
                cluster.add(market, zone)
            yield cluster
        finally:
            cluster.close()


@contextmanager
def connect_ray_as(monkeypatch: pytest.MonkeyPatch, market: str, zone: str) -> Iterator[str]:
    """A local Ray whose head has one CPU and these labels."""
    monkeypatch.setenv("RAY_NODE_MARKET_TYPE", market)
    monkeypatch.setenv("RAY_NODE_ZONE", zone)
    with connect_ray(None, 0, Path(__file__).parents[1]) as connection:
        yield connection.address


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> Undisturbed:
    return Undisturbed.of(tmp_path_factory.mktemp("undisturbed"), *JOB)


def same(trainee: Trainee, undisturbed: Undisturbed) -> None:
    assert trainee.result.end == "done", trainee.result.why
    assert trainee.result.weights_sha256 == undisturbed.weights_sha256
    assert trainee.losses == undisturbed.losses


def by_stage(trainee: Trainee) -> dict[str, list[dict]]:
    """Stage -> its members now."""
    found: dict[str, list[dict]] = {}
    for member in trainee.members["members"]:
        found.setdefault(re.findall(r"stage \S+,", member["coordinate"])[0], []).append(member)
    return found


@pytest.mark.chaos
def test_all_spot_nodes_are_taken_and_the_run_goes_on_from_the_on_demand_copies_without_loss(
    monkeypatch, undisturbed, tmp_path
):
    with spot_cluster(monkeypatch) as cluster:
        trainee = Trainee(tmp_path, *JOB, SAFE)
        before: dict[str, list[dict]] = {}

        def act(pids):
            before.update(by_stage(trainee))
            cluster.kill("spot", "a")
            cluster.kill("spot", "b")

        trainee.result = trainee.run(act, at=20)
        left = trainee.members["members"]
    assert len(before) == 2
    for members in before.values():
        assert sorted(map(cluster.market, members)) == ["on-demand", "spot"], before
        assert sorted(map(cluster.zone, members)) == ["a", "b"], "the copies of a stage are in two zones"
    same(trainee, undisturbed)
    assert {cluster.market(member) for member in left} == {"on-demand"} and len(left) == 2
    assert len(trainee.told("lost")) == 2
    assert all(event["again"] == 0 and event["state"] == "live" for event in trainee.told("generation"))
    assert not [event for event in trainee.told("warning") if "on-demand" in event["text"]], "the driver is on such a node"


@pytest.mark.chaos
def test_a_lost_on_demand_worker_waits_for_an_on_demand_node_and_takes_no_spot_node(monkeypatch, tmp_path, tmp_path_factory):
    long = ("steps=900", *JOB[1:])
    with spot_cluster(monkeypatch) as cluster:
        trainee = Trainee(tmp_path, *long, SAFE)
        trainee.result = trainee.run(
            lambda pids: cluster.kill("on-demand", "b"),
            at=20,
            then={60: lambda: cluster.add("spot", "b"), 160: lambda: cluster.add("on-demand", "b")},
        )
        after = by_stage(trainee)
    same(trainee, Undisturbed.of(tmp_path_factory.mktemp("alone"), *long))
    assert [len(event["workers"]) for event in trainee.told("generation")][-1] == 4
    assert len(trainee.told("hiring")) == 1, "one worker was asked for, of the right kind"
    assert len(after) == 2
    for members in after.values():
        assert sorted(map(cluster.market, members)) == ["on-demand", "spot"], after
