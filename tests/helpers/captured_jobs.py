"""Jobs of unmodified modules in many layouts, each compared with one plain process that runs the module itself."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from helpers import norm_networks, plain_module
from helpers.model_zoo import ZOO
from helpers.parity import differences, different_gradients
from helpers.reference import Result
from torch import Tensor, nn

from raypar.job import DataConfig, Job, LossConfig, ModelConfig, OptimizerConfig, PrecisionConfig
from raypar.model.graph import Graph
from raypar.plan import ParallelPlan
from raypar.schedule import registry
from raypar.worker.layer_graph_of_job import make_layer_graph
from raypar.worker.run_in_one_process import OneProcessRun

MODELS = ZOO | norm_networks.NETWORKS
"""All models."""
STEPS = 3


class BatchesOf:
    """A data set of samples like those in the batch of a model: random numbers and ids, masks as they are; `y` is a number."""

    def __init__(self, name: str, samples: int = 29) -> None:
        self.batch, self.samples = MODELS[name].batch(), samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(index)
        found: dict[str, Tensor] = {"y": torch.tensor(float(index))}
        for name, rows in self.batch.items():
            row = rows[0]
            if row.is_floating_point():
                found[name] = torch.randn(row.shape, generator=generator)
            elif "mask" in name:
                found[name] = (torch.arange(row.shape[0]) < row.shape[0] - 1 - index % 3).long()
            else:
                found[name] = torch.randint(3, 99, row.shape, generator=generator)
        return found


def loss_of(output: Any, target: Tensor, *, name: str) -> Tensor:
    """The loss of a model of the zoo, which is what the model makes of the batch."""
    return MODELS[name].loss(output)


def make_model(name: str, p: float) -> nn.Module:
    return MODELS[name].make(p)


@functools.cache
def job_of(model: str, microbatches: int = 3, p: float = 0.1, blocks: int = 0, compute: Any = None, steps: int = STEPS) -> Job:
    """AdamW steps with clipping on a ragged batch: 2 samples in the first microbatches, 3 in others."""
    return Job(
        name=model,
        seed=11,
        steps=steps,
        batch_size=2 * microbatches + microbatches // 2 + 1,
        microbatches=microbatches,
        model=ModelConfig(function=make_model, args={"name": model, "p": p}),
        loss=LossConfig(function=loss_of, args={"name": model}),
        data=DataConfig(function=BatchesOf, args={"name": model}, target="y"),
        optimizer=OptimizerConfig(function="torch.optim:AdamW", args={"lr": 1e-2, "weight_decay": 0.1}),
        virtual_replicas=blocks,
        clip_norm=0.5,
        precision=PrecisionConfig(compute=compute),
    )


_GRAPHS: dict[str, tuple[Job, Graph]] = {}
_EXPECTED: dict[str, Result] = {}
"""What has been made already, by the text of the job: which is kept, because the text has addresses of its functions."""


def graph_of(spec: Job) -> Graph:
    """The captured model."""
    if repr(spec) not in _GRAPHS:
        _GRAPHS[repr(spec)] = spec, make_layer_graph(spec)
    return _GRAPHS[repr(spec)][1]


def expected(spec: Job) -> Result:
    """What one plain process has."""
    if repr(spec) not in _EXPECTED:
        _EXPECTED[repr(spec)] = plain_module.train(graph_of(spec), spec)[0]
    return _EXPECTED[repr(spec)]


@dataclass(frozen=True)
class CapturedLayout:
    """One cell of the grid. `replicas`: one number per stage."""

    model: str
    schedule: str
    replicas: tuple[int, ...]
    microbatches: int = 3
    p: float = 0.1
    recompute: str = ""
    """Which layers are computed again: none, `all`, or every `second`."""
    compute: str | None = None
    blocks: int = 0

    def __str__(self) -> str:
        dims = "-".join(map(str, self.replicas))
        extra = (f" {self.recompute}" if self.recompute else "") + (f" {self.compute}" if self.compute else "")
        return f"{self.model} {self.schedule} replicas {dims} m={self.microbatches} p={self.p}{extra}"

    @property
    def job(self) -> Job:
        return job_of(self.model, self.microbatches, self.p, self.blocks, self.compute)

    @property
    def graph(self) -> Graph:
        return graph_of(self.job)

    @property
    def plan(self) -> ParallelPlan:
        """The plan of this cell; of fewer stages where the model has fewer layers."""
        layers, chunks = len(self.graph.layers), registry.resolve_chunks_per_worker(self.schedule)
        again = {"": (), "all": range(layers), "second": range(0, layers, 2)}[self.recompute]
        return ParallelPlan.of(
            self.replicas[: max(1, layers // chunks)],
            layers=layers,
            chunks=chunks,
            placement=registry.placement_of_schedule(self.schedule),
            recompute=tuple(again),
        )


def check_local(layout: CapturedLayout, order_seed: int = 0) -> None:
    """Run the layout in one process, and compare everything with the plain module."""
    check_run(layout.job, layout.plan, layout.schedule, order_seed=order_seed)


def check_run(job: Job, plan: ParallelPlan, schedule: str, order_seed: int = 0) -> None:
    want = expected(job)
    with OneProcessRun(job, plan, schedule, graph=graph_of(job), seed=order_seed) as run:
        for step in range(job.steps):
            reports = run.step(step)
            assert {r.loss for r in reports} == {want.losses[step]}, f"step {step}: loss"
            bad = different_gradients(run, want, step)
            assert not bad, f"step {step}: gradients of {bad}"
            assert {r.norm for r in reports} == {want.norms[step]}, f"step {step}: norm"
        assert unequal_state(want, run.parameters(), run.buffers()) == []


def unequal_state(want: Result, parameters: dict[str, Iterable[Tensor]], buffers: dict[str, Iterable[Tensor]]) -> list[str]:
    """Parameters and buffers that some worker has otherwise."""
    assert parameters.keys() == want.parameters.keys()
    bad = [d for n, p in want.parameters.items() for d in differences(n, parameters[n], p)]
    return bad + [d for n, copies in buffers.items() for d in differences(n, copies, want.buffers[n])]
