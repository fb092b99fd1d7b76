"""A worker that begins or takes over allocates what it will hold: never more than its state before or after, whichever is more,
and the state of its largest layer."""

import contextlib
import gc
import weakref
from pathlib import Path

import pytest
from helpers.counted_memory import CountedMemory, state_tensors
from helpers.generations import Generations
from helpers.gpt_job import gpt_job
from helpers.torch_flesh import TorchJob
from helpers.zero_layouts import small_pieces

from raypar.comm.local_transport import LocalMesh
from raypar.job import PlanConfig
from raypar.job.read_job import parse_job
from raypar.model.layer_skeletons import state_shapes
from raypar.plan import MicrobatchRouting, ParallelPlan
from raypar.plan.pieces import AdoptPlanCommand
from raypar.schedule import registry
from raypar.worker.checkpoint.state_key import OPTIMIZER
from raypar.worker.elastic_worker import ElasticWorker
from raypar.worker.layer_graph_of_job import make_layer_graph
from raypar.worker.make_worker_assignments import make_worker_assignments
from raypar.worker.run_in_one_process import OneProcessRun
from raypar.worker.stage.stage import Stage
from raypar.worker.state.state_assembly import StateAssembly
from raypar.worker.worker_core import WorkerCore

SPEC = parse_job(gpt_job(depth=6, width=64, more="deferred_init: always"))
GRAPH = make_layer_graph(SPEC)
LAYERS = len(GRAPH.layers)
ELEMENTS = [sum(shape.numel() for shape in state_shapes(GRAPH, i, i + 1).values()) for i in range(LAYERS)]
LARGEST_BYTES = 4 * max(ELEMENTS)
"""The parameters of the largest layer."""
BESIDE_BYTES = 96 << 10
"""Step counts, and lists of what moves."""
SMALL_BYTES = 350 << 10
"""Tensors of the model that are too small to be deferred: the first worker of a process that begins makes them for all."""


class WatchedGenerations(Generations):
    """Each worker's memory is counted while it adopts a plan."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        super().__init__(TorchJob(SPEC, GRAPH))
        self.patch, self.counted, self.before = patch, CountedMemory(), dict[int, int]()

    def adopt_watched(self, plan: ParallelPlan, members: list[int], done: int) -> None:
        counted = self.counted = CountedMemory()
        for worker, body in self.bodies.items():
            counted.note(worker, state_tensors(body))
        self.before = {worker: counted.now(worker) for worker in self.bodies}
        adopt = ElasticWorker.adopt
        with self.patch.context() as patch:
            counted.watch_messages(patch, [*members, *(worker for worker in self.bodies if worker not in members)])
            counted.leave_out_buckets(patch)
            patch.setattr(ElasticWorker, "adopt", lambda body, order: counted.watched(body.worker, body, adopt(body, order)))
            patch.setattr("helpers.generations.parameters_lie_as_new_ones", lambda stages: None)
            self.adopt(plan, members, done)

    def check(self, done: int) -> None:
        for worker, body in self.bodies.items():
            held = CountedMemory()
            held.note(worker, state_tensors(body))
            state = max(held.now(worker), self.before.get(worker, 0))
            beside = LARGEST_BYTES + BESIDE_BYTES + (0 if done else SMALL_BYTES)
            assert self.counted.peak[worker] <= state + beside, (
                f"worker {worker}: {self.counted.peak[worker]:,} at once; {self.before.get(worker, 0):,} before, "
                f"{held.now(worker):,} after, {LARGEST_BYTES:,} of the largest layer"
            )


def plan_of(replicas: int, stages: int, level: int, holders: int = 1) -> ParallelPlan:
    return ParallelPlan.mesh(dp=replicas, pp=stages, layers=LAYERS).with_zero(level, holders)


CI = pytest.mark.ci


@pytest.mark.parametrize("level", [*(pytest.param(level, marks=CI) for level in range(3)), 3])
def test_one_goes_another_comes_and_stages_become_others(level, monkeypatch):
    with small_pieces():
        run = WatchedGenerations(monkeypatch)
        changes = [((3, 1), [0, 1, 2]), ((2, 1), [0, 1]), ((3, 1), [0, 1, 5]), ((1, 2), [5, 1]), ((2, 2), [5, 1, 6, 7])]
        for done, (sizes, members) in enumerate(changes):
            run.adopt_watched(plan_of(*sizes, level), members, done)
            run.check(done)
            run.step(done)


@pytest.mark.ci
@pytest.mark.parametrize("level", [1, 3])
def test_an_owner_is_lost_of_whose_state_another_one_has_a_copy(level, monkeypatch):
    with small_pieces():
        run = WatchedGenerations(monkeypatch)
        run.adopt_watched(plan_of(4, 1, level, 2), [0, 1, 2, 3], 0)
        run.step(0)
        del run.bodies[1]
        run.adopt_watched(plan_of(3, 1, level, 2), [0, 3, 2], 1)
        run.check(1)
        run.step(1)


@pytest.mark.parametrize("level", [pytest.param(1, marks=CI), 3])
def test_state_that_lies_in_files_is_assembled_there_and_not_copied_again(level, monkeypatch, tmp_path: Path):
    with small_pieces():
        run = Generations(TorchJob(SPEC.replace(plan=PlanConfig(optimizer_in=str(tmp_path / "files"))), GRAPH))
        run.adopt(plan_of(3, 1, level), [0, 1, 2], 0)
        run.step(0)
        made = dict[int, set[int]]()
        assemble = StateAssembly.run

        def assembled(assembly: StateAssembly) -> None:
            assemble(assembly)
            files = assembly.core.optimizer_files
            large = [
                value
                for kept in assembly.kept.values()
                for of in kept.values()
                for key, value in of.items()
                if key.kind == OPTIMIZER and value.nbytes >= files.small_bytes
            ]
            assert large and all(files.has(value) for value in large)
            made[assembly.worker] = {value.data_ptr() for value in large}

        monkeypatch.setattr(StateAssembly, "run", assembled)
        run.adopt(plan_of(2, 1, level), [0, 1], 1)
        for worker in (0, 1):
            held = {tensor.data_ptr() for tensor in state_tensors(run.bodies[worker])}
            assert made[worker] <= held
        run.step(1)


@pytest.mark.ci
@pytest.mark.parametrize("level", [0, 1, 3])
def test_a_checkpoint_is_read_tensor_by_tensor(level, monkeypatch, tmp_path: Path):
    with small_pieces():
        run = WatchedGenerations(monkeypatch)
        plan = plan_of(3, 1, level)
        run.adopt_watched(plan, [0, 1, 2], 0)
        run.step(0)
        path = run.save(tmp_path, 1)
        schedule = registry.build_schedule("1f1b", MicrobatchRouting(plan, SPEC.batching))
        parts = make_worker_assignments(SPEC, GRAPH, plan, schedule)
        mesh, counted = LocalMesh(3, 7), CountedMemory()
        counted.leave_out_buckets(monkeypatch)
        for rank in range(3):
            body = ElasticWorker(WorkerCore(SPEC, graph=GRAPH), rank)
            ranks = {worker: worker for worker in range(3)}
            part = AdoptPlanCommand(parts[rank], ranks, 1, (), str(path))
            for _ in counted.watched(rank, body, body.adopt((part, lambda rank=rank: mesh.transports[rank]))):
                pass
            held = CountedMemory()
            held.note(rank, state_tensors(body))
            peak, state = counted.peak[rank], held.now(rank)
            assert peak <= state + LARGEST_BYTES + BESIDE_BYTES + SMALL_BYTES, (peak, state)
            body.core.close()


class Ended(Exception):
    """Ends a step in the middle."""


@pytest.mark.parametrize("ends_in_step", [False, True])
@pytest.mark.parametrize("gather", ["layer", pytest.param("microbatch", marks=CI), pytest.param("step", marks=CI)])
def test_no_circle_of_references_keeps_the_tensors_of_stages_that_were_released(gather, ends_in_step, monkeypatch):
    """Python's collector skips what workers have frozen."""
    plan = plan_of(2, 1, 3).with_gather(gather).with_gradients("scatter")
    run = OneProcessRun(SPEC, plan, "gpipe", graph=GRAPH)
    try:
        gc.collect()
        gc.freeze()
        run.step(0)
        backward, calls = Stage.backward, list[int]()

        def fails(stage, *given):
            calls.append(1)
            if len(calls) == 3:
                raise Ended
            return backward(stage, *given)

        if ends_in_step:
            monkeypatch.setattr(Stage, "backward", fails)
            with contextlib.suppress(Ended):
                run.step(1)
            assert len(calls) >= 3
        there = [weakref.ref(stage.weights) for core in run.cores for stage in core.stages.values()]
        for core in run.cores:
            core.release_stages()
            core.transport.close()
        for transport in run.mesh.transports:
            vars(transport).clear()  # what is under way, as another generation's transport takes its place
        gc.collect()
        assert len(there) == 2 and not any(weights() for weights in there)
    finally:
        gc.unfreeze()
