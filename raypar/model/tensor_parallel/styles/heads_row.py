"""The style `heads-row`: the linear layer that reads attention's output, cut by input features, by heads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from raypar.model.tensor_parallel.group import ShardGroup
from raypar.model.tensor_parallel.linear import RowLinear
from raypar.model.tensor_parallel.styles.heads_base import HeadStyle
from raypar.model.tensor_parallel.styles.style import ROW_COLLECTIVES, cut_linear_by_input, features_per_part, indices_on_shard
from raypar.model.transposed_linear import linear_features
from raypar.plan.shard_ranges import TensorCut, scale_ranges
from raypar.plan.tensor_parallel_layout import LayerCollectives, TensorParallelLayout


@dataclass(frozen=True, slots=True)
class HeadsRowStyle(HeadStyle):
    """As `row`, each shard reading the features of its heads."""

    name: ClassVar[str] = "heads-row"
    summary: ClassVar[str] = "Linear that reads attention's output: cut by input features, by heads"

    def slices(self, name: str, module: nn.Module, shards: int) -> Mapping[str, TensorCut]:
        """See `ShardingStyle`."""
        unit = features_per_part(name, self, linear_features(module)[0], self.heads, "input")
        held = tuple(scale_ranges(ranges, unit) for ranges in self.query_heads(name, shards))
        return cut_linear_by_input(module, held)

    def build(self, name: str, module: nn.Module, layout: TensorParallelLayout, group: ShardGroup) -> nn.Module:
        """See `ShardingStyle`."""
        return RowLinear(module, name, group, indices_on_shard(name, layout, group))

    def collectives(self, module: nn.Module) -> LayerCollectives:
        """See `ShardingStyle`."""
        return ROW_COLLECTIVES
