"""`raypar train --local-nodes N`: several raylets on this machine, of which nothing outlives the command, however it ends."""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import ray
from helpers.node_loss import assert_undisturbed, worker_node
from helpers.tiny_job import write_job
from helpers.trainee import Trainee, Undisturbed
from ray._private import worker
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raypar.actors.ray_connection import connect_ray
from raypar.cli import main
from raypar.ray_compat.nodes import list_draining_nodes
from raypar.ray_compat.ray_log_filter import filtering_ray_lines
from raypar.storage.run_folder import RunFolder

ROOT = Path(__file__).parents[2]
START_S = 120.0
GONE_S = 10.0


class Training:
    """`raypar train` of the tiny job on two local nodes, in a process of its own."""

    def __init__(self, folder: Path, *words: str) -> None:
        self.temp = Path(tempfile.mkdtemp(prefix="rp"))  # short: Ray puts its sockets in it
        env = {k: v for k, v in os.environ.items() if k != "RAY_ADDRESS"}
        env |= {"TMPDIR": str(self.temp), "PYTHONPATH": f"{ROOT / 'tests'}:{ROOT}"}
        command = [sys.executable, "-m", "raypar", "train", str(write_job(folder)), "--local-nodes", "2", "--json"]
        for word in words:
            command += ["--set", word]
        self.process = subprocess.Popen(command, env=env, cwd=ROOT / "tests", stdout=subprocess.PIPE, text=True)
        self.family: list[psutil.Process] = []
        """Its processes and theirs, as they were when training began."""

    def events(self) -> Iterator[dict]:
        deadline = time.monotonic() + START_S
        for line in self.process.stdout:
            assert time.monotonic() < deadline
            event = json.loads(line)
            if event["kind"] == "step" and not self.family:
                self.family = psutil.Process(self.process.pid).children(recursive=True)
            yield event

    def left(self, patience_s: float) -> list[str]:
        """Processes and files that are still there after so long."""
        deadline = time.monotonic() + patience_s
        while True:
            alive = [str(p) for p in self.family if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
            # torch makes its compiler's cache folder when torch.optim is first used; it is the user's and stays.
            there = alive + [p.name for p in self.temp.iterdir() if not p.name.startswith("torchinductor_")]
            if not there or time.monotonic() > deadline:
                return there
            time.sleep(0.1)

    def end(self) -> None:
        self.process.kill()
        self.process.wait(10)
        self.process.stdout.close()
        shutil.rmtree(self.temp, ignore_errors=True)


@pytest.fixture
def training(tmp_path):
    training = Training(
        tmp_path, "steps=100000", "plan.stages=1", "validation=null", "checkpoint.every=0", "model.args.sleep_s=0.02"
    )
    yield training
    training.end()


@pytest.mark.full  # one that a signal ends, with what it says of its nodes: `test_ctrl_c.py`
def test_a_run_on_local_nodes_ends_clean(tmp_path):
    training = Training(tmp_path, "plan.stages=1", "plan.replicas=1")
    try:
        events = list(training.events())
        assert training.process.wait(30) == 0
        assert not training.left(0.0)
    finally:
        training.end()
    assert events[-1]["kind"] == "result"


@pytest.mark.full
def test_killing_the_command_leaves_no_process_and_no_file(training):
    next(event for event in training.events() if event["kind"] == "step")
    stopped = next(p for p in training.family if p.name().startswith("ray::"))
    stopped.suspend()  # it cannot end itself
    training.process.kill()
    assert not training.left(GONE_S)


@pytest.fixture(scope="module")
def three_nodes():
    """A cluster of this process with one logical CPU on each node: the tests below use it up, in their order."""
    with connect_ray(None, 2, ROOT, nodes=3) as connection:
        yield connection


@pytest.mark.ci
def test_a_node_dies_with_its_worker_and_the_others_go_on(three_nodes, tmp_path):
    words = ("steps=30", "elastic.min_workers=1", "plan.stages=1", "plan.replicas=2")
    trainee, undisturbed = Trainee(tmp_path, *words), Undisturbed.of(tmp_path, "steps=30")

    def act(pids):
        node, workers = worker_node(trainee, three_nodes)
        trainee.hit = {m["worker"] for m in workers}
        for pid in (node.pid, *(m["pid"] for m in workers)):  # a worker outlives its raylet by as much as a short run takes
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    trainee.result = trainee.run(act, at=8)
    assert_undisturbed(trainee, undisturbed)
    assert {event["worker"] for event in trainee.told("lost")} == trainee.hit
    first = trainee.told("generation")[0]
    assert set(first["workers"]) == {0, 1} - trainee.hit, "who was not there was not started again"


@pytest.mark.ci
def test_a_node_is_drained_by_its_id_or_its_pid_and_the_driver_sees_it(three_nodes, tmp_path, capsys):
    folder = RunFolder.create(tmp_path, "run")
    folder.job.write_text("")
    folder.cluster.write_text(json.dumps(three_nodes.facts))
    run = ["--run", str(folder.path)]
    head = three_nodes.nodes[0]
    one = next(node for node in three_nodes.nodes if not node.head and psutil.pid_exists(node.pid))
    assert main(["drain", "feedbeef", *run]) == 2
    err = capsys.readouterr().err
    assert "no node is called 'feedbeef'" in err and one.node[:8] in err
    assert main(["drain", head.node[:8], *run]) == 2
    assert "drain one of the other nodes" in capsys.readouterr().err
    assert not list_draining_nodes()
    busy = ray.remote(Busy).options(scheduling_strategy=NodeAffinitySchedulingStrategy(one.node, soft=False)).remote()
    ray.get(busy.ping.remote())
    before = time.time()
    assert main(["drain", str(one.pid), "--deadline-s", "60"]) == 0
    assert f"node {one.node[:8]}" in capsys.readouterr().out
    assert 55 < list_draining_nodes()[one.node] - before < 65
    ray.get(busy.ping.remote())  # Ray leaves it alone
    assert main(["drain", one.node[:8], *run, "--deadline-s", "5"]) == 0
    assert "is being drained already" in capsys.readouterr().out
    assert 55 < list_draining_nodes()[one.node] - before < 65
    ray.kill(busy)
    deadline = time.monotonic() + 20
    while one.node in alive():  # a node on which nothing runs ends at once
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert head.node in alive()
    assert main(["drain", str(one.pid), *run]) == 2
    assert f"node {one.node[:8]} (raylet {one.pid}) has left already" in capsys.readouterr().err
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        gone = {**three_nodes.facts, "address": f"127.0.0.1:{closed.getsockname()[1]}"}
        folder.cluster.write_text(json.dumps(gone))
        assert main(["drain", one.node[:8], *run]) == 1
    assert "nothing answers" in capsys.readouterr().err


class Busy:
    def ping(self) -> None:
        pass


def alive() -> set[str]:
    return {node["NodeID"] for node in ray.nodes() if node["Alive"]}


def test_rays_notices_of_dead_nodes_are_not_printed_and_what_workers_print_is(monkeypatch):
    seen = []
    monkeypatch.setattr(worker, "print_to_stdstream", lambda data, ignore_prefix: seen.extend(data["lines"]))
    log = "[2026-11-21 17:05:12,680 E 456 456] (gcs_server) scheduler.cc:273: Failed to remove 1 bundle(s)"
    with filtering_ray_lines():
        for pid, line in [
            ("raylet", "Raylet is terminated. Termination is unexpected. Last 20 lines:\n    ..."),
            ("gcs_server", log),
            ("raylet", "1 Workers (tasks / actors) killed due to memory pressure (OOM)"),
            (77, "Raylet is terminated, said the model"),
        ]:
            worker.print_to_stdstream({"pid": pid, "lines": [line], "is_err": False}, ignore_prefix=False)
    assert [line.split()[0] for line in seen] == ["1", "Raylet"]


def test_local_nodes_and_a_cluster_to_join_are_refused_before_anything_starts(tmp_path, capsys):
    words = ["train", str(write_job(tmp_path)), "--local-nodes", "3"]
    assert main([*words, "--address", "127.0.0.1:1"]) == 2
    assert "3 local nodes, and a cluster to join at 127.0.0.1:1" in capsys.readouterr().err
    assert main(["train", str(tmp_path / "job.yaml"), "--local-nodes", "0"]) == 2
    assert not (tmp_path / "runs").exists()
