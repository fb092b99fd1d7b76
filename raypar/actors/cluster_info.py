"""What Ray knows of the cluster: its CPUs and GPUs, how far an autoscaler may grow it, its nodes' resources and labels."""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

import ray

from raypar.elastic.placement_constraints import ZONE_LABEL
from raypar.errors import ClusterError
from raypar.plan.wording import count_noun
from raypar.ray_compat.autoscaler import autoscaler_capacity, has_autoscaler

NODE_CONNECT_S = 2.0
"""How long a node may take to accept a connection."""


@dataclass(frozen=True)
class ClusterCapacity:
    """Logical CPUs and GPUs of the cluster, now and at most."""

    nodes: int
    """Nodes that are alive."""
    cpus: int
    """CPUs of these nodes."""
    free_cpus: float
    """CPUs that nothing uses, in hundredths: tasks may use fractions of a CPU."""
    max_cpus: int | None
    """CPUs to which an autoscaler may grow the cluster; None if it does not say."""
    gpus: int = 0
    """GPUs of the nodes that are alive."""
    max_gpus: int | None = None
    """GPUs to which an autoscaler may grow the cluster; None if it does not say."""
    may_add_nodes: bool = False
    """Whether there is an autoscaler that may add nodes."""


def cluster_capacity() -> ClusterCapacity:
    """The capacity that Ray reports. `free_cpus` lags a little behind."""
    alive = [node for node in ray.nodes() if node["Alive"]]
    total = sum(node["Resources"].get("CPU", 0.0) for node in alive)
    gpus = sum(node["Resources"].get("GPU", 0.0) for node in alive)
    free = round(ray.available_resources().get("CPU", 0.0), 2)
    return ClusterCapacity(
        len(alive), int(total), free, autoscaler_capacity("CPU"), int(gpus), autoscaler_capacity("GPU"), has_autoscaler()
    )


def max_workers_per_node(gpus: int = 0) -> int:
    """The most workers that one node has the hardware for, each with 1 CPU and `gpus` GPUs."""
    alive = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    each = {"CPU": 1, "GPU": gpus} if gpus else {"CPU": 1}
    return max((min(int(has.get(kind, 0.0) // needed) for kind, needed in each.items()) for has in alive), default=0)


def require_capacity(workers: int, cluster: ClusterCapacity, gpus: int = 0, plan: str = "") -> None:
    """Raise `ClusterError` when the cluster can never have `workers` logical CPUs, or as many GPUs, if each needs one.

    `plan`: the plan in words, for the message. Nothing is raised where an autoscaler runs that does not say how far it goes:
    the run then waits for workers.
    """
    if cluster.may_add_nodes and cluster.max_cpus is None:
        return
    if gpus:
        from raypar.comm.nccl.bindings import check_gpu_count

        check_gpu_count(workers, max(cluster.gpus, cluster.max_gpus or 0))
    most = cluster.cpus if cluster.max_cpus is None else max(cluster.cpus, cluster.max_cpus)
    if workers > most:
        scaler = "no autoscaler adds any" if cluster.max_cpus is None else f"its autoscaler stops at {cluster.max_cpus}"
        raise ClusterError(
            f"the plan needs {count_noun(workers, 'worker')} of 1 CPU each{f' ({plan})' if plan else ''}, but the cluster has "
            f"{count_noun(cluster.cpus, 'CPU')} on {count_noun(cluster.nodes, 'node')} and {scaler}",
            cure=f"set plan.stages x plan.replicas x plan.shards <= {most}, add nodes, or leave the address out to run on "
            "this machine",
        )


def require_processor_for_ray_data(workers: int, cluster: ClusterCapacity) -> None:
    """Raise `ClusterError` where so many workers leave no CPU to the tasks that compute the rows of a `ray.data.Dataset`.

    Nothing is raised where an autoscaler runs that does not say how far it goes.
    """
    if cluster.may_add_nodes and cluster.max_cpus is None:
        return
    most = max(cluster.cpus, cluster.max_cpus or 0)
    if workers >= most:
        fewer = f"let the run have at most {count_noun(most - 1, 'worker')}, standbys and elastic.max_workers counted; "
        raise ClusterError(
            f"data is a ray.data.Dataset, read as a stream: tasks that compute its rows need a CPU, and of the "
            f"{count_noun(most, 'CPU')} of the cluster {count_noun(workers, 'worker')} of 1 CPU each leave none",
            cure=f"{fewer * (most > 1)}add a node; or read the files that its write_parquet(FOLDER) has written: "
            "data={'parquet': 'FOLDER/*.parquet'}",
        )


def list_live_and_dead_nodes() -> tuple[set[str], set[str]]:
    """Ids of the nodes that live, and of those that Ray has marked dead."""
    nodes = {node["NodeID"]: bool(node["Alive"]) for node in ray.nodes()}
    return {node for node, alive in nodes.items() if alive}, {node for node, alive in nodes.items() if not alive}


def node_accepts_connections(node: str) -> bool:
    """Whether the raylet of a node does, of which Ray may not have noticed that it has died. Blocks up to `NODE_CONNECT_S`."""
    try:
        found = next(each for each in ray.nodes() if each["NodeID"] == node)
        address = found["NodeManagerAddress"], int(found["NodeManagerPort"])
        socket.create_connection(address, timeout=NODE_CONNECT_S).close()
    except Exception:  # also where Ray's control store does not answer, or does not know the node any more
        return False
    return True


@dataclass(frozen=True)
class NodeResources:
    """The resources and labels of a live node."""

    resources: Mapping[str, float] = field(default_factory=dict)
    """All of its resources, used or free; `memory` in bytes."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """Its labels."""


UNKNOWN_NODE = NodeResources()
"""Stands for a node that Ray does not list."""


def list_live_node_resources() -> dict[str, NodeResources]:
    """Id -> resources and labels, of every live node."""
    return {
        node["NodeID"]: NodeResources(dict(node["Resources"]), dict(node.get("Labels") or {}))
        for node in ray.nodes()
        if node["Alive"]
    }


def zones_of_nodes(facts: Mapping[str, NodeResources]) -> dict[str, str]:
    """Node -> its availability zone, of nodes that have such a label."""
    return {node: known.labels[ZONE_LABEL] for node, known in facts.items() if ZONE_LABEL in known.labels}


def memory_per_worker(placed: Mapping[int, str], facts: Mapping[str, NodeResources]) -> int | None:
    """The smallest share of a node's memory that a worker gets, for workers placed so (worker -> node); None if not known."""
    workers = Counter(placed.values())
    shares = [
        facts[node].resources["memory"] / n
        for node, n in workers.items()
        if "memory" in facts.get(node, UNKNOWN_NODE).resources
    ]
    return int(min(shares)) if shares else None
