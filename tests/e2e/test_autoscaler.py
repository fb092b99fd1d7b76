"""A cluster that an autoscaler grows: a run begins with what is there, asks for the rest, and says what it waits for."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
from helpers.tiny_job import write_job

from cluster.fake_autoscaler import FakeAutoscaledCluster, NodeType

ROOT = Path(__file__).parents[2]
PATH = [str(ROOT / "tests"), str(ROOT)]


def grows(cluster: FakeAutoscaledCluster) -> bool:
    """What a process that joins is told; a monitor that has just started says nothing yet."""
    code = "import ray, time; from raypar.ray_compat.autoscaler import has_autoscaler\n"
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
    # Of the two without a node Ray may report one first, which is reason enough.
    "too few for a plan": (["plan.stages=4", "plan.replicas=1"], r"[12] of 4 workers, and the run needs all 4: .* \{CPU: 1\}"),
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


# -- bad moments -----------------------------------------------------------------------------------------------------------


class AutoscaledRun:
    """`raypar train` of the tiny job on an autoscaled cluster, in a process of its own, until it is interrupted."""

    def __init__(self, cluster: FakeAutoscaledCluster, folder: Path, *words: str) -> None:
        folder.mkdir(exist_ok=True)
        name = next((word.removeprefix("name=") for word in words if word.startswith("name=")), "tiny")
        self.cluster, self.folder, self.output = cluster, folder / "runs" / name, folder / "out.txt"
        command = [sys.executable, "-m", "raypar", "train", str(write_job(folder)), "--address", cluster.address]
        for word in ("steps=1000000", "model.args.sleep_s=0.05", "validation=null", "checkpoint.every=0", *words):
            command += ["--set", word]
        with open(self.output, "w") as out:
            self.process = subprocess.Popen(command, stdout=out, stderr=out, env=cluster.env, cwd=ROOT / "tests")

    def told(self, kind: str) -> list[dict]:
        """Its events of one kind so far."""
        path = self.folder / "events.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [event for event in map(json.loads, lines) if event["kind"] == kind]

    @property
    def members(self) -> Mapping:
        """Its members.json; empty before there is one."""
        path = self.folder / "members.json"
        return json.loads(path.read_text()) if path.exists() else {}

    @property
    def seated(self) -> set[int]:
        """The workers that train now."""
        return {m["worker"] for m in self.members["members"]} if self.members.get("phase") == "running" else set()

    @property
    def steps(self) -> int:
        path = self.folder / "metrics.jsonl"
        return len(path.read_text().splitlines()) if path.exists() else 0

    def wait(self, true: Callable[[], object], what: str, seconds: float = 200.0) -> None:
        """Wait until `true()`; fails when the run ends meanwhile."""
        self.cluster.wait(lambda: bool(true()) or self.process.poll() is not None, seconds, what)
        assert self.process.poll() is None, f"ended before {what}: {self.output.read_text()}"

    def interrupt(self) -> str:
        """Press Ctrl-C; returns all that the run has printed."""
        self.process.send_signal(signal.SIGINT)
        assert self.process.wait(60) == 130, self.output.read_text()
        return self.output.read_text()


@contextlib.contextmanager
def running(cluster: FakeAutoscaledCluster, folder: Path, *words: str) -> Iterator[AutoscaledRun]:
    run = AutoscaledRun(cluster, folder, *words)
    try:
        yield run
    finally:
        if run.process.poll() is None:
            run.process.kill()
            run.process.wait()


def groups(cluster: FakeAutoscaledCluster) -> Counter[str]:
    """State -> number of placement groups in it; removed ones do not count."""
    code = "import json, ray; from ray.util import placement_group_table\n"
    code += f"ray.init({cluster.address!r}, logging_level='ERROR', log_to_driver=False)\n"
    code += "print('states:', json.dumps([group['state'] for group in placement_group_table().values()]))"
    said = subprocess.run([sys.executable, "-c", code], env=cluster.env, capture_output=True, text=True, timeout=120)
    assert "states:" in said.stdout, said.stderr
    states = json.loads(said.stdout.rpartition("states:")[2])
    return Counter(state for state in states if state != "REMOVED")


def all_is_given_back(cluster: FakeAutoscaledCluster) -> None:
    """No demand is left, and the autoscaler removes the nodes, which are idle."""
    assert groups(cluster) == {}
    cluster.wait(lambda: not cluster.nodes(), 120, "only the head is left")


@pytest.fixture
def impatient() -> Iterator[FakeAutoscaledCluster]:
    """At most two nodes, which go after 12 s without work."""
    cluster = FakeAutoscaledCluster(2, idle_s=12.0, python_path=PATH)
    yield cluster
    cluster.end()


GROWING = ("plan.stages=2", "plan.replicas=2", "elastic={min_workers: 1, grow_after_s: 0.5}")


@pytest.mark.chaos
def test_a_new_driver_goes_on_asking_for_the_workers_that_have_no_place(impatient, tmp_path):
    cluster = impatient
    with running(cluster, tmp_path, *GROWING) as run:
        run.wait(lambda: len(run.seated) == 2 and run.steps > 5, "two workers train")
        assert groups(cluster) == {"CREATED": 2, "PENDING": 2}
        steps = run.steps
        os.kill(run.members["driver_pid"], signal.SIGKILL)
        run.wait(lambda: run.told("driver") and run.steps > steps + 20, "a new driver goes on")
        assert groups(cluster) == {"CREATED": 2, "PENDING": 2} and not run.told("hiring"), "the demand is as it was"
        before = run.seated
        cluster.kill_node(sorted(cluster.nodes())[0])
        run.wait(lambda: len(run.seated) == 2 and run.seated != before, "a worker that had no place has taken the seat")
        assert groups(cluster) == {"CREATED": 2, "PENDING": 2}
        steps = run.steps
        run.wait(lambda: run.steps > steps + 20, "it trains")
        assert "Traceback" not in run.interrupt()
    all_is_given_back(cluster)


@pytest.mark.chaos
def test_a_node_that_dies_while_its_worker_starts_is_replaced_again(impatient, tmp_path):
    cluster = impatient
    with running(cluster, tmp_path, *GROWING) as run:
        run.wait(lambda: len(run.seated) == 2 and run.steps > 5, "two workers train")
        first, nodes = run.seated, set(cluster.nodes())
        cluster.kill_node(sorted(nodes)[0])
        joined = len(run.told("joined"))
        run.wait(lambda: set(cluster.nodes()) - nodes, "a node has come")
        run.wait(lambda: groups(cluster)["CREATED"] == 2, "a worker has a place there")
        assert len(run.told("joined")) == joined, "its worker still starts"
        (new,) = set(cluster.nodes()) - nodes
        cluster.kill_node(new)
        run.wait(lambda: len(run.seated) == 2 and run.seated != first, "another node has come, and its worker trains")
        assert sum(groups(cluster).values()) == 4, "four workers are wanted, and no more"
        assert "Traceback" not in run.interrupt()
    all_is_given_back(cluster)


@pytest.mark.chaos
def test_what_cannot_begin_is_withdrawn_by_ctrl_c_or_refused_at_once(impatient, tmp_path):
    cluster = impatient
    with running(cluster, tmp_path / "waits", "plan.stages=2", "plan.replicas=1", "elastic=false") as run:
        cluster.wait(lambda: bool(groups(cluster)), 60, "workers are asked for")
        assert "Traceback" not in run.interrupt()
    assert groups(cluster) == {}
    began = time.monotonic()
    refused = train(cluster, tmp_path / "more", "plan.stages=4", "elastic={min_workers: 3}", "wait_for_workers_s=300")
    assert refused.returncode == 1 and re.search(r"no node for \d of 4 workers, .* needs at least 3", refused.stderr), refused
    assert time.monotonic() - began < 150, "not after the wait for workers"
    all_is_given_back(cluster)


@pytest.mark.chaos
def test_two_runs_share_nodes_that_suffice_for_one(impatient, tmp_path):
    cluster = impatient
    with running(cluster, tmp_path / "one", *GROWING) as first:
        first.wait(lambda: len(first.seated) == 2 and first.steps > 5, "the first run trains")
        with running(cluster, tmp_path / "two", *GROWING, "name=two") as second:
            second.wait(lambda: "waiting for" in second.output.read_text(), "the second run says what it waits for")
            assert not second.seated and groups(cluster)["CREATED"] == 2
            first.interrupt()
            second.wait(lambda: len(second.seated) == 2 and second.steps > 5, "the second run trains")
            second.interrupt()
    all_is_given_back(cluster)
