"""ResNet-18 with batch norm for images of 8x8, in plain PyTorch. Nothing here knows raypar.

The network of He et al. 2016 (arXiv:1512.03385) with the stem for small images: one 3x3 convolution, no pooling. raypar takes
the module as it is, and may cut it before every element of `blocks` and before `head`.

    raypar train jobs/resnet_digits.yaml
    raypar export RUN --out weights.pt && python -m examples.accuracy jobs/resnet_digits.yaml weights.pt
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn


class Block(nn.Module):
    """x [mb, inputs, h, w] -> [mb, outputs, h / stride, w / stride]: two 3x3 convolutions, and x or its projection."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.project: nn.Module = nn.Identity()
        if stride > 1 or inputs != outputs:
            self.project = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(y)) + self.project(x))


class ResNet18(nn.Module):
    """x [mb, 1, h, w] -> logits [mb, 10]: two blocks each of `width`, 2, 4 and 8 times `width` channels."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU())
        self.blocks = nn.ModuleList()
        channels = width
        for index in range(8):
            outputs, stride = width * 2 ** (index // 2), 2 if index in (2, 4, 6) else 1
            self.blocks.append(Block(channels, outputs, stride))
            channels = outputs
        self.head = nn.Linear(channels, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(x.mean((2, 3)))
        return logits
