"""Traces a captured model for all shapes of `data.pad.to` and `data.pack` before the first step: no step waits for a trace."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping

from torch import Tensor

from raypar.errors import ModelError
from raypar.job import DataConfig, Job
from raypar.model.capture.module_graph import trace_ahead, traces_of
from raypar.model.graph import Graph
from raypar.plan import Microbatches
from raypar.worker.data.packing import Packing, batches_of_all_forms
from raypar.worker.data.padding import Padding
from raypar.worker.data.trial_batches_of_padded_lengths import LadderShapes, sizes_of_microbatches


def trace_ladders_of_validation(spec: Job, graph: Graph, batching: Microbatches) -> list[str | None]:
    """As `trace_ladder`, of each validation set; their microbatches are `batching`."""
    return [
        trace_ladder(spec, graph, part, training=False, data=spec.data_of_set(spec.validation_sets[name]))
        for name, part in batching.of_each_set.items()
    ]


def trace_ladder(
    spec: Job, graph: Graph, batching: Microbatches, *, training: bool, data: DataConfig | None = None
) -> str | None:
    """Trace the model for every shape that microbatches of `batching` may have under `data.pad.to`, or `data.pack.rows`; what
    has been traced is not traced again. Does nothing for models that are not captured, and without such a key. `data`: None is
    that of training.

    Returns a line for the user about a shape that could not be traced with values made up for it: it is tried again when such
    a batch comes.
    """
    cache, data = traces_of(graph), spec.training_data if data is None else data
    if cache is None or (data.pad is None and data.pack is None):
        return None
    assert data.target is not None, "Job.training_data and validation_data name it"
    sizes = tuple(sizes_of_microbatches(batching))
    batches: Iterable[Mapping[str, Tensor]] = ()
    if data.pack is not None:
        packing = Packing(data.pack, data.target, data.names)
        key: Hashable = training, "pack", data.pack.to, data.pack.rows, data.pack.mask
        batches = batches_of_all_forms(cache.first_batch, packing)
    elif data.pad is not None and data.pad.to and cache.first_lengths:
        key = training, "pad", data.pad.to, data.pad.fields, sizes
        shapes = LadderShapes(Padding(data.pad, data.target, data.names), cache.first_lengths)
        batches = shapes.batches(cache.first_batch, sizes)
    else:
        return None
    if key not in cache.ahead:
        cache.ahead[key] = _trace(graph, batches, f"data.{'pad' if data.pack is None else 'pack'}", training=training)
    return cache.ahead[key]


def _trace(graph: Graph, batches: Iterable[Mapping[str, Tensor]], key: str, *, training: bool) -> str | None:
    """Trace the model for batches. Returns what `trace_ladder` does. `key`: the job's key that gives them their shapes."""
    made = _Shown(batches)
    try:
        trace_ahead(graph, made, training=training)
    except ModelError as error:
        return (
            f"{key}: the model could not be recorded ahead for {made.last}: {error.what.splitlines()[0]}\n"
            "  cure: none is needed if batches of this shape have other values; else try the model on one of them by itself"
        )
    return None


class _Shown:
    """Batches, with the one that was given last."""

    def __init__(self, batches: Iterable[Mapping[str, Tensor]]) -> None:
        self._batches = batches
        self.last = ""
        """The shapes of the batch that was given last, in words."""

    def __iter__(self) -> Iterator[Mapping[str, Tensor]]:
        for batch in self._batches:
            self.last = ", ".join(f"{name} {list(value.shape)}" for name, value in batch.items())
            yield batch
