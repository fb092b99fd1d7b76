"""What each rank of `gpu.py` does, in a process of its own (`helpers.processes`): calls with the process's own `state`."""

from __future__ import annotations

import hashlib
import importlib
import os
import statistics
import time
from collections.abc import Mapping
from typing import Any

import torch
from gpu_loop import finish
from gpu_memory import OnDevice
from helpers import standin
from helpers.transport_cases import CASES, LIMIT_S
from models import Workload
from ours import CREDENTIAL, gpt_job

from raypar.comm.nccl import bindings
from raypar.comm.nccl.endpoint import NcclEndpoint
from raypar.comm.routine import run_routine
from raypar.comm.transport import CommunicationLedger, CommunicatorKey
from raypar.errors import RayparError
from raypar.job import Job
from raypar.plan import MicrobatchRouting, ParallelPlan
from raypar.plan.pieces import AdoptPlanCommand
from raypar.schedule import registry
from raypar.worker.layer_graph_of_job import make_layer_graph
from raypar.worker.make_worker_assignments import make_worker_assignments
from raypar.worker.process.gpu_setup import configure_torch
from raypar.worker.required_communicators import required_communicators
from raypar.worker.run_in_one_process import OneProcessRun
from raypar.worker.worker_core import WorkerCore

State = dict[str, Any]
CONNECT_S = 60.0
STEPS = 5
SMALL = Workload(depth=6, width=64, heads=4, context=64, batch_size=16)
"""Of the parity runs."""


def begin(state: State, index: int, environment: Mapping[str, str], device: str) -> dict[str, str]:
    """Set up this process; what it has. `device`: module:name of what makes it."""
    os.environ.update(environment)
    os.environ["NCCL_HOSTID"] = f"raypar-bench-{index}"  # else NCCL refuses several ranks on one GPU
    module, _, name = device.partition(":")
    state["device"] = getattr(importlib.import_module(module), name)()
    configure_torch(state["device"].device, exact=True)
    state["mesh"] = NcclEndpoint.listen("127.0.0.1", state["device"], credential=CREDENTIAL)
    return {"address": state["mesh"].address, "device": state["device"].name, "library": str(bindings.find_nccl_installation())}


def connect(
    state: State, index: int, addresses: list[str], generation: int, keys: list[CommunicatorKey] | None = None
) -> float:
    """A generation of as many ranks as there are addresses, by default with all that the cases use. Seconds."""
    close(state, index)
    start = time.perf_counter()
    state["transport"] = state["mesh"].connect(
        rank=index,
        size=len(addresses),
        addresses=addresses,
        generation=generation,
        deadline_s=CONNECT_S,
        communicators=standin.all_communicators(len(addresses)) if keys is None else keys,
    )
    return time.perf_counter() - start


def close(state: State, index: int) -> None:
    """Leave the generation."""
    if state.get("transport") is not None:
        state.pop("transport").close()


def case(state: State, index: int, name: str) -> str:
    """One case of the conformance suite; what went wrong, if anything."""
    transport = state["transport"]
    transport.ledger = transport.control.ledger = CommunicationLedger()  # the cases count from the beginning
    try:
        run_routine(CASES[name](OnDevice(transport, state["device"].device)), LIMIT_S)
    except (AssertionError, RayparError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def small_job() -> Job:
    """Of the parity runs."""
    return gpt_job(SMALL, 8, "canonical").replace(device="gpu", steps=STEPS)


def train(state: State, index: int, plan: ParallelPlan, schedule: str, addresses: list[str], generation: int) -> dict[str, str]:
    """Some steps as one rank of a plan: digests of the parameters held."""
    spec = small_job()
    graph = make_layer_graph(spec)
    part = make_worker_assignments(
        spec, graph, plan, registry.build_schedule(schedule, MicrobatchRouting(plan, spec.batching))
    )[index]
    core = WorkerCore(spec, graph=graph, step_timeout_s=60.0, device=state["device"].device)
    needed = sorted(required_communicators(AdoptPlanCommand(part, {}, 0), index, spec, core.layout))
    connect(state, index, addresses, generation, needed)
    core.adopt(part, state.pop("transport"))
    try:
        for step in range(STEPS):
            core.step(step)
        return {name: digest(p) for stage in core.stages.values() for name, p in stage.parameters.items()}
    finally:
        core.close()


def reference(state: State, index: int) -> dict[str, str]:
    """The same job in this process alone."""
    spec = small_job()
    plan = ParallelPlan.mesh(layers=len(make_layer_graph(spec).layers))
    with OneProcessRun(spec, plan, "1f1b", device=state["device"].device) as run:
        for step in range(STEPS):
            run.step(step)
        return {name: digest(copies[0]) for name, copies in run.parameters().items()}


def digest(tensor: torch.Tensor) -> str:
    """Of its bits."""
    return hashlib.sha256(tensor.detach().cpu().contiguous().numpy().tobytes()).hexdigest()


def wait_in_vain(state: State, index: int) -> tuple[str, float]:
    """An all-reduce that the last rank takes no part in; how it ends, and when."""
    transport = state["transport"]
    flat = torch.ones(1 << 20, device=state["device"].device)
    group = range(transport.size)
    try:
        transport.all_reduce(flat, group=group).wait(LIMIT_S)
    except RayparError as error:
        return type(error).__name__, time.monotonic()
    return "nothing went wrong", time.monotonic()


def sums_over_shards(state: State, index: int, rounds: int, shape: tuple[int, ...], dtype: torch.dtype) -> dict[str, float]:
    """Sums of a value of this shape over all ranks: median microseconds until the call has been posted, until the host may go
    on (the stream waits), and until the result is there."""
    transport, device = state["transport"], state["device"].device
    value, group = torch.ones(shape, device=device, dtype=dtype), range(transport.size)
    took = []
    for number in range(rounds + 1):
        transport.barrier(group=group).wait(LIMIT_S)
        start = time.perf_counter()
        handle = transport.all_reduce(value.view(-1), group=group)
        posted = time.perf_counter()
        handle.wait_on_stream(LIMIT_S)
        free = time.perf_counter()
        finish(device)
        if number:
            took.append([1e6 * (at - start) for at in (posted, free, time.perf_counter())])
        value.fill_(1)
    return dict(zip(("posted", "free", "there"), map(statistics.median, zip(*took, strict=True)), strict=True))


def abort(state: State) -> tuple[float, float, tuple[str, ...]]:
    """Control thread: when it began, how long until NCCL had ended everything, and what it has not."""
    start = time.monotonic()
    state["transport"].abort("the bench says so")
    return start, time.monotonic() - start, state["transport"].unended_communicators
