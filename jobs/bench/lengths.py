"""What steps of variable length take beside steps of one length: a small GPT-2 under a ladder of three lengths.

A step has microbatches of several lengths. Its time is compared with the mean of what steps take all of whose microbatches have
one of these lengths, each in a process of its own; all processes do the step in turn. Times are of the processor, as others may
use the machine: each round is one ratio, whose median has a bootstrap interval. `python jobs/bench/lengths.py --rounds 40`.
"""

from __future__ import annotations

import argparse
import multiprocessing
import random
import statistics
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import nn

from raypar.job import DataConfig, Job, LossConfig, ModelConfig, OptimizerConfig, PadConfig
from raypar.model.capture.trace_cache import TraceCache
from raypar.plan import ParallelPlan
from raypar.worker.process.allocator_and_garbage_collector import freeze_existing_objects, keep_freed_memory
from raypar.worker.run_in_one_process import OneProcessRun

LADDER = (64, 128, 256)
MICROBATCHES, ROWS = 8, 2
WARM = 6
"""Steps that are not counted."""


class Sentences:
    """Samples of which each microbatch has one length of the ladder; the words end up to five places before."""

    def __init__(self, lengths: Sequence[int], size: int, full: bool) -> None:
        self.lengths, self.size, self.full = lengths, size, full

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, Any]:
        length = self.lengths[index // ROWS % len(self.lengths)] - (0 if self.full else index % 6)
        ids = [(7 * index + 3 * place) % 511 + 1 for place in range(length)]
        return {"input_ids": ids, "attention_mask": [1] * length, "labels": ids}


def gpt2() -> nn.Module:
    """A GPT-2 of four blocks and width 128, without dropout."""
    from transformers import GPT2Config, GPT2LMHeadModel

    quiet = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 0}
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=512, n_positions=256, n_embd=128, n_layer=4, n_head=4, use_cache=False, **quiet)
    )


def lengths_of(steps: int) -> list[int]:
    """The lengths of the microbatches, by step and microbatch."""
    chance = random.Random(1)
    return [chance.choice(LADDER) for _ in range(steps * MICROBATCHES)]


def job_of(lengths: Sequence[int], steps: int, full: bool) -> Job:
    """The job of one process."""
    return Job(
        name="lengths",
        steps=steps,
        batch_size=MICROBATCHES * ROWS,
        microbatches=MICROBATCHES,
        model=ModelConfig(function=gpt2),
        loss=LossConfig(function="model", count="shifted_labels"),
        data=DataConfig(
            function=Sentences,
            args={"lengths": list(lengths), "size": steps * MICROBATCHES * ROWS, "full": full},
            shuffle=False,
            pad=PadConfig(to=tuple(sorted(set(lengths)))),
        ),
        optimizer=OptimizerConfig(function="torch.optim:AdamW", args={"lr": 1e-3}),
    )


def serve(connection: Connection, lengths: Sequence[int], steps: int, stages: int, full: bool) -> None:
    """A process that does steps when it is told to: (processor seconds, seconds, traces made) of each."""
    torch.set_num_threads(1)
    keep_freed_memory()
    made = [0]
    trace = TraceCache._trace

    def counted(self: TraceCache, *args: Any, **kwargs: Any) -> Any:
        made[0] += 1
        return trace(self, *args, **kwargs)

    TraceCache._trace = counted  # type: ignore[method-assign]
    job = job_of(lengths, steps, full)
    from raypar.worker.layer_graph_of_job import make_layer_graph

    graph = make_layer_graph(job)
    with OneProcessRun(job, ParallelPlan.mesh(pp=stages, layers=len(graph.layers)), "1f1b", graph=graph) as run:
        freeze_existing_objects(collect=True)
        connection.send(made[0])
        while (step := connection.recv()) is not None:
            before, start, wall = made[0], time.process_time(), time.perf_counter()
            run.step(step)
            connection.send((time.process_time() - start, time.perf_counter() - wall, made[0] - before))


def interval(ratios: Sequence[float]) -> str:
    """The median with its bootstrap interval of 95 %."""
    chance = random.Random(0)
    boots = sorted(statistics.median(chance.choices(ratios, k=len(ratios))) for _ in range(2000))
    return f"{statistics.median(ratios):.3f} ({boots[50]:.3f} to {boots[-51]:.3f})"


def measure(rounds: int, stages: int, full: bool) -> None:
    """Print the times and their ratio."""
    steps = rounds + WARM
    mixed = lengths_of(steps)
    context = multiprocessing.get_context("spawn")
    ends = {}
    for name, lengths in ((0, mixed), *((one, [one]) for one in LADDER)):
        ours, theirs = context.Pipe()
        process = context.Process(target=serve, args=(theirs, lengths, steps, stages, full), daemon=True)
        process.start()
        ends[name] = (ours, process)
    ahead = {name: ours.recv() for name, (ours, _) in ends.items()}
    times: dict[int, list[tuple[float, float, int]]] = {name: [] for name in ends}
    for step in range(steps):
        for name in random.Random(step).sample(list(ends), len(ends)):
            ends[name][0].send(step)
            times[name].append(ends[name][0].recv())
    for ours, process in ends.values():
        ours.send(None)
        process.join(20)
    for kind, what in ((0, "processor"), (1, "wall")):
        ratios = []
        for step in range(WARM, steps):
            here = mixed[step * MICROBATCHES : (step + 1) * MICROBATCHES]
            ratios.append(times[0][step][kind] / statistics.fmean(times[length][step][kind] for length in here))
        of_each = ", ".join(
            f"{name or 'mixed'} {1000 * statistics.median(t[kind] for t in times[name][WARM:]):.1f}" for name in ends
        )
        print(
            f"{stages} stages, rows {'full' if full else 'ragged'}, {what} ms a step: {of_each}; ratio {interval(ratios)}",
            flush=True,
        )
    print(f"  traces before the first step: {ahead[0]}; in steps: {sum(t[2] for t in times[0])}", flush=True)


def main() -> None:
    """Measure in one stage and in two."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--stages", type=int, nargs="*", default=[1, 2])
    given = parser.parse_args()
    for stages in given.stages:
        for full in (False, True):
            measure(given.rounds, stages, full)


if __name__ == "__main__":
    main()
