"""The style `qkv`: one linear layer that makes queries, then keys, then values, each cut by heads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from raypar.model.tensor_parallel.styles.heads_base import HeadColumnStyle
from raypar.model.tensor_parallel.styles.style import cut_linear_by_output, features_per_part
from raypar.model.transposed_linear import linear_features
from raypar.plan.shard_ranges import TensorCut, merge_ranges, scale_ranges, shift_ranges


@dataclass(frozen=True, slots=True)
class QkvStyle(HeadColumnStyle):
    """Each shard makes its part of the queries, of the keys and of the values."""

    name: ClassVar[str] = "qkv"
    summary: ClassVar[str] = "Linear that makes [queries, keys, values]: each cut by heads (qkv:8 or qkv:8/2)"

    def slices(self, name: str, module: nn.Module, shards: int) -> Mapping[str, TensorCut]:
        """See `ShardingStyle`."""
        queries, keys = self.query_heads(name, shards), self.key_heads(name, shards)
        q, kv = self.heads, self.kv_heads
        unit = features_per_part(name, self, linear_features(module)[1], q + 2 * kv, "output")
        held = tuple(
            merge_ranges(scale_ranges((*mine, *shift_ranges(own, q), *shift_ranges(own, q + kv)), unit))
            for mine, own in zip(queries, keys, strict=True)
        )
        return cut_linear_by_output(module, held)
