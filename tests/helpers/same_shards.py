"""The example GPT on shards, written down in plain PyTorch in one process: the reference whose bits a sharded run must have.

No raypar in here. A list has one entry a shard. Weights of the whole model are cut by rules written anew: heads and features
[floor(i n / t), floor((i+1) n / t)), sums over shards ((p0 + p1) + p2) + ...
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def run_of(total: int, shards: int, i: int) -> slice:
    return slice(i * total // shards, (i + 1) * total // shards)


def in_order(parts: Any) -> Tensor:
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


class Fan(torch.autograd.Function):
    """One value for every shard; their gradients are added in shard order."""

    @staticmethod
    def forward(ctx, x, shards):
        return tuple(x.clone() for _ in range(shards))

    @staticmethod
    def backward(ctx, *gradients):
        return in_order([g.contiguous() for g in gradients]), None


class VocabularyLoss(torch.autograd.Function):
    """Summed cross-entropy of logits [n, vocab] given in parts."""

    @staticmethod
    def forward(ctx, targets, *parts):
        tops = [p.max(1).values for p in parts]
        powers = [(p - top[:, None]).exp() for p, top in zip(parts, tops, strict=True)]
        highest = torch.stack(tops).max(0).values
        normaliser = in_order([w.sum(1) * (top - highest).exp() for w, top in zip(powers, tops, strict=True)])
        start, chosen, places = 0, [], []
        for part in parts:
            here = (targets >= start) & (targets < start + part.shape[1])
            place = torch.where(here, targets - start, 0)
            chosen.append(torch.where(here, part[torch.arange(len(part)), place], torch.zeros((), dtype=part.dtype)))
            places.append((here, place))
            start += part.shape[1]
        ctx.probabilities = [w * ((top - highest).exp() / normaliser)[:, None] for w, top in zip(powers, tops, strict=True)]
        ctx.places = places
        return (normaliser.log() + highest - in_order(chosen)).sum()

    @staticmethod
    def backward(ctx, gradient):
        found = []
        for p, (here, place) in zip(ctx.probabilities, ctx.places, strict=True):
            p = p.clone()
            p[torch.arange(len(p)), place] -= here.to(p.dtype)
            found.append(p * gradient)
        return (None, *found)


def gpt_on_shards(
    state: dict[str, Tensor], tokens: Tensor, targets: Tensor, *, depth: int, heads: int, shards: int, sequence: bool
) -> tuple[Tensor, list[dict[str, Tensor]]]:
    """Loss, and by shard the gradients of its slices. `state`: parameters of the whole model by name."""
    width, vocab = state["block0.project.weight"].shape[0], state["head.logits.weight"].shape[0]
    hidden, each = state["block0.up.weight"].shape[0], width // heads
    batch, seq = tokens.shape
    every = range(shards)
    leaves: list[dict[str, Tensor]] = [{} for _ in every]
    shared: dict[str, Tensor] = {}

    def part(name: str, i: int, index: Any) -> Tensor:
        return leaves[i].setdefault(name, state[name][index].clone().requires_grad_())

    def whole(name: str) -> Tensor:
        return shared.setdefault(name, state[name].clone().requires_grad_())

    def norm(name: str, x: list[Tensor]) -> list[Tensor]:
        """On rows of a value: by sequence each shard norms its own, else the one value is normed once."""
        weights, biases = Fan.apply(whole(f"{name}.weight"), len(x)), Fan.apply(whole(f"{name}.bias"), len(x))
        return [F.layer_norm(v, (width,), w, b) for v, w, b in zip(x, weights, biases, strict=True)]

    def gathered(x: list[Tensor]) -> tuple[Tensor, ...]:
        return Fan.apply(torch.cat(x, 1) if len(x) > 1 else x[0], shards)

    def summed(parts: list[Tensor], bias: Tensor | None) -> list[Tensor]:
        total = in_order(parts)
        if bias is not None:
            total = total + bias
        return (
            list(total.split([s.stop - s.start for s in (run_of(seq, shards, i) for i in every)], 1)) if sequence else [total]
        )

    start = [run_of(vocab, shards, i) for i in every]
    looked_up = []
    for i in every:
        absent = (tokens < start[i].start) | (tokens >= start[i].stop)
        rows = F.embedding((tokens - start[i].start).masked_fill(absent, 0), part("embed.token.weight", i, start[i]))
        looked_up.append(rows.masked_fill(absent[..., None], 0.0))
    positions = F.embedding(torch.arange(seq), whole("embed.position.weight"))
    x = summed(looked_up, None)
    x = [v + p for v, p in zip(x, positions.split([v.shape[1] for v in x]), strict=True)]
    for n in range(depth):
        block = f"block{n}"
        out = []
        for i, h in enumerate(gathered(norm(f"{block}.norm1", x))):
            mine = run_of(heads, shards, i)
            features = torch.arange(3 * width).view(3, heads, each)[:, mine].flatten()
            qkv = F.linear(h, part(f"{block}.qkv.weight", i, features), part(f"{block}.qkv.bias", i, features))
            q, k, v = qkv.view(batch, seq, 3, mine.stop - mine.start, each).permute(2, 0, 3, 1, 4)
            attended = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(batch, seq, -1)
            columns = torch.arange(width).view(heads, each)[mine].flatten()
            out.append(F.linear(attended, part(f"{block}.project.weight", i, (slice(None), columns))))
        x = [a + b for a, b in zip(x, summed(out, whole(f"{block}.project.bias")), strict=True)]
        out = []
        for i, h in enumerate(gathered(norm(f"{block}.norm2", x))):
            mine = run_of(hidden, shards, i)
            up = F.linear(h, part(f"{block}.up.weight", i, mine), part(f"{block}.up.bias", i, mine))
            out.append(F.linear(F.gelu(up, approximate="tanh"), part(f"{block}.down.weight", i, (slice(None), mine))))
        x = [a + b for a, b in zip(x, summed(out, whole(f"{block}.down.bias")), strict=True)]
    logits = [
        F.linear(h, part("head.logits.weight", i, start[i])).flatten(0, 1) for i, h in enumerate(gathered(norm("head.norm", x)))
    ]
    loss = VocabularyLoss.apply(targets.flatten(), *logits)
    loss.backward()
    gradients = [{name: leaf.grad for name, leaf in {**mine, **shared}.items()} for mine in leaves]
    return loss.detach(), gradients
