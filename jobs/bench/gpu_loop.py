"""One GPU, one model of GPT-2's size: raypar with one worker beside plain PyTorch loops, in turns, in this process."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import asdict
from typing import Any, NamedTuple

import torch
from harness import ratio, spread
from models import CLIP_NORM, OPTIMIZER, SEED, Batches, Workload, mean_loss
from ours import gpt_job
from torch import nn

from examples import gpt
from raypar.job import PrecisionConfig
from raypar.plan import ParallelPlan
from raypar.worker.process.gpu_setup import configure_torch
from raypar.worker.run_in_one_process import OneProcessRun

GPT2 = {"depth": 12, "width": 768, "heads": 12, "context": 1024, "vocab": 50257}
"""The smallest of Radford et al. 2019, with its vocabulary although the text is bytes: 163 million parameters, as the head is
not tied."""


FP32, AUTOCAST, BF16 = "fp32", "bf16 by autocast", "bf16 parameters"
PRECISIONS = {FP32: None, AUTOCAST: PrecisionConfig(compute="bf16"), BF16: PrecisionConfig(parameters="bf16", master="float32")}
"""By name: what the job says of it."""


class Ours:
    """raypar's worker, with the numerics contract and all: canonical sums, deterministic kernels, norm in float64."""

    def __init__(self, precision: str) -> None:
        """`precision`: one of `PRECISIONS`."""
        self.precision, self.name = precision, f"raypar, 1 worker, {precision}"

    def start(self, work: Workload, vocab: int, microbatches: int, device: torch.device) -> None:
        """Make the model."""
        configure_torch(device, exact=True)  # before the run's guard takes the settings that it restores
        spec = gpt_job(work, microbatches, "canonical")
        model = spec.model.replace(args={**spec.model.args, "vocab": vocab})
        spec = spec.replace(model=model, device="gpu", precision=PRECISIONS[self.precision])
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
    """What one would write without raypar: gradients accumulated over the microbatches, `clip_grad_norm_`, AdamW.

    With bf16 parameters the optimizer has copies in float32, to which the gradients of each microbatch are added.
    """

    def __init__(self, precision: str, *, deterministic: bool) -> None:
        """`deterministic`: with the settings of PyTorch that raypar needs, too."""
        self.precision, self._deterministic = precision, deterministic
        self.name = f"plain PyTorch loop, {precision}{', deterministic' if deterministic else ''}"

    def start(self, work: Workload, vocab: int, microbatches: int, device: torch.device) -> None:
        """Make the model."""
        torch.manual_seed(SEED)
        self._model = gpt.layers(vocab=vocab, **work.model_args).to(device)
        self._masters = self._own = list(self._model.parameters())
        if self.precision == BF16:
            self._masters = [nn.Parameter(one.detach().clone()) for one in self._own]
            self._model.bfloat16()
        self._optimizer = torch.optim.AdamW(self._masters, **OPTIMIZER)
        self._batches, self._device, self._microbatches, self._step = Batches(work), device, microbatches, 0

    def steps(self, count: int) -> None:
        """That many more. The loss is looked at after each, as everybody does."""
        torch.use_deterministic_algorithms(self._deterministic)
        if self._deterministic:
            configure_torch(self._device, exact=True)
        for _ in range(count):
            x, y = (field.to(self._device) for field in self._batches.get(self._step))
            total = torch.zeros((), device=self._device)
            for one, target in zip(x.chunk(self._microbatches), y.chunk(self._microbatches), strict=True):
                with torch.autocast(self._device.type, torch.bfloat16, enabled=self.precision == AUTOCAST):
                    output = self._model(one)
                    loss = mean_loss(output.float() if self.precision == BF16 else output, target) / self._microbatches
                loss.backward()
                self._hand_gradients_over()
                total += loss.detach()
            torch.nn.utils.clip_grad_norm_(self._masters, CLIP_NORM)
            self._optimizer.step()
            if self._masters is not self._own:
                with torch.no_grad():
                    torch._foreach_copy_(self._own, self._masters)
            self._optimizer.zero_grad(set_to_none=True)
            total.item()
            self._step += 1

    def _hand_gradients_over(self) -> None:
        """Add the gradients of a microbatch to those of the copies in float32, where there are any."""
        if self._masters is self._own:
            return
        for master, own in zip(self._masters, self._own, strict=True):
            assert own.grad is not None
            master.grad = own.grad.float() if master.grad is None else master.grad.add_(own.grad)
            own.grad = None

    def close(self) -> None:
        """Give all memory back."""
        del self._model, self._optimizer, self._masters, self._own


def contenders() -> list[Ours | Plain]:
    """All, by precision."""
    return [
        made
        for precision in PRECISIONS
        for made in (Ours(precision), Plain(precision, deterministic=True), Plain(precision, deterministic=False))
    ]


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


class Traced(NamedTuple):
    """What a trace of some steps says."""

    idle: float
    """The part of the time in which the GPU had no kernel."""
    kernels: float
    """Kernels a step."""
    copies: float
    """Copies and fills of memory a step."""


def traced(run: Callable[[int], None], device: torch.device, steps: int = 3) -> Traced | None:
    """A trace of some steps; None where there is no GPU."""
    if device.type != "cuda":
        return None
    from torch.profiler import ProfilerActivity, profile

    finish(device)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as trace:
        start = time.perf_counter()
        run(steps)
        finish(device)
        took_us = 1e6 * (time.perf_counter() - start)
    found = [e for e in trace.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    copies = sum(e.name.startswith("Mem") for e in found)
    idle = 1 - busy((e.time_range.start, e.time_range.end) for e in found) / took_us
    return Traced(idle, (len(found) - copies) / steps, copies / steps)


def compare(work: Workload, vocab: int, microbatches: int, rounds: int, steps: int, device: torch.device) -> dict[str, Any]:
    """All contenders in turns: tokens a second with quartiles, what a trace says, peak memory; and by precision how many times
    as fast raypar is as each plain loop."""
    all_of_them = contenders()
    for one in all_of_them:
        one.start(work, vocab, microbatches, device)
        one.steps(2)
    took: dict[str, list[float]] = {one.name: [] for one in all_of_them}
    for number in range(rounds):
        for one in all_of_them if number % 2 == 0 else all_of_them[::-1]:
            took[one.name].append(seconds(one.steps, steps, device))
    found: dict[str, Any] = {"tokens_a_step": work.tokens, "rows": [], "ratios": []}
    for one in all_of_them:
        times = sorted(took[one.name])
        low, high = spread(times)
        rate = [work.tokens / t for t in (times[len(times) // 2], high, low)]
        trace = traced(one.steps, device)
        found["rows"].append({"name": one.name, "tokens_s": rate, "trace": trace._asdict() if trace is not None else None})
    ours = {one.precision: one.name for one in all_of_them if isinstance(one, Ours)}
    for one in all_of_them:
        if isinstance(one, Plain):
            how = asdict(ratio(took[one.name], took[ours[one.precision]]))
            found["ratios"].append({"ours": ours[one.precision], "beside": one.name, **how})
    for one in all_of_them:
        one.close()
    return found
