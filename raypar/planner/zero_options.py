"""The ways in which replicas of a plan may divide state, in the order of what they cost in time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from raypar.plan import ParallelPlan
from raypar.plan.stage_plan import GATHERS_FROM, GatherSpan
from raypar.planner.model_profile import ModelProfile
from raypar.schedule.gathering import MOST_STAGES_TOGETHER


class ZeroOption(NamedTuple):
    """A ZeRO stage, and how long parameters are whole with it."""

    level: int
    gather: GatherSpan = "step"

    def of(self, plan: ParallelPlan, holders: int | None = None) -> ParallelPlan:
        """The plan with it. `holders`: of each part of the state; None: as many as now."""
        return plan.with_zero(self.level, holders).with_gather(self.gather)

    def __str__(self) -> str:
        return f"plan.zero={self.level}" + f" and plan.gather={self.gather}" * (self.gather != "step")


WHOLE = ZeroOption(0)
"""Every replica has everything."""


def zero_options(profile: ModelProfile, plan: ParallelPlan) -> Iterator[ZeroOption]:
    """The ways from level 1 on that the profile allows and with which workers of a plan keep less, the one that costs least
    time first.

    Parameters that are gathered once a step need as much memory as at level 2. By microbatch they need less where a worker has
    so many stages that not all are whole together.
    """
    for level in profile.zero_levels:
        if level and level < GATHERS_FROM and plan.with_zero(level).most_zero:
            yield ZeroOption(level)
    if GATHERS_FROM not in profile.zero_levels or not plan.with_zero(GATHERS_FROM).most_zero:
        return
    if max(len(plan.stages_of(rank)) for rank in range(plan.world)) > MOST_STAGES_TOGETHER:
        yield ZeroOption(GATHERS_FROM, "microbatch")
    yield ZeroOption(GATHERS_FROM, "layer")
