"""Longer and wider trials of a job's optimizer, with tiny parameters: what begins late, and what depends on how many there are.

After many steps the counters in the state are set forward, to each step that an option of the optimizer names (`warmup_steps`)
and far beyond, so that what begins there is seen in a few steps more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from raypar.errors import UserCodeError
from raypar.worker.job_spec import OptimizerSpec
from raypar.worker.step.make_optimizers_by_name import optimizer_group_of
from raypar.worker.step.optimizer_state import state_of_code
from raypar.worker.step.tried_optimizer import Gradients, TriedOptimizer, describe_coupling, values_and_gradients

STEPS, SAVED_AFTER, SETTLED_AFTER = 100, 6, 12
"""Steps of a late trial; after how many of them the state is saved and loaded; and after how many what the optimizer's code
keeps outside of it changes no more."""
STEPS_AFTER_JUMP, FAR, MOST_JUMPS = 3, 9_009_000, 8
"""Steps after the counters were set forward; the last step to which they are, a multiple of 1 to 15, 50, 200, 1,000 and many
others, for what is done every so many steps, and a number that float32 counts exactly; the most options that are looked at."""
FEW, SMALLEST = 6, 2
"""Number of parameters of the late trial, and their largest dim."""
MANY, STEPS_OF_MANY = 512, 2
"""Most parameters of the wide trial, and its steps."""


@dataclass(frozen=True)
class _Course:
    """What optimizers do in a late trial."""

    gradients: Gradients
    """Of its steps."""
    jumps: Sequence[int]
    """The numbers of steps to which counters are set after these, ascending; a few steps follow each."""

    def run(self, tried: TriedOptimizer) -> None:
        """Make the steps that are left. Raises `UserCodeError` for what one raises."""
        tried.run(self.gradients[tried.steps :])
        for steps in self.jumps:
            tried.fast_forward(steps - tried.steps)
            tried.run(self.gradients[:STEPS_AFTER_JUMP])

    def until(self, steps: int) -> _Course:
        """The part before the step that follows `steps`."""
        if steps < len(self.gradients):
            return _Course(self.gradients[:steps], ())
        return replace(self, jumps=[to for to in self.jumps if to + STEPS_AFTER_JUMP <= steps])


def _jumps(spec: OptimizerSpec, values: Mapping[str, Tensor]) -> list[int]:
    """Shortly before which steps something may begin: options that may be numbers of steps, and one far away."""
    made = TriedOptimizer(spec, values).optimizer
    options = [value for each in (made.defaults, *made.param_groups, vars(made)) for value in each.values()]
    found = {int(value) for value in options if isinstance(value, (int, float)) and STEPS < value < FAR}
    return [number - STEPS_AFTER_JUMP + 1 for number in (*sorted(found)[:MOST_JUMPS], FAR)]


def _longest_run(spec: OptimizerSpec, values: Mapping[str, Tensor], course: _Course) -> tuple[TriedOptimizer, _Course] | None:
    """An optimizer after the whole course, or after its part before the first step that raises; None if that is empty.

    An optimizer may refuse to go on after so many steps. Raises `ConfigError` for state that cannot be kept.
    """
    while course.gradients:
        whole = TriedOptimizer(spec, values)
        code = state_of_code(whole.optimizer)
        begun = code.read()
        try:
            whole.run(course.gradients[:SETTLED_AFTER])
            settled = code.read()
            course.run(whole)
        except UserCodeError:
            course = course.until(whole.steps)
        else:
            whole.check_code(settled.changed(code.read()))
            return whole, course
        finally:
            code.put_back(begun)
    return None


def find_late_coupling(
    spec: OptimizerSpec, shapes: Mapping[str, Sequence[int]], tried: Mapping[str, Sequence[int]], dtype: torch.dtype
) -> str | None:
    """What differs between parameters that are trained together and apart for many steps, in words; None if nothing does.

    `shapes`: of all parameters; `tried`: shapes that the optimizer takes, of some. Those apart are saved and loaded, too.
    Raises `ConfigError` for state that cannot be kept.
    """
    tiny = {name: _tiny(shapes[name]) for name in _few(spec, shapes)}
    # A weak coupling is below the last digit of float32. Some optimizers do not take float64, or parameters as small as these.
    for few, of_dtype in ((tiny, torch.float64), (tiny, dtype), (dict(list(tried.items())[:FEW]), dtype)):
        values, gradients = values_and_gradients(few, of_dtype, STEPS)
        if (found := _longest_run(spec, values, _Course(gradients, _jumps(spec, values)))) is None:
            continue
        whole, course = found
        half = {name: values[name] for name in list(few)[len(few) // 2 :]}
        try:
            resumed = TriedOptimizer(spec, half)
            resumed.run(course.gradients[:SAVED_AFTER])
            resumed = resumed.saved_and_loaded()
            course.run(resumed)
            if describe_coupling(whole, resumed) is None:
                return None
            alone = TriedOptimizer(spec, half)
            course.run(alone)
        except UserCodeError as error:
            return f"{error.what.splitlines()[0]} with {len(half)} of {len(values)} parameters, and not with all"
        if (difference := describe_coupling(whole, alone)) is None:
            whole.check_resumed(resumed, SAVED_AFTER)
        return difference
    return None


def find_coupling_of_many(spec: OptimizerSpec, shapes: Mapping[str, Sequence[int]], dtype: torch.dtype) -> str | None:
    """What differs between all of a model's parameters, trained together, and half of them alone; None if nothing does.

    So an optimizer is found that takes the seventh parameter otherwise than the others.
    """
    for of_dtype in (torch.float64, dtype):
        many = {name: _tiny(shapes[name]) for name in list(shapes)[:MANY]}
        values, gradients = values_and_gradients(many, of_dtype, STEPS_OF_MANY)
        whole, half = TriedOptimizer(spec, values), TriedOptimizer(spec, dict(list(values.items())[len(values) // 2 :]))
        try:
            for tried in (whole, half):
                tried.run(gradients)
        except UserCodeError:
            continue
        return describe_coupling(whole, half)
    return None


def takes_elements_by_themselves(spec: OptimizerSpec, shapes: Sequence[tuple[int, ...]], *, late: bool) -> bool:
    """Whether parameters of these shapes are trained as their halves are: with the options of every group.

    `late`: for many steps. Raises `UserCodeError` for parameters that the optimizer does not take.
    """
    options = dict(enumerate([{}, *(given for _, given in spec.groups)]))
    of_options = OptimizerSpec(spec.optimizer, tuple((f"{number}.*", given) for number, given in options.items()))
    places: dict[str, tuple[str, tuple[slice, ...]]] = {}
    wholes: dict[str, tuple[int, ...]] = {}
    for number in options:
        for which, shape in enumerate(shapes):
            wholes[name := f"{number}.{which}"] = shape
            for dim, size in enumerate(shape):
                places[f"{name}.{dim}"] = name, (slice(None),) * dim + (slice(0, size // 2),)
    values, gradients = values_and_gradients(wholes, torch.float64, STEPS if late else SAVED_AFTER)
    found = _longest_run(of_options, values, _Course(gradients, _jumps(of_options, values) if late else ()))
    if found is None:
        return False
    whole, course = found
    halves = TriedOptimizer(of_options, {name: values[of][place] for name, (of, place) in places.items()})
    of_halves = [{name: step[of][place] for name, (of, place) in places.items()} for step in gradients[: len(course.gradients)]]
    replace(course, gradients=of_halves).run(halves)
    return all(
        torch.allclose(halves.parameters[name], whole.parameters[of][place], rtol=1e-9, atol=1e-9, equal_nan=True)
        for name, (of, place) in places.items()
    )


def _few(spec: OptimizerSpec, shapes: Mapping[str, Sequence[int]]) -> list[str]:
    """Some parameters in layer order: one or two of each group and number of dims."""
    alike: dict[tuple[int, int], list[str]] = {}
    for name, shape in shapes.items():
        if 0 not in shape:
            alike.setdefault((optimizer_group_of(spec, name), len(shape)), []).append(name)
    found = [names[place] for place in (0, 1) for names in alike.values() if place < len(names)][:FEW]
    return [name for name in shapes if name in found]


def _tiny(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(min(size, SMALLEST) for size in shape)
