"""Real workers' bodies for `helpers.protocol`: stages, optimizers and reductions over the local transport."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from helpers import checkpoint_folders as checkpoint_files
from helpers.kernel_calls import parameters_lie_as_new_ones

from raypar.comm import blocking_code_as_routine
from raypar.comm.blocking_code_as_routine import as_routine
from raypar.comm.buffer_pool import CPU
from raypar.comm.local_transport import LocalMesh
from raypar.elastic import actions as do
from raypar.elastic.mirror_schedule_and_buddies import assign_buddies
from raypar.job import Job
from raypar.job.contract import contract_of_job
from raypar.model.graph import Graph
from raypar.model.layer_skeletons import state_shapes
from raypar.model.tensor_parallel.compute_shard_layout import compute_shard_layout, make_model_outline_with_layouts
from raypar.plan import MicrobatchRouting, ParallelPlan
from raypar.plan.ownership import Ownership
from raypar.plan.pieces import AdoptPlanCommand, Piece, may_move_directly, moves_by_worker
from raypar.schedule import registry
from raypar.schedule.program_assignment import ProgramAssignment
from raypar.worker.checkpoint.checkpoint_files import PARAMETER
from raypar.worker.connected_ranks import connected_ranks
from raypar.worker.elastic_worker import ElasticWorker
from raypar.worker.make_worker_assignments import make_worker_assignments
from raypar.worker.state.parameter_state import ParameterSlice, ParameterState, StateByKey, extract_elements
from raypar.worker.worker_core import WorkerCore

QUICK: dict[str, Any] = {
    "validates": False,
    "step_deadline_s": 0.5,
    "start_deadline_s": 1.0,
    "status_s": 0.5,
    "adopt_s": 2.0,
    "capacity_s": 5.0,
}
"""Limits for runs without validations: a loss is found soon."""


@dataclass(frozen=True)
class TorchJob:
    """What `helpers.hash_body.Job` says, of a real one."""

    spec: Job
    graph: Graph
    schedules: tuple[str, ...] = ("1f1b",)
    """Each generation takes one of those that fit its plan."""
    lowered: dict[Any, tuple[ProgramAssignment, ...]] = field(default_factory=dict, compare=False, repr=False)
    """Of all simulations: lowering takes longer than a step."""
    mirror_every: int = 0
    shards: tuple[int, ...] = ()
    """How many a stage may have, where there may be several."""
    device: torch.device = CPU

    @property
    def layout(self) -> Callable[[ParallelPlan], tuple[tuple[Piece, ...], ...]]:
        outline = make_model_outline_with_layouts(self.graph, self.shards, dict(self.spec.styles))
        outline = replace(outline, undivided=self.spec.undivided)
        return lambda plan: Ownership(plan, outline).held

    @property
    def steps(self) -> int:
        return self.spec.steps

    @property
    def layers(self) -> int:
        return len(self.graph.layers)

    @property
    def batching(self) -> Any:
        return self.spec.batching


class InTurns(ElasticWorker):
    """Layers on shards wait in the middle: the body's steps run in a thread that takes turns with all others."""

    def step(self, step: int, cut: bool = False) -> Any:
        return as_routine(partial(blocking_code_as_routine.run_or_yield, super().step(step, cut)))

    def adopt(self, order: Any) -> Any:
        yield from super().adopt(order)
        parameters_lie_as_new_ones(self.core.stages)

    def validate(self) -> Any:
        return as_routine(partial(blocking_code_as_routine.run_or_yield, super().validate()))


class TorchFlesh:
    """See `helpers.protocol.Hashes`."""

    def __init__(self, world: Any) -> None:
        self.world, self.job = world, world.job
        self.layout = self.job.layout
        self.meshes: list[tuple[LocalMesh, tuple[int, ...]]] = []
        self.bodies: list[ElasticWorker] = []
        self.folder = tempfile.TemporaryDirectory(prefix="raypar-")
        self.checkpoints: dict[int, Path | None] = {0: None}
        """The beginning has none: everything is initialised by name."""

    def body(self, number: int) -> ElasticWorker:
        body = self.make_body(number)
        self.bodies.append(body)
        return body

    def make_body(self, number: int) -> ElasticWorker:
        kind = InTurns if self.job.shards else ElasticWorker
        return kind(WorkerCore(self.job.spec, graph=self.job.graph, device=self.job.device), number)

    def connect(self, order: do.AdoptPlan, dead: set[int]) -> tuple[LocalMesh, tuple[int, ...]]:
        workers = (*order.members, *order.seatless_sources)
        mesh = (LocalMesh(len(workers), order.generation), workers)
        self.meshes.append(mesh)
        for worker in dead & set(workers):
            mesh[0].transports[workers.index(worker)].abort("killed")
        return mesh

    def part(self, order: do.AdoptPlan, mesh: tuple[LocalMesh, tuple[int, ...]], worker: int) -> Any:
        part = self.command(order, mesh[1], worker)
        transport = mesh[0].transports[part.rank_of_worker[worker]]
        transport.peers = connected_ranks(part, part.rank_of_worker[worker], self.job.spec, self.bodies[0].core.layout)
        return part, lambda: transport

    def share(self, order: do.AdoptPlan, worker: int) -> AdoptPlanCommand:
        return self.command(order, order.members, worker)

    def command(self, order: do.AdoptPlan, workers: tuple[int, ...], worker: int) -> AdoptPlanCommand:
        key = (order.plan, self.schedule(order))
        if key not in self.job.lowered:
            made = registry.build_schedule(key[1], MicrobatchRouting(order.plan, self.job.batching))
            self.job.lowered[key] = make_worker_assignments(
                self.job.spec, self.job.graph, order.plan, made, shards=self.job.shards
            )
        seat = order.members.index(worker) if worker in order.members else None
        ranks = {w: rank for rank, w in enumerate(workers)}
        assignment = self.job.lowered[key][seat] if seat is not None else None
        path = self.checkpoints[order.done] if order.from_checkpoint else None
        load = None if path is None else str(path)
        keepers = assign_buddies(order.members)  # every worker is a node of its own
        fresh = order.from_checkpoint and not path
        return AdoptPlanCommand(
            assignment,
            ranks,
            order.done,
            moves_by_worker(order.moves).get(worker, ()),
            load,
            direct=may_move_directly(order.moves),
            run_begins=fresh,
            from_mirror=order.from_mirror,
            mirror_keepers=keepers,
            skipped_steps=order.skipped_steps,
        )

    def schedule(self, order: do.AdoptPlan) -> str:
        fitting = [name for name in self.job.schedules if registry.schedule_fits_plan(name, order.plan)]
        if not fitting:  # the plan has been changed by a loss
            fitting = [name for name in ("1f1b", "interleaved") if registry.schedule_fits_plan(name, order.plan)]
        return fitting[order.generation % len(fitting)]

    def begin_save(self, done: int) -> Path:
        return checkpoint_files.create_checkpoint(Path(self.folder.name), done)

    def copy(self, body: ElasticWorker, place: Path) -> dict[int, Any]:
        body.core.start_save(place)
        return {body.core.rank: body.core.save_result()}

    def save(self, done: int, place: Path, copies: dict[int, Any]) -> None:
        spec = self.job.spec
        self.checkpoints[done] = checkpoint_files.commit_checkpoint(
            place, list(copies.values()), steps_done=done, contract=contract_of_job(spec)
        )

    def outcome(self, answer: Any) -> Any:
        return answer.loss, answer.count, answer.norm

    def digest(self, answer: Any, body: ElasticWorker, step: int) -> Any:
        return answer.digest

    def corrupt(self, body: ElasticWorker) -> None:
        """A bit of a weight changes by itself."""
        for stage in body.core.stages.values():
            for parameter in stage.parameters.values():
                if parameter.untyped_storage().nbytes():  # else it is with its owners, until the next gather
                    parameter.data.view(torch.int32).view(-1)[0] ^= 1 << 20
                    return

    def dead(self, worker: int) -> None:
        for mesh, workers in self.meshes:
            if worker in workers:
                mesh.transports[workers.index(worker)].abort("killed")

    def final(self, bodies: Sequence[ElasticWorker]) -> int:
        """Of parameters, buffers and optimizer state; every holder must have the same."""
        slices: dict[str, dict[Any, ParameterState]] = {}
        for body in bodies:
            for (name, number), kept in body._stages_state().items():
                holding = ParameterState(kept, body._slices().get((name, number), ParameterSlice()))
                same = slices.setdefault(name, {}).setdefault(holding.spans, holding)
                assert PARAMETER in kept
                assert _digest(same.state) == _digest(kept), self.world.tell(f"holders of {name} differ")
        found: dict[str, bytes] = {}
        cuts = compute_shard_layout(self.job.graph, 1, dict(self.job.spec.styles)).cuts if self.job.shards else {}
        for name, shape in state_shapes(self.job.graph).items():
            if name not in slices and not shape.numel():
                continue  # empty tensors are nobody's
            parts = list(slices[name].values())
            whole = (
                extract_elements(parts, 0, shape.numel(), cuts.get(name)) if self.job.shards or parts[1:] else parts[0].state
            )
            found[name] = _digest(whole)
        total = hashlib.sha256(b"".join(name.encode() + found[name] for name in sorted(found))).digest()
        return int.from_bytes(total[:8], "little") >> 1

    def close(self) -> None:
        for body in self.bodies:
            body.core.close()
        self.folder.cleanup()


def _digest(kept: StateByKey) -> bytes:
    digest = hashlib.sha256()
    for key in sorted(kept):
        value = kept[key]
        digest.update(value.cpu().contiguous().numpy().tobytes() if hasattr(value, "numpy") else repr(value).encode())
    return digest.digest()


def simulate(
    job: TorchJob, plan: ParallelPlan, faults: Sequence[Any] = (), plans: Any = None, **policy: Any
) -> tuple[Any, int | None]:
    """As `helpers.protocol.simulate`."""
    from helpers.protocol import World

    world = World(job, plan, faults, flesh=TorchFlesh, plans=plans, **policy)
    try:
        over = world.run()
        return world, world.final_hash() if over.end == "done" else None
    finally:
        world.flesh.close()
