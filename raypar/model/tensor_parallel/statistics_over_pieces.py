"""Norms whose statistics are of values in several pieces: rows of images, or samples, on several shards.

What `nn.SyncBatchNorm` means. By channel each piece has its number of elements n_t, its mean m_t and its (biased) variance v_t,
each a sum of float64 numbers divided by n_t. All pieces tell each other these three, and each makes the statistics of the whole
by sums over the tree of pieces (`plan/addition_tree.py`), in float64: n = sum n_t, m = sum (n_t m_t) / n, v = sum n_t (v_t +
(m_t - m)^2) / n. They are rounded once, to the dtype in which PyTorch normalises. Backward, the sums over elements of the
gradient g and of g (x - m), each piece's in float64, are added over the tree too.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from raypar.model.autograd_function_types import AutogradContext, AutogradFunction
from raypar.model.tensor_parallel.autograd_collectives import first_derivative_only
from raypar.model.tensor_parallel.shard_group import ShardGroup
from raypar.plan.addition_tree import TreeNode, fold_tree

STATISTICS = "the statistics of a norm's pieces"
"""What is waited for, in messages."""


class StatisticsOfPieces(NamedTuple):
    """Statistics by channel [C] over all pieces, float64."""

    mean: Tensor
    variance: Tensor
    """Biased."""
    elements: Tensor
    """How many each channel has, one number."""

    @property
    def unbiased_variance(self) -> Tensor:
        """The variance as running averages take it."""
        return self.variance * (self.elements / (self.elements - 1))


def statistics_over_pieces(x: Tensor, group: ShardGroup) -> StatisticsOfPieces:
    """The statistics of a value [N, C, ...] of which each shard of the group has a piece, maybe an empty one."""
    channels, wide = x.shape[1], x.detach().double()
    mine = wide.new_zeros(2 * channels + 1)
    if x.numel():
        own, dims = x.numel() // channels, _reduced(x)
        center = wide.sum(dims) / own  # `torch.var_mean` takes ten times as long
        away = wide - center.view([1, -1, *[1] * (x.dim() - 2)])
        torch.cat([center, away.square_().sum(dims) / own, wide.new_full((1,), own)], out=mine)
    pieces = wide.new_empty((group.size, len(mine)))
    pieces[group.shard] = mine
    group.all_gather_in_place(pieces, STATISTICS)
    means, variances, counts = pieces.split([channels, channels, 1], 1)
    count = _sum_of_pieces(counts)
    mean = _sum_of_pieces(counts * means) / count
    variance = _sum_of_pieces(counts * (variances + (means - mean).square())) / count
    return StatisticsOfPieces(mean, variance, count)


def _sum_of_pieces(pieces: Tensor) -> Tensor:
    """The sum of [pieces, ...] over the tree."""
    leaves: dict[TreeNode, Tensor | None] = {(t, t + 1): piece for t, piece in enumerate(pieces)}
    total = fold_tree(leaves, (0, len(pieces)), Tensor.add)
    assert total is not None
    return total


def _reduced(x: Tensor) -> list[int]:
    """All dims but that of the channels."""
    return [0, *range(2, x.dim())]


class _Context(AutogradContext):
    group: ShardGroup
    dtype: torch.dtype


class _Normalise(AutogradFunction):
    @staticmethod
    def forward(
        ctx: _Context,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        statistics: StatisticsOfPieces,
        eps: float,
        group: ShardGroup,
    ) -> Tensor:
        dtype = torch.promote_types(x.dtype, torch.float32)
        mean, variance = statistics.mean.to(dtype), statistics.variance.to(dtype)
        ctx.group, ctx.dtype = group, dtype
        ctx.save_for_backward(x, weight, mean, (variance.double() + eps).rsqrt(), statistics.elements)
        return F.batch_norm(x, mean, variance, weight, bias, False, 0.0, eps)

    @staticmethod
    @first_derivative_only
    def backward(ctx: _Context, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,), (x, weight, mean, inverse, count) = gradients, ctx.saved_tensors
        shape = [1, -1, *[1] * (x.dim() - 2)]
        wide = gradient.to(ctx.dtype)
        away = x.to(ctx.dtype) - mean.view(shape)
        sums = torch.stack([each.sum(_reduced(x), dtype=torch.float64) for each in (wide, wide * away)])
        of_weight = sums[1] * inverse if ctx.needs_input_grad[1] else None
        of_bias = sums[0].clone() if ctx.needs_input_grad[2] else None
        of_input = None
        if ctx.needs_input_grad[0]:
            total = ctx.group.all_reduce(sums, "the sums of a norm's gradient") / count
            constant, slope = total[0].to(ctx.dtype), (total[1] * inverse.square()).to(ctx.dtype)
            scale = (inverse if weight is None else inverse * weight.double()).to(ctx.dtype)
            of_input = wide - constant.view(shape) - away.mul_(slope.view(shape))
            of_input = of_input.mul_(scale.view(shape)).to(x.dtype)
        dtype = ctx.dtype if weight is None else weight.dtype
        found = [None if each is None else each.to(dtype) for each in (of_weight, of_bias)]
        return of_input, *found, None, None, None


def normalise_over_pieces(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, group: ShardGroup
) -> tuple[Tensor, StatisticsOfPieces]:
    """(this piece of a value [N, C, ...], normalised by the statistics of all pieces; the statistics).

    What a backward pass adds to the gradients of weight and bias is this piece's part of a sum over the pieces.
    """
    found = statistics_over_pieces(x, group)
    return _Normalise.apply(x, weight, bias, found, eps, group), found


@torch.no_grad()
def update_running_statistics(running_mean: Tensor, running_var: Tensor, found: StatisticsOfPieces, momentum: float) -> None:
    """Move running averages towards the statistics of all pieces, alike on every shard."""
    for average, new in ((running_mean, found.mean), (running_var, found.unbiased_variance)):
        average.mul_(1 - momentum).add_(new.to(average.dtype), alpha=momentum)
