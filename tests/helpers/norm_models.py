"""Models whose forward writes buffers: norms with running statistics in every way that people use them, and other buffers.

`norms`: BatchNorm2d with momentum and cumulative, one called twice in a forward, one in evaluation mode, BatchNorm1d on a
strided and on a flat input, a subclass with a forward of its own, InstanceNorm2d with running statistics, norms inside
reentrant and other checkpoints. `counters`: buffers that forward writes in place, replaces, or keeps as a cache.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

CHANNELS, SIDE = 4, 5


class Residual(nn.Module):
    """Two convolutions with norms around a skip; with `reentrant`, inside an activation checkpoint."""

    def __init__(self, momentum: float | None, reentrant: bool | None = None) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(CHANNELS, momentum=momentum)
        self.conv2 = nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(CHANNELS, momentum=momentum)
        self.reentrant = reentrant

    def inner(self, x: Tensor) -> Tensor:
        return self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))

    def forward(self, x: Tensor) -> Tensor:
        inner = self.inner(x) if self.reentrant is None else checkpoint(self.inner, x, use_reentrant=self.reentrant)
        return F.relu(x + inner)


class CalledTwice(nn.Module):
    """One norm called twice in a forward; another one stays in evaluation mode."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(CHANNELS, momentum=None)
        self.frozen = nn.BatchNorm2d(CHANNELS).eval()
        self.frozen.running_mean.fill_(0.25)

    def forward(self, x: Tensor) -> Tensor:
        return self.frozen(self.norm(x).relu() + self.norm(x.square()))


class Strided(nn.Module):
    """A norm of one dim over a transposed value, whose input is strided; an instance norm over the same."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(CHANNELS, CHANNELS)
        self.norm = nn.BatchNorm1d(CHANNELS, momentum=0.3)
        self.instance = nn.InstanceNorm2d(CHANNELS, affine=True, track_running_stats=True)

    def forward(self, x: Tensor) -> Tensor:
        rows = self.linear(x.flatten(2).transpose(1, 2)[:, ::2])
        gate = self.norm(rows.transpose(1, 2)).mean(2)
        return self.instance(x) * gate.sigmoid()[:, :, None, None]


class NormAct(nn.BatchNorm2d):
    """A norm with a forward of its own, as model libraries have it."""

    def forward(self, x: Tensor) -> Tensor:
        x = x.to(memory_format=torch.channels_last)
        if self.training and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
        mean, variance = self.running_mean, self.running_var
        return F.relu(F.batch_norm(x, mean, variance, self.weight, self.bias, self.training, self.momentum, self.eps))


class Pooled(nn.Module):
    """The mean over places, then a norm over samples alone."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(CHANNELS, affine=False, momentum=1 / 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x.mean((2, 3)))


def norms(reentrant: bool = True, checkpointed: bool = True) -> nn.Sequential:
    """Eight layers; `reentrant`: with a reentrant checkpoint, whose backward cannot be split; `checkpointed`: with another."""
    layers: list[tuple[str, nn.Module]] = [
        ("stem", nn.Sequential(nn.Conv2d(3, CHANNELS, 3, padding=1), nn.BatchNorm2d(CHANNELS), nn.ReLU())),
        ("block", Residual(0.1)),
        ("twice", CalledTwice()),
        ("checkpointed", Residual(None, reentrant=False if checkpointed else None)),
        ("strided", Strided()),
        ("act", nn.Sequential(nn.Conv2d(CHANNELS, CHANNELS, 1), NormAct(CHANNELS, momentum=0.01))),
        ("again", Residual(0.3, reentrant=True if reentrant else None)),
        ("head", nn.Sequential(Pooled(), nn.Linear(CHANNELS, 3))),
    ]
    return nn.Sequential(OrderedDict(layers))


def splittable_norms() -> nn.Sequential:
    """`norms` for schedules that split the backward pass."""
    return norms(reentrant=False)


def plain_norms() -> nn.Sequential:
    """`norms` without checkpoints, which take long to load."""
    return norms(reentrant=False, checkpointed=False)


class Images(torch.utils.data.Dataset[tuple[Tensor, int]]):
    """23 images of three classes."""

    def __init__(self) -> None:
        self.images = torch.randn(23, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(2)) * 2 + 1

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.images[index], index % 3


def class_loss(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output, target)


class Counters(nn.Module):
    """Counts in integers, keeps a moving average in place and a prototype by assignment, and has a cache and a constant."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.register_buffer("samples", torch.zeros((), dtype=torch.int64))
        self.register_buffer("average", torch.zeros(width))
        self.register_buffer("prototype", torch.ones(width))
        self.register_buffer("positive", torch.zeros(width), persistent=False)
        self.register_buffer("cache", torch.ones(width), persistent=False)
        self.register_buffer("scale", torch.linspace(0.5, 1.5, width))

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x) * self.scale + 0.1 * self.average
        if self.training:
            with torch.no_grad():
                self.samples += len(x)
                self.average.mul_(0.9).add_(y.mean(0), alpha=0.1)
                self.prototype = 0.5 * self.prototype + 0.5 * y[-1]
                if len(x) > 2:
                    self.positive.add_((y > 0).sum(0))
        self.cache = torch.full_like(self.cache, 0.5)
        return y.tanh() + self.cache * self.prototype


class OwnNorm(nn.Module):
    """Batch norm in functions, over buffers of its own; PyTorch's kernel counts no version of what it writes."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(width))
        self.register_buffer("variance", torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return F.batch_norm(x, self.mean, self.variance, training=self.training)


def counters() -> nn.Sequential:
    """Eight layers over rows of 12 numbers."""
    flat, width = 3 * SIDE * SIDE, 12
    parts: list[nn.Module] = [nn.Sequential(nn.Flatten(), nn.Linear(flat, width))]
    parts += [Counters(width), nn.BatchNorm1d(width), Counters(width), OwnNorm(width), nn.Linear(width, width), Counters(width)]
    return nn.Sequential(*parts, nn.Linear(width, 3))


MODELS: dict[str, tuple[Any, Any, Any, str]] = {
    "norms": (norms, class_loss, Images, "*bn*"),
    "splittable norms": (splittable_norms, class_loss, Images, "*bn*"),
    "plain norms": (plain_norms, class_loss, Images, "*bn*"),
    "counters": (counters, class_loss, Images, "*.bias"),
}
"""As `ugly_models.MODELS`."""
