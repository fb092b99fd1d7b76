"""Convolutions cut over shards along a spatial dim: each shard makes its rows of the output, with the whole weight.

Rows are those of `plan/spatial_shards.py`. Forward, a shard gets the rows of the input that its rows of the output read.
Backward, it gets the rows of the output's gradient that its rows of the input are read by, and makes its rows of the input's
gradient of them alone: nothing is added over shards. The gradients of weight and bias are sums over shards, once a step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn

from raypar.errors import ModelError
from raypar.model.autocast_casts import cast_for_autocast
from raypar.model.autograd_function_types import AutogradContext, AutogradFunction
from raypar.model.convolution_call import ConvolutionCall
from raypar.model.split_backward import Stash, deferred_gradients_of, put_off
from raypar.model.tensor_parallel.autograd_collectives import first_derivative_only, gather_from_shards, scatter_to_shards
from raypar.model.tensor_parallel.convolution import ShardedConvolution
from raypar.model.tensor_parallel.halo_exchange import fetch_rows, fit_rows, post_rows
from raypar.model.tensor_parallel.local_part_layout import SPATIAL, LocalPartLayout
from raypar.model.tensor_parallel.shard_group import ShardGroup
from raypar.model.tensor_parallel.sharded_value import ShardedValue, take_part
from raypar.model.tensor_parallel.spatial_functions import pad_rows
from raypar.plan.shard_ranges import even_ranges_by_shard
from raypar.plan.spatial_shards import RowPlan, Window, check_row_plan, plan_linear, plan_transposed

AXES = {1: ("length",), 2: ("height", "width"), 3: ("depth", "height", "width")}
"""Number of spatial dims -> what they are called."""


def halo_formula(channels: str, dims: int, axis: int) -> str:
    """How many numbers h rows have: `h B C_in W` of images that are cut along their height."""
    return " ".join(["h B", channels, *(name[0].upper() for place, name in enumerate(AXES[dims]) if place != axis)])


_HALO, _GRADIENTS = "the rows of a convolution's input", "the rows of a convolution's output gradient"


@dataclass(frozen=True)
class ConvolutionByRows:
    """One call of a convolution, whose rows are dim `dim` of values [batch, channels, ...]."""

    plan: RowPlan
    """What the shards exchange."""
    window: Window
    """What an output row reads; of a transposed convolution the window of its mirror."""
    dim: int
    rows: int
    """Rows of the whole input."""
    call: ConvolutionCall
    """The layer's call with rows that need no padding: none of the cut dim, neither before nor after."""


class _Context(AutogradContext):
    by_rows: ConvolutionByRows
    layer: SpatialConvolution
    stash: Stash | None


class _Convolve(AutogradFunction):
    @staticmethod
    def forward(
        ctx: _Context,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        by_rows: ConvolutionByRows,
        layer: SpatialConvolution,
        stash: Stash | None,
    ) -> Tensor:
        first, last = by_rows.window.reads(*by_rows.plan.outputs[layer.group.shard])
        above, below = max(0, -first), max(0, last - by_rows.rows)
        wide = fetch_rows(x, by_rows.dim, by_rows.plan.forward, layer.group, _HALO, before=above, after=below)
        ctx.by_rows, ctx.layer, ctx.stash = by_rows, layer, stash
        ctx.save_for_backward(wide, weight)
        return by_rows.call.convolve(wide, weight, bias)

    @staticmethod
    @first_derivative_only
    def backward(ctx: _Context, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        by_rows, group, (wide, weight) = ctx.by_rows, ctx.layer.group, ctx.saved_tensors
        gradient = gradients[0].contiguous()
        operands = gradient, wide
        needs_input, *others = ctx.needs_input_grad[:3]
        fetch = post_rows(gradient, by_rows.dim, by_rows.plan.backward, group, _GRADIENTS) if needs_input else None
        of_weight = of_bias = None
        later = put_off(ctx, ctx.stash, deferred_gradients_of(ctx.layer, by_rows.call, operands, has_bias=others[1]))
        if any(others) and not later:  # while the rows travel
            _, of_weight, of_bias = by_rows.call.gradients(operands, weight, (False, others[0], others[1]))
        of_input = None if fetch is None else _input_gradient(by_rows, group.shard, fetch(), wide.shape, weight)
        return of_input, of_weight, of_bias, None, None, None


def _input_gradient(
    by_rows: ConvolutionByRows, shard: int, gradient: Tensor, input_shape: Sequence[int], weight: Tensor
) -> Tensor:
    """The gradient of this shard's rows of the input, from all rows of the output's gradient that they are read by."""
    start, stop = by_rows.plan.forward.held[shard]
    needed, shape = by_rows.plan.backward.needed[shard], list(input_shape)
    if not needed:  # rows that nothing reads
        shape[by_rows.dim] = stop - start
        return gradient.new_zeros(shape)
    first, last = by_rows.window.reads(*needed[0])
    shape[by_rows.dim] = max(last, stop) - first  # rows behind the last window are fewer than a stride
    like = gradient.new_empty(1).expand(shape)
    found, _, _ = by_rows.call.gradients((gradient, like), weight, (True, False, False))
    assert found is not None
    return fit_rows(found, by_rows.dim, first, start, stop)


class _ConvolveTransposed(AutogradFunction):
    """A shard's rows of the input read a run of the output's gradient: so it makes their gradient, and their part of the
    weight's, in one call, if the second is not put off."""

    @staticmethod
    def forward(
        ctx: _Context,
        x: Tensor,
        weight: Tensor,
        by_rows: ConvolutionByRows,
        layer: SpatialConvolution,
        stash: Stash | None,
    ) -> Tensor:
        start, stop = by_rows.plan.outputs[layer.group.shard]
        ctx.by_rows, ctx.layer, ctx.stash = by_rows, layer, stash
        ctx.save_for_backward(x, weight)
        needed = by_rows.plan.forward.needed[layer.group.shard]
        wide = fetch_rows(x, by_rows.dim, by_rows.plan.forward, layer.group, _HALO)
        if not needed:  # rows that no row of the input reaches
            wide, needed = x.new_zeros([*x.shape[: by_rows.dim], 1, *x.shape[by_rows.dim + 1 :]]), ((0, 1),)
        made = by_rows.call.convolve(wide, weight, None)
        return fit_rows(made, by_rows.dim, by_rows.window.reads(*needed[0])[0], start, stop)

    @staticmethod
    @first_derivative_only
    def backward(ctx: _Context, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        by_rows, group, (x, weight) = ctx.by_rows, ctx.layer.group, ctx.saved_tensors
        gradient = gradients[0].contiguous()
        first, last = by_rows.window.reads(*by_rows.plan.forward.held[group.shard])
        above, below = max(0, -first), max(0, last - by_rows.plan.backward.rows)
        wide = fetch_rows(gradient, by_rows.dim, by_rows.plan.backward, group, _GRADIENTS, before=above, after=below)
        of_x, of_weight = ctx.needs_input_grad[:2]
        if put_off(ctx, ctx.stash, deferred_gradients_of(ctx.layer, by_rows.call, (wide, x), has_bias=False)):
            of_weight = False
        dx, dw, _ = by_rows.call.gradients((wide, x), weight, (of_x, of_weight, False))
        return dx, dw, None, None, None


class SpatialConvolution(ShardedConvolution):
    """A convolution of which each shard makes some rows of the output, of an input that is whole or cut alike.

    `axis`: which spatial dim is cut, the first one being 0. `gather_output`: the output is made whole again.
    """

    def __init__(self, convolution: nn.Module, name: str, group: ShardGroup, axis: int, *, gather_output: bool = False) -> None:
        super().__init__(convolution, name, group)
        self.axis, self.gather_output = axis, gather_output
        self._last_numbers: dict[tuple[str, str], int] = {}

    def forward(self, x: Tensor | ShardedValue, output_size: Sequence[int] | None = None) -> Tensor | ShardedValue:
        """This shard's rows of the output, or all of it if `gather_output`. Raises `ModelError` where they cannot be made of
        the rows that shards have."""
        unbatched = x.dim() == self.geometry.dims + 1
        if unbatched:
            x = x.unsqueeze(0)
        x = self._pad(self._cut(x))
        by_rows, stash = self._call(x, output_size), self.current_stash()
        weight, bias = (
            None if whole is None else take_part(whole, 0, ((0, whole.shape[0]),), self.group)
            for whole in (self.weight, self.bias)
        )
        given, weight, bias = cast_for_autocast(x.local.contiguous(), weight, bias)
        if self.geometry.transposed:
            made = _ConvolveTransposed.apply(given, weight, by_rows, self, stash)
            made = made if bias is None else made + bias.view(-1, *[1] * self.geometry.dims)
        else:
            made = _Convolve.apply(given, weight, bias, by_rows, self, stash)
        self._note_numbers(by_rows.plan, x, made)
        size = by_rows.plan.backward.rows
        held = even_ranges_by_shard(size, self.group.size)
        if self.gather_output:
            whole = gather_from_shards(made, by_rows.dim, held, self.group)
            return whole.squeeze(0) if unbatched else whole
        part = LocalPartLayout(by_rows.dim, size, held[self.group.shard], SPATIAL)
        found = ShardedValue(made, part, self.group)
        return found.squeeze(0) if unbatched else found

    def numbers_of_last_call(self) -> Mapping[tuple[str, str], int]:
        """See `ShardedModule`: the rows that all shards send each other."""
        return self._last_numbers

    def _note_numbers(self, plan: RowPlan, x: ShardedValue, made: Tensor) -> None:
        """Note how many numbers the shards exchange for a call: rows of `x`, and of the gradient of `made` if `x` has one, or a
        transposed convolution makes the gradient of its weight of them."""
        dims, dim, shards = self.geometry.dims, 2 + self.axis, range(self.group.size)
        forward, backward = (sum(map(exchange.rows_sent_by, shards)) for exchange in (plan.forward, plan.backward))
        backward *= self.geometry.transposed or x.local.requires_grad
        self._last_numbers = {
            ("forward", halo_formula("C_in", dims, self.axis)): forward * x.local.numel() // x.local.shape[dim],
            ("backward", halo_formula("C_out", dims, self.axis)): backward * made.numel() // made.shape[dim],
        }

    def _cut(self, x: Tensor | ShardedValue) -> ShardedValue:
        """The input as this shard's rows. Raises `ModelError` where it is cut otherwise."""
        dim = 2 + self.axis
        rows = x.shape[dim]
        held = even_ranges_by_shard(rows, self.group.size)
        if not isinstance(x, ShardedValue):
            mine = scatter_to_shards(x, dim, self.group, held)
            return ShardedValue(mine, LocalPartLayout(dim, rows, held[self.group.shard], SPATIAL), self.group)
        x.check_recorded()
        part = x.part_layout
        if part.dim != dim or part.axis != SPATIAL or part.ranges != held[self.group.shard]:
            raise ModelError(
                f"{self.name} is cut along dim {dim} of {list(x.shape)}, its input comes cut along dim {part.dim} "
                f"({part.axis}, {list(part.ranges)} on shard {self.group.shard})",
                cure="cut layers that follow each other along the same dim (spatial, spatial:width), or give the layer before "
                "them the style spatial-gathered or gathered",
            )
        return x

    def _pad(self, x: ShardedValue) -> ShardedValue:
        """The input with the padding around it that PyTorch's convolutions do not make themselves: other modes than zeros, and
        unequal sides of other dims than the cut one."""
        geometry = self.geometry
        if geometry.transposed:
            return x
        sides, at, mode = geometry.sides(), 2 * (geometry.dims - 1 - self.axis), geometry.padding_mode
        others = [*sides[:at], 0, 0, *sides[at + 2 :]]
        if mode != "zeros":
            x = pad_rows(x, sides[at], sides[at + 1], mode, f"{self.name} (padding_mode {mode})")
            return x.like(F.pad(x.local, others, mode=mode)) if any(others) else x
        return x if others[::2] == others[1::2] else x.like(F.pad(x.local, others))

    def _padding_left(self) -> tuple[int, ...]:
        """The padding of each dim that is left to PyTorch: none of the cut one, and none of what `_pad` has made."""
        sides = self.geometry.sides()
        before, after = sides[::2][::-1], sides[1::2][::-1]
        before[self.axis] = after[self.axis] = 0
        made = not self.geometry.transposed and (self.geometry.padding_mode != "zeros" or before != after)
        return (0,) * len(before) if made else tuple(before)

    def _call(self, x: ShardedValue, output_size: Sequence[int] | None) -> ConvolutionByRows:
        """Raises `ModelError` where the halo is larger than a part."""
        geometry, axis, shards, rows = self.geometry, self.axis, self.group.size, x.part_layout.size
        sides, spatial = geometry.sides(), geometry.dims
        before, after = sides[2 * (spatial - 1 - axis) : 2 * (spatial - axis)]
        if not geometry.transposed and geometry.padding_mode != "zeros":
            before = after = 0
        window = Window(geometry.kernel_size[axis], geometry.stride[axis], geometry.dilation[axis], before, after)
        more = [0] * spatial
        if geometry.transposed:
            more = list(geometry.output_padding if output_size is None else geometry.output_padding_for(x.shape, output_size))
            outputs = (rows - 1) * window.stride - before - after + window.extent + more[axis]
            more[axis] = 0
        else:
            outputs = window.outputs(rows)
        plan_for = plan_transposed if geometry.transposed else plan_linear
        return ConvolutionByRows(
            plan=check_row_plan(self.name, lambda n: plan_for(window, rows, outputs, n), rows, outputs, shards),
            window=window,
            dim=2 + axis,
            rows=rows,
            call=ConvolutionCall(
                stride=geometry.stride,
                padding=self._padding_left(),
                dilation=geometry.dilation,
                transposed=geometry.transposed,
                output_padding=tuple(more),
                groups=geometry.groups,
                has_bias=self.bias is not None and not geometry.transposed,  # else it is added to the rows
            ),
        )
