"""The user's data set: made by the function that the job names, read by id or as a stream, and refused if it can be neither."""

from __future__ import annotations

import sys
import traceback
from typing import Any, Protocol

import torch

from raypar.errors import DataError, RayparError, UserCodeError, with_article
from raypar.job import DataConfig
from raypar.user_code.user_code_errors import error_text, reraise_ctrl_c
from raypar.worker.data.data_loader_parts import (
    check_batch_size,
    check_job_says_the_same,
    data_loader_parts,
    is_data_loader,
)


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
    if is_data_loader(dataset) or hasattr(dataset, "iter_batches"):  # of Ray a data set
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
    try:
        dataset = spec.call(f"{key}.args")
    except RayparError:
        raise
    except BaseException as error:  # some classes of libraries are no Exception
        reraise_ctrl_c(error)
        raise UserCodeError(
            f"the data set function {spec.label} raised {error_text(error)}\n{traceback.format_exc()}",
            cure=f"run it by itself with {key}.args",
        ) from error
    if is_data_loader(dataset):
        parts = data_loader_parts(dataset, f"{key}: what the function {spec.label} returned")
        check_job_says_the_same(parts, spec, key)
        if batch_size is not None:
            check_batch_size(parts, batch_size, f"{key}: what the function {spec.label} returned")
        dataset = parts.dataset
    if not is_stream(dataset):
        dataset_size(dataset, spec.label)
    return dataset


def require_map_style(dataset: Any, what: str) -> None:
    """Raise `DataError` for a data set without `__len__` and `__getitem__`. `what`: its name, for messages."""
    if hasattr(dataset, "iloc") and hasattr(dataset, "columns"):
        raise DataError(
            f"{what} is {with_article(type(dataset).__name__)}, whose [0] is a column, not a sample",
            cure="give a list of samples: frame.to_dict('records'), or torch.utils.data.TensorDataset(inputs, targets)",
        )
    if is_stream(dataset) or not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        listed = "sorted(data) is one of a set" if isinstance(dataset, (set, frozenset)) else "list(data) is one"
        listed = "dataset.take_all() is such a list" if hasattr(dataset, "take_all") else listed
        raise DataError(
            f"{what} is {with_article(type(dataset).__name__)}, which cannot be read by sample id",
            cure="give a map-style data set, with __len__ and __getitem__, such as a list of samples "
            f"({listed}), or a function or class that makes an iterable one, with __iter__",
        )


def reads_by_list(dataset: object) -> bool:
    """Whether samples are read by a list of ids: of a `datasets.Dataset` that gives plain Python values, which draws no random
    numbers, and gives the same values so. Its transforms may draw some, and NumPy's format has other types in a list."""
    library = sys.modules.get("datasets")
    kind = getattr(library, "Dataset", None)
    if not isinstance(kind, type) or not isinstance(dataset, kind):
        return False
    chosen = getattr(dataset, "format", None)
    return isinstance(chosen, dict) and chosen.get("type") in (None, "python")


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
        raise DataError(f"data set {name} is empty", cure="check data.args: its path, split and context length")
    return size
