"""One GPU, one model of GPT-2's size: raypar with one worker beside the plain PyTorch loop, in turns, in this process."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
from harness import ratio, spread
from models import CLIP_NORM, OPTIMIZER, SEED, Batches, Workload, mean_loss
from ours import gpt_job

from examples import gpt
from raypar.plan import ParallelPlan
from raypar.worker.process.gpu_setup import configure_torch
from raypar.worker.run_in_one_process import OneProcessRun

GPT2 = {"depth": 12, "width": 768, "heads": 12, "context": 1024, "vocab": 50257}
"""The smallest of Radford et al. 2019, with its vocabulary although the text is bytes: 163 million parameters, as the head is
not tied."""


class Ours:
    """raypar's worker, with the numerics contract and all: canonical sums, deterministic kernels, norm in float64."""

    name = "raypar, 1 worker"

    def __init__(self, work: Workload, vocab: int, microbatches: int, device: torch.device) -> None:
        spec = gpt_job(work, microbatches, "canonical")
        model = spec.model.replace(args={**spec.model.args, "vocab": vocab})
        spec = spec.replace(model=model, device="gpu")
        plan = ParallelPlan.mesh(layers=work.depth + 2)
        self._job = OneProcessRun(spec, plan, "1f1b", device=device)
        self._device, self._step = device, 0

    def steps(self, count: int) -> None:
        """That many more."""
        configure_torch(self._device, exact=True)
        for _ in range(count):
            self._job.step(self._step)
            self._step += 1

    def close(self) -> None:
        """Give all memory back."""
        self._job.close()


class Plain:
    """What one would write without raypar: gradients accumulated over the microbatches, `clip_grad_norm_`, AdamW."""

    name = "plain PyTorch loop"

    def __init__(self, work: Workload, vocab: int, microbatches: int, device: torch.device) -> None:
        torch.manual_seed(SEED)
        self._model = gpt.layers(vocab=vocab, **work.model_args).to(device)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), **OPTIMIZER)
        self._batches, self._device, self._microbatches, self._step = Batches(work), device, microbatches, 0

    def steps(self, count: int) -> None:
        """That many more. The loss is looked at after each, as everybody does."""
        torch.use_deterministic_algorithms(False)
        for _ in range(count):
            x, y = (field.to(self._device) for field in self._batches.get(self._step))
            total = torch.zeros((), device=self._device)
            for one, target in zip(x.chunk(self._microbatches), y.chunk(self._microbatches), strict=True):
                loss = mean_loss(self._model(one), target) / self._microbatches
                loss.backward()
                total += loss.detach()
            torch.nn.utils.clip_grad_norm_(self._model.parameters(), CLIP_NORM)
            self._optimizer.step()
            self._optimizer.zero_grad(set_to_none=True)
            total.item()
            self._step += 1

    def close(self) -> None:
        """Give all memory back."""
        del self._model, self._optimizer


def seconds(run: Callable[[int], None], steps: int, device: torch.device) -> float:
    """A step's, over some."""
    finish(device)
    start = time.perf_counter()
    run(steps)
    finish(device)
    return (time.perf_counter() - start) / steps


def finish(device: torch.device) -> None:
    """Wait for the GPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def busy(intervals: Iterable[tuple[float, float]]) -> float:
    """How long at least one of them lasted; (start, end), in any order."""
    total, until = 0.0, float("-inf")
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total


def idle_share(run: Callable[[int], None], device: torch.device, steps: int = 3) -> float | None:
    """The part of some traced steps in which the GPU had no kernel; None where there is none to trace."""
    if device.type != "cuda":
        return None
    from torch.profiler import ProfilerActivity, profile

    finish(device)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as traced:
        start = time.perf_counter()
        run(steps)
        finish(device)
        took_us = 1e6 * (time.perf_counter() - start)
    kernels = [e.time_range for e in traced.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    return 1 - busy((k.start, k.end) for k in kernels) / took_us


def compare(work: Workload, vocab: int, microbatches: int, rounds: int, steps: int, device: torch.device) -> dict[str, Any]:
    """In turns; tokens a second of both with quartiles, how many times as fast raypar is, and idle shares."""
    both = [made(work, vocab, microbatches, device) for made in (Ours, Plain)]
    for one in both:
        one.steps(2)
    took: dict[str, list[float]] = {one.name: [] for one in both}
    for number in range(rounds):
        for one in both if number % 2 == 0 else both[::-1]:
            took[one.name].append(seconds(one.steps, steps, device))
    found: dict[str, Any] = {"tokens_a_step": work.tokens, "rows": []}
    for one in both:
        times = sorted(took[one.name])
        low, high = spread(times)
        rate = [work.tokens / t for t in (times[len(times) // 2], high, low)]
        found["rows"].append({"name": one.name, "tokens_s": rate, "idle": idle_share(one.steps, device)})
    found["ratio"] = ratio(took[Plain.name], took[Ours.name])
    for one in both:
        one.close()
    return found
