"""Plans in which workers compute several virtual shards."""

from dataclasses import replace

from raypar.plan import ParallelPlan


def divided(plan: ParallelPlan, division: tuple[int, ...]) -> ParallelPlan:
    """The plan with the same division of virtual shards in all stages."""
    return replace(plan, stages=tuple(replace(stage, division=division) for stage in plan.stages))
