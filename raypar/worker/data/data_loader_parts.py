"""Takes a `DataLoader` apart: each part is a key of a job, and what has no key is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler, default_convert

from raypar.errors import ConfigError, with_article
from raypar.job import DataConfig


@dataclass(frozen=True)
class DataLoaderParts:
    """What a `DataLoader` says about data."""

    dataset: Any
    """Its data set."""
    of_stream: bool
    """Whether that is iterable: the loader has no order of its own then."""
    collate: Callable[..., Any] | None
    """Its own collate function; None: PyTorch's, in whose place raypar's stacks fields."""
    batch_size: int | None
    """Samples of a batch; None: it makes none."""
    shuffle: bool = False
    """Whether its samples are shuffled."""
    sampler: Any = None
    """Its sampler, if that does more than to shuffle or not; else None."""
    drop_last: bool = False
    """Whether it leaves out a batch that is not whole."""
    processes: int = 0
    """Its `num_workers`; 0 of an iterable data set, whose workers are streams."""


def is_data_loader(value: object) -> bool:
    """Whether a value is a `DataLoader`, also one of another library that is used in its place."""
    return hasattr(value, "dataset") and hasattr(value, "batch_sampler") and not isinstance(value, type)


def data_loader_parts(loader: Any, what: str) -> DataLoaderParts:
    """The parts of a `DataLoader` (`what`, for messages). Raises `ConfigError` for those that no key of a job stands for."""
    name, batch_sampler = f"{what} is {with_article(type(loader).__name__)}", loader.batch_sampler
    if loader.worker_init_fn is not None:
        divides = "; a data set divides itself in __iter__, by get_worker_info()" if _of_stream(loader) else ""
        instead = f"each sample is read with generators that are seeded for it{divides}"
        raise _no_key(name, "worker_init_fn", instead)
    if _of_stream(loader):
        return _parts_of_stream(loader, name)
    if batch_sampler is not None and type(batch_sampler) is not BatchSampler:
        raise _no_key(name, f"batch_sampler, {with_article(type(batch_sampler).__name__)}", "batches are cut from data.shuffle")
    batches = loader if batch_sampler is None else batch_sampler  # a loader that is given one has none of its settings itself
    sampler = batches.sampler
    is_usual = type(sampler) is SequentialSampler
    if type(sampler) is RandomSampler:
        is_usual = not sampler.replacement and sampler.num_samples == len(loader.dataset)
        if sampler.generator is not None:
            raise _no_key(name, "generator", "the order follows from `seed`")
    return DataLoaderParts(
        dataset=loader.dataset,
        of_stream=False,
        collate=_own_collate(loader),
        shuffle=type(sampler) is not SequentialSampler,
        sampler=None if is_usual else sampler,
        drop_last=bool(batches.drop_last),
        batch_size=batches.batch_size,
        processes=loader.num_workers,
    )


def _of_stream(loader: Any) -> bool:
    return isinstance(loader.dataset, torch.utils.data.IterableDataset)


def _own_collate(loader: Any) -> Callable[..., Any] | None:
    return None if loader.collate_fn in (torch.utils.data.default_collate, default_convert) else loader.collate_fn


def _parts_of_stream(loader: Any, name: str) -> DataLoaderParts:
    """The parts of a loader of an iterable data set; its workers are streams, of which the job says how many."""
    if loader.batch_size is None:
        raise ConfigError(
            f"{name} with batch_size=None, so that the data set gives batches itself, and raypar makes batches of samples",
            cure="let the data set give samples, or give it itself (loader.dataset) if it does",
        )
    if loader.drop_last:
        raise _no_key(name, "drop_last", "the last samples of an epoch and the first of the next one are a batch together")
    if loader.generator is not None:
        raise _no_key(name, "generator", "the generators are seeded by `seed` before each sample")
    return DataLoaderParts(
        dataset=loader.dataset,
        of_stream=True,
        collate=_own_collate(loader),
        batch_size=loader.batch_size,
    )


def _no_key(name: str, part: str, instead: str) -> ConfigError:
    return ConfigError(f"{name} with its own {part}, which raypar does not use", cure=f"leave it out: {instead}")


def check_batch_size(parts: DataLoaderParts, batch_size: int, what: str) -> None:
    """Raise `ConfigError` for a `DataLoader` (`what`) whose batches have another size than those of the job."""
    if parts.batch_size not in (None, batch_size):
        raise ConfigError(
            f"{what} is a DataLoader with batch_size {parts.batch_size:,}, and the job's batch_size is {batch_size:,}",
            cure=f"give it batch_size={batch_size}, or None; or give the data set in it (loader.dataset)",
        )


def check_job_says_the_same(parts: DataLoaderParts, spec: DataConfig, key: str) -> None:
    """Raise `ConfigError` for a `DataLoader` that a job's function returns, if the job's own keys say otherwise: workers and
    checkpoints know these only. `key`: the job's key of the data."""
    name = f"{key}: the function {spec.label} returned a DataLoader"
    if parts.collate is not None and spec.collate is None:
        label = getattr(parts.collate, "__qualname__", type(parts.collate).__name__)
        raise ConfigError(
            f"{name} with the collate_fn {label}", cure=f"name it in the job, {key}.collate: module:{label}, or leave it out"
        )
    if parts.sampler is not None and spec.sampler is None:
        raise ConfigError(
            f"{name} with its own sampler, {with_article(type(parts.sampler).__name__)}",
            cure="name it in the job, data.sampler, or leave it out" if key == "data" else "leave it out",
        )
    if parts.of_stream:
        return
    if not parts.shuffle and spec.shuffle is not False and not spec.names_ids:
        raise ConfigError(
            f"{name} that does not shuffle, and {key}.shuffle is {str(spec.shuffle).lower()}",
            cure=f"set {key}.shuffle: false, or give the loader shuffle=True",
        )
    if parts.drop_last and not spec.drop_last:
        raise ConfigError(
            f"{name} with drop_last=True, and {key}.drop_last is false"
            if key == "data"
            else f"{name} with drop_last=True, and a validation reads every sample",
            cure=f"set {key}.drop_last: true, or leave drop_last out" if key == "data" else "leave drop_last out",
        )
