"""The benches' GPT in a form that everybody's tensor parallelism takes as it is: attention and MLP are modules of their own,
queries, keys and values are separate layers, whose heads are counted from what is there (`view(..., -1, size)`)."""

from __future__ import annotations

import math
from collections import OrderedDict

import torch.nn.functional as F
from torch import Tensor, nn

from examples import gpt


class Attention(nn.Module):
    """x [mb, seq, width] -> same shape."""

    def __init__(self, width: int, heads: int, std: float) -> None:
        super().__init__()
        self.heads, self.size = heads, width // heads
        self.q, self.k, self.v = (gpt.Linear(width, width) for _ in range(3))
        self.project = gpt.Linear(width, width, std=std)

    def forward(self, x: Tensor) -> Tensor:
        batch, seq, _ = x.shape
        q, k, v = (make(x).view(batch, seq, -1, self.size).transpose(1, 2) for make in (self.q, self.k, self.v))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.project(attended.transpose(1, 2).reshape(batch, seq, -1))


class MLP(nn.Module):
    """x [mb, seq, width] -> same shape."""

    def __init__(self, width: int, std: float) -> None:
        super().__init__()
        self.up, self.down = gpt.Linear(width, 4 * width), gpt.Linear(4 * width, width, std=std)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x), approximate="tanh"))


class Block(nn.Module):
    """As `gpt.Block`."""

    def __init__(self, width: int, heads: int, depth: int) -> None:
        super().__init__()
        std = 0.02 / math.sqrt(2 * depth)
        self.norm1, self.attention = nn.LayerNorm(width), Attention(width, heads, std)
        self.norm2, self.mlp = nn.LayerNorm(width), MLP(width, std)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


def layers(vocab: int = 256, width: int = 128, depth: int = 8, heads: int = 4, context: int = 128) -> nn.Sequential:
    """`embed`, `block0`, ..., `head`."""
    blocks = [(f"block{i}", Block(width, heads, depth)) for i in range(depth)]
    ends = gpt.Embed(vocab, context, width), gpt.Head(width, vocab)
    return nn.Sequential(OrderedDict([("embed", ends[0]), *blocks, ("head", ends[1])]))
