"""What measuring three metrics in every step of training adds to the step: a GPT of the quickstart's kind, in one worker.

Measured and unmeasured steps alternate in one run (`metrics_every: 2`). Times are of the processor, as others may use the
machine: each pair is one ratio, whose median has a bootstrap interval. `python jobs/bench/metrics.py --pairs 60`.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time

import torch
from torch import Tensor

from examples import gpt
from raypar.job.read_job import load_job
from raypar.plan import ParallelPlan
from raypar.worker.run_in_one_process import OneProcessRun
from raypar.worker.worker_assignments import make_layer_graph


def accuracy(output: Tensor, target: Tensor) -> tuple[Tensor, int]:
    """(tokens that are right, tokens)."""
    return (output.argmax(-1) == target).sum(), target.numel()


def top_five(output: Tensor, target: Tensor) -> tuple[Tensor, int]:
    """(tokens that are among the five most likely, tokens)."""
    return (output.topk(5, -1).indices == target.unsqueeze(-1)).sum(), target.numel()


class Confusion:
    """Counts of (token, most likely token), as torchmetrics' F1 keeps them."""

    def __init__(self, classes: int) -> None:
        self.classes = classes
        self.reset()

    def reset(self) -> None:
        """Forget all."""
        self.counts = torch.zeros(self.classes * self.classes, dtype=torch.long)

    def update(self, output: Tensor, target: Tensor) -> None:
        """Count a microbatch."""
        places = target.flatten() * self.classes + output.argmax(-1).flatten()
        self.counts += torch.bincount(places, minlength=len(self.counts))

    def merge_state(self, other: Confusion) -> None:
        """Add another's counts."""
        self.counts = self.counts + other.counts

    def compute(self) -> Tensor:
        """The mean F1 of the tokens."""
        counts = self.counts.view(self.classes, self.classes).double()
        right = counts.diagonal()
        return (2 * right / (counts.sum(0) + counts.sum(1)).clamp(min=1)).mean()


METRICS = {
    "accuracy": {"function": "jobs.bench.metrics:accuracy"},
    "top_five": {"function": "jobs.bench.metrics:top_five"},
    "f1": {"function": "jobs.bench.metrics:Confusion", "args": {"classes": 256}},
}


def time_of_functions(microbatches: int) -> float:
    """What the functions and `update` take for the microbatches of a step, called by themselves, in ms of the processor."""
    output, target, times = torch.randn(4, 128, 256), torch.randint(0, 256, (4, 128)), []
    confusion = Confusion(256)
    for _ in range(30):
        start = time.process_time()
        accuracy(output, target), top_five(output, target), confusion.update(output, target)
        times.append(time.process_time() - start)
    return 1000 * microbatches * statistics.median(times)


def main() -> None:
    """Print the times and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=60)
    pairs = parser.parse_args().pairs
    words = [f"steps={2 * pairs + 4}", "validation=null", "metrics_every=2", f"metrics={METRICS}"]
    job = load_job("jobs/quickstart.yaml", words)
    graph = make_layer_graph(job)
    ratios, plain, measured = [], [], []
    with OneProcessRun(job, ParallelPlan.mesh(layers=len(graph.layers)), "1f1b", graph=graph) as run:
        times = []
        for step in range(2 * pairs + 4):
            start = time.process_time()
            run.step(step)
            times.append(time.process_time() - start)
            assert bool(run.metrics) == (step % 2 == 1)
    for first, second in zip(times[4::2], times[5::2], strict=True):
        plain.append(first), measured.append(second)
        ratios.append(second / first)
    chance = random.Random(0)
    boots = sorted(statistics.median(chance.choices(ratios, k=len(ratios))) for _ in range(2000))
    print(f"{job.name}: {gpt.__name__}, {job.batch_size} samples in {job.microbatches} microbatches, {pairs} pairs of steps")
    both = f"unmeasured {1000 * statistics.median(plain):.1f} ms, measured {1000 * statistics.median(measured):.1f} ms"
    print(f"{both} of the processor a step; the metrics' own functions alone {time_of_functions(job.microbatches):.1f} ms")
    print(f"ratio {statistics.median(ratios):.4f} ({boots[50]:.4f} to {boots[-51]:.4f})")
    print(f"last values: {run.metrics}")


if __name__ == "__main__":
    main()
