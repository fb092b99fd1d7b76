"""The style `heads`: the linear layer that makes queries, cut by heads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from raypar.model.tensor_parallel.styles.heads_base import HeadColumnStyle
from raypar.model.tensor_parallel.styles.style import cut_linear_by_output, features_per_part
from raypar.model.transposed_linear import linear_features
from raypar.plan.shard_ranges import TensorCut, scale_ranges


@dataclass(frozen=True, slots=True)
class HeadsStyle(HeadColumnStyle):
    """Each shard makes the queries of its heads."""

    name: ClassVar[str] = "heads"
    summary: ClassVar[str] = "Linear that makes queries: cut by heads (heads:8 when the module does not say how many)"
    input_group: ClassVar[str | None] = "heads"

    def slices(self, name: str, module: nn.Module, shards: int) -> Mapping[str, TensorCut]:
        """See `ShardingStyle`."""
        queries = self.query_heads(name, shards)
        unit = features_per_part(name, self, linear_features(module)[1], self.heads, "output")
        return cut_linear_by_output(module, tuple(scale_ranges(ranges, unit) for ranges in queries))
