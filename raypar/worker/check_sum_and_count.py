"""Checks before a run that a loss which returns a pair returns (sum, count) (rule 5 of the numerics contract)."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping

import torch
from torch import Tensor

from raypar.errors import ModelError
from raypar.job import Job
from raypar.model.graph import Graph
from raypar.model.random_state import preserve_random_state
from raypar.user_code.user_code_errors import USER_CODE_ERRORS, reraise_ctrl_c
from raypar.worker.stage.loss import make_loss_function

_CHECKED_SAMPLES, _CHECKED_PLACES = 4, 8
"""How many samples, and how many places of each (tokens), `check_sum_and_count` gives to the loss."""


def check_sum_and_count(spec: Job, graph: Graph, values: Mapping[str, Tensor], target: Tensor | None) -> None:
    """Raises `ModelError` for a loss that returns a pair other than (sum, count), such as (mean, accuracy).

    The loss is called with a few samples, with other outputs for them, and with all of them twice: the count must be the same,
    and then twice as large, as the sum must be. (A count of 1 is accepted too: all microbatches then weigh the same.) A loss
    that raises is left to the first step. `values`: on the meta device; `target`: the batch's field; None if a layer writes it.
    """
    outputs = [values[name] for name in graph.loss_inputs]
    if target is None or not target.dim() or not all(x.dim() and len(x) == len(target) and x.numel() for x in outputs):
        return
    shared = [all(x.dim() > dim and x.shape[dim] == size for x in outputs) for dim, size in enumerate(target.shape)]
    dims = len(shared) if all(shared) else shared.index(False)
    places = tuple(slice(_CHECKED_PLACES if dim else _CHECKED_SAMPLES) for dim in range(dims))
    target = target[places]
    with preserve_random_state(), torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the first microbatch shows them
        wrong = [random_output(x[places].shape, x.dtype) for x in outputs]
        half_right = [_moved_to_target(x, target) for x in wrong]
        loss = graph.loss_of_values(make_loss_function(spec.loss))
        try:
            found = [loss(*wrong, target), loss(*half_right, target), loss(*(torch.cat([x, x]) for x in (*half_right, target)))]
            if not all(isinstance(pair, tuple) and len(pair) == 2 for pair in found):
                return
            (_, other), (total, count), (total_of_twice, count_of_twice) = ((float(a), float(b)) for a, b in found)
        except USER_CODE_ERRORS as error:
            reraise_ctrl_c(error)
            return
    what = f"the loss {spec.loss.label} returned a pair whose"
    if other != count:
        raise ModelError(
            f"{what} second value depends on the model's output ({other:.6g} for one, {count:.6g} for another), so it is no "
            "count, by which the first value would be divided",
            cure="return the loss alone, or (sum, count): the sum over samples or tokens, and how many they are",
        )
    if not math.isclose(count_of_twice, 2 * count, rel_tol=1e-6) and (count, count_of_twice) != (1, 1):
        raise ModelError(
            f"{what} second value is {count:.6g} for {len(target)} samples and {count_of_twice:.6g} for the same samples "
            "twice, so it is no count, by which the first value would be divided",
            cure="return the loss alone, or (sum, count): the sum over samples or tokens, and how many they are",
        )
    if total and count_of_twice != count and math.isclose(total_of_twice, total, rel_tol=1e-4):
        raise ModelError(
            f"{what} first value is {total:.6g} for {len(target)} samples and for the same samples twice, so it is a mean, "
            "which would be divided by the second value, a count, once more",
            cure="return the mean alone, or the sum with the count (reduction='sum')",
        )


def random_output(shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """A random output for a loss: numbers in (0, 1), which may be probabilities; zeros for an integer dtype."""
    return torch.rand(shape, dtype=dtype) if dtype.is_floating_point else torch.zeros(shape, dtype=dtype)


def _moved_to_target(output: Tensor, target: Tensor) -> Tensor:
    """The output with half of its samples moved to their targets, where the two shapes show how; else unchanged."""
    moved, half = output.clone(), slice((len(output) + 1) // 2)
    if target.shape == output.shape:
        moved[half] = target[half].to(output.dtype)
    elif not target.is_floating_point() and target.dim() == output.dim() - 1:
        for classes in (1, -1):  # a class for each place; PyTorch's losses have the classes in dim 1, other code in the last
            if output.select(classes, 0).shape == target.shape and int(target.max()) < output.shape[classes]:
                moved[half].scatter_(classes, target[half].long().clamp(min=0).unsqueeze(classes), 1.0)
                break
    return moved
