"""Bytes that each worker of one process holds while it begins or takes over: distinct storages alive, after every operation."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from raypar.comm import local_transport
from raypar.comm.routine import Routine
from raypar.worker.elastic_worker import ElasticWorker
from raypar.worker.stage.stage import Stage
from raypar.worker.stage_builder import StageBuilder
from raypar.worker.step.optimizer_state import read_optimizer_state


class CountedMemory(TorchDispatchMode):
    """Storages by the worker that made them, or got them in a message."""

    def __init__(self) -> None:
        super().__init__()
        self.peak: dict[int, int] = {}
        """Worker -> most bytes at once."""
        self._seen: dict[int, tuple[StorageWeakRef, int]] = {}
        """Identity of a storage -> it, and its worker."""
        self._worker: int | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if self._worker is not None:
            self.note(self._worker, (each for each in tree_leaves(made) if isinstance(each, Tensor)))
        return made

    def note(self, worker: int, tensors: Iterable[Tensor]) -> None:
        """Count the storages of some tensors for a worker, unless they are somebody's."""
        for tensor in tensors:
            if tensor.device.type == "cpu":
                ref = StorageWeakRef(tensor.untyped_storage())
                self._seen.setdefault(ref.cdata, (ref, worker))
        self.peak[worker] = max(self.peak.get(worker, 0), self.now(worker))

    def now(self, worker: int) -> int:
        """Bytes of a worker's storages that are alive."""
        self._seen = {key: seen for key, seen in self._seen.items() if not seen[0].expired()}
        alive = [torch.UntypedStorage._new_with_weak_ptr(ref.cdata) for ref, of in self._seen.values() if of == worker]
        return sum(storage.nbytes() for storage in alive if storage is not None)

    @contextmanager
    def counting_for(self, worker: int | None) -> Iterator[None]:
        before, self._worker = self._worker, worker
        try:
            yield
        finally:
            self._worker = before

    def watched(self, worker: int, body: ElasticWorker, routine: Routine[None]) -> Routine[None]:
        """A routine of a worker, whose memory is counted while it runs."""
        while True:
            try:
                with self.counting_for(worker), self, body.core.guard.accepting_contexts():
                    operation = next(routine)
            except StopIteration:
                return
            yield operation

    def watch_messages(self, monkeypatch: pytest.MonkeyPatch, workers: list[int]) -> None:
        """Count what is delivered for whoever receives it. `workers`: by rank."""
        deliver = local_transport.deliver_message

        def delivered(send: Any, recv: Any) -> None:
            with self.counting_for(workers[recv.operation.transport.rank]), self:
                deliver(send, recv)

        monkeypatch.setattr(local_transport, "deliver_message", delivered)

    def leave_out_buckets(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Do not count buckets of gradients, whose bound is their own."""
        build = StageBuilder.build_reductions

        def built(builder: StageBuilder, stages: Any) -> Any:
            with self.counting_for(None):
                return build(builder, stages)

        monkeypatch.setattr(StageBuilder, "build_reductions", built)


def state_tensors(body: ElasticWorker) -> Iterator[Tensor]:
    """What a worker holds between two steps, and what it keeps of the plan before."""
    for stage in body.core.stages.values():
        yield from _of_stage(stage)
    commit = getattr(body.core, "step_commit", None)
    for owned in commit.owned.values() if commit is not None else ():
        yield from (each.parameter for each in owned)
    for optimizer in commit.optimizers.values() if commit is not None else ():
        state = read_optimizer_state(optimizer)
        yield from state.averages.values()
        yield from (value for of in state.parameters.values() for value in of.values() if isinstance(value, Tensor))
    for holdings in body._old.values():
        yield from (value for each in holdings for value in each.state.values() if isinstance(value, Tensor))


def _of_stage(stage: Stage) -> Iterator[Tensor]:
    yield from stage.parameters.values()
    yield from stage.buffers.values()
    yield from (stage.weights.computed_with(name) for name in stage.parameters)
