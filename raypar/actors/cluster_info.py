"""What Ray knows of the cluster: its CPUs and GPUs, how far an autoscaler may grow it, and which nodes are being drained."""

from __future__ import annotations

import contextlib
import importlib
import json
import math
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayError
from ray.experimental.internal_kv import _internal_kv_get

from raypar.elastic.plural_wording import count_of
from raypar.errors import ClusterError, ConfigError

ANSWER_S = 10.0
"""How long Ray's control store may take to answer."""


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


def autoscaler_capacity(resource: str) -> int | None:
    """How much of `resource` the cluster may have after an autoscaler has grown it; None if the autoscaler does not say.

    Read from the autoscaler's published configuration, which only a private API of Ray has.
    """
    try:
        from ray._private.state import state

        most = state.get_max_resources_from_cluster_config()
    except (ImportError, AttributeError):
        return None
    return int(most[resource]) if most and resource in most else None


AUTOSCALER_STATUS = b"__autoscaling_status"
"""Key of Ray's key-value store under which the autoscaler (version 1) keeps its status, as JSON."""
ANONYMOUS = re.compile(r"node_[0-9a-f]{56}")
"""Name that Ray makes up for a node type nobody has defined. The autoscaler of every head then adds no nodes."""


def has_autoscaler() -> bool:
    """Whether an autoscaler runs that may add nodes.

    Ray 2.60 never publishes how far an autoscaler goes (`autoscaler_capacity` is None), but both of its autoscalers publish a
    status. Only private parts of Ray read the status, hence the broad `suppress`: without them no autoscaler is seen.
    """
    with contextlib.suppress(Exception):
        if autoscaler_has_node_types(_internal_kv_get(AUTOSCALER_STATUS)):
            return True
        reply = ray.core.generated.autoscaler_pb2.GetClusterStatusReply()
        reply.ParseFromString(
            ray._raylet.GcsClient(address=ray.get_runtime_context().gcs_address).get_cluster_status(timeout_s=ANSWER_S)
        )
        types = [node.ray_node_type_name for node in reply.cluster_resource_state.node_states]
        return reply.autoscaling_state.autoscaler_state_version > 0 and any(map(is_user_defined_node_type, types))
    return False


def autoscaler_has_node_types(status: bytes | None) -> bool:
    """Whether the status of a version 1 autoscaler names user-defined node types, so that it can add nodes."""
    try:
        report = json.loads(status or b"{}").get("autoscaler_report") or {}
    except ValueError:
        return False
    seen = [*(report.get("active_nodes") or ()), *(report.get("idle_nodes") or ()), *(report.get("pending_launches") or ())]
    return any(map(is_user_defined_node_type, seen))


def is_user_defined_node_type(node_type: str) -> bool:
    """Whether a user has given the node type this name."""
    return bool(node_type) and ANONYMOUS.fullmatch(node_type) is None


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
            f"the plan needs {count_of(workers, 'worker')} of 1 CPU each{f' ({plan})' if plan else ''}, but the cluster has "
            f"{count_of(cluster.cpus, 'CPU')} on {count_of(cluster.nodes, 'node')} and {scaler}",
            cure=f"set plan.stages x plan.replicas x plan.shards <= {most}, add nodes, or leave the address out to run on "
            "this machine",
        )


@dataclass(frozen=True)
class ClusterNode:
    """A live node of a Ray cluster."""

    node: str
    """Ray's id of the node, in hex."""
    ip: str
    """Its address, which all nodes of one machine share."""
    cpus: int
    """Its logical CPUs."""
    head: bool
    """Whether it is the head of the cluster."""

    def __str__(self) -> str:
        return f"{self.node[:8]} ({self.ip}, {self.cpus} CPUs{', the head' * self.head})"


def list_live_nodes(address: str) -> list[ClusterNode]:
    """The live nodes of the cluster whose control store answers at `host:port`; this process need not have joined it.

    Raises `ClusterError`.
    """
    with _private("the nodes of a cluster cannot be asked for"):
        try:
            infos: dict[Any, Any] = ray._raylet.GcsClient(address=address).get_all_node_info(timeout=ANSWER_S)
            alive = ray.core.generated.gcs_pb2.GcsNodeInfo.GcsNodeState.ALIVE
            return [
                ClusterNode(id.hex(), info.node_manager_address, int(info.resources_total.get("CPU", 0)), info.is_head_node)
                for id, info in infos.items()
                if info.state == alive
            ]
        except RayError as error:
            raise ClusterError(
                f"the Ray at {address} does not say which nodes it has: {str(error).strip().splitlines()[0]}",
                cure="check the address; a cluster with tokens (Ray 2.59 and later) asks for RAY_AUTH_MODE=token",
            ) from error


def list_draining_nodes_of_cluster(address: str) -> dict[str, float]:
    """`list_draining_nodes` of the cluster at `host:port`, which this process need not have joined. Raises `ClusterError`."""
    with _private("draining nodes cannot be seen"):
        options = ray._raylet.GcsClientOptions.create(address, None, allow_cluster_id_nil=True, fetch_cluster_id_if_nil=True)
        accessor = ray._raylet.GlobalStateAccessor(options)
        if not accessor.connect():
            raise ClusterError(f"the Ray at {address} does not say which nodes leave", cure="check the address")
        found: dict[str, int] = accessor.get_draining_nodes()
    return _moments(found)


def find_node(word: str, nodes: Sequence[ClusterNode]) -> ClusterNode:
    """The node whose id begins with `word`, or whose address is `word`. Raises `ConfigError` unless there is exactly one."""
    found = [node for node in nodes if node.node.startswith(word.lower())] or [node for node in nodes if node.ip == word]
    if len(found) == 1:
        return found[0]
    if found:
        what = f"{len(found)} nodes are called {word!r}"
        raise ConfigError(what, cure=f"give more of the id: {', '.join(map(str, found))}")
    raise ConfigError(f"no node is called {word!r}", cure=f"the nodes are {', '.join(map(str, nodes))}")


def drain_node(address: str, node: ClusterNode, deadline_s: float, reason: str) -> None:
    """Tell Ray that a node leaves in `deadline_s` seconds, as a cloud does before it takes a machine back.

    Ray starts nothing new on the node, leaves alone what runs there, and ends its raylet once nothing does. A run that polls
    `list_draining_nodes` moves its workers off. Raises `ConfigError` for the head, without which there is no cluster.
    """
    if node.head:
        raise ConfigError(
            f"node {node} holds Ray's control store: a cluster does not outlive it", cure="drain one of the other nodes"
        )
    with _private("a node cannot be drained"):
        why = ray.core.generated.autoscaler_pb2.DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
        client = ray._raylet.GcsClient(address=address)
        try:
            # The id must be one of the cluster: Ray says yes to any other too.
            accepted, rejection = client.drain_node(node.node, why, reason, int(1000 * (time.time() + deadline_s)))
        except RayError as error:
            raise ClusterError(f"the Ray at {address} does not drain node {node}: {error}", cure="try again") from error
    if not accepted:
        raise ClusterError(f"Ray refuses to drain node {node}: {rejection}", cure="try again when nothing is in its way")


def list_dead_nodes() -> set[str]:
    """Ids of the nodes that Ray has marked dead."""
    return {node["NodeID"] for node in ray.nodes() if not node["Alive"]}


def list_draining_nodes() -> dict[str, float]:
    """Ids in hex of the draining nodes, each with its deadline (Unix time, s; infinite if none was given). Blocks briefly.

    Only a private API of Ray offers this; Ray Train polls it too. Raises `ClusterError` where it is gone.
    """
    with _private("draining nodes cannot be seen"):
        found: dict[str, int] = ray._private.state.state.get_draining_nodes()
    return _moments(found)


def _moments(found: dict[str, int]) -> dict[str, float]:
    """Ray's deadlines (ms, 0 for none) in seconds."""
    return {node: at / 1000 if at > 0 else math.inf for node, at in found.items()}


@contextlib.contextmanager
def _private(what: str) -> Iterator[None]:
    """Turn the absence of a private API of Ray, which other versions may lack, into a `ClusterError`."""
    try:
        for name in ("_private.state", "_raylet", "core.generated.autoscaler_pb2", "core.generated.gcs_pb2"):
            importlib.import_module(f"ray.{name}")
        yield
    except (ImportError, AttributeError, TypeError) as error:
        raise ClusterError(f"{what} with Ray {ray.__version__}: {error}", cure="use ray 2.60") from error
