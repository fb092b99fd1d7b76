"""The style `gathered`: as `column`, but every shard gets the whole output."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from raypar.model.tensor_parallel.group import ShardGroup
from raypar.model.tensor_parallel.linear import ColumnLinear
from raypar.model.tensor_parallel.local_part_layout import FEATURES
from raypar.model.tensor_parallel.styles.style import (
    COLUMN_COLLECTIVES,
    LinearStyle,
    cut_linear_by_output,
    indices_on_shard,
    share_evenly,
)
from raypar.model.transposed_linear import linear_features
from raypar.plan.shard_ranges import TensorCut
from raypar.plan.tensor_parallel_layout import LayerCollective, LayerCollectives, TensorParallelLayout


@dataclass(frozen=True, slots=True)
class GatheredStyle(LinearStyle):
    """Each shard makes its part of the output features, which are then gathered."""

    name: ClassVar[str] = "gathered"
    summary: ClassVar[str] = "Linear: cut by output features, which are then gathered"
    input_group: ClassVar[str | None] = "features"

    def slices(self, name: str, module: nn.Module, shards: int) -> Mapping[str, TensorCut]:
        """See `ShardingStyle`."""
        return cut_linear_by_output(module, share_evenly(name, "output features", linear_features(module)[1], shards))

    def build(self, name: str, module: nn.Module, layout: TensorParallelLayout, group: ShardGroup) -> nn.Module:
        """See `ShardingStyle`."""
        held = indices_on_shard(name, layout, group)
        shares = name in layout.shared_inputs
        return ColumnLinear(module, name, group, held, axis=FEATURES, shares_input=shares, gather_output=True)

    def collectives(self, module: nn.Module) -> LayerCollectives:
        """See `ShardingStyle`."""
        gather = LayerCollective("all_gather", "forward", "output")
        return LayerCollectives((gather, *COLUMN_COLLECTIVES.plain), (gather, *COLUMN_COLLECTIVES.sequence))
