"""A U-Net that finds disks and squares in noise, in plain PyTorch; the images are drawn here. Nothing here knows raypar.

The network of Ronneberger et al. 2015 (arXiv:1505.04597) with batch norm. Its skips go from the stages of the encoder straight
to those of the decoder.

    raypar train jobs/unet_shapes.yaml
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

SIZE, CLASSES = 32, 3
"""Pixels a side; background, disk, square."""


def convolutions(inputs: int, outputs: int) -> nn.Sequential:
    """Two 3x3 convolutions, each with batch norm and ReLU."""
    parts: list[nn.Module] = []
    for channels in (inputs, outputs):
        parts += [nn.Conv2d(channels, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)]
    return nn.Sequential(*parts)


class UNet(nn.Module):
    """x [mb, 1, h, w] -> logits [mb, 3, h, w]; h and w are multiples of 8 (2 to the power of `depth`)."""

    def __init__(self, width: int = 16, depth: int = 3) -> None:
        super().__init__()
        widths = [width * 2**level for level in range(depth + 1)]
        self.downs = nn.ModuleList(convolutions(a, b) for a, b in zip([1, *widths], widths, strict=False))
        self.ups = nn.ModuleList(nn.ConvTranspose2d(2 * w, w, 2, stride=2) for w in reversed(widths[:-1]))
        self.joins = nn.ModuleList(convolutions(2 * w, w) for w in reversed(widths[:-1]))
        self.logits = nn.Conv2d(width, CLASSES, 1)

    def forward(self, x: Tensor) -> Tensor:
        skips: list[Tensor] = []
        for level, down in enumerate(self.downs):
            x = down(F.max_pool2d(x, 2) if level else x)
            skips.append(x)
        skips.pop()
        for up, join in zip(self.ups, self.joins, strict=True):
            x = join(torch.cat([skips.pop(), up(x)], 1))
        logits: Tensor = self.logits(x)
        return logits


class Shapes(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    """Sample: image [1, 32, 32] of noise with three shapes, and the class of every pixel [32, 32]. Made from the index."""

    def __init__(self, samples: int = 2000, first: int = 0) -> None:
        self.samples, self.first = samples, first

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(self.first + index)
        across, down = torch.meshgrid(torch.arange(SIZE), torch.arange(SIZE), indexing="xy")
        image, classes = torch.zeros(SIZE, SIZE), torch.zeros(SIZE, SIZE, dtype=torch.long)
        for _ in range(3):
            kind, x, y, radius = (
                int(torch.randint(a, b, (), generator=generator)) for a, b in [(1, 3), (4, 28), (4, 28), (3, 8)]
            )
            far = torch.maximum((across - x).abs(), (down - y).abs())  # a square; a disk of the same extent:
            inside = far <= radius if kind == 2 else (across - x) ** 2 + (down - y) ** 2 <= radius**2
            image[inside] = 1.0 + torch.rand((), generator=generator)
            classes[inside] = kind
        return (image + 0.5 * torch.randn(SIZE, SIZE, generator=generator)).unsqueeze(0), classes


def loss(output: Tensor, target: Tensor) -> Tensor:
    """Cross-entropy of logits [mb, classes, h, w] and the classes of the pixels [mb, h, w]."""
    return F.cross_entropy(output, target)
