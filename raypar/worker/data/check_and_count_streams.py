"""Finds out before a run whether data is iterable, and as how many streams it is read; refuses streams that begin alike."""

from __future__ import annotations

import contextlib
import hashlib
import pickle
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from raypar.errors import ConfigError, DataError
from raypar.job import DataConfig, Job
from raypar.job.data_section import SamplesConfig, ValidationSetConfig
from raypar.model.random_state import preserve_random_state
from raypar.plan.wording import count_noun
from raypar.user_code.stop_signals import reraise_ctrl_c
from raypar.user_code.user_code_errors import USER_CODE_ERRORS
from raypar.worker.data.mixed_stream_reader import sources_with_seeds
from raypar.worker.data.mixture_dataset import StreamMixture, known_parts
from raypar.worker.data.pickled_sample import pickle_sample
from raypar.worker.data.stream_feed import unpicklable
from raypar.worker.data.stream_source import MadeDatasets, StreamSource
from raypar.worker.data.user_dataset import MapStyleDataset, is_stream, make_dataset

S = TypeVar("S", bound=ValidationSetConfig)

COMPARED = 4
"""How many samples at the beginning of two streams are compared."""


class ResolvedStreams(NamedTuple):
    """A job whose data is known to be read by id or as streams."""

    job: Job
    """The job, with `streams` for data that is iterable."""
    dataset: MapStyleDataset
    """The training data; of iterable data no more than what the data set function returned."""
    notes: tuple[str, ...] = ()
    """Lines for the user."""


def resolve_streams(spec: Job) -> ResolvedStreams:
    """The job with the number of streams of its iterable data, which are opened and compared at their beginnings.

    Raises `ConfigError` or `DataError` for keys that do not fit the data, and for streams that begin alike or are empty.
    """
    dataset = make_dataset(spec.data, batch_size=spec.batch_size)
    notes: list[str] = []
    with preserve_random_state():
        if is_stream(dataset):
            _refuse_keys(spec.data, "data")
            streams, note = _count_streams(spec, dataset)
            if spec.data.processes:
                _check_process(spec, dataset, streams)
            notes += [note] * bool(note)
            if not spec.data.shuffle_window and spec.data.shuffle is True:
                notes.append(
                    "data is iterable: its samples are taken in its own order, since what is not read yet cannot be shuffled\n"
                    "  cure: data.shuffle_window: 1000, say, shuffles windows of so many samples; data.shuffle: false says "
                    "that the order is right"
                )
            spec = spec.replace(data=spec.data.replace(streams=streams))
        else:
            _refuse_streams(spec.data, "data")
            line = getattr(dataset, "line_about_random_order", None)
            notes += [line] if isinstance(line, str) and spec.data.shuffle is not False else []
        if spec.validation is not None:
            found = {name: _with_streams(spec, one, key_of_set(name)) for name, one in spec.validation_sets.items()}
            spec = spec.replace(validation=found.get("", spec.validation.replace(sets=found)))
    return ResolvedStreams(spec, dataset, tuple(notes))


def key_of_set(name: str) -> str:
    """The job's key of a validation set; the name of one alone is empty."""
    return f"validation.{name}" if name else "validation"


def _with_streams(spec: Job, one: S, key: str) -> S:
    """A validation set, with the number of its streams if it is iterable. Raises as `resolve_streams`."""
    data = spec.data_of_set(one)
    if not is_stream(make_dataset(data, key)):
        _refuse_streams(one, key)
        return one
    _refuse_keys(one, key)
    if not one.samples:
        raise ConfigError(
            f"{key} is iterable, and nothing says where a pass ends",
            cure=f"set {key}.samples: how many are used in each pass, from the first on",
        )
    if (streams := one.streams or 1) > 1:
        _beginnings(data, streams, spec.seed)
    return one.replace(streams=streams)


def _refuse_streams(data: SamplesConfig, key: str) -> None:
    """Raise `ConfigError` for keys of iterable data beside a map-style data set."""
    for name in ("streams", "shuffle_window"):
        if value := getattr(data, name, None):
            raise ConfigError(
                f"{key}.{name} is {value}, and data set {data.label} is map-style: its samples are read by id",
                cure=f"leave {key}.{name} out: the whole data set is shuffled in each epoch",
            )


def _refuse_keys(data: SamplesConfig, key: str) -> None:
    """Raise `ConfigError` for keys of map-style data beside an iterable data set."""
    if getattr(data, "shuffle", True) == "indexed":
        raise ConfigError(
            f"{key}.shuffle is indexed, and data set {data.label} is iterable: its samples have no ids",
            cure=f"set {key}.shuffle_window: how many samples at a time are shuffled",
        )
    for name in ("sampler", "weights", "group_by"):
        if getattr(data, name, None) is not None:
            raise ConfigError(
                f"data.{name} is given, and data set {data.label} is iterable: its samples have no ids",
                cure="give a map-style data set, with __len__ and __getitem__; or let the data set itself choose its samples",
            )
    if getattr(data, "drop_last", False):
        raise ConfigError(
            f"{key}.drop_last is true, and data set {data.label} is iterable: where it ends is known when it has ended",
            cure=f"leave {key}.drop_last out: the last samples of an epoch and the first of the next one are a batch together",
        )
    if data.processes and key != "data":
        raise ConfigError(
            f"{key}.processes is {data.processes}, and data set {data.label} is iterable: it is read in the workers themselves",
            cure=f"leave {key}.processes out; a data set may start threads that read ahead of its iterator",
        )


def _check_process(spec: Job, dataset: object, streams: int) -> None:
    """Raise `ConfigError` for `data.processes` of a stream that no data process of a node reads, and `DataError` for samples
    that it cannot hand to workers."""
    data = spec.data
    if streams > 1:
        raise ConfigError(
            f"data.processes is {data.processes}, and data set {data.label} is read as {streams} streams, by the workers "
            "themselves",
            cure="leave data.processes out; with data.streams: 1 and data.processes: 1 one process of each node reads it, for "
            "all its workers",
        )
    if data.processes > 1:
        raise ConfigError(
            f"data.processes is {data.processes}, and data set {data.label} is iterable: one process of a node can read it",
            cure="set data.processes: 1, or leave it out; a data set may start threads that read ahead of its iterator",
        )
    sources = dataset.sources if isinstance(dataset, StreamMixture) else [dataset]
    if any(hasattr(source, "line_about_one_stream") for source in sources):
        raise ConfigError(
            "data.processes is 1, and data has a ray.data.Dataset, whose rows an actor computes and hands to all workers",
            cure="leave data.processes out",
        )
    for source, seed in sources_with_seeds(data, spec.seed):
        opened = StreamSource(source, 0, 1, seed)
        opened.begin(0)
        for sample in opened.read():
            try:
                pickle_sample(sample)
            except USER_CODE_ERRORS as error:
                reraise_ctrl_c(error)
                raise unpicklable(source.label, error, "a sample") from error
        opened.close()


def _count_streams(spec: Job, dataset: object) -> tuple[int, str]:
    """(number of streams, a line for the user or nothing). All streams have been opened."""
    asked, most = spec.data.streams, spec.microbatches
    if asked is not None and asked > most:
        raise ConfigError(
            f"data.streams is {asked}, and a step has {count_noun(most, 'microbatch', 'microbatches')}: stream {most} would "
            "never be read",
            cure=f"set data.streams <= {most}, or more microbatches",
        )
    parts = known_parts(dataset)
    if asked is not None and parts is not None and asked > parts:
        raise ConfigError(
            f"data.streams is {asked}, and data set {spec.data.label} has {count_noun(parts, 'shard')}: others are empty",
            cure=f"set data.streams <= {parts}, or save the data in more shards",
        )
    if asked is not None:
        _beginnings(spec.data, asked, spec.seed)
        return asked, ""
    for streams in (number for number in range(most, 1, -1) if most % number == 0 and number <= (parts or most)):
        try:
            _beginnings(spec.data, streams, spec.seed)
        except AlikeError:
            break
        except EmptyStreamError:
            continue
        return streams, ""
    _beginnings(spec.data, 1, spec.seed)
    own_line = getattr(dataset, "line_about_one_stream", None)
    if isinstance(own_line, str):
        return 1, own_line
    return 1, (
        "data is read as one stream, by every worker of the first stage: each drops the samples of the others' microbatches\n"
        "  cure: divide the data set by torch.utils.data.get_worker_info(), if reading is what takes the time, or set "
        "data.processes: 1, and one process of each node reads it for all its workers"
    ) * (most > 1 and not spec.data.processes)


class AlikeError(DataError):
    """Two streams begin with the same samples."""


class EmptyStreamError(DataError):
    """A stream has no samples."""


def _beginnings(data: DataConfig, streams: int, seed: int) -> None:
    """Raise `DataError` for a stream without samples, and for two streams that begin with the same ones.

    The streams are read with equal seeds, so that noise in the samples does not hide that they are the same. Of a mixture each
    source's are compared.
    """
    for source, own_seed in sources_with_seeds(data, seed):
        _beginnings_of_source(source, streams, own_seed)


def _beginnings_of_source(data: DataConfig, streams: int, seed: int) -> None:
    found: dict[tuple[bytes, ...], int] = {}
    made = MadeDatasets()
    for stream in range(streams):
        samples: list[object] = []
        with contextlib.closing(StreamSource(data, stream, streams, seed, seeded_as=0, made=made)) as source:
            source.begin(0)
            while len(samples) < COMPARED and (one := source.read()):
                samples += one
        if not samples:
            raise EmptyStreamError(
                f"stream {stream} of {streams} of data set {data.label} has no samples",
                cure=f"set data.streams: {stream or 1}, or divide the data set into {streams} parts that have some"
                if streams > 1
                else "check data.args: its path and split",
            )
        other = found.setdefault(tuple(digest_of_sample(sample) for sample in samples), stream)
        if other != stream:
            raise AlikeError(
                f"streams {other} and {stream} of {streams} of data set {data.label} begin with the same "
                f"{count_noun(len(samples), 'sample')}: every sample would be read {streams} times",
                cure="divide it in __iter__ by torch.utils.data.get_worker_info() (.id, .num_workers), or set data.streams: 1",
            )


def digest_of_sample(sample: object) -> bytes:
    """8 bytes of hash of a sample: a tensor, an array, anything that can be pickled, or a container of these."""
    found = hashlib.blake2b(digest_size=8)
    _add(found, sample)
    return found.digest()


def _add(found: hashlib.blake2b, value: object) -> None:
    if isinstance(value, Mapping):
        for key in value:
            found.update(repr(key).encode())
            _add(found, value[key])
    elif isinstance(value, (list, tuple)):
        found.update(f"{len(value)}".encode())
        for part in value:
            _add(found, part)
    elif is_dataclass(value) and not isinstance(value, type):
        for part in fields(value):
            _add(found, getattr(value, part.name))
    elif isinstance(value, Tensor):
        found.update(f"{value.dtype} {tuple(value.shape)}".encode())
        found.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    else:
        try:
            found.update(pickle.dumps(value))
        except USER_CODE_ERRORS as error:
            reraise_ctrl_c(error)
            found.update(str(type(value)).encode())
