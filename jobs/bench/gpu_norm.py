"""One GPU: the kernel of the gradient's norm beside the same arithmetic on the processor, bit for bit, and a plain sum."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from raypar.worker.norm_and_weights_hash import read_together, square_gradients
from raypar.worker.squares_on_device import NUMBERS, compiled_kernel, squares_by_operations

SIZES = (1, 255, 256, 257, 32_767, 32_768, 32_769, 1_000_003, 50_257 * 768)
"""Elements of gradients; the last is GPT-2's table of embeddings."""
OFFSETS = (0, 1, 3, 33, 63)
"""How many elements behind an aligned address all gradients begin."""


def measure(device: torch.device) -> list[dict[str, Any]]:
    """A row for each dtype and offset."""
    rows = []
    for dtype in NUMBERS:
        gradients = _gradients(dtype)
        want = squares_by_operations(gradients).tolist()
        plain = [piece.double().square().sum().item() for one in gradients for piece in one.split(32_768)]
        for offset in OFFSETS:
            found = read_together(square_gradients([_at(one.to(device), offset) for one in gradients]))
            rows.append(
                {
                    "dtype": str(dtype).removeprefix("torch."),
                    "offset": offset,
                    "pieces": len(want),
                    "kernel": device.type == "cuda" and compiled_kernel(device.index or 0, dtype) is not None,
                    "equal": sum(one == other for one, other in zip(found, want, strict=True)),
                    "worst": max(abs(one - other) / other for one, other in zip(found, plain, strict=True)),
                }
            )
    return rows


def _gradients(dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(size, generator=generator, dtype=dtype) * math.exp(place) for place, size in enumerate(SIZES)]


def _at(gradient: Tensor, offset: int) -> Tensor:
    room = torch.empty(gradient.numel() + offset, dtype=gradient.dtype, device=gradient.device)
    return room[offset:].copy_(gradient)
