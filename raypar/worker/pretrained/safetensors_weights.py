"""Reads tensors that lie in safetensors files, each in one block or several: as slices, through a buffer of 4 MiB."""

from __future__ import annotations

import contextlib
import math
import mmap
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from raypar.errors import CheckpointError
from raypar.files.untrusted_files import open_regular_file
from raypar.plan.shard_ranges import IndexRanges, intersect_ranges, positions_of_indices
from raypar.storage.checkpoint_store import CheckpointRef, LocalFile, OpenedFile
from raypar.worker.checkpoint.manifest import Manifest
from raypar.worker.checkpoint.safetensors_header import SafetensorsHeader, parse_safetensors_header
from raypar.worker.pretrained.weights_file import FIRST_BYTES, StoredTensor, WeightsFile, as_checkpoint_errors

if TYPE_CHECKING:
    import torch
    from torch import Tensor

_CHUNK_BYTES = 4 << 20
"""Bytes read at once; the buffer exists beside the tensor that is made."""
_MIN_RUN_BYTES = 256 << 10
"""Contiguous bytes of a slice that are worth a read of their own; shorter runs are copied out of whole rows."""


@dataclass(frozen=True)
class Block:
    """A part of a tensor, contiguous in a file: indices [`start`, `stop`) of one dim, or elements of the flattened tensor."""

    start: int
    stop: int
    file: str
    """Name in `OpenFiles`."""
    offset: int
    """Of its first byte in the file."""
    nbytes: int


RUNS = -1
"""In the place of a dim: a tensor lies in runs of its elements."""


@dataclass(frozen=True)
class Blocks:
    """Where a tensor is stored: in blocks along `dim`, or `RUNS`, in order and without gaps; a whole tensor is one block."""

    stored: StoredTensor
    dim: int
    blocks: tuple[Block, ...]


class OpenFiles:
    """Open safetensors files, by names that the caller chooses.

    Tensors are read from the same open file whose header was checked. Files are not memory-mapped: mapped pages count as the
    process's memory, and a mapped file that is truncated kills the process.
    """

    def __init__(self) -> None:
        self._stack = contextlib.ExitStack()
        self._open: dict[str, tuple[OpenedFile, Path | str, Hashable]] = {}
        """Name -> file, its location, its version when its header was checked."""

    def add(self, name: str, path: Path, *, follow: bool) -> SafetensorsHeader:
        """Open a file and check its header. Raises `CheckpointError`."""
        opened = self._stack.enter_context(
            open_regular_file(path, follow=follow, error=CheckpointError, cure="give another file")
        )
        file = LocalFile(opened)
        self._open[name] = (file, path, file.version())
        return parse_safetensors_header(file, path)

    def add_of_checkpoint(self, manifest: Manifest, name: str) -> SafetensorsHeader:
        """Open a checkpoint's file and check its header by itself. Raises `CheckpointError`."""
        checkpoint = manifest.checkpoint
        file = self._stack.enter_context(checkpoint.store.open(checkpoint.name, name, cure="give another file"))
        self._open[name] = (file, checkpoint.file_location(name), file.version())
        return parse_safetensors_header(file, checkpoint.file_location(name))

    def read_into(self, memory: memoryview, name: str, offset: int) -> None:
        """Fill `memory` with the bytes from `offset`. Raises `CheckpointError`."""
        file, path, checked = self._open[name]
        with as_checkpoint_errors(path):
            changed = file.read_at(memory, offset) < len(memory) or file.version() != checked
        if changed:
            raise CheckpointError(f"{path} has changed while it was read", cure="start again when nobody writes to it")

    def close(self) -> None:
        """Close all files."""
        self._stack.close()


class SafetensorsWeights(WeightsFile):
    """Tensors in open safetensors files, which `close` closes."""

    def __init__(
        self, path: Path | CheckpointRef, tensors: Mapping[str, Blocks], aliases: Mapping[str, str], files: OpenFiles
    ) -> None:
        super().__init__(path, {name: blocks.stored for name, blocks in tensors.items()}, aliases)
        self._tensors, self._files = tensors, files
        self._chunk: Tensor | None = None
        """The read buffer. From mmap, since freeing a buffer of malloc's would leave a hole between the tensors."""

    def close(self) -> None:
        self._files.close()
        self._chunk = None

    def _first_bytes(self, name: str) -> bytes:
        first = self._tensors[name].blocks[0]
        content = bytearray(min(FIRST_BYTES, first.nbytes))
        self._files.read_into(memoryview(content), first.file, first.offset)
        return bytes(content)

    def _nbytes(self, name: str) -> int:
        return sum(block.nbytes for block in self._tensors[name].blocks)

    def _bytes_at(self, name: str, start: int, stop: int) -> bytes:
        content, begin = bytearray(stop - start), 0
        for block in self._tensors[name].blocks:
            first, last = max(start, begin), min(stop, begin + block.nbytes)
            if first < last:
                part = memoryview(content)[first - start : last - start]
                self._files.read_into(part, block.file, block.offset + first - begin)
            begin += block.nbytes
        return bytes(content)

    def _fill(self, name: str, out: Tensor, slices: tuple[int, IndexRanges]) -> None:
        tensor = self._tensors[name]
        shape, (dim, spans) = tensor.stored.shape or (1,), slices
        if tensor.dim == RUNS:
            self._fill_from_runs(tensor, out, shape, dim, spans)
            return
        whole = len(tensor.blocks) == 1
        for block in tensor.blocks:
            if whole or dim == tensor.dim:
                start, stop = (0, shape[dim]) if whole else (block.start, block.stop)
                rows = _rows(out, dim)
                for first, last in intersect_ranges(spans, ((start, stop),)):
                    at = positions_of_indices(spans, ((first, last),))[0][0]
                    self._read(block, tensor, stop - start, first - start, rows.narrow(1, at, last - first))
            else:
                extents = [*out.shape]
                extents[tensor.dim] = block.stop - block.start
                part, at = out.new_empty(extents), 0
                for first, last in spans:
                    self._read(block, tensor, shape[dim], first, _rows(part, dim).narrow(1, at, last - first))
                    at += last - first
                out.narrow(tensor.dim, block.start, block.stop - block.start).copy_(part)

    def _fill_from_runs(self, tensor: Blocks, out: Tensor, shape: Sequence[int], dim: int, spans: IndexRanges) -> None:
        """Fill `out` with the indices `spans` of a dim of a tensor that lies in runs of elements."""
        part = out
        if dim > 0 and spans != ((0, shape[dim]),):
            part = out.new_empty(tuple(shape))
        elif dim > 0:
            spans = ((0, shape[0]),)
        width, at, flat = math.prod(shape[1:]), 0, part.view(-1)
        for start, stop in spans if part is out else ((0, shape[0]),):
            for block in tensor.blocks:
                first, last = max(start * width, block.start), min(stop * width, block.stop)
                if first < last:
                    here = flat[at + first - start * width :][: last - first].view(1, last - first, 1)
                    self._read(block, tensor, block.stop - block.start, first - block.start, here)
            at += (stop - start) * width
        if part is not out:
            at = 0
            for start, stop in spans:
                out.narrow(dim, at, stop - start).copy_(part.narrow(dim, start, stop - start))
                at += stop - start

    def _read(self, block: Block, tensor: Blocks, size: int, first: int, out: Tensor) -> None:
        """Fill `out` [outer, n, inner] with indices [first, first + n) of the middle dim of a block [outer, size, inner]."""
        import torch

        kind: torch.dtype = getattr(torch, tensor.stored.dtype)
        outer, n, inner = out.shape
        if n == size and out.is_contiguous():
            outer, size, n, inner = 1, 1, 1, out.numel()
            out = out.view(1, 1, inner)
        row, run = size * inner * kind.itemsize, n * inner * kind.itemsize
        if self._chunk is None:
            self._chunk = torch.frombuffer(mmap.mmap(-1, _CHUNK_BYTES), dtype=torch.uint8)
        memory = self._chunk
        if outer == 1 or run >= _MIN_RUN_BYTES or row > _CHUNK_BYTES:
            step = len(memory) // kind.itemsize
            for i in range(outer):
                flat = out[i].view(-1)
                offset = block.offset + i * row + first * inner * kind.itemsize
                for j in range(0, len(flat), step):
                    piece = flat[j : j + step]
                    piece.copy_(self._values(memory, block.file, offset + j * kind.itemsize, len(piece), kind))
        else:
            step = len(memory) // row
            for i in range(0, outer, step):
                many = min(step, outer - i)
                values = self._values(memory, block.file, block.offset + i * row, many * size * inner, kind)
                out[i : i + many].copy_(values.view(many, size, inner).narrow(1, first, n))

    def _values(self, memory: Tensor, file: str, offset: int, elements: int, kind: torch.dtype) -> Tensor:
        """`elements` values of a file, as a view of `memory`. Copying them turns any byte of a bool into 0 or 1."""
        held = memory[: elements * kind.itemsize]
        self._files.read_into(held.numpy().data, file, offset)
        return held.view(kind)


def _rows(tensor: Tensor, dim: int) -> Tensor:
    """A view of the tensor as [dims before `dim`, `dim`, dims after it]."""
    shape = tensor.shape
    return tensor.view(math.prod(shape[:dim]), shape[dim], math.prod(shape[dim + 1 :]))


@contextlib.contextmanager
def files_closed_on_error() -> Iterator[OpenFiles]:
    """New `OpenFiles`, closed if the block raises."""
    files = OpenFiles()
    try:
        yield files
    except BaseException:
        files.close()
        raise
