"""The placement groups that Ray's autoscaler cannot place, and the resources and labels of the live nodes."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

import ray

from raypar.actors.cluster_info import ANSWER_S
from raypar.elastic.placement_constraints import ZONE_LABEL


@dataclass(frozen=True)
class NodeResources:
    """The resources and labels of a live node."""

    resources: Mapping[str, float] = field(default_factory=dict)
    """All of its resources, used or free; `memory` in bytes."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """Its labels."""


UNKNOWN_NODE = NodeResources()
"""Stands for a node that Ray does not list."""


@dataclass(frozen=True)
class AutoscalerAnswer:
    """The autoscaler's last answer."""

    infeasible: frozenset[str] = frozenset()
    """Ids of the placement groups for which the cluster has no node and the autoscaler may add none."""
    launching: bool = False
    """Whether nodes are being launched."""


def read_autoscaler_answer() -> AutoscalerAnswer:
    """The answer of version 2 of Ray's autoscaler; an empty one (nothing is infeasible) if there is none.

    Only private functions of Ray can ask for it, hence the broad `suppress`: if they fail, a run waits until its deadline.
    """
    with contextlib.suppress(Exception):
        reply = ray.core.generated.autoscaler_pb2.GetClusterStatusReply()
        client = ray._raylet.GcsClient(address=ray.get_runtime_context().gcs_address)
        reply.ParseFromString(client.get_cluster_status(timeout_s=ANSWER_S))
        state = reply.autoscaling_state
        ids = (request.details.partition(":")[0] for request in state.infeasible_gang_resource_requests)
        return AutoscalerAnswer(frozenset(ids), bool(state.pending_instances or state.pending_instance_requests))
    return AutoscalerAnswer()


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
