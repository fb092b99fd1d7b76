"""VGG for images of 8x8, in plain PyTorch: convolutions, then the dense layers that have most of its parameters.

The network of Simonyan and Zisserman 2015 (arXiv:1409.1556) in small. Its convolutions compute much and weigh little, its dense
layers the other way round. So several workers do best as replicas of the first and shards of the second (Krizhevsky 2014,
arXiv:1404.5997, section 3), which `jobs/vgg_hybrid.yaml` says. Nothing here knows raypar.

    raypar plan jobs/vgg_hybrid.yaml
    raypar train jobs/vgg_hybrid.yaml
"""

from __future__ import annotations

from itertools import pairwise

import torch.nn.functional as F
from torch import Tensor, nn


class Convolution(nn.Module):
    """x [mb, inputs, h, w] -> [mb, outputs, h, w], or half of h and w where it pools."""

    def __init__(self, inputs: int, outputs: int, pools: bool) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, 3, padding=1)
        nn.init.kaiming_normal_(self.conv.weight)
        self.pools = pools

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.conv(x))
        return F.max_pool2d(y, 2) if self.pools else y


class Classifier(nn.Module):
    """x [mb, features] -> logits [mb, classes]: two dense layers, and a third one for the classes."""

    def __init__(self, features: int, width: int, classes: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(features, width)
        self.fc2 = nn.Linear(width, width)
        self.fc3 = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.fc3(F.relu(self.fc2(F.relu(self.fc1(x)))))
        return logits


class Vgg(nn.Module):
    """x [mb, 1, 8, 8] -> logits [mb, 10]: six convolutions of `width` to 4 times `width` channels, dense layers of `dense`."""

    def __init__(self, width: int = 64, dense: int = 4096) -> None:
        super().__init__()
        channels = [1, width, width, 2 * width, 2 * width, 4 * width, 4 * width]
        self.convolutions = nn.ModuleList(Convolution(a, b, n % 2 == 1) for n, (a, b) in enumerate(pairwise(channels)))
        self.dense = nn.ModuleList([Classifier(channels[-1], dense, 10)])

    def forward(self, x: Tensor) -> Tensor:
        for convolution in self.convolutions:
            x = convolution(x)
        x = x.flatten(1)
        for layers in self.dense:
            x = layers(x)
        return x
