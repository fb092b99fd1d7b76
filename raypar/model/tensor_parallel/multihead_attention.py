"""`nn.MultiheadAttention` cut over shards by heads: one function of PyTorch reads its weights, so it is one module here."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from raypar.model.tensor_parallel import autograd_collectives
from raypar.model.tensor_parallel.local_part_layout import LocalPartLayout, sequence_part_layout
from raypar.model.tensor_parallel.shard_group import ShardedModule, ShardGroup
from raypar.model.tensor_parallel.sharded_value import ShardedValue, take_part, unsupported_on_part_error
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
        """(output, attention weights if `need_weights`), as of the whole module."""
        is_batched = query.dim() == 3
        q, k, v = (self._by_heads(x, is_batched) for x in self._project(query, key, value))
        samples, length, sources = q.shape[0], q.shape[2], k.shape[2]
        mask, is_causal = self._mask(q, attn_mask, key_padding_mask, is_causal and not need_weights, samples, sources)
        p = self.dropout if self.training else 0.0
        weights = None
        made: Any
        if need_weights:
            scores: Tensor = (q * self.head_dim**-0.5) @ k.transpose(-2, -1)
            found: Any = F.dropout(F.softmax(scores if mask is None else scores + mask, -1), p)
            made = found @ v
            weights = self._join_weights(found, average_attn_weights)
            weights = weights if is_batched else weights.squeeze(0)
        else:
            made = F.scaled_dot_product_attention(q, k, v, mask, p, is_causal)  # type: ignore[arg-type]
        local = made.local.permute(2, 0, 1, 3).reshape(length, samples, count_indices(self.held) * self.head_dim)
        by_sequence = isinstance(query, ShardedValue)
        out = self._sum(F.linear(local.transpose(0, 1) if by_sequence else local, self.out_proj.weight), by_sequence)
        if isinstance(out, Tensor):  # in memory the sequence comes first, as the whole module leaves it
            out = out.squeeze(1) if not is_batched else out.transpose(0, 1) if self.batch_first else out
        return out, weights

    def _project(self, *inputs: Tensor | ShardedValue) -> list[Tensor]:
        """This shard's queries, keys and values; one product for all that are made of the same tensor."""
        whole: dict[int, Tensor] = {}
        for x in inputs:
            if id(x) not in whole:
                whole[id(x)] = autograd_collectives.copy_to_shards(self._whole(x), self.group)
        tensors = [whole[id(x)] for x in inputs]
        biases = [None] * 3 if self.in_proj_bias is None else list(self.in_proj_bias.chunk(3))  # type: ignore[operator]
        if self.in_proj_weight is None:
            separate = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
            return [F.linear(x, w, b) for x, w, b in zip(tensors, separate, biases, strict=True)]
        if tensors[0] is tensors[1] is tensors[2]:
            return list(F.linear(tensors[0], self.in_proj_weight, self.in_proj_bias).chunk(3, -1))  # type: ignore[arg-type]
        parts = self.in_proj_weight.chunk(3)  # type: ignore[operator]
        return [F.linear(x, w, b) for x, w, b in zip(tensors, parts, biases, strict=True)]

    def _whole(self, x: Tensor | ShardedValue) -> Tensor:
        """The whole value; under sequence parallelism the sequence's parts are gathered."""
        if not isinstance(x, ShardedValue):
            return x
        if not x.by_sequence or not self.batch_first:
            raise unsupported_on_part_error("nn.MultiheadAttention", x)
        even = even_ranges_by_shard(x.part_layout.size, self.group.size)
        return autograd_collectives.gather_from_shards(x.local, 1, even, self.group)

    def _sum(self, local: Tensor, by_sequence: bool) -> Tensor | ShardedValue:
        """The sum over shards with the bias added; under sequence parallelism this shard's part of it."""
        bias = self.out_proj.bias
        if not by_sequence:
            made = autograd_collectives.reduce_from_shards(local, self.group)
            return made if bias is None else made + bias
        size = local.shape[1]
        part = autograd_collectives.reduce_scatter_to_shards(local, 1, self.group)
        own = ShardedValue(part, sequence_part_layout(size, self.group.shard, self.group.size), self.group)
        return own if bias is None else own.like(part + take_part(bias, 0, ((0, len(bias)),), self.group))

    def _by_heads(self, x: Tensor, is_batched: bool) -> ShardedValue:
        """[samples, heads, length, width], of which this shard has its heads."""
        if not is_batched:
            x = x.unsqueeze(0)
        elif not self.batch_first:
            x = x.transpose(0, 1)
        heads = x.reshape(*x.shape[:2], count_indices(self.held), self.head_dim).transpose(1, 2)
        return ShardedValue(heads, LocalPartLayout(1, self.num_heads, self.held, "heads"), self.group)

    def _mask(
        self,
        q: ShardedValue,
        attn_mask: Tensor | None,
        key_padding_mask: Tensor | None,
        is_causal: bool,
        samples: int,
        sources: int,
    ) -> tuple[Tensor | None, bool]:
        """(what is added to the scores, [samples or 1, heads or 1, length, sources]; whether they are causal without it)."""
        if is_causal and key_padding_mask is None and attn_mask is not None:
            return None, True  # `attn_mask` is said to be that mask

        def added(mask: Tensor | None) -> Tensor | None:
            if mask is None or mask.is_floating_point():
                return mask
            return mask.new_zeros(mask.shape, dtype=q.dtype).masked_fill_(mask, float("-inf"))

        mask, padding = added(attn_mask), added(key_padding_mask)
        if mask is not None and mask.dim() == 3:
            mask = mask.view(samples, self.num_heads, *mask.shape[1:])
        if padding is not None:
            padding = padding.view(samples, 1, 1, sources)
        return (padding if mask is None else mask if padding is None else mask + padding), False

    def _join_weights(self, found: ShardedValue, average: bool) -> Tensor:
        """The attention weights of all heads, or their mean."""
        if average:
            return autograd_collectives.reduce_from_shards(found.local.sum(1) / self.num_heads, self.group)
        even = even_ranges_by_shard(self.num_heads, self.group.size)
        return autograd_collectives.gather_from_shards(found.local, 1, even, self.group)
