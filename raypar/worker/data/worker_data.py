"""The data of one worker: data sets, streams and data processes, which outlive plans, and the loaders of the present plan."""

from __future__ import annotations

import json
from collections.abc import Hashable, Sequence
from typing import Any

from raypar.job import DataConfig, Job
from raypar.model.random_state import preserve_random_state
from raypar.plan import Microbatches
from raypar.plan.pieces import AdoptPlanCommand
from raypar.worker.data.data_process_pool import DataProcesses
from raypar.worker.data.microbatch_loader import MicrobatchLoader
from raypar.worker.data.mixed_order import MixedOrder
from raypar.worker.data.sample_order import SampleOrder
from raypar.worker.data.sample_reader import SampleReader
from raypar.worker.data.stream_feed_process import StreamFeedProcess
from raypar.worker.data.stream_loader import OpenStreams, StreamLoader
from raypar.worker.data.user_dataset import MapStyleDataset, make_dataset
from raypar.worker.process.torch_state_guard import TorchStateGuard


class WorkerData:
    """What a worker reads samples from."""

    streams: OpenStreams
    """Readers of the streams of iterable training data, and microbatches that were read."""
    _loaders: list[MicrobatchLoader | StreamLoader]
    """The loaders of the present plan, to be closed."""
    _processes: dict[str | None, DataProcesses]
    """Validation set, None for training -> the data processes of its data set, if it has any."""
    _datasets: dict[tuple[Hashable, ...], MapStyleDataset]
    """Data set function and arguments -> the data set made."""

    def __init__(
        self,
        spec: Job,
        guard: TorchStateGuard,
        *,
        batch_names: Sequence[str] = (),
        stream_process: StreamFeedProcess | None = None,
    ) -> None:
        """`batch_names`: the fields of every batch that `data.collate` makes; empty: not known. `stream_process`: the node's
        data process, where one reads the job's stream for all workers of the node."""
        self._spec, self._guard, self._batch_names = spec, guard, batch_names
        self.streams, self._processes = OpenStreams(stream_process), {}
        self._loaders, self._datasets = [], {}

    def dataset(self, data: DataConfig) -> MapStyleDataset:
        """The user's data set, made once per worker and data specification."""
        given = ((name, _identity(value)) for name, value in sorted(data.args.items()))
        key: tuple[Hashable, ...] = (_identity(data.function), *given, *map(_identity, data.mix))
        if key not in self._datasets:
            with self._guard.watching(f"the data set function {data.label}"):
                self._datasets[key] = make_dataset(data)
        return self._datasets[key]

    def all_fields(self, data: DataConfig, batching: Microbatches) -> tuple[str, ...]:
        """All fields of the batches of `data` that are tensors."""
        with preserve_random_state():
            dataset = self.dataset(data)
            reader, size = SampleReader.of(dataset, data, self._spec.seed, guard=self._guard), len(dataset)
            return reader.tensor_names([(0, index % size) for index in batching.samples(0)])

    def make_loader(
        self,
        of_set: str | None,
        data: DataConfig,
        batching: Microbatches,
        *,
        fields: Sequence[str],
        readers: int,
        own: Sequence[int],
    ) -> MicrobatchLoader | StreamLoader:
        """A loader of these fields of a validation set, or of training (None). `readers`: stages that read them here; `own`:
        the microbatches that this worker runs."""
        training = of_set is None
        names = self._batch_names if training else ()
        loader: MicrobatchLoader | StreamLoader
        if data.streams is not None:
            loader = StreamLoader(
                data,
                batching,
                seed=self._spec.seed,
                fields=fields,
                own=own,
                streams=self.streams if training else None,
                keeps=training,
                guard=self._guard,
                batch_names=names,
            )
        else:
            dataset = self.dataset(data)
            loader = MicrobatchLoader(
                dataset,
                data,
                self._order_of(dataset, training=training),
                batching,
                seed=self._spec.seed,
                fields=fields,
                readers=readers,
                guard=self._guard,
                batch_names=names,
                processes=self._processes.setdefault(of_set, DataProcesses(data, self._spec.seed)),
            )
        self._loaders.append(loader)
        return loader

    def _order_of(self, dataset: MapStyleDataset, *, training: bool) -> SampleOrder | MixedOrder:
        if training:
            return SampleOrder.of_job(self._spec, dataset, self._guard)
        return SampleOrder(self._spec.seed, len(dataset), shuffle=False)

    def learn_streams(self, part: AdoptPlanCommand) -> None:
        """Take over what all workers have found of the streams of iterable data."""
        digests = {(part.steps_done - 1, microbatch): digest for microbatch, digest in part.digests.items()}
        self.streams.learn(part.epochs, part.cursors, digests)

    def close_loaders(self) -> None:
        """Let go of the loaders: there is another plan."""
        for loader in self._loaders:
            loader.close()
        self._loaders.clear()

    def close(self) -> None:
        """Let go of all, and end the data processes. Idempotent."""
        self.close_loaders()
        for processes in self._processes.values():
            processes.close()
        self.streams.close()


def _identity(value: Any) -> str:
    """Text that is equal for two values only if they have equal JSON or are one object.

    Names and `repr` would not do: two lambdas have the same ones, and two large tensors may.
    """
    try:
        return json.dumps(value)
    except (TypeError, ValueError):
        return f"object {id(value)}"
