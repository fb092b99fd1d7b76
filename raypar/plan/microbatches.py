"""The division of a step's batch: samples into microbatches, these into blocks; and the mean of the microbatches' losses.

Replicas get whole blocks. Inside a block gradients are added in order of microbatches, over blocks by a fixed tree
(`addition_tree.py`): the bits depend on the number of blocks, not on that of replicas.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from raypar.errors import PlanError
from raypar.plan.exact_sum import ExactSum

DEFAULT_MAX_BLOCKS = 16
MAX_STEPS = 10**9
"""Limit of a job's `steps`, and so of steps in a run folder."""


def contiguous_part(index: int, parts: int, total: int) -> range:
    """Part `index` of `total` things cut into `parts` contiguous runs: [floor(i t/p), floor((i+1) t/p))."""
    return range(index * total // parts, (index + 1) * total // parts)


def contiguous_part_index(item: int, parts: int, total: int) -> int:
    """The part that holds `item`: the inverse of `contiguous_part`."""
    return ((item + 1) * parts - 1) // total


@dataclass(frozen=True, slots=True)
class BatchesOfSteps:
    """The batches of consecutive steps of a run that was resumed with others since."""

    steps: int
    """Number of these steps."""
    count: int
    """Number of microbatches in each of them."""
    batch_size: int
    """Samples in each of them."""


@dataclass(frozen=True, slots=True)
class Microbatches:
    """The microbatches of a step's batch, in contiguous blocks."""

    count: int
    """Number of microbatches in a step."""
    blocks: int = 0
    """Number of blocks (`virtual_replicas` in the job file); given as 0, it becomes `count`, but at most 16."""
    batch_size: int = 0
    """Samples in a step, over the whole job; 0 if only the order of microbatches matters (simulation)."""
    former: tuple[BatchesOfSteps, ...] = ()
    """The batches of the first steps, in order, where a resume has changed them; those of all later steps are as above."""

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

    def samples_before(self, step: int) -> int:
        """Samples of all steps before a step (from 0): the place of its first one in the stream of samples (rule 1)."""
        return sum(steps * batching.batch_size for steps, batching in self.steps_before(step))

    def steps_before(self, step: int) -> Iterator[tuple[int, Microbatches]]:
        """(number of steps, their batches) of all steps before a step (from 0), in order."""
        for one in self.former:
            first = min(step, one.steps)
            yield first, Microbatches(one.count, batch_size=one.batch_size)
            step -= first
        yield step, self

    def microbatches_of_block(self, block: int) -> range:
        """The microbatches of a block; a block may have none."""
        return contiguous_part(block, self.blocks, self.count)

    def block_of(self, microbatch: int) -> int:
        """The block of a microbatch."""
        return contiguous_part_index(microbatch, self.blocks, self.count)

    def place_in_set(self, microbatch: int) -> tuple[str, int]:
        """(data set, the microbatch's number in it) of a validation pass; the name of the only one is empty."""
        return "", microbatch

    @property
    def of_each_set(self) -> dict[str, Microbatches]:
        """Data set of a validation pass -> its samples in microbatches, by itself."""
        return {"": self}

    @property
    def by_set(self) -> dict[str, range]:
        """Data set of a validation pass -> its microbatches."""
        return {"": range(self.count)}


@dataclass(frozen=True, slots=True)
class MicrobatchesOfSets(Microbatches):
    """The microbatches of a validation pass over several data sets, numbered over all of them, set after set."""

    sets: tuple[tuple[str, Microbatches], ...] = ()
    """(name, its microbatches) of each set, in order."""

    @staticmethod
    def of(sets: Mapping[str, Microbatches]) -> MicrobatchesOfSets:
        """One pass over these sets, of which no microbatch has samples of two."""
        count = sum(one.count for one in sets.values())
        return MicrobatchesOfSets(count, count, sum(one.batch_size for one in sets.values()), sets=tuple(sets.items()))

    def samples(self, microbatch: int) -> range:
        """Offsets of the microbatch's samples among those of all sets."""
        name, number = self.place_in_set(microbatch)
        before = 0
        for each, batching in self.sets:
            if each == name:
                own = batching.samples(number)
                return range(before + own.start, before + own.stop)
            before += batching.batch_size
        raise AssertionError(f"there is no set {name}")

    def place_in_set(self, microbatch: int) -> tuple[str, int]:
        """See `Microbatches.place_in_set`."""
        found = next((name, own) for name, own in self.by_set.items() if microbatch in own)
        return found[0], microbatch - found[1].start

    @property
    def of_each_set(self) -> dict[str, Microbatches]:
        """See `Microbatches.of_each_set`."""
        return dict(self.sets)

    @property
    def by_set(self) -> dict[str, range]:
        """See `Microbatches.by_set`."""
        found, first = {}, 0
        for name, batching in self.sets:
            found[name] = range(first, first + batching.count)
            first += batching.count
        return found


def mean_loss(losses: Mapping[int, tuple[float, float]]) -> tuple[float, float]:
    """(mean, count) of microbatch -> (sum, count), as `divide_by_count`."""
    return divide_by_count(*(ExactSum.of(pair[index] for pair in losses.values()) for index in range(2)))


def divide_by_count(total: ExactSum, counts: ExactSum) -> tuple[float, float]:
    """(mean, count): both sums are rounded, and then divided (rule 8 of the numerics contract). The mean is NaN where the count
    is no divisor (`is_divisor`)."""
    count = counts.rounded()
    return total.rounded() / count if is_divisor(count) else math.nan, count


def is_divisor(count: float) -> bool:
    """Whether a sum can be divided by a count: it is positive and finite."""
    return 0 < count < math.inf


def mean_loss_by_set(batching: Microbatches | None, losses: Mapping[int, tuple[float, float]]) -> dict[str, float]:
    """Data set -> mean of its microbatches' losses, as `mean_loss`; empty where a pass has one set without a name."""
    if not isinstance(batching, MicrobatchesOfSets):
        return {}
    return {name: mean_loss({m: losses[m] for m in own if m in losses})[0] for name, own in batching.by_set.items()}
