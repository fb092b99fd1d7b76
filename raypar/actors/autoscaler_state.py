"""What Ray's autoscaler says of the placement groups that it cannot place, and the nodes that there are."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

import ray

from raypar.actors.cluster_info import ANSWER_S
from raypar.elastic.worker_placement import ZONE_LABEL


@dataclass(frozen=True)
class NodeFacts:
    """What Ray knows of a live node."""

    resources: Mapping[str, float] = field(default_factory=dict)
    """All of its resources, used or free; `memory` in bytes."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """Its labels."""


NO_FACTS = NodeFacts()


@dataclass(frozen=True)
class AutoscalerVerdict:
    """What the autoscaler said last."""

    infeasible: frozenset[str] = frozenset()
    """Ids of the placement groups for which it has no node, and may add none."""
    launching: bool = False
    """Whether nodes are being launched."""


def read_autoscaler_verdict() -> AutoscalerVerdict:
    """The verdict of version 2 of Ray's autoscaler; without one nothing is infeasible.

    Only private parts of Ray read it, hence the broad `suppress`: without them a run waits until its deadline.
    """
    with contextlib.suppress(Exception):
        reply = ray.core.generated.autoscaler_pb2.GetClusterStatusReply()
        client = ray._raylet.GcsClient(address=ray.get_runtime_context().gcs_address)
        reply.ParseFromString(client.get_cluster_status(timeout_s=ANSWER_S))
        state = reply.autoscaling_state
        ids = (request.details.partition(":")[0] for request in state.infeasible_gang_resource_requests)
        return AutoscalerVerdict(frozenset(ids), bool(state.pending_instances or state.pending_instance_requests))
    return AutoscalerVerdict()


def list_node_facts() -> dict[str, NodeFacts]:
    """Node id -> what Ray knows of the node, of all live nodes."""
    return {
        node["NodeID"]: NodeFacts(dict(node["Resources"]), dict(node.get("Labels") or {}))
        for node in ray.nodes()
        if node["Alive"]
    }


def zones_of_nodes(facts: Mapping[str, NodeFacts]) -> dict[str, str]:
    """Node -> its availability zone, of nodes that have such a label."""
    return {node: known.labels[ZONE_LABEL] for node, known in facts.items() if ZONE_LABEL in known.labels}


def memory_per_worker(placed: Mapping[int, str], facts: Mapping[str, NodeFacts]) -> int | None:
    """The least memory that one of the placed workers (worker -> node) has, if each has its share; None where no node says."""
    workers = Counter(placed.values())
    shares = [
        facts[node].resources["memory"] / n for node, n in workers.items() if "memory" in facts.get(node, NO_FACTS).resources
    ]
    return int(min(shares)) if shares else None
