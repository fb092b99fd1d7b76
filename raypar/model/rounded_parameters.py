"""Modules that compute with copies of their parameters in a lower precision, and what they read of batches.

Rule 13 of the numerics contract (raypar/NUMERICS.md), for `precision.parameters`.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from raypar.model.copy_on_device import pass_on_source
from raypar.torch_compat.modules import NormBase

_ROUNDED = "_raypar_rounded"
"""Attribute of a field: what layers read of it, and the versions of both when that was made."""


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
    """A field of a batch as layers read it whose parameters are rounded to `dtype`: numbers with a fraction in that dtype.

    It is one tensor for all layers, while neither it nor the field is written, so that what was asked of it is not asked again.
    """
    if dtype is None or not field.is_floating_point() or field.dtype == dtype:
        return field
    kept: tuple[Tensor, tuple[int, int]] | None = vars(field).get(_ROUNDED)
    if kept is None or kept[0].dtype != dtype or kept[1] != (field._version, kept[0]._version):
        rounded = field.to(dtype)
        pass_on_source(rounded, field)
        kept = rounded, (field._version, rounded._version)
        setattr(field, _ROUNDED, kept)
    return kept[0]


def as_loss_reads(value: Tensor, dtype: torch.dtype | None) -> Tensor:
    """A value as the loss reads it behind layers whose parameters are rounded to `dtype`: in float32 if it is in that dtype."""
    return value.float() if value.dtype == dtype else value
