"""Convolutions cut over shards by channels: by output channels (column), by input channels (row), by whole groups.

A shard computes what a worker would that had its slice alone, with autograd's own backward or the two halves of it. What is
summed over shards is the gradient of a column's input, and the output of a row, both contiguous (rule 11 of
raypar/NUMERICS.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from raypar.errors import ModelError
from raypar.model.autocast_casts import cast_for_autocast
from raypar.model.convolution_call import ConvolutionGeometry
from raypar.model.split_backward import split_convolution
from raypar.model.tensor_parallel.autograd_collectives import copy_to_shards, gather_from_shards, reduce_from_shards
from raypar.model.tensor_parallel.local_part_layout import FEATURES, LocalPartLayout
from raypar.model.tensor_parallel.shard_group import ShardGroup
from raypar.model.tensor_parallel.sharded_value import ShardedValue, take_part
from raypar.model.tensor_parallel.split_shards_backward import SplitShard
from raypar.plan.shard_ranges import IndexRanges, count_indices, even_ranges_by_shard


class ShardedConvolution(SplitShard):
    """Base of the convolutions of one shard. `convolution`: the layer, whose parameters are this shard's slices."""

    def __init__(self, convolution: nn.Module, name: str, group: ShardGroup) -> None:
        super().__init__(convolution, name, group)
        whole: Any = convolution
        self.in_channels, self.out_channels = int(whole.in_channels), int(whole.out_channels)
        """Of the unsharded layer."""
        self.geometry = ConvolutionGeometry.of(convolution)
        """Its groups are those that this shard computes."""

    def channel_dim(self, x: Tensor | ShardedValue) -> int:
        """The dim of the channels; a value may have no batch dim."""
        return x.dim() - 1 - self.geometry.dims

    def product(self, x: Tensor, weight: Tensor, bias: Tensor | None, output_size: Sequence[int] | None = None) -> Tensor:
        """What the layer makes of an input that is padded and cast, and of these parameters, by the calls of its class."""
        more = None if output_size is None else self.geometry.output_padding_for(x.shape, output_size)
        call = self.geometry.call(more, has_bias=bias is not None)
        return split_convolution(self.geometry, call, (x, weight, bias), self, self.current_stash())

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
        is_padded = self.geometry.padding_mode != "zeros"
        if is_padded:  # PyTorch pads before autocast's cast: what is summed over shards is the gradient of what is padded
            x = self.geometry.pad(copy_to_shards(x, self.group))
        operands = cast_for_autocast(x, self.weight, self.bias)
        given = _tensor(operands[0]) if is_padded else copy_to_shards(_tensor(operands[0]), self.group)
        made = self.product(given, _tensor(operands[1]), operands[2], output_size)
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
        operands = cast_for_autocast(self.geometry.pad(local), self.weight, self.bias)
        made = self.product(_tensor(operands[0]), _tensor(operands[1]), None, output_size)
        total = reduce_from_shards(made, self.group)
        bias = operands[2]
        return total if bias is None else total.add_(bias.view(-1, *[1] * self.geometry.dims))


class GroupsConvolution(ShardedConvolution):
    """A grouped (depthwise) convolution of which each shard computes whole groups, `held`, without communication.

    Its input is cut by the same groups, or whole; then each shard reads its channels, and the gradient is summed.
    """

    def __init__(self, convolution: nn.Module, name: str, group: ShardGroup, held: IndexRanges) -> None:
        super().__init__(convolution, name, group)
        self._whole_groups = self.geometry.groups
        each_in, each_out = self.in_channels // self._whole_groups, self.out_channels // self._whole_groups
        self.geometry = replace(self.geometry, groups=count_indices(held))
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
        operands = cast_for_autocast(self.geometry.pad(local), self.weight, self.bias)
        made = self.product(_tensor(operands[0]), _tensor(operands[1]), operands[2], output_size)
        part = LocalPartLayout(self.channel_dim(made), self.out_channels, self.held, FEATURES)
        return ShardedValue(made, part, self.group)


def _tensor(x: Tensor | None) -> Tensor:
    assert x is not None
    return x
