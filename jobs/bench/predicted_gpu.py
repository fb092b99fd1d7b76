"""The step that is predicted for a GPU, raypar's and a plain loop's, from what they ask of a device: nobody has measured one.

Two clocks: the host takes so many microseconds to ask for an operation, and goes on; the device begins it when it is asked for
and has done all before. A read of the host waits for the device. See `ASSUMED`, which the page of `operation_budget.py` prints.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from harness import ROOT, table

sys.path.insert(0, str(ROOT / "tests"))

from helpers import operation_budget as budget
from helpers import pretend
from helpers.real_models import REAL, narrow
from helpers.shapes_device import Asked, asked_by, attention_in_one_kernel

from raypar.worker.run_in_one_process import OneProcessRun


@dataclass(frozen=True)
class Gpu:
    """What a GPU does in a second, at most, and how much of it kernels reach."""

    float32_flops: float = 67e12
    bf16_flops: float = 989e12
    memory_bytes: float = 3.35e12
    float32_share: float = 0.75
    bf16_share: float = 0.65
    memory_share: float = 0.85
    least_s: float = 2e-6
    """Of the smallest kernel, with what lies between two."""

    def kernel_s(self, one: Asked) -> float:
        """Of one operation."""
        peak = self.bf16_flops * self.bf16_share if one.bf16 else self.float32_flops * self.float32_share
        return max(one.flops / peak, one.bytes / (self.memory_bytes * self.memory_share), self.least_s)


H100 = Gpu()
"""H100 SXM5: NVIDIA's data sheet of the H100 Tensor Core GPU; without TF32, and without sparsity."""
AT_PEAK = Gpu(float32_share=1.0, bf16_share=1.0, memory_share=1.0)
READ_S = 20e-6
"""From the device's last kernel to the number in the host's hands."""
HOST_US = (3.0, 8.0)
"""Of the plain loop's host for an operation of ATen."""
PLANS = ("1 worker", "bf16", "bf16 parameters", "recompute")
ROUNDS, WARM_ROUNDS = 30, 5
WANTED = 0.99
"""The smallest ratio that is as it should be."""

ASSUMED = f"""**Predicted, not measured: nobody has run this on a GPU.** For one H100 SXM5, in whose data sheet are 67 TFLOP/s
of float32 (without TF32), 989 of bf16 (dense) and 3.35 TB/s. Assumed:

- Matrices and convolutions reach {100 * H100.float32_share:.0f} and {100 * H100.bf16_share:.0f} % of that, memory
  {100 * H100.memory_share:.0f} %; no kernel takes less than {H100.least_s * 1e6:g} us. A kernel takes the longer of its
  arithmetic and its bytes, each tensor read and written whole (no cache helps). Kernels do not overlap; a list of tensors
  in one call is one kernel.
- The plain loop's host takes {HOST_US[0]:g} or {HOST_US[1]:g} us for an operation, with all of PyTorch and Python around it,
  and runs ahead of the device. A read ends {READ_S * 1e6:g} us after the device has done what was asked before.
- raypar's host takes *host* times as long as the loop's for a step. That is measured, in processor time, on the processor
  below: models as deep, so narrow that computing takes next to nothing, in float32 or bf16 as CPUs compute them. So is
  *vote*, what the host does between its one read and the next operation (exact sums, the vote, norm and factor), while the
  device has nothing to do.

Operations, arithmetic and bytes are those that both ask for with the real sizes (of a pretended device without numbers, with
attention in one kernel): {budget.MORE} microbatches of 4 x 1,024 tokens, or of 64 images of 224 x 224, and one worker: what
messages take depends on a network. The loop has its batches ready and reads no loss, but the mask of each batch where the
model does. A step is one of a long row; it takes what the longer of device and host takes. Ratios are the loop's step over
raypar's; wanted is {WANTED}. *At peak*: the device reaches all of its data sheet, the host takes {HOST_US[1]:g} us. Models so
small that the host sets the pace would be at 1 / *host*. In a loop recomputation stops at what the backward pass needs, and
so leaves out the head's product. raypar computes it again: it drops what the loss has saved, too. Sources: NVIDIA, *H100
Tensor Core GPU* data sheet; He, *Making Deep Learning Go Brrrr From First Principles* (2022), of times bound by compute, by
memory and by the host. Shares, microseconds and latencies are assumptions, of which `jobs/bench/gpu.py` would tell the
truth."""


def step_s(asked: Sequence[Asked], gpu: Gpu, host_us: float, after_read_s: float = 0.0, steps: int = 3) -> float:
    """Seconds of the last of some steps one after the other. `after_read_s`: what the host does once it has read."""
    host = device = begun = 0.0
    for _ in range(steps):
        begun = max(host, device)
        for one in asked:
            host += host_us * 1e-6
            if one.read:
                host = max(host, device) + READ_S + after_read_s
            else:
                device = max(device, host) + gpu.kernel_s(one)
    return max(host, device) - begun


@dataclass(frozen=True)
class Predicted:
    """Of a model and a plan."""

    model: str
    plan: str
    ours: Sequence[Asked]
    loop: Sequence[Asked]
    vote_s: float
    host: float
    """How many times as long as the loop's raypar's host takes for a step."""

    def steps(self, gpu: Gpu, host_us: float) -> tuple[float, float]:
        """Seconds of raypar's step, and of the loop's."""
        own_us = host_us * self.host * len(self.loop) / len(self.ours)
        return step_s(self.ours, gpu, own_us, self.vote_s), step_s(self.loop, gpu, host_us)

    def cells(self) -> list[str]:
        """For the table."""
        both = (self.ours, self.loop)
        counts, flops, moved = (
            " / ".join(f"{count(asked):,.{digits}f}" for asked in both)
            for count, digits in (
                (lambda asked: sum(not one.read for one in asked), 0),
                (lambda asked: sum(one.flops for one in asked) / 1e12, 1),
                (lambda asked: sum(one.bytes for one in asked) / 1e9, 0),
            )
        )
        told = [self.model, self.plan, counts, flops, moved, f"{self.host:.2f}", f"{self.vote_s * 1e3:.1f}"]
        for host_us in HOST_US:
            ours, loop = self.steps(H100, host_us)
            device_s = sum(H100.kernel_s(one) for one in self.ours if not one.read)
            bound = "host" if host_us * 1e-6 * self.host * len(self.loop) > device_s else "device"
            told += [f"{ours * 1e3:.1f} / {loop * 1e3:.1f}", bound, f"{loop / ours:.3f}"]
        ours, loop = self.steps(AT_PEAK, HOST_US[1])
        return [*told, f"{loop / ours:.3f}"]


HEADER = ["model", "plan", "operations", "TFLOP", "GB", "host", "vote, ms"]
HEADER += [text for us in HOST_US for text in (f"step at {us:g} us, ms", "bound by", "ratio")] + ["at peak"]


def host_ratio(model: str, plan: budget.Plan) -> float:
    """How many times as long as the plain loop's raypar's step takes with tensors of next to no size, in processor time."""
    model, cpu = narrow(model), torch.device("cpu")
    loop = budget.plain_step(model, plan, budget.MORE, cpu)
    spec = budget.job(model, budget.MORE, plan.precision)
    with OneProcessRun(spec, budget.mesh(model, plan), plan.schedule, graph=budget.graph(model)) as run:
        steps = range(WARM_ROUNDS + ROUNDS)
        pairs = [(_seconds(loop), _seconds(partial(run.step, step))) for step in steps]
    return statistics.median(ours / beside for beside, ours in pairs[WARM_ROUNDS:])


def _seconds(call: Callable[[], object]) -> float:
    start = time.process_time()
    call()
    return time.process_time() - start


def predict(model: str, name: str) -> Predicted:
    """Asked with shapes alone, in this process, whose pretended device has attention in one kernel from then on."""
    pretend.device()
    attention_in_one_kernel()
    torch.set_num_threads(1)
    ours, loop = asked_by(model, name)
    return Predicted(model, name, ours.asked, loop.asked, ours.after_read_s, host_ratio(model, budget.PLANS[name]))


def below(rows: Sequence[Sequence[str]]) -> str:
    """Which rows of the table are not as wanted at one of the host's speeds."""
    places = [place for place, name in enumerate(HEADER) if name == "ratio"]
    found = [
        f"{row[0]}, {row[1]} ({' and '.join(row[p] for p in places)})"
        for row in rows
        if min(float(row[p]) for p in places) < WANTED
    ]
    return f"Below {WANTED}: {'; '.join(found) or 'none'}."


def section(models: Sequence[str] = tuple(REAL)) -> str:
    """Of the page."""
    rows = [predict(model, plan).cells() for model in models for plan in PLANS]
    return f"## The predicted step on an H100\n\n{ASSUMED}\n\n{table(HEADER, rows)}\n\n{below(rows)}"


if __name__ == "__main__":
    print(section())
