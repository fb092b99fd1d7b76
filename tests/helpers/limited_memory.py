"""`python -m helpers.limited_memory FOLDER ROOM_MIB`: trains with optimizer state in files of a folder (`-`: in memory), under
a limit on the data of this process (RLIMIT_DATA), ROOM_MIB above what it has when the model is built (0: none).

The parameters take 64 MiB, and Adam's state 128 MiB. Saves a checkpoint, loads it, and prints the hash of the weights.
"""

from __future__ import annotations

import re
import resource
import sys
import tempfile
from collections import OrderedDict
from pathlib import Path

import torch
from helpers import checkpoint_folders
from torch import Tensor, nn

from raypar.job import DataConfig, Job, LossConfig, ModelConfig, OptimizerConfig, PlanConfig
from raypar.plan import ParallelPlan
from raypar.worker.norm_and_weights_hash import weights_hash
from raypar.worker.process.allocator_and_garbage_collector import large_blocks_returned
from raypar.worker.run_in_one_process import OneProcessRun

LAYERS, WIDTH, STEPS = 16, 1024, 3
STATE_MIB = 2 * LAYERS * WIDTH * WIDTH * 4 >> 20
"""What Adam keeps."""


def model() -> nn.Sequential:
    return nn.Sequential(OrderedDict((f"layer{i}", nn.Linear(WIDTH, WIDTH, bias=False)) for i in range(LAYERS)))


def samples() -> list[tuple[Tensor, Tensor]]:
    dice = torch.Generator().manual_seed(0)
    return [(torch.randn(WIDTH, generator=dice), torch.randn(WIDTH, generator=dice)) for _ in range(4)]


def job_of(folder: str | None) -> Job:
    """The job; `folder`: for the state of its optimizer."""
    return Job(
        steps=STEPS,
        batch_size=2,
        microbatches=1,
        model=ModelConfig(function=model),
        loss=LossConfig(function=nn.functional.mse_loss),
        data=DataConfig(function=samples),
        optimizer=OptimizerConfig(function="torch.optim:Adam", args={"lr": 0.001}),
        plan=PlanConfig(optimizer_in=folder),
    )


def limit_data(room_mib: int) -> None:
    """Let this process have so much more data than it has now."""
    has_kib = int(re.search(r"VmData:\s+(\d+) kB", Path("/proc/self/status").read_text())[1])  # type: ignore[index]
    limit = (has_kib << 10) + (room_mib << 20)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


def main(folder: str, room_mib: str) -> None:
    spec = job_of(None if folder == "-" else folder)
    with (
        large_blocks_returned(),  # else chance decides how much of what was freed can be used again
        tempfile.TemporaryDirectory() as root,
        OneProcessRun(spec, ParallelPlan.mesh(layers=LAYERS), "1f1b") as run,
    ):
        if int(room_mib):
            limit_data(int(room_mib))
        (core,) = run.cores
        for step in range(STEPS - 1):
            run.step(step)
        begun = checkpoint_folders.create_checkpoint(Path(root), STEPS - 1)
        core.start_save(begun)
        core.load(checkpoint_folders.commit_checkpoint(begun, [core.save_result()], steps_done=STEPS - 1, contract={}))
        run.step(STEPS - 1)
        print(weights_hash({name: p.detach() for stage in core.stages.values() for name, p in stage.parameters.items()}))


if __name__ == "__main__":
    main(*sys.argv[1:])
