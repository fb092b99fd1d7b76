"""What a job is, apart from any plan: the frozen description that config or `Trainer` makes and every worker receives."""

from __future__ import annotations

import difflib
import functools
import hashlib
import importlib
import inspect
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from raypar.errors import ConfigError, with_article
from raypar.files.untrusted_files import repr_text, shorten
from raypar.plan.microbatches import Microbatches
from raypar.user_code.user_code_errors import USER_CODE_ERRORS, error_text, reraise_ctrl_c
from raypar.worker.autocast_precisions import AUTOCAST_PRECISIONS, AutocastPrecision, PrecisionName

if TYPE_CHECKING:
    from raypar.worker.init_from_setting import InitialWeightsFile


CONTRACT_CHARACTERS = 10_000
"""The longest text of a function that a contract holds as it is. That of a list of samples is the text of all of them."""


LOSS_OF_MODEL = "model"
"""In the place of a loss function: the model returns an object with a `loss`."""


@dataclass(frozen=True)
class Ref:
    """A user's function with its keyword arguments."""

    target: str | Callable[..., Any]
    """`module:name`, importable on every worker, or the callable itself."""
    args: Mapping[str, Any] = field(default_factory=dict)
    """The keyword arguments."""

    @property
    def is_loss_of_model(self) -> bool:
        """Whether it stands for the loss that the model itself computes."""
        return self.target == LOSS_OF_MODEL

    def resolve(self) -> Callable[..., Any]:
        """Import the function. Raises `ConfigError` naming what could not be imported."""
        if callable(self.target):
            return self.target
        module, _, name = self.target.partition(":")
        try:
            found: Any = importlib.import_module(module)
            for part in name.split("."):
                found = getattr(found, part)
        except USER_CODE_ERRORS as error:
            reraise_ctrl_c(error)
            raise ConfigError(
                f"cannot import {self.target!r}: {error_text(error)}",
                cure="write it as module:name and run where the module can be imported (current folder, installed package)",
            ) from error
        if not callable(found):
            raise ConfigError(
                f"{self.target!r} is {with_article(type(found).__name__)}, not callable", cure="name a function or class"
            )
        return found  # type: ignore[no-any-return]

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
        if isinstance(self.target, str):
            return self.target
        text = str(getattr(self.target, "label_in_messages", "")) or stable_callable_label(self.target)
        return shorten(text) if "\n" not in text else type(self.target).__name__

    @property
    def contract_text(self) -> str:
        """The function in a checkpoint's contract: its name; of a given object its `repr`: slow for many samples."""
        return shorten_contract_text(self.target if isinstance(self.target, str) else stable_callable_label(self.target))


def argument_refusal(function: Callable[..., Any], args: Mapping[str, Any], label: str, key: str) -> ConfigError | None:
    """The error for arguments `args` that a function does not take, or for those that it needs and does not get.

    None if its signature takes `args`, or is not known. `label`: the function's name; `key`: the job's key of the arguments.
    """
    try:
        taken = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return None
    named = {one.name: one for one in taken if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)}
    lacks = [one.name for one in named.values() if one.default is one.empty and one.name not in args]
    unknown = [name for name in args if name not in named]
    if any(one.kind is one.VAR_KEYWORD for one in taken):
        unknown = []
    shown = ", ".join(
        name if one.default is one.empty else f"{name}={repr_text(one.default, 60)}" for name, one in named.items()
    )
    takes = f"it takes {shown}" if shown else "it takes none"
    if unknown:
        near = difflib.get_close_matches(unknown[0], named, n=1)
        cure = (f"did you mean {near[0]}? " if near else f"leave {unknown[0]} out of {key}: ") + takes
        return ConfigError(f"{key}.{unknown[0]}: {label} has no such argument", cure)
    if lacks:
        given = "from Python the dict in (function, dict)"
        return ConfigError(f"{key} lacks {', '.join(lacks)}, which {label} needs", f"add it to {key} ({given}): {takes}")
    return None


def shorten_contract_text(text: str) -> str:
    """A text as a contract holds it: with its hash in place of most of it if it is longer than `CONTRACT_CHARACTERS`."""
    if len(text) <= CONTRACT_CHARACTERS:
        return text
    return f"{text[:80]}... (sha256 {hashlib.sha256(text.encode()).hexdigest()})"


def stable_callable_label(target: Callable[..., Any], inside: tuple[int, ...] = ()) -> str:
    """Text for a callable that is the same in every process: its name; for a `partial` or loss module also its values.

    `inside`: see `stable_argument_text`.
    """
    if isinstance(target, functools.partial):
        inside = (*inside, id(target))
        given = [stable_argument_text(value, inside) for value in target.args]
        given += [f"{name}={stable_argument_text(value, inside)}" for name, value in sorted(target.keywords.items())]
        return f"partial({', '.join([stable_callable_label(target.func, inside), *given])})"
    if hasattr(target, "named_buffers") and not isinstance(target, type):  # a loss module
        options = [f"{k}={v!r}" for k, v in vars(target).items() if isinstance(v, (int, float, str)) and k[0] != "_"]
        options += [f"{name}={stable_argument_text(buffer)}" for name, buffer in target.named_buffers()]
        return f"{type(target).__qualname__}({', '.join(o for o in options if not o.startswith('training='))})"
    return str(getattr(target, "__qualname__", "")) or without_addresses(repr(target))


def stable_argument_text(value: Any, inside: tuple[int, ...] = ()) -> str:
    """Text for an argument that is the same in every process; for a tensor or array: shape, type and a hash of the values.

    `inside`: ids of the containers around the argument; a container inside itself is `...`, as in Python's `repr`.
    """
    if id(value) in inside:
        return "..."
    if isinstance(value, (list, tuple, set, frozenset)):
        parts = [stable_argument_text(item, (*inside, id(value))) for item in value]
        return f"{type(value).__name__}({', '.join(sorted(parts) if isinstance(value, (set, frozenset)) else parts)})"
    if isinstance(value, Mapping):
        inside = (*inside, id(value))
        return (
            "{"
            + ", ".join(f"{stable_argument_text(k, inside)}: {stable_argument_text(v, inside)}" for k, v in value.items())
            + "}"
        )
    if hasattr(value, "named_parameters") and not isinstance(value, type):
        return " ".join(
            [
                stable_callable_label(value),
                *(f"{name}={stable_argument_text(tensor)}" for name, tensor in value.named_parameters()),
            ]
        )
    if callable(value):
        return stable_callable_label(value, inside)
    if all(hasattr(value, name) for name in ("dtype", "shape", "tolist")):
        try:
            values = value.tolist()
        except (RuntimeError, TypeError):  # no dense values of its own: meta, sparse, quantized
            return without_addresses(repr(value))
        digest = hashlib.sha256(repr(values).encode()).hexdigest()
        return f"{type(value).__name__}({value.dtype}, {list(value.shape)}, sha256 {digest[:16]})"
    return without_addresses(repr(value))


def find_unstable_argument(target: Any, inside: tuple[int, ...] = ()) -> str | None:
    """The `repr` of an argument, bound by a `functools.partial`, that is known by its address only; None if there is none.

    A resumed run could not tell such an argument from another. `inside`: see `stable_argument_text`.
    """
    if id(target) in inside:
        return None
    if isinstance(target, functools.partial):
        given = [*target.args, *target.keywords.values(), target.func]
    elif isinstance(target, Mapping):
        given = list(target.values())
    elif isinstance(target, (list, tuple, set, frozenset)):
        given = list(target)
    else:
        if isinstance(target, type) or hasattr(target, "__qualname__") or hasattr(target, "named_buffers"):
            return None
        text = re.sub(rf"(<function [^ ]+){_ADDRESS}>", r"\1>", repr(target))  # in a dataclass, say: its name tells it
        return None if without_addresses(text) == text else repr(target)
    inside = (*inside, id(target))
    found = (find_unstable_argument(value, inside) for value in given)
    return next((one for one in found if one is not None), None)


def without_addresses(text: str) -> str:
    """A `repr` without the addresses of objects, which differ from process to process."""
    return re.sub(_ADDRESS, "", text)


_ADDRESS = r" at 0x[0-9a-fA-F]+"
"""An address in a `repr`: Python writes small letters, numpy's generators capitals."""


@dataclass(frozen=True)
class DataSpec:
    """A map-style data set and how its samples become the fields of a batch.

    Samples are dicts or tuples of tensors, arrays and numbers.
    """

    dataset: Ref
    """The function that makes the data set."""
    names: tuple[str, ...] = ()
    """Names of the fields of tuple samples; by default `x`, `y`, `z`."""
    input: str | None = None
    """The field that the first layer of a sequential model reads; by default `x`."""
    target: str | None = None
    """The field, or value of the graph, with which the loss compares the model's output; by default `y`."""
    processes: int = 0
    """Number of CPU processes that read samples; 0: the worker itself reads them."""


@dataclass(frozen=True)
class OptimizerSpec:
    """A `torch.optim` class with its arguments, for all parameters and for groups of them."""

    optimizer: Ref
    """The class and its arguments."""
    groups: tuple[tuple[str, Mapping[str, Any]], ...] = ()
    """(pattern of parameter names, arguments that differ for them); the first pattern that matches counts."""


@dataclass(frozen=True)
class ValidationSpec:
    """When a run validates, and on which samples."""

    data: DataSpec
    """The validation data."""
    every: int = 0
    """Validate after every so many steps, and at the end; 0: at the end only."""
    samples: int = 0
    """How many samples, the first ones, a validation pass reads; 0: all."""


@dataclass(frozen=True)
class Precision:
    """The dtypes in which a job computes, where they are others than the job's `dtype`."""

    compute: PrecisionName | None = None
    """Layers and the loss run under `torch.autocast` to this precision; parameters and their gradients stay float32. None:
    everything is computed in the job's `dtype`."""

    @property
    def autocast(self) -> AutocastPrecision | None:
        """What `compute` means; None without mixed precision."""
        return None if self.compute is None else AUTOCAST_PRECISIONS[self.compute]

    def describe(self) -> str | None:
        """The precision in words, for people; None where everything is computed in the job's `dtype`."""
        if self.compute is None:
            return None
        return f"layers and the loss compute in {self.compute} (torch.autocast), parameters and their gradients are float32"


@dataclass(frozen=True)
class JobSpec:
    """Everything that a result may depend on to the last bit, and nothing about the cluster."""

    name: str
    """The run's name."""
    seed: int
    """Decides initial values, the order of samples, and all random numbers that layers draw."""
    steps: int
    """Number of training steps."""
    batch_size: int
    """Samples in a step."""
    microbatches: int
    """Microbatches in a step."""
    model: Ref
    """The function that makes the model."""
    loss: Ref
    """The loss: a function, a loss module, or a class of such."""
    data: DataSpec
    """The training data."""
    optimizer: OptimizerSpec
    """The optimizer."""
    virtual_replicas: int = 0
    """Number of blocks of microbatches, in whose order gradients are added; 0: one for each microbatch, at most 16."""
    lr_schedule: Ref | None = None
    """Function of the step that returns the factor on the learning rates; None: always 1."""
    clip_norm: float | None = None
    """Largest norm of the gradient; None: no clipping."""
    validation: ValidationSpec | None = None
    """Validation; None: there is none."""
    dtype: Literal["float32", "float64"] = "float32"
    """Dtype of the model."""
    precision: Precision = Precision()
    """The dtype in which layers and the loss compute."""
    units: tuple[str, ...] = ()
    """Patterns of modules that run whole, for a model that is captured; none: they are found."""
    device: str = "cpu"
    """A name of `worker.backend.BACKENDS`."""
    threads: int = 1
    """Threads in which PyTorch computes in each worker."""
    reduction: Literal["canonical", "fast"] = "canonical"
    """How gradients are added over replicas: in one order under every plan, or as is fastest."""
    non_finite: Literal["stop", "skip"] = "stop"
    """What happens in a step whose loss or norm is not finite: the run stops, or the step is skipped."""
    styles: tuple[tuple[str, str], ...] = ()
    """(pattern of layer names, style), the first match counts (`model.tensor_parallel.styles`); for stages with shards only."""
    sequence_parallel: bool = False
    """Whether values between layers are cut over the sequence; for stages with shards only."""
    init: Literal["model", "by-name"] = "model"
    """Parameters begin with the model function's values (`model`), or with those that each module's `reset_parameters` gives
    under a seed made from its name (`by-name`)."""
    deferred_init: Literal["auto", "always", "never"] = "auto"
    """Whether large tensors are computed only by the workers that own them (`auto`: if the model function allocates more than
    1 GiB); the values are the same."""
    init_from: InitialWeightsFile | None = None
    """Weights to begin with instead of initial values."""
    init_fingerprint: str = ""
    """Fingerprint of the file of `init_from`, as the process that started the run saw it."""
    buffers: Literal["refuse", "last", "sum"] = "refuse"
    """What becomes of buffers that forward writes in training; those of norms with running statistics need no policy."""

    @property
    def batching(self) -> Microbatches:
        """How the samples of a step are divided into microbatches, and these into blocks."""
        return Microbatches(self.microbatches, self.virtual_replicas, self.batch_size)


CONTRACT_EDITION = 2
"""Edition of the numerics contract (`raypar/NUMERICS.md`) of this release. Checkpoints of the first do not name theirs."""


def loss_target_name(spec: JobSpec) -> str:
    """Name of the value with which the loss compares the model's output; of the labels, if the model computes the loss."""
    return spec.data.target or ("labels" if spec.loss.is_loss_of_model else "y")


def contract_of_job(spec: JobSpec) -> dict[str, Any]:
    """The settings of a job on which its bits depend, as JSON values; `steps` and validation are not among them."""
    made: dict[str, Any] = {
        "edition": CONTRACT_EDITION,
        "seed": spec.seed,
        "batch_size": spec.batch_size,
        "microbatches": spec.microbatches,
        "virtual_replicas": spec.batching.blocks,
        "dtype": spec.dtype,
        "device": spec.device,
        "threads": spec.threads,
        "reduction": spec.reduction,
        "non_finite": spec.non_finite,
        "clip_norm": spec.clip_norm,
        "model": _ref(spec.model),
        "loss": _ref(spec.loss),
        "data": _ref(spec.data.dataset),
        "optimizer": {**_ref(spec.optimizer.optimizer), "groups": [[p, dict(o)] for p, o in spec.optimizer.groups]},
        "lr_schedule": _ref(spec.lr_schedule) if spec.lr_schedule is not None else None,
    }
    # Jobs that say nothing of these have the contract that they had before there were any; without shards the first two do not
    # matter.
    made |= {"styles": [list(pair) for pair in spec.styles]} if spec.styles else {}
    made |= {"sequence_parallel": True} if spec.sequence_parallel else {}
    made |= {"buffers": spec.buffers} if spec.buffers != "refuse" else {}
    made |= {"units": list(spec.units)} if spec.units else {}
    made |= {"precision": {"compute": spec.precision.compute}} if spec.precision.compute is not None else {}
    plain: dict[str, Any] = json.loads(json.dumps(made, default=_as_text))
    return plain


def _as_text(value: Any) -> str:
    """An argument that is no JSON value; a tensor with all of its values, which its `repr` has not."""
    return (
        stable_argument_text(value)
        if hasattr(value, "tolist") or isinstance(value, (set, frozenset))
        else without_addresses(repr(value))
    )


def _ref(ref: Ref) -> dict[str, Any]:
    return {"function": ref.contract_text, "args": dict(ref.args)}
