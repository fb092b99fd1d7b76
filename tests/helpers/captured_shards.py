"""Unmodified models of libraries on shards: jobs of one step in float64, and what the plain module makes of the same batch."""

from __future__ import annotations

import functools
import random
from functools import partial
from typing import Any

import numpy
import torch
from helpers.model_zoo import ZOO, make_zoo_model
from helpers.on_shards import TOLERANCE, error
from torch import Tensor, nn
from torch.nn import functional as F

import raypar
from raypar.job import Job
from raypar.model.graph import Graph
from raypar.model.layer_skeletons import canonical_names, parameter_shapes
from raypar.model.tensor_parallel.build_shard_modules import shard_slice_of
from raypar.model.tensor_parallel.compute_shard_layout import compute_shard_layout
from raypar.plan import ParallelPlan
from raypar.plan.seeds import seed_of
from raypar.plan.tensor_parallel_layout import TensorParallelLayout
from raypar.worker.layer_graph_of_job import make_layer_graph
from raypar.worker.run_in_one_process import OneProcessRun

UNSEEN = "unused"
"""The target, which the losses below do not read."""


class ZooSamples:
    """The samples of a zoo model's batch, in float64, again and again."""

    def __init__(self, name: str) -> None:
        self._batch = ZOO[name].batch()

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        own = index % len(next(iter(self._batch.values())))
        found = {name: field[own] for name, field in self._batch.items()}
        return {name: f.double() if f.is_floating_point() else f for name, f in found.items()} | {UNSEEN: torch.zeros(())}


def loss_of(output: Any, unused: Tensor) -> Tensor:
    """Cross-entropy of the logits with made-up targets; the model's own loss, or squares, of what has none. In float64."""
    if isinstance(output, Tensor):
        logits = output
    elif hasattr(output, "logits_per_image"):
        found: Tensor = (output.logits_per_image**2).mean() + (output.text_embeds**3).mean() + (output.image_embeds**3).mean()
        return found
    elif getattr(output, "loss", None) is not None:
        own: Tensor = output.loss
        return own
    else:
        logits = output.logits
    flat = logits.reshape(-1, logits.shape[-1])
    return F.cross_entropy(flat, torch.arange(len(flat)) % flat.shape[-1])


def zoo_job(name: str, p: float = 0.0, microbatches: int = 1, **given: Any) -> Job:
    """A job of one step that trains a zoo model in float64; `p`: dropout."""
    job: dict[str, Any] = {
        "loss": loss_of,
        "data": {"function": ZooSamples, "args": {"name": name}, "target": UNSEEN},
        "steps": 1,
        "batch_size": 4,
        "microbatches": microbatches,
        "optimizer": ("torch.optim:SGD", {"lr": 0.1}),
        "dtype": "float64",
    }
    return raypar.Trainer(model=(make_zoo_model, {"name": name, "p": p}), **(job | given)).job


@functools.cache
def zoo_graph(name: str, p: float = 0.0) -> Graph:
    """The layers of a zoo model."""
    return make_layer_graph(zoo_job(name, p))


def run_step(spec: Job, graph: Graph, schedule: str = "1f1b", **mesh: Any) -> OneProcessRun:
    """One step under a plan."""
    found = OneProcessRun(spec, ParallelPlan.mesh(layers=len(graph.layers), **mesh), schedule, graph=graph)
    for step in range(spec.steps):
        found.step(step)
    return found


def plain_step(spec: Job) -> nn.Module:
    """The user's own module after one step of plain autograd on the same batch; gradients are those of the sum of losses."""
    for seed in (random.seed, numpy.random.seed, torch.manual_seed):
        seed(spec.seed)
    torch.set_num_threads(1)
    model: nn.Module = spec.model.call().double().train()
    samples = spec.data.call()
    order = torch.randperm(len(samples), generator=torch.Generator().manual_seed(seed_of(spec.seed, "epoch", 0)))
    chosen = [samples[i] for i in order[: spec.batching.batch_size].tolist()]
    batch = {name: torch.stack([sample[name] for sample in chosen]) for name in chosen[0] if name != UNSEEN}
    loss_of(model(**batch), torch.zeros(())).backward()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter -= 0.1 * parameter.grad
    return model


def errors_on_shards(spec: Job, graph: Graph, found: OneProcessRun, shards: int) -> dict[str, float]:
    """By parameter: how far its gradient and its value are from the plain module's, where that is more than rounding."""
    layout = compute_shard_layout(graph, shards, dict(spec.styles))
    model = plain_step(spec)
    state = dict(model.named_parameters(remove_duplicate=False))
    summed = max(p.grad.abs().max().item() for p in model.parameters() if p.grad is not None)
    worst: dict[str, float] = {}
    for kind, values in (("gradient", found.gradients()), ("parameter", found.parameters())):
        for name, copies in values.items():
            want = state[name].grad if kind == "gradient" else state[name].detach()
            for shard, got in enumerate(copies):
                assert (want is None) == (got is None), name
                if want is not None and got is not None:
                    part = shard_slice_of(layout, name, want, shard % shards)
                    worst[f"{kind} of {name}"] = max(worst.get(f"{kind} of {name}", 0.0), error(got, part, summed))
    return {name: value for name, value in worst.items() if not value <= TOLERANCE}


def share_of_largest_shard(graph: Graph, layout: TensorParallelLayout, *, cuttable: Any = lambda name: True) -> float:
    """The largest part of the elements of these parameters that one shard holds; ties count once."""
    canonical = canonical_names(graph)
    shapes = {name: s for name, s in parameter_shapes(graph).items() if canonical.get(name, name) == name and cuttable(name)}
    whole = sum(shape.numel() for shape in shapes.values())
    here = partial(layout.elements_on_shard)
    return max(sum(here(name, s.numel(), t) for name, s in shapes.items()) for t in range(layout.shards)) / whole
