"""Memory layout of a tensor that is sent between stages: its strides, and its address modulo the device's alignment.

Libraries choose kernels by both, and a dropout mask is drawn in the order of the strides. A message carries the elements in the
order in which they lie in memory. A dim of stride 0 (an expanded tensor) travels once, gaps between elements do not travel.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from raypar.comm.buffer_pool import bytes_behind_alignment
from raypar.errors import CommError

Allocate = Callable[[Sequence[int], torch.dtype], Tensor]
"""(shape, dtype) -> uninitialised contiguous tensor that begins where new tensors of its device may."""


class TensorLayout(NamedTuple):
    """Shape, strides and place of a tensor that does not lie in memory as a new tensor does."""

    shape: tuple[int, ...]
    """By dim."""
    strides: tuple[int, ...]
    """By dim, in elements."""
    offset: int
    """Elements between a multiple of the device's alignment (64 bytes, of CUDA 256) and the first element."""

    @property
    def sent_dims(self) -> list[int]:
        """The dims that travel, in the order in which their elements lie in memory: widest stride first."""
        dims = [dim for dim, stride in enumerate(self.strides) if stride and self.shape[dim] != 1]
        return sorted(dims, key=lambda dim: -self.strides[dim])

    @property
    def sent_shape(self) -> tuple[int, ...]:
        """Shape of the message; that of a tensor without elements is (0,)."""
        return (0,) if 0 in self.shape else tuple(self.shape[dim] for dim in self.sent_dims)

    @property
    def sent_strides(self) -> tuple[int, ...]:
        """Strides of the tensor's dims that travel, in the order of the message's dims."""
        return (1,) if 0 in self.shape else tuple(self.strides[dim] for dim in self.sent_dims)

    @property
    def extent(self) -> int:
        """Elements from the first to the last one in memory, those in gaps too."""
        if 0 in self.shape:
            return 0
        return 1 + sum((length - 1) * stride for length, stride in zip(self.shape, self.strides, strict=True))

    @property
    def is_dense(self) -> bool:
        """Whether the message, as it lies in memory, is the tensor's memory: there are no gaps and no overlaps."""
        inside = 1
        for length, stride in zip(reversed(self.sent_shape), reversed(self.sent_strides), strict=True):
            if stride != inside:
                return False
            inside *= length
        return True


def layout_of(tensor: Tensor) -> TensorLayout | None:
    """The layout of a strided tensor; None if it begins where a new tensor may and has its strides.

    Raises `CommError` for a tensor that is not strided (a sparse one).
    """
    if tensor.layout != torch.strided:
        raise CommError(
            f"a {tensor.layout} tensor {tuple(tensor.shape)} cannot travel between stages",
            cure="let layers return, and send back gradients of, dense tensors (sparse=False)",
        )
    place = bytes_behind_alignment(tensor)
    if not place and tensor.is_contiguous() and (1 not in tensor.shape or tensor.stride() == _strides_of_new(tensor.shape)):
        return None
    # Of a tensor that begins in the middle of an element (memory of another library) the place is not kept.
    offset = 0 if place % tensor.itemsize else place // tensor.itemsize
    return TensorLayout(tuple(tensor.shape), tuple(tensor.stride()), offset)


def _strides_of_new(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of a new tensor. `is_contiguous` lets dims of length 1 have any, but kernels are chosen by those too."""
    strides, inside = [], 1
    for length in reversed(shape):
        strides.append(inside)
        inside *= max(length, 1)
    return tuple(reversed(strides))


def message_of(tensor: Tensor, layout: TensorLayout | None) -> Tensor:
    """The contiguous tensor that travels: the elements of `tensor` in the order in which they lie in memory, each once.

    It shares the memory of `tensor` unless that has gaps, and requires a gradient if that does.
    """
    lies_otherwise = tensor.is_conj() or tensor.is_neg()  # still to be computed: what lies in memory are other numbers
    if layout is None and not lies_otherwise:
        return tensor
    found = tensor.detach()
    if lies_otherwise:
        found = torch.empty_strided(found.shape, found.stride(), dtype=found.dtype, device=found.device).copy_(found)
    if layout is None:
        return found.requires_grad_(tensor.requires_grad)
    found = found.as_strided(layout.sent_shape, layout.sent_strides, found.storage_offset()).contiguous()
    return found.requires_grad_(tensor.requires_grad)


def empty_message(layout: TensorLayout, dtype: torch.dtype, allocate: Allocate) -> Tensor:
    """Memory in which to receive a message, at the place of the tensor that it is the message of."""
    size = math.prod(layout.sent_shape)
    return allocate((layout.offset + size,), dtype)[layout.offset :].view(layout.sent_shape)


def tensor_for_message(message: Tensor, layout: TensorLayout, allocate: Allocate) -> Tensor:
    """The tensor that a message (memory of `empty_message`) is for: in the message's own memory unless it has gaps."""
    # `.data`: autograd shall not take the tensor for a view of other memory, which may not be written in place.
    if layout.is_dense:
        return message.as_strided(layout.shape, layout.strides, message.storage_offset()).data
    flat = allocate((layout.offset + layout.extent,), message.dtype)
    return flat.as_strided(layout.shape, layout.strides, layout.offset).data


def fill_from_message(tensor: Tensor, message: Tensor, layout: TensorLayout) -> None:
    """Write a message into its tensor of `tensor_for_message`, if that has memory of its own."""
    if not layout.is_dense:
        tensor.as_strided(layout.sent_shape, layout.sent_strides, tensor.storage_offset()).copy_(message)


def tensor_of_message(message: Tensor, layout: TensorLayout, allocate: Allocate) -> Tensor:
    """The tensor of a message that has been received in memory of `empty_message`."""
    tensor = tensor_for_message(message, layout, allocate)
    fill_from_message(tensor, message, layout)
    return tensor


def copy_as_it_lies(tensor: Tensor) -> Tensor:
    """The same values in memory of their own, with the same strides and place; it requires a gradient if `tensor` does."""

    def allocate(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.empty(tuple(shape), dtype=dtype, device=tensor.device)

    layout = layout_of(tensor)
    if layout is None:
        return message_of(tensor, None).detach().clone().requires_grad_(tensor.requires_grad)
    message = empty_message(layout, tensor.dtype, allocate).copy_(message_of(tensor, layout).detach())
    return tensor_of_message(message, layout, allocate).requires_grad_(tensor.requires_grad)
