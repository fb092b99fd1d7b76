"""A Ray on this machine whose nodes come and go like machines of a cloud: raylets that are added, killed and drained."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

STORE_BYTES = 100 * 2**20
LEFT_S = 15.0
"""How long processes may take to notice that their cluster is gone."""


class Fleet:
    """A head without room for workers, and nodes of `slots` logical CPUs. `python_path`: what workers import from.

    Every node has an address of its own on the loopback network, so that a client on this machine is at home on the head.
    """

    def __init__(self, slots: int, python_path: Sequence[str]) -> None:
        self.slots = slots
        self.folder = Path(tempfile.mkdtemp(prefix="raypar-fleet."))
        (self.folder / "ray").mkdir()
        os.environ |= {
            "RAY_TMPDIR": str(self.folder),
            "RAY_AUTH_MODE": "disabled",
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
            "PYTHONPATH": os.pathsep.join([*python_path, os.environ.get("PYTHONPATH", "")]),
        }
        from ray.cluster_utils import Cluster

        self._others = set(psutil.Process().children(recursive=True))
        """What this process had started before: none of ours."""
        self._known: set[psutil.Process] = set()
        self._added = 0
        head = {"num_cpus": 0, "num_gpus": 0, "include_dashboard": False, "object_store_memory": STORE_BYTES}
        self._cluster = Cluster(initialize_head=True, head_node_args=head)
        self.alive: list[Any] = []
        """Nodes that may be used, oldest first."""
        self.draining: list[Any] = []
        """Those that will be taken away."""
        self.address = str(self._cluster.address)

    def add(self) -> Any:
        """A new node, once Ray counts on it (a second or more)."""
        self._added += 1
        host = f"127.0.{self._added // 250}.{self._added % 250 + 2}"
        node = self._cluster.add_node(num_cpus=self.slots, num_gpus=0, object_store_memory=STORE_BYTES, node_ip_address=host)
        self.alive.append(node)
        self.look()
        return node

    def kill(self, node: Any) -> None:
        """The machine loses its power: `kill -9` of the raylet and of all that it has started, at once."""
        self.look()
        for process in _on(node):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self._forget(node, graceful=False)

    def stop(self, node: Any) -> None:
        """The machine hangs: SIGSTOP of the raylet and of all that it has started. `kill` ends it, sooner or later."""
        self.look()
        for process in _on(node):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.suspend()
        self.alive.remove(node)
        self.draining.append(node)

    def drain(self, node: Any, seconds: float) -> bool:
        """The notice that a cloud gives `seconds` before it takes a machine away; whether Ray has accepted it."""
        from ray._raylet import GcsClient
        from ray.core.generated import autoscaler_pb2

        reason = autoscaler_pb2.DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
        deadline_ms = int((time.time() + seconds) * 1000)
        accepted, _ = GcsClient(address=self.address).drain_node(node.node_id, reason, "it will be taken away", deadline_ms)
        self.alive.remove(node)
        self.draining.append(node)
        return bool(accepted)

    def take_away(self, node: Any) -> None:
        """End a node the orderly way, as at the end of its notice; idempotent."""
        if node in self.alive + self.draining:
            self.look()
            self._forget(node, graceful=True)

    def restore(self, count: int) -> None:
        """As many nodes as at the beginning, none of them draining."""
        for node in [*self.draining, *self.alive[count:]]:
            self.take_away(node)
        while len(self.alive) < count:
            self.add()

    def look(self) -> set[psutil.Process]:
        """All processes ever seen below this process, so that none escapes the last check."""
        self._known.update(psutil.Process().children(recursive=True))
        return self._known

    def keep_logs(self, folder: Path) -> None:
        """Copy what Ray's processes have written."""
        shutil.copytree(self.folder / "ray" / "session_latest" / "logs", folder, dirs_exist_ok=True)

    def end(self) -> list[str]:
        """Stop everything by pid and remove the folder; what had to be killed, although its cluster was gone."""
        known = self.look() - self._others
        self._cluster.shutdown()
        deadline, found = time.monotonic() + LEFT_S, []
        while (left := [process for process in known if _lives(process)]) and time.monotonic() < deadline:
            time.sleep(0.1)  # `psutil.wait_procs` raises FileNotFoundError on some kernels when a process ends meanwhile
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                found.append(f"{process.pid} {' '.join(process.cmdline())[:80]}")
                process.kill()
        shutil.rmtree(self.folder, ignore_errors=True)
        return found

    def _forget(self, node: Any, *, graceful: bool) -> None:
        (self.alive if node in self.alive else self.draining).remove(node)
        self._cluster.remove_node(node, allow_graceful=graceful)


def _on(node: Any) -> list[psutil.Process]:
    """The raylet of a node, and what it has started."""
    raylet = psutil.Process(node.all_processes["raylet"][0].process.pid)
    return [raylet, *raylet.children(recursive=True)]


def state_of(pid: int) -> str:
    """R, S, D, T, Z, ... as in /proc; X when there is no such process."""
    try:
        return re.sub(r"^.*\) ", "", Path(f"/proc/{pid}/stat").read_text(), flags=re.DOTALL)[0]
    except OSError:
        return "X"


def works(pid: int) -> bool:
    """Whether a process is there and neither stopped nor a zombie."""
    return state_of(pid) not in "TtZX"


def _lives(process: psutil.Process) -> bool:
    """Whether a process is still there, and no zombie."""
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
