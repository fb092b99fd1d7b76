"""The virtual shards of a stage that one worker computes, as one stage: they run in turn, and wait for each other in layers."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Protocol, TypeVar

from torch import Tensor

from raypar.comm.blocking_code_as_routine import current_wait
from raypar.comm.blocking_code_in_turn import run_blocking_in_turn
from raypar.comm.routine import RoutineWait, RoutineWork
from raypar.comm.sent_tensor_layout import copy_as_it_lies
from raypar.plan import ParallelPlan
from raypar.plan.stage_connections import MAX_STAGES
from raypar.worker.process.generators_in_turn import GeneratorsInTurn
from raypar.worker.stage.stage import Batch, HandedBack, Stage

T = TypeVar("T")
V = TypeVar("V", Tensor, Tensor | None)

ShardOfStage = tuple[int, int]
"""(index of a stage, one of its virtual shards); (index, 0) where the stage is not cut."""


def reduction_channel(plan: ParallelPlan, index: int, virtual_shard: int) -> int:
    """The channel of the collectives between the replicas of one virtual shard of a stage: those of the virtual shards of one
    worker, which have the same workers, do not meet."""
    shards = plan.stages[index]
    first = next(run.start for run in shards.runs if virtual_shard in run)
    return index + MAX_STAGES * (virtual_shard - first)


class ComputesMicrobatches(Protocol):
    """What a worker's program runs: a stage, or the virtual shards of one. See `Stage`."""

    @property
    def waited_ns(self) -> int:
        """See `Stage`."""

    def begin_step(self, step: int) -> None:
        """See `Stage`."""

    def forward(self, microbatch: int, received: Mapping[str, Tensor], batch: Batch) -> dict[str, Tensor]:
        """See `Stage`."""

    def checkpointed_forward(self, microbatch: int, received: Mapping[str, Tensor], batch: Batch) -> dict[str, Tensor]:
        """See `Stage`."""

    def offloaded_forward(self, microbatch: int, received: Mapping[str, Tensor], batch: Batch) -> dict[str, Tensor]:
        """See `Stage`."""

    def offloaded_checkpointed_forward(
        self, microbatch: int, received: Mapping[str, Tensor], batch: Batch
    ) -> dict[str, Tensor]:
        """See `Stage`."""

    def fetch(self, microbatch: int) -> None:
        """See `Stage`."""

    def recompute(self, microbatch: int) -> None:
        """See `Stage`."""

    def evaluate(self, microbatch: int, received: Mapping[str, Tensor], batch: Batch) -> dict[str, Tensor]:
        """See `Stage`."""

    def backward(self, microbatch: int, gradients: Mapping[str, Tensor | None]) -> dict[str, HandedBack]:
        """See `Stage`."""

    def backward_input(self, microbatch: int, gradients: Mapping[str, Tensor | None]) -> dict[str, HandedBack]:
        """See `Stage`."""

    def backward_weight(self, microbatch: int) -> None:
        """See `Stage`."""

    def free(self, microbatch: int) -> None:
        """See `Stage`."""


class StageInVirtualShards:
    """Several virtual shards of a stage, each a `Stage` with its own slices.

    Values between stages are whole and equal on all of them, so they are taken from the first.
    """

    def __init__(self, shards: Sequence[Stage], generators: GeneratorsInTurn, timeout_s: float | None) -> None:
        """`generators`: by which the layers are seeded; `timeout_s`: how long one of them may wait for other workers."""
        self.shards, self._generators, self._timeout_s = tuple(shards), generators, timeout_s
        self.waited_ns = 0
        """How long layers have waited for other workers in this step, while none of them could go on."""

    def begin_step(self, step: int) -> None:
        """See `Stage.begin_step`."""
        self.waited_ns = 0
        for shard in self.shards:
            shard.begin_step(step)

    def free(self, microbatch: int) -> None:
        """See `Stage.free`."""
        for shard in self.shards:
            shard.free(microbatch)

    def forward(self, microbatch: int, received: Mapping[str, Tensor], batch: Batch) -> dict[str, Tensor]:
        """See `Stage.forward`."""
        given = self._copies(received, batch)
        return self._in_turn(partial(s.forward, microbatch, *each) for s, each in zip(self.shards, given, strict=True))

    def checkpointed_forward(self, microbatch: int, received: Mapping[str, Tensor], batch: Batch) -> dict[str, Tensor]:
        """See `Stage.checkpointed_forward`."""
        given = self._copies(received, batch)
        return self._in_turn(partial(s.checkpointed_forward, microbatch, *g) for s, g in zip(self.shards, given, strict=True))

    def offloaded_forward(self, microbatch: int, received: Mapping[str, Tensor], batch: Batch) -> dict[str, Tensor]:
        """See `Stage.offloaded_forward`."""
        given = self._copies(received, batch)
        return self._in_turn(partial(s.offloaded_forward, microbatch, *g) for s, g in zip(self.shards, given, strict=True))

    def offloaded_checkpointed_forward(
        self, microbatch: int, received: Mapping[str, Tensor], batch: Batch
    ) -> dict[str, Tensor]:
        """See `Stage.offloaded_checkpointed_forward`."""
        given = zip(self.shards, self._copies(received, batch), strict=True)
        return self._in_turn(partial(shard.offloaded_checkpointed_forward, microbatch, *each) for shard, each in given)

    def fetch(self, microbatch: int) -> None:
        """See `Stage.fetch`."""
        for shard in self.shards:
            shard.fetch(microbatch)

    def recompute(self, microbatch: int) -> None:
        """See `Stage.recompute`."""
        self._in_turn(partial(shard.recompute, microbatch) for shard in self.shards)

    def evaluate(self, microbatch: int, received: Mapping[str, Tensor], batch: Batch) -> dict[str, Tensor]:
        """See `Stage.evaluate`."""
        given = self._copies(received, batch)
        return self._in_turn(partial(s.evaluate, microbatch, *each) for s, each in zip(self.shards, given, strict=True))

    def backward(self, microbatch: int, gradients: Mapping[str, Tensor | None]) -> dict[str, HandedBack]:
        """See `Stage.backward`."""
        given = self._gradients(gradients)
        return self._in_turn(partial(s.backward, microbatch, each) for s, each in zip(self.shards, given, strict=True))

    def backward_input(self, microbatch: int, gradients: Mapping[str, Tensor | None]) -> dict[str, HandedBack]:
        """See `Stage.backward_input`."""
        given = self._gradients(gradients)
        return self._in_turn(partial(s.backward_input, microbatch, each) for s, each in zip(self.shards, given, strict=True))

    def backward_weight(self, microbatch: int) -> None:
        """See `Stage.backward_weight`."""
        self._in_turn(partial(shard.backward_weight, microbatch) for shard in self.shards)

    def do_nothing(self) -> None:
        """A pass without any work, to measure what turns take."""
        self._in_turn(lambda: None for _ in self.shards)

    def _in_turn(self, works: Iterable[Callable[[], T]]) -> T:
        """Run one work for each virtual shard; returns the first one's result, which is that of all."""
        keep = partial(self.shards[0].guard.keep_in_turn, self._generators.keep)
        return run_blocking_in_turn(list(works), keep, partial(self._wait, current_wait(self._timeout_s)))[0]

    def _wait(self, wait: Callable[[RoutineWait | RoutineWork], None], waiting: RoutineWait | RoutineWork) -> None:
        """`wait`, whose time counts as waiting for other workers."""
        start = time.perf_counter_ns()
        try:
            wait(waiting)
        finally:
            self.waited_ns += time.perf_counter_ns() - start

    def _copies(self, *given: Mapping[str, Tensor]) -> list[tuple[Mapping[str, Tensor], ...]]:
        """What each virtual shard is given: the first one what came, each other one copies, into which its layers may write, of
        what these read."""
        found: list[tuple[Mapping[str, Tensor], ...]] = [given]
        found += [tuple([_copied(each, shard.values_read) for each in given]) for shard in self.shards[1:]]
        return found

    def _gradients(self, given: Mapping[str, Tensor | None]) -> list[Mapping[str, Tensor | None]]:
        """The same of gradients that came."""
        return [given, *(_copied(given, given) for _ in self.shards[1:])]


def _copied(given: Mapping[str, V], names: Collection[str]) -> Mapping[str, V]:
    return {name: value if value is None or name not in names else copy_as_it_lies(value) for name, value in given.items()}
