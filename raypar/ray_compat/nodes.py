"""Ray's tables: lists the live and the draining nodes of a cluster, drains a node, finds the placement group of an entry."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup

from raypar.errors import ClusterError, ConfigError
from raypar.fences.private_api_fence import Fence
from raypar.ray_compat import TESTED
from raypar.ray_compat.autoscaler import ANSWER_S


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


def _look_for_node_table() -> Any:
    from ray._raylet import GcsClient
    from ray.core.generated import gcs_pb2

    assert callable(GcsClient)  # its methods can be looked up only on an instance, which connects
    return gcs_pb2.GcsNodeInfo.GcsNodeState.ALIVE


NODE_TABLE = Fence(
    api="ray._raylet.GcsClient.get_all_node_info",
    reason="`ray.nodes` needs a process that has joined the cluster, which `raypar drain` does not",
    versions=TESTED,
    feature="asking a cluster for its nodes",
    without="`raypar drain` cannot find the node",
    probe=_look_for_node_table,
)


def list_live_nodes(address: str) -> list[ClusterNode]:
    """The live nodes of the cluster whose control store answers at `host:port`; this process need not have joined it.

    Raises `ClusterError`.
    """
    with NODE_TABLE.requiring() as alive:
        from ray._raylet import GcsClient

        try:
            infos: dict[Any, Any] = GcsClient(address=address).get_all_node_info(timeout=ANSWER_S)
        except RayError as error:
            raise ClusterError(
                f"the Ray cluster at {address} does not list its nodes: {str(error).strip().splitlines()[0]}",
                cure="check the address; for a cluster with tokens (Ray 2.59 and later) set RAY_AUTH_MODE=token",
            ) from error
        return [
            ClusterNode(id.hex(), info.node_manager_address, int(info.resources_total.get("CPU", 0)), info.is_head_node)
            for id, info in infos.items()
            if info.state == alive
        ]


def find_node(word: str, nodes: Sequence[ClusterNode]) -> ClusterNode:
    """The node whose id begins with `word` or whose address is `word`. Raises `ConfigError` unless there is exactly one."""
    found = [node for node in nodes if node.node.startswith(word.lower())] or [node for node in nodes if node.ip == word]
    if len(found) == 1:
        return found[0]
    if found:
        what = f"{len(found)} nodes are called {word!r}"
        raise ConfigError(what, cure=f"give more of the id: {', '.join(map(str, found))}")
    raise ConfigError(f"no node is called {word!r}", cure=f"the nodes are {', '.join(map(str, nodes))}")


def _look_for_draining_nodes() -> ModuleType:
    from ray._private import state
    from ray._raylet import GcsClientOptions, GlobalStateAccessor

    assert callable(GcsClientOptions.create) and callable(GlobalStateAccessor.get_draining_nodes)
    assert callable(state.state.get_draining_nodes)
    return state


DRAINING_NODES = Fence(
    api="ray._private.state.state.get_draining_nodes",
    reason="no public API lists draining nodes; Ray Train polls this one too",
    versions=TESTED,
    feature="seeing which nodes are being drained",
    without="workers do not move off a node before it leaves; the run recovers when the node is gone, as if it had died",
    probe=_look_for_draining_nodes,
)


def list_draining_nodes() -> dict[str, float]:
    """Draining node's id in hex -> its deadline (Unix time, s; infinite if none was given). Blocks briefly.

    Empty, after a warning, if this Ray has no such list. Raises Ray's errors if the head does not answer.
    """
    return DRAINING_NODES.use(lambda api: _deadlines_s(api.state.get_draining_nodes()), {})


def list_draining_nodes_of_cluster(address: str) -> dict[str, float]:
    """`list_draining_nodes` of the cluster at `host:port`, which this process need not have joined. Raises `ClusterError`."""
    with DRAINING_NODES.requiring():
        from ray._raylet import GcsClientOptions, GlobalStateAccessor

        options = GcsClientOptions.create(address, None, allow_cluster_id_nil=True, fetch_cluster_id_if_nil=True)
        accessor = GlobalStateAccessor(options)
        if not accessor.connect():
            raise ClusterError(f"the Ray cluster at {address} does not list its draining nodes", cure="check the address")
        return _deadlines_s(accessor.get_draining_nodes())


def _deadlines_s(deadlines_ms: dict[str, int]) -> dict[str, float]:
    """Ray's deadlines in seconds; infinite for Ray's 0 (none given)."""
    return {node: at / 1000 if at > 0 else math.inf for node, at in deadlines_ms.items()}


def _look_for_draining() -> Any:
    from ray._raylet import GcsClient
    from ray.core.generated import autoscaler_pb2

    assert callable(GcsClient)
    return autoscaler_pb2.DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")


DRAINING = Fence(
    api="ray._raylet.GcsClient.drain_node",
    reason="only a hidden command of Ray (`ray drain-node`) drains nodes",
    versions=TESTED,
    feature="draining a node",
    without="`raypar drain` does not work",
    probe=_look_for_draining,
)


def drain_node(address: str, node: ClusterNode, deadline_s: float, reason: str) -> None:
    """Tell Ray that a node leaves in `deadline_s` seconds, as a cloud does before it takes a machine back.

    Ray starts nothing new on the node, and ends its raylet once nothing runs there any more. A run that polls
    `list_draining_nodes` moves its workers off. Raises `ConfigError` for the head: the cluster would end with it.
    """
    if node.head:
        raise ConfigError(f"node {node} cannot be drained: the cluster ends with its head", cure="drain one of the other nodes")
    with DRAINING.requiring() as reason_code:
        from ray._raylet import GcsClient

        try:
            # Ray accepts ids that are not in the cluster, too: `node` must come from `list_live_nodes`.
            accepted, rejection = GcsClient(address=address).drain_node(
                node.node, reason_code, reason, int(1000 * (time.time() + deadline_s))
            )
        except RayError as error:
            raise ClusterError(
                f"the Ray cluster at {address} does not answer the request to drain node {node}: {error}", cure="try again"
            ) from error
    if not accepted:
        raise ClusterError(
            f"Ray refuses to drain node {node}: {rejection}", cure="remove the reason that Ray gives, then try again"
        )


def _look_for_ids() -> Any:
    from ray._raylet import PlacementGroupID

    assert callable(PlacementGroupID)
    return PlacementGroupID


IDS = Fence(
    api="ray._raylet.PlacementGroupID",
    reason="`ray.util.get_placement_group` finds no group of another job, and a driver that takes over may be of another",
    versions=TESTED,
    feature="removing placement groups of an earlier driver",
    without="resources that an earlier driver has reserved stay reserved until the cluster is restarted, or a program of that "
    "Ray job calls `ray.util.remove_placement_group`",
    probe=_look_for_ids,
)


def placement_group_of(info: Mapping[str, str]) -> PlacementGroup:
    """The placement group of an entry of Ray's table. Raises `ClusterError` if this Ray has no `PlacementGroupID`."""
    with IDS.requiring() as make_id:
        return PlacementGroup(make_id(bytes.fromhex(info["placement_group_id"])))
