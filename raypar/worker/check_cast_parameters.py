"""Says, before a run, that parameters are cast to the job's dtype; refuses layers that fail then."""

from __future__ import annotations

from collections import Counter

import torch

from raypar.errors import ModelError, UserCodeError
from raypar.job import Job
from raypar.model.graph import Graph
from raypar.model.layer_skeletons import layer_sizes, shared_skeleton
from raypar.plan import ParallelPlan
from raypar.worker.layer_precisions import AUTOCAST_PRECISIONS, dtype_of_job
from raypar.worker.plain_microbatches import MOST_BYTES, with_few_microbatches
from raypar.worker.run_in_one_process import OneProcessRun


def line_about_cast_parameters(spec: Job, graph: Graph) -> str | None:
    """A line for the user about parameters and buffers that the model function has made in another floating point dtype than
    the job's; None if there are none."""
    counts, total, wanted = Counter[torch.dtype](), 0, dtype_of_job(spec)
    for layer in graph.layers:
        module = shared_skeleton(layer)
        for tensor in (*module.parameters(), *module.buffers()):
            total += tensor.is_floating_point()
            counts[tensor.dtype] += tensor.is_floating_point() and tensor.dtype != wanted
    made = [f"{number} in {str(dtype).removeprefix('torch.')}" for dtype, number in counts.items() if number]
    if not made:
        return None
    text = (
        f"of the model's {total} parameters and buffers the model function makes {' and '.join(made)}: they are cast to "
        f"{spec.dtype}, the job's dtype, and trained in it"
    )
    advice = []
    for name, lower in AUTOCAST_PRECISIONS.items():
        if counts[lower.dtype]:
            advice.append(f'layers compute in {lower.dtype_name} with precision: {{"compute": "{name}"}}')
    if counts[torch.float64]:
        advice.append("dtype: float64 keeps those")
    return f"{text}\n  cure: {'; '.join(advice)}" if advice else text


def check_cast_parameters(spec: Job, graph: Graph) -> None:
    """Raise `ModelError` for a layer that fails with its parameters or buffers in the job's dtype (rule 2 of the contract).

    Computes one microbatch, if the model function has made parameters or buffers in another floating point dtype and the model
    has at most `MOST_BYTES`. Other errors are left to the first step.
    """
    dtype = dtype_of_job(spec)
    cast = {
        layer.name: f"{layer.qualify(path)} is {str(tensor.dtype).removeprefix('torch.')}"
        for layer in graph.layers
        for module in [shared_skeleton(layer)]
        for path, tensor in reversed([*module.named_parameters(), *module.named_buffers()])
        if tensor.is_floating_point() and tensor.dtype != dtype
    }
    if not cast or sum(size.nbytes for size in layer_sizes(graph, dtype)) > MOST_BYTES:
        return
    plan = ParallelPlan.mesh(layers=len(graph.layers))
    try:
        with OneProcessRun(with_few_microbatches(spec, 1), plan, "1f1b", graph=graph) as run:
            run.step(0)
    except UserCodeError as error:
        failed = next((name for name in cast if f"layer {name!r}" in error.what), None)
        if failed is None or "dtype" not in error.what:
            return
        what = next((line for line in error.what.splitlines() if "raised" in line), error.what)
        raise ModelError(
            f"{cast[failed]}, and the job's dtype is {spec.dtype}, to which its parameters are cast. Then {what}",
            cure=f"make it in {spec.dtype} and let its code take the dtype of its weight (x.to(self.weight.dtype)); products "
            "in bfloat16 are what precision: {compute: bf16} is for",
        ) from error
