"""Communication between the shards of a stage as autograd functions: Megatron's f and g, and their sequence parallel forms.

f (`copy_to_shards`) passes a value on and sums its gradients over the shards. g (`reduce_from_shards`) sums a value and passes
its gradient on (Shoeybi et al. 2019, arXiv:1909.08053, section 3). Under sequence parallelism f gathers a value and scatters
the sum of its gradients, and g the other way round (Korthikanti et al. 2022, arXiv:2205.05198, section 4.2). Sums follow the
addition tree over the shards (rule 11 of raypar/NUMERICS.md).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

from raypar.comm.buffer_pool import aligned_contiguous
from raypar.errors import ModelError
from raypar.model.autograd_function_types import AutogradContext, AutogradFunction
from raypar.model.tensor_parallel.shard_group import ShardGroup
from raypar.plan.shard_ranges import IndexRanges, even_ranges_by_shard

P = ParamSpec("P")
Gradients = TypeVar("Gradients", bound=tuple[Tensor | None, ...])


def first_derivative_only(backward: Callable[P, Gradients]) -> Callable[P, Gradients]:
    """Decorator for the backward of an autograd function that communicates: it cannot be differentiated again.

    Autograd would take the received tensors for constants, and second derivatives would silently be wrong. The decorated
    backward raises `ModelError` where autograd would record it.
    """

    @wraps(backward)
    def checked(*given: P.args, **named: P.kwargs) -> Gradients:
        if torch.is_grad_enabled():
            raise ModelError(
                "a gradient through layers that are cut over shards is taken with create_graph=True: they have no second "
                "derivatives",
                cure="give the layers it goes through the style whole (plan.styles), or set plan.shards: 1 and leave "
                "virtual_shards out",
            )
        return backward(*given, **named)

    return checked


class _CopyContext(AutogradContext):
    group: ShardGroup


class _Copy(AutogradFunction):
    @staticmethod
    def forward(ctx: _CopyContext, x: Tensor, group: ShardGroup) -> Tensor:
        ctx.group = group
        ctx.set_materialize_grads(False)
        return x.view_as(x)

    @staticmethod
    @first_derivative_only
    def backward(ctx: _CopyContext, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients
        if gradient is None:
            return None, None
        return ctx.group.all_reduce(
            gradient.clone(memory_format=torch.contiguous_format), "the sum of a value's gradients"
        ), None


class _Sum(AutogradFunction):
    @staticmethod
    def forward(ctx: AutogradContext, x: Tensor, group: ShardGroup, absent: Tensor | None) -> Tensor:
        ctx.save_for_backward(absent)
        ctx.set_materialize_grads(False)
        own = x.clone(memory_format=torch.contiguous_format) if absent is None else x.masked_fill(absent, 0.0)
        return group.all_reduce(own, "the sum of a value")

    @staticmethod
    @first_derivative_only
    def backward(ctx: AutogradContext, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,), (absent,) = gradients, ctx.saved_tensors
        return (gradient if gradient is None or absent is None else gradient.masked_fill(absent, 0.0)), None, None


class _JoinContext(AutogradContext):
    dim: int
    mine: IndexRanges


class _Join(AutogradFunction):
    @staticmethod
    def forward(ctx: _JoinContext, x: Tensor, dim: int, held: Sequence[IndexRanges], group: ShardGroup) -> Tensor:
        ctx.dim, ctx.mine = dim, held[group.shard]
        ctx.set_materialize_grads(False)
        return group.gather_and_concat(x, dim, held, "a value's parts")

    @staticmethod
    @first_derivative_only
    def backward(ctx: _JoinContext, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients
        return (None if gradient is None else aligned_contiguous(select_ranges(gradient, ctx.dim, ctx.mine))), None, None, None


class _ContiguousPart(AutogradFunction):
    """Identity that makes the value, and its gradient, contiguous and aligned."""

    @staticmethod
    def forward(ctx: AutogradContext, x: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        aligned = aligned_contiguous(x)
        return x.view_as(x) if aligned is x else aligned

    @staticmethod
    def backward(ctx: AutogradContext, *gradients: Tensor) -> tuple[Tensor | None]:
        (gradient,) = gradients
        return (None if gradient is None else aligned_contiguous(gradient),)


class _SplitContext(AutogradContext):
    dim: int
    held: Sequence[IndexRanges]
    group: ShardGroup


class _Split(AutogradFunction):
    @staticmethod
    def forward(ctx: _SplitContext, x: Tensor, dim: int, group: ShardGroup, held: Sequence[IndexRanges]) -> Tensor:
        ctx.dim, ctx.held, ctx.group = dim, held, group
        ctx.set_materialize_grads(False)
        return aligned_contiguous(select_ranges(x, dim, ctx.held[group.shard]))

    @staticmethod
    @first_derivative_only
    def backward(ctx: _SplitContext, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients
        if gradient is None:
            return None, None, None, None
        return ctx.group.gather_and_concat(gradient, ctx.dim, ctx.held, "the parts of a value's gradient"), None, None, None


class _ScatterContext(AutogradContext):
    dim: int
    held: Sequence[IndexRanges]
    group: ShardGroup


class _Scatter(AutogradFunction):
    @staticmethod
    def forward(ctx: _ScatterContext, x: Tensor, dim: int, group: ShardGroup) -> Tensor:
        ctx.dim, ctx.held, ctx.group = dim, even_ranges_by_shard(x.shape[dim], group.size), group
        ctx.set_materialize_grads(False)
        return group.reduce_scatter(x, dim, "the sum of a value")

    @staticmethod
    @first_derivative_only
    def backward(ctx: _ScatterContext, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients
        if gradient is None:
            return None, None, None
        return ctx.group.gather_and_concat(gradient, ctx.dim, ctx.held, "the parts of a value's gradient"), None, None


def select_ranges(x: Tensor, dim: int, ranges: IndexRanges) -> Tensor:
    """The indices `ranges` of one dim of a tensor; a view where they are one run."""
    if len(ranges) <= 1:
        start, stop = ranges[0] if ranges else (0, 0)
        return x.narrow(dim, start, stop - start)
    return torch.cat([x.narrow(dim, start, stop - start) for start, stop in ranges], dim)


def copy_to_shards(x: Tensor, group: ShardGroup) -> Tensor:
    """f: the value, which all shards hold whole and each uses for its part; the gradients are summed over the shards."""
    return _Copy.apply(x, group) if x.requires_grad and torch.is_grad_enabled() else x


def reduce_from_shards(x: Tensor, group: ShardGroup, absent: Tensor | None = None) -> Tensor:
    """g: the sum of what the shards have computed, which all of them hold whole and use alike. `absent`: where this shard adds
    nothing, and `x` is anything."""
    return _Sum.apply(x, group, absent)


def reduce_scatter_to_shards(x: Tensor, dim: int, group: ShardGroup) -> Tensor:
    """g of sequence parallelism: this shard's even part, along `dim`, of the sum over the shards."""
    return _Scatter.apply(x, dim, group)


def scatter_to_shards(x: Tensor, dim: int, group: ShardGroup, held: Sequence[IndexRanges] | None = None) -> Tensor:
    """This shard's part, along `dim`, of a value that all shards hold whole; the gradients of the parts are gathered.

    `held`: by shard, its run of indices; None: even parts.
    """
    held = even_ranges_by_shard(x.shape[dim], group.size) if held is None else held
    return _Split.apply(x, dim, group, held)


def as_contiguous_part(x: Tensor) -> Tensor:
    """This shard's part `x`, contiguous and aligned like the result of `scatter_to_shards`; its gradient likewise."""
    return _ContiguousPart.apply(x)


def gather_from_shards(x: Tensor, dim: int, held: Sequence[IndexRanges], group: ShardGroup) -> Tensor:
    """The whole value, of which shard t holds the run `held[t]` along `dim`; all shards use it alike."""
    return _Join.apply(x, dim, held, group)
