"""A placement group of Ray's table as an object, which Ray itself finds only for the job that has made it."""

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
    without="what an earlier run has reserved stays reserved: `ray.util.remove_placement_group` in a program of that job, or a "
    "new cluster, frees it",
    probe=_look_for_ids,
)


def placement_group_of(info: Mapping[str, Any]) -> PlacementGroup:
    """The placement group of an entry of Ray's table. Raises `ClusterError` for a Ray without such ids."""
    with IDS.required() as make_id:
        return PlacementGroup(make_id(bytes.fromhex(info["placement_group_id"])))
