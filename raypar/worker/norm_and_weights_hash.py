"""The arithmetic of the numerics contract: gradient norm, weights hash (raypar/NUMERICS.md, rules 7, 10)."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from raypar.comm.buffer_pool import aligned_contiguous
from raypar.plan.exact_sum import ExactSum
from raypar.plan.ownership import CANONICAL_PIECE


def sum_squared_gradients(gradients: Sequence[Tensor]) -> ExactSum:
    """The exact sum of the squared pieces of unscaled gradients.

    All pieces are read back at once: one wait for the device, however many parameters there are.
    """
    if not gradients:
        return ExactSum()
    with torch.no_grad():
        flat = [aligned_contiguous(gradient).view(-1) for gradient in gradients]
        pieces = [one.split(CANONICAL_PIECE) if len(one) > CANONICAL_PIECE else (one,) for one in flat]
        return ExactSum.of(torch.stack([piece.dot(piece) for parts in pieces for piece in parts]).tolist())


def gradient_norm_and_factor(total: float, count: float, clip_norm: float | None) -> tuple[float, float]:
    """(norm of the scaled gradient, the factor that scales and clips it). `total`: of the squares; `count`: of the loss."""
    if count == 0 or not math.isfinite(total):
        return (math.nan if count == 0 else math.sqrt(total) if total == math.inf else math.nan), 0.0
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
