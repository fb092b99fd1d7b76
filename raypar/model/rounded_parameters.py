"""Modules that compute with copies of their parameters in a lower precision, and what they read of batches.

Rule 13 of the numerics contract (raypar/NUMERICS.md), for `precision.parameters`.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from raypar.torch_compat.modules import NormBase


def ids_of_rounded_parameters(module: nn.Module) -> frozenset[int]:
    """`id` of each parameter in `module` that is rounded: floating point ones, but those of norms with running statistics.

    Such a norm takes a bfloat16 input with float32 statistics only if its weight is float32 too. Buffers are not rounded.
    """
    kept = {
        id(parameter)
        for part in module.modules()
        if isinstance(part, NormBase) and part.track_running_stats
        for parameter in part.parameters(recurse=False)
    }
    return frozenset(id(p) for p in module.parameters() if p.is_floating_point() and id(p) not in kept)


def round_parameters_of(module: nn.Module, dtype: torch.dtype | None) -> nn.Module:
    """The module, its parameters rounded to `dtype`, in place; unchanged if that is None."""
    if dtype is not None:
        rounded = ids_of_rounded_parameters(module)
        for parameter in module.parameters():
            if id(parameter) in rounded:
                parameter.data = parameter.data.to(dtype)
    return module


def as_layers_read(field: Tensor, dtype: torch.dtype | None) -> Tensor:
    """A field of a batch as layers read it whose parameters are rounded to `dtype`: numbers with a fraction in that dtype."""
    return field if dtype is None or not field.is_floating_point() else field.to(dtype)


def as_loss_reads(value: Tensor, dtype: torch.dtype | None) -> Tensor:
    """A value as the loss reads it behind layers whose parameters are rounded to `dtype`: in float32 if it is in that dtype."""
    return value.float() if value.dtype == dtype else value
