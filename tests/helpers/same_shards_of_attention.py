"""`nn.MultiheadAttention` on shards, written down in plain PyTorch in one process, after `F.multi_head_attention_forward`.

No raypar in here. Each shard makes PyTorch's calls for its heads; what these contribute to the output is summed over shards.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from helpers.same_shards import Fan, over_shards, run_of
from torch import Tensor, nn


class Sum(torch.autograd.Function):
    """A sum over shards, whose gradient is that of each part."""

    @staticmethod
    def forward(ctx, *parts):
        ctx.shards = len(parts)
        return over_shards(parts)

    @staticmethod
    def backward(ctx, gradient):
        return (gradient,) * ctx.shards


class SameShardsOfAttention:
    """The shards of `whole`. `leaves`: by shard, its slices by the names that the parameters have in the module."""

    def __init__(self, whole: nn.MultiheadAttention, shards: int) -> None:
        self.whole, self.shards, self.leaves = whole, shards, []
        for shard in range(shards):
            mine, heads, width = run_of(whole.num_heads, shards, shard), whole.num_heads, whole.head_dim
            leaf = {}
            for name, parameter in whole.named_parameters():
                rows = torch.arange(len(parameter)).view(-1, heads, width)[:, mine].flatten()
                columns = torch.arange(whole.embed_dim).view(heads, width)[mine].flatten()
                cut = {"out_proj.weight": (slice(None), columns), "out_proj.bias": (slice(None),)}.get(name, (rows,))
                leaf[name] = parameter.detach()[cut].clone().requires_grad_()
            self.leaves.append(leaf)

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, average: bool | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """(output, weights). `mask`: numbers, [samples x heads, length, sources]; `average`: None without weights."""
        given = {id(x): Fan.apply(x, self.shards) for x in (query, key, value)}
        made = []
        for shard in range(self.shards):
            own = run_of(self.whole.num_heads, self.shards, shard)
            q, k, v = (given[id(x)][shard] for x in (query, key, value))
            part = mask if mask is None else mask.unflatten(0, (-1, self.whole.num_heads))[:, own].flatten(0, 1)
            made.append(self._of_shard(self.leaves[shard], q, k, v, part, own.stop - own.start, average is not None))
        total = Sum.apply(*(out for out, _ in made))
        bias = self.leaves[0]["out_proj.bias"]
        samples = query.shape[0 if self.whole.batch_first else 1]
        out = (total + bias.to(total.dtype)).view(-1, samples, total.shape[-1])
        out = out.transpose(0, 1) if self.whole.batch_first else out
        weights = [each for _, each in made]
        if not average:
            return out, None if average is None else torch.cat(weights, 1)
        return out, Sum.apply(*(each.sum(1) / self.whole.num_heads for each in weights))

    def _of_shard(
        self, leaf: dict[str, Tensor], q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, heads: int, weighs: bool
    ) -> tuple[Tensor, Any]:
        """(product of the output projection, weights of its heads) of one shard with so many heads."""
        together, width = (q is k, k is v), self.whole.head_dim
        if self.whole.batch_first:
            q, k, v = (x.transpose(0, 1) for x in (q, k, v))
        (length, samples, _), sources = q.shape, len(k)
        bias, own = leaf["in_proj_bias"], heads * width
        if "in_proj_weight" not in leaf:
            weights = [leaf[f"{name}_proj_weight"] for name in "qkv"]
            q, k, v = (F.linear(x, w, b) for x, w, b in zip((q, k, v), weights, bias.chunk(3), strict=True))
        elif together == (True, True):
            q, k, v = F.linear(q, leaf["in_proj_weight"], bias).unflatten(-1, (3, own)).movedim(-2, 0).contiguous()
        elif together == (False, True):
            (w, of_both), (b, of_both_bias) = (x.split([own, 2 * own]) for x in (leaf["in_proj_weight"], bias))
            q, both = F.linear(q, w, b), F.linear(k, of_both, of_both_bias)
            k, v = both.unflatten(-1, (2, own)).movedim(-2, 0).contiguous()
        else:
            weights = leaf["in_proj_weight"].chunk(3)
            q, k, v = (F.linear(x, w, b) for x, w, b in zip((q, k, v), weights, bias.chunk(3), strict=True))
        q, k, v = (x.view(len(x), samples * heads, width).transpose(0, 1) for x in (q, k, v))
        if weighs:
            q = q * math.sqrt(1.0 / width)
            scores = torch.bmm(q, k.transpose(1, 2)) if mask is None else torch.baddbmm(mask, q, k.transpose(1, 2))
            found = scores.softmax(-1)
            out = torch.bmm(found, v).transpose(0, 1).reshape(length * samples, own)
            return F.linear(out, leaf["out_proj.weight"]), found.view(samples, heads, length, sources)
        q, k, v = (x.view(samples, heads, -1, width) for x in (q, k, v))
        mask = mask if mask is None else mask.view(samples, heads, length, sources)
        out = F.scaled_dot_product_attention(q, k, v, mask).permute(2, 0, 1, 3).reshape(length * samples, own)
        return F.linear(out, leaf["out_proj.weight"]), None
