"""One GPU: training with activations in the host's memory (`plan.activations_in: host`) and in the GPU's, bit for bit."""

from __future__ import annotations

import time
from typing import Any

import torch
from gpu_loop import finish
from models import Workload
from ours import gpt_job

from raypar.job import PlanConfig
from raypar.plan import ParallelPlan
from raypar.plan.offloading import HOST
from raypar.worker.norm_and_weights_hash import weights_hash
from raypar.worker.process.gpu_setup import configure_torch
from raypar.worker.run_in_one_process import OneProcessRun


def measure(work: Workload, microbatches: int, steps: int, device: torch.device, place: str = HOST) -> list[dict[str, Any]]:
    """A row without and one with offloading to `place`: weights after some steps, seconds a step, most memory of the GPU."""
    return [_row(work, microbatches, steps, device, where) for where in (None, place)]


def _row(work: Workload, microbatches: int, steps: int, device: torch.device, place: str | None) -> dict[str, Any]:
    configure_torch(device, exact=True)  # before the run's guard takes the settings that it restores
    on_gpu = device.type == "cuda"
    spec = gpt_job(work, microbatches, "canonical").replace(device="gpu" if on_gpu else "cpu")
    spec = spec.replace(plan=PlanConfig(activations_in=place))
    layers = range(work.depth + 2)
    plan = ParallelPlan.mesh(layers=len(layers)).with_offload(() if place is None else layers)
    with OneProcessRun(spec, plan, "1f1b", device=device) as run:
        run.step(0)
        finish(device)
        if on_gpu:
            torch.cuda.reset_peak_memory_stats(device)
        start = time.perf_counter()
        for step in range(1, steps + 1):
            run.step(step)
        finish(device)
        seconds = (time.perf_counter() - start) / steps
        return {
            "place": place or "the GPU's memory",
            "weights": weights_hash({name: copies[0].cpu() for name, copies in run.parameters().items()}),
            "seconds": seconds,
            "gpu_bytes": torch.cuda.max_memory_allocated(device) if on_gpu else 0,
            "place_bytes": sum(core.activation_place.nbytes for core in run.cores if core.activation_place is not None),
        }
