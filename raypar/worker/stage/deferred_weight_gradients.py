"""Weight gradients that the input half of a split backward pass has put off, and that its weight half computes."""

from __future__ import annotations

import torch
from torch import Tensor

from raypar.model.split_linear_backward import Stash
from raypar.worker.stage.stage_tensors import StageTensors


class DeferredGradients:
    """Where a stage's Linears put off their weight gradients, and the parameters for which they do so."""

    stash: Stash
    """The stash of the microbatch under way, also in a backward pass: a layer that checkpoints runs its forward again there."""
    parameters: frozenset[int]
    """`id` of each parameter whose gradient is put off."""

    def __init__(self) -> None:
        self.stash = []
        self.parameters = frozenset()

    def current(self) -> Stash:
        """The stash of the microbatch under way."""
        return self.stash


def sum_deferred_gradients(stash: Stash, weights: StageTensors) -> dict[int, Tensor]:
    """Use -> the weight gradient of one microbatch, in the dtype of the parameter.

    Gradients of calls that share a cast of the weight (under `torch.autocast`) are added in the compute dtype, as by autograd.
    """
    by_cast: dict[tuple[int, object], Tensor] = {}
    sums: dict[int, Tensor] = {}
    with torch.no_grad():
        for deferred in stash:
            pairs = [(deferred.linear.weight, deferred.weight_gradient)]
            if deferred.linear.bias is not None:
                pairs.append((deferred.linear.bias, deferred.bias_gradient))
            for parameter, compute in pairs:
                use = weights.use_of(parameter), deferred.cast_token
                by_cast[use] = by_cast[use] + compute() if use in by_cast else compute()
        for (index, _), total in by_cast.items():
            total = total.to(weights.uses[index].dtype)
            sums[index] = sums[index] + total if index in sums else total
    return sums
