"""Layouts, and the comparison of a run with the one-process reference: every bit of loss, gradients, norm, state."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

import torch
from helpers import reference, ugly_models

from raypar.job import DataConfig, Job, LossScaleConfig, PrecisionConfig, ValidationConfig
from raypar.model.graph import Graph
from raypar.plan import MicrobatchRouting, ParallelPlan
from raypar.schedule import registry
from raypar.worker.layer_graph_of_job import make_layer_graph
from raypar.worker.make_worker_assignments import make_worker_assignments
from raypar.worker.run_in_one_process import OneProcessRun

STEPS = 5
Precision = Literal["bf16", "bf16 parameters", "bf16 gradients", "fp16", "fp16 parameters", "fp16 gradients"] | None
OFTEN = LossScaleConfig(init_scale=8192, backoff_factor=0.25, growth_interval=2)
"""A loss scale with which some of the five steps of each model overflow."""
PRECISIONS: dict[Precision, PrecisionConfig] = {
    None: PrecisionConfig(),
    "bf16": PrecisionConfig(compute="bf16"),
    "bf16 parameters": PrecisionConfig(parameters="bf16", master="float32"),
    "bf16 gradients": PrecisionConfig(parameters="bf16", master="float32", gradients="bf16"),
    "fp16": PrecisionConfig(compute="fp16", loss_scale=OFTEN),
    "fp16 parameters": PrecisionConfig(parameters="fp16", master="float32", loss_scale=OFTEN),
    "fp16 gradients": PrecisionConfig(parameters="fp16", master="float32", gradients="fp16", loss_scale=OFTEN),
}


def validation_on(data: DataConfig, **more: object) -> ValidationConfig:
    """A validation on a job's training data: the keys that both sections have."""
    return ValidationConfig(**{name: value for name, value in data if name in ValidationConfig.model_fields}, **more)


def job_of(model: str, microbatches: int, blocks: int, compute: Precision) -> Job:
    """Five AdamW steps with clipping on a ragged batch."""
    given = {
        "microbatches": microbatches,
        "steps": STEPS,
        "virtual_replicas": blocks,
        "precision": PRECISIONS[compute],
    }
    return ugly_models.job(model, **given)


@functools.cache
def count_layers(model: str) -> int:
    """Of the model, whatever the layout: hundreds of plans are made when tests are collected."""
    return len(make_layer_graph(ugly_models.job(model)).layers)


Shares = tuple[tuple[int, ...], ...]
"""By position, the number of blocks of each replica; `()` there: even runs, and alone: everywhere."""


def with_shares(plan: ParallelPlan, shares: Shares) -> ParallelPlan:
    """The plan whose positions share out the blocks so."""
    return plan.with_shares(dict(enumerate(shares)))


@dataclass(frozen=True)
class Layout:
    """One cell of the grid. `replicas`: one number per stage."""

    model: str
    schedule: str
    replicas: tuple[int, ...]
    microbatches: int
    chunks: int | None = None
    blocks: int = 0
    compute: Precision = None
    shares: Shares = ()

    def __str__(self) -> str:
        dims = "-".join(map(str, self.replicas))
        extra = (f" v={self.chunks}" if self.chunks else "") + (f" V={self.blocks}" if self.blocks else "")
        extra += f" {self.compute}" if self.compute else ""
        extra += f" shares {self.shares}" if self.shares else ""
        return f"{self.model} {self.schedule} replicas {dims} m={self.microbatches}{extra}"

    @property
    def job(self) -> Job:
        """Five AdamW steps with clipping on a ragged batch."""
        return job_of(self.model, self.microbatches, self.blocks, self.compute)

    @property
    def graph(self) -> Graph:
        """The model."""
        return graph_of(self.model, self.microbatches, self.blocks, self.compute)

    @property
    def plan(self) -> ParallelPlan:
        """The plan of this cell for this model."""
        plan = ParallelPlan.of(
            self.replicas,
            layers=count_layers(self.model),
            chunks=registry.resolve_chunks_per_worker(self.schedule, self.chunks),
            placement=registry.placement_of_schedule(self.schedule),
        )
        return with_shares(plan, self.shares)


def layouts() -> list[Layout]:
    """Replicas 1-4 x stages 1-4 x every schedule, m cycling over several values; then uneven replicas and other cuts."""
    cells = []
    counts = (1, 2, 3, 4, 5, 7, 8)
    for schedule in registry.NAMES:
        for stages in range(1, 5):
            for replicas in range(1, 5):
                m = counts[len(cells) % len(counts)]
                model = "tangled" if (stages + replicas) % 3 else "plain"
                cells.append(Layout(model, schedule, (replicas,) * stages, m))
        for uneven in ((1, 2), (3, 1), (1, 2, 1), (2, 1, 3), (1, 2, 3, 1), (2, 3, 1, 2)):
            m = counts[3 + len(cells) % 4]
            cells.append(Layout("tangled", schedule, uneven, m))
        cells.append(Layout("tangled", schedule, (3, 3), 7, blocks=5))
        cells.append(Layout("plain", schedule, (1, 4, 1), 8, blocks=8))
        cells.append(Layout("tangled", schedule, (2, 2), 5, blocks=1))  # one block: the second replica is a spare
        cells.append(Layout("tangled", schedule, (2, 2), 3, blocks=7))  # more blocks than microbatches: some are empty
    cells.append(Layout("plain", "interleaved", (2, 2), 5, chunks=4))
    cells.append(Layout("tangled", "interleaved", (1, 1, 1), 7, chunks=3))
    cells.append(Layout("tangled", "gpipe", (2, 2), 6, chunks=2))
    cells.append(Layout("tangled", "naive", (1, 1), 3, chunks=3))
    for schedule, replicas in (
        ("1f1b", (1, 2, 1)),
        ("gpipe", (2, 1)),
        ("zb-h1", (1, 1, 1, 1)),
        ("zb-v", (1, 1)),
        ("zb-v", (2, 2)),
    ):
        cells.append(Layout("relayed", schedule, replicas, 4))
    cells.append(Layout("relayed", "interleaved", (1, 1, 1), 5, chunks=3))
    cells.append(Layout("relayed", "1f1b", (1, 1, 1), 3, compute="bf16"))
    for schedule, replicas in (
        ("1f1b", (1, 2, 3, 1)),
        ("zb-v", (1, 1, 1)),
        ("interleaved", (1, 2)),
        ("gpipe", (2, 1, 2, 1, 1)),
    ):
        cells.append(Layout("branching", schedule, replicas, 5))
    return cells


@functools.cache
def graph_of(model: str, microbatches: int, blocks: int, compute: Precision = None) -> Graph:
    """The model, captured once per numerics contract."""
    return make_layer_graph(job_of(model, microbatches, blocks, compute))


@functools.cache
def expected(model: str, microbatches: int, blocks: int, compute: Precision = None) -> reference.Result:
    """The reference run, once per numerics contract: no layout has any part in it."""
    job = job_of(model, microbatches, blocks, compute)
    return reference.train(graph_of(model, microbatches, blocks, compute), job)


def differences(name: str, got: Iterable[Any], wanted: Any) -> list[str]:
    """Holders whose copy is not bit for bit what the reference has."""
    bad = []
    for holder, copy in enumerate(got):
        same = copy is None and wanted is None
        if copy is not None and wanted is not None:
            same = torch.equal(torch.as_tensor(copy), torch.as_tensor(wanted))
        if not same:
            bad.append(f"{name} (holder {holder})")
    return bad


def different_gradients(run: OneProcessRun, want: reference.Result, step: int) -> list[str]:
    """Holders whose gradient of the step that is done is not bit for bit the reference's."""
    found = run.gradients()
    return [d for n, g in want.gradients[step].items() for d in differences(n, found[n], g)]


def check_gradients(run: OneProcessRun, want: reference.Result) -> None:
    """Run all steps of a job: each has the gradients of the reference."""
    for step in range(run.spec.steps):
        run.step(step)
        assert not different_gradients(run, want, step), f"step {step}"


def share_out_anew(run: OneProcessRun, schedule: str, shares: Shares) -> None:
    """Give the replicas of a run under way other shares, between two steps."""
    plan = with_shares(run.plan, shares)
    order = registry.build_schedule(schedule, MicrobatchRouting(plan, run.spec.batching))
    for core, part in zip(run.cores, make_worker_assignments(run.spec, run.graph, plan, order), strict=True):
        assert core.can_share_out_anew(part)
        core.share_out_anew(part)
    run.plan = plan


def check_local(layout: Layout, order_seed: int = 0, *, later: Mapping[int, Shares] = MappingProxyType({})) -> None:
    """Run the layout in one process and compare everything with the reference. `later`: step -> shares from there on."""
    job, want = layout.job, expected(layout.model, layout.microbatches, layout.blocks, layout.compute)
    with OneProcessRun(job, layout.plan, layout.schedule, graph=layout.graph, seed=order_seed) as run:
        for step in range(STEPS):
            if step in later:
                share_out_anew(run, layout.schedule, later[step])
            reports = run.step(step)
            assert {r.loss for r in reports} == {want.losses[step]}, f"{layout}, step {step}: loss"
            assert {repr(r.norm) for r in reports} == {repr(want.norms[step])}, f"{layout}, step {step}: norm"
            assert {r.skipped for r in reports} == {want.skipped[step]}, f"{layout}, step {step}: skipped"
            bad = different_gradients(run, want, step)
            assert not bad, f"{layout}, step {step}: gradients of {bad}"
        parameters, state = run.parameters(), run.optimizer_state()
        assert parameters.keys() == want.parameters.keys()
        bad = [d for n, p in want.parameters.items() for d in differences(n, parameters[n], p)]
        for name, keys in want.state.items():
            for key, value in keys.items():
                bad += differences(f"{name}.{key}", [copy[key] for copy in state[name]], value)
        bad += [d for n, b in want.buffers.items() for d in differences(n, run.buffers()[n], b)]
        assert not bad, f"{layout}: {bad}"
