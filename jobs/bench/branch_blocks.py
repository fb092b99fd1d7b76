"""One block of Inception-v3, and one of GoogLeNet, between a stem and a head that take next to no time."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

SIZES = {"inception_v3": (768, 17), "googlenet": (512, 14)}
"""Block -> channels and height of what it reads."""


class Convolution(nn.Module):
    """A convolution with norm and activation, of any kernel."""

    def __init__(self, given: int, made: int, kernel: tuple[int, int] = (1, 1)) -> None:
        super().__init__()
        padding = (kernel[0] // 2, kernel[1] // 2)
        self.conv, self.bn = nn.Conv2d(given, made, kernel, padding=padding, bias=False), nn.BatchNorm2d(made)

    def forward(self, x: Tensor) -> Tensor:
        """[mb, given, h, w] -> [mb, made, h, w]."""
        return F.relu(self.bn(self.conv(x)), inplace=True)


class InceptionV3Block(nn.Module):
    """`Mixed_6b`: Szegedy et al. 2016 (arXiv:1512.00567), figure 6."""

    def __init__(self) -> None:
        super().__init__()
        self.branch1x1 = Convolution(768, 192)
        self.branch7x7_1, self.branch7x7_2 = Convolution(768, 128), Convolution(128, 128, (1, 7))
        self.branch7x7_3 = Convolution(128, 192, (7, 1))
        self.branch7x7dbl_1, self.branch7x7dbl_2 = Convolution(768, 128), Convolution(128, 128, (7, 1))
        self.branch7x7dbl_3, self.branch7x7dbl_4 = Convolution(128, 128, (1, 7)), Convolution(128, 128, (7, 1))
        self.branch7x7dbl_5, self.branch_pool = Convolution(128, 192, (1, 7)), Convolution(768, 192)

    def forward(self, x: Tensor) -> Tensor:
        """[mb, 768, h, w] -> [mb, 768, h, w]."""
        one = self.branch1x1(x)
        seven = self.branch7x7_3(self.branch7x7_2(self.branch7x7_1(x)))
        double = self.branch7x7dbl_3(self.branch7x7dbl_2(self.branch7x7dbl_1(x)))
        double = self.branch7x7dbl_5(self.branch7x7dbl_4(double))
        pool = self.branch_pool(F.avg_pool2d(x, 3, 1, 1))
        return torch.cat([one, seven, double, pool], 1)


class GoogLeNetBlock(nn.Module):
    """`inception4b`: Szegedy et al. 2015 (arXiv:1409.4842), table 1."""

    def __init__(self) -> None:
        super().__init__()
        self.branch1, self.branch4 = Convolution(512, 160), Convolution(512, 64)
        self.branch2 = nn.Sequential(Convolution(512, 112), Convolution(112, 224, (3, 3)))
        self.branch3 = nn.Sequential(Convolution(512, 24), Convolution(24, 64, (5, 5)))

    def forward(self, x: Tensor) -> Tensor:
        """[mb, 512, h, w] -> [mb, 512, h, w]."""
        pool = self.branch4(F.max_pool2d(x, 3, 1, 1))
        return torch.cat([self.branch1(x), self.branch2(x), self.branch3(x), pool], 1)


class Scale(nn.Module):
    """A factor for each channel: what the block reads has a gradient, as inside of a network."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(channels, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        """Of x's shape."""
        return x * self.weight


class OneBlock(nn.Module):
    """x [mb, channels, h, w] -> logits [mb, 10]."""

    def __init__(self, name: str) -> None:
        super().__init__()
        channels, _ = SIZES[name]
        self.stem = Scale(channels)
        self.block = {"inception_v3": InceptionV3Block, "googlenet": GoogLeNetBlock}[name]()
        self.head = nn.Linear(channels, 10)

    def forward(self, x: Tensor) -> Tensor:
        """The block's mean over the image, classified."""
        logits: Tensor = self.head(self.block(self.stem(x)).mean((2, 3)))
        return logits


class Samples:
    """Noise of a block's size, and a class for each."""

    def __init__(self, name: str, samples: int = 64) -> None:
        channels, height = SIZES[name]
        self.x = torch.randn(samples, channels, height, height, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.x[index], torch.tensor(index % 10)


def loss(logits: Tensor, y: Tensor) -> tuple[Tensor, int]:
    """(cross-entropy summed over samples, number of samples)."""
    return F.cross_entropy(logits, y, reduction="sum"), len(y)
