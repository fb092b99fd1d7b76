"""`nn.MultiheadAttention` cut over shards by heads: one function of PyTorch reads its weights, so it is one module here."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from raypar.model.autocast_casts import cast_for_autocast
from raypar.model.tensor_parallel import autograd_collectives
from raypar.model.tensor_parallel.local_part_layout import LocalPartLayout, sequence_part_layout
from raypar.model.tensor_parallel.shard_group import ShardedModule, ShardGroup
from raypar.model.tensor_parallel.sharded_value import ShardedValue, take_part, unsupported_on_part_error
from raypar.model.tensor_parallel.sharded_value_torch_functions import attention_with_dropout
from raypar.plan.shard_ranges import IndexRanges, count_indices, even_ranges_by_shard


class ShardedMultiheadAttention(ShardedModule):
    """Attention of the heads `held`, of which the shards' outputs are summed. Computes what `nn.MultiheadAttention` does.

    `attention`: the module whose parameters are this shard's slices.
    """

    def __init__(self, attention: nn.MultiheadAttention, name: str, group: ShardGroup, held: IndexRanges) -> None:
        super().__init__(name, group)
        self.held = held
        """The heads that this shard computes."""
        self.embed_dim, self.num_heads, self.head_dim = attention.embed_dim, attention.num_heads, attention.head_dim
        self.batch_first, self.dropout = attention.batch_first, attention.dropout
        self._qkv_same_embed_dim = False
        """Said to `nn.TransformerEncoderLayer`, which in evaluation would compute with the weights itself."""
        for key, parameter in attention._parameters.items():
            self.register_parameter(key, parameter)
        self.out_proj = attention.out_proj

    def forward(
        self,
        query: Tensor | ShardedValue,
        key: Tensor | ShardedValue,
        value: Tensor | ShardedValue,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor | ShardedValue, Tensor | None]:
        """(output, attention weights if `need_weights`), as of the whole module. The calls are those that
        `F.multi_head_attention_forward` makes, for the heads of this shard."""
        is_batched, by_sequence = query.dim() == 3, isinstance(query, ShardedValue)
        target = query.dtype
        q, k, v = self._project(query, key, value)
        (length, samples, features), sources = q.shape, len(k)
        mask, is_causal = self._mask(attn_mask, key_padding_mask, is_causal and not need_weights, (samples, sources), target)
        p = self.dropout if self.training else 0.0
        q, k, v = (x.view(len(x), samples * self._held_count, self.head_dim).transpose(0, 1) for x in (q, k, v))
        weights = None
        if need_weights:
            found, local = self._weigh(q, k, v, mask, p)
            weights = self._join_weights(found, average_attn_weights)
            weights = weights if is_batched else weights.squeeze(0)
        else:
            q, k, v = (x.unflatten(0, (samples, self._held_count)) for x in (q, k, v))
            if mask is not None:
                mask = mask.unsqueeze(0) if len(mask) == 1 else mask.unflatten(0, (samples, self._held_count))
            local = self._attend(q, k, v, mask, p, is_causal).permute(2, 0, 1, 3)
        product = F.linear(local.reshape(length * samples, features), self.out_proj.weight)
        if by_sequence:
            return self._sum_by_sequence(product.view(length, samples, -1).transpose(0, 1)), weights
        out = self._sum(product).view(length, samples, -1)
        return out.squeeze(1) if not is_batched else out.transpose(0, 1) if self.batch_first else out, weights

    @property
    def _held_count(self) -> int:
        return count_indices(self.held)

    def _project(self, *inputs: Tensor | ShardedValue) -> list[Tensor]:
        """This shard's queries, keys and values, [length, samples, features]. As in PyTorch, one product makes all three of one
        tensor, one makes keys and values of one tensor; else there are three."""
        whole: dict[int, Tensor] = {}
        for x in inputs:
            if id(x) not in whole:
                whole[id(x)] = self._sequence_first(autograd_collectives.copy_to_shards(self._whole(x), self.group))
        q, k, v = (whole[id(x)] for x in inputs)
        bias: Any = self.in_proj_bias
        if self.in_proj_weight is None:
            separate: Any = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
            biases = [None] * 3 if bias is None else bias.chunk(3)
            return [F.linear(x, w, b) for x, w, b in zip((q, k, v), separate, biases, strict=True)]
        sizes = [3] if q is k is v else [1, 2] if k is v else [1, 1, 1]
        rows = [size * self._held_count * self.head_dim for size in sizes]
        weights: Any = [self.in_proj_weight] if len(rows) == 1 else self.in_proj_weight.split(rows)  # type: ignore[operator]
        biases = [None] * len(rows) if bias is None else [bias] if len(rows) == 1 else bias.split(rows)
        made: list[Tensor] = []
        for size, x, weight, of_rows in zip(sizes, (q, k, v), weights, biases, strict=False):
            product = F.linear(x, weight, of_rows)
            made += [product] if size == 1 else product.unflatten(-1, (size, -1)).movedim(-2, 0).contiguous().unbind(0)
        return made

    def _sequence_first(self, x: Tensor) -> Tensor:
        """[length, samples, features]."""
        return x.unsqueeze(1) if x.dim() == 2 else x.transpose(0, 1) if self.batch_first else x

    def _whole(self, x: Tensor | ShardedValue) -> Tensor:
        """The whole value; under sequence parallelism the sequence's parts are gathered."""
        if not isinstance(x, ShardedValue):
            return x
        if not x.by_sequence or not self.batch_first:
            raise unsupported_on_part_error("nn.MultiheadAttention", x)
        even = even_ranges_by_shard(x.part_layout.size, self.group.size)
        return autograd_collectives.gather_from_shards(x.local, 1, even, self.group)

    def _weigh(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, p: float) -> tuple[ShardedValue, Tensor]:
        """(attention weights of this shard's heads, what they make of the values, [length, samples x heads, width])."""
        scaled = q * math.sqrt(1.0 / self.head_dim)
        keys = k.transpose(-2, -1)
        scores = torch.bmm(scaled, keys) if mask is None else torch.baddbmm(mask, scaled, keys)
        by_heads = F.softmax(scores, -1).unflatten(0, (-1, self._held_count))
        found: Any = F.dropout(self._in_parts(by_heads), p)  # type: ignore[arg-type]
        return found, torch.bmm(found.local.flatten(0, 1), v).transpose(0, 1)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, p: float, is_causal: bool) -> Tensor:
        """Attention of this shard's heads, [samples, heads, length, width]."""
        if p == 0.0:
            return F.scaled_dot_product_attention(q, k, v, mask, p, is_causal)
        return attention_with_dropout(self._in_parts(q), k, v, mask, p, is_causal, None).local

    def _sum(self, local: Tensor) -> Tensor:
        """The sum over shards, with the bias added."""
        made = autograd_collectives.reduce_from_shards(local, self.group)
        (bias,) = cast_for_autocast(self.out_proj.bias) if self.out_proj.bias is not None else (None,)
        return made if bias is None else made + bias

    def _sum_by_sequence(self, local: Tensor) -> ShardedValue:
        """This shard's part of the sum over shards, with the bias added."""
        part = autograd_collectives.reduce_scatter_to_shards(local, 1, self.group)
        own = ShardedValue(part, sequence_part_layout(local.shape[1], self.group.shard, self.group.size), self.group)
        if self.out_proj.bias is None:
            return own
        (bias,) = cast_for_autocast(take_part(self.out_proj.bias, 0, ((0, self.embed_dim),), self.group))
        return own if bias is None else own.like(part + bias)

    def _in_parts(self, local: Tensor) -> ShardedValue:
        """[samples, heads, ...], of which this shard has its heads."""
        return ShardedValue(local, LocalPartLayout(1, self.num_heads, self.held, "heads"), self.group)

    def _mask(
        self,
        attn_mask: Tensor | None,
        key_padding_mask: Tensor | None,
        is_causal: bool,
        sizes: tuple[int, int],
        dtype: torch.dtype,
    ) -> tuple[Tensor | None, bool]:
        """(what is added to the scores, [samples x heads or 1, length or 1, sources]; whether they are causal without it).

        `sizes`: samples and sources; `dtype`: of what a mask of bools becomes.
        """
        if is_causal and key_padding_mask is None and attn_mask is not None:
            return None, True  # `attn_mask` is said to be that mask
        samples, sources = sizes

        def added(mask: Tensor | None) -> Tensor | None:
            if mask is None or mask.is_floating_point():
                return mask
            return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask, float("-inf"))

        mask, padding = added(attn_mask), added(key_padding_mask)
        if mask is not None and mask.dim() == 3:
            mask = take_part(mask.unflatten(0, (samples, self.num_heads)), 1, self.held, self.group).flatten(0, 1)
        elif mask is not None:
            mask = take_part(mask, 0, ((0, len(mask)),), self.group).unsqueeze(0)
        if padding is not None:
            padding = take_part(padding, 0, ((0, len(padding)),), self.group).view(samples, 1, 1, sources)
            padding = padding.expand(-1, self._held_count, -1, -1).reshape(samples * self._held_count, 1, sources)
        return (padding if mask is None else mask if padding is None else mask + padding), False

    def _join_weights(self, found: ShardedValue, average: bool) -> Tensor:
        """The attention weights of all heads, or their mean."""
        if average:
            return autograd_collectives.reduce_from_shards(found.local.sum(1) / self.num_heads, self.group)
        even = even_ranges_by_shard(self.num_heads, self.group.size)
        return autograd_collectives.gather_from_shards(found.local, 1, even, self.group)
