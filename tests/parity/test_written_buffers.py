"""Buffers that forward writes: running statistics and others, equal under every plan to one process with the modules themselves."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch
from helpers import norm_models, reference, ugly_models
from helpers.parity import Layout, check_local, differences, expected
from torch import nn

from raypar.errors import ModelError, UserCodeError
from raypar.model.capture import capture_layer_graph
from raypar.plan import ParallelPlan
from raypar.worker.job_spec import JobSpec, Ref
from raypar.worker.run_in_one_process import OneProcessRun
from raypar.worker.stage.running_statistics import RunningNorm, fold_norm_calls
from raypar.worker.worker_assignments import make_layer_graph

QUICK = [
    Layout("norms", "1f1b", (2, 2), 4),
    Layout("norms", "gpipe", (3, 1), 5),
    Layout("norms", "interleaved", (2, 1), 3),
    Layout("splittable norms", "zb-v", (2, 2), 5),
    Layout("norms", "1f1b", (1,), 1),
    Layout("norms", "1f1b", (2, 3), 5, blocks=2),
    Layout("norms", "1f1b", (2, 2), 4, compute="bf16"),
]
GRID = [
    Layout("splittable norms" if schedule.startswith("zb") else "norms", schedule, (replicas,) * stages, m, compute=compute)
    for schedule, stages, replicas, m, compute in product(
        ("1f1b", "gpipe", "interleaved", "zb-v", "zb-h1"), (1, 2, 3), (1, 2, 3), (1, 2, 3, 4, 5), (None, "bf16")
    )
]


@pytest.mark.parametrize("layout", QUICK, ids=str)
def test_running_statistics_are_those_of_one_process(layout: Layout):
    check_local(layout)


@pytest.mark.full
@pytest.mark.parametrize("layout", GRID, ids=str)
def test_running_statistics_are_those_of_one_process_in_every_layout(layout: Layout):
    check_local(layout)
