"""The keys of `data` and `validation`: samples, their order, batches of them, and validation sets."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import Field, NonNegativeInt, PlainValidator, PositiveInt, field_validator, model_validator
from pydantic_core import PydanticCustomError

from raypar.errors import ConfigError
from raypar.files.printable_text import shorten
from raypar.job.data_short_forms import FUNCTION_OF_FILES, with_function_of_short_form
from raypar.job.function_section import FunctionConfig, callable_or_name
from raypar.job.importable_name import is_importable_name
from raypar.job.key import CLIENT, WORKERS
from raypar.job.section import MAX_WORKERS, FileList, Parts, Section

T = TypeVar("T")


class PadConfig(Section):
    """How samples of unequal length become a batch: dimension 0 of their fields is padded at its end, to the longest of the
    microbatch, or farther."""

    to: Annotated[tuple[PositiveInt, ...], Field(strict=False)] = ()
    """Lengths, ascending: a microbatch has the first of them in which its longest sample fits. A longer sample is an error."""
    multiple: PositiveInt = 1
    """A microbatch has the next multiple of this number."""
    fields: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """The fields that are padded; empty: all that have dimensions."""
    value: dict[str, int | float] = {}
    """Field -> the number that it is padded with. Without it 0; in the target -100, which cross-entropy leaves out."""

    @model_validator(mode="after")
    def _one_length(self) -> PadConfig:
        if list(self.to) != sorted(set(self.to)):
            raise ConfigError(f"pad.to is {list(self.to)}", cure="give lengths that rise: to: [64, 128, 256]")
        if self.to and self.multiple > 1:
            raise ConfigError(
                f"pad has to: {list(self.to)} and multiple: {self.multiple}, and a batch has one length",
                cure="give one of them",
            )
        return self


class DatasetConfig(FunctionConfig):
    """A function that makes a data set, or files in its place."""

    parquet: Annotated[FileList | None, CLIENT] = None
    """Parquet files in place of `function`: a path or URI, or several, with wildcards (`data/*.parquet`). A row is a sample,
    its columns are the fields."""
    jsonl: Annotated[FileList | None, CLIENT] = None
    """Files of JSON lines, likewise. An object is a sample."""
    tar: Annotated[FileList | None, CLIENT] = None
    """Tar files as `webdataset` has them, likewise (`shards/{000..007}.tar`), read as streams. Members with one basename are a
    sample."""

    @model_validator(mode="before")
    @classmethod
    def _of_files(cls, value: T) -> T | dict[str, Any]:
        """Of files and of a mixture the function that reads them."""
        return with_function_of_short_form(value)


class MixedSourceConfig(DatasetConfig):
    """One of the data sets that are mixed, and its share."""

    ratio: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    """Its share of the samples, beside those of the other sources: with 3 and 1, three of four samples are of the first."""


class PackConfig(Section):
    """How samples of unequal length, each a document, are put behind each other into rows of one length."""

    to: PositiveInt
    """The length of a row. A longer sample is an error."""
    rows: NonNegativeInt = 0
    """A microbatch has at least so many rows; those without a document are padding. 0: as many as its samples need."""
    fields: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """The fields that are packed; empty: all that have dimensions, without `attention_mask`."""
    value: dict[str, int | float] = {}
    """Field -> the number with which the end of a row is filled. Without it 0; in the target -100, which cross-entropy leaves
    out."""
    mask: str | None = None
    """The name of a field with an attention mask [rows, 1, length, length], true within a document, for models that take one.
    All models are offered `position_ids`, which begin at 0 in each document, `document_ids`, and `cu_seqlens`, as attention of
    variable length takes it."""
    first_label: Literal["keep", "mask"] | None = None
    """Whether the first label of each document is replaced by -100: `mask` for a loss that compares each token with the next
    one, which would be another document's; `keep` for one that compares each token with the label at its place. None: `mask`
    with `loss.count: shifted_labels`, else `keep`."""

    @model_validator(mode="before")
    @classmethod
    def _short(cls, value: T) -> T | dict[str, int]:
        """Accept `pack: 1024` for `pack: {to: 1024}`."""
        return {"to": value} if isinstance(value, int) and not isinstance(value, bool) else value


class SamplesConfig(DatasetConfig):
    """What `data` and each validation set have: a data set, and how its samples become the model's input and loss's target."""

    input: str | None = None
    """The field of a sample that the first layer of a sequential model reads; None: `x`. (A module with a forward of its own
    gets the fields that have the names of its parameters.)"""
    target: str | None = None
    """The field of a sample that the loss gets as its target; None: `y`."""
    names: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """Names of the fields of a sample that is a tuple; empty: `x`, `y`, `z`."""
    collate: FunctionConfig | None = None
    """The function that makes a batch of a list of samples, called once for each microbatch: a `collate_fn`, or a class of such
    objects, as `transformers` has them. None: the values of each field are stacked."""
    pad: PadConfig | None = None
    """How fields of unequal length are padded where there is no `collate`; None: they must be of one length."""
    pack: PackConfig | None = None
    """How documents of unequal length are packed into rows of one length, in place of `pad` and `collate`."""
    streams: Parts | None = None
    """As how many streams an iterable data set is read, each as the worker of a PyTorch `DataLoader` would see it: microbatch m
    has samples of stream m modulo `streams`. None: one for each microbatch, where the data set divides itself by
    `torch.utils.data.get_worker_info()`; else, and in validation, one."""
    processes: Annotated[NonNegativeInt, Field(le=MAX_WORKERS), WORKERS] = 0
    """Processes of each worker that load samples ahead of the steps, like a `DataLoader`'s `num_workers`; 0: the worker itself
    loads them. Of an iterable data set that is read as one stream, 1: a process of each node reads it, for all its workers."""


class WeightsConfig(FunctionConfig):
    """A function of the data set that gives a weight for each sample. An epoch draws as many samples as there are."""

    replacement: bool = True
    """Whether a sample may be drawn several times in an epoch."""


class DataConfig(SamplesConfig):
    """The data set of a job, map-style or iterable, what of its samples is the model's input and the loss's target, and their
    order."""

    mix: Annotated[tuple[MixedSourceConfig, ...], Field(strict=False)] = ()
    """Several data sets in place of `function`, all map-style or all iterable, each with its `ratio`. They alternate in a fixed
    pattern; each is read in an order of its own (`shuffle`, `shuffle_window`), epoch after epoch, and one that has ended begins
    its next epoch."""
    shuffle: bool | Literal["indexed"] = True
    """The order of an epoch's samples. `true`: a new one in each epoch, by `torch.randperm`, which makes a list of all samples
    in every worker. `indexed`: likewise a new one, of which each entry is computed by itself, without time or memory that
    grow with the data set: for more than ten million samples. `false`: always 0, 1, 2, ..."""
    drop_last: bool = False
    """Whether an epoch ends with its last whole batch, leaving out the samples beyond; else these begin another batch."""
    shuffle_window: NonNegativeInt = 0
    """Of an iterable data set: this many samples of a stream at a time are read and given in a random order. 0: the data set's
    own order."""

    sampler: FunctionConfig | None = None
    """A function of (dataset, epoch) that gives the ids of the epoch's samples in order, or a class of samplers of PyTorch: the
    order in place of `shuffle`. It is called with all generators seeded by the epoch, in every worker that reads samples."""
    weights: WeightsConfig | None = None
    """Samples are drawn by weight, as by `WeightedRandomSampler`, in place of `shuffle`."""
    group_by: FunctionConfig | None = None
    """A function of the data set that gives the length of each sample, such as `raypar.data.lengths:of_field`: samples of
    similar length come together, as with `group_by_length` of `transformers`, in place of `shuffle`."""

    @property
    def ratios(self) -> list[float]:
        """The shares of the sources of a mixture."""
        return [source.ratio for source in self.mix]

    @property
    def names_ids(self) -> bool:
        """Whether a function of the user's decides which samples an epoch has, or their order."""
        return self.sampler is not None or self.weights is not None or self.group_by is not None

    @model_validator(mode="after")
    def _mixes_several(self) -> DataConfig:
        if len(self.mix) == 1:
            raise ConfigError("data.mix has one source", cure="give its keys in data itself, or another source to mix it with")
        beside = [name for name in ("sampler", "weights", "group_by", "drop_last") if getattr(self, name)] if self.mix else []
        if beside:
            raise ConfigError(
                f"data has mix and {beside[0]}: a mixture has no epochs, only its sources have",
                cure=f"leave {beside[0]} out; shuffle is the order of each source's samples",
            )
        if self.mix and self.args:
            raise ConfigError("data has mix and args", cure="give args to the sources: mix: [{function: ..., args: ...}, ...]")
        return self

    @model_validator(mode="after")
    def _one_order(self) -> DataConfig:
        given = [name for name in ("sampler", "weights", "group_by") if getattr(self, name) is not None]
        given += ["shuffle"] if self.shuffle is not True else []
        if len(given) > 1:
            raise ConfigError(
                f"data has {' and '.join(given)}, and each of them is the order of an epoch",
                cure="leave all but one of them out",
            )
        return self

    @field_validator("shuffle", mode="before")
    @classmethod
    def _order(cls, value: T) -> T:
        if not (isinstance(value, bool) or value == "indexed"):
            raise ValueError("true, false or indexed")
        return value


class ValidationSetConfig(SamplesConfig):
    """One of several data sets for validation. What it does not say of its samples is as in `data`."""

    samples: NonNegativeInt = 0
    """How many samples are used, from the first on; 0: all."""
    batch_size: PositiveInt | None = None
    """Samples that go through the model at once; None: as many as in a microbatch of training."""
    metrics: Annotated[tuple[str, ...] | None, Field(strict=False)] = None
    """The names of those of the job's `metrics` that are computed; None: all."""


class ValidationConfig(ValidationSetConfig):
    """The data set for validation, or several by name, and when they are used."""

    function: Annotated[str | Callable[..., Any], PlainValidator(callable_or_name)] = None  # type: ignore[assignment]  # with sets
    """`module:name` of the function or class; from Python also the callable itself. Either it or `sets` is given."""
    every: NonNegativeInt = 0
    """Steps from one validation to the next; there is one at the end too. 0: at the end only."""
    sets: dict[str, ValidationSetConfig] = {}
    """Name -> data set, of several; `validation: {every: 50, short: {...}, long: {...}}` means the same. Each is used whole, by
    itself: its values are called `validation/SET/loss` and `validation/SET/NAME`."""

    @model_validator(mode="before")
    @classmethod
    def _several(cls, value: T) -> T | dict[str, Any]:
        """Sets that stand beside `every` as `sets`; without any, and without a function, a mark in the function's place."""
        given = with_function_of_short_form(value)
        if not isinstance(given, Mapping):
            return value
        _refuse_set_named_as_a_key(given)
        tree = {key: part for key, part in given.items() if key in cls.model_fields}
        others = {key: part for key, part in given.items() if key not in tree}
        beside = {key: part for key, part in others.items() if _is_set(key, part)} if "function" not in tree else {}
        if beside:
            sets = tree.get("sets") or {}
            if isinstance(sets, Mapping):
                refuse_two_sets_of_one_name(beside, sets)
                tree = {**tree, "sets": {**beside, **sets}}
            others = {key: part for key, part in others.items() if key not in beside}
        if "function" not in tree and not tree.get("sets"):
            tree["function"] = _NO_FUNCTION
        return {**tree, **others}

    @field_validator("function", mode="before")
    @classmethod
    def _needed(cls, value: T) -> T:
        if value is _NO_FUNCTION:
            raise PydanticCustomError("missing", "Field required")
        return value

    @model_validator(mode="after")
    def _one_form(self) -> ValidationConfig:
        fields = ValidationSetConfig.model_fields
        beside = [name for name in fields if getattr(self, name) != type(self).model_fields[name].default]
        if self.sets and beside:
            raise ConfigError(
                f"validation has the sets {', '.join(self.sets)}, and beside them {', '.join(beside)}, which is of one set",
                cure=f"write {', '.join(beside)} in each set that it is for",
            )
        for name in self.sets:
            if re.fullmatch(SET_NAME, name) is None:
                raise ConfigError(
                    f"validation: {shorten(name)!r} is no name of a set",
                    cure="at most 60 letters, digits, '_', '.' and '-', the first one a letter or '_'",
                )
        return self

    @classmethod
    def of_set(cls, one: ValidationSetConfig) -> ValidationConfig:
        """The section for one of several sets, by itself."""
        return cls.model_construct(**{name: getattr(one, name) for name in one.model_fields_set})

    @property
    def by_name(self) -> dict[str, ValidationSetConfig]:
        """Name -> data set, of several; the name of one alone is empty."""
        return dict(self.sets) or {"": self}


def refuse_two_sets_of_one_name(beside: Iterable[str], sets: Iterable[str]) -> None:
    """Raise `ConfigError` for a validation set that is given beside `validation.sets` and in it."""
    both = sorted(set(map(str, beside)) & set(map(str, sets)))
    if both:
        raise ConfigError(f"validation has two sets {both[0]}, one of them in sets", cure="give one of them another name")


def _refuse_set_named_as_a_key(given: Mapping[str, Any]) -> None:
    """Raise `ConfigError` for a data set under a name that `validation` has for something else."""
    for key in sorted(ValidationConfig.model_fields.keys() - {"sets", "args", "collate"}):
        part = given.get(key)
        if isinstance(part, Mapping) and not {"function", *FUNCTION_OF_FILES}.isdisjoint(part):
            raise ConfigError(
                f"validation.{key} is a data set, and {key} is a key of validation",
                cure=f"write it in sets, where any name will do: validation: {{sets: {{{key}: ...}}}}; or give it another name",
            )


_NO_FUNCTION = object()
"""Stands for the function where `validation` has neither one nor sets."""

SET_NAME = r"[A-Za-z_][\w.-]{0,59}"
"""What the name of a validation set must be, as a regular expression."""


def is_misspelt(name: object) -> bool:
    """Whether a key of `validation` is a misspelt one, rather than the name of a set."""
    keys = [key for key in ValidationConfig.model_fields if key != "sets"]  # a set may well be called set1
    return bool(difflib.get_close_matches(str(name), keys, n=1, cutoff=0.7))


def _is_set(name: object, value: object) -> bool:
    """Whether a key of `validation` that no data set has is the name of one: its value is a section of one, or a function."""
    if is_misspelt(name):
        return False
    if isinstance(value, Mapping):
        return not ValidationSetConfig.model_fields.keys().isdisjoint(value)
    if isinstance(value, str):
        return is_importable_name(value)
    return isinstance(value, (tuple, FunctionConfig)) or callable(value)
