"""Finds, before a run, a loss in which the samples of a microbatch depend on each other, as in contrastive learning."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from raypar.job import Job
from raypar.model.graph import Graph
from raypar.model.random_state import preserve_random_state, seed_all
from raypar.user_code.user_code_errors import USER_CODE_ERRORS, reraise_ctrl_c
from raypar.worker.check_loss import random_output
from raypar.worker.stage.loss import make_loss_function

MOST_LOSS_NUMBERS = 1 << 20
"""Losses of larger outputs are not tried."""
_TOLERANCE = 1e-3
"""Largest change of a gradient, as a share of the largest gradient, that counts as none."""


def line_about_mixed_samples(spec: Job, graph: Graph, values: Mapping[str, Tensor], target: Tensor | None) -> str | None:
    """A line for the user if the loss mixes the samples of a microbatch; None if not, or if it cannot be tried.

    The loss is computed twice, with other outputs for the second half of the batch and the same targets. The gradients of the
    first half are the same both times unless the loss mixes samples. (Gradients are compared because the loss of one sample
    also changes where it is a mean over tokens that are not masked.) `values`: outputs on the meta device, for their shapes.
    """
    if spec.loss.is_loss_of_model or spec.microbatches == 1 or target is None or not target.dim():
        return None
    outputs, samples = [values[name] for name in graph.loss_inputs], len(target)
    if not all(x.dim() and len(x) == samples for x in outputs) or sum(x.numel() for x in outputs) > MOST_LOSS_NUMBERS:
        return None
    if samples < 2 or not any(x.is_floating_point() for x in outputs):
        return None
    half = samples // 2
    with preserve_random_state(), torch.enable_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the first microbatch shows them
        seed_all(0)
        first, other = ([random_output(x.shape, x.dtype) for x in outputs] for _ in range(2))
        mixed = [torch.cat([a[:half], b[half:]]) for a, b in zip(first, other, strict=True)]
        try:
            loss = graph.loss_of_values(make_loss_function(spec.loss))
            one, two = (_gradients(loss, given, target) for given in (first, mixed))
        except USER_CODE_ERRORS as error:
            reraise_ctrl_c(error)
            return None
    largest = max((float(gradient.abs().max()) for gradient in one if gradient.numel()), default=0.0)
    change = max((float((a[:half] - b[:half]).abs().max()) for a, b in zip(one, two, strict=True) if a.numel()), default=0.0)
    if not change > _TOLERANCE * largest:
        return None
    return (
        f"the loss {spec.loss.label} compares the samples of a microbatch with each other (the gradient of one depends on the "
        f"outputs of others): it sees the {samples} samples of a microbatch, not the batch of {spec.batch_size}\n"
        "  cure: set microbatches to fewer, if it needs more samples at once"
    )


def _gradients(loss: object, outputs: Sequence[Tensor], target: Tensor) -> list[Tensor]:
    """The gradients of the outputs."""
    seed_all(0)
    leaves = [x.detach().requires_grad_(x.is_floating_point()) for x in outputs]
    found = loss(*leaves, target.clone())  # type: ignore[operator]
    total = found[0] if isinstance(found, tuple) else found
    trained = [leaf for leaf in leaves if leaf.requires_grad]
    gradients = torch.autograd.grad(total, trained, allow_unused=True)
    return [torch.zeros_like(leaf) if g is None else g for leaf, g in zip(trained, gradients, strict=True)]
