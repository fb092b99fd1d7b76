"""A Ray cluster on this machine with an autoscaler, by Ray's fake provider: it adds and removes raylets in place of machines.

Ray's own `AutoscalingCluster` needs a file that its wheel lacks, and ends every Ray on the machine when it stops.
"""

from __future__ import annotations

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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from raypar.ray_compat.settings import parse_raylet_command

HEAD = "f" * 51 + "00000"
"""The node id of the head, as Ray's fake provider wants it."""
HEAD_TYPE = "ray.head.default"
"""The head's node type; version 2 of the autoscaler expects this name."""
START_S = 240.0
"""How long the head may take to start."""
PROVIDER = "ray.autoscaler._private.fake_multi_node.node_provider.FakeMultiNodeProvider"


@dataclass(frozen=True)
class NodeType:
    """Machines of one kind that the autoscaler may add."""

    name: str = "small"
    """The type's name."""
    cpus: int = 1
    """Logical CPUs of a node."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """Labels of its nodes."""


class FakeAutoscaledCluster:
    """A head without CPUs, and an autoscaler (version 1 or 2, or 0 for none) that adds at most `most` nodes.

    A head without an autoscaler has one CPU. `python_path`: what workers import from.
    """

    def __init__(
        self,
        most: int,
        node_types: Sequence[NodeType] = (NodeType(),),
        *,
        version: int = 2,
        idle_s: float = 60.0,
        python_path: Sequence[str] = (),
    ) -> None:
        self.temp = Path(tempfile.mkdtemp(prefix="rp"))
        """Ray's files; a short path, because Ray puts its sockets in it."""
        self.address = f"127.0.0.1:{_free_port()}"
        """Where Ray's control store answers."""
        self.env = {key: value for key, value in os.environ.items() if key != "RAY_ADDRESS"}
        """The environment for programs that join the cluster."""
        self.env |= {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
        self.env["PYTHONPATH"] = os.pathsep.join([*python_path, os.environ.get("PYTHONPATH", "")]).strip(os.pathsep)
        words = ["--head", "--port", self.address.rpartition(":")[2], "--num-cpus", "0" if version else "1", "--block"]
        words += ["--temp-dir", str(self.temp), "--include-dashboard=false", "--dashboard-agent-listen-port=0"]
        words += ["--object-store-memory=100000000"]
        if version:
            config = self.temp / "autoscaler.yaml"
            config.write_text(json.dumps(_autoscaler_config(self.address, version, most, node_types, idle_s)))
            words.append(f"--autoscaling-config={config}")
        with open(self.temp / "out", "w") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "ray.scripts.scripts", "start", *words],
                env=self.env | (_head_environment(version) if version else {}),
                stdout=out,
                stderr=out,
                start_new_session=True,
            )
        try:
            self.wait(lambda: "Ray runtime started" in self.output(), START_S, "the head has started")
        except BaseException:
            self.end()
            raise

    def output(self) -> str:
        """What `ray start` has printed."""
        return (self.temp / "out").read_text()

    def wait(self, true: Callable[[], bool], seconds: float, what: str) -> float:
        """Wait until `true()` holds; returns how many seconds that took. Raises `TimeoutError`."""
        began_s = time.monotonic()
        while not true():
            if time.monotonic() - began_s > seconds or self.process.poll() is not None:
                raise TimeoutError(f"not within {seconds:.0f} s: {what}\n{self.output()[-2000:]}")
            time.sleep(0.2)
        return time.monotonic() - began_s

    def nodes(self) -> dict[str, int]:
        """Node id -> pid of its raylet, of the nodes that the autoscaler has added and that live."""
        found = {}
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError, ValueError):
                about = parse_raylet_command(int(entry.name))
                if about is not None and about[1] == self.address and about[0] != HEAD:
                    found[about[0]] = int(entry.name)
        return found

    def kill_node(self, node: str) -> None:
        """Simulate a loss of power: `kill -9` of the raylet and of all processes that it has started."""
        raylet = self.nodes()[node]
        for pid in (raylet, *_children(raylet)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def end(self) -> None:
        """End the head, its nodes and all of their processes, and remove Ray's files."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(20)
        deadline = time.monotonic() + 20
        while (left := self._processes()) and time.monotonic() < deadline:
            for pid in left:
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.2)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(5)
        shutil.rmtree(self.temp, ignore_errors=True)

    def _processes(self) -> list[int]:
        """Processes of the cluster, by its folder or address in their command line; workers have one of them in theirs."""
        found = []
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                words = (entry / "cmdline").read_bytes()
                if (str(self.temp).encode() in words or self.address.encode() in words) and int(entry.name) != os.getpid():
                    found.append(int(entry.name))
        return found


def _free_port() -> int:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        return int(unused.getsockname()[1])


def _children(pid: int) -> list[int]:
    """The processes that a process has started."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if int((entry / "stat").read_text().rpartition(")")[2].split()[1]) == pid:
                found.append(int(entry.name))
    return found


def _head_environment(version: int) -> dict[str, str]:
    """The environment with which Ray's head and its autoscaler use the fake provider."""
    env = {"RAY_FAKE_CLUSTER": "1", "AUTOSCALER_UPDATE_INTERVAL_S": "1", "RAY_OVERRIDE_NODE_ID_FOR_TESTING": HEAD}
    env |= {"AUTOSCALER_METRIC_PORT": str(_free_port()), "RAY_raylet_start_wait_time_s": "180"}
    if version == 2:
        env |= {"RAY_enable_autoscaler_v2": "1", "RAY_CLOUD_INSTANCE_ID": HEAD, "RAY_NODE_TYPE_NAME": HEAD_TYPE}
    return env


def _autoscaler_config(
    address: str, version: int, most: int, node_types: Sequence[NodeType], idle_s: float
) -> dict[str, object]:
    """The autoscaler's configuration. All keys of a launcher file must be there, if empty."""
    kind = {"type": "fake_multinode"} if version == 1 else {"type": "external", "module": PROVIDER}
    types = {
        one.name: {
            "resources": {"CPU": one.cpus},
            "labels": dict(one.labels),
            "node_config": {},
            "min_workers": 0,
            "max_workers": most,
        }
        for one in node_types
    }
    return {
        "cluster_name": "grows",
        "max_workers": most,
        "provider": {
            **kind,
            "gcs_address": address,
            "launch_multiple": True,
            "head_node_id": HEAD,
            "use_node_id_as_ip": True,
            "disable_node_updaters": True,
        },
        "available_node_types": {HEAD_TYPE: {"resources": {"CPU": 0}, "node_config": {}, "max_workers": 0}, **types},
        "head_node_type": HEAD_TYPE,
        "upscaling_speed": 10,
        "idle_timeout_minutes": idle_s / 60,
        **{key: {} for key in ("auth", "docker", "file_mounts")},
        **{key: [] for key in ("cluster_synced_files", "rsync_exclude", "rsync_filter")},
        **{f"{one}commands": [] for one in ("initialization_", "setup_", "head_setup_", "worker_setup_")},
        "head_start_ray_commands": [],
        "worker_start_ray_commands": [],
    }
