"""The user's data set: made by the function that the job names, read by id or as a stream, and refused if it can be neither."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Sequence
from typing import Any, Protocol, overload

import torch

from raypar.data.ray_rows import is_ray_data
from raypar.data.token_files import TokenFile
from raypar.errors import DataError, RayparError, UserCodeError, with_article
from raypar.job import DataConfig, FunctionConfig
from raypar.user_code.stop_signals import reraise_ctrl_c
from raypar.user_code.user_code_errors import error_text
from raypar.worker.data.data_loader_parts import (
    check_batch_size,
    check_job_says_the_same,
    data_loader_parts,
    is_data_loader,
)
from raypar.worker.data.mixture_dataset import Mixture, StreamMixture


class MapStyleDataset(Protocol):
    """The user's data set, whose samples are read by id."""

    def __len__(self) -> int:
        """Number of samples."""

    def __getitem__(self, index: int, /) -> Any:
        """A sample: a mapping, a tuple or list, or one tensor or number."""


def is_stream(dataset: object) -> bool:
    """Whether the samples of a data set can only be read one after the other: it has `__iter__`, and is not map-style."""
    if isinstance(dataset, torch.utils.data.IterableDataset):
        return True  # has a __getitem__ that only raises
    if is_data_loader(dataset) or is_ray_data(dataset):  # of Ray a data set
        return False
    if isinstance(dataset, (set, frozenset)):  # it has no order
        return False
    return hasattr(dataset, "__iter__") and not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__"))


def make_dataset(spec: DataConfig, key: str = "data", *, batch_size: int | None = None) -> Any:
    """Call the user's data set function; of a `DataLoader` that it returns the data set is taken.

    Its samples are read by id, or it is a stream (`is_stream`). Raises `UserCodeError` if the function raises, `DataError` if
    samples can be read in neither way, `ConfigError` for a `DataLoader` that says otherwise than the job. `key`: the job's key
    of the data; `batch_size`: the job's, compared with a loader's.
    """
    if spec.mix:
        return _make_mixture(spec, key)
    dataset = _call(spec, key)
    if is_data_loader(dataset):
        parts = data_loader_parts(dataset, f"{key}: what the function {spec.label} returned")
        check_job_says_the_same(parts, spec, key)
        if batch_size is not None:
            check_batch_size(parts, batch_size, f"{key}: what the function {spec.label} returned")
        dataset = parts.dataset
    if not is_stream(dataset):
        dataset_size(dataset, spec.label if key == "data" else f"{key} {spec.label}")
    return dataset


def _call(spec: FunctionConfig, key: str) -> Any:
    """What a data set function returns. Raises `UserCodeError` if it raises."""
    try:
        return spec.call(f"{key}.args")
    except RayparError:
        raise
    except BaseException as error:  # some classes of libraries are no Exception
        reraise_ctrl_c(error)
        raise UserCodeError(
            f"the data set function {spec.label} raised {error_text(error)}\n{traceback.format_exc()}",
            cure=f"run it by itself with {key}.args",
        ) from error


def _make_mixture(spec: DataConfig, key: str) -> Mixture | StreamMixture:
    """The data set of `data.mix`. Raises `DataError` for sources that are not all map-style or all iterable, and what makes a
    source."""
    sources: list[Any] = []
    for number, source in enumerate(spec.mix):
        name = f"{key}.mix.{number}"
        made = _call(source, name)
        if is_data_loader(made):
            raise DataError(
                f"{name} {source.label} is {with_article(type(made).__name__)}, whose batches have samples of one source",
                cure="give the data set in it (loader.dataset); data.collate is for all sources",
            )
        if is_stream(made) != is_stream(sources[0] if sources else made):
            raise DataError(
                f"{name} {source.label} is {with_article(type(made).__name__)}, which is "
                f"{'iterable' if is_stream(made) else 'read by id'}, and {key}.mix.0 {spec.mix[0].label} is not",
                cure="mix data sets that are all map-style, with __len__ and __getitem__, or all iterable; a map-style one is "
                "iterable by a generator function: yield from data",
            )
        if not is_stream(made):
            dataset_size(made, f"{name} {source.label}")
        sources.append(made)
    digests = _Digests(sources)
    return StreamMixture(sources, digests) if is_stream(sources[0]) else Mixture(sources, digests)


class _Digests(Sequence[str | None]):
    """What sources say of what they hold, asked when it is wanted: some read pieces of their files for it."""

    def __init__(self, sources: Sequence[object]) -> None:
        self._sources = sources

    def __len__(self) -> int:
        return len(self._sources)

    @overload
    def __getitem__(self, index: int) -> str | None: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[str | None]: ...

    def __getitem__(self, index: int | slice) -> str | Sequence[str | None] | None:
        return _Digests(self._sources[index]) if isinstance(index, slice) else content_digest(self._sources[index])


def require_map_style(dataset: Any, what: str) -> None:
    """Raise `DataError` for a data set without `__len__` and `__getitem__`. `what`: its name, for messages."""
    if hasattr(dataset, "iloc") and hasattr(dataset, "columns"):
        raise DataError(
            f"{what} is {with_article(type(dataset).__name__)}, whose [0] is a column, not a sample",
            cure="give a list of samples: frame.to_dict('records'), or torch.utils.data.TensorDataset(inputs, targets)",
        )
    if is_stream(dataset) or not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        listed = "sorted(data) is one of a set" if isinstance(dataset, (set, frozenset)) else "list(data) is one"
        if is_ray_data(dataset):
            listed = "of Ray Data dataset.take_all() is one; or write_parquet(FOLDER) once, and data.parquet"
        raise DataError(
            f"{what} is {with_article(type(dataset).__name__)}, which cannot be read by sample id",
            cure="give a map-style data set, with __len__ and __getitem__, such as a list of samples "
            f"({listed}), or a function or class that makes an iterable one, with __iter__",
        )


def reads_by_list(dataset: object) -> bool:
    """Whether samples are read by a list of ids: of a `TokenFile`, and of a `datasets.Dataset` that gives plain Python values,
    which draw no random numbers, and give the same values so. Transforms of the latter may draw some, and NumPy's format has
    other types in a list. A class that derives from these and has samples of its own is read by id."""
    kinds = (TokenFile, getattr(sys.modules.get("datasets"), "Dataset", None))
    kind = next((kind for kind in kinds if isinstance(kind, type) and isinstance(dataset, kind)), None)
    if kind is None or getattr(type(dataset), "__getitem__", None) is not getattr(kind, "__getitem__", None):
        return False
    if kind is TokenFile:
        return True
    chosen = getattr(dataset, "format", None)
    return isinstance(chosen, dict) and chosen.get("type") in (None, "python")


def content_digest(dataset: object) -> str | None:
    """What a data set says of all that it holds, by an attribute `raypar_content_digest`; None if it says nothing.

    A digest may have parts, by `+`: what was added to it later. Checkpoints of before have the first parts.
    """
    found = getattr(dataset, "raypar_content_digest", None)
    return found if isinstance(found, str) else None


def dataset_size(dataset: Any, label: str = "") -> int:
    """Number of samples. Raises `DataError` for an empty data set and for one without `__len__` and `__getitem__`."""
    name = label or type(dataset).__name__
    require_map_style(dataset, f"data set {name}")
    try:
        size = len(dataset)
    except TypeError as error:
        raise DataError(f"data set {name} has no length: {error}", cure="give it a __len__ that returns an int") from error
    except BaseException as error:  # some classes of libraries are no Exception
        reraise_ctrl_c(error)
        raise UserCodeError(
            f"data set {name} has no length: it raised {error_text(error)}\n{traceback.format_exc()}",
            cure="call its __len__ by itself",
        ) from error
    if size == 0:
        raise DataError(f"data set {name} is empty", cure="check its arguments: its path, split and context length")
    return size
