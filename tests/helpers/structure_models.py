"""An `nn.TransformerEncoder`, which is cut over shards by what it computes, and its data; for jobs whose workers import it."""

from __future__ import annotations

import torch
from torch import Tensor, nn

WIDTH, LENGTH = 16, 5


class Encoder(nn.Module):
    """Three layers between two linear ones, with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(WIDTH, 4, 32, 0.1, batch_first=True), 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.encoder(self.first(x)).mean(1))


class Vectors:
    """Samples (x, y)."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        drawn = torch.randn(LENGTH * WIDTH + 3, generator=torch.Generator().manual_seed(index))
        return drawn[3:].view(LENGTH, WIDTH), drawn[:3]
