"""How many microbatches' gradients find room in the memory of a stage in which they are on their way to their owners."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from raypar.plan.model_outline import ModelOutline
from raypar.plan.ownership import Ownership
from raypar.plan.parallel_plan import ParallelPlan

ALIGNED_ELEMENTS, ALIGNED_BYTES = 16, 64
"""In a message each run of a parameter begins at a multiple of so many elements, and each tensor at one of so many bytes."""
LEAST_BUCKET_BYTES = 2 << 20
"""A bucket of messages has so many bytes, unless it is the last one of its dtype."""


@dataclass(frozen=True, slots=True)
class GradientPool:
    """The memory of a stage for gradients that are scattered: how far a replica may be ahead of the others in it."""

    limit: int
    """Its bytes."""
    outline: ModelOutline
    """The model."""
    itemsize: int
    """Bytes of an element of a gradient, at most."""

    def microbatches(self, plan: ParallelPlan, stages: Iterable[int]) -> int:
        """How many microbatches of any of these stages find room whole: so far may a replica be ahead of the others."""
        return min(self.limit // max(1, nbytes) for stage in stages for nbytes in self._of_one(plan, stage))

    def least_mib(self, plan: ParallelPlan, stages: Iterable[int], microbatches: int) -> int:
        """The smallest memory with room for so many microbatches, in MiB."""
        return max(-(-microbatches * nbytes >> 20) for stage in stages for nbytes in self._of_one(plan, stage))

    def _of_one(self, plan: ParallelPlan, stage: int) -> list[int]:
        """By virtual shard: the pool that has room for one microbatch, on the replica that needs most: for what is sent, and
        for what others send meanwhile. The virtual shards of a worker divide the pool evenly."""
        place, ownership = plan.stages[stage], Ownership(plan, self.outline)
        uses = Counter(name for layer in self.outline.elements[place.first : place.last] for name in layer)
        runs_of = ownership.runs if plan.divides_state(stage) else ownership.owned_runs
        found = []
        for number, beside in ((number, len(run)) for run in place.runs for number in run):
            of_replicas = [runs_of(stage, number, replica) for replica in range(place.replicas)]
            held = [
                sum(uses[one.name] * -(-(one.stop - one.start) // ALIGNED_ELEMENTS) for one in runs) * ALIGNED_ELEMENTS
                for runs in of_replicas
            ]
            nbytes = self.itemsize * (sum(held) + (place.replicas - 1) * max(held))
            buckets = self.itemsize * sum(held) // LEAST_BUCKET_BYTES + len(uses)
            found.append(beside * (nbytes + 2 * buckets * place.replicas * ALIGNED_BYTES))
        return found
