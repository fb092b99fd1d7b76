"""Base of the styles that cut by attention heads: how many heads there are, and which of them each shard has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

from torch import nn

from raypar.errors import PlanError
from raypar.model.tensor_parallel.group import ShardGroup
from raypar.model.tensor_parallel.linear import ColumnLinear
from raypar.model.tensor_parallel.styles.style import (
    COLUMN_COLLECTIVES,
    LinearStyle,
    ShardingStyle,
    indices_on_shard,
    share_evenly,
)
from raypar.plan.shard_ranges import IndexRanges, merge_ranges
from raypar.plan.tensor_parallel_layout import LayerCollectives, TensorParallelLayout

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
