"""scikit-learn's handwritten digits (1,797 images of 8x8) as a data set; they come with the package, nothing is downloaded.

`pip install scikit-learn`. Used by `jobs/resnet_digits.yaml` and `jobs/vit_digits.yaml`.
"""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path

import numpy
import torch
import torch.nn.functional as F
from torch import Tensor


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
