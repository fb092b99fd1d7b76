"""Which sample lies at each position of the endless stream of samples, computed from the job's seed (rule 1)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy
import torch
from torch import Tensor

from raypar.errors import DataError
from raypar.job import Job
from raypar.plan.seeds import seed_of
from raypar.worker.data.indexed_permutation import permuted
from raypar.worker.data.mixed_order import MixedOrder, MixPattern, seed_of_source
from raypar.worker.data.mixture_dataset import Mixture
from raypar.worker.data.sampler_weights_group_by import EpochSampler, make_epoch_sampler
from raypar.worker.data.user_dataset import MapStyleDataset
from raypar.worker.process.torch_state_guard import TorchStateGuard

SamplePosition = tuple[int, int]
"""(epoch, sample id)."""


@dataclass
class SampleOrder:
    """Which sample lies at each position of the endless stream of samples."""

    seed: int
    """The job's seed."""
    size: int
    """Samples of the data set."""
    shuffle: bool | Literal["indexed"] = True
    """Whether each epoch has an order of its own, and how it is computed (`data.shuffle`); False: each is 0, 1, 2, ..."""
    whole_batches_of: int = 1
    """With `data.drop_last` the samples of a batch: an epoch ends with its last whole batch. 1: it has every sample."""
    sampler: EpochSampler | None = None
    """Gives the ids of an epoch, in place of `shuffle`."""
    _permutations: dict[int, Tensor] = field(default_factory=dict, repr=False)
    """Epoch -> its order, of the epochs used last."""

    def __post_init__(self) -> None:
        if self.size < 1:
            raise DataError(f"a data set of {self.size} samples", cure="give it at least one")
        if self.epoch_length < 1:
            raise DataError(
                f"data.drop_last leaves out batches that are not whole, and an epoch has {self.epoch_samples:,} samples for a "
                f"batch_size of {self.whole_batches_of:,}",
                cure=f"set batch_size <= {self.epoch_samples:,}, or leave data.drop_last out",
            )

    @staticmethod
    def of_job(spec: Job, dataset: MapStyleDataset, guard: TorchStateGuard | None = None) -> SampleOrder | MixedOrder:
        """The order of a job's training data. Raises `DataError` for a data set without a whole batch, and what a sampler of
        the job's raises. `guard`: restores process state that a sampler leaves changed."""
        if isinstance(dataset, Mixture):
            pattern = MixPattern.of_ratios(spec.data.ratios)
            sizes, shuffle = dataset.sizes, spec.data.shuffle
            orders = [SampleOrder(seed_of_source(spec.seed, at), size, shuffle) for at, size in enumerate(sizes)]
            return MixedOrder(orders, [sum(sizes[:at]) for at in range(len(sizes))], pattern)
        whole = spec.batch_size if spec.data.drop_last else 1
        sampler = make_epoch_sampler(spec, dataset, guard) if spec.data.names_ids else None
        return SampleOrder(spec.seed, len(dataset), spec.data.shuffle, whole, sampler)

    @property
    def epoch_samples(self) -> int:
        """Samples of an epoch: those of the data set, or as many as the sampler gives."""
        return self.size if self.sampler is None else self.sampler.length

    @property
    def epoch_length(self) -> int:
        """Positions of the stream that an epoch has."""
        return self.epoch_samples // self.whole_batches_of * self.whole_batches_of

    def digest(self, start: int, stop: int) -> int | None:
        """64 bits over the ids of all epochs that stream positions [start, stop) reach; None without a sampler."""
        if self.sampler is None:
            return None
        return self.sampler.digest(range(start // self.epoch_length, (stop - 1) // self.epoch_length + 1))

    def ids(self, start: int, stop: int) -> list[SamplePosition]:
        """(epoch, id) of stream positions [start, stop)."""
        found: list[SamplePosition] = []
        while start < stop:
            epoch, first = divmod(start, self.epoch_length)
            last = min(self.epoch_length, first + stop - start)
            found += [(epoch, entry) for entry in self._entries(epoch, first, last)]
            start += last - first
        return found

    def _entries(self, epoch: int, first: int, last: int) -> Sequence[int]:
        """The ids at places [first, last) of an epoch."""
        if self.sampler is not None:
            drawn: list[int] = self.sampler.ids(epoch)[first:last].tolist()
            return drawn
        if self.shuffle == "indexed":
            places = numpy.arange(first, last)
            entries: list[int] = permuted(places, self.size, seed_of(self.seed, "epoch", epoch)).tolist()
            return entries
        return self._order(epoch)[first:last].tolist() if self.shuffle else range(first, last)

    def _order(self, epoch: int) -> Tensor:
        """The order of one epoch's samples; kept for two epochs, because a step may reach from one into the next."""
        if epoch not in self._permutations:
            generator = torch.Generator().manual_seed(seed_of(self.seed, "epoch", epoch))
            while len(self._permutations) > 1:
                del self._permutations[min(self._permutations)]
            self._permutations[epoch] = torch.randperm(self.size, generator=generator)
        return self._permutations[epoch]
