"""What a step takes on one worker whose layers are cut into virtual shards, beside the same step with whole layers.

GPTs of several widths, all of whose layers are cut, and the VGG of `jobs/vgg_hybrid.yaml` with dense layers of several widths,
which alone are cut; all in one process with one thread. Each round does one step of each, in turn. Times are of the processor,
as others may use the machine: each round is one ratio, whose median has a bootstrap interval of 95 %.
`python jobs/bench/virtual_shards.py --rounds 30 [--widths 512] [--dense 1024]`.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Sequence

import torch
from harness import ROOT
from torch import Tensor

from raypar.comm.local_transport import LocalMesh
from raypar.job import DataConfig, Job, LossConfig, ModelConfig, OptimizerConfig, PlanConfig
from raypar.plan import MicrobatchRouting
from raypar.schedule import registry
from raypar.worker.layer_graph_of_job import make_layer_graph
from raypar.worker.make_worker_assignments import make_worker_assignments
from raypar.worker.process.allocator_and_garbage_collector import freeze_existing_objects, keep_freed_memory
from raypar.worker.worker_core import WorkerCore

WIDTHS, DENSE, COUNTS, CONTEXT, WARM = (128, 256, 512, 1024), (512, 1024), (1, 2, 4), 128, 2
LIMITS = {2: 1.10, 4: 1.28}
"""Virtual shards -> the ratio that is wanted of GPTs, from a width of 512 on."""


class Tokens:
    """Sample i: random ids and the ids that follow."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        ids = torch.randint(0, 256, (CONTEXT + 1,), generator=torch.Generator().manual_seed(index))
        return ids[:-1], ids[1:]


def gpt(width: int) -> tuple[ModelConfig, LossConfig, DataConfig, dict[str, str]]:
    """A GPT of this width, and how it is cut."""
    args = {"width": width, "depth": 2, "heads": 8, "context": CONTEXT}
    model = ModelConfig(function="examples.gpt:layers", args=args)
    return model, LossConfig(function="examples.gpt:loss"), DataConfig(function=Tokens), {}


def vgg(width: int) -> tuple[ModelConfig, LossConfig, DataConfig, dict[str, str]]:
    """A VGG with dense layers of this width, and how these are cut."""
    model = ModelConfig(function="examples.vgg_digits:Vgg", args={"width": 64, "dense": width})
    data = DataConfig(function="examples.digits:digits")
    return model, LossConfig(function="examples.digits:loss"), data, {"*fc1": "column", "*fc2": "row"}


MODELS = {"GPT": gpt, "VGG": vgg}


def worker(name: str, width: int, count: int, steps: int) -> WorkerCore:
    """A worker that trains a model of this width in so many virtual shards."""
    model, loss, data, styles = MODELS[name](width)
    job = Job(
        name="virtual",
        steps=steps,
        batch_size=8 if name == "GPT" else 64,
        microbatches=4,
        virtual_shards=count,
        model=model,
        loss=loss,
        data=data,
        optimizer=OptimizerConfig(function="torch.optim:AdamW", args={"lr": 1e-3, "fused": True}),
        plan=PlanConfig(styles=styles),
    )
    graph = make_layer_graph(job)
    plan = job.to_plan(len(graph.layers))
    made = registry.build_schedule("1f1b", MicrobatchRouting(plan, job.batching))
    core = WorkerCore(job, graph=graph)
    (part,) = make_worker_assignments(job, graph, plan, made)
    core.adopt(part, LocalMesh(1).transports[0])
    return core


def interval(ratios: Sequence[float]) -> tuple[float, float, float]:
    """The median with its bootstrap interval of 95 %."""
    chance = random.Random(0)
    boots = sorted(statistics.median(chance.choices(ratios, k=len(ratios))) for _ in range(2000))
    return statistics.median(ratios), boots[50], boots[-51]


def main() -> None:
    """Print a row for each width and number of virtual shards."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--widths", type=int, nargs="*", default=WIDTHS, help="of GPTs")
    parser.add_argument("--dense", type=int, nargs="*", default=DENSE, help="of the VGG's dense layers")
    given = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()  # as workers do: fresh threads would take a page fault for each 4 KiB
    assert (ROOT / "examples").is_dir()
    print("| model | width | virtual shards | processor ms a step | of whole layers (95 %) | wanted |\n" + "|---" * 6 + "|")
    for name, width in [*(("GPT", width) for width in given.widths), *(("VGG", width) for width in given.dense)]:
        steps = given.rounds + WARM
        cores = {count: worker(name, width, count, steps) for count in COUNTS}
        freeze_existing_objects(collect=True)  # as workers do
        times: dict[int, list[float]] = {count: [] for count in COUNTS}
        for step in range(steps):
            for count in random.Random(step).sample(COUNTS, len(COUNTS)):
                start = time.process_time()
                cores[count].step(step)
                times[count].append(1000 * (time.process_time() - start))
        for count in COUNTS:
            ratio, low, high = interval([a / b for a, b in zip(times[count][WARM:], times[1][WARM:], strict=True)])
            limit = f"{LIMITS[count]:.2f}" if name == "GPT" and width >= 512 and count in LIMITS else ""
            median = statistics.median(times[count][WARM:])
            row = f"| {name} | {width} | {count} | {median:.1f} | {ratio:.3f} ({low:.3f} to {high:.3f}) | {limit} |"
            print(row, flush=True)
        for core in cores.values():
            core.close()


if __name__ == "__main__":
    main()
