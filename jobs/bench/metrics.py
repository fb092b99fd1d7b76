"""What measuring three metrics in a step of training adds to the step, and which part of that is not the metrics' own code.

Steps of three kinds follow each other in one run, in one worker: unmeasured; with the same functions called by hand, inside the
loss function, as in a loop without raypar's metrics; measured by raypar (`metrics_every: 3`). Times are of the processor, as
others may use the machine: each round is one set of ratios, whose medians have bootstrap intervals.

    python jobs/bench/metrics.py quickstart --rounds 40
    python jobs/bench/metrics.py gpt2 --rounds 25
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from examples import gpt
from raypar.job import Job
from raypar.job.read_job import load_job
from raypar.plan import ParallelPlan
from raypar.worker.layer_graph_of_job import make_layer_graph
from raypar.worker.run_in_one_process import OneProcessRun

EVERY = 3
"""Steps of a round: unmeasured, by hand, measured."""
CLASSES = 256


def accuracy(output: Tensor, target: Tensor) -> tuple[Tensor, int]:
    """(tokens that are right, tokens)."""
    return (output.argmax(-1) == target).sum(), target.numel()


def top_five(output: Tensor, target: Tensor) -> tuple[Tensor, int]:
    """(tokens that are among the five most likely, tokens)."""
    return (output.topk(5, -1).indices == target.unsqueeze(-1)).sum(), target.numel()


class Confusion:
    """Counts of (token, most likely token), as torchmetrics' F1 keeps them; of more tokens than classes by remainder."""

    def __init__(self, classes: int = CLASSES) -> None:
        self.classes = classes
        self.reset()

    def reset(self) -> None:
        """Forget all."""
        self.counts = torch.zeros(self.classes * self.classes, dtype=torch.long)

    def update(self, output: Tensor, target: Tensor) -> None:
        """Count a microbatch."""
        places = target.flatten() % self.classes * self.classes + output.argmax(-1).flatten() % self.classes
        self.counts += torch.bincount(places, minlength=len(self.counts))

    def merge_state(self, other: Confusion) -> None:
        """Add another's counts."""
        self.counts += other.counts

    def compute(self) -> Tensor:
        """The mean F1 of the classes."""
        counts = self.counts.view(self.classes, self.classes).double()
        right = counts.diagonal()
        return (2 * right / (counts.sum(0) + counts.sum(1)).clamp(min=1)).mean()


METRICS = {
    "accuracy": {"function": "jobs.bench.metrics:accuracy"},
    "top_five": {"function": "jobs.bench.metrics:top_five"},
    "f1": {"function": "jobs.bench.metrics:Confusion"},
}


class ByHand:
    """The loss function, which calls the metrics too, as a loop without raypar's metrics would, where `on`."""

    def __init__(self) -> None:
        self.on, self.right, self.among, self.tokens, self.confusion = False, [], [], 0, Confusion()

    def __call__(self, output: Tensor, target: Tensor) -> Tensor | tuple[Tensor, Tensor | float]:
        """The loss of a GPT."""
        found = gpt.loss(output, target)
        if self.on:
            with torch.no_grad():
                logits = output.detach()
                self.right.append(accuracy(logits, target)[0])
                self.among.append(top_five(logits, target)[0])
                self.tokens += target.numel()
                self.confusion.update(logits, target)
        return found

    def compute(self) -> dict[str, float]:
        """The values of the step."""
        right, among = (float(torch.stack(each).sum()) / self.tokens for each in (self.right, self.among))
        f1 = float(self.confusion.compute())
        self.right, self.among, self.tokens = [], [], 0
        self.confusion.reset()
        return {"accuracy": right, "top_five": among, "f1": f1}


class Logits(nn.Module):
    """A GPT-2 of transformers that returns its logits."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        from transformers import GPT2Config, GPT2LMHeadModel

        config = GPT2Config(n_embd=width, n_layer=depth, n_head=width // 64, n_positions=128, use_cache=False)
        self.model = GPT2LMHeadModel(config)

    def forward(self, input_ids: Tensor) -> Tensor:
        """[samples, tokens] -> [samples, tokens, 50,257]."""
        logits: Tensor = self.model(input_ids).logits
        return logits


def small_gpt2() -> nn.Module:
    """Four layers of width 256, and GPT-2's whole vocabulary."""
    return Logits(256, 4)


def make_job(which: str, steps: int, loss: ByHand) -> Job:
    """The quickstart's job, or one of a small GPT-2 on the same text."""
    words = [f"steps={steps}", "validation=null", f"metrics_every={EVERY}", f"metrics={METRICS}"]
    if which == "gpt2":
        words += [
            "model={function: jobs.bench.metrics:small_gpt2}",
            "data.input=input_ids",
            "data.target=y",
            "data.names=[input_ids, y]",
            "batch_size=8",
            "microbatches=4",
        ]
    job = load_job("jobs/quickstart.yaml", words)
    return job.replace(loss=job.loss.replace(function=loss))


def interval(values: Sequence[float]) -> str:
    """The median, with a bootstrap interval of 95 %."""
    chance = random.Random(0)
    boots = sorted(statistics.median(chance.choices(values, k=len(values))) for _ in range(2000))
    return f"{100 * statistics.median(values):.2f} % ({100 * boots[50]:.2f} to {100 * boots[-51]:.2f})"


def main() -> None:
    """Print the times and their ratios."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("job", choices=["quickstart", "gpt2"], nargs="?", default="quickstart")
    parser.add_argument("--rounds", type=int, default=40)
    options = parser.parse_args()
    steps, loss = EVERY * (options.rounds + 2), ByHand()
    job = make_job(options.job, steps, loss)
    graph = make_layer_graph(job)
    times, by_hand = [], {}
    with OneProcessRun(job, ParallelPlan.mesh(layers=len(graph.layers)), "1f1b", graph=graph) as run:
        for step in range(steps):
            loss.on = step % EVERY == 1
            start = time.process_time()
            run.step(step)
            if loss.on:
                by_hand = loss.compute()
            times.append(time.process_time() - start)
            assert bool(run.metrics) == (step % EVERY == 2)
    rounds = [times[first : first + EVERY] for first in range(2 * EVERY, steps, EVERY)]
    unmeasured, hand, measured = (1000 * statistics.median(kind) for kind in zip(*rounds, strict=True))
    print(f"{options.job}: {job.batch_size} samples in {job.microbatches} microbatches, {len(rounds)} rounds")
    print(f"ms of the processor a step: unmeasured {unmeasured:.1f}, by hand {hand:.1f}, measured {measured:.1f}")
    print(f"by hand adds {interval([b / a - 1 for a, b, _ in rounds])}")
    print(f"raypar adds {interval([c / a - 1 for a, _, c in rounds])}")
    print(f"raypar's own part {interval([(c - b) / a for a, b, c in rounds])}")
    print(f"last values: {run.metrics}; by hand, of the step before: {by_hand}")


if __name__ == "__main__":
    main()
