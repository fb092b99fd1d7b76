"""Torch functions on some samples of a value: each sample is computed by itself with whole parameters.

What a backward pass adds to the gradient of a parameter is a shard's part of a sum over the shards.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from raypar.model.tensor_parallel.sharded_value import (
    ShardedValue,
    implements_on_samples,
    take_part,
    unsupported_on_part_error,
)
from raypar.model.tensor_parallel.sharded_value_torch_functions import attention_with_dropout
from raypar.plan.shard_ranges import scale_ranges

_CONVOLUTIONS = [f"conv{transposed}{dims}d" for transposed in ("", "_transpose") for dims in (1, 2, 3)]
_BY_SAMPLE = ("embedding", "group_norm", "instance_norm", "layer_norm", "rms_norm")


def _local(x: ShardedValue, value: Any) -> Any:
    """What this shard computes with of an argument: its samples of a value, all of a tensor that every shard has."""
    if isinstance(value, ShardedValue):
        if value.part_layout != x.part_layout:
            raise unsupported_on_part_error("a function of several values", value, "meets other samples")
        return value.local
    return take_part(value, 0, ((0, value.shape[0]),), x.group) if isinstance(value, Tensor) and value.dim() else value


@implements_on_samples(*_CONVOLUTIONS, *_BY_SAMPLE)
def _each_by_itself(func: Callable[..., Tensor], x: ShardedValue, *args: Any, **kwargs: Any) -> ShardedValue:
    """Functions whose first dim is that of the samples, if that is the divided one."""
    if x.part_layout.dim != 0 or (func.__name__.startswith("conv") and x.dim() < int(func.__name__[-2]) + 2):
        raise unsupported_on_part_error(func.__name__, x)
    if func.__name__ == "instance_norm" and any(isinstance(each, Tensor) for each in _averages(args, kwargs)):
        raise unsupported_on_part_error("instance_norm with running statistics", x)
    given = {key: _local(x, value) for key, value in kwargs.items()}
    return x.like(func(x.local, *(_local(x, value) for value in args), **given))


def _averages(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    return [*args[:2], kwargs.get("running_mean"), kwargs.get("running_var")]


@implements_on_samples("scaled_dot_product_attention")
def _attention(
    func: Callable[..., Tensor],
    query: Tensor | ShardedValue,
    key: Tensor | ShardedValue,
    value: Tensor | ShardedValue,
    attn_mask: Tensor | ShardedValue | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> ShardedValue:
    """Attention within each sample. What is a plain tensor, such as a mask, may have been made for all samples."""
    given = [each for each in (query, key, value, attn_mask) if each is not None]
    x = next(each for each in given if isinstance(each, ShardedValue))
    if x.part_layout.dim != 0 or any(each.dim() > x.dim() for each in given):
        raise unsupported_on_part_error("scaled_dot_product_attention", x, "is possible where the samples are the first dim")
    q, k, v = (_of_own_samples(x, each) for each in (query, key, value))
    mask = None if attn_mask is None else _of_own_samples(x, attn_mask)
    if dropout_p == 0.0:
        return x.like(func(q, k, v, attn_mask=mask, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa))
    q, k, v = (each.expand(len(x.local), *each.shape[1:]) for each in (q, k, v))
    return attention_with_dropout(x.like(q), k, v, mask, dropout_p, is_causal, scale)


def _of_own_samples(x: ShardedValue, value: Tensor | ShardedValue) -> Tensor:
    """This shard's samples of a value, and of a tensor with all samples as its first dim; all of a tensor that has none."""
    if isinstance(value, Tensor) and value.dim() == x.dim() and len(value) == len(x):
        return take_part(value, 0, x.part_layout.ranges, x.group)
    found: Tensor = _local(x, value)
    return found


@implements_on_samples("multi_head_attention_forward")
def _multihead_attention(
    func: Callable[..., tuple[Tensor, Tensor | None]], query: ShardedValue, *args: Any, **kwargs: Any
) -> tuple[ShardedValue, ShardedValue | None]:
    """`nn.MultiheadAttention`, whose function has values [length, samples, features]. Its dropout would draw a part's masks."""
    name, samples = "multi_head_attention_forward", query.part_layout
    given = inspect.signature(func).bind(query, *args, **kwargs).arguments
    if query.dim() != 3 or samples.dim != 1:
        raise unsupported_on_part_error(name, query, "is possible where the samples are the dim of the batch")
    if given["training"] and given["dropout_p"] > 0.0:
        raise unsupported_on_part_error(
            "nn.MultiheadAttention with dropout", query, "would draw a mask for the samples of one shard, as the others do"
        )
    dims = {"key_padding_mask": 2, "attn_mask": 3}
    masks = [key for key, value in given.items() if value is not None and key in dims and value.dim() == dims[key]]
    local = {key: _of_own_batch(query, value) if key in masks else _local(query, value) for key, value in given.items()}
    out, weights = func(**local)
    return query.like(out), None if weights is None else ShardedValue(weights, samples.moved_to(0), query.group)


def _of_own_batch(x: ShardedValue, mask: Tensor | ShardedValue) -> Tensor:
    """This shard's samples of a mask [samples, ...] or [samples x heads, ...]."""
    own = scale_ranges(x.part_layout.ranges, len(mask) // x.part_layout.size)
    if isinstance(mask, Tensor):
        return take_part(mask, 0, own, x.group)
    if mask.part_layout.dim != 0 or mask.part_layout.ranges != own:
        raise unsupported_on_part_error("multi_head_attention_forward", mask, "is a mask of other samples")
    return mask.local


@implements_on_samples("lstm", "gru", "rnn_tanh", "rnn_relu")
def _recurrent(
    func: Callable[..., tuple[Tensor, ...]], x: ShardedValue, hx: Any, weights: Sequence[Tensor], *args: Any
) -> tuple[ShardedValue, ...]:
    """`nn.LSTM`, `nn.GRU`, `nn.RNN`: (output, last state) of each sample by itself. `args`: whether there are biases, number of
    layers, dropout, training, both directions, batch_first. Dropout between layers would draw a part's masks."""
    _, _, dropout, training, _, batch_first = args
    if x.dim() != 3 or x.part_layout.dim != (0 if batch_first else 1):
        raise unsupported_on_part_error(func.__name__, x, "is possible where the samples are the dim of the batch")
    if training and dropout > 0.0:
        raise unsupported_on_part_error(func.__name__, x, "with dropout would draw a mask for the samples of one shard")
    states = hx if isinstance(hx, (tuple, list)) else (hx,)
    own = tuple(_of_own_state(func.__name__, x, each) for each in states)
    local = [_local(x, each) for each in weights]
    out, *last = func(x.local, own if isinstance(hx, (tuple, list)) else own[0], local, *args)
    return x.like(out), *(ShardedValue(each, x.part_layout.moved_to(1), x.group) for each in last)


def _of_own_state(name: str, x: ShardedValue, state: Tensor | ShardedValue) -> Tensor:
    """This shard's samples of a state [layers x directions, samples, units]."""
    if isinstance(state, Tensor):
        return take_part(state, 1, x.part_layout.ranges, x.group)
    if state.part_layout.dim != 1 or state.part_layout.ranges != x.part_layout.ranges:
        raise unsupported_on_part_error(name, state, "is a state of other samples")
    return state.local
