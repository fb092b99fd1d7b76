"""The workload of the benches: the GPT of `examples/gpt.py` on its text."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from examples import gpt

SEED = 1337
CLIP_NORM = 1.0
OPTIMIZER = {"lr": 1e-3, "fused": True}
"""Of `torch.optim.AdamW`, for every contender."""


@dataclass(frozen=True)
class Workload:
    """Size of the model and of a step."""

    depth: int = 8
    width: int = 128
    heads: int = 4
    context: int = 128
    batch_size: int = 32
    vocab: int = 256

    @property
    def model_args(self) -> dict[str, int]:
        """Arguments of `examples.gpt:layers`."""
        sizes = {"depth": self.depth, "width": self.width, "heads": self.heads, "context": self.context}
        return sizes if self.vocab == 256 else sizes | {"vocab": self.vocab}

    @property
    def tokens(self) -> int:
        """Tokens a step."""
        return self.batch_size * self.context

    def bounds(self, stages: int) -> list[int]:
        """First layer of every stage, and the number of layers; blocks are shared out evenly between embedding and head."""
        return [0, *(1 + s * self.depth // stages for s in range(1, stages)), self.depth + 2]


def mean_loss(logits: Tensor, target: Tensor) -> Tensor:
    """The example's loss as the scalar that other systems want: nats per token."""
    total, count = gpt.loss(logits, target)
    return total / count


class Batches:
    """The plain way to read: a permutation, `torch.stack` of samples; `share` (index, of) is a contiguous part of the batch."""

    def __init__(self, work: Workload, share: tuple[int, int] = (0, 1)) -> None:
        self.data = gpt.text(context=work.context)
        self.mine = work.batch_size // share[1]
        self.offset = share[0] * self.mine
        self.batch_size = work.batch_size
        self.order = torch.randperm(len(self.data), generator=torch.Generator().manual_seed(SEED)).tolist()

    def get(self, step: int) -> tuple[Tensor, Tensor]:
        """x, y [batch_size / of, context] of a step."""
        start = step * self.batch_size + self.offset
        samples = [self.data[self.order[(start + i) % len(self.order)]] for i in range(self.mine)]
        return torch.stack([x for x, _ in samples]), torch.stack([y for _, y in samples])
