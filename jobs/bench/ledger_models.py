"""Small models whose layers over shards, branches and replicas send what `ledger.py` compares with formulas, and their data."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

SAMPLES = 64


class Values:
    """Sample i: random numbers of a shape, and a target that nobody reads."""

    def __init__(self, shape: Sequence[int]) -> None:
        self._shape = tuple(shape)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.randn(self._shape, generator=torch.Generator().manual_seed(index)), torch.zeros(())


def loss(output: Tensor, target: Tensor) -> tuple[Tensor, int]:
    """The sum of squares."""
    return (output * output).sum(), len(output)


class Convolutions(nn.Module):
    """Convolutions in a row, so that all but the first read what has a gradient; the last but one may have groups."""

    def __init__(self, channels: Sequence[int], groups: int = 1, kernel: int = 1) -> None:
        super().__init__()
        pairs = list(pairwise(channels))
        of = [groups if number == len(pairs) - 2 else 1 for number in range(len(pairs))]
        self.layers = nn.ModuleList(
            nn.Conv2d(*pair, kernel, padding=kernel // 2, groups=each) for pair, each in zip(pairs, of, strict=True)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Images [samples, channels, height, width] -> those of the last layer."""
        for layer in self.layers:
            x = layer(x)
        return x


class Recurrent(nn.Module):
    """A linear layer, and an LSTM that reads it."""

    def __init__(self, features: int, hidden: int, num_layers: int = 1, bidirectional: bool = False) -> None:
        super().__init__()
        self.before = nn.Linear(features, features)
        self.rnn = nn.LSTM(features, hidden, num_layers, batch_first=True, bidirectional=bidirectional)

    def forward(self, x: Tensor) -> Tensor:
        """x [samples, time, features] -> the output."""
        found: Tensor = self.rnn(self.before(x))[0]
        return found


class Branch(nn.Module):
    """A branch that reads its input so many times."""

    def __init__(self, features: int, uses: int) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(features, features) for _ in range(uses))

    def forward(self, x: Tensor) -> Tensor:
        """The sum of what its parts make of x."""
        total: Tensor = sum(part(x).tanh() for part in self.parts)  # type: ignore[assignment]
        return total


class Branches(nn.Module):
    """Branches between a linear layer that all read and one that reads their sum. `uses`: how often each reads its input."""

    def __init__(self, features: int, uses: Sequence[int]) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(features, features), nn.Linear(features, features)
        self.branches = nn.ModuleList(Branch(features, each) for each in uses)

    def forward(self, x: Tensor) -> Tensor:
        """x [samples, features] -> the same shape."""
        h = self.before(x)
        total: Tensor = self.branches[0](h)
        for branch in self.branches[1:]:
            total = total + branch(h)
        made: Tensor = self.after(total)
        return made


class Skip(nn.Module):
    """A value that the next layer reads twice, and the one after it once, beside what that layer makes."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.before, self.middle = nn.Linear(features, features), Branch(features, 2)
        self.after = nn.Bilinear(features, features, features)

    def forward(self, x: Tensor) -> Tensor:
        """x [samples, features] -> the same shape."""
        h = self.before(x)
        made: Tensor = self.after(self.middle(h), h)
        return made
