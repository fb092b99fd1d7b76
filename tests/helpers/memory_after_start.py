"""`python -m helpers.memory_after_start GATHER`: MiB of data that this process has more once two workers are built whose
replicas divide the parameters of a model of 64 MiB; freed memory is kept as workers keep it."""

from __future__ import annotations

import sys
import threading
from dataclasses import replace
from pathlib import Path

from helpers.limited_memory import LAYERS, job_of

from raypar.plan import ParallelPlan
from raypar.worker.layer_graph_of_job import make_layer_graph
from raypar.worker.process.allocator_and_garbage_collector import keep_freed_memory
from raypar.worker.run_in_one_process import OneProcessRun

MODEL_MIB = 64


def data_mib() -> int:
    """Of this process's address space, what is private and may be written to: what RLIMIT_DATA counts."""
    return int(Path("/proc/self/statm").read_text().split()[5]) * 4096 >> 20


def main(gather: str) -> None:
    spec = job_of(None)
    graph = make_layer_graph(spec)
    plan = ParallelPlan.mesh(dp=2, layers=LAYERS).with_zero(3).with_gather(gather)  # type: ignore[arg-type]
    spec = spec.replace(batch_size=2, microbatches=2)
    found: list[int] = []

    def build() -> None:  # workers build in a thread, whose heaps are not the first one's
        before = data_mib()
        with OneProcessRun(spec, replace(plan), "1f1b", graph=graph):
            found.append(data_mib() - before)

    keep_freed_memory()
    thread = threading.Thread(target=build)
    thread.start()
    thread.join()
    print(*found)


if __name__ == "__main__":
    main(*sys.argv[1:])
