"""The style `kv`: one linear layer that makes keys, then values, each cut by heads."""

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
class KvStyle(HeadColumnStyle):
    """Each shard makes the keys and the values that its query heads need."""

    name: ClassVar[str] = "kv"
    summary: ClassVar[str] = "Linear that makes [keys, values]: each cut by heads (kv:8, or kv:8/2 for 2 key heads)"
    input_group: ClassVar[str | None] = "heads"

    def slices(self, name: str, module: nn.Module, shards: int) -> Mapping[str, TensorCut]:
        """See `ShardingStyle`."""
        keys, count = self.key_heads(name, shards), self.kv_heads
        unit = features_per_part(name, self, linear_features(module)[1], 2 * count, "output")
        held = tuple(merge_ranges(scale_ranges((*own, *shift_ranges(own, count)), unit)) for own in keys)
        return cut_linear_by_output(module, held)
