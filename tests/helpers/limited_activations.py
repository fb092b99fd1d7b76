"""`python -m helpers.limited_activations SCHEDULE FOLDER ROOM_MIB`: trains with activations in a file of a folder (`-`: in
memory), under a limit on the data of this process (RLIMIT_DATA), ROOM_MIB above what it has when the model is built (0: none).

Under gpipe twelve microbatches are in flight, each with activations of about 13 MiB; under 1f1b one of about 390 MiB. Prints
the hash of the weights.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from dataclasses import dataclass

import torch
from helpers.limited_memory import limit_data
from torch import Tensor, nn

from raypar.job import DataConfig, Job, LossConfig, ModelConfig, OptimizerConfig, PlanConfig
from raypar.plan import ParallelPlan
from raypar.worker.norm_and_weights_hash import weights_hash
from raypar.worker.process.allocator_and_garbage_collector import large_blocks_returned
from raypar.worker.run_in_one_process import OneProcessRun

WIDTH, STEPS = 256, 1


@dataclass(frozen=True)
class Case:
    """Sizes of a model and its step."""

    layers: int
    rows: int
    microbatches: int
    in_flight: int
    """Microbatches between forward and backward."""
    room_mib: int
    """With which it trains if activations are offloaded."""

    @property
    def kept_mib(self) -> int:
        """What the layers save of the microbatches in flight, at least."""
        return self.layers * self.in_flight * WIDTH * self.rows * 4 >> 20


CASES = {
    "gpipe": Case(layers=6, rows=2048, microbatches=12, in_flight=12, room_mib=100),
    "1f1b": Case(layers=12, rows=32768, microbatches=2, in_flight=1, room_mib=250),
}
"""By schedule. With 1f1b there is room for two layers, one that is to be written, and what a layer computes with: four."""


def model(layers: int) -> nn.Sequential:
    return nn.Sequential(
        OrderedDict((f"layer{i}", nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.Tanh())) for i in range(layers))
    )


def samples(rows: int) -> list[tuple[Tensor, Tensor]]:
    dice = torch.Generator().manual_seed(0)
    return [(torch.randn(rows, WIDTH, generator=dice), torch.zeros(1)) for _ in range(2)]


def loss(output: Tensor, target: Tensor) -> Tensor:
    return output.square().mean(dim=(1, 2)).sum() + target.sum()


class Samples:
    """Two samples, read again and again."""

    def __init__(self, rows: int, count: int) -> None:
        self.made, self.count = samples(rows), count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.made[index % 2]


def job_of(case: Case, folder: str | None) -> Job:
    """The job; `folder`: for its activations."""
    return Job(
        steps=STEPS,
        batch_size=case.microbatches,
        microbatches=case.microbatches,
        model=ModelConfig(function=model, args={"layers": case.layers}),
        loss=LossConfig(function=loss),
        data=DataConfig(function=Samples, args={"rows": case.rows, "count": case.microbatches}),
        optimizer=OptimizerConfig(function="torch.optim:SGD", args={"lr": 0.1}),
        plan=PlanConfig(activations_in=folder),
    )


def main(schedule: str, folder: str, room_mib: str) -> None:
    case = CASES[schedule]
    spec = job_of(case, None if folder == "-" else folder)
    plan = ParallelPlan.mesh(layers=case.layers).with_offload(() if folder == "-" else range(case.layers))
    with (
        large_blocks_returned(),  # else chance decides how much of what was freed can be used again
        OneProcessRun(spec, plan, schedule) as run,
    ):
        if int(room_mib):
            limit_data(int(room_mib))
        (core,) = run.cores
        for step in range(STEPS):
            run.step(step)
        print(weights_hash({name: p.detach() for stage in core.stages.values() for name, p in stage.parameters.items()}))


if __name__ == "__main__":
    main(*sys.argv[1:])
