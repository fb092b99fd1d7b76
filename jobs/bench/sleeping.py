"""A model whose layers sleep for given times: what is left of a step is schedule, transport and interpreter."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from raypar.model.split_backward import DeferredWeightGradient


def rest(ms: float) -> None:
    """Sleep `ms` as exactly as the kernel can: the last 0.2 ms are spun, because a timer comes up to 0.1 ms late."""
    end = time.perf_counter_ns() + int(ms * 1e6)
    left = end - time.perf_counter_ns()
    if left > 200_000:
        time.sleep((left - 200_000) / 1e9)
    while time.perf_counter_ns() < end:
        pass


class _Resting(torch.autograd.Function):
    """Identity whose backward sleeps."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, ms: float) -> Tensor:
        ctx.ms = ms
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        rest(ctx.ms)
        return gradients[0], None


class Sleep(nn.Module):
    """x [samples, 1] -> same shape, after `forward_ms`; its gradients take `input_ms` and `weight_ms`.

    Where the backward is split, raypar has taken over the Linear's forward and calls `DeferredWeightGradient.gradients` for W.
    """

    def __init__(self, forward_ms: float, input_ms: float, weight_ms: float) -> None:
        super().__init__()
        self.forward_ms, self.input_ms, self.weight_ms = forward_ms, input_ms, weight_ms
        self.linear = nn.Linear(1, 1, bias=False)
        self.linear.resting_ms = weight_ms

    def forward(self, x: Tensor) -> Tensor:
        rest(self.forward_ms)
        split = "forward" in vars(self.linear)
        return _Resting.apply(self.linear(x), self.input_ms if split else self.input_ms + self.weight_ms)


_gradients = DeferredWeightGradient.gradients


def _resting_gradients(self: DeferredWeightGradient) -> list[tuple[Tensor, Tensor]]:
    rest(getattr(self.layer, "resting_ms", 0.0))
    return _gradients(self)


DeferredWeightGradient.gradients = _resting_gradients


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
