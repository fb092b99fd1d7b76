"""One-time costs of a worker's process, paid before others wait for it."""

from __future__ import annotations

import contextlib

import torch
from torch import nn

from raypar.worker.data.user_dataset import is_stream
from raypar.worker.layer_precisions import dtype_of_job
from raypar.worker.make_worker_assignments import make_validation_batching
from raypar.worker.norm_and_weights_hash import square_gradients
from raypar.worker.step.optimizer_and_parameter_groups import build_optimizer
from raypar.worker.worker_core import WorkerCore


def warm_up_process(core: WorkerCore, *, data: bool) -> None:
    """Make what a first step makes, and drop it: an optimizer and gradients, for which PyTorch loads modules.

    `data`: make the data sets too, for a worker that joins others in the middle of a run and may get any seat. A captured model
    is traced for all lengths of `data.pad.to`, for validation too if the data sets are made.
    """
    for each in core.spec.optimizer.each:
        parameter = nn.Parameter(torch.zeros(2, 2, device=core.device))
        with contextlib.suppress(Exception):  # an optimizer that refuses this parameter is loaded too
            optimizer = build_optimizer(each, {"warm.up": parameter})
            (parameter * 2).sum().backward()
            optimizer.step()
    square_gradients([torch.zeros(2, dtype=dtype_of_job(core.spec), device=core.device)])  # which loads its kernel
    samples: dict[str, int] = {}
    if data:
        core.data.dataset(core.spec.data)
        for name, one in core.spec.validation_sets.items():
            dataset = core.data.dataset(core.spec.data_of_set(one))
            samples[name] = one.samples or (0 if is_stream(dataset) else len(dataset))
    core.trace_ladder(make_validation_batching(core.spec, samples))
