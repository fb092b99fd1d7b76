"""The bytes of a message on a TCP transport's connection: a header, then the tensor as raw memory."""

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

FIXED_HEADER = struct.Struct("<IBBxxQQQQI")
"""magic, dtype code, number of dims, generation, channel, tag, payload bytes, CRC-32 of the dims.

`HEADER_CHECKSUM` follows, then the dims, 8 bytes each."""
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
    requires_grad: bool


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


def pack_header(tensor: Tensor, generation: int, channel: int, tag: int) -> bytes:
    """The header of one message. Raises `CommError` for a dtype or tag that cannot travel."""
    code = dtype_code(tensor.dtype, tensor.requires_grad and channel == 0)
    shape = tensor.shape
    if code is None or not 0 <= tag < 1 << 64 or len(shape) > MAX_MESSAGE_DIMS:
        raise CommError(
            f"cannot send {tensor.dtype} of {len(shape)} dims with tag {tag}",
            cure=f"tags are 64-bit unsigned, dtypes plain numbers, tensors have at most {MAX_MESSAGE_DIMS} dims",
        )
    dims = struct.pack(f"<{len(shape)}Q", *shape) if shape else b""
    head = FIXED_HEADER.pack(MESSAGE_MAGIC, code, len(shape), generation, channel, tag, tensor.nbytes, zlib.crc32(dims))
    return head + HEADER_CHECKSUM.pack(zlib.crc32(head)) + dims


def unpack_header(data: memoryview) -> tuple[MessageHeader, int] | None:
    """The header at the start of `data` and its length; None while it is incomplete. Raises `CommError` for a damaged one."""
    if len(data) < HEADER_BYTES:
        return None
    magic, code, dims, generation, channel, tag, nbytes, check = FIXED_HEADER.unpack_from(data)
    (whole,) = HEADER_CHECKSUM.unpack_from(data, FIXED_HEADER.size)
    found = dtype_of_code(code)
    if magic != MESSAGE_MAGIC or whole != zlib.crc32(data[: FIXED_HEADER.size]) or found is None or dims > MAX_MESSAGE_DIMS:
        raise damaged_header_error(f"magic {magic:#x}, dtype code {code}, {dims} dims")
    length = HEADER_BYTES + 8 * dims
    if len(data) < length:
        return None
    shape = struct.unpack_from(f"<{dims}Q", data, HEADER_BYTES)
    if check != zlib.crc32(data[HEADER_BYTES:length]):
        raise damaged_header_error(f"shape {shape}")
    dtype, requires_grad = found
    if announced_tensor_bytes(shape, dtype) != nbytes:
        raise damaged_header_error(f"{nbytes} bytes for shape {shape}")
    return MessageHeader(generation, channel, tag, dtype, shape, nbytes, requires_grad), length


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


def damaged_header_error(what: str) -> CommError:
    """The error for a header that no rank has sent like this."""
    return CommError(f"a message header is damaged ({what})", cure="abort the group")
