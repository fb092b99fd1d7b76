"""Workers' bodies that go from one plan to the next by hand, over the local transport: what moves is what is lacking."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path

from helpers import checkpoint_folders as checkpoint_files
from helpers import torch_flesh
from helpers.kernel_calls import parameters_lie_as_new_ones
from helpers.shard_grid import graph

from raypar.comm import blocking_code_as_routine
from raypar.comm.blocking_code_as_routine import as_routine
from raypar.comm.cooperative_scheduler import CooperativeScheduler
from raypar.comm.local_transport import LocalMesh
from raypar.plan import MicrobatchRouting, ParallelPlan
from raypar.plan.pieces import AdoptPlanCommand, may_move_directly, moves_by_worker, plan_moves, subtract_pieces
from raypar.schedule import registry
from raypar.worker.elastic_worker import ElasticWorker
from raypar.worker.make_worker_assignments import make_worker_assignments
from raypar.worker.worker_core import WorkerCore

SHARDS = (2, 3, 4)


def mesh(model: str, replicas: int, stages: int, shards: int) -> ParallelPlan:
    """Of a model of `helpers.shard_grid`."""
    return ParallelPlan.mesh(dp=replicas, pp=stages, tp=shards, layers=len(graph(model).layers))


class Generations:
    """Bodies 0, 1, ... that go from one plan to the next over the local transport."""

    def __init__(self, job: torch_flesh.TorchJob) -> None:
        self.job, self.number, self.bodies = job, 0, dict[int, ElasticWorker]()

    def adopt(self, plan: ParallelPlan, members: list[int], done: int, validated: Mapping[int, float] | None = None) -> int:
        """Everybody takes over what the plan asks for. Returns how many elements moved."""
        for worker in members:
            if worker not in self.bodies:
                self.bodies[worker] = ElasticWorker(
                    WorkerCore(self.job.spec, graph=self.job.graph, device=self.job.device), worker
                )
        layout = self.job.layout
        need = dict(zip(members, layout(plan), strict=True))
        have = {worker: body.pieces() for worker, body in self.bodies.items()} if done else {}
        moved = plan_moves(have, need) if done else ()
        skipped = tuple(sorted({step for body in self.bodies.values() for step in body.steps_skipped() if step < done}))
        sources = sorted({move.source for move in moved} - set(members))
        workers = [*members, *sources]
        mesh, ranks = LocalMesh(len(workers), self.number), {w: rank for rank, w in enumerate(workers)}
        self.number += 1
        parts = make_worker_assignments(
            self.job.spec,
            self.job.graph,
            plan,
            registry.build_schedule("1f1b", MicrobatchRouting(plan, self.job.batching)),
            validation_samples={},
            shards=self.job.shards,
        )
        own, direct = moves_by_worker(moved), may_move_directly(moved)
        orders = [
            (
                AdoptPlanCommand(
                    parts[i] if i < len(members) else None,
                    ranks,
                    done,
                    own.get(workers[i], ()),
                    run_begins=not done,
                    direct=direct,
                    validated=validated or {},
                    skipped_steps=skipped,
                ),
                lambda i=i: mesh.transports[i],
            )
            for i in range(len(workers))
        ]
        CooperativeScheduler().run([self.bodies[w].adopt(order) for w, order in zip(workers, orders, strict=True)], mesh)
        if done:
            lacking = sum(p.size for w in members for p in subtract_pieces(need[w], have.get(w, ())))
            assert sum(move.piece.size for move in moved) == lacking
        self.bodies = {worker: self.bodies[worker] for worker in members}
        for body in self.bodies.values():
            parameters_lie_as_new_ones(body.core.stages)
        self.members, self.mesh = members, mesh
        return sum(move.piece.size for move in moved)

    def step(self, step: int) -> None:
        routines = [as_routine(partial(blocking_code_as_routine.run_or_yield, self.bodies[w].step(step))) for w in self.members]
        CooperativeScheduler().run(routines, self.mesh)

    def save(self, root: Path, done: int) -> Path:
        folder = checkpoint_files.create_checkpoint(root, done)
        for worker in self.members:
            self.bodies[worker].core.start_save(folder)
        records = [self.bodies[worker].core.save_result() for worker in self.members]
        return checkpoint_files.commit_checkpoint(folder, records, steps_done=done, contract={})
