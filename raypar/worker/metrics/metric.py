"""One metric: what it measures of a microbatch, and the value that the states of all microbatches make."""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from typing import Protocol, TypeAlias, TypeGuard

import torch
from torch import Tensor

from raypar.errors import ConfigError, UserCodeError, with_article
from raypar.job import MetricConfig
from raypar.model.graph import ModelOutput
from raypar.user_code.stop_signals import reraise_ctrl_c
from raypar.user_code.user_code_errors import USER_CODE_ERRORS, error_text
from raypar.worker.data.sample_reader import TARGET_NAMES
from raypar.worker.metrics.all_predictions import PredictionsMetric
from raypar.worker.metrics.metric_state import LiveObject, MetricObject, MetricValue, ObjectState, State

Batch = Mapping[str, Tensor]
"""The fields of one microbatch, collated."""
Numbers: TypeAlias = "Tensor | float | tuple[Tensor | float, Tensor | float]"
"""What a function that measures returns: one number or tensor that adds up, or (sum, count)."""
MOST_VALUES = 100
"""Most values that one metric may have."""


class Metric(Protocol):
    """A metric of a job, which measures each microbatch by itself."""

    name: str
    """Its name among the job's metrics."""
    needs_batch: bool
    """Whether it reads other fields of the batch than the target."""
    in_training: bool
    """Whether it measures steps of training too."""
    part: str | None
    """The part of the model's output that it gets, as `logits`; None: all of it."""

    def measure(self, output: ModelOutput, batch: Batch, target: Tensor) -> State:
        """The state after this one microbatch. Raises what the user's code raises, and `UserCodeError` for what it returns."""

    merges_by_user: bool
    """Whether `merge` runs code of the user's."""

    def merge(self, before: State, state: State) -> State:
        """The state after the microbatches of `before` and one more. Both are used up. Raises likewise."""

    def pack(self, states: Sequence[State]) -> list[State]:
        """The states as values that can be pickled, their tensors in host memory."""

    def compute(self, state: State) -> MetricValue:
        """The value that the state after all microbatches, packed or not, makes. It is used up. Raises likewise."""


# -- functions ---------------------------------------------------------------------------------------------------------------


class FunctionMetric:
    """A function of (output, batch) or (output, target) that returns (sum, count) or one tensor that adds up.

    Sums are made in float64, of integers in int64, in the order of microbatches (rule 8 of the numerics contract). The
    value of (sum, count) is sum / count, NaN where nothing counts.
    """

    def __init__(self, name: str, function: Callable[..., Numbers], part: str | None = None, target: str = "target") -> None:
        """`target`: how the job calls the target (`data.target`)."""
        self.name, self.part = name, part
        self.needs_batch = not _takes_target(function, (*TARGET_NAMES, target))
        self._function = function

    def measure(self, output: ModelOutput, batch: Batch, target: Tensor) -> State:
        """See `Metric`."""
        found = self._function(output, batch if self.needs_batch else target)
        parts = found if isinstance(found, tuple) and len(found) == 2 else (found,)
        return {"parts": tuple(self._summand(part) for part in parts)}

    merges_by_user = False
    in_training = True

    def merge(self, before: State, state: State) -> State:
        """See `Metric`."""
        totals, parts = self.parts(before), self.parts(state)
        if [part.shape for part in parts] != [total.shape for total in totals]:
            shapes = (" and ".join(str(list(part.shape)) for part in those) for those in (totals, parts))
            raise UserCodeError(
                f"metric {self.name!r} returned {next(shapes)} for one microbatch and {next(shapes)} for another",
                cure="return numbers of the same shape for every microbatch, whatever its size",
            )
        return {"parts": tuple(a + b.to(a.device) for a, b in zip(totals, parts, strict=True))}

    def pack(self, states: Sequence[State]) -> list[State]:
        """See `Metric`. What lies on a device comes as one copy for each dtype, so that it is waited for once."""
        host = iter(_in_one_copy([part for state in states for part in self.parts(state)]))
        return [{"parts": tuple(next(host) for _ in self.parts(state))} for state in states]

    @staticmethod
    def parts(state: State) -> tuple[Tensor, ...]:
        """What a state adds: (sum, count), or one tensor."""
        assert not isinstance(state, (LiveObject, ObjectState)) and "parts" in state
        return state["parts"]

    def compute(self, state: State) -> MetricValue:
        """See `Metric`."""
        total, *count = self.parts(*self.pack([state]))
        if not count:
            return total
        return torch.where(count[0] == 0, math.nan, total.double() / count[0].double())

    def _summand(self, value: Tensor | float) -> Tensor:
        """What is added up: a tensor, float64 or int64, where the value lies: nothing waits for a device. Raises
        `UserCodeError` for what is no number."""
        if isinstance(value, Real):
            return torch.tensor(value, dtype=torch.int64 if isinstance(value, int) else torch.float64)
        if isinstance(value, Tensor) and not value.is_complex() and value.numel() <= MOST_VALUES:
            value = value.detach()
            return _without_more_memory(value.double() if value.is_floating_point() else value.long())
        given = f"a tensor {list(value.shape)}" if isinstance(value, Tensor) else with_article(type(value).__name__)
        raise UserCodeError(
            f"metric {self.name!r} returned {given}",
            cure=f"return (sum, count), or one tensor that adds up over microbatches, of at most {MOST_VALUES} numbers; or "
            "give an object with update, compute, reset and merge_state",
        )


def _in_one_copy(parts: Sequence[Tensor]) -> list[Tensor]:
    """The tensors, of float64 or int64, in host memory."""
    host = list(parts)
    for dtype in (torch.float64, torch.int64):
        places = [place for place, part in enumerate(parts) if part.device.type != "cpu" and part.dtype == dtype]
        if places:
            copied = torch.cat([parts[place].reshape(-1) for place in places]).cpu()
            for place, numbers in zip(places, copied.split([parts[place].numel() for place in places]), strict=True):
                host[place] = numbers.view(parts[place].shape)
    return host


def _takes_target(function: Callable[..., Numbers], names_of_targets: Sequence[str]) -> bool:
    """Whether the function's second parameter has a name of targets: it gets the target in the place of the batch."""
    try:
        names = list(inspect.signature(function).parameters)
    except (TypeError, ValueError):  # a function of C that does not say
        return False
    return len(names) > 1 and names[1] in names_of_targets


# -- objects -----------------------------------------------------------------------------------------------------------------


class TorchmetricsObject(MetricObject, Protocol):
    """One of torchmetrics: its states by name, and its own rule of how two of them are reduced to one."""

    _defaults: Mapping[str, object]
    _update_count: int

    def _reduce_states(self, incoming_state: Mapping[str, object], /) -> None: ...


def _is_of_torchmetrics(one: MetricObject) -> TypeGuard[TorchmetricsObject]:
    return all(hasattr(one, name) for name in ("_defaults", "_update_count", "_reduce_states"))


class ObjectMetric:
    """An object with `update(output, target)`, `compute` and `reset`. Each microbatch is taken by a copy of its own.

    States are merged by the object's own rule: `merge_state(other)`, or of torchmetrics' objects what each state says of its
    reduction over processes (`dist_reduce_fx`).
    """

    needs_batch = False
    in_training = True

    def __init__(self, name: str, made: MetricObject, part: str | None = None) -> None:
        """Raises `ConfigError` for an object whose states cannot be merged."""
        self.name, self.part = name, part
        self._reset = copy.deepcopy(made)
        self._reset.reset()
        if not _is_of_torchmetrics(made) and not (hasattr(made, "merge_state") and hasattr(made, "__dict__")):
            raise ConfigError(
                f"metric {name!r} ({type(made).__name__}) has no merge_state: each microbatch is measured by itself, and the "
                "states of all are merged",
                cure="give it a method merge_state(other) that adds the state of another one, or give a function that returns "
                "(sum, count)",
            )
        made = self._reset
        self._of_library = [copy.deepcopy(made), copy.deepcopy(made)] if _is_of_torchmetrics(made) else []

    merges_by_user = True

    def measure(self, output: ModelOutput, batch: Batch, target: Tensor) -> State:
        """See `Metric`."""
        one = self.new()
        if target.device.type != "cpu" and hasattr(one, "to"):
            one = one.to(target.device)
        one.update(output, target)
        if _is_of_torchmetrics(one):
            return self.pack([self._state_of_library(one)])[0]
        state = LiveObject(one)
        return state if target.device.type == "cpu" else self.pack([state])[0]

    def merge(self, before: State, state: State) -> State:
        """See `Metric`."""
        if not self._of_library:
            first, later = self._with_state(before), self._with_state(state)
            assert hasattr(first, "merge_state")
            first.merge_state(later)
            return LiveObject(first)
        # All that a microbatch leaves in an object of torchmetrics are its states, so the same two objects serve every merge.
        for one, found in zip(self._of_library, (before, state), strict=True):
            _set_state(one, found)
        one, later_one = self._of_library
        _reduce(one, later_one)
        return self._state_of_library(later_one)

    def pack(self, states: Sequence[State]) -> list[State]:
        """See `Metric`. What each copy shares with the others, such as functions, stays here."""
        shared = vars(self._reset) if hasattr(self._reset, "__dict__") else {}
        packed: list[State] = []
        for state in states:
            if isinstance(state, LiveObject):
                own = {n: value for n, value in vars(state.one).items() if n not in shared or value is not shared[n]}
            else:
                own = dict(state)
            packed.append(ObjectState({n: _in_host_memory(value) for n, value in own.items()}))
        return packed

    def compute(self, state: State) -> MetricValue:
        """See `Metric`."""
        return self._with_state(state).compute()

    @staticmethod
    def _state_of_library(one: TorchmetricsObject) -> ObjectState:
        return ObjectState({name: getattr(one, name) for name in (*one._defaults, "_update_count")})

    def new(self) -> MetricObject:
        """A copy that has taken nothing."""
        return copy.deepcopy(self._reset)

    def _with_state(self, state: State) -> MetricObject:
        """The object that has taken the microbatch: itself, or of what it has sent."""
        if isinstance(state, LiveObject):
            return state.one
        one = self.new()
        _set_state(one, state)
        return one


def _set_state(one: MetricObject, state: State) -> None:
    assert not isinstance(state, LiveObject)
    for name, value in state.items():
        setattr(one, name, value)


def _reduce(first: TorchmetricsObject, later: TorchmetricsObject) -> None:
    """Make `later` the object of both. Of lists, what comes in is put before what is there."""
    later._update_count += first._update_count  # by which a state that is a mean is divided
    later._reduce_states({name: getattr(first, name) for name in first._defaults})


def _without_more_memory(tensor: Tensor) -> Tensor:
    """The tensor, in memory of its own: a view would keep, and be pickled with, all that it is of."""
    own = tensor.untyped_storage().nbytes() == tensor.nbytes and tensor.is_contiguous()
    return tensor if own else tensor.contiguous().clone()


def _in_host_memory(value: object) -> object:
    """The value with its tensors in host memory, each in memory of its own."""
    if isinstance(value, Tensor):
        return _without_more_memory(value.detach().cpu())
    if isinstance(value, (list, tuple)) and type(value) in (list, tuple):
        parts = [_in_host_memory(each) for each in value]
        return parts if isinstance(value, list) else tuple(parts)
    if isinstance(value, dict) and type(value) is dict:
        return {name: _in_host_memory(each) for name, each in value.items()}
    return value


# -- both --------------------------------------------------------------------------------------------------------------------


def make_metrics(configs: Mapping[str, MetricConfig], target: str = "target") -> dict[str, Metric]:
    """The metrics of a job by name. `target`: how the job calls the target. Raises `ConfigError`."""
    return {name: make_metric(name, ref, target) for name, ref in configs.items()}


def make_metric(name: str, ref: MetricConfig, target: str = "target") -> Metric:
    """The metric that a function, a class, or a function that makes an object stands for. Raises `ConfigError`."""
    given = ref.resolve()
    if ref.of == "all":
        return PredictionsMetric(
            name,
            ref.partial(),
            part=ref.output,
            preprocess=ref.preprocess_logits.partial() if ref.preprocess_logits is not None else None,
            limit_bytes=ref.limit_mib << 20,
        )
    if isinstance(given, type) or _makes_object(given, ref.args):
        try:
            made = ref.call(f"metrics.{name}.args")
        except ConfigError:
            raise
        except USER_CODE_ERRORS as error:
            reraise_ctrl_c(error)
            raise ConfigError(
                f"metric {name!r}: {ref.label} refused its arguments: {error_text(error)}",
                cure=f"compare metrics.{name}.args with its signature",
            ) from error
    else:
        made = ref.partial()
    if all(callable(getattr(made, method, None)) for method in ("update", "compute", "reset")):
        return ObjectMetric(name, made, ref.output)
    if not callable(made):
        raise ConfigError(
            f"metric {name!r} is {with_article(type(made).__name__)}",
            cure="give a function of (output, batch) or (output, target), or an object with update, compute, reset and "
            "merge_state",
        )
    return FunctionMetric(name, made, ref.output, target)


def part_of_output(metric: Metric, output: ModelOutput) -> ModelOutput:
    """What a metric gets of the model's output. Raises `UserCodeError` for an output without its part."""
    found = output
    for name in metric.part.split(".") if metric.part is not None else ():
        if isinstance(found, Mapping) and name in found:
            found = found[name]
        elif isinstance(found, (tuple, list)) and name.isdecimal() and int(name) < len(found):
            found = found[int(name)]
        elif not isinstance(found, Tensor) and hasattr(found, name):
            found = getattr(found, name)
        else:
            has = f" with {', '.join(map(str, found))}" if isinstance(found, Mapping) else ""
            raise UserCodeError(
                f"metric {metric.name!r} measures {metric.part!r} of the model's output, which is "
                f"{with_article(type(output).__name__)}{has}",
                cure=f"set metrics.{metric.name}.output to a name that it has, or leave it out: then the metric gets all of it",
            )
    return found


def _makes_object(function: Callable[..., object], args: Mapping[str, object]) -> bool:
    """Whether a function needs nothing but `args`: one that measures needs the output and the target too."""
    try:
        inspect.signature(function).bind(**args)
    except (TypeError, ValueError):
        return False
    return True


def values_by_name(name: str, value: MetricValue) -> dict[str, float]:
    """The numbers of a metric's value: one under its own name, those of a mapping or vector as `name/key`.

    Raises `UserCodeError` for a value that is none of these.
    """
    if isinstance(value, Mapping):
        parts = [(str(key), each) for key, each in value.items()]
    elif isinstance(value, (list, tuple)):
        parts = [(str(place), each) for place, each in enumerate(value)]
    elif isinstance(value, Tensor) and value.dim() == 1 and value.numel() != 1:
        parts = [(str(place), each) for place, each in enumerate(value.tolist())]
    else:
        try:
            return {name: float(value)}
        except (TypeError, ValueError, RuntimeError):
            shape = getattr(value, "shape", None)
            given = f"{type(value).__name__} {list(shape)}" if shape is not None else type(value).__name__
            raise UserCodeError(
                f"metric {name!r} has the value {with_article(given)}",
                cure="compute a number, a vector of numbers, or a dict of them",
            ) from None
    if len(parts) > MOST_VALUES:
        raise UserCodeError(f"metric {name!r} has {len(parts):,} values", cure=f"compute at most {MOST_VALUES}")
    return {full: number for key, each in parts for full, number in values_by_name(f"{name}/{key}", each).items()}
