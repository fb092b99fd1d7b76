"""Reads the first microbatch of the training data and of each validation set before a run, and checks it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import Tensor

from raypar.errors import ConfigError, DataError, RayparError
from raypar.files.json_type import Json
from raypar.job import Job
from raypar.model.graph import Graph
from raypar.model.random_state import preserve_random_state
from raypar.worker.data.check_and_count_streams import key_of_set
from raypar.worker.data.data_fingerprint import fingerprint_of_samples, fingerprint_of_validation_set
from raypar.worker.data.packing import require_boundaries
from raypar.worker.data.sample_order import SampleOrder, SamplePosition
from raypar.worker.data.sample_reader import SampleReader
from raypar.worker.data.sampler_weights_group_by import refuse_chance
from raypar.worker.data.stream_loader import FirstSamples, first_samples
from raypar.worker.data.user_dataset import MapStyleDataset, make_dataset
from raypar.worker.make_worker_assignments import batching_of_set
from raypar.worker.metrics.metric import make_metrics
from raypar.worker.process.torch_state_guard import TorchStateGuard

SAMPLES_READ_TWICE = 2
"""So many samples of each data set are read twice before a run."""


def check_validation_sets(spec: Job, graph: Graph, guard: TorchStateGuard) -> tuple[dict[str, int], dict[str, Json]]:
    """(validation set -> number of its samples, set -> its fingerprint). Raise for what is wrong with the first microbatch of
    one."""
    counts = {name: _count_samples_of_set(spec, name) for name in spec.validation_sets}
    found = {name: _check_first_microbatch_of_set(spec, graph, name, count, guard) for name, count in counts.items()}
    _refuse_sets_that_differ_in_kind({name: batch for name, (batch, _) in found.items()})
    return counts, {name: fingerprint for name, (_, fingerprint) in found.items() if fingerprint}


def _count_samples_of_set(spec: Job, name: str) -> int:
    """How many samples of a validation set a pass has."""
    one = spec.validation_sets[name]
    if one.streams is not None:
        return one.samples
    size = len(make_dataset(spec.data_of_set(one), key_of_set(name)))
    return min(size, one.samples or size)


def check_first_microbatch(
    spec: Job, graph: Graph, dataset: MapStyleDataset, guard: TorchStateGuard
) -> tuple[tuple[str, ...], tuple[str, ...] | None, dict[str, Json]]:
    """The fields of the first microbatch, those of them that metrics of the batch get, None without such metrics, and the
    fingerprint of the samples, empty of iterable data.

    Raises `DataError` for a `data.collate` whose result depends on the process.
    """
    order, fingerprint = None, dict[str, Json]()
    if spec.data.streams is not None:
        dataset = first_samples(spec)
        places = [(0, index) for index in range(len(dataset))]
    else:
        refuse_chance(spec, dataset)
        order = SampleOrder.of_job(spec, dataset)
        places = order.ids(0, len(spec.batching.samples(0)))
    reader = SampleReader.of(dataset, spec.training_data, spec.seed, guard=guard)
    _check_batch(reader, places, _fields_read(spec, graph), key_of_pad="data")
    reads_batch = any(metric.needs_batch for metric in make_metrics(spec.metrics, spec.loss_target_name).values())
    with preserve_random_state():
        names = reader.field_names(places)
        if order is not None:
            fingerprint = fingerprint_of_samples(spec, dataset, order, _fields_read(spec, graph), guard)
        return names, reader.tensor_names(places) if reads_batch else None, fingerprint


def _fields_read(spec: Job, graph: Graph) -> tuple[str, ...]:
    """The fields of a batch that the model and the loss read."""
    return tuple(dict.fromkeys([*graph.batch_fields, *spec.loss_fields]))


def _check_batch(
    reader: SampleReader, places: Sequence[SamplePosition], read: Sequence[str], *, key_of_pad: str | None
) -> None:
    """Check what makes a batch of samples: names and lengths of `pad`, and that neither `collate` nor samples depend on the
    process.

    `places`: those of a microbatch; `read`: the fields that are used; `key_of_pad`: the job's key of the data to which the
    names in `pad` belong, None where they are not looked at.
    """
    with preserve_random_state():
        padding = reader.packing.padding if reader.packing is not None else reader.padding
        if reader.packing is not None:
            require_boundaries(reader.packing, read)
        if padding is not None:
            if key_of_pad is not None:
                padding.check_names(reader.field_names(places, also=padding.names_given), key_of_pad)
            is_whole = not isinstance(reader.dataset, FirstSamples)
            padding.check_lengths(reader.dataset, len(reader.dataset), read, reader.sample if is_whole else None)
        if reader.collation is not None:
            reader.collation.refuse_dependence_on_process(reader.samples(places), [index for _, index in places], (0, 0), read)
        if not isinstance(reader.dataset, FirstSamples):
            names = reader.field_names(places, also=read)
            few = places if reader.collation is not None else places[:SAMPLES_READ_TWICE]
            replace(reader, fields=tuple(name for name in read if name in names)).refuse_dependence_on_process(few)


def _check_first_microbatch_of_set(
    spec: Job, graph: Graph, name: str, samples: int, guard: TorchStateGuard
) -> tuple[Mapping[str, Tensor], dict[str, Json]]:
    """(the first microbatch of a validation set of so many samples, its fingerprint); both empty of iterable data, which is not
    read. Raise for what is wrong with it, which else would end the run when it has come there."""
    own, key = spec.validation_sets[name], key_of_set(name)
    data = spec.data_of_set(own)
    if data.streams is not None:
        return {}, {}
    dataset, read = make_dataset(data, key), _fields_read(spec, graph)
    batching = batching_of_set(spec, name, samples)
    size = len(batching.samples(0))
    places = SampleOrder(spec.seed, len(dataset), shuffle=False).ids(0, size)
    reader = replace(SampleReader.of(dataset, data, spec.seed, guard=guard), fields=read)
    try:
        _check_batch(reader, places, read, key_of_pad=None if own.pad is None and own.pack is None else key)
        with preserve_random_state():
            batch = reader.read(places)
            return batch, fingerprint_of_validation_set(spec, name, dataset, batching, read, guard)
    except ConfigError:
        raise
    except RayparError as error:
        error.add_place(key)
        raise


def _refuse_sets_that_differ_in_kind(firsts: Mapping[str, Mapping[str, Tensor]]) -> None:
    """Raise `DataError` for validation sets whose fields have other dtypes or numbers of dimensions than the first set's.

    `firsts`: validation set -> its first microbatch.
    """
    known: dict[str, tuple[str, Tensor]] = {}
    for name, batch in firsts.items():
        for key, tensor in batch.items():
            of_set, first = known.setdefault(key, (name, tensor))
            if (tensor.dtype, tensor.dim()) != (first.dtype, first.dim()):
                kinds = [f"{str(one.dtype).removeprefix('torch.')} with {one.dim()} dimensions" for one in (tensor, first)]
                raise DataError(
                    f"field {key!r} is {kinds[0]} in the validation set {name}, and {kinds[1]} in {of_set}",
                    cure="let all sets give samples of one kind: the same dtypes and numbers of dimensions; lengths may differ",
                )
