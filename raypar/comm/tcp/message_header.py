"""The bytes of a message on a TCP transport's connection: a header, then the tensor as raw memory.

A tensor that does not lie in memory as a new one does says so in its header (`comm.sent_tensor_layout`); others say nothing.
"""

from __future__ import annotations

import ctypes
import math
import os
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from raypar.comm.buffer_pool import ALIGNED
from raypar.comm.sent_tensor_layout import TensorLayout
from raypar.errors import CommError

MESSAGE_MAGIC = 0x72617970  # "rayp"
MAX_MESSAGE_DIMS = 64
"""PyTorch's own limit."""
MAX_MESSAGE_BYTES = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
"""This machine's memory: a header that announces a larger message is refused before anything is allocated."""

SENDABLE_DTYPES: tuple[torch.dtype, ...] = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.complex64,
    torch.complex128,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.uint16,
    torch.uint32,
    torch.uint64,
)
"""A dtype's index is its code in a header: append only."""
DTYPE_CODES = {dtype: code for code, dtype in enumerate(SENDABLE_DTYPES)}
REQUIRES_GRAD = 0x80
"""Set in a dtype's code in a header: the tensor requires a gradient."""
LAID_OUT = 0x40
"""Set in a dtype's code in a header: the tensor's strides and its place follow its dims."""

FIXED_HEADER = struct.Struct("<IBBxxQQQQI")
"""magic, dtype code, number of dims, generation, channel, tag, payload bytes, CRC-32 of the dims.

`HEADER_CHECKSUM` follows, then the dims, 8 bytes each; with `LAID_OUT` then the strides and the place, in elements."""
HEADER_CHECKSUM = struct.Struct("<I")
"""CRC-32 of all bytes before it: for a damaged header nothing may be allocated, awaited or delivered."""
HEADER_BYTES = FIXED_HEADER.size + HEADER_CHECKSUM.size

_memory = ctypes.pythonapi.PyMemoryView_FromMemory
_memory.restype = ctypes.py_object
_memory.argtypes = [ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int]
_READ_WRITE = 0x200


def tensor_memory(tensor: Tensor, nbytes: int) -> memoryview:
    """The memory of a contiguous tensor of `nbytes` > 0, writable. Holds no reference: keep the tensor while it is used."""
    return _memory(tensor.data_ptr(), nbytes, _READ_WRITE)  # type: ignore[no-any-return]


@dataclass(frozen=True, slots=True)
class MessageHeader:
    """The header of one message, unpacked."""

    generation: int
    channel: int
    tag: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    nbytes: int
    """Bytes of the message, which has each element once."""
    requires_grad: bool
    layout: TensorLayout | None
    """How the sender's tensor lies; None: as a new tensor."""


def dtype_code(dtype: torch.dtype, requires_grad: bool) -> int | None:
    """The code of a tensor's dtype, and of whether it requires a gradient; None for a dtype that cannot travel."""
    code = DTYPE_CODES.get(dtype)
    return code | REQUIRES_GRAD if code is not None and requires_grad else code


def dtype_of_code(code: int) -> tuple[torch.dtype, bool] | None:
    """(dtype, whether the tensor requires a gradient) of a code; None for a code that no tensor has."""
    requires_grad = bool(code & REQUIRES_GRAD)
    code &= ~REQUIRES_GRAD
    if code >= len(SENDABLE_DTYPES):
        return None
    dtype = SENDABLE_DTYPES[code]
    return None if requires_grad and not (dtype.is_floating_point or dtype.is_complex) else (dtype, requires_grad)


def pack_header(tensor: Tensor, generation: int, channel: int, tag: int, layout: TensorLayout | None = None) -> bytes:
    """The header of one message; `layout` is that of the tensor whose message `tensor` is.

    Raises `CommError` for a dtype or tag that cannot travel.
    """
    code = dtype_code(tensor.dtype, tensor.requires_grad and channel == 0)
    shape: Sequence[int] = tensor.shape if layout is None else layout.shape
    if code is None or not 0 <= tag < 1 << 64 or len(shape) > MAX_MESSAGE_DIMS:
        raise CommError(
            f"cannot send {tensor.dtype} of {len(shape)} dims with tag {tag}",
            cure=f"tags are 64-bit unsigned, dtypes plain numbers, tensors have at most {MAX_MESSAGE_DIMS} dims",
        )
    dims = struct.pack(f"<{len(shape)}Q", *shape) if shape else b""
    if layout is not None:
        code |= LAID_OUT
        dims += struct.pack(f"<{len(shape) + 1}Q", *layout.strides, layout.offset)
    head = FIXED_HEADER.pack(MESSAGE_MAGIC, code, len(shape), generation, channel, tag, tensor.nbytes, zlib.crc32(dims))
    return head + HEADER_CHECKSUM.pack(zlib.crc32(head)) + dims


def unpack_header(data: memoryview) -> tuple[MessageHeader, int] | None:
    """The header at the start of `data` and its length; None while it is incomplete. Raises `CommError` for a damaged one."""
    if len(data) < HEADER_BYTES:
        return None
    magic, code, dims, generation, channel, tag, nbytes, check = FIXED_HEADER.unpack_from(data)
    (whole,) = HEADER_CHECKSUM.unpack_from(data, FIXED_HEADER.size)
    found = dtype_of_code(code & ~LAID_OUT)
    if magic != MESSAGE_MAGIC or whole != zlib.crc32(data[: FIXED_HEADER.size]) or found is None or dims > MAX_MESSAGE_DIMS:
        raise damaged_header_error(f"magic {magic:#x}, dtype code {code}, {dims} dims")
    laid_out = bool(code & LAID_OUT)
    numbers = dims + (dims + 1) * laid_out
    length = HEADER_BYTES + 8 * numbers
    if len(data) < length:
        return None
    shape, lies = (found_numbers := struct.unpack_from(f"<{numbers}Q", data, HEADER_BYTES))[:dims], found_numbers[dims:]
    if check != zlib.crc32(data[HEADER_BYTES:length]):
        raise damaged_header_error(f"shape {shape}")
    dtype, requires_grad = found
    layout = TensorLayout(shape, lies[:dims], lies[dims]) if laid_out else None
    expected = announced_tensor_bytes(shape, dtype) if layout is None else announced_message_bytes(layout, dtype)
    if expected != nbytes:
        raise damaged_header_error(f"{nbytes} bytes for shape {shape}")
    return MessageHeader(generation, channel, tag, dtype, shape, nbytes, requires_grad, layout), length


def announced_tensor_bytes(shape: Sequence[int], dtype: torch.dtype) -> int:
    """Bytes of a tensor that a peer has announced. Raises `CommError` for one that this machine cannot hold."""
    if math.prod(max(1, length) for length in shape) >= 1 << 62:  # PyTorch's own sizes and strides are 63-bit
        raise damaged_header_error(f"shape {tuple(shape)}")
    nbytes = math.prod(shape) * dtype.itemsize
    if nbytes > MAX_MESSAGE_BYTES:
        raise CommError(
            f"it announced a message of {nbytes:,} bytes, more than this machine has memory ({MAX_MESSAGE_BYTES:,})",
            cure="abort the group",
        )
    return nbytes


def announced_message_bytes(layout: TensorLayout, dtype: torch.dtype, alignment: int = ALIGNED) -> int:
    """Bytes of the message of a tensor that a peer has announced with a layout. `alignment`: of its device.

    Raises `CommError` for one that this machine cannot hold, with its gaps or when its expanded dims are written out.
    """
    announced_tensor_bytes(layout.shape, dtype)
    if max(layout.strides, default=0) >= 1 << 62 or layout.offset * dtype.itemsize >= alignment:
        raise damaged_header_error(f"strides {layout.strides}, {layout.offset} elements after a multiple of {alignment} bytes")
    announced_tensor_bytes((layout.extent,), dtype)
    return announced_tensor_bytes(layout.sent_shape, dtype)


def damaged_header_error(what: str) -> CommError:
    """The error for a header that no rank has sent like this."""
    return CommError(f"a message header is damaged ({what})", cure="abort the group")
