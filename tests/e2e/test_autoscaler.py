"""A cluster that an autoscaler grows: a run begins with what is there, asks for the rest, and says what it waits for."""

import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.tiny_job import write_job

from cluster.fake_autoscaler import FakeAutoscaledCluster, NodeType

ROOT = Path(__file__).parents[2]
PATH = [str(ROOT / "tests"), str(ROOT)]


def grows(cluster: FakeAutoscaledCluster) -> bool:
    """What a process that joins is told; a monitor that has just started says nothing yet."""
    code = "import ray, time; from raypar.actors.cluster_info import has_autoscaler\n"
    code += f"ray.init({cluster.address!r}, logging_level='ERROR'); end = time.monotonic() + 20\n"
    code += "while not has_autoscaler() and time.monotonic() < end: time.sleep(0.5)\nprint('grows:', has_autoscaler())"
    said = subprocess.run([sys.executable, "-c", code], env=cluster.env, capture_output=True, text=True, timeout=120)
    assert "grows:" in said.stdout, said.stderr
    return "grows: True" in said.stdout


def train(cluster: FakeAutoscaledCluster, folder: Path, *words: str, as_json: bool = False) -> subprocess.CompletedProcess[str]:
    folder.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "raypar", "train", str(write_job(folder)), "--address", cluster.address]
    command += ["--json"] * as_json
    for word in ("steps=3", "validation=null", "plan.replicas=1", *words):
        command += ["--set", word]
    return subprocess.run(command, env=cluster.env, cwd=ROOT / "tests", capture_output=True, text=True, timeout=300)


@pytest.fixture
def cluster(request) -> Iterator[FakeAutoscaledCluster]:
    cluster = FakeAutoscaledCluster(2, version=request.param, python_path=PATH)
    yield cluster
    cluster.end()


@pytest.mark.chaos
@pytest.mark.parametrize("cluster", [1], ids=["v1"], indirect=True)
def test_workers_that_an_autoscaler_may_bring_are_waited_for_and_at_the_end_it_is_said_that_none_came(cluster, tmp_path):
    assert grows(cluster)
    too_many = train(cluster, tmp_path, "plan.stages=4", "wait_for_workers_s=20")
    assert too_many.returncode == 1, too_many.stderr
    assert re.search(r"only [0-2] of 4 workers could be placed within 20 s; .* autoscaler has added no more", too_many.stderr)
    assert "max_workers" in too_many.stderr and "Traceback" not in too_many.stderr
    line = r"waiting for [234] more workers: the cluster has a place for [012] of 4, an autoscaler is running"
    assert re.search(line, too_many.stdout), "nodes may have come before the first line"


@pytest.mark.chaos
@pytest.mark.parametrize("cluster", [1], ids=["v1"], indirect=True)
def test_a_run_begins_when_an_autoscaler_has_brought_its_workers(cluster, tmp_path):
    assert grows(cluster)
    done = train(cluster, tmp_path, "plan.stages=2", "wait_for_workers_s=120", as_json=True)
    assert done.returncode == 0, done.stdout + done.stderr
    kinds = [json.loads(line)["kind"] for line in done.stdout.splitlines()]
    assert kinds[0] == "stage" and kinds[-1] == "result" and kinds.count("step") == 3
    assert "an autoscaler is running" in done.stdout


@pytest.mark.chaos
def test_a_head_that_only_reads_does_not_grow(tmp_path):
    """Every head has a monitor that publishes a status."""
    head = FakeAutoscaledCluster(0, version=0, python_path=PATH)
    try:
        assert not grows(head)
        refused = train(head, tmp_path, "plan.stages=2")
        assert refused.returncode == 1 and "the cluster has 1 CPU on 1 node and no autoscaler adds any" in refused.stderr
    finally:
        head.end()


IMPOSSIBLE = {
    "a label": (
        ["plan.stages=2", "placement.label_selector={market: spot}"],
        r"2 of 2 workers, .* \{CPU: 1\} with market=spot",
    ),
    "a size": (
        ["plan.stages=1", "plan.shards=2", "plan.styles={'layer*.linear': gathered}"],
        r"2 of 2 workers, .* 2 x \{CPU: 1\} on one node",
    ),
    "too few for a plan": (["plan.stages=4", "plan.replicas=1"], r"2 of 4 workers, and the run needs all 4: .* \{CPU: 1\}"),
}


@pytest.mark.chaos
@pytest.mark.parametrize("cluster", [2], ids=["v2"], indirect=True)
def test_what_no_node_of_the_autoscaler_can_hold_is_named_at_once(cluster, tmp_path):
    assert grows(cluster)
    for number, (words, named) in enumerate(IMPOSSIBLE.values()):
        began = time.time()
        refused = train(cluster, tmp_path / str(number), *words, "wait_for_workers_s=200")
        assert refused.returncode == 1 and re.search(named, refused.stderr), refused.stdout + refused.stderr
        assert "Traceback" not in refused.stderr and refused.stderr.count("cure:") == 1
        assert time.time() - began < 100, "not after the wait for workers"
    labelled = FakeAutoscaledCluster(1, [NodeType("spot", 1, {"market": "spot"})], python_path=PATH)
    try:
        done = train(labelled, tmp_path / "spot", "plan.stages=1", "placement.label_selector={market: spot}")
        assert done.returncode == 0, done.stdout + done.stderr
    finally:
        labelled.end()
