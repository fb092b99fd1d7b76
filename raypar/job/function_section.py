"""The sections of a job that are functions with their arguments: model, loss, data, optimizer."""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import Field, NonNegativeInt, PlainValidator, PositiveInt, field_validator, model_validator

from raypar.errors import ConfigError, with_article
from raypar.files.untrusted_files import shorten
from raypar.job.callable_text import argument_refusal, shorten_contract_text, stable_callable_label
from raypar.job.key import BITS, CLIENT, WORKERS
from raypar.job.section import MAX_WORKERS, Parts, PathText, Section
from raypar.job.value_names import is_importable_name
from raypar.user_code.user_code_errors import USER_CODE_ERRORS, error_text, reraise_ctrl_c

T = TypeVar("T")

FROM_FOLDER = "raypar.model.pretrained_folder:from_folder"
"""The model function of `model.pretrained`."""
LOSS_OF_MODEL = "model"
"""In the place of a loss function: the model returns an object with a `loss`."""


def _function(value: T) -> T:
    """`value`, if it is a callable or a text `module:name`. Raises `ValueError`."""
    if not callable(value) and not (isinstance(value, str) and is_importable_name(value)):
        raise ValueError("module:name, for example torch.optim:AdamW")
    return value


def _loss_function(value: T) -> T:
    """`value`, if it is a callable, a text `module:name`, or `model`. Raises `ValueError`."""
    return value if isinstance(value, str) and value == LOSS_OF_MODEL else _function(value)


class FunctionConfig(Section):
    """A function and its arguments: `{function: module:name, args: {...}}`, or just `module:name`."""

    function: Annotated[str | Callable[..., Any], PlainValidator(_function)]
    """`module:name` of the function or class; from Python also the callable itself."""
    args: dict[str, Any] = {}
    """Keyword arguments."""

    @model_validator(mode="before")
    @classmethod
    def _short(cls, value: T) -> T | dict[str, T]:
        if isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], Mapping):
            return {"function": value[0], "args": dict(value[1])}
        return {"function": value} if isinstance(value, str) or callable(value) else value

    @property
    def is_loss_of_model(self) -> bool:
        """Whether it stands for the loss that the model itself computes."""
        return self.function == LOSS_OF_MODEL

    def resolve(self) -> Callable[..., Any]:
        """Import the function. Raises `ConfigError` naming what could not be imported."""
        if not isinstance(self.function, str):
            return self.function
        module, _, name = self.function.partition(":")
        try:
            found: Any = importlib.import_module(module)
            for part in name.split("."):
                found = getattr(found, part)
        except USER_CODE_ERRORS as error:
            reraise_ctrl_c(error)
            raise ConfigError(
                f"cannot import {self.function!r}: {error_text(error)}",
                cure="write it as module:name and run where the module can be imported (current folder, installed package)",
            ) from error
        if not callable(found):
            raise ConfigError(
                f"{self.function!r} is {with_article(type(found).__name__)}, not callable", cure="name a function or class"
            )
        function: Callable[..., Any] = found
        return function

    def call(self, key: str = "args") -> Any:
        """What the function returns for `args`: for functions that make models and data sets.

        Raises `ConfigError` for arguments that it does not take, or lacks. `key`: the job's key of the arguments, for messages.
        """
        function = self.resolve()
        try:
            return function(**self.args)
        except TypeError as error:
            # A second traceback entry means that the function itself has raised, after Python had accepted its arguments.
            raised_inside = error.__traceback__ is None or error.__traceback__.tb_next is not None
            refusal = None if raised_inside else argument_refusal(function, self.args, self.label, key)
            if refusal is None:
                raise
            raise refusal from None

    def partial(self) -> Callable[..., Any]:
        """The function with `args` bound: for losses and schedules, called later with more arguments."""
        return functools.partial(self.resolve(), **self.args) if self.args else self.resolve()

    @property
    def label(self) -> str:
        """The function's name, in messages; of a loss module its class with its options, of a given object its class."""
        if isinstance(self.function, str):
            return self.function
        text = str(getattr(self.function, "label_in_messages", "")) or stable_callable_label(self.function)
        return shorten(text) if "\n" not in text else type(self.function).__name__

    @property
    def contract_text(self) -> str:
        """The function in a checkpoint's contract: its name; of a given object its `repr`: slow for many samples."""
        return shorten_contract_text(self.function if isinstance(self.function, str) else stable_callable_label(self.function))


class ModelConfig(FunctionConfig):
    """The function that builds the model, or the folder that it is read from, how a model that is an unmodified module is
    divided, and what its forward may do."""

    pretrained: Annotated[PathText | None, CLIENT] = None
    """A folder that `save_pretrained` of `transformers` has written, in place of `function`: the model of its configuration,
    which begins with its weights (`init_from`). Nothing is downloaded, and code in the folder is not run."""
    adapter: Annotated[dict[str, Any] | None, CLIENT] = None
    """With `pretrained`: the arguments of `peft.LoraConfig`, such as `{r: 8, target_modules: [q_proj, v_proj]}`. The adapters
    are trained, and the folder's weights stay as they are."""
    units: Annotated[tuple[str, ...], Field(strict=False), BITS] = ()
    """Names of the modules, with `*` for any part, at which the model is divided into layers: each such module runs whole.
    Empty: the elements of the model's lists of modules, and what stands beside them."""
    buffers: Annotated[Literal["refuse", "last", "sum"], BITS] = "refuse"
    """What becomes of a buffer that the forward writes in training. `refuse`: it is an error. `last`: the value that the last
    microbatch has written. `sum`: what all microbatches have added. Each microbatch begins with the value from the beginning of
    the step. (Running statistics of batch norms are always kept, as one process would.)"""

    @model_validator(mode="before")
    @classmethod
    def _of_folder(cls, value: T) -> T | dict[str, Any]:
        """Of `pretrained` and `adapter` the function that makes the module, and its arguments."""
        if not isinstance(value, Mapping):
            return value
        folder, adapter = value.get("pretrained"), value.get("adapter")
        if folder is None:
            if adapter is not None:
                raise ConfigError(
                    "model.adapter is given without model.pretrained",
                    cure="give the folder of the model too; a model function of your own calls get_peft_model itself",
                )
            return value
        if value.get("function") not in (None, FROM_FOLDER):
            raise ConfigError(
                f"model has pretrained: {shorten(folder)} and function: {shorten(value['function'])}, and either makes it",
                cure="leave one out; a function of your own begins with the folder's weights by init_from",
            )
        if isinstance(folder, os.PathLike):
            folder = os.fspath(folder)
        given = value.get("args") or {}
        args = {**given, "folder": folder} if isinstance(given, Mapping) else given
        if isinstance(args, dict):
            args.pop("adapter", None)
            args |= {"adapter": adapter} if adapter is not None else {}
        return {**value, "function": FROM_FOLDER, "args": args}


class LossConfig(FunctionConfig):
    """The loss function and its arguments, or `model`: the model computes the loss itself, and returns an object with it."""

    function: Annotated[str | Callable[..., Any], PlainValidator(_loss_function)]
    """`module:name` of the function or class; from Python also the callable itself; or `model`."""
    count: Literal["labels", "shifted_labels"] | None = None
    """What the mean that the model's own loss (`model`) returns is taken over, so that the loss of a step is the mean over all
    of them, in whichever microbatches they are. `labels`: all that are not -100. `shifted_labels`: likewise, without the first
    of each sequence, for a model that compares each token with the next one. None: samples."""

    @model_validator(mode="after")
    def _counts_for_model(self) -> LossConfig:
        if self.count is not None and not self.is_loss_of_model:
            raise ConfigError(
                f"loss.count is {self.count}, and loss.function is {self.label}",
                cure="leave it out, and return (sum, count) from the function; it is for the model's own loss, function: model",
            )
        return self


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


class SamplesConfig(FunctionConfig):
    """A data set, map-style or iterable, and how its samples become the model's input and the loss's target."""

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
    streams: Parts | None = None
    """As how many streams an iterable data set is read, each as the worker of a PyTorch `DataLoader` would see it: microbatch m
    has samples of stream m modulo `streams`. None: one for each microbatch, where the data set divides itself by
    `torch.utils.data.get_worker_info()`; else, and in validation, one."""
    processes: Annotated[NonNegativeInt, Field(le=MAX_WORKERS), WORKERS] = 0
    """Processes of each worker that load samples ahead of the steps, like a `DataLoader`'s `num_workers`; 0: the worker itself
    loads them."""


class WeightsConfig(FunctionConfig):
    """A function of the data set that gives a weight for each sample. An epoch draws as many samples as there are."""

    replacement: bool = True
    """Whether a sample may be drawn several times in an epoch."""


class DataConfig(SamplesConfig):
    """The data set of a job, map-style or iterable, what of its samples is the model's input and the loss's target, and their
    order."""

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
    def names_ids(self) -> bool:
        """Whether a function of the user's decides which samples an epoch has, or their order."""
        return self.sampler is not None or self.weights is not None or self.group_by is not None

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


class ValidationConfig(SamplesConfig):
    """The data set for validation, and when it is used."""

    every: NonNegativeInt = 0
    """Steps from one validation to the next; there is one at the end too. 0: at the end only."""
    samples: NonNegativeInt = 0
    """How many samples are used, from the first on; 0: all."""


class OptimizerConfig(FunctionConfig):
    """The optimizer class, its arguments, and groups of parameters with other arguments."""

    groups: Annotated[tuple[dict[str, Any], ...], Field(strict=False)] = ()
    """Parameters that get other arguments: `{match: "*.bias", weight_decay: 0.0}` for each group. A parameter belongs to the
    first group whose pattern matches its name."""

    @field_validator("groups")
    @classmethod
    def _match(cls, groups: tuple[dict[str, Any], ...]) -> tuple[dict[str, Any], ...]:
        if any(not isinstance(group.get("match"), str) for group in groups):
            raise ValueError("a list of {match: pattern, lr: ..., ...}; every group needs a match")
        return groups

    @property
    def options_by_pattern(self) -> tuple[tuple[str, dict[str, Any]], ...]:
        """(pattern of parameter names, arguments that differ for them); the first pattern that matches counts."""
        return tuple((group["match"], {k: v for k, v in group.items() if k != "match"}) for group in self.groups)
