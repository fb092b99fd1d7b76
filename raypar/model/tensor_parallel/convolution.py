"""Convolutions cut over shards by channels: by output channels (column), by input channels (row), by whole groups.

A shard computes what a worker would that had its slice alone, with autograd's own backward. What is summed over shards is the
gradient of a column's input, and the output of a row, both contiguous (rule 11 of raypar/NUMERICS.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from raypar.errors import ModelError
from raypar.model.split_linear_backward import cast_for_autocast
from raypar.model.tensor_parallel.autograd_collectives import copy_to_shards, gather_from_shards, reduce_from_shards
from raypar.model.tensor_parallel.local_part_layout import FEATURES, LocalPartLayout
from raypar.model.tensor_parallel.shard_group import ShardedModule, ShardGroup
from raypar.model.tensor_parallel.sharded_value import ShardedValue, take_part
from raypar.plan.shard_ranges import IndexRanges, count_indices, even_ranges_by_shard

_CONVOLVE: dict[type[nn.Module], Any] = {nn.Conv1d: F.conv1d, nn.Conv2d: F.conv2d, nn.Conv3d: F.conv3d}
_TRANSPOSE: dict[type[nn.Module], Any] = {
    nn.ConvTranspose1d: F.conv_transpose1d,
    nn.ConvTranspose2d: F.conv_transpose2d,
    nn.ConvTranspose3d: F.conv_transpose3d,
}
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
"""PyTorch's classes of convolutions."""


def convolution_class(module: object) -> type[nn.Module] | None:
    """PyTorch's class of a convolution that computes what its class computes; None for any other module."""
    kinds = type(module).__mro__
    base = next((kind for kind in kinds if kind in _CONVOLVE or kind in _TRANSPOSE), None)
    if base is None or any("forward" in key for kind in kinds[: kinds.index(base)] for key in vars(kind)):
        return None
    return base


def is_transposed_convolution(module: object) -> bool:
    """Whether its weight is [in, out / groups, ...], not [out, in / groups, ...]."""
    return isinstance(module, CONVOLUTIONS[3:])


class ShardedConvolution(ShardedModule):
    """Base of the convolutions of one shard. `convolution`: the layer, whose parameters are this shard's slices."""

    def __init__(self, convolution: nn.Module, name: str, group: ShardGroup) -> None:
        super().__init__(name, group)
        whole: Any = convolution
        self.in_channels, self.out_channels = int(whole.in_channels), int(whole.out_channels)
        """Of the unsharded layer."""
        self.groups = int(whole.groups)
        """Groups that this shard computes."""
        self.weight: Tensor
        """This shard's slice."""
        self.register_parameter("weight", whole._parameters["weight"])
        self.bias: Tensor | None
        self.register_parameter("bias", whole._parameters["bias"])
        self._transposed = is_transposed_convolution(convolution)
        base = convolution_class(convolution)
        assert base is not None
        self._function = _TRANSPOSE[base] if self._transposed else _CONVOLVE[base]
        self._kernel_size: tuple[int, ...] = whole.kernel_size
        self._stride: tuple[int, ...] = whole.stride
        self._dilation: tuple[int, ...] = whole.dilation
        self._padding: str | tuple[int, ...] = whole.padding
        self._padding_mode: str = whole.padding_mode
        self._output_padding: tuple[int, ...] = whole.output_padding

    def channel_dim(self, x: Tensor | ShardedValue) -> int:
        """The dim of the channels; a value may have no batch dim."""
        return x.dim() - 1 - len(self._kernel_size)

    def product(self, x: Tensor, weight: Tensor, bias: Tensor | None, output_size: Sequence[int] | None = None) -> Tensor:
        """What the layer makes of an input with these parameters, by the calls of its class."""
        made: Tensor
        if self._transposed:
            more = self._output_padding if output_size is None else self._padding_for(x, output_size)
            made = self._function(x, weight, bias, self._stride, self._padding, more, self.groups, self._dilation)
        elif self._padding_mode == "zeros":
            made = self._function(x, weight, bias, self._stride, self._padding, self._dilation, self.groups)
        else:
            x = F.pad(x, self._sides(), mode=self._padding_mode)
            made = self._function(x, weight, bias, self._stride, 0, self._dilation, self.groups)
        return made

    def _sides(self) -> list[int]:
        """The padding as `F.pad` takes it: (before, after) of each dim, the last dim first."""
        sides: list[int] = []
        for dim in reversed(range(len(self._kernel_size))):
            if isinstance(self._padding, tuple):
                sides += [self._padding[dim]] * 2
            else:
                total = self._dilation[dim] * (self._kernel_size[dim] - 1) if self._padding == "same" else 0
                sides += [total // 2, total - total // 2]
        return sides

    def _padding_for(self, x: Tensor | ShardedValue, output_size: Sequence[int]) -> list[int]:
        """The output padding of a transposed convolution that makes its output this large."""
        assert isinstance(self._padding, tuple)
        spatial = len(self._kernel_size)
        least = [
            (n - 1) * stride - 2 * padding + dilation * (kernel - 1) + 1
            for n, stride, padding, dilation, kernel in zip(
                x.shape[-spatial:], self._stride, self._padding, self._dilation, self._kernel_size, strict=True
            )
        ]
        return [size - n for size, n in zip(list(output_size)[-spatial:], least, strict=True)]

    def _taken(self, x: Tensor | ShardedValue, held: IndexRanges, cure: str) -> Tensor:
        """This shard's channels `held` of the input. Raises `ModelError` where it comes with others."""
        dim = self.channel_dim(x)
        if not isinstance(x, ShardedValue):
            return take_part(x, dim, held, self.group)
        x.check_recorded()
        if x.part_layout.dim != dim or x.part_layout.ranges != held:
            raise ModelError(
                f"{self.name} reads the channels {held} on shard {self.group.shard}, its input comes with "
                f"{x.part_layout.ranges} of dim {x.part_layout.dim}",
                cure=cure,
            )
        return x.local


class ColumnConvolution(ShardedConvolution):
    """A convolution of which each shard makes some output channels, `held`, of an input that is whole.

    Backward: the gradient of the input is summed over the shards. `gather_output`: the output is made whole again.
    """

    def __init__(
        self, convolution: nn.Module, name: str, group: ShardGroup, held: IndexRanges, *, gather_output: bool = False
    ) -> None:
        super().__init__(convolution, name, group)
        self.held, self.gather_output = held, gather_output

    def forward(self, x: Tensor | ShardedValue, output_size: Sequence[int] | None = None) -> Tensor | ShardedValue:
        """The output, whole if `gather_output`, else this shard's channels."""
        if isinstance(x, ShardedValue):
            raise ModelError(
                f"{self.name} needs all channels of its input, which is cut along dim {x.part_layout.dim} of {list(x.shape)}",
                cure=f"give {self.name} the style row (a grouped convolution: groups), or the layer before it the style "
                "gathered, spatial-gathered or whole",
            )
        operands = cast_for_autocast(x, self.weight, self.bias)
        made = self.product(copy_to_shards(_tensor(operands[0]), self.group), _tensor(operands[1]), operands[2], output_size)
        dim = self.channel_dim(made)
        if self.gather_output:
            return gather_from_shards(made, dim, even_ranges_by_shard(self.out_channels, self.group.size), self.group)
        return ShardedValue(made, LocalPartLayout(dim, self.out_channels, self.held, FEATURES), self.group)


class RowConvolution(ShardedConvolution):
    """A convolution to which each shard contributes what some input channels, `held`, give; the bias is whole.

    Forward: the contributions are summed over the shards, then the bias is added.
    """

    def __init__(self, convolution: nn.Module, name: str, group: ShardGroup, held: IndexRanges) -> None:
        super().__init__(convolution, name, group)
        self.held = held

    def forward(self, x: Tensor | ShardedValue, output_size: Sequence[int] | None = None) -> Tensor:
        """The whole output. Raises `ModelError` where x is cut otherwise than the weight."""
        local = self._taken(x, self.held, "styles of layers that follow each other cut alike: column, row; column:8, row:8")
        operands = cast_for_autocast(local, self.weight, self.bias)
        made = self.product(_tensor(operands[0]), _tensor(operands[1]), None, output_size)
        total = reduce_from_shards(made, self.group)
        bias = operands[2]
        return total if bias is None else total.add_(bias.view(-1, *[1] * len(self._kernel_size)))


class GroupsConvolution(ShardedConvolution):
    """A grouped (depthwise) convolution of which each shard computes whole groups, `held`, without communication.

    Its input is cut by the same groups, or whole; then each shard reads its channels, and the gradient is summed.
    """

    def __init__(self, convolution: nn.Module, name: str, group: ShardGroup, held: IndexRanges) -> None:
        super().__init__(convolution, name, group)
        each_in, each_out = self.in_channels // self.groups, self.out_channels // self.groups
        self._whole_groups, self.groups = self.groups, count_indices(held)
        self.read, self.held = (tuple((a * n, b * n) for a, b in held) for n in (each_in, each_out))
        """The input channels that this shard reads, and the output channels that it makes."""

    def forward(self, x: Tensor | ShardedValue, output_size: Sequence[int] | None = None) -> ShardedValue:
        """This shard's channels of the output. Raises `ModelError` for a channel cut across groups."""
        local = self._taken(
            x,
            self.read,
            f"a channel cut across groups: cut the layer before it by the groups, too (column:{self._whole_groups}), or give "
            "both the style whole",
        )
        operands = cast_for_autocast(local, self.weight, self.bias)
        made = self.product(_tensor(operands[0]), _tensor(operands[1]), operands[2], output_size)
        part = LocalPartLayout(self.channel_dim(made), self.out_channels, self.held, FEATURES)
        return ShardedValue(made, part, self.group)


def _tensor(x: Tensor | None) -> Tensor:
    assert x is not None
    return x
