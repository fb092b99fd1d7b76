"""The style `kv-heads`: a linear layer that makes keys or values, cut by heads."""

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
class KvHeadsStyle(HeadColumnStyle):
    """Each shard makes the keys or values that its query heads need; several shards may hold the same key head."""

    name: ClassVar[str] = "kv-heads"
    summary: ClassVar[str] = "Linear that makes keys or values: cut by heads (kv-heads:8/2 for 8 query heads and 2 key heads)"
    input_group: ClassVar[str | None] = "heads"

    def slices(self, name: str, module: nn.Module, shards: int) -> Mapping[str, TensorCut]:
        """See `ShardingStyle`."""
        keys = self.key_heads(name, shards)
        unit = features_per_part(name, self, linear_features(module)[1], self.kv_heads, "output")
        return cut_linear_by_output(module, tuple(scale_ranges(ranges, unit) for ranges in keys))
