"""A small job with any optimizer in stages, replicas, shards, resumed and joined: `torch.equal` to one process, or refused."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from helpers import checkpoint_folders as checkpoint_files
from helpers import reference
from helpers.generations import Generations
from helpers.torch_flesh import TorchJob
from torch import Tensor, nn

from raypar.errors import InputError, UserCodeError
from raypar.job import DataConfig, Job, LossConfig, LrScheduleConfig, ModelConfig, OptimizerConfig
from raypar.model.graph import Graph
from raypar.plan import ParallelPlan
from raypar.worker.check_model_can_shard import check_model_can_shard
from raypar.worker.job_preflight import preflight
from raypar.worker.layer_graph_of_job import make_layer_graph
from raypar.worker.run_in_one_process import OneProcessRun

STEPS, SAVED_AFTER, LAYERS, WIDTH = 6, 3, 5, 64


class Block(nn.Module):
    """What shards cut: up is a column layer, down a row layer."""

    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 96, bias=bias), nn.Linear(96, WIDTH, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).relu())


def model(matrices: bool = False) -> nn.Sequential:
    """Five layers; `matrices`: all of whose parameters are."""
    norm = nn.Tanh() if matrices else nn.LayerNorm(WIDTH)
    first, last = nn.Linear(8, WIDTH, bias=not matrices), nn.Linear(WIDTH, 3, bias=not matrices)
    return nn.Sequential(OrderedDict(first=first, block0=Block(not matrices), norm=norm, block1=Block(not matrices), head=last))


class Points:
    """Sample i: x [8], y [3]."""

    raypar_thread_safe = True

    def __len__(self) -> int:
        return 29

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        dice = torch.Generator().manual_seed(index)
        return torch.randn(8, generator=dice), torch.randn(3, generator=dice)


def warm(step: int) -> float:
    return (step + 1) / STEPS


def job_of(optimizer: OptimizerConfig, *, matrices: bool = False, **changes: Any) -> Job:
    """A job of a few steps with this optimizer."""
    fields: dict[str, Any] = {
        "name": "optimizers",
        "seed": 5,
        "steps": STEPS,
        "batch_size": 10,
        "microbatches": 4,
        "model": ModelConfig(function=model, args={"matrices": matrices}),
        "loss": LossConfig(function=nn.functional.mse_loss),
        "data": DataConfig(function=Points),
        "optimizer": optimizer,
        "lr_schedule": LrScheduleConfig(function=warm),
        "clip_norm": 1.0,
    }
    return Job(**{**fields, **changes})


@dataclass(frozen=True)
class GridOfOptimizers:
    """A job with these optimizers under 2 stages x 2 replicas, for `tcp_calls.train`."""

    optimizer: OptimizerConfig
    schedule: str = "1f1b"

    @property
    def job(self) -> Job:
        return job_of(self.optimizer)

    @property
    def plan(self) -> ParallelPlan:
        return ParallelPlan.mesh(dp=2, pp=2, layers=LAYERS)

    @cached_property
    def graph(self) -> Graph:
        return make_layer_graph(self.job)


MUON_AND_ADAMW = [
    {"match": "block*.*.weight", "function": "torch.optim:Muon", "args": {"lr": 0.02}},
    {
        "match": "*",
        "function": "torch.optim:AdamW",
        "args": {"lr": 0.003},
        "groups": [{"match": "*.bias", "weight_decay": 0.0}],
    },
]
ADAMW_IN_8_BITS = {
    "function": "raypar.optimizers:AdamW8bit",
    "args": {"lr": 0.003, "min_8bit_size": 500, "block_size": 256},
}


def _equal(found: dict[str, list[Tensor]], want: dict[str, Tensor]) -> str:
    """`equal`, or what differs by how much."""
    for name, copies in found.items():
        for holder, copy in enumerate(copies):
            if not torch.equal(copy, want[name]):
                return f"DIFFERENT: {name} of holder {holder} by {float((copy - want[name]).abs().max()):.2g}"
    return "equal" if found.keys() == want.keys() else f"DIFFERENT: names {sorted(found.keys() ^ want.keys())}"


def compare_with_one_process(spec: Job, graph: Graph, plan: ParallelPlan) -> str:
    """Train under a plan: `equal` if every parameter has the bits of the one-process reference, or what differs."""
    want = _one_process(spec, graph)
    with OneProcessRun(spec, plan, "1f1b", graph=graph) as local:
        for step in range(spec.steps):
            local.step(step)
        return _equal(local.parameters(), want)


_ONE_PROCESS: list[tuple[Job, Graph, dict[str, Tensor]]] = []
"""The last reference: the layouts of a job, one after the other, are compared with one."""


def _one_process(spec: Job, graph: Graph) -> dict[str, Tensor]:
    """The parameters of the one-process reference."""
    if not _ONE_PROCESS or _ONE_PROCESS[0][0] is not spec or _ONE_PROCESS[0][1] is not graph:
        _ONE_PROCESS[:] = [(spec, graph, reference.train(graph, spec).parameters)]
    return _ONE_PROCESS[0][2]


def _under(plan: ParallelPlan) -> Callable[[Job, Graph, Path], str]:
    return lambda spec, graph, folder: compare_with_one_process(spec, graph, plan)


def _on_shards(spec: Job, graph: Graph, folder: Path) -> str:
    """Shards add in another order than one process, so one process is given the gradients that they had, joined."""
    shards = 2
    with OneProcessRun(spec, ParallelPlan.mesh(tp=shards, layers=LAYERS), "1f1b", graph=graph) as local:
        stages = [next(iter(core.stages.values())) for core in local.cores]

        def joined(of: list[Tensor | None], name: str) -> Tensor | None:
            cut = stages[0].shard.layout.cuts.get(name)  # type: ignore[union-attr]
            if cut is None or of[0] is None:
                return of[0]
            return torch.cat([tensor for tensor in of if tensor is not None], cut.dim)

        names = list(stages[0].parameters)
        first = {name: joined([s.parameters[name].detach().clone() for s in stages], name) for name in names}
        whole = {name: nn.Parameter(value) for name, value in first.items() if value is not None}
        groups = [
            {"params": [p for n, p in whole.items() if reference.fnmatch.fnmatchcase(n, pattern)], **given}
            for pattern, given in spec.optimizer.options_by_pattern
        ]
        taken = {id(p) for group in groups for p in group["params"]}
        groups.append({"params": [p for p in whole.values() if id(p) not in taken]})
        optimizer = spec.optimizer.resolve()([g for g in groups if g["params"]], **spec.optimizer.args)
        if hasattr(optimizer, "train"):
            optimizer.train()
        base = [group.get("lr") for group in optimizer.param_groups]
        gradients: list[dict[str, Tensor | None]] = [{} for _ in stages]
        for of, core, stage in zip(gradients, local.cores, stages, strict=True):  # some optimizers write into gradients

            def keep(*_: Any, of: dict[str, Tensor | None] = of, stage: Any = stage) -> None:
                of.update((n, None if p.grad is None else p.grad.clone()) for n, p in stage.parameters.items())

            core.step_commit.optimizers[0, core.rank].register_step_pre_hook(keep)
        for step in range(STEPS):
            local.step(step)
            for name, parameter in whole.items():
                parameter.grad = joined([of[name] for of in gradients], name)
            for group, lr in zip(optimizer.param_groups, base, strict=True):
                if lr is not None:
                    group["lr"] = lr * warm(step)
            optimizer.step()
        found = {name: [joined([s.parameters[name].detach() for s in stages], name)] for name in names}
        return _equal(found, {name: p.detach() for name, p in whole.items()})  # type: ignore[arg-type]


def _resumed(spec: Job, graph: Graph, folder: Path) -> str:
    want, plan = _one_process(spec, graph), ParallelPlan.mesh(layers=LAYERS)
    with OneProcessRun(spec, plan, "1f1b", graph=graph) as local:
        for step in range(SAVED_AFTER):
            local.step(step)
        begun = checkpoint_files.create_checkpoint(folder, SAVED_AFTER)
        local.cores[0].start_save(begun)
        written = [local.cores[0].save_result()]
        path = checkpoint_files.commit_checkpoint(begun, written, steps_done=SAVED_AFTER, contract={})
    with OneProcessRun(spec, ParallelPlan.mesh(dp=2, layers=LAYERS), "1f1b", graph=graph) as local:
        for core in local.cores:
            core.load(path)
        for step in range(SAVED_AFTER, STEPS):
            local.step(step)
        return _equal(local.parameters(), want)


def _joined(spec: Job, graph: Graph, folder: Path) -> str:
    """Worker 1 joins worker 0, which leaves, and is joined by worker 2; where the optimizer allows stages, as a stage."""
    want, run = _one_process(spec, graph), Generations(TorchJob(spec, graph))
    trial = preflight(spec).optimizer
    replicas, stages = ParallelPlan.mesh(dp=2, layers=LAYERS), ParallelPlan.mesh(pp=2, layers=LAYERS)
    second = stages if trial is not None and trial.most_stages is None else replicas
    plans = [
        (ParallelPlan.mesh(layers=LAYERS), [0]),
        (replicas, [0, 1]),
        (ParallelPlan.mesh(layers=LAYERS), [1]),
        (second, [1, 2]),
    ]
    for step in range(STEPS):
        if step < len(plans):
            run.adopt(*plans[step], step)
        run.step(step)
    found: dict[str, list[Tensor]] = {}
    for body in run.bodies.values():
        for stage in body.core.stages.values():
            for name, parameter in stage.parameters.items():
                found.setdefault(name, []).append(parameter.detach())
        body.core.close()
    return _equal(found, want)


LAYOUTS: dict[str, tuple[ParallelPlan, Callable[[Job, Graph, Path], str]]] = {
    "2 stages": (ParallelPlan.mesh(pp=2, layers=LAYERS), _under(ParallelPlan.mesh(pp=2, layers=LAYERS))),
    "2 replicas": (ParallelPlan.mesh(dp=2, layers=LAYERS), _under(ParallelPlan.mesh(dp=2, layers=LAYERS))),
    "2 shards": (ParallelPlan.mesh(tp=2, layers=LAYERS), _on_shards),
    "saved, resumed": (ParallelPlan.mesh(dp=2, layers=LAYERS), _resumed),
    "joined": (ParallelPlan.mesh(dp=2, layers=LAYERS), _joined),
}
"""Layout -> a plan that it has, and a function that runs it and says `equal`, or what differs."""


def outcomes(spec: Job, folder: Path) -> dict[str, str]:
    """Layout -> `equal`, `refused: ...` (before anything has started), or what differs."""
    try:
        checked = preflight(spec)
    except (InputError, UserCodeError) as error:
        return dict.fromkeys(LAYOUTS, f"refused: {error.what}")
    found = {}
    graph = make_layer_graph(spec)
    for number, (layout, (plan, run)) in enumerate(LAYOUTS.items()):
        try:
            check_model_can_shard(spec, checked, plan)
        except InputError as error:
            found[layout] = f"refused: {error.what}"
            continue
        found[layout] = run(spec, graph, folder / str(number))
    return found
