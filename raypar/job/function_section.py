"""The sections of a job that are functions with their arguments: model, loss, learning rates, optimizer."""

from __future__ import annotations

import difflib
import functools
import importlib
import os
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import Field, PlainValidator, field_validator, model_validator

from raypar.errors import ConfigError, with_article
from raypar.files.printable_text import repr_text, shorten
from raypar.job.importable_name import is_importable_name
from raypar.job.key import BITS, CLIENT
from raypar.job.section import PathText, Section
from raypar.job.stable_callable_text import argument_refusal, shorten_contract_text, stable_callable_label
from raypar.user_code.stop_signals import reraise_ctrl_c
from raypar.user_code.user_code_errors import USER_CODE_ERRORS, error_text

T = TypeVar("T")

FROM_FOLDER = "raypar.model.pretrained_folder:from_folder"
"""The model function of `model.pretrained`."""
_MISSING = object()
"""In the place of what a module lacks."""
SEVERAL_OPTIMIZERS = "raypar.worker.step.several_optimizers:SeveralOptimizers"
"""The optimizer function of `optimizer.entries`."""
ALL_PARAMETERS = "*"
"""The pattern of all parameters, and of those in no group."""
ENTRY = "optimizer.entries.{}"
"""The key of one of several optimizers, for its number."""
BETWEEN_PATTERNS = " / "
"""Stands between the pattern of an optimizer and that of one of its groups."""
LOSS_OF_MODEL = "model"
"""In the place of a loss function: the model returns an object with a `loss`."""


def callable_or_name(value: T) -> T:
    """`value`, if it is a callable or a text `module:name`. Raises `ValueError`."""
    if not callable(value) and not (isinstance(value, str) and is_importable_name(value)):
        raise ValueError("module:name, for example torch.optim:AdamW")
    return value


def _loss_function(value: T) -> T:
    """`value`, if it is a callable, a text `module:name`, or `model`. Raises `ValueError`."""
    return value if isinstance(value, str) and value == LOSS_OF_MODEL else callable_or_name(value)


class FunctionConfig(Section):
    """A function and its arguments: `{function: module:name, args: {...}}`, or just `module:name`."""

    function: Annotated[str | Callable[..., Any], PlainValidator(callable_or_name)]
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
        cure = "write it as module:name and run where the module can be imported (current folder, installed package)"
        try:
            found: Any = importlib.import_module(module)
            for part in name.split("."):
                within, found = found, getattr(found, part, _MISSING)
                if found is _MISSING:
                    near = difflib.get_close_matches(part, [own for own in dir(within) if not own.startswith("_")])
                    meant = f": did you mean {' or '.join(near)}?" if near else ""
                    cure = f"define {part} in {getattr(within, '__file__', None) or module}, or name what is there{meant}"
                    raise AttributeError(f"{getattr(within, '__name__', module)} has no {part!r}")
        except USER_CODE_ERRORS as error:
            reraise_ctrl_c(error)
            raise ConfigError(f"cannot import {self.function!r}: {error_text(error)}", cure=cure) from error
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
    Empty: the elements of the model's lists of modules, what stands beside them, and the modules of parallel branches."""
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
    sample_weight: str | None = None
    """The field of a sample that has its weight, or one for each of its tokens, for a function that returns a loss for each of
    them (`reduction="none"`): the loss of a step is the weighted sum over the sum of the weights, in whichever microbatches
    they are. None: the function says what counts."""

    @model_validator(mode="after")
    def _counts_for_model(self) -> LossConfig:
        if self.sample_weight is not None and self.is_loss_of_model:
            raise ConfigError(
                f"loss.sample_weight is {self.sample_weight}, and loss is model, which takes the mean over samples itself",
                cure="give a loss function of (output, target) that returns a value for each sample, and let the model return "
                "its output",
            )
        if self.count is not None and not self.is_loss_of_model:
            raise ConfigError(
                f"loss.count is {self.count}, and loss.function is {self.label}",
                cure="leave it out, and return (sum, count) from the function; it is for the model's own loss, function: model",
            )
        return self


class LrScheduleConfig(FunctionConfig):
    """A function of the step, or a scheduler, with its arguments, and the metric whose values the scheduler is given."""

    metric: str | None = None
    """For a scheduler whose `step` takes a metric, as that of `ReduceLROnPlateau` does: `validation_loss`, `validation_NAME`
    for one of `metrics`, or `validation/SET/NAME` for one of several validation sets. It makes one step after each validation
    (`validation.every`). None: a scheduler makes one step after each step of the optimizer."""


class SingleOptimizerConfig(FunctionConfig):
    """One optimizer class, its arguments, and groups of parameters with other arguments."""

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

    @property
    def pattern_of_all(self) -> str:
        """The pattern of all of its parameters."""
        return ALL_PARAMETERS

    def pattern_of_group(self, pattern: str) -> str:
        """The pattern under which the state of one of its groups is kept."""
        return pattern


class OptimizerEntry(SingleOptimizerConfig):
    """One of several optimizers, and the parameters that it trains."""

    match: str
    """Pattern of the names of its parameters. A parameter belongs to the first optimizer whose pattern matches its name."""
    lr_schedule: LrScheduleConfig | None = None
    """The learning rates of its parameters, as the job's `lr_schedule`, but without `metric`. None: those of the job."""

    @field_validator("match")
    @classmethod
    def _usable_in_patterns(cls, match: str) -> str:
        if not match or BETWEEN_PATTERNS in match:
            raise ValueError(f"a pattern of parameter names, without {BETWEEN_PATTERNS!r}")
        return match

    @property
    def pattern_of_all(self) -> str:
        return self.match

    def pattern_of_group(self, pattern: str) -> str:
        return f"{self.match}{BETWEEN_PATTERNS}{pattern}"


class OptimizerConfig(SingleOptimizerConfig):
    """The optimizer class, its arguments, and groups of parameters with other arguments; or a list of several optimizers."""

    entries: Annotated[tuple[OptimizerEntry, ...], Field(strict=False)] = ()
    """Several optimizers, each for the parameters that its pattern matches: `{match: "blocks.*.weight", function: ...}`. A job
    file gives the list in the place of the section. Empty: one optimizer trains all parameters."""

    @model_validator(mode="before")
    @classmethod
    def _several(cls, value: T) -> T | dict[str, Any]:
        """Of a list the section with it."""
        if isinstance(value, list) and value and isinstance(value[0], str):
            raise ConfigError(
                f"optimizer is a list that begins with the text {repr_text(value[0])}, and its entries are optimizers, each "
                "for some of the parameters",
                cure=f"for one optimizer write optimizer: {{function: {shorten(value[0])}, args: {{lr: 0.001}}}}; for several "
                "a list of {match: PATTERN, function: module:name, args: {...}}",
            )
        if isinstance(value, list) and value:
            return {"entries": value, "function": SEVERAL_OPTIMIZERS}
        if not isinstance(value, Mapping) or not value.get("entries"):
            return value
        if value.get("function") not in (None, SEVERAL_OPTIMIZERS):
            raise ConfigError(
                f"optimizer has entries and function: {shorten(value['function'])}, and either trains all parameters",
                cure='make it one of the entries: the last one, with match: "*"',
            )
        return {**value, "function": SEVERAL_OPTIMIZERS}

    @model_validator(mode="after")
    def _entries_say_all(self) -> OptimizerConfig:
        for name in ("args", "groups") if self.entries else ():
            if getattr(self, name):
                raise ConfigError(f"optimizer has entries and {name}", cure=f"give {name} to one of the entries")
        for number, entry in enumerate(self.entries):
            if entry.match == ALL_PARAMETERS and number + 1 < len(self.entries):
                later = f"{ENTRY.format(number + 1)} (match: {self.entries[number + 1].match!r})"
                raise ConfigError(
                    f"{ENTRY.format(number)} has match: {ALL_PARAMETERS!r}, all parameters, and leaves none to {later}",
                    cure=f"give match: {ALL_PARAMETERS!r} to the last entry alone: the first that matches counts",
                )
            if entry.lr_schedule is not None and entry.lr_schedule.metric is not None:
                raise ConfigError(
                    f"{ENTRY.format(number)}.lr_schedule ({entry.match!r}) has metric {entry.lr_schedule.metric}",
                    cure="set metric in the job's lr_schedule, which optimizers without one of their own follow",
                )
        return self

    def key_of(self, one: SingleOptimizerConfig) -> str:
        """The key of one of `each`, and the pattern of its parameters: `optimizer`, or `optimizer.entries.1 ('*.bias')`."""
        number = next((number for number, entry in enumerate(self.entries) if entry is one), None)
        return "optimizer" if number is None else f"{ENTRY.format(number)} ({one.pattern_of_all!r})"

    @property
    def each(self) -> tuple[SingleOptimizerConfig, ...]:
        """The optimizers, one or several, in the order in which patterns are tried."""
        return self.entries or (self,)

    @property
    def label(self) -> str:
        return ", ".join(dict.fromkeys(entry.label for entry in self.entries)) if self.entries else super().label


def optimizer_of_pattern(pattern: str) -> str:
    """`pattern_of_all` of the optimizer one of whose groups has this pattern (`pattern_of_group`)."""
    before, between, _ = pattern.partition(BETWEEN_PATTERNS)
    return before if between else ALL_PARAMETERS
