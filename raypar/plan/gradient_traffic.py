"""How many bytes of gradients the replicas of a plan send each other in a step, folded or scattered."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from raypar.plan.addition_tree import covering_nodes
from raypar.plan.microbatch_routing import MicrobatchRouting
from raypar.plan.microbatches import Microbatches
from raypar.plan.ownership import Ownership

ALIGNED_BYTES, ALIGNED_ELEMENTS = 64, 16
"""In a message each run of a parameter begins where a new tensor might: at a multiple of so many bytes and elements."""


@dataclass(frozen=True, slots=True)
class GradientTraffic:
    """Bytes that all workers of a plan send together. Exact but for `fold` where replicas divide nothing: there an exchange of
    even slices is counted, without what aligns them."""

    fold: int
    """Where each replica adds up its own microbatches, and sends the sums."""
    scatter: int
    """Where the gradients of each microbatch are sent."""


def gradient_traffic(ownership: Ownership, microbatches: Microbatches, nbytes: Mapping[str, int]) -> GradientTraffic:
    """What the plan of `ownership` sends either way. `nbytes`: trained parameter -> bytes of its gradient when whole."""
    fold = scatter = 0
    for stage, place in enumerate(ownership.plan.stages):
        for number in range(place.virtual_shards if place.replicas > 1 else 0):
            of_shard = _of_virtual_shard(ownership, microbatches, nbytes, stage, number)
            fold, scatter = fold + of_shard.fold, scatter + of_shard.scatter
    return GradientTraffic(fold, scatter)


def _of_virtual_shard(
    ownership: Ownership, microbatches: Microbatches, nbytes: Mapping[str, int], stage: int, number: int
) -> GradientTraffic:
    plan = ownership.plan
    folded, scattered = (MicrobatchRouting(plan.with_gradients(route), microbatches) for route in ("fold", "scatter"))
    replicas, is_divided = range(plan.stages[stage].replicas), plan.divides_state(stage)
    held = [_held_bytes(ownership, nbytes, stage, number, replica) for replica in replicas]
    sums = [len(covering_nodes(folded.blocks_of_replica(stage, r), microbatches.blocks)) for r in replicas]
    given = Counter(scattered.replica_for(stage, m) for m in range(microbatches.count))
    back = 0 if is_divided else (len(held) - 1) * sum(held)
    """Totals that owners send to the others, where all need all of them."""
    return GradientTraffic(
        sum(sums[r] * (sum(held) - held[r]) for r in replicas) + back,
        sum(given[r] * (sum(held) - held[r]) for r in replicas) + back,
    )


def _held_bytes(ownership: Ownership, nbytes: Mapping[str, int], stage: int, number: int, replica: int) -> int:
    """Bytes of the gradients of which a replica adds up totals, as they lie in messages."""
    plan, elements = ownership.plan, ownership.outline.elements
    layers = elements[plan.stages[stage].first : plan.stages[stage].last]
    uses, sizes = Counter(name for layer in layers for name in layer), {n: s for layer in layers for n, s in layer.items()}
    runs = ownership.runs if plan.divides_state(stage) else ownership.owned_runs
    found = 0
    for run in runs(stage, number, replica):
        itemsize = nbytes[run.name] // sizes[run.name]
        align = max(ALIGNED_ELEMENTS, ALIGNED_BYTES // itemsize)
        found += uses[run.name] * -(-(run.stop - run.start) // align) * align * itemsize
    return found
