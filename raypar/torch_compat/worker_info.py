"""What a data set sees of the worker that reads it: `torch.utils.data.get_worker_info`, for reading without a `DataLoader`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import ModuleType

import torch

from raypar.errors import DataError
from raypar.fences.private_api_fence import Fence
from raypar.torch_compat import TESTED


def _look_for_worker_info() -> ModuleType:
    from torch.utils.data._utils import worker

    before = worker._worker_info
    worker._worker_info = worker.WorkerInfo(id=1, num_workers=3, seed=5, dataset=None)  # type: ignore[arg-type]
    try:
        seen = torch.utils.data.get_worker_info()
        assert seen is not None and (seen.id, seen.num_workers, seen.seed) == (1, 3, 5)
    finally:
        worker._worker_info = before
    return worker


WORKER_INFO = Fence(
    api="torch.utils.data._utils.worker._worker_info",
    reason="data sets divide themselves by `get_worker_info`, which only the processes of a `DataLoader` set",
    versions=TESTED,
    feature="dividing a stream of samples",
    without="data without `__getitem__` is read as one stream (data.streams: 1)",
    probe=_look_for_worker_info,
    error=DataError,
)


@contextlib.contextmanager
def seen_as_worker(number: int, workers: int, seed: int, dataset: object) -> Iterator[None]:
    """Context in which a data set sees itself read by worker `number` of `workers`. Raises `DataError` where that cannot be,
    unless there is one worker, which reads everything in any case."""
    if workers == 1 and WORKER_INFO.find() is None:
        yield
        return
    with WORKER_INFO.requiring() as module:
        info = module.WorkerInfo(id=number, num_workers=workers, seed=seed, dataset=dataset)
        before, module._worker_info = module._worker_info, info  # type: ignore[attr-defined]
    try:
        yield
    finally:
        module._worker_info = before  # type: ignore[attr-defined]
