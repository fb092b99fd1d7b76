"""Torch functions of images and signals on a part that is cut by channels: pooling, interpolation, norms, dropout of channels.

They compute each channel from itself. Norms read whole parameters, of which each shard takes its channels: their gradients are
sums over shards.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from raypar.errors import ModelError
from raypar.model.tensor_parallel.autograd_collectives import select_ranges
from raypar.model.tensor_parallel.local_part_layout import FEATURES, SAMPLES, SEQUENCE
from raypar.model.tensor_parallel.sharded_value import ShardedValue, implements_on_parts, take_part, unsupported_on_part_error
from raypar.plan.shard_ranges import count_indices

_POOLS = [f"{kind}_pool{dims}d" for kind in ("max", "avg", "adaptive_avg", "adaptive_max", "lp") for dims in (1, 2, 3)]


@implements_on_parts(*_POOLS)
def _pool(func: Callable[..., Tensor], x: ShardedValue, *args: Any, **kwargs: Any) -> ShardedValue:
    """Over the last dims, which are not cut."""
    name = func.__name__
    if x.part_layout.dim >= x.dim() - int(name[-2]) or kwargs.get("return_indices"):
        raise unsupported_on_part_error(name, x)
    return x.like(func(x.local, *args, **kwargs))


@implements_on_parts("interpolate")
def _interpolate(func: Callable[..., Tensor], x: ShardedValue, *args: Any, **kwargs: Any) -> ShardedValue:
    """Over all dims but batch and channels."""
    if x.part_layout.dim > 1:
        raise unsupported_on_part_error("interpolate", x)
    return x.like(func(x.local, *args, **kwargs))


@implements_on_parts("dropout1d", "dropout2d", "dropout3d")
def _drop_channels(
    func: Callable[..., Tensor], x: ShardedValue, p: float = 0.5, training: bool = True, inplace: bool = False
) -> ShardedValue:
    """The whole value's mask is drawn, one number for each sample and channel."""
    if not training or p == 0.0:
        return x
    part = x.part_layout
    if part.dim != (0 if part.axis == SAMPLES else 1) or x.dim() != int(func.__name__[-2]) + 2:
        raise unsupported_on_part_error(func.__name__, x)
    with torch.no_grad():
        ones = torch.ones([*x.shape[:2], *[1] * (x.dim() - 2)], dtype=x.local.dtype, device=x.local.device)
        mask = select_ranges(func(ones, p, True), part.dim, part.ranges)
    if inplace:  # other names of the value see it
        x.like(x.local.mul_(mask))
        return x
    return x.like(x.local * mask)


@implements_on_parts("prelu")
def _prelu(func: Callable[..., Tensor], x: ShardedValue, weight: Tensor) -> ShardedValue:
    """With one slope for all channels, or one for each."""
    if weight.numel() > 1 and x.part_layout.dim == 1:
        return x.like(func(x.local, own_channels(x, weight)))
    return x.like(func(x.local, take_part(weight, 0, ((0, weight.shape[0]),), x.group)))


def own_channels(x: ShardedValue, whole: Tensor | None) -> Any:
    """Of a tensor that has a number for each channel, those of this shard."""
    return None if whole is None else take_part(whole, 0, x.part_layout.ranges, x.group)


def check_channels(name: str, x: ShardedValue) -> None:
    """Raises `ModelError` unless the value is cut by its channels, which each are on one shard."""
    if x.part_layout.dim != 1 or x.part_layout.axis not in (FEATURES, SEQUENCE):
        raise unsupported_on_part_error(name, x)


@implements_on_parts("instance_norm")
def _instance_norm(
    func: Callable[..., Tensor],
    x: ShardedValue,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *args: Any,
    **kwargs: Any,
) -> ShardedValue:
    """Each channel of each sample by itself, without running statistics."""
    check_channels("instance_norm", x)
    if running_mean is not None or running_var is not None:
        raise ModelError(
            f"instance_norm with running statistics of a value {list(x.shape)} cut by channels over {x.group.size} shards",
            cure="give it track_running_stats=False, or the layer before it the style gathered (plan.styles)",
        )
    return x.like(func(x.local, None, None, own_channels(x, weight), own_channels(x, bias), *args, **kwargs))


@implements_on_parts("group_norm")
def _group_norm(
    func: Callable[..., Tensor],
    x: ShardedValue,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> ShardedValue:
    """Where whole groups are on a shard."""
    check_channels("group_norm", x)
    each = x.part_layout.size // num_groups
    if any(bound % each for span in x.part_layout.ranges for bound in span):
        raise ModelError(
            f"group_norm with {num_groups} groups of {each} channels cuts a group across {x.group.size} shards: "
            f"{list(x.part_layout.ranges)} are here",
            cure=f"give the layer that makes its input the style column:{num_groups} (row:{num_groups} to what reads it), so "
            f"that whole groups are on a shard, with at most {num_groups} shards; or the style gathered",
        )
    here = count_indices(x.part_layout.ranges) // each
    return x.like(F.group_norm(x.local, here, own_channels(x, weight), own_channels(x, bias), eps))
