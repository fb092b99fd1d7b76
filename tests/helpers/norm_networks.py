"""Convolutional networks with BatchNorm as people write them, small: residual, dense, inverted residual, with shared parts."""

from __future__ import annotations

import torch
from helpers.model_zoo import ZooModel, cross_entropy, images, sum_of_squares
from torch import Tensor, nn
from torch.nn import functional as F


class BasicBlock(nn.Module):
    """Two convolutions with norms around a skip, which writes in place."""

    def __init__(self, given: int, made: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(given, made, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(made)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(made, made, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(made)
        self.downsample = None
        if stride != 1 or given != made:
            self.downsample = nn.Sequential(nn.Conv2d(given, made, 1, stride, bias=False), nn.BatchNorm2d(made))

    def forward(self, x: Tensor) -> Tensor:
        identity = x if self.downsample is None else self.downsample(x)
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += identity
        return self.relu(out)


class ResNet(nn.Module):
    """A ResNet as torchvision writes it."""

    def __init__(self, p: float = 0.0) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(8)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, 2, 1)
        self.layer1 = nn.Sequential(BasicBlock(8, 8, 1), BasicBlock(8, 8, 1))
        self.layer2 = nn.Sequential(BasicBlock(8, 16, 2), BasicBlock(16, 16, 1))
        self.avgpool, self.dropout = nn.AdaptiveAvgPool2d((1, 1)), nn.Dropout(p)
        self.fc = nn.Linear(16, 7)

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer2(self.layer1(x))
        return self.fc(self.dropout(torch.flatten(self.avgpool(x), 1)))


class DenseLayer(nn.Module):
    """Reads all features so far, concatenated."""

    def __init__(self, given: int, growth: int) -> None:
        super().__init__()
        self.norm, self.conv = nn.BatchNorm2d(given, momentum=0.3), nn.Conv2d(given, growth, 3, padding=1, bias=False)

    def forward(self, features: list[Tensor]) -> Tensor:
        return self.conv(F.relu(self.norm(torch.cat(features, 1)), inplace=True))


class DenseNet(nn.Module):
    """Every layer reads the outputs of all before it."""

    def __init__(self, p: float = 0.0) -> None:
        super().__init__()
        self.stem, self.p = nn.Conv2d(3, 6, 3, padding=1), p
        self.layers = nn.ModuleList([DenseLayer(6 + 4 * i, 4) for i in range(5)])
        self.norm, self.head = nn.BatchNorm2d(26, momentum=None), nn.Linear(26, 7)

    def forward(self, x: Tensor) -> Tensor:
        features = [self.stem(x)]
        for layer in self.layers:
            features.append(F.dropout(layer(features), self.p, self.training))
        y = F.relu(self.norm(torch.cat(features, 1)), inplace=True)
        return self.head(F.adaptive_avg_pool2d(y, 1).flatten(1))


class InvertedResidual(nn.Module):
    """Expansion, depthwise convolution, squeeze and excitation, projection."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.expand = nn.Sequential(
            nn.Conv2d(width, 16, 1, bias=False), nn.BatchNorm2d(16, eps=1e-3, momentum=0.01), nn.Hardswish(inplace=True)
        )
        self.depth = nn.Sequential(
            nn.Conv2d(16, 16, 3, padding=1, groups=16, bias=False), nn.BatchNorm2d(16), nn.Hardswish(True)
        )
        self.squeeze, self.excite = nn.Conv2d(16, 4, 1), nn.Conv2d(4, 16, 1)
        self.project = nn.Sequential(nn.Conv2d(16, width, 1, bias=False), nn.BatchNorm2d(width))

    def forward(self, x: Tensor) -> Tensor:
        y = self.depth(self.expand(x))
        y = y * F.hardsigmoid(self.excite(F.relu(self.squeeze(F.adaptive_avg_pool2d(y, 1)))))
        return x + self.project(y)


class MobileNet(nn.Module):
    """Images in channels_last."""

    def __init__(self, p: float = 0.0) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.BatchNorm2d(8), *(InvertedResidual(8) for _ in range(4)))
        self.classifier = nn.Sequential(
            nn.Linear(8, 16), nn.Hardswish(inplace=True), nn.Dropout(p, inplace=True), nn.Linear(16, 7)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.features(x.contiguous(memory_format=torch.channels_last))
        return self.classifier(x.mean([2, 3]))


class Siamese(nn.Module):
    """One encoder reads two images; a view goes far, transposed and expanded; it returns None and its input too."""

    def __init__(self, p: float = 0.0) -> None:
        super().__init__()
        self.encoder = nn.ModuleList(
            [
                nn.Sequential(nn.Conv2d(3, 6, 3), nn.GroupNorm(2, 6), nn.ReLU(True)),
                nn.Sequential(nn.Conv2d(6, 6, 3), nn.GroupNorm(2, 6)),
            ]
        )
        self.drop, self.heads = nn.Dropout(p), nn.ModuleList(nn.Linear(6, 6) for _ in range(3))

    def encode(self, x: Tensor) -> Tensor:
        for part in self.encoder:
            x = part(x)
        return x.flatten(2).transpose(1, 2)

    def forward(self, x: Tensor) -> dict[str, Tensor | None]:
        one, other = self.encode(x), self.encode(x.flip(-1))
        rows = one.mean(1, keepdim=True).expand(-1, one.shape[1], -1)
        mixed = self.heads[0](self.drop(one)) * other + rows
        mixed = self.heads[1](self.drop(rows)).sigmoid() * mixed
        return {"out": self.heads[2](mixed) + one * one, "none": None, "input": x, "rows": rows[:, ::2]}


def _network(kind: type[nn.Module], loss: object = cross_entropy, size: int = 12) -> ZooModel:
    return ZooModel(kind, lambda: {"x": images(3, size)}, lambda: {"x": images(2, size)}, loss)  # type: ignore[arg-type]


NETWORKS = {
    "small_resnet": _network(ResNet),
    "small_densenet": _network(DenseNet),
    "small_mobilenet": _network(MobileNet),
    "siamese": _network(Siamese, sum_of_squares),
}
