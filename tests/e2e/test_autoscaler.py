"""A cluster that an autoscaler grows: a run waits for the workers that it lacks, and says so."""

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.tiny_job import write_job

ROOT = Path(__file__).parents[2]
HEAD = "f" * 51 + "00000"
START_S = 120.0


def free_port() -> int:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        return unused.getsockname()[1]


class Head:
    """A head without CPUs, whose autoscaler adds at most `most` nodes with one CPU each; `version`: 0 for no autoscaler."""

    def __init__(self, version: int, most: int) -> None:
        self.temp = Path(tempfile.mkdtemp(prefix="rp"))  # short: Ray puts its sockets in it
        self.address = f"127.0.0.1:{free_port()}"
        provider = {
            "type": "fake_multinode",
            "gcs_address": self.address,
            "launch_multiple": True,
            "head_node_id": HEAD,
            "use_node_id_as_ip": True,
            "disable_node_updaters": True,
        }
        self.env = {
            **os.environ,
            "RAY_AUTH_MODE": "disabled",
            "RAY_USAGE_STATS_ENABLED": "0",
            "PYTHONPATH": f"{ROOT / 'tests'}:{ROOT}",
        }
        self.env.pop("RAY_ADDRESS", None)
        env = {"RAY_FAKE_CLUSTER": "1", "AUTOSCALER_UPDATE_INTERVAL_S": "1", "RAY_OVERRIDE_NODE_ID_FOR_TESTING": HEAD}
        env |= {"AUTOSCALER_METRIC_PORT": str(free_port()), "RAY_raylet_start_wait_time_s": "180"}
        if version == 2:
            module = "ray.autoscaler._private.fake_multi_node.node_provider.FakeMultiNodeProvider"
            provider |= {"type": "external", "module": module}
            env |= {"RAY_enable_autoscaler_v2": "1", "RAY_CLOUD_INSTANCE_ID": HEAD, "RAY_NODE_TYPE_NAME": "head"}
        config = {
            "cluster_name": "grows",
            "max_workers": most,
            "provider": provider,
            "available_node_types": {
                "head": {"resources": {"CPU": 0}, "node_config": {}, "max_workers": 0},
                "small": {"resources": {"CPU": 1}, "node_config": {}, "min_workers": 0, "max_workers": most},
            },
            "head_node_type": "head",
            "upscaling_speed": 10,
            "idle_timeout_minutes": 1,
            **{key: {} for key in ("auth", "docker", "file_mounts")},
            **{key: [] for key in ("cluster_synced_files", "rsync_exclude", "rsync_filter")},
            **{f"{one}commands": [] for one in ("initialization_", "setup_", "head_setup_", "worker_setup_")},
            "head_start_ray_commands": [],
            "worker_start_ray_commands": [],
        }
        (self.temp / "autoscaler.yaml").write_text(json.dumps(config))
        words = ["--head", "--port", self.address.rpartition(":")[2], "--num-cpus", "0" if version else "1", "--temp-dir"]
        words += [
            str(self.temp),
            "--include-dashboard=false",
            "--dashboard-agent-listen-port=0",
            "--object-store-memory=100000000",
        ]
        words += ["--block", *([f"--autoscaling-config={self.temp / 'autoscaler.yaml'}"] if version else [])]
        with open(self.temp / "out", "w") as out:
            self.process = subprocess.Popen(
                [str(Path(sys.executable).parent / "ray"), "start", *words],
                env=self.env | (env if version else {}),
                stdout=out,
                stderr=out,
                start_new_session=True,
            )
        deadline = time.monotonic() + START_S
        while "Ray runtime started" not in (self.temp / "out").read_text():
            assert time.monotonic() < deadline and self.process.poll() is None, (self.temp / "out").read_text()
            time.sleep(0.2)

    def grows(self) -> bool:
        """What a process that joins is told; a monitor that has just started says nothing yet."""
        code = "import ray, time; from raypar.actors.cluster_info import has_autoscaler\n"
        code += f"ray.init({self.address!r}, logging_level='ERROR'); end = time.monotonic() + 20\n"
        code += "while not has_autoscaler() and time.monotonic() < end: time.sleep(0.5)\nprint('grows:', has_autoscaler())"
        said = subprocess.run([sys.executable, "-c", code], env=self.env, capture_output=True, text=True, timeout=START_S)
        assert "grows:" in said.stdout, said.stderr
        return "grows: True" in said.stdout

    def train(self, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "raypar", "train", str(write_job(folder)), "--address", self.address]
        for word in ("steps=3", "validation=null", "plan.replicas=1", *words):
            command += ["--set", word]
        return subprocess.run(command, env=self.env, cwd=ROOT / "tests", capture_output=True, text=True, timeout=300)

    def end(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(20)
        for entry in Path("/proc").glob("[0-9]*/cmdline"):  # nodes that the provider has started
            try:
                if str(self.temp).encode() in entry.read_bytes() or self.address.encode() in entry.read_bytes():
                    os.kill(int(entry.parent.name), signal.SIGKILL)
            except (OSError, ValueError):
                continue
        shutil.rmtree(self.temp, ignore_errors=True)


@pytest.fixture
def head(request) -> Iterator[Head]:
    head = Head(request.param, most=2)
    yield head
    head.end()


@pytest.mark.chaos
@pytest.mark.parametrize("head", [1, 2], ids=["v1", "v2"], indirect=True)
def test_workers_that_an_autoscaler_may_bring_are_waited_for_and_at_the_end_it_is_said_that_none_came(head, tmp_path):
    assert head.grows()
    too_many = head.train(tmp_path, "plan.stages=4", "wait_for_workers_s=20")
    assert too_many.returncode == 1, too_many.stderr
    assert re.search(r"only [0-2] of 4 workers could be placed within 20 s; .* autoscaler has added no more", too_many.stderr)
    assert "max_workers" in too_many.stderr and "Traceback" not in too_many.stderr
    assert "waiting for 4 more workers: the cluster has a place for 0 of 4, an autoscaler is running" in too_many.stdout


@pytest.mark.chaos
@pytest.mark.parametrize("head", [1], ids=["v1"], indirect=True)
def test_a_run_begins_when_an_autoscaler_has_brought_its_workers(head, tmp_path):
    assert head.grows()
    done = head.train(tmp_path, "plan.stages=2", "wait_for_workers_s=120")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "an autoscaler is running" in done.stdout


@pytest.mark.chaos
def test_a_head_that_only_reads_does_not_grow(tmp_path):
    """Every head has a monitor that publishes a status."""
    head = Head(0, most=0)
    try:
        assert not head.grows()
        refused = head.train(tmp_path, "plan.stages=2")
        assert refused.returncode == 1 and "the cluster has 1 CPU on 1 node and no autoscaler adds any" in refused.stderr
    finally:
        head.end()
