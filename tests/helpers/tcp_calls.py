"""What the worker processes of the parity tests run: a core each, connected by real sockets, or by NCCL over the stand-in."""

from __future__ import annotations

from typing import Any

from helpers import standin
from helpers.parity import STEPS, Layout

from raypar.comm.cpu import CpuMesh
from raypar.comm.nccl_connect import connect as connect_nccl
from raypar.comm.wire import Wire
from raypar.plan import ParallelPlan
from raypar.worker.assignment import assignments, make_graph
from raypar.worker.core import WorkerCore
from raypar.worker.optimizer import state_of


def listen(state: dict[str, Any], index: int, kind: str) -> str:
    """The worker's address, for transports of one kind (`tcp`, `nccl`)."""
    state["nccl"] = kind == "nccl"
    if state["nccl"]:
        standin.load()
    state["mesh"] = CpuMesh.listen("127.0.0.1", near=False)
    return state["mesh"].address


def wires_of(plan: ParallelPlan) -> list[Wire]:
    """What a plan's workers do together: messages (the vote is one from each to each), and each stage's reduction."""
    wires = [Wire((a, b), "message") for a in range(plan.world) for b in range(plan.world) if a != b]
    for stage in range(len(plan.stages)):
        wires += [Wire(plan.replica_ranks(stage), name, stage) for name in ("all_reduce", "all_to_all", "all_gather")]
    return wires


def train(state: dict[str, Any], index: int, layout: Layout, addresses: list[str], run: str) -> dict[str, Any]:
    """Five steps as one rank; returns losses, norms, and this rank's gradients, parameters and state as numpy arrays."""
    from raypar.plan import Routing
    from raypar.schedule import registry

    job, plan = layout.job, layout.plan
    graph = make_graph(job)
    part = assignments(job, graph, plan, registry.build(layout.schedule, Routing(plan, job.cut)))[index]
    transport = state["mesh"].connect(rank=index, size=plan.world, addresses=addresses, run=run, generation=0, deadline_s=20.0)
    if state["nccl"]:
        device = standin.HostDevice(f"worker {index}")
        transport = connect_nccl(transport, device=device, wires=wires_of(plan), deadline_s=20.0)
    core = WorkerCore(job, graph=graph, step_timeout_s=30.0)
    try:
        core.adopt(part, transport)
        losses, norms, gradients = [], [], []
        for step in range(STEPS):
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
        return {
            "losses": losses,
            "norms": norms,
            "gradients": gradients,
            "parameters": {n: p.detach().numpy().copy() for s in core.stages.values() for n, p in s.parameters.items()},
            "state": {
                n: {k: getattr(v, "numpy", lambda v=v: v)() for k, v in kinds.items()}
                for optimizer in core.end.optimizers.values()
                for n, kinds in state_of(optimizer).items()
            },
        }
    finally:
        core.close()
        state.pop("mesh").close()
