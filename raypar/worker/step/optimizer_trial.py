"""Tries a job's optimizer on small tensors before a run: what it keeps, and which parameters and elements depend on others.

Its parameters have the job's names, groups and numbers of dims. It observes how the optimizer behaves, and reads no code.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from raypar.errors import ConfigError, UserCodeError
from raypar.model.python_state import read_content
from raypar.model.random_state import preserve_random_state
from raypar.plan import ParallelPlan
from raypar.worker.checkpoint.expected_optimizer_state import NUMBER, ExpectedOptimizerState, SharedEntry, form_of
from raypar.worker.checkpoint.state_key import StateKey
from raypar.worker.job_spec import OptimizerSpec
from raypar.worker.step.late_optimizer_trial import (
    FAR,
    find_coupling_of_many,
    find_late_coupling,
    takes_elements_by_themselves,
)
from raypar.worker.step.make_optimizers_by_name import optimizer_group_of
from raypar.worker.step.optimizer_state import OptimizerState, Value, copied, read_given_values, state_of_code
from raypar.worker.step.tried_optimizer import Gradients, TriedOptimizer, describe_coupling, values_and_gradients

SAVED_AFTER, STEPS = 6, 12
"""Steps of the first trial, and after how many of them the state is saved and given to a new optimizer."""
LARGEST_DIM, LARGEST_FIRST_DIM, SMALL_DIM = 64, 256, 6
"""Largest dims: of the largest parameter of each group and number of dims; of its first dim; of one more such parameter."""
ELEMENTS = 8192
"""About the most elements of a parameter: enough for 8-bit optimizers, which keep smaller ones than 4,096 in 32 bits."""


class OptimizerKind(Enum):
    """What a step of one element depends on."""

    ELEMENTWISE = "takes each element by itself"
    PER_PARAMETER = "takes each parameter by itself"
    COUPLED = "couples parameters"


@dataclass(frozen=True)
class OptimizerTrial:
    """What was found out about a job's optimizer."""

    label: str
    """The optimizer's name, in messages."""
    kind: OptimizerKind
    """What a step of one element depends on."""
    keeps: ExpectedOptimizerState = field(default_factory=ExpectedOptimizerState)
    """The state that it keeps, as every checkpoint has it."""
    difference: str = ""
    """Of an optimizer that couples parameters: what was measured."""
    draws: bool = False
    """Whether a step draws random numbers."""

    @property
    def most_stages(self) -> int | None:
        """How many stages a plan may have; None: any number."""
        return 1 if self.kind is OptimizerKind.COUPLED else None

    def check_plan(self, plan: ParallelPlan) -> None:
        """Raises `ConfigError` for a plan in which the optimizer would train otherwise than in one process."""
        if self.kind is OptimizerKind.COUPLED and len(plan.stages) > 1:
            why = (
                "its step draws random numbers, one after the other for all parameters of a stage"
                if self.draws
                else "its step of one parameter depends on the other parameters"
            )
            raise ConfigError(
                f"{self.label} cannot be used with {len(plan.stages)} stages: {why}, and each stage has an optimizer "
                "of its own parameters only",
                cure="set plan.stages: 1 (plan.replicas may be any number), or use an optimizer that takes each parameter by "
                f"itself (SGD, Adam, AdamW, ...)\n  measured: {self.difference}",
            )
        if self.kind is not OptimizerKind.ELEMENTWISE and (shards := max(stage.shards for stage in plan.stages)) > 1:
            raise ConfigError(
                f"{self.label} cannot be used with {shards} shards: its step of one element depends on other elements of the "
                "parameter, and each shard has a slice of it only",
                cure="set plan.shards: 1, or use an optimizer that takes each element by itself (SGD, Adam, AdamW, ...)",
            )


def try_optimizer(
    spec: OptimizerSpec, shapes: Mapping[str, Sequence[int]], dtype: torch.dtype = torch.float32
) -> OptimizerTrial:
    """Try an optimizer on parameters like those of `shapes` (trained ones, by qualified name).

    Raises `ConfigError` for what makes no optimizer, and for state that cannot be kept: saved and moved to other workers;
    `UserCodeError` for what a step raises.
    """
    with preserve_random_state():
        small = _small_shapes(spec, shapes)
        real = {name: tuple(shapes[name]) for name in small}
        if small != real:
            with contextlib.suppress(UserCodeError):  # perhaps it expects the model's sizes
                return _try(spec, small, shapes, dtype)
        return _try(spec, real, shapes, dtype)


def _try(
    spec: OptimizerSpec, shapes: Mapping[str, Sequence[int]], all_shapes: Mapping[str, Sequence[int]], dtype: torch.dtype
) -> OptimizerTrial:
    """`shapes`: of the parameters that are tried; `all_shapes`: of all of the model's."""
    values, gradients = values_and_gradients(shapes, dtype, STEPS)
    whole = TriedOptimizer(spec, values)
    whole.watches_draws = True
    states = _keep(whole, gradients)
    difference = _coupling(spec, values, gradients, whole)
    late = find_late_coupling(spec, all_shapes, shapes, dtype)
    difference = (
        difference or late or (find_coupling_of_many(spec, all_shapes, dtype) if len(all_shapes) > len(shapes) else None)
    )
    kind = OptimizerKind.COUPLED
    if difference is None:
        kind = OptimizerKind.ELEMENTWISE if _is_elementwise(spec) else OptimizerKind.PER_PARAMETER
    keeps = _expected_state(states, shapes_are_fixed=difference is None)
    return OptimizerTrial(spec.optimizer.label, kind, keeps, difference or "", whole.draws)


@dataclass(frozen=True)
class _SeenState:
    """State at some moments of a trial."""

    given: Mapping[tuple[str, StateKey], Any]
    """What parameters share when the optimizer is made, hyperparameters too: (pattern, kind and name) -> value."""
    later: Sequence[OptimizerState]
    """After a step without effect, the first step, when it was saved, at the end, and far away if it could be set forward."""
    far: int | None
    """The number of steps of the last of these; None: it could not be set forward."""


def _keep(whole: TriedOptimizer, gradients: Gradients) -> _SeenState:
    """Train to the end, and from the middle on beside an optimizer that was given the state.

    Raises `ConfigError` for state that cannot be kept.
    """
    code, given = state_of_code(whole.optimizer), copied(read_given_values(whole.optimizer))
    begun = code.read()
    whole.run(gradients[:1])
    first = copied(whole.state())
    whole.run(gradients[1:SAVED_AFTER])
    state, resumed = whole.state(), whole.saved_and_loaded()
    saved_state = copied(state)
    before = {place: read_content(value) for place, value in _tensors(state)}
    aliases, saved = _aliases(whole, state), code.read()
    whole.run(gradients[SAVED_AFTER:])
    whole.check_code(saved.changed(code.read()))
    after = {place: read_content(value) for place, value in _tensors(whole.state())}
    for one, other in aliases:
        if before[one] != after.get(one) or (other in before and before[other] != after.get(other)):
            raise ConfigError(
                f"{whole.label} keeps one tensor under two names: {one} and {other}; saved and loaded they would be two",
                cure="let the optimizer keep a clone",
            )
    code.put_back(begun)  # as in a new process
    resumed.run(gradients[SAVED_AFTER:])
    whole.check_resumed(resumed, SAVED_AFTER)
    seen = [_after_step_without_effect(whole, gradients[0]), first, saved_state, copied(whole.state())]
    with contextlib.suppress(UserCodeError):  # it may refuse to go on after its last step
        resumed.fast_forward(FAR)
        resumed.run(gradients[:1])
        return _SeenState(given.shared(), [*seen, resumed.state()], resumed.steps)
    return _SeenState(given.shared(), seen, None)


def _after_step_without_effect(whole: TriedOptimizer, gradients: Mapping[str, Tensor | None]) -> OptimizerState:
    """The state of a new optimizer after a step with learning rate 0, as many schedules begin, and gradients of 0."""
    still = TriedOptimizer(whole.spec, whole.values())
    still.run([{name: None if of is None else torch.zeros_like(of) for name, of in gradients.items()}], lambda step: 0.0)
    return still.state()


def _expected_state(seen: _SeenState, *, shapes_are_fixed: bool) -> ExpectedOptimizerState:
    """What every checkpoint has. `shapes_are_fixed`: see `ExpectedOptimizerState`."""
    later = [state.shared() for state in seen.later]
    shared = {}
    for place in dict.fromkeys(place for values in later for place in values):
        values = [of[place] for of in later if place in of]
        forms = (
            form_of(str(value.dtype).removeprefix("torch."), value.shape, shapes_are_fixed)
            if isinstance(value, Tensor)
            else NUMBER
            for value in values
        )
        is_always_there = len(values) == len(later) and (place not in seen.given or _only_grows(seen, place, values))
        shared[place] = SharedEntry(is_always_there, frozenset(forms))
    return ExpectedOptimizerState(shared, all(any(state.parameters.values()) for state in seen.later), shapes_are_fixed)


def _only_grows(seen: _SeenState, place: tuple[str, StateKey], values: Sequence[Value]) -> bool:
    """Whether a value that an optimizer is given never comes back: a sum, or a count of all steps (others begin again)."""
    numbers: list[float] = []
    for value in (seen.given[place], *values):
        if value is None or isinstance(value, bool):
            return False
        numbers.append(float(value.double().sum() if isinstance(value, Tensor) else value))
    if isinstance(values[-1], int) and not (seen.far is not None and abs(numbers[-1] - seen.far) <= 1):
        return False
    return numbers[0] < numbers[1] and numbers == sorted(numbers)


# -- what is tried -----------------------------------------------------------------------------------------------------------


def _small_shapes(spec: OptimizerSpec, shapes: Mapping[str, Sequence[int]]) -> dict[str, tuple[int, ...]]:
    """Some parameters of each group and number of dims, with smaller dims, in layer order: the largest, one of the same shape
    (an optimizer may step those together), and one of another.
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
    """The shape with smaller dims, of about `ELEMENTS` elements if it has as many."""
    if not shape:
        return ()
    most = LARGEST_DIM if len(shape) < 3 else 8
    others = [min(size, most) for size in shape[1:]]
    return min(shape[0], LARGEST_FIRST_DIM, max(most, ELEMENTS // math.prod(others))), *others


def _tensors(state: OptimizerState) -> Iterator[tuple[str, Tensor]]:
    """(description, tensor) of all tensors in an optimizer's state."""
    for name, entries in state.parameters.items():
        yield from ((f"{key!r} of {name}", value) for key, value in entries.items() if isinstance(value, Tensor))
    for pattern, entries in state.groups.items():
        yield from ((f"{key!r} of the group {pattern!r}", v) for key, v in entries.items() if isinstance(v, Tensor))
    yield from ((f"the attribute {key!r}", value) for key, value in state.attributes.items() if isinstance(value, Tensor))


def _aliases(trainee: TriedOptimizer, state: OptimizerState) -> list[tuple[str, str]]:
    """Pairs of tensors that share memory: one of the optimizer's, with another one or a parameter or its gradient."""
    own = list(_tensors(state))
    others = [(f"the parameter {name}", p.detach()) for name, p in trainee.parameters.items()]
    others += [(f"the gradient of {name}", p.grad) for name, p in trainee.parameters.items() if p.grad is not None]
    pairs = [*itertools.combinations(own, 2), *itertools.product(own, others)]
    return [(one, other) for (one, a), (other, b) in pairs if _overlap(a, b)]


def _overlap(a: Tensor, b: Tensor) -> bool:
    def span(x: Tensor) -> tuple[int, int]:
        last = sum((size - 1) * abs(stride) for size, stride in zip(x.shape, x.stride(), strict=True))
        return x.data_ptr(), x.data_ptr() + (last + 1) * x.element_size()

    return bool(a.numel() and b.numel()) and span(a)[0] < span(b)[1] and span(b)[0] < span(a)[1]


# -- comparisons -------------------------------------------------------------------------------------------------------------


def _coupling(spec: OptimizerSpec, values: Mapping[str, Tensor], gradients: Gradients, whole: TriedOptimizer) -> str | None:
    """What differs between parameters that are trained together and apart, in words; None if nothing does.

    Also where the last one has no gradient in some steps, as in a stage that a step does not use.
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
            return None  # it takes no parameter without a gradient: a run in which there is one says so
    return found


def _is_elementwise(spec: OptimizerSpec) -> bool:
    """Whether the optimizer takes each element by itself, as slices of parameters need: with the options of every group.

    Small parameters are trained beside their halves for many steps; a large matrix too, because optimizers that factor or
    quantise their state leave small ones alone (as Adafactors with `min_dim_size_to_factor`).
    """
    try:
        return takes_elements_by_themselves(spec, ((24,), (4, 6)), late=True) and takes_elements_by_themselves(
            spec, ((256, 256),), late=False
        )
    except (UserCodeError, ConfigError):
        return False  # it does not take such a parameter
