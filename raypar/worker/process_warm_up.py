"""One-time costs of a worker's process, paid before others wait for it."""

from __future__ import annotations

import contextlib

import torch
from torch import nn

from raypar.worker.step.make_optimizers_by_name import build_optimizer
from raypar.worker.worker_core import WorkerCore


def warm_up_process(core: WorkerCore, *, data: bool) -> None:
    """Make what a first step makes, and drop it: an optimizer and gradients, for which PyTorch loads modules.

    `data`: make the data sets too, for a worker that joins others in the middle of a run and may get any seat.
    """
    parameter = nn.Parameter(torch.zeros(2, 2, device=core.device))
    with contextlib.suppress(Exception):  # an optimizer that refuses this parameter is loaded too
        optimizer = build_optimizer(core.spec.optimizer, {"warm.up": parameter})
        (parameter * 2).sum().backward()
        optimizer.step()
    if data:
        core.dataset(core.spec.data)
        if core.spec.validation is not None:
            core.dataset(core.spec.validation_data)
