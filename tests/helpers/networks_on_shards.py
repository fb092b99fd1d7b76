"""Networks of two training steps on shards, in one process: whoever computes the shards, they have the same bits.

For tests of layers that are cut: by channels, by rows, by gates.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch
from helpers.on_shards import TOLERANCE, Run, error
from helpers.virtual_shards import divided
from torch import Tensor, nn

import raypar
from raypar.job import Job
from raypar.model.tensor_parallel.build_shard_modules import shard_slice_of
from raypar.model.tensor_parallel.compute_shard_layout import compute_shard_layout
from raypar.plan import ParallelPlan
from raypar.worker.layer_graph_of_job import make_layer_graph
from raypar.worker.run_in_one_process import OneProcessRun

SHARDS = (2, 3)
MIXED_PRECISIONS = pytest.mark.parametrize(
    "precision", [{"compute": "bf16"}, {"parameters": "bf16", "master": "float32"}], ids=["autocast", "bf16 parameters"]
)


def numbers(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 3) -> Tensor:
    """The same numbers in every dtype, but for their rounding."""
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).to(dtype)


def two_steps(model: object, data: object, styles: Mapping[str, str], **given: object) -> Job:
    """A job of two steps in two microbatches. `given`: other arguments of `Trainer`."""
    job = {
        "loss": nn.functional.cross_entropy,
        "data": data,
        "steps": 2,
        "batch_size": 8,
        "microbatches": 2,
        "optimizer": ("torch.optim:SGD", {"lr": 0.1}),
        "plan": {"styles": styles},
    }
    return raypar.Trainer(model=model, **(job | given)).job


def layers_of(job: Job) -> int:
    return len(make_layer_graph(job).layers)


def steps_of(job: Job, plan: ParallelPlan, schedule: str = "1f1b") -> OneProcessRun:
    """The run after all steps of a job."""
    found = OneProcessRun(job, plan, schedule, graph=make_layer_graph(job))
    for step in range(job.steps):
        found.step(step)
    return found


def slices_of(run: OneProcessRun) -> dict[str, list[Tensor]]:
    """Name -> the slices of a parameter, or the buffer, each once in the order of shards."""
    found = run.parameters() | run.buffers()
    return {name: list({tuple(v.flatten().tolist()): v for v in copies}.values()) for name, copies in found.items()}


def check_same(run: OneProcessRun, want: Mapping[str, list[Tensor]]) -> None:
    """`run` has these slices."""
    found = slices_of(run)
    assert found.keys() == want.keys()
    unequal = [n for n, of in found.items() if len(of) != len(want[n]) or not all(map(torch.equal, of, want[n]))]
    assert unequal == []


def check_gradients(run: Run, want: Mapping[str, Tensor]) -> None:
    """A shard has these gradients, bit for bit."""
    assert run.gradients.keys() == want.keys()
    assert [name for name, gradient in want.items() if not torch.equal(run.gradients[name], gradient)] == []


def check_layouts(job: Job, shards: int, mesh: Mapping[str, int]) -> dict[str, list[Tensor]]:
    """The shards have the same slices on workers of their own, with more stages and replicas, and on one worker: these."""
    layers = layers_of(job)
    wanted = slices_of(steps_of(job, ParallelPlan.mesh(tp=shards, layers=layers)))
    check_same(steps_of(job, ParallelPlan.mesh(tp=shards, layers=layers, **mesh)), wanted)
    check_same(steps_of(job, divided(ParallelPlan.mesh(layers=layers, **mesh), (shards,))), wanted)
    return wanted


def check_division(job: Job, division: tuple[int, ...]) -> dict[str, list[Tensor]]:
    """Workers that compute so many of four shards each have the slices of four workers: these."""
    layers = layers_of(job)
    wanted = slices_of(steps_of(job, ParallelPlan.mesh(tp=4, layers=layers)))
    check_same(steps_of(job, divided(ParallelPlan.mesh(tp=len(division), layers=layers), division)), wanted)
    return wanted


def check_recomputation_and_zero_bubble(job: Job) -> dict[str, list[Tensor]]:
    """Two shards have the same slices with recomputation, under a zero-bubble schedule, and on one worker: these."""
    layers = layers_of(job)
    wanted = slices_of(steps_of(job, ParallelPlan.mesh(tp=2, layers=layers)))
    plan = ParallelPlan.mesh(tp=2, pp=2, layers=layers)
    check_same(steps_of(job, replace(plan, recompute=tuple(range(0, layers, 2)))), wanted)
    check_same(steps_of(job, plan, "zb-h1"), wanted)
    check_same(steps_of(job, divided(ParallelPlan.mesh(layers=layers), (2,))), wanted)
    return wanted


def check_numbers_of_whole(job: Job, shards: int) -> None:
    """After all steps the shards have the numbers of one worker."""
    graph = make_layer_graph(job)
    whole, cut = (steps_of(job, ParallelPlan.mesh(tp=n, layers=len(graph.layers))) for n in (1, shards))
    layout = compute_shard_layout(graph, shards, dict(job.styles))
    found, wanted = cut.parameters() | cut.buffers(), whole.parameters() | whole.buffers()
    assert found.keys() == wanted.keys()
    for name, copies in found.items():
        for shard, got in enumerate(copies):
            assert error(got, shard_slice_of(layout, name, wanted[name][0], shard)) <= TOLERANCE, name
