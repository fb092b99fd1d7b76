"""The style `attention`: a whole `nn.MultiheadAttention`, cut by heads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from raypar.errors import PlanError
from raypar.model.tensor_parallel.group import ShardGroup
from raypar.model.tensor_parallel.multihead_attention import ShardedMultiheadAttention
from raypar.model.tensor_parallel.styles.style import ShardingStyle, is_replaceable, share_evenly
from raypar.plan.shard_ranges import IndexRanges, TensorCut, count_indices, merge_ranges, scale_ranges, shift_ranges
from raypar.plan.tensor_parallel_layout import LayerCollective, LayerCollectives, ShardWorkShare, TensorParallelLayout

_OUTPUT = "out_proj.weight"


@dataclass(frozen=True, slots=True)
class AttentionStyle(ShardingStyle):
    """Each shard computes its heads; what they contribute to the output is summed."""

    name: ClassVar[str] = "attention"
    summary: ClassVar[str] = "nn.MultiheadAttention: cut by heads, with its output layer"

    def check_fits(self, name: str, module: nn.Module) -> None:
        """See `ShardingStyle`."""
        if not is_plain_attention(module):
            raise PlanError(
                f"the style {self} does not fit {name}, a {type(module).__name__}",
                cure="attention is for nn.MultiheadAttention with its own forward, without hooks, bias_k or add_zero_attn; "
                "other attention has heads, kv-heads and heads-row, or qkv",
            )

    def slices(self, name: str, module: nn.Module, shards: int) -> Mapping[str, TensorCut]:
        """See `ShardingStyle`."""
        assert isinstance(module, nn.MultiheadAttention)
        held, width = self._heads(name, module, shards), module.head_dim
        each = TensorCut(0, module.embed_dim, tuple(scale_ranges(ranges, width) for ranges in held))
        packed = TensorCut(
            0,
            3 * module.embed_dim,
            tuple(
                merge_ranges(scale_ranges(tuple(s for i in range(3) for s in shift_ranges(r, i * module.num_heads)), width))
                for r in held
            ),
        )
        cuts = {key: packed if key.startswith("in_proj") else each for key, p in module._parameters.items() if p is not None}
        return cuts | {_OUTPUT: TensorCut(1, module.embed_dim, each.indices_by_shard)}

    def build(self, name: str, module: nn.Module, layout: TensorParallelLayout, group: ShardGroup) -> nn.Module:
        """See `ShardingStyle`."""
        assert isinstance(module, nn.MultiheadAttention)
        return ShardedMultiheadAttention(module, name, group, self._heads(name, module, group.size)[group.shard])

    def collectives(self, module: nn.Module) -> LayerCollectives:
        """See `ShardingStyle`. Said of attention to itself: other queries, keys and values have a sum each."""
        gathered = LayerCollective("all_gather", "forward", "input")
        scattered = LayerCollective("reduce_scatter", "forward", "output")
        summed = LayerCollective("all_reduce", "backward", "input")
        return LayerCollectives(
            plain=(LayerCollective("all_reduce", "forward", "output"), summed),
            sequence=(gathered, scattered, summed, LayerCollective("all_gather", "backward", "output")),
        )

    def cost(self, name: str, module: nn.Module, shards: int) -> tuple[ShardWorkShare, ...]:
        """See `ShardingStyle`."""
        assert isinstance(module, nn.MultiheadAttention)
        shares = [count_indices(ranges) / module.num_heads for ranges in self._heads(name, module, shards)]
        sizes = {key: parameter.numel() for key, parameter in module.named_parameters()}
        cut = sum(sizes[key] for key in self.slices(name, module, shards)) / sum(sizes.values())
        return tuple(ShardWorkShare(share, 1 - cut + cut * share) for share in shares)

    def _heads(self, name: str, module: nn.MultiheadAttention, shards: int) -> tuple[IndexRanges, ...]:
        return share_evenly(name, "heads", module.num_heads, shards)


def is_plain_attention(module: object) -> bool:
    """Whether it is an `nn.MultiheadAttention` that a sharded module can stand in for."""
    return (
        isinstance(module, nn.MultiheadAttention)
        and type(module).forward is nn.MultiheadAttention.forward
        and is_replaceable(module)
        and module.bias_k is None
        and not module.add_zero_attn
    )
