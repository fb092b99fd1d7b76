"""How many microbatches' gradients find room in the memory of a stage in which they are on their way to their owners."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from raypar.plan.model_outline import ModelOutline
from raypar.plan.parallel_plan import StagePlan

PADDING_BYTES = 1 << 16
"""What alignment may take, for each replica: every run of a parameter begins where a new tensor might."""


@dataclass(frozen=True, slots=True)
class GradientPool:
    """The memory of a stage for gradients that are scattered: how far a replica may be ahead of the others in it."""

    limit: int
    """Its bytes."""
    by_layer: tuple[int, ...]
    """By layer: bytes of its gradients in one microbatch."""

    @staticmethod
    def of(outline: ModelOutline, limit: int, itemsize: int) -> GradientPool:
        """Of a model's gradients, `itemsize` bytes an element."""
        untrained = outline.buffers | outline.frozen
        sizes = (sum(size for name, size in layer.items() if name not in untrained) for layer in outline.elements)
        return GradientPool(limit, tuple(itemsize * size for size in sizes))

    def microbatches(self, stages: Iterable[StagePlan]) -> int:
        """How many microbatches of any of these stages find room whole: so far may a replica be ahead of the others."""
        return min(self.limit // self._of_one(stage) for stage in stages)

    def least_mib(self, stages: Iterable[StagePlan], microbatches: int) -> int:
        """The smallest memory with room for so many microbatches, in MiB."""
        return max(-(-microbatches * self._of_one(stage) >> 20) for stage in stages)

    def _of_one(self, stage: StagePlan) -> int:
        """Bytes for one microbatch: what is sent, and what others send meanwhile."""
        return 2 * stage.zero_holders * sum(self.by_layer[stage.first : stage.last]) + PADDING_BYTES * stage.replicas
