"""A small GoogLeNet for images of 8x8, in plain PyTorch: blocks of branches that do not need each other.

Szegedy et al. 2015 (arXiv:1409.4842), section 5. Several workers can compute the branches of a block at the same time, which
`jobs/inception_branches.yaml` says. Nothing here knows raypar.

    raypar plan jobs/inception_branches.yaml
    raypar train jobs/inception_branches.yaml
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Branch(nn.Module):
    """x [mb, inputs, h, w] -> [mb, outputs, h, w]: convolutions of these kernels, the first ones of `between` channels."""

    def __init__(self, inputs: int, between: int, outputs: int, kernels: tuple[int, ...]) -> None:
        super().__init__()
        channels = [inputs, *[between] * (len(kernels) - 1), outputs]
        self.convolutions = nn.Sequential(
            *(nn.Conv2d(channels[n], channels[n + 1], kernel, padding=kernel // 2) for n, kernel in enumerate(kernels))
        )
        for convolution in self.convolutions:
            nn.init.kaiming_normal_(convolution.weight)

    def forward(self, x: Tensor) -> Tensor:
        for convolution in self.convolutions:
            x = F.relu(convolution(x))
        return x


class Inception(nn.Module):
    """x [mb, inputs, h, w] -> [mb, 4 width, h, w]: four branches side by side."""

    def __init__(self, inputs: int, width: int) -> None:
        super().__init__()
        self.wide = Branch(inputs, width, width, (1, 5))
        self.deep = Branch(inputs, width, width, (1, 3, 3))
        self.middle = Branch(inputs, width, width, (1, 3))
        self.short = Branch(inputs, width, width, (1,))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.wide(x), self.deep(x), self.middle(x), self.short(x)], 1)


class GoogLeNet(nn.Module):
    """x [mb, 1, 8, 8] -> logits [mb, 10]: a convolution, two blocks, a linear layer."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, width, 3, padding=1)
        self.mixed1 = Inception(width, width)
        self.mixed2 = Inception(4 * width, width)
        self.head = nn.Linear(4 * width, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.stem(x))
        x = self.mixed2(self.mixed1(x))
        logits: Tensor = self.head(x.mean((2, 3)))
        return logits
