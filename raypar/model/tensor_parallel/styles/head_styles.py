"""Sharding styles of attention: projections that are cut by heads, and whole attention modules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Self

from torch import nn

from raypar.errors import PlanError
from raypar.model.tensor_parallel.linear import ColumnLinear, RowLinear
from raypar.model.tensor_parallel.multihead_attention import ShardedMultiheadAttention
from raypar.model.tensor_parallel.shard_group import ShardGroup
from raypar.model.tensor_parallel.styles.style import (
    COLUMN_COLLECTIVES,
    ROW_COLLECTIVES,
    LinearStyle,
    ShardingStyle,
    cut_linear_by_input,
    cut_linear_by_output,
    features_per_part,
    indices_on_shard,
    is_replaceable,
    share_evenly,
)
from raypar.model.transposed_linear import linear_features
from raypar.plan.shard_ranges import IndexRanges, TensorCut, count_indices, merge_ranges, scale_ranges, shift_ranges
from raypar.plan.tensor_parallel_layout import LayerCollective, LayerCollectives, ShardWorkShare, TensorParallelLayout

QUERY_HEADS = ("num_heads", "n_heads", "n_head", "num_attention_heads", "nhead", "heads")
KEY_HEADS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "n_kv_head", "kv_heads")


@dataclass(frozen=True, slots=True)
class HeadStyle(LinearStyle):
    """A style of linear layers that is cut by heads. 0 heads: they are not known yet."""

    heads: int = 0
    """Query heads of the whole layer."""
    kv_heads: int = 0
    """Key and value heads of the whole layer."""

    @classmethod
    def parse(cls, options: str) -> Self:
        """Reads `:heads`, `:heads/key heads` or nothing."""
        if not options:
            return cls()
        heads, _, kv_heads = options.removeprefix(":").partition("/")
        found = cls(int(heads), int(kv_heads) if kv_heads else int(heads))
        if not options.startswith(":") or found.heads < 1 or found.kv_heads < 1:
            raise ValueError(options)
        return found

    @property
    def options(self) -> str:
        """See `ShardingStyle`."""
        if not self.heads:
            return ""
        return f":{self.heads}" + (f"/{self.kv_heads}" if self.kv_heads not in (0, self.heads) else "")

    def complete_options(self, name: str, parents: Sequence[nn.Module]) -> ShardingStyle:
        """See `ShardingStyle`."""
        if self.heads:
            return self
        heads, kv_heads = find_head_counts(parents)
        if not heads:
            raise PlanError(
                f"the style {self} of {name} goes by heads, and the module it is in does not say how many there are "
                f"(attributes {', '.join(QUERY_HEADS)})",
                cure=f"write {self.name}:8, or {self.name}:8/2 for 2 key heads",
            )
        return replace(self, heads=heads, kv_heads=kv_heads)

    def query_heads(self, name: str, shards: int) -> tuple[IndexRanges, ...]:
        """The query heads of each shard. Raises `PlanError`."""
        if self.heads % self.kv_heads:
            raise PlanError(
                f"{name}: {self.heads} query heads cannot share {self.kv_heads} key heads evenly",
                cure="the number of query heads is a multiple of that of key heads",
            )
        return share_evenly(name, "heads", self.heads, shards)

    def key_heads(self, name: str, shards: int) -> tuple[IndexRanges, ...]:
        """The key heads of each shard: those that its query heads need. Several shards may need the same one."""
        group = self.heads // self.kv_heads
        queries = self.query_heads(name, shards)
        return tuple(merge_ranges((a // group, -(-b // group)) for a, b in ranges) for ranges in queries)


class HeadColumnStyle(HeadStyle):
    """A style by heads of which each shard makes a part of the output."""

    __slots__ = ()

    def build(self, name: str, module: nn.Module, layout: TensorParallelLayout, group: ShardGroup) -> nn.Module:
        """See `ShardingStyle`."""
        held = indices_on_shard(name, layout, group)
        return ColumnLinear(module, name, group, held, axis="heads", shares_input=name in layout.shared_inputs)

    def collectives(self, module: nn.Module) -> LayerCollectives:
        """See `ShardingStyle`."""
        return COLUMN_COLLECTIVES


def find_head_counts(modules: Sequence[nn.Module]) -> tuple[int, int]:
    """(query heads, key heads) as the first of some modules, or their `config`, says; (0, 0) if none does."""
    heads = _first_count(modules, QUERY_HEADS)
    return (heads, _first_count(modules, KEY_HEADS) or heads) if heads else (0, 0)


def _first_count(modules: Sequence[nn.Module], attributes: Sequence[str]) -> int:
    for module in modules:
        for owner in (module, getattr(module, "config", None)):
            for attribute in attributes:
                value = getattr(owner, attribute, None)
                if type(value) is int and value > 0:
                    return value
    return 0


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


@dataclass(frozen=True, slots=True)
class FusedKvStyle(HeadColumnStyle):
    """Each shard makes the keys and the values that its query heads need, of one layer that makes both."""

    name: ClassVar[str] = "kv"
    summary: ClassVar[str] = "Linear that makes [keys, values]: each cut by heads (kv:8, or kv:8/2 for 2 key heads)"
    input_group: ClassVar[str | None] = "heads"

    def slices(self, name: str, module: nn.Module, shards: int) -> Mapping[str, TensorCut]:
        """See `ShardingStyle`."""
        keys, count = self.key_heads(name, shards), self.kv_heads
        unit = features_per_part(name, self, linear_features(module)[1], 2 * count, "output")
        held = tuple(merge_ranges(scale_ranges((*own, *shift_ranges(own, count)), unit)) for own in keys)
        return cut_linear_by_output(module, held)


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
