"""The header of a safetensors file, checked in full before a byte of its tensors is read.

    length of the header (8 bytes, little endian), header (JSON), tensors: https://github.com/huggingface/safetensors

Nothing in the header makes anything allocate: every tensor's dtype and shape must account for exactly its own bytes, and all
of them together for exactly the bytes of the file, without holes or overlaps.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, TypeGuard

from raypar.errors import CheckpointError
from raypar.files.json_type import Json
from raypar.files.printable_text import shorten
from raypar.files.untrusted_files import parse_untrusted_json
from raypar.storage.checkpoint_store import OpenedFile

ITEM_BYTES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U64": 8, "U32": 4, "U16": 2, "U8": 1,
    "BOOL": 1, "C64": 8, "F8_E4M3": 1, "F8_E5M2": 1,
}  # fmt: skip
"""dtype, as the format names it -> bytes of an element."""
HEADER_BYTES = 100_000_000
"""The format's own limit."""
METADATA = "__metadata__"
MAX_DIMS = 64
"""PyTorch's own limit."""
MAX_ELEMENTS = 2**63 - 1
"""PyTorch counts elements in 64 bits, with a sign."""


@dataclass(frozen=True)
class TensorInfo:
    """One tensor: `dtype` as in `ITEM_BYTES`; its bytes are [`start`, `stop`) of the file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


@dataclass(frozen=True)
class SafetensorsHeader:
    """The checked header of a file. `tensors`: by name, in the order of their bytes; `nbytes`: of the whole file."""

    tensors: Mapping[str, TensorInfo]
    metadata: Mapping[str, str]
    nbytes: int


def parse_safetensors_header(file: OpenedFile, location: Path | str) -> SafetensorsHeader:
    """Read and check the header of an open file, the same one from which tensors are read. Raises `CheckpointError`.

    `location`: for messages.
    """
    try:
        return _header(file.stream, file.nbytes)
    except OSError as error:
        raise CheckpointError(
            f"cannot read {shorten(location)}: {error.strerror or error}", cure="try again, or use another file"
        ) from error
    except ValueError as error:
        raise CheckpointError(
            f"{shorten(location)} is damaged, or no safetensors file: {shorten(str(error), 400)}",
            cure="use another file",
        ) from error


def element_count(shape: tuple[int, ...]) -> int:
    """Number of elements. Raises `ValueError` where that is more than a tensor can have, however many dims are 0."""
    total, none = 1, False
    for size in shape:
        none |= size == 0
        total *= size or 1
        if total > MAX_ELEMENTS:
            raise ValueError(f"shape {shorten(list(shape))} has more elements than a tensor can have")
    return 0 if none else total


def parse_shape(value: Json) -> tuple[int, ...]:
    """The shape that a JSON value from a file gives. Raises `ValueError` for what is no shape."""
    if not isinstance(value, list) or len(value) > MAX_DIMS or not all(is_int64_count(size) for size in value):
        raise ValueError(f"shape {shorten(value)} is not a list of at most {MAX_DIMS} whole numbers >= 0")
    shape = tuple(value)
    element_count(shape)
    return shape


def is_int64_count(value: Json) -> TypeGuard[int]:
    """Whether a value from a file is a whole number >= 0, and one of 64 bits."""
    return type(value) is int and 0 <= value <= MAX_ELEMENTS


def _header(file: BinaryIO, nbytes: int) -> SafetensorsHeader:
    """The header of a file of `nbytes`. Raises `ValueError` for one that is damaged."""
    file.seek(0)
    prefix = file.read(8)
    if len(prefix) < 8:
        raise ValueError(f"it has {nbytes} bytes, too few for a header")
    length = int.from_bytes(prefix, "little")
    if length > min(HEADER_BYTES, nbytes - 8):
        raise ValueError(
            f"its header is said to have {length:,} bytes, the file has {nbytes:,} (a header at most {HEADER_BYTES:,})"
        )
    text = file.read(length)
    if len(text) < length:
        raise ValueError(f"it ends after {8 + len(text):,} bytes, in its header")
    found = parse_untrusted_json(text)
    if not isinstance(found, dict):
        raise ValueError("its header is not a JSON object")
    metadata = found.pop(METADATA, {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise ValueError(f"{METADATA} has a value that is not text")
    begin = 8 + length
    tensors = {name: _tensor(name, value, begin, nbytes) for name, value in found.items()}
    in_order = dict(sorted(tensors.items(), key=lambda item: (item[1].start, item[1].stop)))
    at, before = begin, "the header"
    for name, info in in_order.items():
        if info.start != at:
            what = "overlaps" if info.start < at else "leaves a hole behind"
            raise ValueError(
                f"tensor {shorten(name)!r} begins at byte {info.start:,} and {what} {before}, which ends at {at:,}"
            )
        at, before = info.stop, f"tensor {shorten(name)!r}"
    if at != nbytes:
        raise ValueError(f"its tensors end at byte {at:,}, the file has {nbytes:,}")
    return SafetensorsHeader(in_order, metadata, nbytes)


def _tensor(name: str, value: Json, begin: int, nbytes: int) -> TensorInfo:
    """One tensor of a header from its JSON value; tensors have the bytes [begin, nbytes) of the file. Raises `ValueError`."""
    what = f"tensor {shorten(name)!r}"
    if not isinstance(value, dict) or set(value) != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"{what} is not given by dtype, shape and data_offsets")
    dtype, offsets = value["dtype"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        raise ValueError(f"{what} has the dtype {shorten(dtype)}, none of {', '.join(ITEM_BYTES)}")
    shape = parse_shape(value["shape"])
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(is_int64_count(offset) for offset in offsets):
        raise ValueError(f"{what} has the data_offsets {shorten(offsets)}, not two whole numbers >= 0")
    start, stop = begin + offsets[0], begin + offsets[1]
    if not start <= stop <= nbytes:
        raise ValueError(f"{what} has the data_offsets {offsets} in a file with {nbytes - begin:,} bytes of tensors")
    needed = element_count(shape) * ITEM_BYTES[dtype]
    if stop - start != needed:
        raise ValueError(f"{what} has {stop - start:,} bytes, {dtype} of shape {shorten(list(shape))} needs {needed:,}")
    return TensorInfo(dtype, shape, start, stop)
