"""How much memory does a starting worker need beside its own state, when the model is made whole and when it is deferred?

    python jobs/bench/start_memory.py [--page jobs/bench/results/start_memory_NAME_YYYYMM.md]

A process calls the model function and makes the initial state of one stage of four, as a worker does. The growth of its peak
(VmHWM), after a small model of the same kind has loaded all code, is compared with its own state plus the largest layer.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from jobs.bench.harness import page, table  # noqa: E402

if TYPE_CHECKING:
    from torch import nn

    from raypar.job import Job

RUNS = 3
WIDTH, DEPTH, VOCAB = 1024, 8, 8192
WORKER = """
import sys
from pathlib import Path
import torch
from raypar.plan import ParallelPlan
from raypar.worker.process.allocator_and_garbage_collector import keep_freed_memory, return_unused_memory
from raypar.worker.layer_graph_of_job import make_layer_graph
from raypar.worker.stage.initial_state import StageStateSource
from jobs.bench import start_memory as bench
from raypar.job import LossConfig
from raypar.job import ModelConfig

keep_freed_memory()
torch.set_num_threads(1)

def kib(key):
    return next(int(line.split()[1]) for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key))

def build(width, depth, vocab, mode):
    graph = make_layer_graph(bench.job(width, depth, vocab, mode))
    first, last = bench.STAGES[1]
    made = StageStateSource(graph, first, last, bench.job(width, depth, vocab, mode)).initial()
    graph.initial_values.release()
    return graph, made

build(32, 8, 64, sys.argv[1])
return_unused_memory()
Path("/proc/self/clear_refs").write_text("5")
before = kib("VmRSS")
graph, made = build(bench.WIDTH, bench.DEPTH, bench.VOCAB, sys.argv[1])
own = sum(t.nbytes for t in made.values.values()) / 2**20
print((kib("VmHWM") - before) / 1024, (kib("VmRSS") - before) / 1024, own)
"""
STAGES = ((0, 3), (3, 5), (5, 7), (7, 10))
"""Layers of four workers: the embedding and 2 blocks, twice 2 blocks, 2 blocks and the head."""


def job(width: int, depth: int, vocab: int, mode: str) -> Job:
    """The example GPT, initialised as GPT-2: normal weights, scaled residual projections."""
    from raypar.job import DataConfig, Job, LossConfig, ModelConfig, OptimizerConfig

    return Job(
        name="start",
        seed=1,
        steps=1,
        batch_size=4,
        microbatches=4,
        model=ModelConfig(function=model, args={"width": width, "depth": depth, "vocab": vocab}),
        loss=LossConfig(function="examples.gpt:loss"),
        data=DataConfig(function="examples.gpt:text"),
        optimizer=OptimizerConfig(function="torch.optim:AdamW"),
        deferred_init=mode,
    )


def model(width: int, depth: int, vocab: int) -> nn.Sequential:
    """The model function: the example GPT, with its residual projections drawn a second time, by name."""
    from examples import gpt

    made = gpt.layers(vocab=vocab, width=width, depth=depth, heads=8, context=128)
    for name, parameter in made.named_parameters():
        if name.endswith(("project.weight", "down.weight")):
            parameter.data.normal_(0.0, 0.02 / math.sqrt(2 * depth))
    return made


def measured(mode: str) -> tuple[float, float, float]:
    """(growth of the peak, growth that stays, own state) [MiB], medians."""
    runs = []
    for _ in range(RUNS):
        done = subprocess.run(
            [sys.executable, "-c", WORKER, mode], cwd=ROOT, capture_output=True, text=True, check=True, timeout=300
        )
        runs.append([float(part) for part in done.stdout.split()])
    peak, stays, own = (statistics.median(column) for column in zip(*runs, strict=True))
    return peak, stays, own


def main() -> int:
    """Returns the exit code: 1 if the deferred model needs more than its own state and the largest layer."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--page", type=Path)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    block = 12 * WIDTH * WIDTH * 4 / 2**20
    largest = max(block, VOCAB * WIDTH * 4 / 2**20)
    whole = (DEPTH * block) + 2 * VOCAB * WIDTH * 4 / 2**20
    found = {mode: measured(mode) for mode in ("always", "never")}
    names = {"always": "deferred", "never": "whole"}
    cells = [
        [
            names[mode],
            f"{own:.1f}",
            f"{peak:.1f}",
            f"{stays:.1f}",
            f"{own + largest:.1f}",
            "yes" if peak <= own + largest else "no",
        ]
        for mode, (peak, stays, own) in found.items()
    ]
    header = ["model function", "own state", "growth of the peak", "growth that stays", "own state + largest layer", "within"]
    body = (
        f"The example GPT, width {WIDTH}, {DEPTH} blocks of {block:.0f} MiB, vocabulary {VOCAB}: {whole:.0f} MiB of float32. "
        f"The second of four workers holds 2 blocks. Peak: VmHWM less the resident memory before, in MiB, median of {RUNS} "
        "processes.\n\n"
        + table(header, cells)
        + "\n\nThe record of a deferred model has 5 KB for every random operation, so a Llama of 7 G parameters in 32 blocks "
        "(some 300 of them) costs 2 MB of records; a worker that holds 4 blocks would have 3.2 GiB of its own, and 0.5 GiB "
        "(an embedding of 32,000 x 4,096, float32) as its largest tensor beside them. That was not measured."
    )
    print(json.dumps(found) if given.json else body)
    if given.page is not None:
        question = "How much memory does a starting worker need beside its own state?"
        given.page.write_text(page(question, f"python jobs/bench/{Path(__file__).name}", body), encoding="utf-8")
    return 0 if found["always"][0] <= found["always"][2] + largest else 1


if __name__ == "__main__":
    sys.exit(main())
