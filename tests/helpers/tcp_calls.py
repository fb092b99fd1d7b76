"""What the worker processes of the parity tests run: a core each, connected by real sockets, or by NCCL over the stand-in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from helpers import standin
from helpers.parity import Layout
from helpers.shard_grid import Cell
from helpers.transport_cases import CREDENTIAL
from helpers.zero_layouts import DividedLayout, small_pieces

from raypar.comm.nccl.endpoint import NcclEndpoint
from raypar.comm.routine import run_routine
from raypar.comm.tcp.endpoint import TcpEndpoint
from raypar.plan import bundle_parts
from raypar.plan.pieces import AdoptPlanCommand
from raypar.worker.make_worker_assignments import make_worker_assignments
from raypar.worker.required_communicators import required_communicators
from raypar.worker.step.optimizer_state import read_optimizer_state
from raypar.worker.worker_core import WorkerCore


def listen(state: dict[str, Any], index: int, kind: str) -> str:
    """The worker's address, for transports of one kind (`tcp`, `nccl`)."""
    state["nccl"] = kind == "nccl"
    if state["nccl"]:
        standin.load()
        device = standin.HostDevice(f"worker {index}", only=frozenset({torch.float32}))
        state["mesh"] = NcclEndpoint.listen("127.0.0.1", device, credential=CREDENTIAL, unix_sockets=False)
    else:
        state["mesh"] = TcpEndpoint.listen("127.0.0.1", credential=CREDENTIAL, unix_sockets=False)
    return state["mesh"].address


def train_divided(state: dict[str, Any], index: int, layout: DividedLayout, addresses: list[str]) -> dict[str, Any]:
    """As `train`, with parameters that are divided in small pieces."""
    with small_pieces():
        return train(state, index, layout, addresses)


def train_in_parts(state: dict[str, Any], index: int, cell: Cell, addresses: list[str], nodes: Sequence[int]) -> dict[str, Any]:
    """As `train`, on several nodes (by rank), between which all that can be cut travels in parts."""
    bundle_parts.LEAST_BYTES_IN_PARTS, usual = 1, bundle_parts.LEAST_BYTES_IN_PARTS
    try:
        return train(state, index, cell, addresses, nodes)
    finally:
        bundle_parts.LEAST_BYTES_IN_PARTS = usual


def train(
    state: dict[str, Any], index: int, layout: Layout | Cell, addresses: list[str], nodes: Sequence[int] = ()
) -> dict[str, Any]:
    """All steps as one rank; returns losses, norms, and this rank's gradients, parameters and state as numpy arrays."""
    from raypar.plan import MicrobatchRouting
    from raypar.schedule import registry

    job, plan, graph = layout.job, layout.plan, layout.graph
    part = make_worker_assignments(
        job, graph, plan, registry.build_schedule(layout.schedule, MicrobatchRouting(plan, job.batching))
    )[index]
    core = WorkerCore(job, graph=graph, step_timeout_s=30.0)
    order = AdoptPlanCommand(part, {}, 0, nodes=tuple(nodes))
    keys = required_communicators(order, index, job, core.layout) if state["nccl"] else frozenset()
    transport = state["mesh"].connect(
        rank=index, size=plan.world, addresses=addresses, generation=0, deadline_s=20.0, communicators=keys
    )
    try:
        core.adopt(part, transport, nodes=nodes)
        losses, norms, gradients = [], [], []
        for step in range(job.steps):
            report = core.step(step)
            losses.append(report.loss)
            norms.append(report.norm)
            gradients.append(
                {
                    n: None if p.grad is None else p.grad.numpy().copy()
                    for s in core.stages.values()
                    for n, p in s.parameters.items()
                }
            )
        run_routine(core.step_commit.gather.gather_everything(), 30.0)
        return {
            "losses": losses,
            "norms": norms,
            "gradients": gradients,
            "ledger": transport.ledger.as_dict(),
            "parameters": {n: p.detach().numpy().copy() for s in core.stages.values() for n, p in s.parameters.items()},
            "buffers": {n: b.numpy().copy() for s in core.stages.values() for n, b in s.buffers.items()},
            "state": {
                n: {k: getattr(v, "numpy", lambda v=v: v)() for k, v in kinds.items()}
                for optimizer in core.step_commit.optimizers.values()
                for n, kinds in read_optimizer_state(optimizer).parameters.items()
            },
        }
    finally:
        core.close()
        state.pop("mesh").close()
