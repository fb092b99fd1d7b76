"""Further trials of a job's optimizer with tiny parameters: over many steps, with many parameters, and with halves of them.

They find behaviour that begins late or depends on the number of parameters. After `STEPS` steps the step counters in the state
are set forward: to each step number that an option of the optimizer may name (`warmup_steps`), and to `FAR`. A few more steps
then show what begins there.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from raypar.errors import UserCodeError
from raypar.job import SingleOptimizerConfig
from raypar.worker.step.optimizer_and_parameter_groups import optimizer_group_of
from raypar.worker.step.optimizer_state import Value, state_outside_optimizer
from raypar.worker.step.optimizer_under_trial import Gradients, TriedOptimizer, describe_coupling, values_and_gradients

STEPS = 100
"""Steps of a late trial before the counters are set forward."""
SAVED_AFTER = 6
"""Steps after which the state is saved and loaded."""
SETTLED_AFTER = 12
"""Steps after which what the optimizer's code keeps outside of the optimizer (caches, say) must no longer change."""
STEPS_AFTER_JUMP = 3
"""Steps after each time that the counters were set forward."""
FAR = 9_009_000
"""The last step number to which counters are set. It is a multiple of 1 to 15, 50, 200, 1,000 and many others, so that whatever
is done every n-th step is likely done there, and float32 counts up to it exactly."""
MOST_JUMPS = 8
"""Number of options that are taken for step numbers, at most."""
LATE_PARAMETERS, LARGEST_DIM = 6, 2
"""Number of parameters of the late trial, at most, and the largest size of their dimensions."""
MANY_PARAMETERS, STEPS_OF_MANY = 512, 2
"""Number of parameters of the trial with many, at most, and its steps."""


@dataclass(frozen=True)
class TrialSteps:
    """The steps of a late trial: some consecutive ones, then a few more after each time that the counters are set forward."""

    gradients: Gradients
    """Gradients of the consecutive steps; those after a jump take the first of them again."""
    jumps: Sequence[int]
    """Step numbers to which the counters are set afterwards, ascending."""

    def run(self, tried: TriedOptimizer) -> None:
        """Make the steps that are left. Raises `UserCodeError` if one raises."""
        tried.run(self.gradients[tried.steps :])
        for steps in self.jumps:
            tried.fast_forward(steps - tried.steps)
            tried.run(self.gradients[:STEPS_AFTER_JUMP])

    def until(self, steps: int) -> TrialSteps:
        """The part of which all steps are done when `steps` are."""
        if steps < len(self.gradients):
            return TrialSteps(self.gradients[:steps], ())
        return replace(self, jumps=[to for to in self.jumps if to + STEPS_AFTER_JUMP <= steps])


def step_numbers_of_options(spec: SingleOptimizerConfig, values: Mapping[str, Tensor], after: int = STEPS) -> list[int]:
    """Step numbers shortly before which to continue: those of options that may be step numbers above `after`, and `FAR`."""
    made = TriedOptimizer(spec, values).optimizer
    options = [value for each in (made.defaults, *made.param_groups, vars(made)) for value in each.values()]
    found = {int(value) for value in options if isinstance(value, (int, float)) and after < value < FAR}
    return [max(after, number - STEPS_AFTER_JUMP + 1) for number in (*sorted(found)[:MOST_JUMPS], FAR)]


def longest_run(
    spec: SingleOptimizerConfig, values: Mapping[str, Tensor], steps: TrialSteps
) -> tuple[TriedOptimizer, TrialSteps] | None:
    """(an optimizer that has done them, the `steps` before the first that raises); None if the first one raises.

    An optimizer may refuse to continue after some number of steps. Raises `ConfigError` for state that cannot be kept.
    """
    while steps.gradients:
        whole = TriedOptimizer(spec, values)
        code = state_outside_optimizer(whole.optimizer)
        begun = code.read()
        try:
            whole.run(steps.gradients[:SETTLED_AFTER])
            settled = code.read()
            steps.run(whole)
        except UserCodeError:
            steps = steps.until(whole.steps)
        else:
            whole.check_code(settled.changed(code.read()))
            return whole, steps
        finally:
            code.put_back(begun)
    return None


def find_late_coupling(
    spec: SingleOptimizerConfig, shapes: Mapping[str, Sequence[int]], tried: Mapping[str, Sequence[int]], dtype: torch.dtype
) -> str | None:
    """How half of the parameters differ, after many steps, when trained with the other half and without; None if they do not.

    Also saves and loads the optimizer of that half on the way. `shapes`: shapes of all parameters of the model. `tried`: some
    shapes that the optimizer is known to accept. Raises `ConfigError` for state that cannot be kept.
    """
    tiny = {name: _tiny(shapes[name]) for name in _parameters_of_each_kind(spec, shapes)}
    accepted = dict(list(tried.items())[:LATE_PARAMETERS])
    # float64 shows couplings too weak for float32. Some optimizers do not accept float64, or such small parameters.
    for few, of_dtype in ((tiny, torch.float64), (tiny, dtype), (accepted, dtype)):
        values, gradients = values_and_gradients(few, of_dtype, STEPS)
        if (found := longest_run(spec, values, TrialSteps(gradients, step_numbers_of_options(spec, values)))) is None:
            continue
        whole, steps = found
        half = {name: values[name] for name in list(few)[len(few) // 2 :]}
        try:
            resumed = TriedOptimizer(spec, half)
            resumed.run(steps.gradients[:SAVED_AFTER])
            resumed = resumed.saved_and_loaded()
            steps.run(resumed)
            if describe_coupling(whole, resumed) is None:
                return None
            alone = TriedOptimizer(spec, half)
            steps.run(alone)
        except UserCodeError as error:
            return f"with {len(half)} of {len(values)} parameters, but not with all of them, {error.what.splitlines()[0]}"
        if (difference := describe_coupling(whole, alone)) is None:
            whole.check_resumed(resumed, SAVED_AFTER)
        return difference
    return None


def find_coupling_of_many(spec: SingleOptimizerConfig, shapes: Mapping[str, Sequence[int]], dtype: torch.dtype) -> str | None:
    """How half of many parameters differs when trained with the other half and without; None if it does not.

    This finds, for example, an optimizer that treats the seventh parameter differently from the others.
    """
    for of_dtype in (torch.float64, dtype):
        many = {name: _tiny(shapes[name]) for name in list(shapes)[:MANY_PARAMETERS]}
        values, gradients = values_and_gradients(many, of_dtype, STEPS_OF_MANY)
        whole, half = TriedOptimizer(spec, values), TriedOptimizer(spec, dict(list(values.items())[len(values) // 2 :]))
        try:
            for tried in (whole, half):
                tried.run(gradients)
        except UserCodeError:
            continue
        return describe_coupling(whole, half)
    return None


def find_difference_of_halves(spec: SingleOptimizerConfig, shapes: Sequence[tuple[int, ...]], *, late: bool) -> str | None:
    """How half of a parameter, alone, differs from what it is within the whole parameter, in words; None if it does not.

    Tries every group's options. Parameters of these shapes are halved along each dimension. `late`: over many steps. State is
    compared too: of an element its own, anything else must be that of the whole parameter. Raises `UserCodeError` for
    parameters that the optimizer does not accept.
    """
    of_options, options = spec_with_numbered_groups(spec)
    places: dict[str, tuple[str, tuple[slice, ...]]] = {}
    wholes: dict[str, tuple[int, ...]] = {}
    for number in options:
        for which, shape in enumerate(shapes):
            wholes[name := f"{number}.{which}"] = shape
            for dim, size in enumerate(shape):
                places[f"{name}.{dim}"] = name, (slice(None),) * dim + (slice(0, size // 2),)
    values, gradients = values_and_gradients(wholes, torch.float64, STEPS if late else SAVED_AFTER)
    jumps = step_numbers_of_options(of_options, values) if late else ()
    found = longest_run(of_options, values, TrialSteps(gradients, jumps))
    if found is None:
        return "it does not step parameters that are tried by themselves"
    whole, steps = found
    halves = TriedOptimizer(of_options, {name: values[of][place] for name, (of, place) in places.items()})
    of_halves = [{name: step[of][place] for name, (of, place) in places.items()} for step in gradients[: len(steps.gradients)]]
    replace(steps, gradients=of_halves).run(halves)
    return _difference_of_halves(whole, halves, places)


def _difference_of_halves(
    whole: TriedOptimizer, halves: TriedOptimizer, places: Mapping[str, tuple[str, tuple[slice, ...]]]
) -> str | None:
    """What differs between halves of parameters and `places`, where they lie in the wholes; weights first, then state."""
    there, here = whole.state().parameters, halves.state().parameters
    shown = f"in a trial of {whole.steps_in_words}"
    for name, (of, place) in places.items():
        half, wanted = halves.values()[name], whole.values()[of][place]
        if not _is_close(half, wanted):
            shapes = f"half of a parameter of shape {list(whole.values()[of].shape)}"
            difference = float((half - wanted).abs().max())
            return f"{shown} the weights of {shapes} differ by {difference:.2g} between the parameter whole and that half alone"
    for name, (of, place) in places.items():
        shape, of_half = whole.values()[of].shape, halves.values()[name].shape
        for key, value in here[name].items():
            other = there[of].get(key)
            if isinstance(value, Tensor) and isinstance(other, Tensor) and (value.shape, other.shape) == (of_half, shape):
                other = other[place]
            if not _is_close(value, other):
                return (
                    f"{shown} {key!r}, state that is {_shown(other)} for a parameter of shape {list(shape)}, is "
                    f"{_shown(value)} for half of it: neither one number an element nor the same for each half"
                )
    return None


def _is_close(one: Value, other: Value) -> bool:
    """Whether two tensors have the same shape and about the same numbers; or two other values are about the same."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        if one.shape != other.shape or one.dtype != other.dtype:
            return False
        return torch.allclose(one.double(), other.double(), rtol=1e-9, atol=1e-9, equal_nan=True)
    if isinstance(one, (int, float)) and isinstance(other, (int, float)):
        return math.isclose(one, other, rel_tol=1e-9, abs_tol=1e-9) or (math.isnan(one) and math.isnan(other))
    return one is None and other is None


def _shown(value: Value) -> str:
    return f"a tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else repr(value)


def spec_with_numbered_groups(spec: SingleOptimizerConfig) -> tuple[SingleOptimizerConfig, dict[int, dict[str, Any]]]:
    """(the optimizer with a group `NUMBER.*` for the options of each of its groups, number -> options). 0: of no group."""
    options = dict(enumerate([{}, *(given for _, given in spec.options_by_pattern)]))
    groups = tuple({"match": f"{number}.*", **given} for number, given in options.items())
    return spec.replace(groups=groups), options


def _parameters_of_each_kind(spec: SingleOptimizerConfig, shapes: Mapping[str, Sequence[int]]) -> list[str]:
    """Up to `LATE_PARAMETERS` parameters in layer order: one or two of each group and number of dimensions."""
    alike: dict[tuple[int, int], list[str]] = {}
    for name, shape in shapes.items():
        if 0 not in shape:
            alike.setdefault((optimizer_group_of(spec, name), len(shape)), []).append(name)
    found = [names[place] for place in (0, 1) for names in alike.values() if place < len(names)][:LATE_PARAMETERS]
    return [name for name in shapes if name in found]


def _tiny(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(min(size, LARGEST_DIM) for size in shape)
