"""One worker process of a bench: builds what its kind says, then runs steps on request.

`python worker.py KIND --address SOCKET [--rank R] --options JSON`; the harness sets PYTHONPATH, torchrun the rank.
"""

from __future__ import annotations

import argparse
import json
import os
import time
import traceback
from multiprocessing.connection import Client
from pathlib import Path
from typing import Any, ClassVar, Protocol

import torch
import torch.distributed as dist
from models import CLIP_NORM, OPTIMIZER, SEED, Batches, Workload, mean_loss
from torch import nn

from examples import gpt


class Body(Protocol):
    """What a kind of worker does. `hello`: what the bench learns at the start; with an `address`, all are told all of them."""

    hello: dict[str, Any]

    def steps(self, first: int, count: int) -> float | None:
        """Training steps; the last loss where this worker knows it."""

    def info(self) -> dict[str, Any]:
        """What else there is to report."""

    def close(self) -> None:
        """Release everything."""


def peak_rss_bytes() -> int:
    """High-water mark of this process's memory since its exec (VmHWM; `ru_maxrss` would count the parent's)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("no VmHWM in /proc/self/status")


def rss_bytes() -> int:
    """Resident memory of this process now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def serve(address: str, body: Body, begun_bytes: int = 0) -> None:
    """Answer commands until told to stop; blocked in a read between them. `begun_bytes`: resident memory before the model."""
    connection = Client(address, "AF_UNIX")
    connection.send(("ok", body.hello))
    number, last = 0, None
    while True:
        try:
            command, *arguments = connection.recv()
        except EOFError:
            break
        if command == "stop":
            break
        try:
            answer: dict[str, Any] = {}
            if command == "connect":
                body.connect(*arguments)  # type: ignore[attr-defined]
            elif command == "run":
                start_ns = time.monotonic_ns()
                found = body.steps(number, arguments[0])
                answer = {"start_ns": start_ns, "end_ns": time.monotonic_ns()}
                last = found if found is not None else last
                number += arguments[0]
            else:
                memory = {"peak_rss_bytes": [peak_rss_bytes()], "rss_bytes": rss_bytes(), "begun_bytes": begun_bytes}
                answer = {**memory, "loss": last, "steps": number} | body.info()
            connection.send(("ok", answer))
        except Exception:
            connection.send(("error", traceback.format_exc()))
            raise
    body.close()
    connection.close()


class Stepwise:
    """A body with one method per step."""

    hello: ClassVar[dict[str, Any]] = {}

    def steps(self, first: int, count: int) -> float | None:
        last = None
        for number in range(first, first + count):
            last = self.step(number)
        return last

    def step(self, number: int) -> float | None:
        raise NotImplementedError

    def info(self) -> dict[str, Any]:
        return {}


class Plain(Stepwise):
    """The loop everybody writes: gradient accumulation over microbatches, clip, step. With `share`, wrapped in DDP."""

    def __init__(self, work: dict[str, int], microbatches: int, rank: int = 0, world: int = 1, wrap: Any = None) -> None:
        self.work = Workload(**work)
        torch.manual_seed(SEED)
        model = gpt.layers(**self.work.model_args)
        self.model = model if wrap is None else wrap(model)
        self.ddp = wrap is not None
        self.optimizer: Any = torch.optim.AdamW(self.model.parameters(), **OPTIMIZER)
        self.microbatches = microbatches // world
        self.batches = Batches(self.work, (rank, world))

    def step(self, number: int) -> float:
        x, y = self.batches.get(number)
        total = torch.zeros(())
        pairs = list(zip(x.chunk(self.microbatches), y.chunk(self.microbatches), strict=True))
        for index, (inputs, target) in enumerate(pairs):
            self.before_backward(index == len(pairs) - 1)
            value = mean_loss(self.model(inputs), target) / self.microbatches
            value.backward()
            total += value.detach()
        nn.utils.clip_grad_norm_(self.model.parameters(), CLIP_NORM)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return total.item()

    def before_backward(self, is_last: bool) -> None:
        if self.ddp:
            self.model.require_backward_grad_sync = is_last  # what `no_sync` sets

    def close(self) -> None:
        if self.ddp and dist.is_initialized():
            dist.destroy_process_group()


class ZeroRedundancy(Plain):
    """DDP with `ZeroRedundancyOptimizer`, its ZeRO level 1."""

    def __init__(self, work: dict[str, int], microbatches: int) -> None:
        from torch.distributed.optim import ZeroRedundancyOptimizer

        wrap = nn.parallel.DistributedDataParallel
        super().__init__(work, microbatches, dist.get_rank(), dist.get_world_size(), wrap)
        self.optimizer = ZeroRedundancyOptimizer(self.model.parameters(), torch.optim.AdamW, **OPTIMIZER)


class FullyShard(Plain):
    """`fully_shard` (FSDP2) of every block and the whole. `reshard`: after each forward, as it does by default. `reductions`:
    after `every` microbatch, as it does by default, or in the `last` backward of a step alone, with parameters that stay whole
    until then."""

    def __init__(self, work: dict[str, int], microbatches: int, reshard: bool, reductions: str = "every") -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (dist.get_world_size(),))

        def wrap(model: Any) -> Any:
            for layer in model:
                fully_shard(layer, mesh=mesh, reshard_after_forward=reshard)
            return fully_shard(model, mesh=mesh, reshard_after_forward=reshard)

        super().__init__(work, microbatches, dist.get_rank(), dist.get_world_size(), wrap)
        self.ddp, self.once = False, reductions == "last"
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=OPTIMIZER["lr"])

    def before_backward(self, is_last: bool) -> None:
        if self.once:
            self.model.set_requires_gradient_sync(is_last)
            self.model.set_reshard_after_backward(is_last)

    def close(self) -> None:
        dist.destroy_process_group()


class DeepSpeedZero(Stepwise):
    """DeepSpeed's ZeRO at one of its levels, over gloo, with its own clipping and accumulation."""

    def __init__(self, work: dict[str, int], microbatches: int, level: int) -> None:
        import deepspeed

        size, world = Workload(**work), dist.get_world_size()
        torch.manual_seed(SEED)
        model = gpt.layers(**size.model_args)
        self.microbatches = microbatches // world
        config = {
            "train_micro_batch_size_per_gpu": size.batch_size // microbatches,
            "gradient_accumulation_steps": self.microbatches,
            "gradient_clipping": CLIP_NORM,
            "zero_optimization": {"stage": level},
            "zero_allow_untested_optimizer": True,
        }
        optimizer = torch.optim.AdamW(model.parameters(), **OPTIMIZER)
        self.engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
        self.batches = Batches(size, (dist.get_rank(), world))

    def step(self, number: int) -> float:
        x, y = self.batches.get(number)
        total = 0.0
        for inputs, target in zip(x.chunk(self.microbatches), y.chunk(self.microbatches), strict=True):
            value = mean_loss(self.engine(inputs), target)
            self.engine.backward(value)
            self.engine.step()
            total += value.item() / self.microbatches
        return total

    def close(self) -> None:
        dist.destroy_process_group()


class Pipelining(Stepwise):
    """torch.distributed.pipelining: one of its schedules over gloo. Global-norm clipping costs it one scalar all-reduce."""

    def __init__(self, work: dict[str, int], microbatches: int, schedule: str) -> None:
        from torch.distributed.pipelining import PipelineStage
        from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class

        dist.init_process_group("gloo")
        rank, world = dist.get_rank(), dist.get_world_size()
        kind = get_schedule_class(schedule)
        single = issubclass(kind, PipelineScheduleSingle)
        count = world if single else 2 * world
        own = (
            [rank]
            if single
            else [rank, count - 1 - rank]
            if schedule in ("ZBVZeroBubble", "DualPipeV")
            else [rank, rank + world]
        )
        size = Workload(**work)
        torch.manual_seed(SEED)
        whole = gpt.layers(**size.model_args)
        bounds = size.bounds(count)
        parts = [whole[bounds[i] : bounds[i + 1]] for i in own]
        stages = [PipelineStage(part, i, count, torch.device("cpu")) for part, i in zip(parts, own, strict=True)]
        self.first, self.last = 0 in own, count - 1 in own
        self.schedule: Any = kind(stages[0] if single else stages, n_microbatches=microbatches, loss_fn=mean_loss)
        self.parameters = [p for part in parts for p in part.parameters()]
        self.optimizer = torch.optim.AdamW(self.parameters, **OPTIMIZER)
        self.batches = Batches(size)

    def step(self, number: int) -> float | None:
        x, y = self.batches.get(number) if self.first or self.last else (None, None)
        losses: list[torch.Tensor] = []
        target = {"target": y, "losses": losses} if self.last else {}
        self.schedule.step(*([x] if self.first else []), **target, return_outputs=False)
        norm = torch.nn.utils.get_total_norm([p.grad for p in self.parameters]) ** 2
        dist.all_reduce(norm)
        nn.utils.clip_grads_with_norm_(self.parameters, CLIP_NORM, norm.sqrt())
        self.optimizer.step()
        self.optimizer.zero_grad()
        return torch.stack(losses).mean().item() if self.last else None

    def close(self) -> None:
        dist.destroy_process_group()


class DTensors(Stepwise):
    """`torch.distributed.tensor.parallel.parallelize_module` over gloo, with the styles of PyTorch's own tutorial for it, and a
    cross-entropy on parts of the vocabulary (`loss_parallel`). What has no style is a plain tensor on every process, for which
    clipping and optimizer run apart: they take no mixture."""

    def __init__(self, work: dict[str, int], microbatches: int) -> None:
        import split_gpt
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import DTensor, Replicate, Shard
        from torch.distributed.tensor.parallel import (
            ColwiseParallel,
            PrepareModuleInput,
            RowwiseParallel,
            parallelize_module,
        )

        dist.init_process_group("gloo")
        self.work = Workload(**work)
        torch.manual_seed(SEED)
        model = split_gpt.layers(**self.work.model_args)
        styles: dict[str, Any] = {
            "embed.token": RowwiseParallel(input_layouts=Replicate()),
            "head.logits": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
        }
        for index in range(self.work.depth):
            block = f"block{index}"
            # One value for q, k and v: its gradients are added before they are reduced.
            whole = (Replicate(),)
            styles[f"{block}.attention"] = PrepareModuleInput(input_layouts=whole, desired_input_layouts=whole)
            styles |= {f"{block}.{name}": ColwiseParallel() for name in ("attention.q", "attention.k", "attention.v", "mlp.up")}
            styles |= {f"{block}.{name}": RowwiseParallel() for name in ("attention.project", "mlp.down")}
        self.model = parallelize_module(model, init_device_mesh("cpu", (dist.get_world_size(),)), styles)
        parameters = list(self.model.parameters())
        self.groups = [
            [p for p in parameters if isinstance(p, DTensor)],
            [p for p in parameters if not isinstance(p, DTensor)],
        ]
        self.optimizers = [torch.optim.AdamW(group, **OPTIMIZER) for group in self.groups]
        self.microbatches = microbatches
        self.batches = Batches(self.work)

    def step(self, number: int) -> float:
        from torch.distributed.tensor.parallel import loss_parallel

        x, y = self.batches.get(number)
        total = 0.0
        for inputs, target in zip(x.chunk(self.microbatches), y.chunk(self.microbatches), strict=True):
            with loss_parallel():
                value = mean_loss(self.model(inputs), target) / self.microbatches
                value.backward()
            total += value.detach().to_local().item()  # type: ignore[attr-defined]
        cut, whole = (torch.nn.utils.get_total_norm([p.grad for p in group]) for group in self.groups)
        norm = torch.linalg.vector_norm(torch.stack([cut.full_tensor(), whole])).item()  # type: ignore[attr-defined]
        for group, optimizer in zip(self.groups, self.optimizers, strict=True):
            torch._foreach_mul_([p.grad for p in group], min(1.0, CLIP_NORM / (norm + 1e-6)))
            optimizer.step()
            optimizer.zero_grad()
        return total

    def close(self) -> None:
        dist.destroy_process_group()


def ray_train(address: str, work: dict[str, int], microbatches: int, workers: int, storage: str) -> None:
    """Ray Train's TorchTrainer: its workers serve the bench from inside the training function."""
    import ray
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    def train() -> None:
        import ray.train
        import ray.train.torch

        torch.set_num_threads(1)
        context = ray.train.get_context()
        wrap = lambda model: ray.train.torch.prepare_model(model, parallel_strategy="ddp")  # noqa: E731
        body = Plain(work, microbatches, context.get_world_rank(), context.get_world_size(), wrap)
        serve(address, body)

    environment = {"PYTHONPATH": os.environ["PYTHONPATH"], "OMP_NUM_THREADS": "1"}
    ray.init(
        num_cpus=workers + 1,
        include_dashboard=False,
        logging_level="error",
        log_to_driver=True,
        _temp_dir=storage,
        runtime_env={"env_vars": environment},
    )
    TorchTrainer(
        train, scaling_config=ScalingConfig(num_workers=workers), run_config=RunConfig(storage_path=storage, name="bench")
    ).fit()
    ray.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser()
    kinds = ["plain", "ddp", "zero-redundancy", "fsdp2", "deepspeed", "pipelining", "dtensor", "ray-train"]
    kinds += ["plain-convolutions", "dtensor-convolutions", "convolutions", "residual"]
    kinds += ["raypar", "raypar-ray", "sleep", "block", "vgg"]
    parser.add_argument("kind", choices=kinds)
    parser.add_argument("--address", required=True)
    parser.add_argument("--rank", type=int, default=int(os.environ.get("RANK", "0")))
    parser.add_argument("--options", type=json.loads, default={})
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.kind == "plain":
        serve(given.address, Plain(**given.options))
    elif given.kind == "ddp":
        dist.init_process_group("gloo")
        wrap, begun = nn.parallel.DistributedDataParallel, rss_bytes()
        serve(given.address, Plain(**given.options, rank=dist.get_rank(), world=dist.get_world_size(), wrap=wrap), begun)
    elif given.kind in ("zero-redundancy", "fsdp2", "deepspeed"):
        dist.init_process_group("gloo")
        begun = rss_bytes()
        divided = {"zero-redundancy": ZeroRedundancy, "fsdp2": FullyShard, "deepspeed": DeepSpeedZero}[given.kind]
        serve(given.address, divided(**given.options), begun)
    elif given.kind == "pipelining":
        serve(given.address, Pipelining(**given.options))
    elif given.kind == "dtensor":
        serve(given.address, DTensors(**given.options))
    elif given.kind in ("plain-convolutions", "dtensor-convolutions"):
        import convolution_layers

        bodies = {"plain-convolutions": convolution_layers.Plain, "dtensor-convolutions": convolution_layers.DTensors}
        serve(given.address, bodies[given.kind]())
    elif given.kind == "ray-train":
        ray_train(given.address, **given.options)
    else:
        import ours

        if given.kind == "raypar":
            begun = rss_bytes()
            serve(given.address, ours.Raypar(*ours.job_and_plan(**given.options), given.rank), begun)
        elif given.kind == "block":
            serve(given.address, ours.Raypar(*ours.block_and_plan(**given.options), given.rank))
        elif given.kind == "convolutions":
            serve(given.address, ours.Raypar(*ours.convolutions_and_plan(**given.options), given.rank))
        elif given.kind == "residual":
            serve(given.address, ours.Raypar(*ours.residual_and_plan(**given.options), given.rank))
        elif given.kind == "vgg":
            host = given.options.pop("host", None)
            serve(given.address, ours.Raypar(*ours.vgg_and_plan(**given.options), given.rank, host=host))
        elif given.kind == "sleep":
            serve(given.address, ours.Raypar(*ours.sleep_and_plan(**given.options), given.rank, trace=True))
        else:
            serve(given.address, ours.RayparOnRay(*ours.job_and_plan(**given.options)))


if __name__ == "__main__":
    main()
