"""What a try needs: a model and a batch. Beside it what many packages ask for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Case:
    """One model to try."""

    make: Callable[[], nn.Module]
    """Makes it, with random weights."""
    batch: Callable[[], Batch]
    """A batch whose fields have the names of the forward's parameters."""


def ids(batch: int, length: int, vocabulary: int = 99, *, least: int = 3) -> Tensor:
    """Token ids that depend on the sizes alone."""
    return torch.randint(least, vocabulary, (batch, length), generator=torch.Generator().manual_seed(length))


def noise(*shape: int) -> Tensor:
    """Random numbers that depend on the shape alone."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def calls(kind: Callable[..., nn.Module], batch: Mapping[str, Tensor], **given: Any) -> Case:
    """The case of `kind(**given)`, and a batch that is there."""
    return Case(lambda: kind(**given), lambda: dict(batch))


_LIBRARIES: list[torch.library.Library] = []
"""Keeps the operations' definitions alive."""


def let_torchvision_be_imported() -> None:
    """Define the two operations that the wheel of torchvision on PyPI expects beside a PyTorch for CPUs, if it has them not."""
    try:
        import torchvision  # noqa: F401
    except ModuleNotFoundError:
        return
    except RuntimeError:
        if not _LIBRARIES:
            library = torch.library.Library("torchvision", "DEF")
            library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
            library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
            _LIBRARIES.append(library)
