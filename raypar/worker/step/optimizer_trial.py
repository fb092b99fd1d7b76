"""Tries a job's optimizer on small tensors before a run: what state it keeps, and whether parameters and elements are coupled.

The tensors have the names, groups and numbers of dimensions of the job's parameters. The trial observes the optimizer's
behaviour; it does not read its code.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cached_property

import torch
from torch import Tensor

from raypar.errors import ConfigError, UserCodeError
from raypar.job import SingleOptimizerConfig
from raypar.model.python_state import comparable_content
from raypar.model.random_state import preserve_random_state
from raypar.plan import ParallelPlan
from raypar.plan.state_division import StateDivision
from raypar.worker.checkpoint.expected_optimizer_state import NUMBER, ExpectedOptimizerState, SharedEntry, describe_tensor_form
from raypar.worker.checkpoint.state_key import StateKey
from raypar.worker.step.late_optimizer_trial import (
    FAR,
    find_coupling_of_many,
    find_difference_of_halves,
    find_late_coupling,
)
from raypar.worker.step.optimizer_and_parameter_groups import optimizer_group_of
from raypar.worker.step.optimizer_state import (
    OptimizerState,
    Value,
    copy_optimizer_state,
    read_given_values,
    state_outside_optimizer,
)
from raypar.worker.step.optimizer_under_trial import Gradients, TriedOptimizer, describe_coupling, values_and_gradients
from raypar.worker.step.state_division_trial import find_difference_of_runs

SAVED_AFTER, STEPS = 6, 12
"""Steps after which the state is saved and loaded into a new optimizer, and all steps of the first trial."""
LARGEST_DIM, LARGEST_FIRST_DIM, SMALL_DIM = 64, 256, 6
"""Largest size of a dimension and of the first dimension of the largest parameter of each kind; and of the third one's
dimensions. A kind is a group and a number of dimensions."""
ELEMENTS = 8192
"""Approximate limit of a parameter's elements. 8-bit optimizers keep the state of fewer than 4,096 elements in 32 bits."""


class OptimizerKind(Enum):
    """What a step of one element depends on. What of it may be divided among owners: `OptimizerTrial.divisions`."""

    ELEMENTWISE = "takes each element by itself"
    PER_PARAMETER = "takes each parameter by itself"
    COUPLED = "couples parameters"


@dataclass(frozen=True)
class TriedJob:
    """What an optimizer was tried for."""

    spec: SingleOptimizerConfig
    """The optimizer of the job."""
    shapes: Mapping[str, Sequence[int]]
    """Trained parameter -> its shape, of all of the model that are not empty."""
    dtype: torch.dtype
    """Their dtype."""

    def find_difference_of_runs(self) -> str:
        """See `state_division_trial.find_difference_of_runs`; empty for none."""
        with preserve_random_state():
            return find_difference_of_runs(self.spec, self.shapes, self.dtype) or ""


@dataclass(frozen=True)
class OptimizerTrial:
    """The result of trying a job's optimizer."""

    label: str
    """The optimizer's name, in messages."""
    kind: OptimizerKind
    """What a step of one element depends on."""
    keeps: ExpectedOptimizerState = field(default_factory=ExpectedOptimizerState)
    """The state that it keeps, which checkpoints must have."""
    difference: str = ""
    """The measured difference that shows that it couples parameters; empty if it does not."""
    draws: bool = False
    """Whether a step draws random numbers."""
    difference_of_elements: str = ""
    """The measured difference that shows that an element depends on others of its parameter; empty if it does not."""
    tried: TriedJob | None = None
    """What was tried; None: nothing was."""
    each: tuple[OptimizerTrial, ...] = ()
    """Of several optimizers the trial of each; the other fields are what holds for all of them, or of the first that refuses
    most plans."""

    @cached_property
    def why_not_by_runs(self) -> str:
        """The measured difference between a parameter and its runs, each with state of its own; empty if there is none."""
        if self.each:
            return next((why for trial in self.each if (why := trial.why_not_by_runs)), "")
        if self.kind is OptimizerKind.COUPLED:
            return self.difference
        return self.tried.find_difference_of_runs() if self.tried is not None else ""

    @property
    def division(self) -> StateDivision:
        """The parts into which the state may be divided. The first call makes a trial of its own: levels of ZeRO ask it."""
        if self.each:
            return max((trial.division for trial in self.each), key=list(StateDivision).index)
        if self.kind is OptimizerKind.COUPLED:
            return StateDivision.NOT_AT_ALL
        return StateDivision.BY_PARAMETERS if self.why_not_by_runs else StateDivision.BY_RUNS

    @property
    def divisions(self) -> dict[str, StateDivision]:
        """Trained parameter -> the parts into which the optimizer's state of it may be divided; of those that are not empty."""
        of_entries = [trial.divisions for trial in self.each]
        own = dict.fromkeys(self.tried.shapes, self.division) if self.tried is not None and not self.each else {}
        return {name: division for of in (*of_entries, own) for name, division in of.items()}

    @property
    def undivided(self) -> frozenset[str]:
        """The parameters that one owner steps whole, where replicas divide state."""
        return frozenset(name for name, division in self.divisions.items() if division is not StateDivision.BY_RUNS)

    @property
    def most_stages(self) -> int | None:
        """The largest number of stages that a plan may have; None: any number."""
        return 1 if self.kind is OptimizerKind.COUPLED else None

    def check_plan(self, plan: ParallelPlan) -> None:
        """Raises `ConfigError` for a plan in which the optimizer would not train as it does in one process."""
        for trial in self.each:
            trial.check_plan(plan)
        if self.kind is OptimizerKind.COUPLED and len(plan.stages) > 1:
            why = (
                "its step draws random numbers, one after the other for all parameters of a stage"
                if self.draws
                else "its step of one parameter depends on the other parameters"
            )
            raise ConfigError(
                f"{self.label} cannot be used with {len(plan.stages)} stages: {why}, and the optimizer of a stage has only "
                "that stage's parameters",
                cure="set plan.stages: 1 (plan.replicas may be any number), or use an optimizer that takes each parameter by "
                f"itself (SGD, Adam, AdamW, ...); measured: {self.difference}",
            )
        if self.kind is not OptimizerKind.ELEMENTWISE and (shards := max(plan.virtual_shard_counts)) > 1:
            virtual = "virtual " * any(stage.division for stage in plan.stages)
            measured = self.difference_of_elements or self.difference
            raise ConfigError(
                f"{self.label} cannot be used with {shards} {virtual}shards: its step of one element depends on other elements "
                "of the parameter, and each shard has only a slice of it",
                cure="set plan.shards: 1 and leave virtual_shards out (stages and replicas may be any number), or use an "
                "optimizer that takes each element by itself (SGD, Adam, AdamW, ...)"
                + (f"; measured: {measured}" if measured else ""),
            )
        if plan.most_zero and self.kind is OptimizerKind.COUPLED:
            raise ConfigError(
                f"{self.label} cannot be used with plan.zero: {plan.most_zero}: its step of one parameter depends on the other "
                "parameters, and each replica steps only those that it owns",
                cure="set plan.zero: 0, or use an optimizer that takes each parameter by itself (SGD, Adam, AdamW, Muon, ...)"
                f"; measured: {self.difference}",
            )

    def check_steps_in_windows(self) -> None:
        """Raises `ConfigError` for an optimizer that `plan.optimizer_in` cannot have step a few parameters after the other."""
        for trial in self.each:
            trial.check_steps_in_windows()
        if self.kind is OptimizerKind.COUPLED:
            raise ConfigError(
                f"{self.label} cannot be used with plan.optimizer_in: its step of one parameter depends on the other "
                "parameters, and those whose state lies in files are stepped a few after the other",
                cure="leave plan.optimizer_in out, or use an optimizer that takes each parameter by itself (SGD, Adam, AdamW, "
                f"Muon, ...); measured: {self.difference}",
            )


def join_trials(trials: Sequence[OptimizerTrial]) -> OptimizerTrial:
    """The trial of a job's optimizers, of one alone or of several."""
    if len(trials) == 1:
        return trials[0]
    worst = max(trials, key=lambda trial: list(OptimizerKind).index(trial.kind))
    keeps = ExpectedOptimizerState(
        {place: entry for trial in trials for place, entry in trial.keeps.shared.items()},
        any(trial.keeps.has_state_of_parameters for trial in trials),
        all(trial.keeps.shapes_are_fixed for trial in trials),
        frozenset().union(*(trial.keeps.names_of_parameters for trial in trials)),
    )
    return replace(worst, keeps=keeps, draws=any(trial.draws for trial in trials), each=tuple(trials))


def try_optimizer(
    spec: SingleOptimizerConfig, shapes: Mapping[str, Sequence[int]], dtype: torch.dtype = torch.float32
) -> OptimizerTrial:
    """Try an optimizer on parameters like those of `shapes` (trained ones, by qualified name).

    Raises `ConfigError` if no optimizer can be made, or if it has state that cannot be saved or moved to other workers;
    `UserCodeError` if a step raises.
    """
    with preserve_random_state():
        small = _small_shapes(spec, shapes)
        real = {name: tuple(shapes[name]) for name in small}
        if small != real:
            with contextlib.suppress(UserCodeError):  # the optimizer may require the model's real sizes
                return _try(spec, small, shapes, dtype)
        return _try(spec, real, shapes, dtype)


def _try(
    spec: SingleOptimizerConfig,
    shapes: Mapping[str, Sequence[int]],
    all_shapes: Mapping[str, Sequence[int]],
    dtype: torch.dtype,
) -> OptimizerTrial:
    """See `try_optimizer`. `shapes`: shapes of the parameters that are tried; `all_shapes`: of all parameters of the model."""
    values, gradients = values_and_gradients(shapes, dtype, STEPS)
    whole = TriedOptimizer(spec, values)
    whole.detects_draws = True
    states = _train_and_resume(whole, gradients)
    difference = _find_coupling(spec, values, gradients, whole)
    late = find_late_coupling(spec, all_shapes, shapes, dtype)  # always: it also checks the state after many steps
    difference = difference or late
    if difference is None and len(all_shapes) > len(shapes):
        difference = find_coupling_of_many(spec, all_shapes, dtype)
    kind = OptimizerKind.COUPLED
    of_elements: str | None = None
    if difference is None:
        of_elements = _find_difference_of_elements(spec)
        kind = OptimizerKind.ELEMENTWISE if of_elements is None else OptimizerKind.PER_PARAMETER
    keeps = _expected_state(states, shapes_are_fixed=difference is None)
    tried = TriedJob(spec, all_shapes, dtype)
    return OptimizerTrial(spec.label, kind, keeps, difference or "", whole.draws, of_elements or "", tried)


@dataclass(frozen=True)
class _ObservedState:
    """The state of a tried optimizer at several steps."""

    given: Mapping[tuple[str, StateKey], Value]
    """Shared values of the new optimizer, hyperparameters included: (pattern of a group, kind and name) -> value."""
    later: Sequence[OptimizerState]
    """State after a step without effect (if possible), after the first step, when it was saved, at the end, and, if possible,
    after the step counters were set forward."""
    far: int | None
    """Number of steps of the last of these if the counters were set forward, else None."""


def _train_and_resume(whole: TriedOptimizer, gradients: Gradients) -> _ObservedState:
    """Do all steps; save and load after `SAVED_AFTER` of them, and compare the loaded optimizer with `whole` at the end.

    Raises `ConfigError` for state that cannot be kept.
    """
    code, given = state_outside_optimizer(whole.optimizer), copy_optimizer_state(read_given_values(whole.optimizer))
    begun = code.read()
    whole.run(gradients[:1])
    first = copy_optimizer_state(whole.state())
    whole.run(gradients[1:SAVED_AFTER])
    state, resumed = whole.state(), whole.saved_and_loaded()
    saved_state = copy_optimizer_state(state)
    before = {place: comparable_content(value) for place, value in _tensors(state)}
    aliases, saved = _aliases(whole, state), code.read()
    whole.run(gradients[SAVED_AFTER:])
    whole.check_code(saved.changed(code.read()))
    after = {place: comparable_content(value) for place, value in _tensors(whole.state())}
    for one, other in aliases:
        if before[one] != after.get(one) or (other in before and before[other] != after.get(other)):
            raise ConfigError(
                f"{whole.label} keeps one tensor under two names, {one} and {other}: saving and loading would make two of it",
                cure="let the optimizer keep a clone of one of them",
            )
    code.put_back(begun)  # as in a new process
    resumed.run(gradients[SAVED_AFTER:])
    whole.check_resumed(resumed, SAVED_AFTER)
    seen = [*_after_step_without_effect(whole, gradients[0]), first, saved_state, copy_optimizer_state(whole.state())]
    with contextlib.suppress(UserCodeError):  # some optimizers refuse to step after a last step
        resumed.fast_forward(FAR)
        resumed.run(gradients[:1])
        return _ObservedState(given.shared(), [*seen, resumed.state()], resumed.steps)
    return _ObservedState(given.shared(), seen, None)


def _after_step_without_effect(whole: TriedOptimizer, gradients: Mapping[str, Tensor | None]) -> list[OptimizerState]:
    """The state of a new optimizer after one step with learning rate 0 and zero gradients. Many schedules begin with rate 0.

    With the gradients as they are if it divides by their norm; nothing if it cannot make such a step.
    """
    zeros = {name: None if of is None else torch.zeros_like(of) for name, of in gradients.items()}
    for given in (zeros, gradients):
        with contextlib.suppress(UserCodeError):
            still = TriedOptimizer(whole.spec, whole.values())
            still.run([given], lambda step: 0.0)
            return [still.state()]
    return []


def _expected_state(seen: _ObservedState, *, shapes_are_fixed: bool) -> ExpectedOptimizerState:
    """The state that every checkpoint must have. `shapes_are_fixed`: see `ExpectedOptimizerState`."""
    later = [state.shared() for state in seen.later]
    shared = {}
    for place in dict.fromkeys(place for values in later for place in values):
        values = [of[place] for of in later if place in of]
        forms = (
            describe_tensor_form(str(value.dtype).removeprefix("torch."), value.shape, shapes_are_fixed)
            if isinstance(value, Tensor)
            else NUMBER
            for value in values
        )
        is_always_there = len(values) == len(later) and (place not in seen.given or _only_grows(seen, place, values))
        shared[place] = SharedEntry(is_always_there, frozenset(forms))
    names = frozenset(name for state in seen.later for entries in state.parameters.values() for name in entries)
    always = all(any(state.parameters.values()) for state in seen.later)
    return ExpectedOptimizerState(shared, always, shapes_are_fixed, names)


def _only_grows(seen: _ObservedState, place: tuple[str, StateKey], values: Sequence[Value]) -> bool:
    """Whether a shared value only grows, so that it never equals its initial one again and every checkpoint has it.

    True of a sum of floats, and of a count of all steps; other counters may start again from zero.
    """
    numbers: list[float] = []
    for value in (seen.given[place], *values):
        if value is None or isinstance(value, bool):
            return False
        numbers.append(float(value.double().sum() if isinstance(value, Tensor) else value))
    if isinstance(values[-1], int) and not (seen.far is not None and abs(numbers[-1] - seen.far) <= 1):
        return False
    return numbers[0] < numbers[1] and numbers == sorted(numbers)


# -- what is tried -----------------------------------------------------------------------------------------------------------


def _small_shapes(spec: SingleOptimizerConfig, shapes: Mapping[str, Sequence[int]]) -> dict[str, tuple[int, ...]]:
    """Up to three parameters of each group and number of dimensions, with reduced sizes, in layer order.

    They are the largest one, another of its shape (an optimizer may step those together), and any third one.
    """
    alike: dict[tuple[int, int], list[str]] = {}
    for name, shape in shapes.items():
        if 0 not in shape:
            alike.setdefault((optimizer_group_of(spec, name), len(shape)), []).append(name)
    found: dict[str, tuple[int, ...]] = {}
    for names in alike.values():
        largest = max(names, key=lambda name: math.prod(shapes[name]))
        found[largest] = _smaller(shapes[largest])
        alike_shapes = [name for name in names if name != largest and tuple(shapes[name]) == tuple(shapes[largest])]
        found |= dict.fromkeys(alike_shapes[:1], found[largest])
        for name in [name for name in names if name not in found][:1]:
            found[name] = tuple(min(size, SMALL_DIM) for size in shapes[name])
    return {name: found[name] for name in shapes if name in found}


def _smaller(shape: Sequence[int]) -> tuple[int, ...]:
    """The shape reduced to about `ELEMENTS` elements, or left as it is if it has fewer."""
    if not shape:
        return ()
    most = LARGEST_DIM if len(shape) < 3 else 8
    others = [min(size, most) for size in shape[1:]]
    return min(shape[0], LARGEST_FIRST_DIM, max(most, ELEMENTS // math.prod(others))), *others


def _tensors(state: OptimizerState) -> Iterator[tuple[str, Tensor]]:
    """(description, tensor) of every tensor in an optimizer's state."""
    for name, entries in state.parameters.items():
        yield from ((f"{key!r} of {name}", value) for key, value in entries.items() if isinstance(value, Tensor))
    for pattern, entries in state.groups.items():
        yield from ((f"{key!r} of the group {pattern!r}", v) for key, v in entries.items() if isinstance(v, Tensor))
    for entries in state.attributes.values():
        yield from ((f"the attribute {key!r}", value) for key, value in entries.items() if isinstance(value, Tensor))


def _aliases(trainee: TriedOptimizer, state: OptimizerState) -> list[tuple[str, str]]:
    """Descriptions of pairs that share memory: two state tensors, or a state tensor and a parameter or gradient."""
    own = list(_tensors(state))
    others = [(f"the parameter {name}", p.detach()) for name, p in trainee.parameters.items()]
    others += [(f"the gradient of {name}", p.grad) for name, p in trainee.parameters.items() if p.grad is not None]
    pairs = [*itertools.combinations(own, 2), *itertools.product(own, others)]
    return [(one, other) for (one, a), (other, b) in pairs if _overlap(a, b)]


def _overlap(a: Tensor, b: Tensor) -> bool:
    """Whether the address ranges of two tensors overlap."""

    def span(x: Tensor) -> tuple[int, int]:
        last = sum((size - 1) * abs(stride) for size, stride in zip(x.shape, x.stride(), strict=True))
        return x.data_ptr(), x.data_ptr() + (last + 1) * x.element_size()

    return bool(a.numel() and b.numel()) and span(a)[0] < span(b)[1] and span(b)[0] < span(a)[1]


# -- comparisons -------------------------------------------------------------------------------------------------------------


def _find_coupling(
    spec: SingleOptimizerConfig, values: Mapping[str, Tensor], gradients: Gradients, whole: TriedOptimizer
) -> str | None:
    """What differs between parameters that are trained together and apart, in words; None if nothing does.

    Also tries the last one without a gradient in some steps, like the parameters of a stage that a step does not use.
    """
    if len(values) < 2:
        return None
    names = list(values)
    parts = [*([name] for name in names), names[::2], names[1::2]]
    last = names[-1]
    absent = [{**of, last: None} if number in (1, 2, 7) else of for number, of in enumerate(gradients)]

    def compared(whole: TriedOptimizer, gradients: Gradients, parts: Sequence[Sequence[str]], when: str) -> str | None:
        for part in parts:
            alone = TriedOptimizer(spec, {name: values[name] for name in part})
            alone.run(gradients)
            if (found := describe_coupling(whole, alone)) is not None:
                return found + when
        return None

    found = compared(whole, gradients, parts, "")
    if found is None:
        try:
            other = TriedOptimizer(spec, values)
            other.run(absent)
            found = compared(other, absent, [[last], names[:-1]], f" ({last} having no gradient in some steps)")
        except UserCodeError:
            return None  # it accepts no parameter without a gradient: the run fails with its error if there is one
    return found


def _find_difference_of_elements(spec: SingleOptimizerConfig) -> str | None:
    """How a step of an element depends on others of its parameter, as shards may not have it, in words; None if it does not.

    Compares small parameters with their halves over many steps, and a large matrix over a few, with the options of every group:
    optimizers that factor or quantise their state do so only for large parameters (Adafactor's `min_dim_size_to_factor`).
    """
    try:
        found = find_difference_of_halves(spec, ((24,), (4, 6)), late=True)
        return found if found is not None else find_difference_of_halves(spec, ((256, 256),), late=False)
    except (UserCodeError, ConfigError) as error:
        return f"it does not accept parameters that are tried by themselves: {error.what.splitlines()[0]}"
