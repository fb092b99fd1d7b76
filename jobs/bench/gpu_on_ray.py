"""A run on Ray with a GPU beside the same job in one process on that GPU: hashes of the weights.

`python jobs/bench/gpu_on_ray.py JOB [--set KEY=VALUE ...]` prints the hash after the job's steps in this process.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness import ROOT, environment_of_children

JOB = ("jobs/quickstart.yaml", "--set", "device=gpu", "--set", "plan.stages=1", "--set", "plan.replicas=1", "--set", "steps=20")
"""The run on Ray."""


def on_ray(words: Sequence[str] = JOB) -> dict[str, Any]:
    """A run of the job in a Ray cluster of its own, and the same job in one process on this GPU: hashes of the weights."""
    import ray  # noqa: F401  so that its absence is said before anything else

    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="raypar-bench.") as folder:
        command = ["-m", "raypar", "train", *words]
        printed = _run(*command, "--set", f"run_dir={folder}", "--json")
        seconds, result = time.monotonic() - start, json.loads(printed.splitlines()[-1])
    return {
        "command": " ".join(["python", *command]),
        "seconds": seconds,
        "run": result["weights_sha256"],
        "one_process": _run(__file__, *words).split()[-1],
    }


def _run(*words: str) -> str:
    """What a Python process prints; raises `RuntimeError` with the end of its errors."""
    done = subprocess.run([sys.executable, *words], cwd=ROOT, env=environment_of_children(), capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"python {' '.join(words)}: exit {done.returncode}: {done.stderr[-2000:]}")
    return done.stdout


def one_process(words: Sequence[str]) -> str:
    """The hash of the weights after a job's steps in this process, on its device."""
    from raypar.worker.process.gpu_setup import GPU_WORKER_ENVIRONMENT

    os.environ.update(GPU_WORKER_ENVIRONMENT)
    import torch

    from raypar.job.read_job import load_job
    from raypar.plan import ParallelPlan
    from raypar.worker.layer_graph_of_job import make_layer_graph
    from raypar.worker.norm_and_weights_hash import weights_hash
    from raypar.worker.process.gpu_setup import configure_torch
    from raypar.worker.run_in_one_process import OneProcessRun

    job = load_job(Path(ROOT / words[0]), [word for word in words[1:] if word != "--set"]).replace(validation=None)
    device = torch.device("cuda", 0) if job.device == "gpu" else torch.device("cpu")
    configure_torch(device, exact=True)
    plan = ParallelPlan.mesh(layers=len(make_layer_graph(job).layers))
    assert job.steps is not None
    with OneProcessRun(job, plan, "1f1b", device=device) as run:
        for step in range(job.steps):
            run.step(step)
        return weights_hash({name: copies[0] for name, copies in run.parameters().items()})


if __name__ == "__main__":
    print(one_process(sys.argv[1:]))
