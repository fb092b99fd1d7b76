"""Sharding styles of attention: projections that are cut by heads, and whole attention modules."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import ClassVar, Self

from torch import nn

from raypar.errors import PlanError
from raypar.model.tensor_parallel.linear import ColumnLinear, RowLinear
from raypar.model.tensor_parallel.multihead_attention import ShardedMultiheadAttention
from raypar.model.tensor_parallel.shard_group import ShardGroup
from raypar.model.tensor_parallel.styles.layer_kinds import attention_dimensions, linear_dimensions
from raypar.model.tensor_parallel.styles.style import (
    DimensionStyle,
    ShardingStyle,
    features_per_part,
    indices_on_shard,
    is_plain_linear,
    is_replaceable,
    style_misfit_error,
)
from raypar.plan.layer_dimensions import LayerDimensions
from raypar.plan.tensor_parallel_layout import TensorParallelLayout

QUERY_HEADS = ("num_heads", "n_heads", "n_head", "num_attention_heads", "nhead", "heads")
KEY_HEADS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "n_kv_head", "kv_heads")


@dataclass(frozen=True, slots=True)
class HeadStyle(DimensionStyle):
    """A style of linear layers that is cut by heads. 0 heads: they are not known yet."""

    axis: ClassVar[str] = "out"
    """Which features lie by heads: `in` or `out`."""
    order: ClassVar[str] = "heads width"
    """How they lie: head after head, the keys' after the queries'."""
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

    def check_fits(self, name: str, module: nn.Module) -> None:
        """See `ShardingStyle`."""
        if not is_plain_linear(module):
            raise style_misfit_error(self, name, module)

    def dimensions(self, name: str, module: nn.Module) -> LayerDimensions:
        """See `DimensionStyle`. A shard has the key heads that its query heads need; several may need the same one."""
        if self.heads % self.kv_heads:
            raise PlanError(
                f"{name}: {self.heads} query heads cannot share {self.kv_heads} key heads evenly",
                cure="the number of query heads is a multiple of that of key heads",
            )
        layer, which = linear_dimensions(module), {"in": "input", "out": "output"}[self.axis]
        sizes = {"heads": self.heads, "key_heads": self.kv_heads, "keys_and_values": 2}
        of_one_width = sum(prod(sizes[each] for each in block.split()[:-1]) for block in self.order.split("+"))
        width = features_per_part(name, self, dict(layer.sizes)[self.axis], of_one_width, which)
        return replace(
            layer,
            sizes=(*layer.sizes, *sizes.items(), ("width", width)),
            orders=((self.axis, self.order),),
            divided="heads",
            noun="heads",
            followers=(("key_heads", "heads"),),
        )


class HeadColumnStyle(HeadStyle):
    """A style by heads of which each shard makes a part of the output."""

    __slots__ = ()

    def build(self, name: str, module: nn.Module, layout: TensorParallelLayout, group: ShardGroup) -> nn.Module:
        """See `ShardingStyle`."""
        held = indices_on_shard(name, layout, group)
        return ColumnLinear(module, name, group, held, axis="heads", shares_input=name in layout.shared_inputs)


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


@dataclass(frozen=True, slots=True)
class KvHeadsStyle(HeadColumnStyle):
    """Each shard makes the keys or values that its query heads need; several shards may hold the same key head."""

    name: ClassVar[str] = "kv-heads"
    summary: ClassVar[str] = "Linear that makes keys or values: cut by heads (kv-heads:8/2 for 8 query heads and 2 key heads)"
    input_group: ClassVar[str | None] = "heads"
    order: ClassVar[str] = "key_heads width"


@dataclass(frozen=True, slots=True)
class FusedKvStyle(HeadColumnStyle):
    """Each shard makes the keys and the values that its query heads need, of one layer that makes both."""

    name: ClassVar[str] = "kv"
    summary: ClassVar[str] = "Linear that makes [keys, values]: each cut by heads (kv:8, or kv:8/2 for 2 key heads)"
    input_group: ClassVar[str | None] = "heads"
    order: ClassVar[str] = "keys_and_values key_heads width"


@dataclass(frozen=True, slots=True)
class QkvStyle(HeadColumnStyle):
    """Each shard makes its part of the queries, of the keys and of the values."""

    name: ClassVar[str] = "qkv"
    summary: ClassVar[str] = "Linear that makes [queries, keys, values]: each cut by heads (qkv:8 or qkv:8/2)"
    order: ClassVar[str] = "heads width + key_heads width + key_heads width"


@dataclass(frozen=True, slots=True)
class QkvInterleavedStyle(HeadColumnStyle):
    """Each shard makes query, key and value of its heads."""

    name: ClassVar[str] = "qkv-interleaved"
    summary: ClassVar[str] = "Linear that makes [query, key, value] head after head: cut by heads"

    def dimensions(self, name: str, module: nn.Module) -> LayerDimensions:
        """See `DimensionStyle`."""
        if self.kv_heads != self.heads:
            raise PlanError(
                f"{name} is interleaved with {self.heads} query heads and {self.kv_heads} key heads",
                cure="qkv-interleaved needs as many key heads as query heads; give it the style whole",
            )
        return HeadStyle.dimensions(self, name, module)


@dataclass(frozen=True, slots=True)
class HeadsRowStyle(HeadStyle):
    """As `row`, each shard reading the features of its heads."""

    name: ClassVar[str] = "heads-row"
    summary: ClassVar[str] = "Linear that reads attention's output: cut by input features, by heads"
    axis: ClassVar[str] = "in"

    def build(self, name: str, module: nn.Module, layout: TensorParallelLayout, group: ShardGroup) -> nn.Module:
        """See `ShardingStyle`."""
        return RowLinear(module, name, group, indices_on_shard(name, layout, group))


@dataclass(frozen=True, slots=True)
class AttentionStyle(DimensionStyle):
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

    def dimensions(self, name: str, module: nn.Module) -> LayerDimensions:
        """See `DimensionStyle`. Of attention to itself: other queries, keys and values have a sum each."""
        assert isinstance(module, nn.MultiheadAttention)
        return replace(attention_dimensions(module), divided="heads", noun="heads")

    def build(self, name: str, module: nn.Module, layout: TensorParallelLayout, group: ShardGroup) -> nn.Module:
        """See `ShardingStyle`."""
        assert isinstance(module, nn.MultiheadAttention)
        return ShardedMultiheadAttention(module, name, group, self.divide(name, module, group.size).indices[group.shard])


def is_plain_attention(module: object) -> bool:
    """Whether it is an `nn.MultiheadAttention` that a sharded module can stand in for."""
    return (
        isinstance(module, nn.MultiheadAttention)
        and type(module).forward is nn.MultiheadAttention.forward
        and is_replaceable(module)
        and module.bias_k is None
        and not module.add_zero_attn
    )
