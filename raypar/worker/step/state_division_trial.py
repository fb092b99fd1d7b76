"""Whether an optimizer trains runs of flattened parameters bit by bit like the whole ones: a trial before state is divided.

Owners of optimizer state (ZeRO) give their optimizer runs that begin at multiples of 32,768 elements, each a flat tensor of its
own. Vector kernels, blocks of a quantised state and rules for small or flat tensors may see the cut.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from raypar.errors import ConfigError, UserCodeError
from raypar.job import SingleOptimizerConfig
from raypar.plan.ownership import CANONICAL_PIECE
from raypar.worker.stage.buffer_updates import same_bits
from raypar.worker.step.late_optimizer_trial import (
    STEPS,
    TrialSteps,
    longest_run,
    spec_with_numbered_groups,
    step_numbers_of_options,
)
from raypar.worker.step.optimizer_and_parameter_groups import optimizer_group_of
from raypar.worker.step.optimizer_state import Value
from raypar.worker.step.optimizer_under_trial import TriedOptimizer, values_and_gradients

STEPS_OF_RUNS = 4
"""Consecutive steps of the trial with large parameters; then come those that options name."""
PIECES = 2
"""Full pieces of each large parameter."""
SMALL = 3
"""Size of the dimensions of the small parameters."""


def find_difference_of_runs(
    spec: SingleOptimizerConfig, shapes: Mapping[str, Sequence[int]], dtype: torch.dtype, piece: int = CANONICAL_PIECE
) -> str | None:
    """What differs between parameters and their runs of `piece` elements, each with state of its own, in words; None: nothing.

    Tried are parameters with the numbers of dimensions and the shortest last pieces of those in `shapes`, of every group.
    """
    of_groups, _ = spec_with_numbered_groups(spec)
    large, small = _shapes_to_try(spec, shapes, piece)
    try:
        for tried, steps in ((small, STEPS), (large, STEPS_OF_RUNS)):
            if (found := _difference(of_groups, tried, dtype, steps, piece)) is not None:
                return found
    except (UserCodeError, ConfigError) as error:
        return f"it does not accept runs of a parameter, which are flat: {error.what.splitlines()[0]}"
    return None


def _shapes_to_try(
    spec: SingleOptimizerConfig, shapes: Mapping[str, Sequence[int]], piece: int
) -> tuple[dict[str, tuple[int, ...]], dict[str, tuple[int, ...]]]:
    """(large, small) shapes by name. A large one has full pieces and the shortest last piece of its kind: a group and a number
    of dimensions."""
    rests: dict[tuple[int, int], list[int]] = {}
    for name, shape in shapes.items():
        group, size = optimizer_group_of(spec, name), math.prod(shape)
        number = group + 1 if group < len(spec.groups) else 0
        of_kind = rests.setdefault((number, len(shape)), [])
        if size > piece and size % piece:
            of_kind.append(size % piece)
    large = {f"{n}.{d}": _with_elements(PIECES * piece + min(rest, default=0), d) for (n, d), rest in rests.items() if d}
    return large, {f"{number}.{dims}": (SMALL,) * dims for number, dims in rests}


def _with_elements(elements: int, dims: int) -> tuple[int, ...]:
    """A shape of so many elements and dimensions, the second of which is at most 256."""
    if dims == 1:
        return (elements,)
    columns = next(size for size in range(256, 0, -1) if elements % size == 0)
    return elements // columns, columns, *(1,) * (dims - 2)


def _difference(
    spec: SingleOptimizerConfig, shapes: Mapping[str, Sequence[int]], dtype: torch.dtype, steps: int, piece: int
) -> str | None:
    """What differs between parameters of these shapes and their runs; None: nothing."""
    values, gradients = values_and_gradients(shapes, dtype, steps)
    if (found := longest_run(spec, values, TrialSteps(gradients, step_numbers_of_options(spec, values, steps)))) is None:
        return "it does not step parameters that are tried by themselves"
    whole, done = found
    runs = TriedOptimizer(spec, {f"{n}@{i}": run for n, value in values.items() for i, run in enumerate(_runs(value, piece))})
    of_runs = [
        {f"{name}@{i}": run for name, of in step.items() if of is not None for i, run in enumerate(_runs(of, piece))}
        for step in done.gradients
    ]
    TrialSteps(of_runs, done.jumps).run(runs)
    shown = f"in a trial of {whole.steps_in_words}"
    for name, shape in shapes.items():
        apart = [value for of, value in runs.values().items() if of.partition("@")[0] == name]
        one, several = whole.values()[name].reshape(-1), torch.cat(apart)
        if not same_bits(one, several):
            most = float((one - several).abs().max())
            return (
                f"{shown} the weights of a parameter of shape {list(shape)} differ by {most:.2g} between the parameter whole "
                f"and its {len(apart)} flat runs of {piece:,} elements"
            )
    return _difference_of_state(whole, runs, shown)


def _runs(value: Tensor, piece: int) -> list[Tensor]:
    return list(value.reshape(-1).split(piece))


def _difference_of_state(whole: TriedOptimizer, runs: TriedOptimizer, shown: str) -> str | None:
    """State of parameters that is not made of the state of its runs, in words; None: all of it is.

    It may be one number an element, in the shape of the parameter and of its runs, or one number that is the same for all runs:
    by these shapes state is put together from runs, so a tensor of any other one would be taken for what it is not.
    """
    there, here = whole.state().parameters, runs.state().parameters
    for name, entries in there.items():
        of_runs = [entries_of_run for run, entries_of_run in here.items() if run.partition("@")[0] == name]
        for key, value in entries.items():
            if not _is_made_of(value, [entries_of_run.get(key) for entries_of_run in of_runs], whole.values()[name].shape):
                what = f"a tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else repr(value)
                return (
                    f"{shown} {key!r}, state that is {what} for a parameter of shape {list(whole.values()[name].shape)}, is "
                    "not made of that of its flat runs: neither one number an element nor the same for all"
                )
    return None


def _is_made_of(whole: Value, runs: Sequence[Value], shape: torch.Size) -> bool:
    tensors = [value for value in runs if isinstance(value, Tensor)]
    if not isinstance(whole, Tensor):
        return all(type(value) is type(whole) and (value == whole or value != value) for value in runs)
    if len(tensors) != len(runs) or any(value.dtype != whole.dtype for value in tensors):
        return False
    if whole.dim() == 0 and all(value.shape == whole.shape and same_bits(value, whole) for value in tensors):
        return True
    if whole.shape != shape or any(value.dim() != 1 for value in tensors):
        return False
    joined = torch.cat(tensors)
    return joined.numel() == whole.numel() and same_bits(joined, whole.reshape(-1))
