"""The style `row`: a linear layer cut by input features (Shoeybi et al. 2019, arXiv:1909.08053, section 3)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from raypar.model.tensor_parallel.group import ShardGroup
from raypar.model.tensor_parallel.linear import RowLinear
from raypar.model.tensor_parallel.styles.style import (
    ROW_COLLECTIVES,
    LinearStyle,
    cut_linear_by_input,
    indices_on_shard,
    share_evenly,
)
from raypar.model.transposed_linear import linear_features
from raypar.plan.shard_ranges import TensorCut
from raypar.plan.tensor_parallel_layout import LayerCollectives, TensorParallelLayout


@dataclass(frozen=True, slots=True)
class RowStyle(LinearStyle):
    """Each shard reads its part of the input features; what the shards make of them is summed, then the whole bias added."""

    name: ClassVar[str] = "row"
    summary: ClassVar[str] = "Linear: cut by input features; the shards' contributions are summed"

    def slices(self, name: str, module: nn.Module, shards: int) -> Mapping[str, TensorCut]:
        """See `ShardingStyle`."""
        return cut_linear_by_input(module, share_evenly(name, "input features", linear_features(module)[0], shards))

    def build(self, name: str, module: nn.Module, layout: TensorParallelLayout, group: ShardGroup) -> nn.Module:
        """See `ShardingStyle`."""
        return RowLinear(module, name, group, indices_on_shard(name, layout, group))

    def collectives(self, module: nn.Module) -> LayerCollectives:
        """See `ShardingStyle`."""
        return ROW_COLLECTIVES
