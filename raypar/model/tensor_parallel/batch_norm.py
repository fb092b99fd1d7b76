"""Batch norm of a value of which each shard has some channels, rows or samples.

Of channels each shard has the statistics of its own; of rows and samples they are of what all shards have together. Buffers
stay whole and equal on all shards: those that have channels tell each other their running statistics.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from raypar.errors import ModelError
from raypar.model.tensor_parallel.autograd_collectives import select_ranges
from raypar.model.tensor_parallel.channel_functions import check_channels, own_channels
from raypar.model.tensor_parallel.local_part_layout import SAMPLES, SPATIAL
from raypar.model.tensor_parallel.sharded_value import (
    ShardedValue,
    implements_on_parts,
    implements_on_rows,
    implements_on_samples,
    take_part,
    unsupported_on_part_error,
)
from raypar.model.tensor_parallel.statistics_over_pieces import normalise_over_pieces, update_running_statistics


@implements_on_parts("batch_norm")
@implements_on_rows("batch_norm")
@implements_on_samples("batch_norm")
def _batch_norm(
    func: Callable[..., Tensor],
    x: ShardedValue,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> ShardedValue:
    """The input is made contiguous: running averages have the bits of contiguous inputs on every shard."""
    local, averages = x.local.contiguous(), (running_mean, running_var)
    if x.part_layout.axis not in (SPATIAL, SAMPLES):
        check_channels("batch_norm", x)
        own = [None if each is None else select_ranges(each, 0, x.part_layout.ranges) for each in averages]
        if training:
            own = [None if each is None else each.clone() for each in own]
        made = func(local, *own, own_channels(x, weight), own_channels(x, bias), training, momentum, eps)
        if training and running_mean is not None and running_var is not None:
            _tell_averages(x, (running_mean, running_var), own)
        return x.like(made)
    if not (x.part_layout.dim == 0 if x.part_layout.axis == SAMPLES else x.part_layout.dim > 1):
        raise unsupported_on_part_error("batch_norm", x)
    weight, bias = (None if each is None else take_part(each, 0, ((0, len(each)),), x.group) for each in (weight, bias))
    if not training:
        return x.like(func(local, *averages, weight, bias, False, momentum, eps))
    if x.numel() == x.shape[1]:
        raise ModelError(
            f"batch_norm in training has one value for each channel {list(x.shape)}",
            cure="give microbatches more samples, or the layer more rows",
        )
    made, found = normalise_over_pieces(local, weight, bias, eps, x.group)
    if running_mean is not None and running_var is not None:
        update_running_statistics(running_mean, running_var, found, momentum)
    return x.like(made)


@torch.no_grad()
def _tell_averages(x: ShardedValue, whole: tuple[Tensor, Tensor], parts: list[Tensor | None]) -> None:
    """Write this shard's channels of the averages, and those of the other shards, into the whole ones."""
    size, ranges = x.part_layout.size, x.part_layout.ranges
    every = torch.zeros(2, size, dtype=whole[0].dtype, device=whole[0].device)
    start = 0
    for first, last in ranges:
        for row, part in zip(every, parts, strict=True):
            assert part is not None
            row[first:last] = part[start : start + last - first]
        start += last - first
    every = x.group.all_reduce(every, "the running statistics of the channels")
    for target, row in zip(whole, every, strict=True):
        target.copy_(row)
