"""Networks for images in the idioms of torchvision, small: bottlenecks, dense blocks, branches with heads beside, inverted
residuals with squeeze and excitation, segmentation by the features of several depths."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils import checkpoint


class ConvNormActivation(nn.Sequential):
    """A convolution with norm and activation, as a subclass of `nn.Sequential` that knows its width."""

    def __init__(
        self,
        given: int,
        made: int,
        size: int = 3,
        stride: int = 1,
        groups: int = 1,
        norm: Callable[[int], nn.Module] = nn.BatchNorm2d,
        activation: type[nn.Module] | None = nn.ReLU,
    ) -> None:
        layers = [nn.Conv2d(given, made, size, stride, size // 2, groups=groups, bias=False), norm(made)]
        super().__init__(*layers, *([activation(inplace=True)] if activation else []))
        self.out_channels = made


# -- residual ----------------------------------------------------------------------------------------------------------------


class Bottleneck(nn.Module):
    """1x1, 3x3, 1x1 with one activation module that is called three times, around a skip."""

    expansion = 4

    def __init__(self, given: int, width: int, stride: int = 1, downsample: nn.Module | None = None) -> None:
        super().__init__()
        made = width * self.expansion
        self.conv1, self.bn1 = nn.Conv2d(given, width, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width)
        self.conv3, self.bn3 = nn.Conv2d(width, made, 1, bias=False), nn.BatchNorm2d(made)
        self.relu = nn.ReLU(inplace=True)
        self.downsample, self.stride = downsample, stride

    def forward(self, x: Tensor) -> Tensor:
        identity = x
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.relu(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        if self.downsample is not None:
            identity = self.downsample(x)
        out += identity
        return self.relu(out)


class BottleneckResNet(nn.Module):
    """Four stages of bottlenecks, with the last norm of each block starting at zero."""

    def __init__(self, blocks: tuple[int, ...] = (2, 2, 2, 1)) -> None:
        super().__init__()
        self.width = 4
        self.conv1, self.bn1 = nn.Conv2d(3, 4, 7, 2, 3, bias=False), nn.BatchNorm2d(4)
        self.relu, self.maxpool = nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)
        for number, count in enumerate(blocks):
            setattr(self, f"layer{number + 1}", self._layer(2 << min(number, 2), count, stride=1 + (number > 0)))
        self.avgpool, self.fc = nn.AdaptiveAvgPool2d((1, 1)), nn.Linear(self.width, 7)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            elif isinstance(module, Bottleneck):
                nn.init.constant_(module.bn3.weight, 0.1)

    def _layer(self, width: int, count: int, stride: int) -> nn.Sequential:
        made = width * Bottleneck.expansion
        downsample = nn.Sequential(nn.Conv2d(self.width, made, 1, stride, bias=False), nn.BatchNorm2d(made))
        first = Bottleneck(self.width, width, stride, downsample)
        self.width = made
        return nn.Sequential(first, *(Bottleneck(made, width) for _ in range(1, count)))

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        for number in range(1, 5):
            x = getattr(self, f"layer{number}")(x)
        return self.fc(torch.flatten(self.avgpool(x), 1))


# -- dense -------------------------------------------------------------------------------------------------------------------


class DenseLayer(nn.Module):
    """Takes a tensor or a list of all before it; the bottleneck is checkpointed where memory shall be saved."""

    def __init__(self, given: int, growth: int, p: float, saves_memory: bool) -> None:
        super().__init__()
        self.norm1, self.relu1 = nn.BatchNorm2d(given), nn.ReLU(inplace=True)
        self.conv1 = nn.Conv2d(given, 2 * growth, 1, bias=False)
        self.norm2, self.relu2 = nn.BatchNorm2d(2 * growth), nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(2 * growth, growth, 3, padding=1, bias=False)
        self.drop_rate, self.saves_memory = float(p), saves_memory

    def bottleneck(self, *features: Tensor) -> Tensor:
        return self.conv1(self.relu1(self.norm1(torch.cat(features, 1))))

    def forward(self, given: Tensor | list[Tensor]) -> Tensor:
        features = [given] if isinstance(given, Tensor) else given
        if self.saves_memory and any(each.requires_grad for each in features):
            narrow = checkpoint.checkpoint(self.bottleneck, *features, use_reentrant=False)
        else:
            narrow = self.bottleneck(*features)
        made = self.conv2(self.relu2(self.norm2(narrow)))
        return F.dropout(made, p=self.drop_rate, training=self.training) if self.drop_rate > 0 else made


class DenseBlock(nn.ModuleDict):
    """A dict of layers that is called, and goes through its items."""

    def __init__(self, count: int, given: int, growth: int, p: float, saves_memory: bool) -> None:
        super().__init__()
        for number in range(count):
            self.add_module(f"denselayer{number + 1}", DenseLayer(given + number * growth, growth, p, saves_memory))

    def forward(self, first: Tensor) -> Tensor:
        features = [first]
        for layer in self.values():
            features.append(layer(features))
        return torch.cat(features, 1)


class Transition(nn.Sequential):
    """Halves the width and the size, by names."""

    def __init__(self, given: int, made: int) -> None:
        super().__init__()
        self.norm, self.relu = nn.BatchNorm2d(given), nn.ReLU(inplace=True)
        self.conv, self.pool = nn.Conv2d(given, made, 1, bias=False), nn.AvgPool2d(2, 2)


class DenseBlocks(nn.Module):
    """Two dense blocks with a transition between them, in one named sequence."""

    def __init__(self, p: float = 0.0, saves_memory: bool = False) -> None:
        super().__init__()
        stem = [("conv0", nn.Conv2d(3, 8, 3, 2, 1, bias=False)), ("norm0", nn.BatchNorm2d(8)), ("relu0", nn.ReLU(inplace=True))]
        self.features = nn.Sequential(OrderedDict(stem))
        width = 8
        for number, count in enumerate((3, 2)):
            self.features.add_module(f"denseblock{number + 1}", DenseBlock(count, width, 4, p, saves_memory))
            width += 4 * count
            if number == 0:
                self.features.add_module("transition1", Transition(width, width // 2))
                width //= 2
        self.features.add_module("norm5", nn.BatchNorm2d(width))
        self.classifier = nn.Linear(width, 7)

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.features(x), inplace=True)
        return self.classifier(torch.flatten(F.adaptive_avg_pool2d(out, (1, 1)), 1))


# -- branches ----------------------------------------------------------------------------------------------------------------


class Heads(NamedTuple):
    """What a network with heads beside returns in training."""

    logits: Tensor
    aux2: Tensor | None
    aux1: Tensor | None


class Branches(nn.Module):
    """Four ways from one value, among them two convolutions of other shapes side by side."""

    def __init__(self, given: int, block: Callable[..., nn.Module]) -> None:
        super().__init__()
        self.branch1x1 = block(given, 4, 1)
        self.branch3x3_1, self.branch3x3_2a, self.branch3x3_2b = block(given, 4, 1), block(4, 3, 3), block(4, 3, 1)
        self.branch5x5 = nn.Sequential(block(given, 2, 1), block(2, 4, 5))
        self.branch_pool = nn.Sequential(nn.MaxPool2d(3, 1, 1, ceil_mode=True), block(given, 2, 1))

    def _ways(self, x: Tensor) -> list[Tensor]:
        narrow = self.branch3x3_1(x)
        both = torch.cat([self.branch3x3_2a(narrow), self.branch3x3_2b(narrow)], 1)
        return [self.branch1x1(x), both, self.branch5x5(x), self.branch_pool(x)]

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat(self._ways(x), 1)


class HeadBeside(nn.Module):
    """A classifier on features of the middle."""

    def __init__(self, given: int, p: float) -> None:
        super().__init__()
        self.conv, self.fc1, self.fc2 = ConvNormActivation(given, 4, 1), nn.Linear(64, 16), nn.Linear(16, 7)
        self.dropout = nn.Dropout(p)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.flatten(self.conv(F.adaptive_avg_pool2d(x, (4, 4))), 1)
        return self.fc2(self.dropout(F.relu(self.fc1(x), inplace=True)))


class Inception(nn.Module):
    """Branches, channels normalised one by one, and heads that exist in training only."""

    def __init__(self, p: float = 0.0, aux_logits: bool = True) -> None:
        super().__init__()
        block = partial(ConvNormActivation, norm=partial(nn.BatchNorm2d, eps=0.001))
        self.transform_input, self.aux_logits = True, aux_logits
        self.stem, self.maxpool1 = block(3, 8, 3, 2), nn.MaxPool2d(3, 2, ceil_mode=True)
        self.mixed_a, self.mixed_b, self.mixed_c = Branches(8, block), Branches(16, block), Branches(16, block)
        self.aux1: nn.Module | None = HeadBeside(16, p) if aux_logits else None
        self.aux2: nn.Module | None = HeadBeside(16, p) if aux_logits else None
        self.avgpool, self.dropout, self.fc = nn.AdaptiveAvgPool2d((1, 1)), nn.Dropout(p), nn.Linear(16, 7)
        for module in self.modules():
            if isinstance(module, (nn.Conv2d, nn.Linear)):
                nn.init.trunc_normal_(module.weight, mean=0.0, std=0.2, a=-2, b=2)

    def _transform_input(self, x: Tensor) -> Tensor:
        if not self.transform_input:
            return x
        one = torch.unsqueeze(x[:, 0], 1) * (0.229 / 0.5) + (0.485 - 0.5) / 0.5
        two = torch.unsqueeze(x[:, 1], 1) * (0.224 / 0.5) + (0.456 - 0.5) / 0.5
        three = torch.unsqueeze(x[:, 2], 1) * (0.225 / 0.5) + (0.406 - 0.5) / 0.5
        return torch.cat((one, two, three), 1)

    def _forward(self, x: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
        x = self.mixed_a(self.maxpool1(self.stem(x)))
        aux1 = self.aux1(x) if self.aux1 is not None and self.training else None
        x = self.mixed_b(x)
        aux2 = self.aux2(x) if self.aux2 is not None and self.training else None
        x = self.dropout(torch.flatten(self.avgpool(self.mixed_c(x)), 1))
        return self.fc(x), aux2, aux1

    @torch.jit.unused
    def eager_outputs(self, x: Tensor, aux2: Tensor | None, aux1: Tensor | None) -> Heads | Tensor:
        return Heads(x, aux2, aux1) if self.training and self.aux_logits else x

    def forward(self, x: Tensor) -> Heads | Tensor:
        made, aux2, aux1 = self._forward(self._transform_input(x))
        if torch.jit.is_scripting():
            return Heads(made, aux2, aux1)
        return self.eager_outputs(made, aux2, aux1)


# -- inverted residuals ------------------------------------------------------------------------------------------------------


class SqueezeExcitation(nn.Module):
    """A factor for each channel, of the means of all."""

    def __init__(self, width: int, squeezed: int) -> None:
        super().__init__()
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc1, self.fc2 = nn.Conv2d(width, squeezed, 1), nn.Conv2d(squeezed, width, 1)
        self.activation, self.scale_activation = nn.ReLU(), nn.Hardsigmoid()

    def _scale(self, x: Tensor) -> Tensor:
        return self.scale_activation(self.fc2(self.activation(self.fc1(self.avgpool(x)))))

    def forward(self, x: Tensor) -> Tensor:
        return self._scale(x) * x


class InvertedResidual(nn.Module):
    """A sequence that is as long as it must be, and a skip where the shapes allow one."""

    def __init__(self, given: int, wide: int, made: int, stride: int, excites: bool, activation: type[nn.Module]) -> None:
        super().__init__()
        norm = partial(nn.BatchNorm2d, eps=0.001, momentum=0.01)
        layers: list[nn.Module] = []
        if wide != given:
            layers.append(ConvNormActivation(given, wide, 1, norm=norm, activation=activation))
        layers.append(ConvNormActivation(wide, wide, 5, stride, groups=wide, norm=norm, activation=activation))
        if excites:
            layers.append(SqueezeExcitation(wide, 4))
        layers.append(ConvNormActivation(wide, made, 1, norm=norm, activation=None))
        self.block, self.use_res_connect = nn.Sequential(*layers), stride == 1 and given == made

    def forward(self, x: Tensor) -> Tensor:
        result = self.block(x)
        if self.use_res_connect:
            result += x
        return result


class InvertedResiduals(nn.Module):
    """Inverted residuals of many settings, ReLU first and Hardswish later."""

    settings = (
        (8, 8, 8, 2, True, nn.ReLU),
        (8, 16, 8, 1, False, nn.ReLU),
        (8, 24, 12, 2, True, nn.Hardswish),
        (12, 24, 12, 1, True, nn.Hardswish),
    )

    def __init__(self, p: float = 0.0) -> None:
        super().__init__()
        blocks = [InvertedResidual(*setting) for setting in self.settings]
        first, last = ConvNormActivation(3, 8, 3, 2, activation=nn.Hardswish), ConvNormActivation(12, 32, 1)
        self.features, self.avgpool = nn.Sequential(first, *blocks, last), nn.AdaptiveAvgPool2d(1)
        self.classifier = nn.Sequential(
            nn.Linear(32, 24), nn.Hardswish(inplace=True), nn.Dropout(p=p, inplace=True), nn.Linear(24, 7)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(torch.flatten(self.avgpool(self.features(x)), 1))


# -- segmentation ------------------------------------------------------------------------------------------------------------


class FeaturesOf(nn.ModuleDict):
    """Goes through the children of a backbone and returns some of the values between them by new names."""

    def __init__(self, backbone: nn.Sequential, wanted: dict[str, str]) -> None:
        super().__init__(OrderedDict(backbone.named_children()))
        self.wanted = wanted

    def forward(self, x: Tensor) -> OrderedDict[str, Tensor]:
        found = OrderedDict()
        for name, module in self.items():
            x = module(x)
            if name in self.wanted:
                found[self.wanted[name]] = x
        return found


class PooledOverAll(nn.Sequential):
    """The mean over the image, made as large as the image again."""

    def __init__(self, given: int, made: int) -> None:
        super().__init__(nn.AdaptiveAvgPool2d(1), nn.Conv2d(given, made, 1), nn.GroupNorm(2, made), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        size = x.shape[-2:]
        for module in self:
            x = module(x)
        return F.interpolate(x, size=size, mode="bilinear", align_corners=False)


class PyramidOfDilations(nn.Module):
    """Convolutions of several dilations and the mean over all, side by side."""

    def __init__(self, given: int, made: int, p: float) -> None:
        super().__init__()
        dilated = [nn.Sequential(nn.Conv2d(given, made, 3, padding=d, dilation=d), nn.BatchNorm2d(made)) for d in (1, 2)]
        self.convs = nn.ModuleList([*dilated, PooledOverAll(given, made)])
        self.project = nn.Sequential(nn.Conv2d(3 * made, made, 1, bias=False), nn.BatchNorm2d(made), nn.ReLU(), nn.Dropout(p))

    def forward(self, x: Tensor) -> Tensor:
        return self.project(torch.cat([conv(x) for conv in self.convs], dim=1))


class Segmentation(nn.Module):
    """A backbone, two heads on features of other depths, and a dict of what they return, as large as the image."""

    def __init__(self, p: float = 0.0) -> None:
        super().__init__()
        widths = (3, 6, 8, 10, 12)
        names = ("stem", "layer1", "layer2", "layer3")
        parts = [ConvNormActivation(a, b, 3, 2 if i < 2 else 1) for i, (a, b) in enumerate(itertools.pairwise(widths))]
        backbone = nn.Sequential(OrderedDict(zip(names, parts, strict=True)))
        self.backbone = FeaturesOf(backbone, {"layer2": "aux", "layer3": "out"})
        self.classifier = nn.Sequential(PyramidOfDilations(12, 8, p), nn.Conv2d(8, 5, 1))
        self.aux_classifier = nn.Sequential(nn.Conv2d(10, 4, 3, padding=1), nn.ReLU(), nn.Dropout(p), nn.Conv2d(4, 5, 1))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        size, features = x.shape[-2:], self.backbone(x)
        result = OrderedDict()
        result["out"] = F.interpolate(self.classifier(features["out"]), size=size, mode="bilinear", align_corners=False)
        result["aux"] = F.interpolate(self.aux_classifier(features["aux"]), size=size, mode="bilinear", align_corners=False)
        return result
