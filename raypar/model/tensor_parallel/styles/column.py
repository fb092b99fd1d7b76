"""The style `column`: a linear layer cut by output features (Shoeybi et al. 2019, arXiv:1909.08053, section 3)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Self

from torch import nn

from raypar.model.tensor_parallel.group import ShardGroup
from raypar.model.tensor_parallel.linear import ColumnLinear
from raypar.model.tensor_parallel.local_part_layout import FEATURES
from raypar.model.tensor_parallel.styles.style import (
    COLUMN_COLLECTIVES,
    LinearStyle,
    cut_linear_by_output,
    features_per_part,
    indices_on_shard,
    share_evenly,
)
from raypar.model.transposed_linear import linear_features
from raypar.plan.shard_ranges import TensorCut, repeat_ranges
from raypar.plan.tensor_parallel_layout import LayerCollectives, TensorParallelLayout


@dataclass(frozen=True, slots=True)
class ColumnStyle(LinearStyle):
    """Each shard makes its part of the output features; the gradient of the input is summed over shards."""

    name: ClassVar[str] = "column"
    summary: ClassVar[str] = "Linear: cut by output features (column/2: two equal parts, as gate and up in one matrix)"
    input_group: ClassVar[str | None] = "features"

    parts: int = 1
    """Equal parts of the output of which each shard has a piece."""

    @classmethod
    def parse(cls, options: str) -> Self:
        """Reads `/parts` or nothing."""
        if not options:
            return cls()
        parts = int(options.removeprefix("/"))
        if not options.startswith("/") or parts < 1:
            raise ValueError(options)
        return cls(parts)

    @property
    def options(self) -> str:
        """See `ShardingStyle`."""
        return f"/{self.parts}" if self.parts > 1 else ""

    def slices(self, name: str, module: nn.Module, shards: int) -> Mapping[str, TensorCut]:
        """See `ShardingStyle`."""
        part = features_per_part(name, self, linear_features(module)[1], self.parts, "output")
        even = share_evenly(name, "output features", part, shards)
        return cut_linear_by_output(module, tuple(repeat_ranges(ranges, part, self.parts) for ranges in even))

    def build(self, name: str, module: nn.Module, layout: TensorParallelLayout, group: ShardGroup) -> nn.Module:
        """See `ShardingStyle`."""
        held = indices_on_shard(name, layout, group)
        return ColumnLinear(module, name, group, held, axis=FEATURES, shares_input=name in layout.shared_inputs)

    def collectives(self, module: nn.Module) -> LayerCollectives:
        """See `ShardingStyle`."""
        return COLUMN_COLLECTIVES
