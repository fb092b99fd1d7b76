"""Real workers that are watched: which samples each step really read, and what state really travelled.

Every read of a microbatch is noted as (generation, step, stage) -> microbatch -> sample ids as the data set was asked for
them; every tensor that a worker hands to another when a generation begins is weighed against what the generation lacked.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from helpers.torch_flesh import TorchFlesh
from torch import Tensor

from raypar.comm.local_transport import LocalMesh, LocalTransport
from raypar.elastic import actions as do
from raypar.plan.pieces import Piece, subtract_pieces
from raypar.worker.data.sample_order import SampleOrder, SamplePosition
from raypar.worker.data.sample_reader import SampleReader
from raypar.worker.data.user_dataset import make_dataset
from raypar.worker.data.worker_data import WorkerData
from raypar.worker.elastic_worker import ElasticWorker
from raypar.worker.state.parameter_state import tensor_in
from raypar.worker.step.message_tags import state_tag
from raypar.worker.worker_core import WorkerCore

LAST_STATE_TAG = state_tag((1 << 17) - 1)


@dataclass
class Weighed:
    """One generation's hand-over. Elements are parameters' elements; bytes include what the optimizer keeps for them."""

    elements: int = 0
    bytes: int = 0
    header_bytes: int = 0
    lacked_elements: int = 0
    lacked_bytes: int = 0


class Batch(dict[str, Tensor]):
    """A microbatch that knows what was read for it."""

    ids: list[SamplePosition]


class WatchedDataset:
    """Notes which samples are asked for."""

    def __init__(self, dataset: Any) -> None:
        self.dataset, self.asked = dataset, []

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        self.asked.append(index)
        return self.dataset[index]


@dataclass(frozen=True)
class WatchedReader(SampleReader):
    """Ties a microbatch to the samples that the data set gave for it."""

    def read(self, places: Sequence[SamplePosition], at: tuple[int, int] = (0, 0)) -> dict[str, Tensor]:
        before = len(self.dataset.asked)
        batch = Batch(super().read(places, at))
        batch.ids = [(epoch, index) for (epoch, _), index in zip(places, self.dataset.asked[before:], strict=True)]
        return batch


class WatchedData(WorkerData):
    """Watched data sets and readers."""

    def dataset(self, data: Any) -> Any:
        key = repr((data.function, data.args))
        if key not in self._datasets:
            self._datasets[key] = WatchedDataset(make_dataset(data))
        return self._datasets[key]

    def make_loader(self, *args: Any, **more: Any) -> Any:
        loader = super().make_loader(*args, **more)
        fields = {f.name: getattr(loader._reader, f.name) for f in dataclasses.fields(SampleReader)}
        loader._reader = WatchedReader(**fields)
        return loader


class WatchedCore(WorkerCore):
    """Reads through watched data sets and readers."""

    def __init__(self, flesh: WatchedFlesh) -> None:
        super().__init__(flesh.job.spec, graph=flesh.job.graph)
        self.flesh = flesh
        self.data = WatchedData(flesh.job.spec, self.guard, batch_names=self.graph.batch_names)

    def _batch_sources(self, loader: Any) -> Any:
        return {index: feed and Tap(self, index, feed) for index, feed in super()._batch_sources(loader).items()}


@dataclass
class Tap:
    """Between a stage and the loader."""

    core: WatchedCore
    stage: int
    loader: Any

    def get(self, step: int, microbatch: int) -> Any:
        batch = self.loader.get(step, microbatch)
        assert self.core.transport is not None
        generation = self.core.transport.generation
        self.core.flesh.reads[generation, step, self.stage].append((microbatch, tuple(batch.ids)))
        return batch


class WatchedBody(ElasticWorker):
    """Notes in which generation a step was applied."""

    def __init__(self, flesh: WatchedFlesh, worker: int) -> None:
        super().__init__(WatchedCore(flesh), worker)
        self.flesh = flesh

    def step(self, step: int, cut: bool = False) -> Any:
        assert self.core.transport is not None
        generation = self.core.transport.generation
        try:
            report = yield from super().step(step, cut)
        finally:
            if self.core.step_commit.last_decided_step == step:
                self.flesh.applied.add((generation, step))
        return report


class WatchedTransport(LocalTransport):
    """Weighs the state that is sent."""

    def __init__(self, mesh: LocalMesh, rank: int, weighed: Weighed) -> None:
        super().__init__(mesh, rank)
        self.weighed = weighed

    def send(self, tensor: Tensor, *, to: int, tag: int, keep_layout: bool = False) -> Any:
        handle = super().send(tensor, to=to, tag=tag, keep_layout=keep_layout)
        if tag == state_tag(0):
            self.weighed.header_bytes += tensor.nbytes
        elif state_tag(0) < tag <= LAST_STATE_TAG:
            self.weighed.bytes += tensor.nbytes
        return handle


@dataclass
class Record:
    """What was found out about one run, or about many."""

    generations: int = 0
    loads: int = 0
    samples: int = 0
    epochs: int = 0
    elements: int = 0
    lacked_elements: int = 0
    bytes: int = 0
    lacked_bytes: int = 0
    header_bytes: int = 0


class WatchedFlesh(TorchFlesh):
    """See `helpers.torch_flesh.TorchFlesh`."""

    def __init__(self, world: Any) -> None:
        super().__init__(world)
        self.reads: dict[tuple[int, int, int], list[tuple[int, tuple[SamplePosition, ...]]]] = defaultdict(list)
        self.applied: set[tuple[int, int]] = set()
        self.weighed: dict[int, Weighed] = {}
        self.stages: dict[int, int] = {}
        """Generation -> number of stages of its plan."""
        self.sizes: list[int] = []
        """Workers with a seat, by generation."""
        self.loads = 0
        """Generations that began from a checkpoint."""

    def make_body(self, number: int) -> ElasticWorker:
        return WatchedBody(self, number)

    def connect(self, order: do.AdoptPlan, dead: set[int]) -> Any:
        weighed = Weighed()
        if order.generation == max(self.world.claims):  # else its driver has been replaced, and nobody obeys
            self.stages[order.generation] = len(order.plan.stages)
            self.sizes.append(order.plan.world)
            self.loads += order.from_checkpoint and order.done > 0
            weighed = self.weighed[order.generation] = self.lacked(order)
            weighed.elements = sum(move.piece.size for move in order.moves)
        made = super().connect(order, set())
        mesh, workers = made
        mesh.transports = [WatchedTransport(mesh, rank, weighed) for rank in range(mesh.size)]
        for worker in dead & set(workers):
            mesh.transports[workers.index(worker)].abort("killed")
        return made

    def lacked(self, order: do.AdoptPlan) -> Weighed:
        """The set difference of what the new members need and what they hold, from the bodies themselves."""
        weighed = Weighed()
        if order.from_checkpoint:
            return weighed
        held: dict[int, tuple[Piece, ...]] = {}
        size_of: dict[str, tuple[float, int]] = {}
        """Tensor -> bytes of an element, and of what is kept once for a piece, whatever its size."""
        for process in self.world.processes:
            body: Any = process.body
            if order.from_mirror:
                held[process.number] = body.held_snapshots().get(order.done, ())
            elif process.member.seated and body.applied() == order.done:
                held[process.number] = body.pieces()
            else:
                continue
            for name, holdings in body._held_state().items():
                for holding in holdings:
                    kept = [value for value in holding.state.values() if isinstance(value, Tensor)]
                    shape = tensor_in(holding.state).shape
                    by_element = sum(value.nbytes for value in kept if value.shape == shape)
                    found = by_element / shape.numel(), sum(value.nbytes for value in kept) - by_element
                    size_of[name] = max(found, size_of.get(name, found))
        for worker, need in zip(order.members, self.layout(order.plan), strict=True):
            for piece in subtract_pieces(need, held.get(worker, ())):
                weighed.lacked_elements += piece.size
                each, once = size_of[piece.name]
                weighed.lacked_bytes += round(each * piece.size) + once
        return weighed

    # -- afterwards --------------------------------------------------------------------------------------------------------

    def check(self) -> Record:
        """Nothing lost, nothing repeated, nothing moved in vain. Raises `AssertionError` with the world's story."""
        spec, tell = self.job.spec, self.world.tell
        record = Record()
        order = SampleOrder.of_job(spec, make_dataset(spec.data))
        batching, batch = spec.batching, spec.batch_size
        for (generation, step, stage), found in self.reads.items():
            for microbatch, ids in found:
                samples = batching.samples(microbatch)
                due = tuple(order.ids(step * batch + samples.start, step * batch + samples.stop))
                assert ids == due, tell(f"generation {generation}, step {step}, stage {stage}, microbatch {microbatch}: {ids}")
        for generation, step in self.applied:
            for stage in (0, self.stages[generation] - 1):
                taken = sorted(microbatch for microbatch, _ in self.reads[generation, step, stage])
                what = f"generation {generation}, step {step}, stage {stage} took microbatches {taken}"
                assert taken == list(range(batching.count)), tell(what)
        series = []
        for step in range(self.job.steps):
            generations = sorted(g for g, s in self.applied if s == step)
            assert generations, tell(f"step {step} was applied by nobody")
            ids = [dict(self.reads[g, step, 0]) for g in generations]
            assert all(one == ids[0] for one in ids), tell(f"step {step} was made of different samples")
            series += [place for microbatch in range(batching.count) for place in ids[0][microbatch]]
        assert series == order.ids(0, self.job.steps * batch), tell("samples were lost or repeated")
        record.samples, record.epochs = len(series), series[-1][0] + 1
        for generation, weighed in self.weighed.items():
            told = f"generation {generation}: {weighed}"
            assert weighed.elements <= 1.1 * weighed.lacked_elements, tell(told)
            assert weighed.bytes <= 1.1 * weighed.lacked_bytes, tell(told)
            record.generations += 1
            record.elements += weighed.elements
            record.lacked_elements += weighed.lacked_elements
            record.bytes += weighed.bytes
            record.lacked_bytes += weighed.lacked_bytes
            record.header_bytes += weighed.header_bytes
        record.loads = self.loads
        return record
