"""The user's data set: made by the function that the job names, and refused if its samples cannot be read by id."""

from __future__ import annotations

import traceback
from typing import Any, Protocol

import torch
from torch import Tensor

from raypar.errors import ConfigError, DataError, RayparError, UserCodeError, with_article
from raypar.job import DataConfig
from raypar.user_code.user_code_errors import error_text, reraise_ctrl_c


class MapStyleDataset(Protocol):
    """The user's data set, whose samples are read by id."""

    def __len__(self) -> int:
        """Number of samples."""

    def __getitem__(self, index: int, /) -> Any:
        """A sample: a mapping, a tuple or list, or one tensor or number."""


def make_dataset(spec: DataConfig, key: str = "data") -> Any:
    """Call the user's data set function. Raises `UserCodeError` if it raises, `DataError` if samples cannot be read by id.

    `key`: the job's key of the data, for messages.
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
    dataset_size(dataset, spec.label)
    return dataset


def require_map_style(dataset: Any, what: str) -> None:
    """Raise `DataError` for a data set without `__len__` and `__getitem__`. `what`: its name, for messages."""
    if hasattr(dataset, "iloc") and hasattr(dataset, "columns"):
        raise DataError(
            f"{what} is {with_article(type(dataset).__name__)}, whose [0] is a column, not a sample",
            cure="give a list of samples: frame.to_dict('records'), or torch.utils.data.TensorDataset(inputs, targets)",
        )
    if hasattr(dataset, "dataset") and hasattr(dataset, "batch_sampler"):
        raise _error_of_data_loader(dataset, what)
    iterable = isinstance(dataset, torch.utils.data.IterableDataset)  # has a __getitem__ that only raises
    if iterable or not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        listed = "dataset.take_all() is such a list" if hasattr(dataset, "take_all") else "an iterable one can be listed first"
        raise DataError(
            f"{what} is {with_article(type(dataset).__name__)}, which cannot be read by sample id",
            cure="give a map-style data set, with __len__ and __getitem__, such as a list of samples; "
            f"{listed}, or saved to files",
        )


def _error_of_data_loader(loader: torch.utils.data.DataLoader[Tensor], what: str) -> ConfigError:
    """The error for a `DataLoader`, which names what of it has no effect here."""
    own: list[str] = []
    usual = torch.utils.data.SequentialSampler, torch.utils.data.RandomSampler
    if type(loader.sampler) not in usual and not isinstance(loader.dataset, torch.utils.data.IterableDataset):
        own.append(f"its {type(loader.sampler).__name__} is not used: samples are shuffled anew in every epoch, by `seed`")
    if loader.collate_fn is not torch.utils.data.default_collate and loader.batch_sampler is not None:
        own.append("its collate_fn is not used: fields of samples are stacked, so pad them in the data set")
    return ConfigError(
        f"{what} is {with_article(type(loader).__name__)}",
        cure="give the data set in it (data=loader.dataset): raypar makes the batches, of batch_size= samples each"
        + "".join(f"; {line}" for line in own),
    )


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
