"""The bytes on a connection of the `cpu` transport: greeting, message header, tensors as raw memory."""

from __future__ import annotations

import ctypes
import math
import struct
from dataclasses import dataclass

import torch
from torch import Tensor

from raypar.errors import CommError

MAGIC = 0x72617970  # "rayp"
VERSION = 1

DTYPES: tuple[torch.dtype, ...] = (
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
"""A dtype's place is its code on the wire: append only."""
CODES = {dtype: code for code, dtype in enumerate(DTYPES)}

HEADER = struct.Struct("<IBBxxQQQQ")
"""magic, dtype code, number of dims, generation, channel, tag, payload bytes; the dims follow, 8 bytes each."""
GREETING = struct.Struct("<IHHQII")
"""magic, version, length of the run's name, generation, rank, size; the name follows."""
ANSWER = struct.Struct("<IHH")
"""magic, 0 for welcome or 1 for refused, length of the reason; the reason follows."""

_memory = ctypes.pythonapi.PyMemoryView_FromMemory
_memory.restype = ctypes.py_object
_memory.argtypes = [ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int]
_READ_WRITE = 0x200


def memory_of(tensor: Tensor, nbytes: int) -> memoryview:
    """The memory of a contiguous tensor of `nbytes` > 0, writable. Holds no reference: keep the tensor while it is used."""
    return _memory(tensor.data_ptr(), nbytes, _READ_WRITE)  # type: ignore[no-any-return]


@dataclass(frozen=True, slots=True)
class Header:
    """What stands before each tensor."""

    generation: int
    channel: int
    tag: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    nbytes: int


def pack_header(tensor: Tensor, generation: int, channel: int, tag: int) -> bytes:
    """The header of one message. Raises `CommError` for a dtype or tag that cannot travel."""
    code = CODES.get(tensor.dtype)
    if code is None or not 0 <= tag < 1 << 64:
        raise CommError(f"cannot send {tensor.dtype} with tag {tag}", cure="tags are 64-bit unsigned, dtypes plain numbers")
    shape = tensor.shape
    head = HEADER.pack(MAGIC, code, len(shape), generation, channel, tag, tensor.nbytes)
    return head + struct.pack(f"<{len(shape)}Q", *shape) if shape else head


def unpack_header(data: memoryview) -> tuple[Header, int] | None:
    """The header at the start of `data` and its length; None while it is incomplete. Raises `CommError` when damaged."""
    if len(data) < HEADER.size:
        return None
    magic, code, dims, generation, channel, tag, nbytes = HEADER.unpack_from(data)
    length = HEADER.size + 8 * dims
    if magic != MAGIC or code >= len(DTYPES):
        raise CommError(f"a message header is damaged (magic {magic:#x}, dtype code {code})", cure="abort the group")
    if len(data) < length:
        return None
    shape = struct.unpack_from(f"<{dims}Q", data, HEADER.size)
    if math.prod(shape) * DTYPES[code].itemsize != nbytes:
        raise CommError(f"a message header is damaged ({nbytes} bytes for shape {shape})", cure="abort the group")
    return Header(generation, channel, tag, DTYPES[code], shape, nbytes), length


@dataclass(frozen=True, slots=True)
class Greeting:
    """What a connecting rank presents."""

    run: str
    generation: int
    rank: int
    size: int

    def pack(self) -> bytes:
        """On the wire."""
        name = self.run.encode()
        return GREETING.pack(MAGIC, VERSION, len(name), self.generation, self.rank, self.size) + name


def unpack_greeting(data: bytes) -> Greeting | None:
    """None while incomplete. Raises `CommError` if this is no greeting of ours."""
    if len(data) < GREETING.size:
        return None
    magic, version, length, generation, rank, size = GREETING.unpack_from(data)
    if magic != MAGIC or version != VERSION:
        raise CommError(f"a connection does not speak raypar version {VERSION}", cure="give workers ports of their own")
    if len(data) < GREETING.size + length:
        return None
    return Greeting(data[GREETING.size : GREETING.size + length].decode(errors="replace"), generation, rank, size)


def pack_answer(refusal: str = "") -> bytes:
    """Welcome, or the reason of a refusal."""
    reason = refusal.encode()
    return ANSWER.pack(MAGIC, 1 if reason else 0, len(reason)) + reason


def unpack_answer(data: bytes) -> str | None:
    """The reason of a refusal, "" for welcome, None while incomplete. Raises `CommError` if this is no answer of ours."""
    if len(data) < ANSWER.size:
        return None
    magic, _, length = ANSWER.unpack_from(data)
    if magic != MAGIC:
        raise CommError("the listener does not speak raypar", cure="check the addresses of the workers")
    if len(data) < ANSWER.size + length:
        return None
    return data[ANSWER.size : ANSWER.size + length].decode()


def missing_of_answer(data: bytes | bytearray) -> int:
    """How many bytes to read next: never more than the answer has, the peer's first message may stand right behind it."""
    if len(data) < ANSWER.size:
        return ANSWER.size - len(data)
    return int(ANSWER.size + ANSWER.unpack_from(data)[2] - len(data))
