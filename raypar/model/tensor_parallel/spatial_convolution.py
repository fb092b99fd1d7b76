"""Convolutions cut over shards along a spatial dim: each shard makes its rows of the output, with the whole weight.

Rows are those of `plan/spatial_shards.py`. Forward, a shard gets the rows of the input that its rows of the output read.
Backward, it gets the rows of the output's gradient that its rows of the input are read by, and makes its rows of the input's
gradient of them alone: nothing is added over shards. The gradients of weight and bias are sums over shards, once a step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from raypar.errors import ModelError
from raypar.model.autograd_context_type import AutogradContext
from raypar.model.split_linear_backward import cast_for_autocast
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
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    """0 in the cut dim, where rows of zeros are put in."""
    dilation: tuple[int, ...]
    output_padding: tuple[int, ...]
    """0 in the cut dim."""
    groups: int

    def convolve(self, x: Tensor, weight: Tensor, bias: Tensor | None, *, transposed: bool) -> Tensor:
        """The layer's product with rows that need no padding."""
        return torch.convolution(
            x, weight, bias, self.stride, self.padding, self.dilation, transposed, self.output_padding, self.groups
        )

    def gradients(
        self, gradient: Tensor, x: Tensor, weight: Tensor, mask: tuple[bool, bool, bool], *, transposed: bool
    ) -> tuple[Tensor | None, ...]:
        """Gradients of (input, weight, bias) of `convolve`, those that `mask` asks for."""
        found = torch.ops.aten.convolution_backward(
            gradient,
            x,
            weight,
            [gradient.shape[1]] if mask[2] else None,
            self.stride,
            self.padding,
            self.dilation,
            transposed,
            self.output_padding,
            self.groups,
            mask,
        )
        return cast("tuple[Tensor | None, ...]", tuple(found))


class _Context(AutogradContext):
    call: ConvolutionByRows
    group: ShardGroup


class _Convolve(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: _Context, x: Tensor, weight: Tensor, bias: Tensor | None, call: ConvolutionByRows, group: ShardGroup
    ) -> Tensor:
        first, last = call.window.reads(*call.plan.outputs[group.shard])
        above, below = max(0, -first), max(0, last - call.rows)
        wide = fetch_rows(x, call.dim, call.plan.forward, group, _HALO, before=above, after=below)
        ctx.call, ctx.group = call, group
        ctx.save_for_backward(wide, weight)
        return call.convolve(wide, weight, bias, transposed=False)

    @staticmethod
    @first_derivative_only
    def backward(ctx: _Context, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        call, group, (wide, weight) = ctx.call, ctx.group, ctx.saved_tensors
        gradient = gradients[0].contiguous()
        needs_input, *others = ctx.needs_input_grad[:3]
        fetch = post_rows(gradient, call.dim, call.plan.backward, group, _GRADIENTS) if needs_input else None
        of_weight = of_bias = None
        if any(others):  # while the rows travel
            mask = (False, others[0], others[1])
            _, of_weight, of_bias = call.gradients(gradient, wide, weight, mask, transposed=False)
        of_input = None if fetch is None else _input_gradient(call, group.shard, fetch(), wide.shape, weight)
        return of_input, of_weight, of_bias, None, None


def _input_gradient(
    call: ConvolutionByRows, shard: int, gradient: Tensor, input_shape: Sequence[int], weight: Tensor
) -> Tensor:
    """The gradient of this shard's rows of the input, from all rows of the output's gradient that they are read by."""
    start, stop = call.plan.forward.held[shard]
    needed, shape = call.plan.backward.needed[shard], list(input_shape)
    if not needed:  # rows that nothing reads
        shape[call.dim] = stop - start
        return gradient.new_zeros(shape)
    first, last = call.window.reads(*needed[0])
    shape[call.dim] = max(last, stop) - first  # rows behind the last window are fewer than a stride
    like = gradient.new_empty(1).expand(shape)
    found, _, _ = call.gradients(gradient, like, weight, (True, False, False), transposed=False)
    assert found is not None
    return fit_rows(found, call.dim, first, start, stop)


class _ConvolveTransposed(torch.autograd.Function):
    """A shard's rows of the input read a run of the output's gradient: so it makes their gradient, and their part of the
    weight's, in one call."""

    @staticmethod
    def forward(ctx: _Context, x: Tensor, weight: Tensor, call: ConvolutionByRows, group: ShardGroup) -> Tensor:
        start, stop = call.plan.outputs[group.shard]
        ctx.call, ctx.group = call, group
        ctx.save_for_backward(x, weight)
        needed = call.plan.forward.needed[group.shard]
        wide = fetch_rows(x, call.dim, call.plan.forward, group, _HALO)
        if not needed:  # rows that no row of the input reaches
            wide, needed = x.new_zeros([*x.shape[: call.dim], 1, *x.shape[call.dim + 1 :]]), ((0, 1),)
        made = call.convolve(wide, weight, None, transposed=True)
        return fit_rows(made, call.dim, call.window.reads(*needed[0])[0], start, stop)

    @staticmethod
    @first_derivative_only
    def backward(ctx: _Context, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        call, group, (x, weight) = ctx.call, ctx.group, ctx.saved_tensors
        gradient = gradients[0].contiguous()
        first, last = call.window.reads(*call.plan.forward.held[group.shard])
        above, below = max(0, -first), max(0, last - call.plan.backward.rows)
        wide = fetch_rows(gradient, call.dim, call.plan.backward, group, _GRADIENTS, before=above, after=below)
        mask = (ctx.needs_input_grad[0], ctx.needs_input_grad[1], False)
        of_input, of_weight, _ = call.gradients(wide, x, weight, mask, transposed=True)
        return of_input, of_weight, None, None


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
        unbatched = x.dim() == len(self._kernel_size) + 1
        if unbatched:
            x = x.unsqueeze(0)
        x = self._pad(self._cut(x))
        call = self._call(x, output_size)
        weight, bias = (
            None if whole is None else take_part(whole, 0, ((0, whole.shape[0]),), self.group)
            for whole in (self.weight, self.bias)
        )
        given, weight, bias = cast_for_autocast(x.local.contiguous(), weight, bias)
        if self._transposed:
            made = _ConvolveTransposed.apply(given, weight, call, self.group)  # type: ignore[no-untyped-call]
            made = made if bias is None else made + bias.view(-1, *[1] * len(self._kernel_size))
        else:
            made = _Convolve.apply(given, weight, bias, call, self.group)  # type: ignore[no-untyped-call]
        self._note_numbers(call.plan, x, made)
        size = call.plan.backward.rows
        held = even_ranges_by_shard(size, self.group.size)
        if self.gather_output:
            whole = gather_from_shards(made, call.dim, held, self.group)
            return whole.squeeze(0) if unbatched else whole
        part = LocalPartLayout(call.dim, size, held[self.group.shard], SPATIAL)
        found = ShardedValue(made, part, self.group)
        return found.squeeze(0) if unbatched else found

    def numbers_of_last_call(self) -> Mapping[tuple[str, str], int]:
        """See `ShardedModule`: the rows that all shards send each other."""
        return self._last_numbers

    def _note_numbers(self, plan: RowPlan, x: ShardedValue, made: Tensor) -> None:
        """Note how many numbers the shards exchange for a call: rows of `x`, and of the gradient of `made` if `x` has one, or a
        transposed convolution makes the gradient of its weight of them."""
        dims, dim, shards = len(self._kernel_size), 2 + self.axis, range(self.group.size)
        forward, backward = (sum(map(exchange.rows_sent_by, shards)) for exchange in (plan.forward, plan.backward))
        backward *= self._transposed or x.local.requires_grad
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
        if self._transposed:
            return x
        sides, at = self._sides(), 2 * (len(self._kernel_size) - 1 - self.axis)
        others = [*sides[:at], 0, 0, *sides[at + 2 :]]
        if self._padding_mode != "zeros":
            x = pad_rows(x, sides[at], sides[at + 1], self._padding_mode, f"{self.name} (padding_mode {self._padding_mode})")
            return x.like(F.pad(x.local, others, mode=self._padding_mode)) if any(others) else x
        return x if others[::2] == others[1::2] else x.like(F.pad(x.local, others))

    def _padding_left(self) -> tuple[int, ...]:
        """The padding of each dim that is left to PyTorch: none of the cut one, and none of what `_pad` has made."""
        sides = self._sides()
        before, after = sides[::2][::-1], sides[1::2][::-1]
        before[self.axis] = after[self.axis] = 0
        made = not self._transposed and (self._padding_mode != "zeros" or before != after)
        return (0,) * len(before) if made else tuple(before)

    def _call(self, x: ShardedValue, output_size: Sequence[int] | None) -> ConvolutionByRows:
        """Raises `ModelError` where the halo is larger than a part."""
        axis, shards, rows = self.axis, self.group.size, x.part_layout.size
        sides, spatial = self._sides(), len(self._kernel_size)
        before, after = sides[2 * (spatial - 1 - axis) : 2 * (spatial - axis)]
        if not self._transposed and self._padding_mode != "zeros":
            before = after = 0
        window = Window(self._kernel_size[axis], self._stride[axis], self._dilation[axis], before, after)
        more = [0] * spatial
        if self._transposed:
            more = list(self._output_padding if output_size is None else self._padding_for(x, output_size))
            outputs = (rows - 1) * window.stride - before - after + window.extent + more[axis]
            more[axis] = 0
        else:
            outputs = window.outputs(rows)
        plan_for = plan_transposed if self._transposed else plan_linear
        return ConvolutionByRows(
            plan=check_row_plan(self.name, lambda n: plan_for(window, rows, outputs, n), rows, outputs, shards),
            window=window,
            dim=2 + axis,
            rows=rows,
            stride=self._stride,
            padding=self._padding_left(),
            dilation=self._dilation,
            output_padding=tuple(more),
            groups=self.groups,
        )
