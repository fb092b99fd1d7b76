"""A small real model whose layers also sleep: six workers train on two cores, and their weights can be compared by hash."""

from __future__ import annotations

import os
import time
from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor, nn

WIDTH = 32
LAYERS = 6


class _Resting(torch.autograd.Function):
    """Identity whose backward sleeps."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, ms: float) -> Tensor:
        ctx.ms = ms
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        time.sleep(ctx.ms / 1e3)
        return gradients[0], None


class Layer(nn.Module):
    """x [samples, WIDTH] -> same shape: linear, tanh, dropout; forward sleeps `ms`, backward twice that.

    `ledger`: a file that gets one byte for every microbatch trained here, also those whose step is never committed.
    """

    def __init__(self, ms: float, ledger: str | None) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(WIDTH, WIDTH), nn.Dropout(0.1)
        self.ms, self.ledger = ms, ledger

    def forward(self, x: Tensor) -> Tensor:
        y = self.dropout(torch.tanh(self.linear(x)))
        if x.is_meta or not self.ms:
            return y
        time.sleep(self.ms / 1e3)
        if self.ledger is not None and self.training:
            file = os.open(self.ledger, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
            os.write(file, b".")
            os.close(file)
        return _Resting.apply(y, 2 * self.ms)  # type: ignore[no-any-return]


def layers(ms: float = 0.0, ledger: str | None = None) -> nn.Sequential:
    """`LAYERS` layers; each sleeps `ms` in forward and 2 `ms` in backward of a microbatch. The first one keeps the ledger."""
    return nn.Sequential(OrderedDict((f"layer{i}", Layer(ms, ledger if i == 0 else None)) for i in range(LAYERS)))


def loss(output: Tensor, target: Tensor) -> Tensor:
    """Mean square."""
    return (output - target).square().mean()


class Samples:
    """Sample i: (x [WIDTH], y [WIDTH])."""

    raypar_thread_safe = True

    def __init__(self, size: int) -> None:
        self.x, self.y = torch.randn(2, size, WIDTH, generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.x[index], self.y[index]


def samples(size: int = 1000) -> Samples:
    """Not a multiple of the batch size: epochs begin in the middle of a step."""
    return Samples(size)
