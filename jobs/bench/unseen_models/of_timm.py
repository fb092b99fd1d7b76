"""timm: of each of its model files one small architecture, on the smallest images that it takes."""

from __future__ import annotations

import inspect
import itertools
from functools import partial
from typing import Any

import timm
import torch
from torch import nn

from unseen_models.case import Batch, Case, noise

_SMALL = ("test", "atto", "femto", "zepto", "pico", "nano", "xxt", "xt", "xxs", "xs", "micro", "mini", "tiny", "_s0", "_t0",
          "small", "_t", "_s", "_m0", "b0", "18", "_0", "lite", "10", "26", "_b", "base")  # fmt: skip
"""What names of small architectures have in them, the smallest first."""
SHRUNK: tuple[dict[str, Any], ...] = ({"embed_dim": 96, "depth": 4, "num_heads": 3}, {})
"""Arguments that make a transformer small, and none: what takes the first is tried so."""
SIZES = (64, 128, 224, 256)
"""Sizes of images that are tried, and then the one that the architecture is made for."""
MOST_PARAMETERS = 40_000_000
"""Larger ones are not tried."""


def names() -> list[str]:
    """One architecture of each model file."""
    files = [sorted(timm.list_models(module=file), key=_rank) for file in timm.list_modules()]
    return [found[0] for found in files if found]


def case(name: str) -> Case:
    """An architecture, on images of the first size that it takes."""
    pretrained = timm.get_pretrained_cfg(name)
    channels, own_size = (pretrained.input_size[0], pretrained.input_size[-1]) if pretrained else (3, 384)
    for shrunk, size, is_told in itertools.product(SHRUNK, (*SIZES, own_size), (True, False)):
        given = shrunk | ({"img_size": size} if is_told else {})
        model = _takes(name, given, channels, size)
        if model is not None:
            field = next(iter(inspect.signature(model.forward).parameters))
            count = sum(parameter.numel() for parameter in model.parameters())
            if count > MOST_PARAMETERS:
                raise ValueError(f"it has {count / 1e6:.0f} M parameters")
            return Case(partial(timm.create_model, name, **given), partial(_batch, field, channels, size))
    raise ValueError("takes none of the sizes of images that were tried")


def _batch(field: str, channels: int, size: int) -> Batch:
    return {field: noise(2, channels, size, size)}


def _rank(name: str) -> tuple[int, int, str]:
    return next((index for index, part in enumerate(_SMALL) if part in name), len(_SMALL)), len(name), name


def _takes(name: str, given: dict[str, Any], channels: int, size: int) -> nn.Module | None:
    """The architecture without memory, if it takes images of this size."""
    try:
        with torch.device("meta"):
            model: nn.Module = timm.create_model(name, **given).train()
            model(torch.empty(2, channels, size, size))
    except Exception:
        return None
    return model
