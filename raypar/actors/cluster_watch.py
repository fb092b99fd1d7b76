"""What the cluster has, and what it can ever have."""

from __future__ import annotations

from dataclasses import dataclass

import ray

from raypar.errors import ClusterError


@dataclass(frozen=True)
class Capacity:
    """Logical CPUs. `ever`: what an autoscaler may bring the cluster to; None without an autoscaler."""

    nodes: int
    total: int
    free: int
    ever: int | None


def capacity() -> Capacity:
    """Ask Ray. `free` lags a little behind."""
    alive = [node for node in ray.nodes() if node["Alive"]]
    total = sum(node["Resources"].get("CPU", 0.0) for node in alive)
    return Capacity(len(alive), int(total), int(ray.available_resources().get("CPU", 0.0)), autoscaled_cpus())


def autoscaled_cpus() -> int | None:
    """CPUs an autoscaler may bring, from the cluster configuration it publishes; Ray offers this in a private place only."""
    try:
        from ray._private.state import state

        most = state.get_max_resources_from_cluster_config()
    except (ImportError, AttributeError):
        return None
    return int(most["CPU"]) if most and "CPU" in most else None


def require(workers: int, cluster: Capacity) -> None:
    """Raise `ClusterError` when the cluster can never have `workers` logical CPUs."""
    most = cluster.total if cluster.ever is None else max(cluster.total, cluster.ever)
    if workers > most:
        scaler = "no autoscaler adds any" if cluster.ever is None else f"its autoscaler stops at {cluster.ever}"
        raise ClusterError(
            f"the plan needs {workers} workers of 1 CPU each, but the cluster has {cluster.total} CPUs on "
            f"{cluster.nodes} node(s) and {scaler}",
            cure=f"set plan.stages x plan.replicas <= {most}, add nodes, or leave the address out to run on this machine",
        )


def draining_nodes() -> dict[str, int]:
    """Node -> deadline (ms since 1970, 0: none) of the nodes that Ray was told are about to go; Ray offers this in a private
    place only, and without it nobody is told."""
    try:
        from ray._private.state import state

        return dict(state.get_draining_nodes())
    except (ImportError, AttributeError):
        return {}
