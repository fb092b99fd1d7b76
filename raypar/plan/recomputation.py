"""Which layers are recomputed: the names and patterns of `plan.recompute` as layer indices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from raypar.plan.layer_patterns import match_layer_patterns
from raypar.plan.parallel_plan import ParallelPlan

RecomputePolicy = str | tuple[str, ...]
"""`none`, `full`, or patterns of layer names (`*` and `?`)."""


def resolve_recomputed_layers(policy: RecomputePolicy, names: Sequence[str]) -> tuple[int, ...]:
    """Indices of the layers to recompute, ascending. `names`: the model's layer names, in order.

    Raises `PlanError` for a pattern that matches no layer.
    """
    if policy == "none":
        return ()
    if policy == "full":
        return tuple(range(len(names)))
    return match_layer_patterns("plan.recompute", (policy,) if isinstance(policy, str) else policy, names)


def apply_recompute_policy(plan: ParallelPlan, policy: RecomputePolicy, names: Sequence[str]) -> ParallelPlan:
    """The plan with the recomputed layers that the policy names. Under `none` the plan keeps those that it has itself."""
    return plan if policy == "none" else replace(plan, recompute=resolve_recomputed_layers(policy, names))
