"""Tokens a second from token files, the start of an order of 10^9 samples, and what a run says of a slow data set.

`python jobs/bench/data_rates.py [--page FILE] [--rounds 7] [--size 1000000000] [--only rates order slow]`

Rates are of one core: tokens over the processor time of the thread that reads, as others may use the machine; the file is in
the page cache. PyTorch's `DataLoader` reads the same batches in turn, in its own process (`num_workers=0`).
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import numpy
import torch
from harness import ROOT, page, spread, table

from raypar.data.token_files import TokenFile
from raypar.job import DataConfig
from raypar.plan.microbatches import Microbatches
from raypar.worker.data.microbatch_loader import MicrobatchLoader
from raypar.worker.data.sample_order import SampleOrder
from raypar.worker.process.torch_state_guard import TorchStateGuard

TOKENS = 20_000_000
CONTEXTS = {128: 5e6, 1024: 15e6}
"""Context -> wanted tokens a second and core."""
MOST_S, MOST_BYTES = 0.050, 1 << 20
"""Wanted of the order of 10^9 samples at a start."""
MICROBATCH, MICROBATCHES = 4, 8
READ_AT_ONCE = 4_000_000
"""Tokens that each side reads in its turn."""
SLEEP_MS = (0, 5, 20)
"""How long a sample of the slow data set takes."""
STEPS, SAMPLES = 40, 4


def rates(rounds: int) -> str:
    """A table of tokens a second by context, of a worker's loader and of a `DataLoader` that reads microbatches as large."""
    rows = []
    guard = TorchStateGuard(threads=1)
    guard.establish("the bench")
    with tempfile.TemporaryDirectory(prefix="raypar-rates-") as place:
        path = Path(place) / "tokens.bin"
        numpy.random.default_rng(0).integers(0, 50_000, TOKENS, dtype=numpy.uint16).tofile(path)
        for context, wanted in CONTEXTS.items():
            dataset = TokenFile(path, context)
            sides = {"raypar": microbatches_of_worker(dataset, path, guard), "DataLoader": batches_of_torch(dataset)}
            found: dict[str, list[float]] = {name: [] for name in sides}
            for number in range(rounds + 1):
                for name, batches in sides.items():
                    rate = tokens_a_second(batches)
                    if number:  # the first round fills caches
                        found[name].append(rate / 1e6)
            for name, values in found.items():
                low, high = spread(values)
                bar = f">= {wanted / 1e6:.0f}" if name == "raypar" else ""
                rows.append([f"{context:,}", name, f"{statistics.median(values):.2f}", f"{low:.2f} to {high:.2f}", bar])
    head = ["context", "read by", "M tokens a second and core", "quartiles", "wanted"]
    return (
        "## Token files\n\n"
        f"{TOKENS / 1e6:.0f} M tokens of uint16 in a file that is in the page cache, shuffled windows; microbatches of "
        f"{MICROBATCH} samples, two fields. Processor time of the reading thread, {rounds} rounds of "
        f"{READ_AT_ONCE / 1e6:.0f} M tokens each, in turns. A `DataLoader` checks and seeds nothing.\n\n"
    ) + table(head, rows)


def microbatches_of_worker(dataset: TokenFile, path: Path, guard: TorchStateGuard) -> Iterator[torch.Tensor]:
    """The inputs of all microbatches, step after step, as a worker reads them: with the checks after users' code."""
    spec = DataConfig(function=TokenFile, args={"path": str(path), "context": dataset.context})
    batching = Microbatches(MICROBATCHES, batch_size=MICROBATCHES * MICROBATCH)
    loader = MicrobatchLoader(dataset, spec, SampleOrder(0, len(dataset)), batching, seed=0, fields=("x", "y"), guard=guard)
    step = 0
    while True:
        for microbatch in range(MICROBATCHES):
            yield loader.get(step, microbatch)["x"]
        step += 1


def batches_of_torch(dataset: TokenFile) -> Iterator[torch.Tensor]:
    """The inputs of all batches of a `DataLoader`, epoch after epoch."""
    while True:
        for x, _ in torch.utils.data.DataLoader(dataset, MICROBATCH, shuffle=True):
            yield x


def tokens_a_second(batches: Iterator[torch.Tensor]) -> float:
    """Tokens over processor time of this thread, of the next batches."""
    count, start = 0, time.thread_time()
    while count < READ_AT_ONCE:
        count += next(batches).numel()
    return count / (time.thread_time() - start)


def order(size: int, rounds: int) -> str:
    """A table of what the order of a large data set costs before the first step, and each step."""
    rows = []
    for name, shuffle in (("`shuffle: indexed`", "indexed"), ("`shuffle: false`", False)):
        starts, steps = [], []
        for number in range(rounds):
            start = time.process_time()
            first = SampleOrder(number, size, shuffle)  # type: ignore[arg-type]
            first.ids(0, 512)
            starts.append(1000 * (time.process_time() - start))
            start = time.process_time()
            first.ids(512, 1024)
            steps.append(1000 * (time.process_time() - start))
        tracemalloc.start()
        SampleOrder(0, size, shuffle).ids(0, 512)  # type: ignore[arg-type]
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        wanted = f"<= {1000 * MOST_S:.0f} ms, {MOST_BYTES >> 20} MiB"
        cells = [f"{statistics.median(starts):.2f}", f"{most / 2**20:.3f}", f"{statistics.median(steps):.2f}"]
        rows.append([name, f"{size:,}", *cells, wanted])
    script = (
        "import resource, sys, time, torch\n"
        "from raypar.worker.data.sample_order import SampleOrder\n"
        "SampleOrder(0, 1000).ids(0, 512)\n"
        "before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()\n"
        f"SampleOrder(0, {size // 10}).ids(0, 512)\n"
        "print(1000 * (time.process_time() - start), (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, check=True)
    list_ms, list_mib = map(float, done.stdout.split())
    rows.append(["`shuffle: true` (`torch.randperm`)", f"{size // 10:,}", f"{list_ms:,.0f}", f"{list_mib:,.0f}", "", ""])
    head = ["order", "samples", "ms at the start", "MiB", "ms a step of 512 samples", "wanted"]
    return (
        "## The order of many samples\n\n"
        "Processor time from a data set's length to the ids of the first 512 samples, and the most memory that this takes "
        "beside the process's own; `torch.randperm` in a process of its own, of a tenth of the samples.\n\n"
    ) + table(head, rows)


JOB = f"""
model: slow_data:model
loss: {{function: "torch.nn:MSELoss"}}
data: {{function: slow_data:Slow, args: {{sleep_ms: 0}}}}
steps: {STEPS}
batch_size: {2 * SAMPLES}
microbatches: 2
optimizer: {{function: "torch.optim:SGD", args: {{lr: 0.01}}}}
plan: {{stages: 2}}
checkpoint: {{every: 0}}
"""
CODE = '''
import time
import torch

class Slow:
    def __init__(self, sleep_ms):
        self.sleep_ms = sleep_ms
    def __len__(self):
        return 64
    def __getitem__(self, index):
        if self.sleep_ms:
            time.sleep(self.sleep_ms / 1000)
        return torch.full((64,), index / 64), torch.ones(1)

class Rest(torch.nn.Module):
    """A layer that takes 10 ms."""
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(64, 64)
    def forward(self, x):
        end = time.monotonic() + 0.010
        while time.monotonic() < end:
            pass
        return self.linear(x)

def model():
    return torch.nn.Sequential(Rest(), torch.nn.Linear(64, 1))
'''


def slow() -> str:
    """A table of what runs on Ray say of data sets whose samples take so long, beside what the sleeps add up to."""
    rows, told = [], []
    with tempfile.TemporaryDirectory(prefix="raypar-slow-") as place:
        folder = Path(place)
        (folder / "slow_data.py").write_text(CODE)
        (folder / "job.yaml").write_text(JOB)
        for sleep_ms in SLEEP_MS:
            name = f"slow{sleep_ms}"
            words = [f"data.args.sleep_ms={sleep_ms}", f"run_dir={folder}", f"name={name}"]
            command = [sys.executable, "-m", "raypar", "train", "job.yaml"]
            command += [part for word in words for part in ("--set", word)]
            subprocess.run(command, cwd=folder, stdout=subprocess.DEVNULL, check=True, timeout=300)
            lines = [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
            steps = [line for line in lines if "loss" in line][10:]
            seconds = statistics.fmean(line["seconds"] for line in steps)
            said = statistics.fmean(line.get("data_wait", 0.0) for line in steps)
            slept = 2 * SAMPLES * sleep_ms / 1000
            rows.append([f"{sleep_ms}", f"{1000 * seconds:.0f}", f"{slept / seconds:.0%}", f"{said:.0%}"])
            events = map(json.loads, (folder / name / "events.jsonl").read_text().splitlines())
            told += [f"> {line}" for event in events if event["kind"] == "warning" for line in event["text"].splitlines()]
    head = ["ms a sample", "ms a step", "of which the sleeps of its samples", "said to be waiting for samples"]
    return (
        "## A slow data set\n\n"
        f"Two stages, {2 * SAMPLES} samples a step; the workers sleep in `__getitem__`. What `raypar train` wrote down of "
        f"steps 11 to {STEPS}:\n\n" + table(head, rows) + "\n\nAnd warned of, in all three runs together:\n\n" + "\n".join(told)
    )


PARTS = ("rates", "order", "slow")


def main() -> None:
    """Measure, and print or write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--page", type=Path, help="write the page there")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--size", type=int, default=10**9)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    given = parser.parse_args()
    torch.set_num_threads(1)
    made = {"rates": lambda: rates(given.rounds), "order": lambda: order(given.size, given.rounds), "slow": slow}
    body = "\n\n".join(made[part]() for part in given.only)
    print(body)
    print(f"peak resident memory of this process: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f} MiB")
    if given.page is not None:
        given.page.write_text(page("How fast samples are read", "python jobs/bench/data_rates.py", body))


if __name__ == "__main__":
    main()
