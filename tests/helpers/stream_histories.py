"""Real workers that read streams, through the histories of `helpers.membership`: what each step read, beside one process."""

from __future__ import annotations

import pickle
import random
from collections import defaultdict
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from helpers import reference, stream_cases, ugly_models
from helpers.membership import QUICK, STEPS, TICK_MS, Case, any_plan, history
from helpers.protocol import World
from helpers.torch_flesh import TorchFlesh, TorchJob

from raypar.actors.stream_digest_journal import StreamDigestJournal
from raypar.elastic import actions as do
from raypar.job import DataConfig
from raypar.job.data_section import MixedSourceConfig
from raypar.plan import ParallelPlan
from raypar.schedule import registry
from raypar.worker.data.check_and_count_streams import resolve_streams
from raypar.worker.data.mixed_order import MixPattern
from raypar.worker.elastic_worker import ElasticWorker
from raypar.worker.layer_graph_of_job import make_layer_graph
from raypar.worker.worker_core import WorkerCore

MIX = (
    MixedSourceConfig(function=stream_cases.Resuming, args={"size": 17}, ratio=3),
    MixedSourceConfig(function=stream_cases.Divided, args={"size": 9}, ratio=1),
)
SPECS: tuple[tuple[Any, dict[str, Any], int], ...] = (
    (stream_cases.Divided, {}, 4),
    (stream_cases.Plain, {"streams": 1}, 4),
    (stream_cases.generated, {"streams": 2, "shuffle_window": 5}, 6),
    (stream_cases.Resuming, {"streams": 3}, 5),
    (stream_cases.Resuming, {"streams": 3, "shuffle_window": 3}, 3),
    (stream_cases.whole, {"streams": 1, "shuffle_window": 4}, 8),
    (stream_cases.tar_shards, {"streams": 3, "shuffle_window": 3, "input": "x.npy", "target": "y.npy"}, 6),
    (stream_cases.Fed, {"streams": 1, "shuffle_window": 4}, 4),
    (None, {"mix": MIX, "streams": 2, "shuffle_window": 3}, 6),
)
"""Source, keys of `data`, microbatches; 23 samples, of which no stream has the same number as the others."""


NOTED = 2
"""Where a history saves nothing, cursors are noted every so many steps."""


@cache
def job(index: int, steps: int = STEPS) -> TorchJob:
    """Of `SPECS`; one for all histories."""
    source, data, microbatches = SPECS[index]
    spec = ugly_models.job("plain", microbatches=microbatches, steps=steps).replace(
        data=DataConfig(**({"function": source} if source else {}), **data)
    )
    spec = resolve_streams(spec).job
    return TorchJob(spec, make_layer_graph(spec), registry.NAMES)


@cache
def wanted(index: int) -> dict[tuple[int, int], list[tuple[int, int]]]:
    """(step, microbatch) -> (epoch, index) of its samples, as one process reads them."""
    return reference.train(job(index).graph, job(index).spec).samples


def between_processes(value: Any) -> Any:
    """As it comes to a worker or a driver in another process."""
    return pickle.loads(pickle.dumps(value))


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
        self.core.data.streams.wants_cursors = self.core.flesh.journal.wants_cursors(step)
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
        self._journals: dict[int, StreamDigestJournal] = {}
        self.given_cursors = 0
        """Cursors that workers have got."""
        self.unknown = 0
        """Microbatches of which the journal knows nothing: who has read them died before a driver had heard of it."""

    def _new_journal(self, done: int) -> StreamDigestJournal:
        spec, folder = self.job.spec, Path(self.folder.name)
        every = self.world.policy.save_every or NOTED
        assert spec.data.streams is not None
        made = StreamDigestJournal(
            folder / "samples.bin",
            folder / "cursors.json",
            spec.batching,
            spec.data.streams,
            every,
            self.world.story.append,
            MixPattern.of_ratios(spec.data.ratios) if spec.data.mix else None,
        )
        made.open(done)
        return made

    @property
    def journal(self) -> StreamDigestJournal:
        """That of the present driver; a new one has what the former has written."""
        number = self.world.driver.number
        if number not in self._journals:
            self._journals[number] = self._new_journal(max(self.checkpoints))
        return self._journals[number]

    def outcome(self, answer: Any) -> Any:
        """Takes what a report says of streams. Writes what is known of the step before: of the last, drivers die too early."""
        if (read := between_processes(getattr(answer, "streams", None))) is not None:
            assert (different := self.journal.note(answer.step, read)) is None, self.world.tell(str(different))
            if answer.step:
                self.journal.write(self.journal.record(answer.step - 1))
        return super().outcome(answer)

    def part(self, order: do.AdoptPlan, mesh: Any, worker: int) -> Any:
        """With what the journal knows. Those that live have told what they have read."""
        journal = self.journal
        for process in self.world.processes:
            if process.alive and process.ready:
                different = journal.note_digests(between_processes(dict(process.body.core.data.streams.digests)))
                assert different is None, self.world.tell(str(different))
        made, connect = super().part(order, mesh, worker)
        cursors, epochs, digests = journal.known_cursors(), journal.known_epochs(), journal.digests(order.done)
        self.given_cursors += sum(map(len, cursors.values()))
        cursors, epochs, digests = between_processes((cursors, epochs, digests))
        return replace(made, cursors=cursors, epochs=epochs, digests=digests), connect

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
        for step in range(self.job.steps):
            for microbatch, digest in enumerate(self.journal.digests_of(step)):
                ((_, read), *_) = self.reads[step, microbatch]
                assert digest in (0, read), tell(f"step {step}, microbatch {microbatch}: the journal has another digest")
                self.unknown += not digest
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
    spec = seed % len(SPECS)
    plan = any_plan(random.Random(f"plan of {seed}"), found.plan.world, job(spec).layers, found.replicas)
    return Case(spec, plan, found.changes, found.seed, found.replicas, found.policy)
