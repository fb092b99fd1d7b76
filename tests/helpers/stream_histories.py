"""Real workers that read streams, through the histories of `helpers.membership`: what each step read, beside one process."""

from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import dataclass
from functools import cache
from typing import Any

from helpers import reference, stream_cases, ugly_models
from helpers.membership import QUICK, STEPS, TICK_MS, Case, any_plan, history
from helpers.protocol import World
from helpers.torch_flesh import TorchFlesh, TorchJob

from raypar.job import DataConfig
from raypar.plan import ParallelPlan
from raypar.schedule import registry
from raypar.worker.data.resolve_streams import resolve_streams
from raypar.worker.elastic_worker import ElasticWorker
from raypar.worker.worker_assignments import make_layer_graph
from raypar.worker.worker_core import WorkerCore

SPECS: tuple[tuple[Any, dict[str, Any], int], ...] = (
    (stream_cases.Divided, {}, 4),
    (stream_cases.Plain, {"streams": 1}, 4),
    (stream_cases.generated, {"streams": 2, "shuffle_window": 5}, 6),
    (stream_cases.Resuming, {"streams": 3}, 5),
    (stream_cases.Divided, {"streams": 3, "shuffle_window": 3}, 3),
    (stream_cases.whole, {"streams": 1, "shuffle_window": 4}, 8),
)
"""Source, keys of `data`, microbatches; 23 samples, of which no stream has the same number as the others."""


@cache
def job(index: int, steps: int = STEPS) -> TorchJob:
    """Of `SPECS`; one for all histories."""
    source, data, microbatches = SPECS[index]
    spec = ugly_models.job("plain", microbatches=microbatches, steps=steps).replace(data=DataConfig(function=source, **data))
    spec = resolve_streams(spec).job
    return TorchJob(spec, make_layer_graph(spec), registry.NAMES)


@cache
def wanted(index: int) -> dict[tuple[int, int], list[tuple[int, int]]]:
    """(step, microbatch) -> (epoch, index) of its samples, as one process reads them."""
    return reference.train(job(index).graph, job(index).spec).samples


@dataclass
class Tap:
    """Between a stage and its loader: notes what is read."""

    flesh: StreamFlesh
    core: WorkerCore
    source: Any

    def get(self, step: int, microbatch: int) -> Any:
        fields = self.source.get(step, microbatch)
        assert self.core.transport is not None
        places, digest = self.source.sample_positions(step, microbatch), self.source.digest(step, microbatch)
        self.flesh.reads[step, microbatch].append((places, digest))
        self.flesh.by_generation[self.core.transport.generation, step].add(microbatch)
        return fields


class TappedCore(WorkerCore):
    """Reads through taps."""

    flesh: StreamFlesh

    def _batch_sources(self, loader: Any) -> Any:
        return {index: feed and Tap(self.flesh, self, feed) for index, feed in super()._batch_sources(loader).items()}


class Body(ElasticWorker):
    """Notes in which generation a step was applied."""

    core: TappedCore

    def step(self, step: int, into_mirror: bool = False) -> Any:
        assert self.core.transport is not None
        generation = self.core.transport.generation
        try:
            report = yield from super().step(step, into_mirror)
        finally:
            if self.core.step_commit.last_decided_step == step:
                self.core.flesh.applied.add((generation, step))
        return report


class StreamFlesh(TorchFlesh):
    """See `helpers.torch_flesh.TorchFlesh`."""

    def __init__(self, world: Any) -> None:
        super().__init__(world)
        self.reads: dict[tuple[int, int], list[tuple[list[tuple[int, int]], int]]] = defaultdict(list)
        """(step, microbatch) -> (samples, digest) of every time that it was read."""
        self.by_generation: dict[tuple[int, int], set[int]] = defaultdict(set)
        """(generation, step) -> the microbatches that were read."""
        self.applied: set[tuple[int, int]] = set()
        self.sizes: list[int] = []

    def make_body(self, number: int) -> ElasticWorker:
        core = TappedCore(self.job.spec, graph=self.job.graph)
        core.flesh = self
        return Body(core, number)

    def check(self, index: int) -> int:
        """What was read is what one process reads, whoever has read it, and how often. Returns how many were read twice."""
        tell = self.world.tell
        want = wanted(index)
        for (step, microbatch), found in self.reads.items():
            assert {tuple(places) for places, _ in found} == {tuple(want[step, microbatch])}, tell(
                f"{step}, {microbatch}: {found}"
            )
            assert len({digest for _, digest in found}) == 1, tell(f"step {step}, microbatch {microbatch}: other digests")
        for generation, step in self.applied:
            read = self.by_generation[generation, step]
            assert read == set(range(self.job.spec.microbatches)), tell(f"generation {generation}, step {step}: {read}")
        assert {step for _, step in self.applied} == set(range(self.job.steps)), tell("steps that nobody has applied")
        return sum(len(found) > 1 for found in self.reads.values())


def run(case: Case) -> tuple[World, int, int]:
    """To its end: the world, the final hash, and how many microbatches were read more than once."""
    work = job(case.spec, case.steps)

    def seeded(generation: int, workers: int) -> ParallelPlan:
        dice = random.Random(f"{case.seed}/{generation}/{workers}")
        return any_plan(dice, workers, work.layers, case.replicas)

    policy = QUICK | dict(case.policy)
    world = World(work, case.plan, changes=case.changes, plans=seeded, flesh=StreamFlesh, tick_ms=TICK_MS, **policy)
    try:
        over = world.run()
        assert over.end == "done", world.tell(f"{case}: {over.why}")
        return world, world.final_hash(), world.flesh.check(case.spec)
    finally:
        world.flesh.close()


@cache
def undisturbed(index: int) -> int:
    """Hash of parameters, optimizer state and losses of one worker that nothing happens to."""
    return run(Case(index, ParallelPlan.mesh(layers=job(index).layers), ()))[1]


def stream_history(seed: int) -> Case:
    """A history of `helpers.membership` whose first plan is one for the layers of the models here."""
    found = history(seed)
    plan = any_plan(random.Random(f"plan of {seed}"), found.plan.world, job(found.spec).layers, found.replicas)
    return Case(found.spec, plan, found.changes, found.seed, found.replicas, found.policy)
