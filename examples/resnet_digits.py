"""ResNet-18 with batch norm on scikit-learn's digits (1,797 images of 8x8), in plain PyTorch. Nothing here knows raypar.

The network of He et al. 2016 (arXiv:1512.03385) with the stem for small images: one 3x3 convolution, no pooling. `layers`
returns `stem`, `block0` to `block7`, `head`; a residual block is one module, so a pipeline may be cut before and after each.

    raypar train jobs/resnet_digits.yaml
    raypar export RUN --out resnet.safetensors && python -m examples.resnet_digits resnet.safetensors     # the accuracy
"""

from __future__ import annotations

import importlib.util
import math
import sys
from collections import OrderedDict
from pathlib import Path

import numpy
import torch
import torch.nn.functional as F
from torch import Tensor, nn

CLASSES = 10


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


def layers(width: int = 64) -> nn.Sequential:
    """ResNet-18: two blocks each of `width`, 2, 4 and 8 times `width` channels."""
    stem = nn.Sequential(nn.Conv2d(1, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU())
    parts: list[tuple[str, nn.Module]] = [("stem", stem)]
    channels = width
    for index in range(8):
        outputs, stride = width * 2 ** (index // 2), 2 if index in (2, 4, 6) else 1
        parts.append((f"block{index}", Block(channels, outputs, stride)))
        channels = outputs
    parts.append(("head", nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, CLASSES))))
    return nn.Sequential(OrderedDict(parts))


def read_rows() -> Tensor:
    """The data [1797, 65] of `sklearn.datasets.load_digits`: 64 grey values from 0 to 16, and the class.

    Read from its file: importing scikit-learn takes seconds in every worker, and sets environment variables.
    """
    package = importlib.util.find_spec("sklearn")
    if package is None or package.origin is None:
        raise ModuleNotFoundError("the digits come with scikit-learn: pip install scikit-learn")
    file = Path(package.origin).parent / "datasets" / "data" / "digits.csv.gz"
    return torch.from_numpy(numpy.loadtxt(file, delimiter=",", dtype=numpy.float32))


class Digits(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    """Sample: image [1, 8, 8] in [-1, 1], class. Every fifth image is kept for validation."""

    raypar_thread_safe = True

    def __init__(self, split: str) -> None:
        rows = read_rows()
        chosen = [i for i in range(len(rows)) if (i % 5 == 0) == (split == "validation")]
        self.images = rows[chosen, :64].reshape(-1, 1, 8, 8) / 8 - 1
        self.classes = rows[chosen, 64].long()

    def __len__(self) -> int:
        return len(self.classes)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.images[index], self.classes[index]


def digits(split: str = "train") -> Digits:
    """The data set: `train` (1,437 images) or `validation` (360)."""
    return Digits(split)


def loss(output: Tensor, target: Tensor) -> Tensor:
    """Cross-entropy of logits [mb, 10] and classes [mb]."""
    return F.cross_entropy(output, target)


def cosine(step: int, warmup: int, total: int) -> float:
    """Learning-rate factor: linear warmup, then a cosine to 0."""
    return min((step + 1) / warmup, 0.5 * (1 + math.cos(math.pi * step / total)))


@torch.no_grad()
def accuracy(model: nn.Module, data: Digits) -> float:
    """The share of images whose class the model finds, by its running statistics."""
    model.eval()
    return float((model(data.images).argmax(1) == data.classes).float().mean())


def main(path: str) -> None:
    """Print the accuracy of exported weights on the validation images."""
    from safetensors.torch import load_file

    model = layers()
    model.load_state_dict(load_file(path))
    print(f"accuracy on {len(digits('validation'))} validation images: {accuracy(model, digits('validation')):.1%}")


if __name__ == "__main__":
    main(sys.argv[1])
