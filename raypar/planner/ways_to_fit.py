"""The ways in which a plan may need less memory for the same results, and which of those that fit is taken."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from typing import NamedTuple, TypeVar

from raypar.plan import ParallelPlan
from raypar.plan.gradient_scatter import GradientRoute
from raypar.plan.stage_plan import GATHER_SPANS
from raypar.planner.model_profile import ModelProfile
from raypar.planner.zero_options import ZeroOption, zero_options

T = TypeVar("T")

ABOUT_AS_FAST = 0.03
"""Predictions that differ by no more than this share are of equal worth: measured steps differ by more from run to run."""


class WayToFit(NamedTuple):
    """A plan with the same results that may need less memory than the one that it was made of."""

    plan: ParallelPlan
    changes: tuple[str, ...]
    """What it sets that the other one does not."""
    cost: tuple[int, ...]
    """Sort key of ways that are predicted to be as fast: (layers that it recomputes, span of a gather, whether it scatters,
    ZeRO stage)."""

    @property
    def changes_zero_alone(self) -> bool:
        """Whether it differs in nothing but the state that replicas divide."""
        recomputed, _, scatters, _ = self.cost
        return not recomputed and not scatters

    def __str__(self) -> str:
        return " and ".join(self.changes)


def ways_to_fit(
    profile: ModelProfile, plan: ParallelPlan, *, zero_is_open: bool, scatter_is_open: bool, recompute_is_open: bool
) -> list[WayToFit]:
    """The plan itself, and all that an open choice allows beside it, by `WayToFit.cost`: every ZeRO stage and span of a gather,
    gradients that are folded or scattered, and no layers recomputed but the plan's own, or all that can be."""
    zeros: list[ZeroOption | None] = [None, *(zero_options(profile, plan) if zero_is_open else ())]
    may_scatter = scatter_is_open and max(stage.replicas for stage in plan.stages) > 1
    routes = dict.fromkeys((plan.gradients, "scatter" if may_scatter else plan.gradients))
    more = tuple(sorted({*plan.recompute, *profile.recomputable}.difference(plan.offload)))
    recomputed = dict.fromkeys((plan.recompute, more if recompute_is_open else plan.recompute))
    found = [_way(profile, plan, *each) for each in product(zeros, routes, recomputed)]
    return sorted(found, key=lambda way: way.cost)


def _way(
    profile: ModelProfile, plan: ParallelPlan, zero: ZeroOption | None, route: GradientRoute, recompute: tuple[int, ...]
) -> WayToFit:
    made = plan if zero is None else zero.of(plan, plan.zero_holders)
    made = replace(made.with_gradients(route), recompute=recompute)
    changes = [] if zero is None else [str(zero)]
    changes += [f"plan.gradients={route}"] if route != plan.gradients else []
    if recompute != plan.recompute:
        count, every = len(recompute), len(profile.layers)
        changes.append("plan.recompute=full" if count == every else f"recomputation of {count} of {every} layers")
    span = max(GATHER_SPANS.index(each) for each in made.gather_spans)
    return WayToFit(made, tuple(changes), (len(recompute), span, int(route == "scatter"), made.most_zero))


def cheapest_of_fastest(ways: Sequence[T], ms: Callable[[T], float]) -> T:
    """The first of those that are about as fast as the fastest (`ABOUT_AS_FAST`). `ways`: by what they cost otherwise; `ms`:
    the predicted time of one."""
    fastest = min(map(ms, ways))
    return next(way for way in ways if ms(way) <= (1 + ABOUT_AS_FAST) * fastest)
