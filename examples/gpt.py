"""A small GPT on bytes, in plain PyTorch: the model, loss, data and sampling of the quickstart. Nothing here knows raypar.

Pre-norm decoder (Radford et al. 2019): `layers` returns `embed`, `block0`, ..., `head`, each a layer that can be cut from
the others. Weights begin as in GPT-2: normal, those that end a residual branch with a smaller deviation.
"""

from __future__ import annotations

import math
import pydoc_data.topics
from collections import OrderedDict
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Linear(nn.Linear):
    """`nn.Linear` with GPT-2's initialisation: weights N(0, std), bias 0."""

    def __init__(self, inputs: int, outputs: int, *, bias: bool = True, std: float = 0.02) -> None:
        self.std = std
        super().__init__(inputs, outputs, bias=bias)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.std)
        if self.bias is not None:
            nn.init.zeros_(self.bias)


class Embedding(nn.Embedding):
    """`nn.Embedding` with N(0, 0.02)."""

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=0.02)


class Embed(nn.Module):
    """tokens [mb, seq] int64 -> [mb, seq, width]: token plus learned position."""

    def __init__(self, vocab: int, context: int, width: int) -> None:
        super().__init__()
        self.token = Embedding(vocab, width)
        self.position = Embedding(context, width)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.token(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))


class Block(nn.Module):
    """x [mb, seq, width] -> same shape: causal self-attention and a 4x MLP, each on a normed copy added to x."""

    def __init__(self, width: int, heads: int, depth: int) -> None:
        super().__init__()
        self.heads = heads
        residual = 0.02 / math.sqrt(2 * depth)
        self.norm1 = nn.LayerNorm(width)
        self.qkv = Linear(width, 3 * width)
        self.project = Linear(width, width, std=residual)
        self.norm2 = nn.LayerNorm(width)
        self.up = Linear(width, 4 * width)
        self.down = Linear(4 * width, width, std=residual)

    def forward(self, x: Tensor) -> Tensor:
        batch, seq, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, seq, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.project(attended.transpose(1, 2).reshape(batch, seq, width))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class Head(nn.Module):
    """x [mb, seq, width] -> logits [mb, seq, vocab]."""

    def __init__(self, width: int, vocab: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.logits = Linear(width, vocab, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.logits(self.norm(x))


def layers(vocab: int = 256, width: int = 128, depth: int = 4, heads: int = 4, context: int = 128) -> nn.Sequential:
    """The whole model as a chain of depth + 2 layers."""
    blocks = [(f"block{i}", Block(width, heads, depth)) for i in range(depth)]
    return nn.Sequential(OrderedDict([("embed", Embed(vocab, context, width)), *blocks, ("head", Head(width, vocab))]))


def loss(logits: Tensor, targets: Tensor) -> tuple[Tensor, int]:
    """Cross-entropy in nats: (sum over tokens, number of tokens)."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum"), targets.numel()


def cosine(step: int, warmup: int, total: int, floor: float = 0.1) -> float:
    """Learning-rate factor of step 0, 1, ...: linear warmup, then a half cosine down to `floor`."""
    if step < warmup:
        return (step + 1) / warmup
    progress = min(1.0, (step - warmup) / max(1, total - warmup))
    return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress))


class Windows(torch.utils.data.Dataset):
    """Non-overlapping windows of a byte string: sample i is (bytes [context], the same shifted by one) as int64."""

    def __init__(self, data: bytes, context: int) -> None:
        self.tokens = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        self.context = context

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // self.context

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        window = self.tokens[index * self.context : (index + 1) * self.context + 1].long()
        return window[:-1], window[1:]


def text(path: str | None = None, split: str = "train", context: int = 128) -> Windows:
    """English text as bytes: a file, or by default Python's own language reference. The last tenth is for validation."""
    if split not in ("train", "validation"):
        raise ValueError(f"split is {split!r}, not 'train' or 'validation'")
    if path is not None:
        data = Path(path).read_bytes()
    else:
        topics = pydoc_data.topics.topics
        data = "\n".join(topics[name] for name in sorted(topics)).encode()
    cut = len(data) * 9 // 10
    return Windows(data[:cut] if split == "train" else data[cut:], context)


@torch.no_grad()
def generate(model: nn.Module, prompt: str = "The ", tokens: int = 200, seed: int = 0, context: int = 128) -> str:
    """Sample `tokens` bytes after `prompt` at temperature 0.8."""
    model.eval()
    generator = torch.Generator().manual_seed(seed)
    ids = list(prompt.encode())
    for _ in range(tokens):
        logits = model(torch.tensor([ids[-context:]]))[0, -1]
        ids.append(int(torch.multinomial(torch.softmax(logits / 0.8, 0), 1, generator=generator)))
    return bytes(ids).decode(errors="replace")
