"""Ray's autoscaler: whether one runs, how far it may grow the cluster, and which placement groups it cannot place."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import ray
from ray.exceptions import RayError

from raypar.fences.private_api_fence import Fence
from raypar.ray_compat import TESTED

ANSWER_S = 10.0
"""How long Ray's control store may take to answer."""
NO_ANSWER = (RayError, RuntimeError, OSError)
"""Errors of a head that does not answer."""
ANONYMOUS = re.compile(r"node_[0-9a-f]{56}")
"""Name that Ray generates for a node whose type nobody has defined. An autoscaler with only such nodes adds none."""


def _look_for_capacity() -> Callable[[], Mapping[str, int] | None]:
    from ray._private.state import state

    return state.get_max_resources_from_cluster_config


CAPACITY = Fence(
    api="ray._private.state.state.get_max_resources_from_cluster_config",
    reason="no public API returns the limits that the autoscaler publishes",
    versions=TESTED,
    feature="knowing how far an autoscaler may grow the cluster",
    without="a plan that needs more is not refused at once; its run waits until its deadline",
    probe=_look_for_capacity,
)


def _look_for_status() -> ModuleType:
    """The module of the status messages. Also checks the functions for both autoscaler versions and all fields in use."""
    from ray._private import ray_constants
    from ray._raylet import GcsClient
    from ray.core.generated import autoscaler_pb2
    from ray.experimental import internal_kv

    assert callable(internal_kv._internal_kv_get) and callable(GcsClient)  # its methods can be looked up only on an instance
    assert isinstance(ray_constants.DEBUG_AUTOSCALING_STATUS, str)
    reply = autoscaler_pb2.GetClusterStatusReply()
    for message, field in (
        (reply.cluster_resource_state, "node_states"),
        (reply.autoscaling_state, "autoscaler_state_version"),
        (reply.autoscaling_state, "infeasible_gang_resource_requests"),
        (reply.autoscaling_state, "pending_instances"),
        (reply.autoscaling_state, "pending_instance_requests"),
        (autoscaler_pb2.NodeState(), "ray_node_type_name"),
        (autoscaler_pb2.GangResourceRequest(), "details"),
    ):
        getattr(message, field)
    found: ModuleType = autoscaler_pb2
    return found


STATUS = Fence(
    api="ray._raylet.GcsClient.get_cluster_status",
    reason="`ray status` prints the autoscaler's status; no public API returns it",
    versions=TESTED,
    feature="seeing an autoscaler",
    without="a run asks for no more workers than the present nodes can hold, and waits until its deadline for workers that the "
    "autoscaler knows it cannot place",
    probe=_look_for_status,
)


def autoscaler_capacity(resource: str) -> int | None:
    """How much of `resource` the cluster may have once an autoscaler has grown it; None if unknown, as always with Ray 2.60."""

    def ask(api: Callable[[], Mapping[str, int] | None]) -> int | None:
        most = api()
        return int(most[resource]) if most and resource in most else None

    return CAPACITY.use(ask, None)


def has_autoscaler() -> bool:
    """Whether an autoscaler, of version 1 or 2, runs that may add nodes. False if Ray's control store does not answer."""

    def ask(pb2: ModuleType) -> bool:
        if autoscaler_has_node_types(_status_of_version_1()):
            return True
        reply = _ask_version_2(pb2)
        types = [node.ray_node_type_name for node in reply.cluster_resource_state.node_states]
        return bool(reply.autoscaling_state.autoscaler_state_version > 0 and any(map(is_user_defined_node_type, types)))

    with contextlib.suppress(*NO_ANSWER):
        return STATUS.use(ask, False)
    return False


def _status_of_version_1() -> bytes | None:
    """The status, as JSON, that version 1 writes to Ray's key-value store; None if there is none."""
    from ray._private import ray_constants
    from ray.experimental.internal_kv import _internal_kv_get

    found = _internal_kv_get(ray_constants.DEBUG_AUTOSCALING_STATUS.encode())
    if not isinstance(found, (bytes, type(None))):
        raise TypeError(f"the autoscaler's status is {type(found).__name__}")
    return found


def _ask_version_2(pb2: ModuleType) -> Any:
    """The `GetClusterStatusReply` of version 2."""
    from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
    from ray._raylet import GcsClient

    reply = pb2.GetClusterStatusReply()
    try:
        reply.ParseFromString(GcsClient(address=ray.get_runtime_context().gcs_address).get_cluster_status(timeout_s=ANSWER_S))
    except DecodeError as error:
        raise ValueError(f"its answer cannot be read: {error}") from error
    return reply


def autoscaler_has_node_types(status: bytes | None) -> bool:
    """Whether the status of a version 1 autoscaler names user-defined node types, so that it can add nodes."""
    try:
        report = json.loads(status or b"{}").get("autoscaler_report") or {}
    except ValueError:
        return False
    seen = [*(report.get("active_nodes") or ()), *(report.get("idle_nodes") or ()), *(report.get("pending_launches") or ())]
    return any(map(is_user_defined_node_type, seen))


def is_user_defined_node_type(node_type: str) -> bool:
    """Whether the name of a node type is one that a user has defined."""
    return bool(node_type) and ANONYMOUS.fullmatch(node_type) is None


@dataclass(frozen=True)
class AutoscalerAnswer:
    """The autoscaler's last answer."""

    infeasible: frozenset[str] = frozenset()
    """Ids of the placement groups for which the cluster has no node and the autoscaler may add none."""
    launching: bool = False
    """Whether nodes are being launched."""


def read_autoscaler_answer() -> AutoscalerAnswer:
    """The answer of version 2 of Ray's autoscaler; an empty one (nothing is infeasible) if there is none, or no answer."""

    def ask(pb2: ModuleType) -> AutoscalerAnswer:
        state = _ask_version_2(pb2).autoscaling_state
        ids = (request.details.partition(":")[0] for request in state.infeasible_gang_resource_requests)
        return AutoscalerAnswer(frozenset(ids), bool(state.pending_instances or state.pending_instance_requests))

    with contextlib.suppress(*NO_ANSWER):
        return STATUS.use(ask, AutoscalerAnswer())
    return AutoscalerAnswer()
