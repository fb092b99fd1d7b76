"""Which layers are recomputed: the names and patterns of `plan.recompute` as layer indices."""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Sequence
from dataclasses import replace

from raypar.errors import PlanError
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
    patterns = (policy,) if isinstance(policy, str) else policy
    for pattern in patterns:
        if not any(fnmatch.fnmatchcase(name, pattern) for name in names):
            near = difflib.get_close_matches(pattern, names, n=3, cutoff=0.4)
            raise PlanError(
                f"plan.recompute has {pattern!r}, which matches none of the {len(names)} layers",
                cure=(f"did you mean {' or '.join(near)}? " if near else "")
                + f"layers are {_shorten_names(names)}; a pattern may have * and ?; all of them: full",
            )
    return tuple(i for i, name in enumerate(names) if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns))


def apply_recompute_policy(plan: ParallelPlan, policy: RecomputePolicy, names: Sequence[str]) -> ParallelPlan:
    """The plan with the recomputed layers that the policy names. Under `none` the plan keeps those that it has itself."""
    return plan if policy == "none" else replace(plan, recompute=resolve_recomputed_layers(policy, names))


def describe_recomputed_layers(layers: Sequence[int], names: Sequence[str]) -> str:
    """The recomputed layers as text: `all 8 layers`, `3 of 8 layers: block0, block1, block2`; empty for none."""
    if not layers:
        return ""
    if len(layers) == len(names):
        return f"all {len(names)} layers"
    return f"{len(layers)} of {len(names)} layers: {_shorten_names([names[i] for i in layers])}"


def _shorten_names(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) <= 6 else f"{', '.join(names[:4])}, ..., {names[-1]}"
