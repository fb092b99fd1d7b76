"""The arithmetic of the numerics contract: gradient norm, weights hash (raypar/NUMERICS.md, rules 7, 10)."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from itertools import islice

import torch
from torch import Tensor

from raypar.comm.buffer_pool import aligned_contiguous
from raypar.plan.microbatches import is_divisor
from raypar.worker.squares_on_device import dots_of_pieces, squares_on_device


@torch.no_grad()
def square_gradients(gradients: Sequence[Tensor]) -> list[Tensor]:
    """The squares of all pieces of unscaled gradients, in few tensors where these lie: 124 M parameters have 3,900."""
    if all(gradient.is_cpu for gradient in gradients):
        dots = dots_of_pieces([aligned_contiguous(gradient) for gradient in gradients])
        return [torch.stack(dots)] if dots else []
    return squares_on_device([aligned_contiguous(gradient) for gradient in gradients])


def read_together(numbers: Sequence[Tensor | float]) -> list[float]:
    """The numbers, of which tensors with one dim have several, in order. Tensors are read at once: one wait for a device,
    however many it has."""
    alike: dict[torch.device, dict[tuple[torch.dtype, bool], dict[int, Tensor]]] = {}
    for place, number in enumerate(numbers):
        if isinstance(number, Tensor):
            alike.setdefault(number.device, {}).setdefault((number.dtype, number.dim() > 0), {})[place] = number
    read: dict[int, list[float]] = {}
    for by_kind in alike.values():
        joined = [torch.stack(list(some.values())) for (_, several), some in by_kind.items() if not several]
        joined += [one for (_, several), some in by_kind.items() if several for one in some.values()]
        values = iter((torch.cat([one.double() for one in joined]) if len(joined) > 1 else joined[0].double()).tolist())
        for order in (False, True):
            for (_, several), some in by_kind.items():
                for place, tensor in some.items() if several == order else ():
                    read[place] = list(islice(values, tensor.numel()))
    return [value for place, number in enumerate(numbers) for value in read.get(place) or _numbers_of(number)]


def _numbers_of(number: Tensor | float) -> list[float]:
    return [] if isinstance(number, Tensor) else [float(number)]


def gradient_norm_and_factor(total: float, count: float, clip_norm: float | None, exponent: int = 0) -> tuple[float, float]:
    """(norm of the gradient of the mean loss, the factor that makes it and clips it). `total`: of the squares; `count`: of the
    loss; `exponent`: the gradient is 2^exponent times that of the loss.

    The norm is NaN where the count is no divisor: not positive, or infinite.
    """
    if not is_divisor(count):
        return math.nan, 0.0
    if not math.isfinite(total):
        return (math.inf if total == math.inf else math.nan), 0.0
    norm = math.ldexp(math.sqrt(total), -exponent) / count
    factor = 1.0 / count if clip_norm is None else min(1.0, clip_norm / (norm + 1e-6)) / count
    return norm, math.ldexp(factor, -exponent)


def weights_hash(parameters: Mapping[str, Tensor]) -> str:
    """sha256 over all parameters sorted by name: name, zero byte, contiguous little-endian bytes."""
    digest = hashlib.sha256()
    for name in sorted(parameters):
        flat = parameters[name].detach().cpu().reshape(-1).contiguous()
        digest.update(f"{name}\0".encode() + flat.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
