"""A model whose layers sleep for given times: what is left of a step is schedule, transport and interpreter."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn


def rest(ms: float) -> None:
    """Sleep `ms` as exactly as the kernel can: the last 0.2 ms are spun, because a timer comes up to 0.1 ms late."""
    end = time.perf_counter_ns() + int(ms * 1e6)
    left = end - time.perf_counter_ns()
    if left > 200_000:
        time.sleep((left - 200_000) / 1e9)
    while time.perf_counter_ns() < end:
        pass


class _Input(torch.autograd.Function):
    """Identity whose backward (the input gradient, I) sleeps."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ms: float) -> Tensor:
        ctx.ms = ms
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        rest(ctx.ms)
        return gradients[0], None


class _Weight(torch.autograd.Function):
    """Identity whose backward (the weight gradient, W) sleeps."""

    @staticmethod
    def forward(ctx: Any, w: Tensor, ms: float) -> Tensor:
        ctx.ms = ms
        return w.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        rest(ctx.ms)
        return gradients[0], None


class Sleep(nn.Module):
    """x [samples, 1] -> same shape, after `forward_ms`; its gradients take `input_ms` and `weight_ms`."""

    def __init__(self, forward_ms: float, input_ms: float, weight_ms: float) -> None:
        super().__init__()
        self.ms = (forward_ms, input_ms, weight_ms)
        self.weight = nn.Parameter(torch.empty(1))

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        rest(self.ms[0])
        if not torch.is_grad_enabled():
            return x + self.weight
        return _Input.apply(x, self.ms[1]) + _Weight.apply(self.weight, self.ms[2])


def layers(forward_ms: Sequence[float], input_ms: Sequence[float], weight_ms: Sequence[float]) -> nn.Sequential:
    """One layer a stage."""
    return nn.Sequential(*(Sleep(*ms) for ms in zip(forward_ms, input_ms, weight_ms, strict=True)))


def loss(output: Tensor, target: Tensor) -> Tensor:
    """A scalar, at once."""
    return (output - target).square().mean()


def samples(count: int = 4096) -> torch.utils.data.Dataset[tuple[Tensor, ...]]:
    """Pairs of one number each."""
    zeros = torch.zeros(count, 1)
    return torch.utils.data.TensorDataset(zeros, zeros)
