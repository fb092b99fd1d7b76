"""Of which layers the activations are offloaded: `plan.offload` as layer indices."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from raypar.errors import PlanError
from raypar.plan.layer_patterns import match_layer_patterns, shorten_layer_names
from raypar.plan.parallel_plan import ParallelPlan

OffloadPolicy = str | tuple[str, ...]
"""`none`, `full` (all layers that are not recomputed), or patterns of layer names (`*` and `?`)."""

HOST = "host"
"""In the place of a folder: the memory of the host."""
SMALLEST_OFFLOADED_BYTES = 16 << 10
"""Memory below this size is not offloaded: to write and read it would cost more calls than bytes."""
MOST_UNWRITTEN_BYTES = 32 << 20
"""How much a worker holds that is still to be written, unless one layer has less, or one piece of memory alone is larger; then
a forward waits."""
LAYERS_AT_A_TIME = 2
"""Of so many offloaded layers a backward has the activations at once: of the one that computes, and of the next one."""


def resolve_offloaded_layers(policy: OffloadPolicy, names: Sequence[str], recomputed: Collection[int] = ()) -> tuple[int, ...]:
    """Indices of the layers to offload, ascending. `names`: the model's layer names, in order; `recomputed`: the indices of
    those that are recomputed.

    Raises `PlanError` for a pattern that matches no layer, and for layers that are recomputed.
    """
    if policy == "none":
        return ()
    if policy == "full":
        return tuple(index for index in range(len(names)) if index not in recomputed)
    found = match_layer_patterns("plan.offload", (policy,) if isinstance(policy, str) else policy, names)
    if both := [names[index] for index in found if index in recomputed]:
        raise PlanError(
            f"plan.offload and plan.recompute both name {shorten_layer_names(both)}: what is computed again need not be kept",
            cure="name each layer in one of them; with plan.activations_in alone, all layers that are not recomputed are "
            "offloaded",
        )
    return found


def apply_offload_policy(plan: ParallelPlan, policy: OffloadPolicy, names: Sequence[str]) -> ParallelPlan:
    """The plan with the offloaded layers that the policy names. Under `none` the plan keeps those that it has itself."""
    return plan if policy == "none" else replace(plan, offload=resolve_offloaded_layers(policy, names, plan.recompute))
