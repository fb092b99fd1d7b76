"""What reading an undivided stream costs: by each worker of a node, and by one process for all of them (`data.processes: 1`).

`python jobs/bench/stream_process.py [--page FILE] [--workers 2] [--steps 100]`

Workers are processes without Ray that read their microbatches of each step, in turn with a computation of a fixed time or
without one, and meet after each step as at its vote. Starting is not measured.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import pickle
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

HERE = "jobs.bench.stream_process"
"""This module, as the process that reads imports it."""
MICROBATCHES, SAMPLES = 8, 8
"""Of a step, and of a microbatch."""
SOURCES = {
    "64 numbers, nothing computed": (64, 0),
    "64 numbers, 130 us of Python": (64, 130),
    "64 numbers, 1 ms of Python": (64, 1000),
    "an image of 150,528 numbers, nothing": (150_528, 0),
}
"""Name -> (numbers of a sample, microseconds of computing)."""


def samples(width: int, compute_us: int) -> Iterator[dict[str, Tensor]]:
    """A generator function that does not divide itself."""
    whole = torch.arange(width, dtype=torch.float32)
    while True:
        until = time.thread_time() + compute_us / 1e6
        while time.thread_time() < until:
            pass
        yield {"x": whole, "y": whole[:1]}


def model() -> nn.Module:
    """Any one."""
    return nn.Sequential(nn.Linear(64, 1))


def job(width: int, compute_us: int) -> Any:
    """A job that reads the source."""
    from raypar.job import DataConfig, Job, LossConfig, ModelConfig

    data = DataConfig(function=f"{HERE}:samples", args={"width": width, "compute_us": compute_us}, streams=1, processes=1)
    sizes = {"batch_size": MICROBATCHES * SAMPLES, "microbatches": MICROBATCHES, "steps": 10**6}
    parts = {"model": ModelConfig(function=f"{HERE}:model"), "loss": LossConfig(function=nn.functional.mse_loss)}
    return Job(name="bench", data=data, **parts, **sizes)


def read(
    rank: int, workers: int, source: tuple[int, int], key: bytes, compute_s: float, steps: int, meet: Any, told: Any
) -> None:
    """One worker; puts (seconds, processor seconds, process that reads or 0)."""
    from raypar.worker.data.stream_feed_process import StreamFeedJob, StreamFeedProcess
    from raypar.worker.data.stream_loader import OpenStreams, StreamLoader
    from raypar.worker.process.torch_state_guard import TorchStateGuard

    spec, guard = job(*source), TorchStateGuard(threads=1)
    process = StreamFeedProcess(StreamFeedJob(pickle.dumps(spec), key, {}), "samples") if key else None
    streams, own = OpenStreams(process), range(rank, MICROBATCHES, workers)
    loader = StreamLoader(spec.data, spec.batching, seed=1, fields=("x", "y"), own=own, streams=streams, guard=guard)
    reader = None
    for step in range(steps + 2):
        if step == 2:
            reader = psutil.Process(process._peer) if process is not None else None
            before = sum(reader.cpu_times()[:2]) if reader is not None else 0.0
            begun_s, begun_cpu = time.perf_counter(), time.process_time()
        for microbatch in own:
            loader.get(step, microbatch)
            until = time.thread_time() + compute_s
            while time.thread_time() < until:
                pass
        loader.report(step)
        meet.wait()
        loader.read_ahead(step + 1, own)
    spent = time.process_time() - begun_cpu
    shared = sum(reader.cpu_times()[:2]) - before if reader is not None else 0.0
    told.put((time.perf_counter() - begun_s, spent, shared))
    meet.wait()
    streams.close()


def measure(workers: int, source: tuple[int, int], compute_s: float, steps: int, *, by_process: bool) -> tuple[float, float]:
    """(microseconds, microseconds of all processors) for a sample of the stream."""
    spawn = multiprocessing.get_context("spawn")
    meet, told = spawn.Barrier(workers, timeout=300), spawn.Queue()
    key = b"\0raypar-bench-" + os.urandom(8).hex().encode() if by_process else b""
    ones = [
        spawn.Process(target=read, args=(rank, workers, source, key, compute_s, steps, meet, told)) for rank in range(workers)
    ]
    for one in ones:
        one.start()
    found = [told.get(timeout=300) for _ in ones]
    for one in ones:
        one.join(60)
    count = steps * MICROBATCHES * SAMPLES / 1e6
    return max(seconds for seconds, _, _ in found) / count, (sum(cpu for _, cpu, _ in found) + found[0][2]) / count


def main() -> None:
    """Print the table; with `--page` write it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--page", type=Path)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=100)
    options = parser.parse_args()
    header = ("source of samples", "computing, ms a microbatch", "each worker: us a sample", "processor, us")
    header = (*header, "one process: us a sample", "processor, us")
    lines = [f"| {' | '.join(header)} |", "|---" * len(header) + "|"]
    for name, source in SOURCES.items():
        for compute_ms in (0.0, 4.0) if source[0] == 64 else (0.0,):
            steps = max(10, options.steps // (10 if source[1] >= 1000 or source[0] > 64 else 1))
            each, one = (
                measure(options.workers, source, compute_ms / 1e3, steps, by_process=by_process) for by_process in (False, True)
            )
            row = (name, f"{compute_ms:g}", *(f"{number:.0f}" for number in (*each, *one)))
            lines.append(f"| {' | '.join(row)} |")
            print(lines[-1], flush=True)
    if options.page is not None:
        options.page.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
