"""Pickles a sample for another process: tensors as their bytes, strides kept, without the rest of their storage."""

from __future__ import annotations

import io
import pickle
from typing import Any

import torch
from torch import Tensor

SPARSE = 4
"""A tensor whose elements lie in more than so many times their number is made contiguous."""


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        """How to make a tensor again; refuses classes of the script that was started, which other processes do not have."""
        if type(value) is Tensor and _is_plain(value):
            return _rebuild_tensor, _tensor_parts(value)
        if isinstance(value, type) and value.__module__ == "__main__":
            raise pickle.PicklingError(f"its class {value.__qualname__} is in the script that was started")
        return NotImplemented


def pickle_sample(sample: object) -> bytes:
    """A sample as bytes, which `pickle.loads` reads. Raises what pickling raises."""
    stream = io.BytesIO()
    _Pickler(stream, protocol=5).dump(sample)
    return stream.getvalue()


def _is_plain(tensor: Tensor) -> bool:
    return (
        tensor.device.type == "cpu"
        and tensor.layout is torch.strided
        and not (tensor.requires_grad or tensor.is_quantized or tensor.is_conj() or tensor.is_neg())
    )


def _tensor_parts(tensor: Tensor) -> tuple[bytearray, torch.dtype, tuple[int, ...], tuple[int, ...]]:
    span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    if not tensor.numel():
        return bytearray(), tensor.dtype, tuple(tensor.shape), tensor.stride()
    if span > SPARSE * tensor.numel():
        tensor = tensor.contiguous()
        span = tensor.numel()
    flat = tensor.as_strided((span,), (1,)).view(torch.uint8)
    return bytearray(flat.numpy().data), tensor.dtype, tuple(tensor.shape), tensor.stride()


def _rebuild_tensor(data: bytearray, dtype: torch.dtype, size: tuple[int, ...], stride: tuple[int, ...]) -> Tensor:
    if not data:
        return torch.empty_strided(size, stride, dtype=dtype)
    return torch.frombuffer(data, dtype=dtype).as_strided(size, stride)
