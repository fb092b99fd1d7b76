"""The arithmetic of the numerics contract: gradient norm, weights hash (raypar/NUMERICS.md, rules 7, 10)."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from itertools import chain

import torch
from torch import Tensor

from raypar.comm.buffer_pool import aligned_contiguous
from raypar.plan.microbatches import is_divisor
from raypar.plan.ownership import CANONICAL_PIECE


def square_gradients(gradients: Sequence[Tensor]) -> list[Tensor]:
    """The squares of all pieces of unscaled gradients, each a tensor without dims where the gradient lies."""
    with torch.no_grad():
        flat = [aligned_contiguous(gradient).view(-1) for gradient in gradients]
        pieces = [one.split(CANONICAL_PIECE) if len(one) > CANONICAL_PIECE else (one,) for one in flat]
        return [piece.dot(piece) for parts in pieces for piece in parts]


def read_together(numbers: Sequence[Tensor | float]) -> list[float]:
    """The numbers, of which tensors without dims are read at once: one wait for a device, however many it has."""
    found: list[float] = [0.0 if isinstance(number, Tensor) else float(number) for number in numbers]
    alike: dict[torch.device, dict[torch.dtype, dict[int, Tensor]]] = {}
    for place, number in enumerate(numbers):
        if isinstance(number, Tensor):
            alike.setdefault(number.device, {}).setdefault(number.dtype, {})[place] = number
    for by_dtype in alike.values():
        stacked = [torch.stack(list(tensors.values())).double() for tensors in by_dtype.values()]
        read = (torch.cat(stacked) if len(stacked) > 1 else stacked[0]).tolist()
        for place, number in zip(chain.from_iterable(by_dtype.values()), read, strict=True):
            found[place] = number
    return found


def gradient_norm_and_factor(total: float, count: float, clip_norm: float | None) -> tuple[float, float]:
    """(norm of the scaled gradient, the factor that scales and clips it). `total`: of the squares; `count`: of the loss.

    The norm is NaN where the count is no divisor: not positive, or infinite.
    """
    if not is_divisor(count):
        return math.nan, 0.0
    if not math.isfinite(total):
        return (math.inf if total == math.inf else math.nan), 0.0
    norm = math.sqrt(total) / count
    if clip_norm is None:
        return norm, 1.0 / count
    return norm, min(1.0, clip_norm / (norm + 1e-6)) / count


def weights_hash(parameters: Mapping[str, Tensor]) -> str:
    """sha256 over all parameters sorted by name: name, zero byte, contiguous little-endian bytes."""
    digest = hashlib.sha256()
    for name in sorted(parameters):
        flat = parameters[name].detach().cpu().reshape(-1).contiguous()
        digest.update(f"{name}\0".encode() + flat.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
