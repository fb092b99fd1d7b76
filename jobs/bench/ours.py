"""raypar as a contender: its worker core over TCP in a process of its own, or its actors on a Ray of its own."""

from __future__ import annotations

import asyncio
import os
import pickle
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import convolution_layers
from models import CLIP_NORM, OPTIMIZER, SEED, Workload
from vgg import STYLES

from raypar.comm.tcp.endpoint import TcpEndpoint
from raypar.comm.tcp.handshake import RunCredential
from raypar.job import DataConfig, Job, LossConfig, ModelConfig, OptimizerConfig, PlanConfig
from raypar.model import split_backward
from raypar.plan import MicrobatchRouting, ParallelPlan, StagePlan
from raypar.plan.microbatches import MAX_STEPS
from raypar.plan.pieces import AdoptPlanCommand
from raypar.schedule import registry
from raypar.schedule.gathering import gathers_in_pass
from raypar.worker.layer_graph_of_job import make_layer_graph
from raypar.worker.make_worker_assignments import make_worker_assignments
from raypar.worker.process.allocator_and_garbage_collector import (
    freeze_existing_objects,
    keep_freed_memory,
    return_unused_memory,
)
from raypar.worker.worker_core import WorkerCore
from raypar.worker.worker_reports import StepReport

CONNECT_TIMEOUT_S = 60.0
UNTIL_THE_END = ExitStack()
"""What lasts as long as a bench's process: a context manager that nobody keeps ends at once."""
CREDENTIAL = RunCredential("bench", b"no secret: a bench has this machine to itself")


def gpt_job(
    size: Workload, microbatches: int, reduction: str, model: str = "examples.gpt:layers", sequence: bool = False
) -> Job:
    """The benches' GPT as a job, with the default number of blocks."""
    return Job(
        name="bench",
        seed=SEED,
        steps=MAX_STEPS,
        batch_size=size.batch_size,
        microbatches=microbatches,
        model=ModelConfig(function=model, args=size.model_args),
        loss=LossConfig(function="examples.gpt:loss"),
        data=DataConfig(function="examples.gpt:text", args={"context": size.context}),
        optimizer=OptimizerConfig(function="torch.optim:AdamW", args=OPTIMIZER),
        clip_norm=CLIP_NORM,
        reduction=reduction,
        plan=PlanConfig(sequence_parallel=sequence),
    )


def sleeping_job(
    forward_ms: Sequence[float], input_ms: Sequence[float], weight_ms: Sequence[float], microbatches: int, blocks: int
) -> Job:
    """Layers that sleep; one sample a microbatch."""
    times = {"forward_ms": list(forward_ms), "input_ms": list(input_ms), "weight_ms": list(weight_ms)}
    return Job(
        name="sleep",
        seed=SEED,
        steps=MAX_STEPS,
        batch_size=microbatches,
        microbatches=microbatches,
        model=ModelConfig(function="sleeping:layers", args=times),
        virtual_replicas=blocks,
        loss=LossConfig(function="sleeping:loss"),
        data=DataConfig(function="sleeping:samples"),
        optimizer=OptimizerConfig(function="torch.optim:SGD", args={"lr": 0.1}),
    )


def block_job(name: str, batch: int) -> Job:
    """One block with branches (`branch_blocks.py`), a step of one microbatch."""
    return Job(
        name="branches",
        seed=SEED,
        steps=MAX_STEPS,
        batch_size=batch,
        microbatches=1,
        model=ModelConfig(function="branch_blocks:OneBlock", args={"name": name}),
        loss=LossConfig(function="branch_blocks:loss"),
        data=DataConfig(function="branch_blocks:Samples", args={"name": name}),
        optimizer=OptimizerConfig(function="torch.optim:SGD", args={"lr": 0.01}),
    )


def block_and_plan(name: str, batch: int, stages: Sequence[Sequence[int]]) -> tuple[Job, ParallelPlan, str]:
    """`block_job` under a plan of (first layer, last, worker) of each stage."""
    plan = ParallelPlan(tuple(StagePlan(first, last, ((worker,),)) for first, last, worker in stages))
    return block_job(name, batch), plan, "list"


def convolutions_and_plan(shards: int) -> tuple[Job, ParallelPlan, str]:
    """A small network of convolutions (`convolution_layers.py`) whose images are cut by width."""
    spec = Job(
        name="convolutions",
        seed=convolution_layers.SEED,
        steps=MAX_STEPS,
        batch_size=convolution_layers.BATCH,
        microbatches=convolution_layers.MICROBATCHES,
        model=ModelConfig(function="convolution_layers:Layers"),
        loss=LossConfig(function="convolution_layers:loss"),
        data=DataConfig(function="convolution_layers:Samples"),
        optimizer=OptimizerConfig(function="torch.optim:SGD", args={"lr": convolution_layers.LR}),
        plan=PlanConfig(styles=convolution_layers.STYLES),
    )
    return spec, ParallelPlan.mesh(tp=shards, layers=len(make_layer_graph(spec).layers)), "1f1b"


RESIDUAL = "a stem, 8 residual blocks of width 48 and a dense layer, images of 48 x 48 in the blocks, SGD"


def residual_job(microbatches: int) -> Job:
    """A residual network (`convolution_layers.py`); two images a microbatch."""
    return Job(
        name="residual",
        seed=convolution_layers.SEED,
        steps=MAX_STEPS,
        batch_size=2 * microbatches,
        microbatches=microbatches,
        model=ModelConfig(function="convolution_layers:ResidualNetwork"),
        loss=LossConfig(function="convolution_layers:loss"),
        data=DataConfig(function="convolution_layers:Samples"),
        optimizer=OptimizerConfig(function="torch.optim:SGD", args={"lr": convolution_layers.LR}),
    )


def convolutions_not_split() -> AbstractContextManager[object]:
    """Stages that are made inside put off the weight gradients of linear layers alone."""
    return mock.patch.object(split_backward, "convolution_class", lambda module: None)


def residual_and_plan(microbatches: int, schedule: str, cuts: Sequence[int], splits: bool) -> tuple[Job, ParallelPlan, str]:
    """`residual_job` on two workers; convolutions are not split from now on where `splits` is False."""
    if not splits:
        UNTIL_THE_END.enter_context(convolutions_not_split())
    spec = residual_job(microbatches)
    plan = plan_of(schedule, [1, 1], len(make_layer_graph(spec).layers))
    return spec, plan.with_split_points(cuts), schedule


def vgg_job(batch: int, microbatches: int) -> Job:
    """VGG-11 (`vgg.py`), whose layers on shards are cut in pairs."""
    return Job(
        name="hybrid",
        seed=SEED,
        steps=MAX_STEPS,
        batch_size=batch,
        microbatches=microbatches,
        model=ModelConfig(function="vgg:Vgg11"),
        loss=LossConfig(function="vgg:loss"),
        data=DataConfig(function="vgg:Samples"),
        optimizer=OptimizerConfig(function="torch.optim:SGD", args={"lr": 0.001}),
        plan=PlanConfig(styles=STYLES),
    )


def vgg_and_plan(
    batch: int, microbatches: int, schedule: str, stages: Sequence[tuple[int, int, Sequence[Sequence[int]]]]
) -> tuple[Job, ParallelPlan, str]:
    """`vgg_job` under a plan of (first layer, last, grid of workers) of each stage."""
    made = (StagePlan(first, last, tuple(map(tuple, grid))) for first, last, grid in stages)
    return vgg_job(batch, microbatches), ParallelPlan(tuple(made)), schedule


def plan_of(
    schedule: str, replicas: Sequence[int], layers: int, bounds: Any = None, chunks: int = 0, shards: int = 1
) -> ParallelPlan:
    """A plan for a schedule: `replicas` per position; `bounds(stages)` gives the layer cuts (default: spread evenly)."""
    each = registry.resolve_chunks_per_worker(schedule, chunks or None)
    cuts = bounds(each * len(replicas))[1:-1] if bounds is not None else None
    placement = registry.placement_of_schedule(schedule)
    return ParallelPlan.of(replicas, [shards] * len(replicas), layers=layers, chunks=each, placement=placement, cuts=cuts)


def job_and_plan(
    microbatches: int,
    schedule: str = "1f1b",
    replicas: int = 1,
    stages: int = 1,
    chunks: int = 0,
    reduction: str = "canonical",
    work: dict[str, int] | None = None,
    shards: int = 1,
    cuts: Sequence[int] | None = None,
    zero: int = 0,
    zero_holders: int = 1,
    gather: str = "step",
    **model: Any,
) -> tuple[Job, ParallelPlan, str]:
    """The benches' GPT under a uniform plan. `cuts`: first layers of stages 1, 2, ...; `zero`: its ZeRO stage, `zero_holders`:
    how many replicas hold each part, `gather`: how long parameters are whole; `model`: as `gpt_job` takes it."""
    size = Workload(**(work or {}))
    spec = gpt_job(size, microbatches, reduction, **model)
    plan = plan_of(schedule, [replicas] * stages, size.depth + 2, size.bounds, chunks, shards)
    if zero:  # older checkouts, which are compared with, have no such thing
        plan = plan.with_zero(zero, *[zero_holders] * (zero_holders > 1))
    if gather != "step":
        plan = plan.with_gather(gather)
    return spec, plan.with_split_points(cuts) if cuts is not None else plan, schedule


def sleep_and_plan(
    schedule: str,
    replicas: list[int],
    chunks: int,
    microbatches: int,
    blocks: int,
    forward_ms: list[float],
    input_ms: list[float],
    weight_ms: list[float],
) -> tuple[Job, ParallelPlan, str]:
    """Layers that sleep, one a stage."""
    spec = sleeping_job(forward_ms, input_ms, weight_ms, microbatches, blocks)
    return spec, plan_of(schedule, replicas, len(forward_ms), chunks=chunks), schedule


class Raypar:
    """One rank: `WorkerCore` over the TCP transport."""

    def __init__(
        self, spec: Job, plan: ParallelPlan, schedule: str, rank: int, trace: bool = False, host: str | None = None
    ) -> None:
        """`host`: the worker's address on a host of its own; None: the workers share this machine."""
        self.plan, self.rank, self.trace = plan, rank, trace
        keep_freed_memory(large_blocks=not gathers_in_pass(plan))  # as worker_actor does
        self.core = WorkerCore(spec)
        routing, connections = MicrobatchRouting(plan, spec.batching), self.core.graph.crossing(plan)
        order = registry.build_schedule(schedule, routing, connections=connections)
        self.assignment = make_worker_assignments(spec, self.core.graph, plan, order)[rank]
        self.mesh = TcpEndpoint.listen(host or "127.0.0.1", credential=CREDENTIAL, unix_sockets=host is None)
        self.hello = {"address": self.mesh.address, "rank": rank}
        self.reports: list[StepReport] = []

    def connect(self, addresses: list[str]) -> None:
        transport = self.mesh.connect(
            rank=self.rank,
            size=len(addresses),
            addresses=addresses,
            generation=0,
            deadline_s=CONNECT_TIMEOUT_S,
        )
        self.core.adopt(self.assignment, transport)
        self.core.release_initial_values()  # as workers do, which keep their part of the model alone
        freeze_existing_objects(collect=True)  # as worker_actor does
        return_unused_memory()

    def steps(self, first: int, count: int) -> float:
        self.reports += [self.core.step(number, trace=self.trace) for number in range(first, first + count)]
        return self.reports[-1].loss

    def info(self) -> dict[str, Any]:
        """Figures of the steps so far, for benches that look inside."""
        instructions = len(self.assignment.program)
        return {
            "instructions": instructions,
            "seconds": [r.seconds for r in self.reports],
            "busy_seconds": [r.busy_seconds for r in self.reports],
            "rank": self.rank,
            "memory": self.core.memory(),
            "spans": [[(s.label, s.start_ns / 1e6, s.end_ns / 1e6) for s in r.spans] for r in self.reports],
        }

    def close(self) -> None:
        self.core.close()
        self.mesh.close()


class RayparOnRay:
    """The whole plan on a Ray of its own, asked for steps as the driver does: one call per worker and step, queued ahead."""

    def __init__(self, spec: Job, plan: ParallelPlan, schedule: str) -> None:
        from raypar.actors.first_placement import reserve_all_workers
        from raypar.actors.ray_connection import connect_ray
        from raypar.actors.worker_pool import WorkerPool

        self.connection = connect_ray(None, plan.world, Path.cwd())
        host = self.connection.__enter__().host
        graph = make_layer_graph(spec)
        parts = make_worker_assignments(
            spec, graph, plan, registry.build_schedule(schedule, MicrobatchRouting(plan, spec.batching))
        )
        self.loop = asyncio.new_event_loop()
        self.pool = WorkerPool(RunCredential.fresh(f"bench-{os.getpid()}"))
        self.loop.run_until_complete(reserve_all_workers(self.pool, plan, CONNECT_TIMEOUT_S, print))
        for number in range(plan.world):
            self.pool.start_worker(number, pickle.dumps(spec), host, 600.0)
        addresses = [hello.address for hello in self._ask("hello", [()] * plan.world)]
        ranks = {number: number for number in range(plan.world)}
        made = [pickle.dumps(AdoptPlanCommand(part, ranks, 0, run_begins=True)) for part in parts]
        self._ask("adopt", [(1, part, plan.coordinate(r), addresses, CONNECT_TIMEOUT_S) for r, part in enumerate(made)])
        self.hello: dict[str, Any] = {}
        self.peak_rss_bytes: list[int] = []

    def _ask(self, method: str, arguments: list[tuple[Any, ...]]) -> list[Any]:
        import ray

        workers = zip(self.pool.workers.values(), arguments, strict=True)
        answers = ray.get([getattr(worker, method).remote(*given) for worker, given in workers], timeout=300)
        for answer in answers:
            if hasattr(answer, "error"):
                raise answer.error
        return list(answers)

    def steps(self, first: int, count: int) -> float:
        """`count` steps; the next step's calls are queued while one runs. The last loss."""
        import ray

        from raypar.actors.messages import StepCall

        waiting: list[list[Any]] = []
        loss = float("nan")
        for number in range(first, first + count):
            call = StepCall(1, number, trace=False, into_mirror=False).to_bytes()
            waiting.append([worker.step.remote(call) for worker in self.pool.workers.values()])
            if len(waiting) > 1:
                loss = self._take(ray.get(waiting.pop(0), timeout=300))
        while waiting:
            loss = self._take(ray.get(waiting.pop(0), timeout=300))
        return loss

    def _take(self, answers: list[Any]) -> float:
        for answer in answers:
            if hasattr(answer, "error"):
                raise answer.error
        self.peak_rss_bytes = [report["peak_rss_bytes"] for report in answers]
        return float(answers[0]["loss"])

    def info(self) -> dict[str, Any]:
        """The workers' memory, not this driver's."""
        return {"peak_rss_bytes": self.peak_rss_bytes}

    def close(self) -> None:
        self.loop.run_until_complete(self.pool.close())
        self.connection.__exit__(None, None, None)
