"""The user's collate function (`data.collate`): makes a batch of a microbatch's samples, seeded by its place (rule 1)."""

from __future__ import annotations

import copy
import dataclasses
import difflib
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from raypar.data.batch_fields import flatten_fields
from raypar.errors import ConfigError, DataError, RayparError, UserCodeError, with_article
from raypar.job import DataConfig
from raypar.plan.seeds import seed_of
from raypar.user_code.stop_signals import reraise_ctrl_c
from raypar.user_code.user_code_errors import error_text
from raypar.worker.process.seed_generators import seed_host_generators
from raypar.worker.process.torch_state_guard import TorchStateGuard

MicrobatchPlace = tuple[int, int]
"""(step, microbatch)."""


@dataclass(frozen=True)
class Collation:
    """Calls the user's collate function, and makes flat batches of what it returns. Works in any process."""

    function: Callable[[list[object]], object]
    """The user's function."""
    label: str
    """Its name, for messages."""
    names: tuple[str, ...]
    """Names of the fields of a batch that is a tuple; empty: `FIELD_NAMES`."""
    seed: int
    """The job's seed."""
    expected: tuple[str, ...] = ()
    """The fields that every batch has; empty: any."""
    guard: TorchStateGuard | None = None
    """Restores process state that the function leaves changed."""

    def values(self, samples: Sequence[object], ids: Sequence[int], place: MicrobatchPlace) -> dict[str, object]:
        """The fields of the batch that the function makes of samples, flattened. Leaves python, numpy and torch seeded by it.

        It gets shallow copies of samples that are mappings, lists or dataclasses, so that a data set which keeps its samples
        gives the same ones in every epoch.
        """
        seed_host_generators(seed_of(self.seed, "collate", *place))
        try:
            made = self.function([shallow_copy(sample) for sample in samples])
        except BaseException as error:  # some classes of libraries are no Exception
            reraise_ctrl_c(error)
            raise UserCodeError(
                f"{_where(place)}: data.collate {self.label}, given {_count(ids)}, raised {error_text(error)}\n"
                f"{traceback.format_exc()}",
                cure=f"{_cure_of_misspelt_field(error, samples) or _cure_of_texts(samples)}call it by itself: "
                f"collate([dataset[i] for i in {_shown(ids)}])",
            ) from error
        if self.guard is not None:
            self.guard.check("data.collate")
        found = flatten_fields(made, self.names, f"the batch that data.collate {self.label} returned")
        if self.expected and found.keys() != set(self.expected):
            raise DataError(
                f"{_where(place)}: data.collate {self.label} returned the fields {_list(found)}, and in the first microbatch "
                f"{_list(self.expected)}",
                cure="return the same fields for every microbatch",
            )
        return found

    def tensors(
        self, found: Mapping[str, object], fields: Sequence[str], ids: Sequence[int], place: MicrobatchPlace
    ) -> dict[str, Tensor]:
        """The fields asked for as tensors [samples, ...] in fresh memory; others may be anything."""
        made = {}
        for name in fields:
            if name not in found:
                raise DataError(
                    f"{_where(place)}: data.collate {self.label} returned no field {name!r}, only {_list(found)}",
                    cure="return it, or name the fields that there are: data.input and data.target",
                )
            value = self._tensor(found[name], name)
            if value.dim() and len(value) != len(ids):
                raise DataError(
                    f"{_where(place)}: data.collate {self.label} was given {_count(ids)}, and field {name!r} that it returned "
                    f"has {len(value)} rows, {list(value.shape)}",
                    cure="return a row for each sample, also for one that shall not count (mask its labels); a field without "
                    "rows is a tensor without dimensions",
                )
            # As `torch.stack` and data processes give it: kernels, and so bits, may depend on strides and addresses.
            made[name] = value.detach().cpu().clone(memory_format=torch.contiguous_format)
        return made

    def _tensor(self, value: object, name: str) -> Tensor:
        try:
            found = value if isinstance(value, Tensor) else torch.as_tensor(value)
        except (TypeError, ValueError, RuntimeError) as error:
            raise DataError(
                f"field {name!r} of the batch that data.collate {self.label} returned: {with_article(type(value).__name__)} "
                f"cannot be made a tensor: {error}",
                cure="return tensors, arrays or numbers",
            ) from error
        if found.layout != torch.strided:
            raise DataError(
                f"field {name!r} of the batch that data.collate {self.label} returned is a tensor of layout {found.layout}",
                cure="return a dense tensor: value.to_dense()",
            )
        return found

    def refuse_dependence_on_process(
        self, samples: Sequence[object], ids: Sequence[int], place: MicrobatchPlace, fields: Sequence[str]
    ) -> None:
        """Raise `DataError` if the function, called twice with the same samples under the same seed, gives two results."""
        first, second = (self.tensors(self.values(samples, ids, place), fields, ids, place) for _ in range(2))
        refuse_unequal_batches(
            first,
            second,
            f"data.collate {self.label}, called twice with the same samples under the same seed, returned",
            cure="let it depend on its samples and the seeded generators of python, numpy and torch alone: no generator of "
            "its own, no counter, no clock, and leave the samples as they are",
        )


def refuse_unequal_batches(first: Mapping[str, Tensor], second: Mapping[str, Tensor], who: str, cure: str) -> None:
    """Raise `DataError` for a field that two batches made in the same way have with other bits. `who`: what has made them."""
    for name, one in first.items():
        other = second[name]
        if one.shape != other.shape or one.dtype != other.dtype:
            what = f"{list(one.shape)} {one.dtype} and then {list(other.shape)} {other.dtype}"
        elif one.numpy().tobytes() != other.numpy().tobytes():
            what = f"other numbers: {int((one != other).sum())} of {one.numel()}"
        else:
            continue
        raise DataError(f"{who} field {name!r} with {what}", cure=cure)


def make_collation(
    spec: DataConfig, seed: int, *, expected: Sequence[str] = (), guard: TorchStateGuard | None = None, key: str = "data"
) -> Collation | None:
    """What `data.collate` says; None without it. A class is called with its arguments here, a function with each batch.

    Raises `UserCodeError` if the class raises, `ConfigError` if its objects cannot be called. `key`: the job's key of the data.
    """
    config = spec.collate
    if config is None:
        return None
    function = config.resolve()
    if isinstance(function, type):
        try:
            function = config.call(f"{key}.collate.args")
        except RayparError:
            raise
        except BaseException as error:  # some classes of libraries are no Exception
            reraise_ctrl_c(error)
            raise UserCodeError(
                f"{key}.collate: {config.label} raised {error_text(error)}\n{traceback.format_exc()}",
                cure=f"make one by itself, with {key}.collate.args",
            ) from error
        if not callable(function):
            raise ConfigError(
                f"{key}.collate is the class {config.label}, whose objects cannot be called",
                cure="give it a __call__(samples), or name a function of the list of samples",
            )
    else:
        function = config.partial()
    return Collation(function, config.label, spec.names, seed, tuple(expected), guard)


def _cure_of_misspelt_field(error: BaseException, samples: Sequence[object]) -> str:
    """The beginning of a cure for a field that was asked for and samples have under a name like it; else empty."""
    first = samples[0] if samples and isinstance(samples[0], Mapping) else {}
    asked = error.args[0] if isinstance(error, KeyError) and error.args else None
    if not isinstance(asked, str) or asked in first:
        return ""
    near = difflib.get_close_matches(asked, map(str, first), n=1)
    return f"samples have no {asked!r} but {', '.join(map(repr, first))} (did you mean {near[0]!r}?); or " if near else ""


def _cure_of_texts(samples: Sequence[object]) -> str:
    """The beginning of a cure that names the fields with texts, which collate functions of tensors cannot take; else empty."""
    first = samples[0] if samples and isinstance(samples[0], Mapping) else {}
    texts = [str(name) for name, value in first.items() if isinstance(value, str)]
    if not texts:
        return ""
    columns = ", ".join(map(repr, texts))
    if all(isinstance(value, (str, bytes, int, float, type(None))) for value in first.values()):
        return (
            f"if it takes ids, make them of {columns} first, as samples have no other values: let the data set return what its "
            f"tokenizer gives (of Hugging Face: dataset.map(lambda row: tokenizer(row[{texts[0]!r}]), "
            f"remove_columns=[{columns}])); or "
        )
    return (
        f"if it takes no texts, leave {columns} out of the samples (of Hugging Face: dataset.remove_columns([{columns}])); or "
    )


def shallow_copy(sample: object) -> object:
    """A sample as a collate function gets it, which may change its fields: of what has any a copy of its own."""
    mutable = isinstance(sample, (Mapping, list)) or (dataclasses.is_dataclass(sample) and not isinstance(sample, type))
    return copy.copy(sample) if mutable else sample


def _where(place: MicrobatchPlace) -> str:
    return f"step {place[0] + 1}, microbatch {place[1]}"


def _count(ids: Sequence[int]) -> str:
    return f"{len(ids)} samples ({_shown(ids)})" if len(ids) != 1 else f"sample {ids[0]}"


def _shown(ids: Sequence[int]) -> str:
    return f"[{', '.join(map(str, ids[:8]))}{', ...' if len(ids) > 8 else ''}]"


def _list(fields: Sequence[str] | Mapping[str, object]) -> str:
    return ", ".join(fields) or "none"
