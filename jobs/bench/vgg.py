"""VGG-11 with the dense layers of its paper (Simonyan and Zisserman 2015, arXiv:1409.1556), and random images for it."""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

POOLED = (0, 1, 3, 5, 7)
"""Convolutions behind which the image is halved."""
STYLES = {
    **{f"convolutions.{n}.conv": ("column", "row")[n % 2] for n in range(8)},
    "dense.0": "column",
    "dense.1": "row",
    "dense.2": "gathered",
}
"""How layers are cut where they are on shards."""


class Convolution(nn.Module):
    """3 x 3, with ReLU, and half of h and w where it pools."""

    def __init__(self, given: int, made: int, pools: bool) -> None:
        super().__init__()
        self.conv, self.pools = nn.Conv2d(given, made, 3, padding=1), pools

    def forward(self, x: Tensor) -> Tensor:
        """[mb, given, h, w] -> [mb, made, h, w]."""
        x = F.relu(self.conv(x), inplace=True)
        return F.max_pool2d(x, 2) if self.pools else x


class Vgg11(nn.Module):
    """x [mb, 3, 224, 224] -> logits [mb, 1000]; 133 M parameters, of which the dense layers have 124 M."""

    def __init__(self) -> None:
        super().__init__()
        widths = [3, 64, 128, 256, 256, 512, 512, 512, 512]
        self.convolutions = nn.ModuleList(Convolution(a, b, n in POOLED) for n, (a, b) in enumerate(pairwise(widths)))
        self.dense = nn.ModuleList([nn.Linear(25088, 4096), nn.Linear(4096, 4096), nn.Linear(4096, 1000)])

    def forward(self, x: Tensor) -> Tensor:
        """Without dropout, which takes next to no time."""
        for convolution in self.convolutions:
            x = convolution(x)
        x = x.flatten(1)
        for number, layer in enumerate(self.dense):
            x = F.relu(layer(x)) if number < 2 else layer(x)
        return x


class Samples(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    """A few images of random numbers, again and again."""

    def __init__(self) -> None:
        self._images = torch.randn(4, 3, 224, 224, generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self._images[index % 4], torch.tensor(index % 1000)


def loss(logits: Tensor, target: Tensor) -> Tensor:
    """The mean over the microbatch."""
    mean: Tensor = F.cross_entropy(logits, target)
    return mean
