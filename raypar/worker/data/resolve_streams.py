"""Finds out before a run whether data is iterable, and as how many streams it is read; refuses streams that begin alike."""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from raypar.errors import ConfigError, DataError
from raypar.job import DataConfig, Job
from raypar.job.function_section import SamplesConfig
from raypar.model.random_state import preserve_random_state
from raypar.plan.wording import count_noun
from raypar.user_code.user_code_errors import USER_CODE_ERRORS, reraise_ctrl_c
from raypar.worker.data.stream_source import StreamSource
from raypar.worker.data.user_dataset import MapStyleDataset, is_stream, make_dataset

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
        if spec.validation is not None and is_stream(make_dataset(spec.validation_data, "validation")):
            _refuse_keys(spec.validation, "validation")
            if not spec.validation.samples:
                raise ConfigError(
                    "validation is iterable, and nothing says where a pass ends",
                    cure="set validation.samples: how many are used in each pass, from the first on",
                )
            if (streams := spec.validation.streams or 1) > 1:
                _beginnings(spec.validation_data, streams, spec.seed)
            spec = spec.replace(validation=spec.validation.replace(streams=streams))
        elif spec.validation is not None:
            _refuse_streams(spec.validation, "validation")
    return ResolvedStreams(spec, dataset, tuple(notes))


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
    if data.processes:
        raise ConfigError(
            f"{key}.processes is {data.processes}, and data set {data.label} is iterable: it is read in the workers themselves",
            cure=f"leave {key}.processes out; a data set may start threads that read ahead of its iterator",
        )


def _count_streams(spec: Job, dataset: object) -> tuple[int, str]:
    """(number of streams, a line for the user or nothing). All streams have been opened."""
    asked, most = spec.data.streams, spec.microbatches
    if asked is not None and asked > most:
        raise ConfigError(
            f"data.streams is {asked}, and a step has {count_noun(most, 'microbatch', 'microbatches')}: stream {most} would "
            "never be read",
            cure=f"set data.streams <= {most}, or more microbatches",
        )
    parts = _known_parts(dataset)
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
    return 1, (
        "data is read as one stream, by every worker of the first stage: each drops the samples of the others' microbatches\n"
        "  cure: divide the data set by torch.utils.data.get_worker_info(), if reading is what takes the time"
    ) * (most > 1)


def _known_parts(dataset: object) -> int | None:
    """Into how many parts the data set can be divided, where it says so: `num_shards` of `datasets`."""
    found = getattr(dataset, "num_shards", getattr(dataset, "n_shards", None))
    return found if isinstance(found, int) and not isinstance(found, bool) and found > 0 else None


class AlikeError(DataError):
    """Two streams begin with the same samples."""


class EmptyStreamError(DataError):
    """A stream has no samples."""


def _beginnings(data: DataConfig, streams: int, seed: int) -> None:
    """Raise `DataError` for a stream without samples, and for two streams that begin with the same ones.

    The streams are read with equal seeds, so that noise in the samples does not hide that they are the same.
    """
    found: dict[tuple[bytes, ...], int] = {}
    for stream in range(streams):
        source = StreamSource(data, stream, streams, seed, seeded_as=0)
        source.begin(0)
        samples: list[object] = []
        while len(samples) < COMPARED and (one := source.read()):
            samples += one
        source.close()
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
