"""The stages of a plan as plan.json and members.json hold them, and back."""

from __future__ import annotations

from collections.abc import Sequence

from raypar.errors import PlanError
from raypar.plan import ParallelPlan, StagePlan
from raypar.plan.stage_plan import WorkerGrid, consecutive_grids
from raypar.record.document_fields import StageFacts

MOST_WORLD = 1 << 16
"""The most workers, and the most stages, of a plan that is read from a file, which is not trusted."""


def stages_as_data(plan: ParallelPlan) -> list[dict[str, int | str | list[int] | list[list[int]]]]:
    """A plan's stages in layer order, as `StageFacts`."""
    return [
        {
            "first": stage.first,
            "last": stage.last,
            "position": grid,
            "replicas": stage.replicas,
            "shards": stage.shards,
            "workers": [list(row) for row in stage.workers],
            "share": list(stage.share),
            "division": list(stage.division),
            "zero": stage.zero,
            "zero_holders": stage.zero_holders,
            "gather": stage.gather,
        }
        for stage, grid in zip(plan.stages, plan.grid_of_stage, strict=True)
    ]


def plan_of_stages(stages: Sequence[StageFacts]) -> ParallelPlan | None:
    """The plan of these stages; None if they give no whole one, or one of an absurd size. Older files have no `workers`."""
    whole = all(isinstance(stage.get(key), int) for stage in stages for key in ("first", "last", "position"))
    if not stages or not whole or len(stages) > MOST_WORLD:
        return None
    shapes = {stage["position"]: (stage["replicas"], stage.get("shards") or 1) for stage in stages}
    if sum(replicas * shards for replicas, shards in shapes.values()) > MOST_WORLD:
        return None
    try:
        grids = dict(zip(sorted(shapes), consecutive_grids(shapes[position] for position in sorted(shapes)), strict=True))
        return ParallelPlan(tuple(_stage(stage, grids[stage["position"]]) for stage in stages))
    except PlanError:
        return None


def _stage(stage: StageFacts, otherwise: WorkerGrid) -> StagePlan:
    share, division = tuple(stage.get("share", ())), tuple(stage.get("division", ()))
    zero, holders, gather = stage.get("zero", 0), stage.get("zero_holders", 1), stage.get("gather", "step")
    return StagePlan(stage["first"], stage["last"], _grid(stage, otherwise), share, division, zero, holders, gather)


def _grid(stage: StageFacts, otherwise: WorkerGrid) -> WorkerGrid:
    return tuple(map(tuple, stage["workers"])) if "workers" in stage else otherwise
