"""The division of a step's batch: samples into microbatches, microbatches into blocks.

Replicas get whole blocks. Inside a block gradients are added in order of microbatches, over blocks by the
tree of `addition_tree.py` (rule 6 of raypar/NUMERICS.md): the bits depend on the number of blocks, not on that of
replicas.
"""

from __future__ import annotations

from dataclasses import dataclass

from raypar.errors import PlanError

DEFAULT_MAX_BLOCKS = 16


def contiguous_part(index: int, parts: int, total: int) -> range:
    """Part `index` of `total` things cut into `parts` contiguous runs: [floor(i t/p), floor((i+1) t/p))."""
    return range(index * total // parts, (index + 1) * total // parts)


def contiguous_part_index(item: int, parts: int, total: int) -> int:
    """The part that holds `item`: the inverse of `contiguous_part`."""
    return ((item + 1) * parts - 1) // total


@dataclass(frozen=True, slots=True)
class Microbatches:
    """The microbatches of a step's batch, in contiguous blocks."""

    count: int
    """Number of microbatches in a step."""
    blocks: int = 0
    """Number of blocks (`virtual_replicas` in the job file); given as 0, it becomes `count`, but at most 16."""
    batch_size: int = 0
    """Samples in a step, over the whole job; 0 if only the order of microbatches matters (simulation)."""

    def __post_init__(self) -> None:
        if self.count < 1:
            raise PlanError(f"{self.count} microbatches a step", cure="set microbatches >= 1")
        if self.batch_size and self.count > self.batch_size:
            raise PlanError(
                f"{self.count} microbatches cannot be cut from a batch of {self.batch_size} samples",
                cure=f"set microbatches <= {self.batch_size}, or raise batch_size",
            )
        if self.blocks < 0:
            raise PlanError(f"virtual_replicas is {self.blocks}", cure="set virtual_replicas >= 1")
        if self.blocks == 0:
            object.__setattr__(self, "blocks", min(self.count, DEFAULT_MAX_BLOCKS))

    def samples(self, microbatch: int) -> range:
        """Offsets of the microbatch's samples inside the step's batch."""
        return contiguous_part(microbatch, self.count, self.batch_size)

    def microbatches_of_block(self, block: int) -> range:
        """The microbatches of a block; a block may have none."""
        return contiguous_part(block, self.blocks, self.count)

    def block_of(self, microbatch: int) -> int:
        """The block of a microbatch."""
        return contiguous_part_index(microbatch, self.blocks, self.count)
