"""What a worker does in a run that makes forward passes only: the microbatches that a pass reads, and what it keeps of each."""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from raypar.comm.buffer_pool import CPU
from raypar.job import Job
from raypar.plan.exact_sum import ExactSum
from raypar.plan.microbatches import divide_by_count
from raypar.worker.data.microbatch_loader import BatchSource
from raypar.worker.metrics.metric import make_metrics
from raypar.worker.metrics.metric_state import State
from raypar.worker.metrics.stage_metrics import MergedStates
from raypar.worker.process.seed_generators import make_seeder
from raypar.worker.process.torch_state_guard import TorchStateGuard


class ReadsAhead(Protocol):
    """A loader."""

    def prefetch(self, step: int, microbatches: Sequence[int]) -> None:
        """Begin to read these microbatches."""


class MicrobatchesOfPass:
    """The microbatches of the present pass, read from those of the whole data set. The last pass repeats the last one."""

    def __init__(self, loader: ReadsAhead | None, source: BatchSource | None, count: int) -> None:
        self.loader, self.source, self.count = loader, source, count
        self.first = 0
        """The first microbatch of the present pass."""
        self._last: Mapping[str, Tensor] | None = None
        """The last microbatch of all, once it was read: a stream would be read again from its beginning."""

    def get(self, step: int, microbatch: int) -> Mapping[str, Tensor]:
        """See `BatchSource`."""
        assert self.source is not None
        number = self._of_whole(microbatch)
        if number < self.count - 1:
            return self.source.get(0, number)
        if self._last is None:
            self._last = self.source.get(0, number)
        return self._last

    def begin(self, first: int, own: Sequence[int]) -> None:
        """Begin the pass that has microbatch `first` first; `own`: those of a pass that this worker runs."""
        self.first = first
        if self.loader is not None:
            self.loader.prefetch(0, sorted({self._of_whole(microbatch) for microbatch in own}))

    def _of_whole(self, microbatch: int) -> int:
        return min(self.first + microbatch, self.count - 1)


def pack_measures(
    losses: Mapping[int, tuple[float, float]], states: Mapping[int, Mapping[str, State]], first: int, count: int
) -> dict[int, bytes]:
    """Microbatch of the whole data set -> its loss as (sum, count), and the states of the metrics after it.

    `losses`: by microbatch of the pass; `states`: by microbatch of the whole data set, which has `count`; `first`: the first
    microbatch of the pass.
    """
    return {first + m: pickle.dumps((loss, states.get(first + m, {}))) for m, loss in losses.items() if first + m < count}


@dataclass
class LossTotal:
    """The loss over microbatches (rule 8 of the numerics contract)."""

    sums: ExactSum = field(default_factory=ExactSum)
    """Sum of the microbatches' loss sums."""
    counts: ExactSum = field(default_factory=ExactSum)
    """Sum of their counts."""

    def add(self, losses: Sequence[tuple[float, float]]) -> None:
        """Add the (sum, count) of more microbatches."""
        self.sums += ExactSum.of(loss for loss, _ in losses)
        self.counts += ExactSum.of(count for _, count in losses)

    @property
    def mean(self) -> float:
        """NaN where nothing counts."""
        return divide_by_count(self.sums, self.counts)[0]

    @property
    def count(self) -> float:
        """How many terms count."""
        return self.counts.rounded()


class Totals:
    """The loss and the metrics over all microbatches of a data set: those of one pass over all of them.

    In memory are the merged states of the metrics alone, and of those that are added at once.
    """

    def __init__(self, job: Job, guard: TorchStateGuard, of_all_sets: LossTotal) -> None:
        self.loss = LossTotal()
        """The loss over the data set."""
        self.of_all_sets = of_all_sets
        """The loss over this data set and those before it."""
        metrics = make_metrics(job.metrics, job.loss_target_name)
        self._merged = MergedStates(metrics, seed=job.seed, seed_generators=make_seeder(CPU), guard=guard)

    def add(self, kept: Sequence[bytes]) -> None:
        """Add what `pack_measures` has kept of the next microbatches. Raises `UserCodeError`."""
        measured: list[tuple[tuple[float, float], Mapping[str, State]]] = [pickle.loads(data) for data in kept]
        for total in (self.loss, self.of_all_sets):
            total.add([loss for loss, _ in measured])
        for _, states in measured:
            self._merged.add(states)

    def values(self) -> dict[str, float]:
        """Name -> value of the metrics. Raises `UserCodeError`."""
        return self._merged.values()
