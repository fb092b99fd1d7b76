"""Which sample lies at each position of the endless stream of samples, computed from the job's seed (rule 1)."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from raypar.errors import DataError
from raypar.plan.seeds import seed_of

SamplePosition = tuple[int, int]
"""(epoch, sample id)."""


@dataclass
class SampleOrder:
    """Which sample lies at each position of the endless stream of samples."""

    seed: int
    """The job's seed."""
    size: int
    """Samples in an epoch."""
    shuffle: bool = True
    """Whether each epoch has an order of its own; else every epoch is 0, 1, 2, ..."""
    _permutations: dict[int, Tensor] = field(default_factory=dict, repr=False)
    """Epoch -> its order, of the epochs used last."""

    def __post_init__(self) -> None:
        if self.size < 1:
            raise DataError(f"a data set of {self.size} samples", cure="give it at least one")

    def ids(self, start: int, stop: int) -> list[SamplePosition]:
        """(epoch, id) of stream positions [start, stop)."""
        found: list[SamplePosition] = []
        while start < stop:
            epoch, first = divmod(start, self.size)
            last = min(self.size, first + stop - start)
            entries = self._order(epoch)[first:last].tolist() if self.shuffle else range(first, last)
            found += [(epoch, entry) for entry in entries]
            start += last - first
        return found

    def _order(self, epoch: int) -> Tensor:
        """The order of one epoch's samples; kept for two epochs, because a step may reach from one into the next."""
        if epoch not in self._permutations:
            generator = torch.Generator().manual_seed(seed_of(self.seed, "epoch", epoch))
            while len(self._permutations) > 1:
                del self._permutations[min(self._permutations)]
            self._permutations[epoch] = torch.randperm(self.size, generator=generator)
        return self._permutations[epoch]
