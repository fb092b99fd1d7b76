"""Further nodes of a local Ray cluster on this machine: raylets that are started, waited for and ended."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from raypar.errors import ClusterError, error_first_line
from raypar.plan.wording import count_noun
from raypar.ray_compat.local_cluster import end_raylet, head_node, start_raylet, start_raylet_reaper

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

    Ray's files lie in `folder`. Like the head, the raylets die with the thread that starts them, so with this process. Raises
    `ClusterError`.
    """
    started: list[Any] = []
    try:
        try:
            head = head_node()
            found = [LocalNode(head.node_id, start_raylet_reaper(head), cpus, head=True)]
            for _ in range(count - 1):
                started.append(start_raylet(head.gcs_address, cpus, store_bytes, folder))
                found.append(LocalNode(started[-1].node_id, start_raylet_reaper(started[-1]), cpus))
        except ClusterError:
            raise
        except Exception as error:  # Ray raises a bare one when a raylet is not up in time
            raise ClusterError(
                f"local node {len(started) + 2} of {count} did not start: {error_first_line(error)}",
                cure="ask for fewer with --local-nodes, or look at what else this machine is doing",
            ) from error
        wait_for_nodes(tuple(found))
        yield tuple(found)
    finally:
        for node in started:
            end_raylet(node)


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
                f"{len(missing)} of {count_noun(len(nodes), 'local node')} did not join within {JOIN_S:.0f} s "
                f"(pids {', '.join(str(node.pid) for node in missing)})",
                cure="ask for fewer with --local-nodes, or look at what else this machine is doing",
            )
        time.sleep(0.05)
