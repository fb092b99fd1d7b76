"""The style `qkv-interleaved`: one linear layer that makes query, key and value head after head, cut by heads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from raypar.errors import PlanError
from raypar.model.tensor_parallel.styles.heads_base import HeadColumnStyle
from raypar.model.tensor_parallel.styles.style import cut_linear_by_output, features_per_part
from raypar.model.transposed_linear import linear_features
from raypar.plan.shard_ranges import TensorCut, scale_ranges


@dataclass(frozen=True, slots=True)
class QkvInterleavedStyle(HeadColumnStyle):
    """Each shard makes query, key and value of its heads."""

    name: ClassVar[str] = "qkv-interleaved"
    summary: ClassVar[str] = "Linear that makes [query, key, value] head after head: cut by heads"

    def slices(self, name: str, module: nn.Module, shards: int) -> Mapping[str, TensorCut]:
        """See `ShardingStyle`."""
        queries = self.query_heads(name, shards)
        if self.kv_heads != self.heads:
            raise PlanError(
                f"{name} is interleaved with {self.heads} query heads and {self.kv_heads} key heads",
                cure="qkv-interleaved needs as many key heads as query heads; give it the style whole",
            )
        unit = features_per_part(name, self, linear_features(module)[1], self.heads, "output")
        return cut_linear_by_output(module, tuple(scale_ranges(ranges, unit) for ranges in queries))
