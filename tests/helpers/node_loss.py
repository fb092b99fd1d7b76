"""Nodes of a cluster with a run on it: one that may be lost, and what the run must give all the same."""

from __future__ import annotations

from typing import Any

from helpers.trainee import Trainee, Undisturbed

from raypar.actors.local_nodes import LocalNode
from raypar.actors.ray_connection import RayConnection


def worker_node(trainee: Trainee, cluster: RayConnection) -> tuple[LocalNode, list[dict[str, Any]]]:
    """A node that has workers and is not the head: (it, the workers there)."""
    there = trainee.members["members"]
    node = next(n for n in cluster.nodes if not n.head and any(m["node"] == n.node[:8] for m in there))
    return node, [m for m in there if m["node"] == node.node[:8]]


def assert_undisturbed(trainee: Trainee, undisturbed: Undisturbed) -> None:
    """The run has ended with the same bits, and its client was told every step once, in order."""
    assert trainee.result.end == "done", trainee.result.why
    assert trainee.result.weights_sha256 == undisturbed.weights_sha256
    assert trainee.losses == undisturbed.losses
    steps = [event["step"] for event in trainee.told("step")]
    assert steps == list(range(1, len(steps) + 1))
