"""Compares the loss and gradients of layers on shards with those of the whole layers, before a run with inferred styles.

`model.tensor_parallel.prove_styles` has tried these styles already, on tensors without numbers. It sees only what goes through
PyTorch's functions; users' code that inspects a tensor in another way is found here.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from raypar.errors import ModelError
from raypar.job import Job, PlanConfig
from raypar.model.graph import Graph
from raypar.model.layer_skeletons import state_shapes
from raypar.model.random_state import preserve_random_state
from raypar.model.tensor_parallel.build_shard_modules import shard_slice_of
from raypar.plan import ParallelPlan
from raypar.plan.tensor_parallel_layout import TensorParallelLayout
from raypar.worker.plain_microbatches import MOST_BYTES, comparison_tolerance, with_few_microbatches
from raypar.worker.run_in_one_process import OneProcessRun

SMALLEST_SHARE = 1e-2
"""Each gradient's difference is compared with its own largest number, or with this share of the model's largest
if that is more: a gradient whose terms cancel is rounding only."""


def check_shards_with_numbers(spec: Job, graph: Graph, layout: TensorParallelLayout) -> str | None:
    """Raises `ModelError` if the first microbatch has another loss or other gradients on shards than on whole layers.

    Returns why nothing was compared, if so: models of more than `MOST_BYTES`, and losses that are not finite, are not.
    """
    item = getattr(torch, spec.dtype).itemsize
    size = sum(shape.numel() for shape in state_shapes(graph, 0, len(graph.layers)).values()) * item
    if size > MOST_BYTES:
        return f"its parameters and buffers have {size / 2**20:.0f} MiB, and up to {MOST_BYTES >> 20} MiB are tried"
    small = with_few_microbatches(spec, 1).replace(plan=PlanConfig(sequence_parallel=False))
    with preserve_random_state():
        wanted_loss, whole = _run(small, graph, 1)
        loss, found = _run(small, graph, layout.shards)
    tolerance = comparison_tolerance(spec)
    if not math.isfinite(wanted_loss):
        return f"the loss of the first microbatch is {wanted_loss}"
    if not math.isclose(loss, wanted_loss, rel_tol=tolerance, abs_tol=1e-12):
        raise _error(layout, f"the loss is {loss:.8g}, without shards {wanted_loss:.8g}")
    top = max((_largest(copies[0]) for copies in whole.values()), default=0.0)
    for name, copies in found.items():
        own = whole[name][0]
        for shard, copy in enumerate(copies):
            want = None if own is None else shard_slice_of(layout, name, own, shard)
            one, other = (torch.zeros(()) if value is None else value for value in (copy, want))
            if one.numel() and other.numel():
                difference = float((one - other).abs().max())
                if difference > tolerance * max(_largest(other), SMALLEST_SHARE * top) + 1e-12:
                    raise _error(layout, f"the gradient of {name} differs by {difference:.3g} on shard {shard}")
    return None


def _run(spec: Job, graph: Graph, shards: int) -> tuple[float, dict[str, list[Tensor | None]]]:
    """(loss, gradients by name and shard) of one step."""
    with OneProcessRun(spec, ParallelPlan.mesh(tp=shards, layers=len(graph.layers)), "1f1b", graph=graph) as run:
        loss = run.step(0)[0].loss
        return loss, {n: [None if g is None else g.detach().clone() for g in copies] for n, copies in run.gradients().items()}


def _largest(value: Tensor | None) -> float:
    return float(value.abs().max()) if value is not None and value.numel() else 0.0


def _error(layout: TensorParallelLayout, what: str) -> ModelError:
    return ModelError(
        f"the layers do not compute on {layout.shards} shards what they compute whole: in the first microbatch {what}",
        cure="give the modules around it the style whole (plan.styles: raypar plan shows what is cut and how), and report it",
    )
