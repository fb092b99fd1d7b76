"""The `PlacementGroup` object for an entry of Ray's table, also for groups that another Ray job has made."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ray.util.placement_group import PlacementGroup

from raypar.fences.fence import Fence
from raypar.ray_compat import TESTED


def _look_for_ids() -> Any:
    from ray._raylet import PlacementGroupID

    assert callable(PlacementGroupID)
    return PlacementGroupID


IDS: Fence[Any] = Fence(
    api="ray._raylet.PlacementGroupID",
    reason="`ray.util.get_placement_group` finds no group of another job, and a driver that takes over may be of another",
    versions=TESTED,
    feature="removing placement groups of an earlier driver",
    without="resources that an earlier driver has reserved stay reserved until the cluster is restarted, or a program of that "
    "Ray job calls `ray.util.remove_placement_group`",
    probe=_look_for_ids,
)


def placement_group_of(info: Mapping[str, Any]) -> PlacementGroup:
    """The placement group of an entry of Ray's table. Raises `ClusterError` if this Ray has no `PlacementGroupID`."""
    with IDS.required() as make_id:
        return PlacementGroup(make_id(bytes.fromhex(info["placement_group_id"])))
