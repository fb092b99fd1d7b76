"""The learning rates of a job's steps: a factor by step, or what a scheduler gives a dummy optimizer (rule 8), after each step
or after each validation."""

from __future__ import annotations

import copy
import inspect
import traceback
import types
import warnings
from collections.abc import Callable, Mapping
from typing import Protocol, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from raypar.errors import ConfigError, RayparError, UserCodeError, with_article
from raypar.job import FunctionConfig, Job, LrScheduleConfig, SingleOptimizerConfig
from raypar.job.stable_callable_text import argument_refusal
from raypar.model.graph import Graph
from raypar.model.layer_skeletons import frozen_parameters, parameter_shapes
from raypar.user_code.stop_signals import reraise_ctrl_c
from raypar.user_code.user_code_errors import USER_CODE_ERRORS, error_text
from raypar.worker.layer_precisions import dtype_of_job
from raypar.worker.step.optimizer_and_parameter_groups import (
    build_optimizer,
    names_by_entry,
    optimizer_group_of,
    read_learning_rate,
    set_learning_rate,
)
from raypar.worker.step.optimizer_state import pattern_of_optimizer
from raypar.worker.step.several_optimizers import optimizers_in

RECENT = 64
"""Steps whose values are kept: a step that runs again asks for them again."""

Entry: TypeAlias = "Tensor | float | bool | tuple[Entry, ...] | None"
"""An entry of a group of parameters: a number, or a tuple of them, such as `betas`."""
EntriesByGroup = Mapping[str, Mapping[str, Entry]]
"""Pattern of a group -> key -> its entry."""


class LearningRates(Protocol):
    """The learning rates of a job, by step."""

    def set(self, optimizer: torch.optim.Optimizer, step: int) -> float | None:
        """Set what all groups have in a step, from 0. Returns the learning rate of parameters in no group of their own, or
        None for an optimizer without one. Raises what users' code raises."""


class FactorRates:
    """The learning rates that the optimizer was made with, times a function of the step."""

    def __init__(self, factor: Callable[[int], float]) -> None:
        self._factor = factor

    def set(self, optimizer: torch.optim.Optimizer, step: int) -> float | None:
        factor = self._factor(step)
        set_learning_rate(optimizer, factor)
        return read_learning_rate(optimizer, factor)


class SchedulerRates:
    """What the plain loop `optimizer.step(); scheduler.step()` has in each step: learning rates, and momenta if they change.

    A scheduler counts its calls, so it is run from the first step on, on an optimizer of the job's class with one small
    parameter in each of the job's groups. What the groups of that one hold before step n is a pure function of n; with
    `lr_schedule.metric`, whose scheduler makes a step after each validation, of the values of the validations up to n.
    """

    _entry: SingleOptimizerConfig
    """The optimizer of the job."""
    _ref: LrScheduleConfig
    """What makes the scheduler."""
    _dtype: torch.dtype
    """Dtype of the parameters."""
    _validated: Mapping[int, float]
    """Number of steps done -> value of the metric that the scheduler follows, if it does, of all validations so far, ascending;
    others add to it."""
    _dims: Mapping[str, int]
    """Qualified name of each parameter of the whole model that the optimizer trains -> its number of dimensions."""
    _optimizer: torch.optim.Optimizer
    """The dummy."""
    _scheduler: LRScheduler | ReduceLROnPlateau
    """The scheduler, of the dummy."""
    _first: EntriesByGroup
    """What the dummy's groups held before the scheduler was made."""
    _changed: set[tuple[str, str]]
    """(pattern, key) of the entries that the scheduler has changed up to now, and of all learning rates."""
    _place: int
    """How many steps the scheduler has made."""
    _given: list[tuple[float, ...]]
    """What the scheduler was given by its steps; a validation of state that was wrong is run again, and finds another value."""
    _recent: dict[int, EntriesByGroup]
    """Number of the scheduler's steps -> what the dummy's groups hold after them, of the last ones."""

    def __init__(
        self,
        entry: SingleOptimizerConfig,
        ref: LrScheduleConfig,
        dtype: torch.dtype,
        dims: Mapping[str, int],
        validated: Mapping[int, float],
    ) -> None:
        """Raises `ConfigError` or `UserCodeError` for a scheduler that cannot be made, or needs a metric and has none."""
        self._entry, self._ref, self._dtype, self._dims, self._validated = entry, ref, dtype, dims, validated
        self._changed = set()
        self._begin()

    def set(self, optimizer: torch.optim.Optimizer, step: int) -> float | None:
        values = self.at(step)
        for group in optimizer.param_groups:
            for key, value in values[group["raypar_pattern"]].items():
                if isinstance(group.get(key), Tensor) and isinstance(value, (int, float)):
                    group[key].fill_(value)
                else:
                    group[key] = value
            group["raypar_scheduled"] = tuple(values[group["raypar_pattern"]])
        *_, last = values.values()
        lr = last.get("lr")
        return float(lr) if isinstance(lr, (int, float)) else None

    def at(self, step: int) -> EntriesByGroup:
        """What the scheduler sets in a step, from 0: also what it changes later only, and may have changed already when a step
        runs again. The groups are in the job's order, that of all other parameters last."""
        given = [(value,) for done, value in self._validated.items() if done <= step] if self._ref.metric else None
        calls = step if given is None else len(given)
        if given is not None and any(old is not new for (old,), (new,) in zip(self._given, given, strict=False)):
            self._begin()
        if calls not in self._recent and calls < self._place:
            self._begin()
        while self._place < calls:
            self._optimizer.step()
            if given is not None:
                self._given.append(given[self._place])
            self._scheduler.step(*(given[self._place] if given is not None else ()))
            self._place += 1
            if self._place > calls - RECENT:
                self._note()
        for old in [place for place in self._recent if place <= self._place - RECENT]:
            del self._recent[old]
        return {
            pattern: {key: value for key, value in entries.items() if (pattern, key) in self._changed}
            for pattern, entries in self._recent[calls].items()
        }

    def _begin(self) -> None:
        """Make optimizer and scheduler, ready for step 0."""
        self._optimizer = _dummy(self._entry, self._dims, self._dtype)
        vars(self._optimizer)["step"] = types.MethodType(_no_step, self._optimizer)
        self._first = _entries(self._optimizer)
        self._place, self._recent, self._given = 0, {}, []
        self._scheduler = _make_scheduler(self._ref, self._optimizer)
        self._note()

    def _note(self) -> None:
        """Keep what the dummy's groups hold now as the values after the scheduler's last step."""
        now = _entries(self._optimizer)
        for pattern, entries in self._first.items():
            for key, value in entries.items():
                if key == "lr" or now[pattern][key] != value:
                    self._changed.add((pattern, key))
        self._recent[self._place] = now


class RatesOfSeveral:
    """The learning rates of several optimizers, each with its own schedule."""

    def __init__(self, rates: Mapping[str, LearningRates], shown: torch.optim.Optimizer, pattern: str) -> None:
        """`rates`: by the pattern of an optimizer's parameters. `shown`: a dummy of the optimizer whose learning rate is
        reported, and `pattern`, its own."""
        self._rates, self._shown, self._pattern = rates, shown, pattern

    def set(self, optimizer: torch.optim.Optimizer, step: int) -> float | None:
        for each in optimizers_in(optimizer):
            self._rates[pattern_of_optimizer(each)].set(each, step)
        return self._rates[self._pattern].set(self._shown, step)


def make_learning_rates(spec: Job, graph: Graph, validated: Mapping[int, float]) -> LearningRates:
    """The learning rates of a job for its model. `validated`: number of steps done -> value of the metric that they follow, if
    they do, of all validations so far; the caller adds to it. Raises `ConfigError` or `UserCodeError` if a scheduler cannot be
    made."""
    entries, rates = _dims_by_entry(spec, graph), {}
    for entry, dims in entries:
        rates[entry.pattern_of_all] = _rates_of_entry(spec, entry, dims, validated)
    if len(entries) == 1:
        return rates[entries[0][0].pattern_of_all]
    if not entries:
        return FactorRates(_constant_factor)
    entry, dims = entries[0]
    return RatesOfSeveral(rates, _dummy(entry, dims, dtype_of_job(spec)), entry.pattern_of_all)


def _dims_by_entry(spec: Job, graph: Graph) -> list[tuple[SingleOptimizerConfig, dict[str, int]]]:
    """(optimizer, the parameters that it trains with their numbers of dimensions), of those that train any."""
    frozen = frozen_parameters(graph)
    dims = {name: len(shape) for name, shape in parameter_shapes(graph).items() if name not in frozen}
    return [(entry, {n: dims[n] for n in names}) for entry, names in names_by_entry(spec.optimizer, dims) if names]


def _rates_of_entry(
    spec: Job, entry: SingleOptimizerConfig, dims: Mapping[str, int], validated: Mapping[int, float]
) -> LearningRates:
    """Those of one of the job's optimizers, which trains parameters of these numbers of dimensions."""
    ref = spec.schedule_of(entry)
    if ref is None:
        return FactorRates(_constant_factor)
    if not is_scheduler(ref):
        return FactorRates(ref.partial())
    return SchedulerRates(entry, ref, dtype_of_job(spec), dims, validated)


def _dummy(entry: SingleOptimizerConfig, dims: Mapping[str, int], dtype: torch.dtype) -> torch.optim.Optimizer:
    """An optimizer with one small parameter in each of its groups that has any."""
    first: dict[int, str] = {}
    for name in dims:
        first.setdefault(optimizer_group_of(entry, name), name)
    return build_optimizer(entry, {name: nn.Parameter(torch.zeros((1,) * dims[name], dtype=dtype)) for name in first.values()})


def is_scheduler(ref: FunctionConfig) -> bool:
    """Whether an lr_schedule is a scheduler, or a function that makes one, and not a function of the step.

    It is a class of PyTorch's schedulers, or its first parameter that `args` does not give is an optimizer, by name or type.
    """
    made = ref.resolve()
    if isinstance(made, type) and issubclass(made, (LRScheduler, ReduceLROnPlateau)):
        return True
    try:
        parameters = list(inspect.signature(made).parameters.values())
    except (TypeError, ValueError):
        return False
    first = next((one for one in parameters if one.name not in ref.args), None)
    if first is None or first.kind not in (first.POSITIONAL_ONLY, first.POSITIONAL_OR_KEYWORD):
        return False
    return first.name == "optimizer" or "Optimizer" in str(getattr(first.annotation, "__name__", first.annotation))


def check_scheduler(spec: Job, graph: Graph, steps: int) -> None:
    """Run the schedulers of the job through its first steps, each twice; one that follows a metric as if each step were
    validated and no value better than the first.

    Raises `ConfigError` for one that is not the same again, `UserCodeError` for what it raises.
    """
    for entry, dims in _dims_by_entry(spec, graph):
        ref = spec.schedule_of(entry)
        if ref is not None and is_scheduler(ref):
            validated = dict.fromkeys(range(1, steps), 1.0)
            one, other = (SchedulerRates(entry, ref, dtype_of_job(spec), dims, validated) for _ in range(2))
            _compare_schedulers(ref, one, other, steps, spec.steps)


def _compare_schedulers(ref: LrScheduleConfig, one: SchedulerRates, other: SchedulerRates, steps: int, of: int) -> None:
    """Raises if the first `steps` of `of` steps differ, or cannot be made."""
    for step in range(steps):
        try:
            found, again = one.at(step), other.at(step)
        except RayparError:
            raise
        except USER_CODE_ERRORS as error:
            reraise_ctrl_c(error)
            raise UserCodeError(
                f"lr_schedule {ref.label} raised {error_text(error)}\n  on its way to step {step + 1} of {of}",
                cure="give it a schedule of as many steps as the run has (job.steps among lr_schedule.args stands for them)",
            ) from error
        if found != again:
            raise ConfigError(
                f"lr_schedule {ref.label} is not the same when it is made again: in step {step + 1} it has {dict(found)}, then "
                f"{dict(again)}",
                cure="give a scheduler that depends on its arguments and the number of its calls only",
            )


def _make_scheduler(ref: LrScheduleConfig, optimizer: torch.optim.Optimizer) -> LRScheduler | ReduceLROnPlateau:
    """The scheduler that `ref` makes of the dummy. Raises `ConfigError` for one that needs a metric where none is named, or
    none where one is, and for wrong arguments, and `UserCodeError` for what it raises."""
    function: Callable[..., object] = ref.resolve()
    parameter = next((name for name in inspect.signature(function).parameters if name not in ref.args), "optimizer")
    given = {**ref.args, parameter: optimizer}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # those about the order of calls, which is right here
            made = function(**given)
    except USER_CODE_ERRORS as error:
        reraise_ctrl_c(error)
        raised_inside = error.__traceback__ is None or error.__traceback__.tb_next is not None
        refusal = None if raised_inside else argument_refusal(function, given, ref.label, "lr_schedule.args")
        if refusal is not None:
            raise refusal from None
        raise UserCodeError(
            f"lr_schedule {ref.label}, made for an optimizer with the job's groups and one small parameter in each, raised "
            f"{error_text(error)}\n{traceback.format_exc()}",
            cure="it gets the optimizer and lr_schedule.args; a scheduler of other schedulers is made by a function of the "
            "optimizer; one that needs the parameters themselves is not supported: give a function of the step",
        ) from error
    step = getattr(made, "step", None)
    if not callable(step):
        raise ConfigError(
            f"lr_schedule {ref.label} returned {with_article(type(made).__name__)} for an optimizer, which is no scheduler",
            cure="return an object of torch.optim.lr_scheduler; or give a function whose only parameter without a default is "
            "the step, which returns the factor on the learning rates",
        )
    if isinstance(made, ReduceLROnPlateau) or _needs_arguments(step):
        if ref.metric is None:
            raise ConfigError(
                f"lr_schedule {ref.label} makes {with_article(type(made).__name__)}, whose step needs a metric",
                cure="name one that validations measure: lr_schedule: {function: ..., args: {...}, metric: validation_loss}, "
                "and set validation.every",
            )
    elif ref.metric is not None:
        raise ConfigError(
            f"lr_schedule.metric is {ref.metric}, and the step of {with_article(type(made).__name__)}, which {ref.label} "
            "makes, needs none",
            cure="leave metric out: the scheduler then makes a step after each step of the optimizer",
        )
    return made  # type: ignore[return-value]  # whatever has a `step` that can be called


def _needs_arguments(step: Callable[..., object]) -> bool:
    """Whether a scheduler's `step` cannot be called without arguments."""
    try:
        parameters = inspect.signature(step).parameters.values()
    except (TypeError, ValueError):
        return False
    return any(
        one.default is one.empty and one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)
        for one in parameters
    )


def _entries(optimizer: torch.optim.Optimizer) -> dict[str, dict[str, Entry]]:
    """Pattern -> key -> entry, of the options of the optimizer's groups; of a tensor its number."""
    return {
        group["raypar_pattern"]: {
            key: value.item() if isinstance(value, Tensor) else copy.copy(value)
            for key, value in group.items()
            if key in optimizer.defaults and not (isinstance(value, Tensor) and value.numel() != 1)
        }
        for group in optimizer.param_groups
    }


def _no_step(optimizer: torch.optim.Optimizer) -> None:
    """The step of the dummy, which schedulers count."""


def _constant_factor(step: int) -> float:
    return 1.0
