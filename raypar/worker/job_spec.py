"""What a job is, apart from any plan: the frozen description that config or `Trainer` makes and every worker receives."""

from __future__ import annotations

import functools
import hashlib
import importlib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from raypar.errors import ConfigError
from raypar.plan.microbatches import Microbatches
from raypar.user_code import USER_CODE_ERRORS, error_text, reraise_ctrl_c

if TYPE_CHECKING:
    from raypar.worker.weights_source import WeightsSource


@dataclass(frozen=True)
class Ref:
    """A user function: `module:name` (importable on every worker) or the callable itself, with keyword arguments."""

    target: str | Callable[..., Any]
    args: Mapping[str, Any] = field(default_factory=dict)

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
            raise ConfigError(f"{self.target!r} is a {type(found).__name__}, not callable", cure="name a function or class")
        return found  # type: ignore[no-any-return]

    def call(self) -> Any:
        """`function(**args)`: for factories of models and data sets."""
        return self.resolve()(**self.args)

    def partial(self) -> Callable[..., Any]:
        """The function with `args` bound: for losses and schedules, called later with more arguments."""
        return functools.partial(self.resolve(), **self.args) if self.args else self.resolve()

    @property
    def label(self) -> str:
        """The function's name, in messages and in a checkpoint's contract; of a loss module its class with its options."""
        if isinstance(self.target, str):
            return self.target
        return stable_callable_label(self.target)


def stable_callable_label(target: Callable[..., Any], inside: tuple[int, ...] = ()) -> str:
    """A callable as text that is the same in every process: name, and for objects what they hold. `inside`: see
    `stable_argument_text`."""
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
    """An argument as text that is the same in every process; of a tensor or an array shape, type and a hash of its values.

    `inside`: ids of the containers that it is in; one of these again is `...`, as in Python's `repr`.
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
    """The text of an argument bound by a `functools.partial` that names an address only, so that a resumed run could not tell
    it from another; None if there is none. `inside`: see `stable_argument_text`."""
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
    return next((text for value in given if (text := find_unstable_argument(value, inside)) is not None), None)


def without_addresses(text: str) -> str:
    """A `repr` without the addresses of objects, which are no part of what they are."""
    return re.sub(_ADDRESS, "", text)


_ADDRESS = r" at 0x[0-9a-fA-F]+"
"""As Python writes it, or numpy, whose generators have capitals."""


@dataclass(frozen=True)
class DataSpec:
    """A map-style data set and how its samples become the fields of a batch.

    Samples are dicts of tensors/arrays/numbers, or tuples (then the fields are called `x`, `y`, `z`, or `names`).
    `input`: field read by the first layer of a sequential model (default `x`); `target`: field given to the loss (default
    `y`). `processes` > 0 loads in that many CPU processes.
    """

    dataset: Ref
    names: tuple[str, ...] = ()
    input: str | None = None
    target: str | None = None
    processes: int = 0


@dataclass(frozen=True)
class OptimizerSpec:
    """A `torch.optim` class with its arguments; `groups`: (name pattern, overrides), the first matching pattern wins."""

    optimizer: Ref
    groups: tuple[tuple[str, Mapping[str, Any]], ...] = ()


@dataclass(frozen=True)
class ValidationSpec:
    """Evaluate `samples` samples (0: all) of `data` every `every` steps and at the end."""

    data: DataSpec
    every: int = 0
    samples: int = 0


@dataclass(frozen=True)
class JobSpec:
    """Everything that a result may depend on to the last bit, and nothing about the cluster.

    `styles`: (pattern of layer names, style), the first match counts (`model.tensor_parallel.styles`); `sequence_parallel`:
    between layers values are cut over the sequence. Both matter to stages with several shards only.
    `init`: parameters begin with the values that the model function gives them (`model`), or with those that every module's
    `reset_parameters` gives under a seed made from its name (`by-name`). `deferred_init`: whether large tensors are computed
    only by the workers that own them (`auto`: if the model function allocates more than 1 GiB); the values are the same.
    `init_from`: weights to begin with instead; `init_fingerprint`: of that file, as the process that started the run saw it.
    """

    name: str
    seed: int
    steps: int
    batch_size: int
    microbatches: int
    model: Ref
    loss: Ref
    data: DataSpec
    optimizer: OptimizerSpec
    virtual_replicas: int = 0
    lr_schedule: Ref | None = None
    clip_norm: float | None = None
    validation: ValidationSpec | None = None
    dtype: Literal["float32", "float64"] = "float32"
    device: str = "cpu"
    """A name of `worker.backend.BACKENDS`."""
    threads: int = 1
    reduction: Literal["canonical", "fast"] = "canonical"
    non_finite: Literal["stop", "skip"] = "stop"
    styles: tuple[tuple[str, str], ...] = ()
    sequence_parallel: bool = False
    init: Literal["model", "by-name"] = "model"
    deferred_init: Literal["auto", "always", "never"] = "auto"
    init_from: WeightsSource | None = None
    init_fingerprint: str = ""

    @property
    def batching(self) -> Microbatches:
        """How the samples of a step are divided into microbatches, and these into blocks."""
        return Microbatches(self.microbatches, self.virtual_replicas, self.batch_size)
