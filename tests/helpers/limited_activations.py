"""`python -m helpers.limited_activations FOLDER ROOM_MIB`: trains with activations in a file of a folder (`-`: in memory),
under a limit on the data of this process (RLIMIT_DATA), ROOM_MIB above what it has when the model is built (0: none).

Twelve microbatches are in flight, each with activations of about 13 MiB. Prints the hash of the weights.
"""

from __future__ import annotations

import sys
from collections import OrderedDict

import torch
from helpers.limited_memory import limit_data
from torch import Tensor, nn

from raypar.job import DataConfig, Job, LossConfig, ModelConfig, OptimizerConfig, PlanConfig
from raypar.plan import ParallelPlan
from raypar.worker.norm_and_weights_hash import weights_hash
from raypar.worker.process.allocator_and_garbage_collector import large_blocks_returned
from raypar.worker.run_in_one_process import OneProcessRun

LAYERS, WIDTH, ROWS, MICROBATCHES, STEPS = 6, 256, 2048, 12, 1
KEPT_MIB = LAYERS * MICROBATCHES * WIDTH * ROWS * 4 >> 20
"""What the layers save of all microbatches, at least."""
ROOM_MIB = 100
"""With which it trains if activations are offloaded: those of two microbatches, what is to be written, and a layer."""


def model() -> nn.Sequential:
    return nn.Sequential(
        OrderedDict((f"layer{i}", nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.Tanh())) for i in range(LAYERS))
    )


def samples() -> list[tuple[Tensor, Tensor]]:
    dice = torch.Generator().manual_seed(0)
    return [(torch.randn(ROWS, WIDTH, generator=dice), torch.zeros(1)) for _ in range(2)]


def loss(output: Tensor, target: Tensor) -> Tensor:
    return output.square().mean(dim=(1, 2)).sum() + target.sum()


class Samples:
    """Two samples, read again and again."""

    def __init__(self) -> None:
        self.made = samples()

    def __len__(self) -> int:
        return MICROBATCHES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.made[index % 2]


def job_of(folder: str | None) -> Job:
    """The job; `folder`: for its activations."""
    return Job(
        steps=STEPS,
        batch_size=MICROBATCHES,
        microbatches=MICROBATCHES,
        model=ModelConfig(function=model),
        loss=LossConfig(function=loss),
        data=DataConfig(function=Samples),
        optimizer=OptimizerConfig(function="torch.optim:SGD", args={"lr": 0.1}),
        plan=PlanConfig(activations_in=folder),
    )


def main(folder: str, room_mib: str) -> None:
    spec = job_of(None if folder == "-" else folder)
    plan = ParallelPlan.mesh(layers=LAYERS).with_offload(() if folder == "-" else range(LAYERS))
    with (
        large_blocks_returned(),  # else chance decides how much of what was freed can be used again
        OneProcessRun(spec, plan, "gpipe") as run,
    ):
        if int(room_mib):
            limit_data(int(room_mib))
        (core,) = run.cores
        for step in range(STEPS):
            run.step(step)
        print(weights_hash({name: p.detach() for stage in core.stages.values() for name, p in stage.parameters.items()}))


if __name__ == "__main__":
    main(*sys.argv[1:])
