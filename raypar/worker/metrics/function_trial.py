"""Tries a function that measures with the same samples twice: what it returns then must be twice as much, or it is a mean."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from raypar.errors import ConfigError
from raypar.model.capture.tensors_in_values import flatten
from raypar.model.graph import ModelOutput
from raypar.model.random_state import preserve_random_state
from raypar.torch_compat.pytree import tree_unflatten
from raypar.user_code.stop_signals import reraise_ctrl_c
from raypar.user_code.user_code_errors import USER_CODE_ERRORS
from raypar.worker.check_loss import move_half_to_target
from raypar.worker.metrics.metric import Batch, FunctionMetric

FEW_SAMPLES = 4
"""Samples of a microbatch with which a function is tried in a validation, where outputs may be large."""


class Measured(NamedTuple):
    """What a metric was given of one microbatch."""

    output: ModelOutput
    batch: Batch
    target: Tensor


def refuse_means(metric: FunctionMetric, given: Measured) -> bool:
    """Whether it could be tried. Raises `ConfigError` if what the function returns, or the sum in it, is the same for the
    samples twice: a mean, say. All that the model returns is doubled, where it has a row for each sample."""
    target, samples = given.target, len(given.target) if given.target.dim() else 0
    leaves, structure = flatten(given.output)
    of_samples = [samples > 0 and isinstance(leaf, Tensor) and leaf.dim() > 0 and len(leaf) == samples for leaf in leaves]
    if not any(of_samples):
        return False

    def output(change: Callable[[Tensor], Tensor]) -> ModelOutput:
        changed = [change(leaf) if own else leaf for leaf, own in zip(leaves, of_samples, strict=True)]
        rebuilt: ModelOutput = tree_unflatten(changed, structure)
        return rebuilt

    tried = False
    for moved in (lambda leaf: leaf, lambda leaf: move_half_to_target(leaf, target)):
        twice = {name: torch.cat([field, field]) if field.dim() else field for name, field in given.batch.items()}
        doubled = output(lambda leaf, moved=moved: torch.cat([moved(leaf)] * 2))  # type: ignore[misc]
        try:
            once, double = (
                [numbers_of(part) for part in metric.parts(metric.measure(*those))]
                for those in ((output(moved), given.batch, target), (doubled, twice, torch.cat([target, target])))
            )
        except USER_CODE_ERRORS as error:  # perhaps because of the number of samples, or outputs that no model gives
            reraise_ctrl_c(error)
            return tried
        tried = tried or any(once[0])
        # (mean, 1) weighs every microbatch alike, as a loss that returns it does.
        if any(once[0]) and once[0] == double[0] and (len(once) == 1 or once[1] != double[1]):
            shown = ", ".join(f"{number:.6g}" for number in once[0][:3])
            raise ConfigError(
                f"metric {metric.name!r} returned {shown} for {len(target)} samples and for the same samples twice, so it is a "
                "mean, and would be added up over microbatches",
                cure="return (sum, count): the sum over samples or tokens, and how many they are",
            )
    return tried


def not_tried(metric: FunctionMetric) -> str:
    """The line about a function of which nothing could be found out."""
    return (
        f"metric {metric.name!r} could not be tried with the same samples twice (it raised, returned 0, or the output "
        "has no row for each sample): it must return a sum, or (sum, count), and no mean"
    )


def numbers_of(part: Tensor) -> list[float]:
    """All numbers of a tensor, which are waited for."""
    return [float(number) for number in part.reshape(-1)]


class FunctionTrialInValidation:
    """The trial with a worker's first microbatches, for a model too large for the one before the run."""

    def __init__(self, metric: FunctionMetric, microbatches: int) -> None:
        self._metric, self._left = metric, microbatches

    def add(self, output: ModelOutput, batch: Batch, target: Tensor) -> str | None:
        """Take the next microbatch. A warning if the function returned a mean, or nothing could be found out."""
        if not self._left:
            return None
        self._left -= 1
        try:
            with preserve_random_state(), torch.no_grad():
                found_out = refuse_means(self._metric, _first_samples(Measured(output, batch, target)))
        except ConfigError as error:
            self._left = 0
            return f"{error.what}\n  cure: {error.cure}"
        if found_out:
            self._left = 0
        return None if found_out or self._left else not_tried(self._metric)


def _first_samples(given: Measured) -> Measured:
    """What belongs to the first few samples, where a tensor has a row for each."""
    samples = len(given.target) if given.target.dim() else 0

    def first(tensor: Tensor) -> Tensor:
        return tensor[:FEW_SAMPLES] if samples and tensor.dim() and len(tensor) == samples else tensor

    leaves, structure = flatten(given.output)
    output = tree_unflatten([first(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves], structure)
    return Measured(output, {name: first(field) for name, field in given.batch.items()}, first(given.target))
