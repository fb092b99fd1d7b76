"""Adds nodes to the local Ray cluster: raylets on this machine that act as further machines and may be killed."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from raypar.errors import ClusterError, error_first_line

JOIN_S = 60.0
"""How long a raylet may take to appear in Ray's node table."""


@dataclass(frozen=True)
class LocalNode:
    """A raylet of the local Ray cluster."""

    node: str
    """Ray's id of the node, in hex."""
    pid: int
    """The raylet's process."""
    cpus: int
    """Its logical CPUs."""
    head: bool = False
    """Whether it is the head's raylet. The run ends with it: the client is connected to Ray there."""


def cpus_per_node(workers: int, nodes: int) -> int:
    """Logical CPUs of each node: the nodes together have room for every worker and at least one more.

    So few CPUs make the loss of a node matter: what fits on `nodes` nodes need not fit on `nodes` - 1.
    """
    return -(-(workers + 1) // nodes)


@contextlib.contextmanager
def start_local_nodes(count: int, cpus: int, store_bytes: int, folder: Path) -> Iterator[tuple[LocalNode, ...]]:
    """Start `count` - 1 raylets beside the head that `ray.init` has started in this process; yields all of them.

    Ray's files lie in `folder`. Like the head, the raylets die with the thread that starts them, so with this process. Only
    private APIs of Ray start further nodes in a process (`ray.cluster_utils.Cluster` uses them too). Raises `ClusterError`.
    """
    started: list[Any] = []
    try:
        try:
            from ray._private import worker

            head: Any = worker._global_node
            found = [LocalNode(head.node_id, reap_raylet(head), cpus, head=True)]
            for _ in range(count - 1):
                started.append(start_raylet(head.gcs_address, cpus, store_bytes, folder))
                found.append(LocalNode(started[-1].node_id, reap_raylet(started[-1]), cpus))
        except (ImportError, AttributeError, TypeError, KeyError) as error:
            raise ClusterError(
                f"this version of Ray does not start several nodes as raypar knows it: {error}",
                cure="leave --local-nodes out, or use ray 2.60",
            ) from error
        except Exception as error:  # Ray raises a bare one when a raylet is not up in time
            raise ClusterError(
                f"local node {len(started) + 2} of {count} did not start: {error_first_line(error)}",
                cure="ask for fewer with --local-nodes, or look at what else this machine is doing",
            ) from error
        wait_for_nodes(tuple(found))
        yield tuple(found)
    finally:
        for node in started:
            with contextlib.suppress(Exception):
                node.kill_all_processes(check_alive=False, allow_graceful=True, wait=True)


def start_raylet(address: str, cpus: int, store_bytes: int, folder: Path, labels: Mapping[str, str] | None = None) -> Any:
    """Start a raylet with these node labels that joins the cluster at `address`; returns Ray's private `Node`."""
    from ray._private.node import Node
    from ray._private.parameter import RayParams

    params = RayParams(
        gcs_address=address,
        node_ip_address=address.rpartition(":")[0].strip("[]"),  # on this machine: that of the cluster's head
        num_cpus=cpus,
        num_gpus=0,
        object_store_memory=store_bytes,
        temp_dir=str(folder),
        labels=dict(labels or {}),
        min_worker_port=0,
        max_worker_port=0,
        node_manager_port=0,
        include_log_monitor=False,  # type: ignore[arg-type]  # one per machine reads all of them
    )
    return Node(params, head=False, shutdown_at_exit=False, spawn_reaper=True)


def reap_raylet(node: Any) -> int:
    """The pid of a node's raylet. A thread reaps the process: workers do not notice the death of a zombie."""
    process = node.all_processes["raylet"][0].process
    threading.Thread(target=process.wait, name=f"raypar-reaper-{process.pid}", daemon=True).start()
    return int(process.pid)


def read_raylet_options(pid: int) -> dict[str, str] | None:
    """The options on the command line of the process `pid`, without their dashes; None if it is no raylet."""
    try:
        words = (Path("/proc") / str(pid) / "cmdline").read_text().split("\0")
    except OSError:
        return None
    found = dict(word.removeprefix("--").split("=", 1) for word in words if word.startswith("--") and "=" in word)
    return found if Path(words[0]).name == "raylet" and {"node_id", "gcs-address"} <= set(found) else None


def parse_raylet_command(pid: int) -> tuple[str, str] | None:
    """(Ray's node id, address of its cluster) from the command line of the process `pid`; None if it is no raylet."""
    options = read_raylet_options(pid)
    return None if options is None else (options["node_id"], options["gcs-address"])


def wait_for_nodes(nodes: tuple[LocalNode, ...]) -> None:
    """Wait until Ray lists all the nodes as alive. Raises `ClusterError` after `JOIN_S`."""
    import ray

    deadline = time.monotonic() + JOIN_S
    while True:
        alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
        missing = [node for node in nodes if node.node not in alive]
        if not missing:
            return
        if time.monotonic() > deadline:
            raise ClusterError(
                f"{len(missing)} of {len(nodes)} local nodes did not join within {JOIN_S:.0f} s "
                f"(pids {', '.join(str(node.pid) for node in missing)})",
                cure="ask for fewer with --local-nodes, or look at what else this machine is doing",
            )
        time.sleep(0.05)
