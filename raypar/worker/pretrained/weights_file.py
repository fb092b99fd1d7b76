"""Reads weights in every format that `init_from` takes, by name and slice, one tensor at a time.

    FILE.safetensors | FILE.pt (a state_dict) | FOLDER with an index, as Hugging Face writes it | a checkpoint or run of raypar

Opening reads headers only. Names and shapes are known without torch, which is imported when tensors are read.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import math
import mmap
import re
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from raypar.errors import CheckpointError, error_first_line, error_message, with_article
from raypar.files.printable_text import repr_text, shorten
from raypar.files.untrusted_files import cure_of_read_error, open_regular_file, parse_untrusted_json, read_limited_bytes
from raypar.job.init_from_section import format_name_list
from raypar.plan.shard_ranges import IndexRanges, count_indices, intersect_ranges, positions_of_indices
from raypar.storage.checkpoint_store import (
    STORES,
    CheckpointRef,
    LocalCheckpointStore,
    LocalFile,
    OpenedFile,
    open_checkpoint,
    storage_scheme,
)
from raypar.worker.checkpoint.checkpoint_files import (
    check_header,
    latest_usable_checkpoint,
    load_manifest,
    verify_checkpoint,
)
from raypar.worker.checkpoint.manifest import DTYPES, MANIFEST, Manifest, ManifestEntry
from raypar.worker.checkpoint.safetensors_header import SafetensorsHeader, parse_safetensors_header
from raypar.worker.checkpoint.state_key import BUFFER, PARAMETER

if TYPE_CHECKING:
    import torch
    from torch import Tensor

FLOATING = ("float64", "float32", "float16", "bfloat16")
"""Dtypes that are cast to each other. float8 is not: its files keep scales beside the values."""
INDEX_BYTES = 64 << 20
"""Size limit of an index file. One for 10,000 tensors has 1 MB."""
STATE_DICT_SUFFIXES = (".pt", ".pth", ".bin")
_CHUNK_BYTES = 4 << 20
"""Bytes read at once; the buffer exists beside the tensor that is made."""
_MIN_RUN_BYTES = 256 << 10
"""Contiguous bytes of a slice that are worth a read of their own; shorter runs are copied out of whole rows."""
_FIRST_BYTES = 4096
"""Bytes of each tensor in the fingerprint."""
DIGEST_BYTES = 64 << 20
"""Most bytes that are read for a digest of pieces, and a page of each tensor: about a fifth of a second."""
_PAGE = 16384
"""Bytes of a piece of a tensor, where not all of it is read."""
_WHOLE_PIECE = 1 << 20
"""Bytes of a piece of a tensor that is read whole."""
_INDEX = ".safetensors.index.json"
_TORCH_NAMES = {theirs: ours for ours, theirs in DTYPES.items()} | {"F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2"}
"""safetensors' name of a dtype -> torch's."""

_ESCAPES = re.compile(r"\x1b\[[0-9;]*m")
"""Colours for a terminal, which PyTorch's messages have."""


@dataclass(frozen=True)
class StoredTensor:
    """Shape and dtype of a stored tensor. `dtype`: torch's name, such as `bfloat16`."""

    shape: tuple[int, ...]
    dtype: str


class WeightsFile:
    """Named tensors on disk; a context manager, since files stay open until `close`. For one thread at a time.

    A file that is replaced after it was opened is still read as it was; one that is modified raises `CheckpointError`.
    """

    path: Path | CheckpointRef
    """The file, the folder of a model in several files, or the checkpoint."""
    names: Mapping[str, StoredTensor]
    """Every name that can be read, with all names of a tensor that is stored once for several."""
    aliases: Mapping[str, str]
    """Further name of such a tensor -> its first name."""
    notes: tuple[str, ...] = ()
    """Lines for the user about the choice of files: newer checkpoints that were damaged."""

    def __init__(self, path: Path | CheckpointRef, names: Mapping[str, StoredTensor], aliases: Mapping[str, str]) -> None:
        self.path = path
        self.names = {**names, **{other: names[first] for other, first in aliases.items()}}
        self.aliases = dict(aliases)

    def read(self, name: str, dtype: torch.dtype | None = None, slices: tuple[int, IndexRanges] | None = None) -> Tensor:
        """A tensor in memory of its own, as `dtype` (None: as stored). `slices`: (dim, its indices); None: the whole tensor.

        Raises as `read_into` does.
        """
        import torch

        stored = self._stored(name)
        shape = list(stored.shape)
        if slices is not None:
            shape[slices[0]] = count_indices(slices[1])
        out = torch.empty(shape, dtype=getattr(torch, stored.dtype) if dtype is None else dtype)
        self.read_into(out, name, slices)
        return out

    def read_into(self, out: Tensor, name: str, slices: tuple[int, IndexRanges] | None = None) -> None:
        """Read a tensor, or slices of it, into `out`: contiguous, on the CPU; values are cast to its dtype.

        Needs 4 MiB of memory. A checkpoint's tensor that was stored in parts along another dim needs its largest part more.
        Raises `CheckpointError` for unknown names, for casts other than between floating-point types, and damaged files.
        """
        stored = self._stored(name)
        wanted = str(out.dtype).removeprefix("torch.")
        if wanted != stored.dtype and not (wanted in FLOATING and stored.dtype in FLOATING):
            raise CheckpointError(
                f"{name} is {stored.dtype} in {self.path}, not {wanted}", cure="convert the file, or change the model"
            )
        shape = stored.shape or (1,)  # a number is read as a list of one
        dim, spans = slices or (0, ((0, shape[0]),))
        expected = (*shape[:dim], count_indices(spans), *shape[dim + 1 :]) if stored.shape else ()
        assert out.shape == expected and out.is_contiguous() and out.device.type == "cpu", (name, out.shape, slices)
        assert not out.numel() or all(0 <= start < stop <= shape[dim] for start, stop in spans), (name, slices)
        if out.numel():
            self._fill(self.aliases.get(name, name), out.detach() if out.dim() else out.detach().view(1), (dim, spans))

    def _stored(self, name: str) -> StoredTensor:
        if name not in self.names:
            raise CheckpointError(f"{self.path} has no tensor {name!r}", cure="give the weights of this model")
        return self.names[name]

    def fingerprint(self) -> str:
        """sha256 over names, dtypes, shapes and the first 4 KiB of every tensor.

        Nodes compare it to see whether a path leads to the same weights on all of them. The first bytes of each tensor
        differ between two trainings of one model.
        """
        digest = hashlib.sha256()
        for name in sorted(set(self.names) - set(self.aliases)):
            stored = self.names[name]
            digest.update(repr((name, stored.dtype, stored.shape)).encode() + self._first_bytes(name))
        return digest.hexdigest()

    def digest_of_pieces(self, names: Iterable[str]) -> str:
        """sha256 over names, dtypes, shapes and bytes of these tensors: of all bytes if they are at most `DIGEST_BYTES`, else
        of every n-th page of each tensor and its last one.

        It finds what `fingerprint` does not: weights of which a later part was trained or edited, as some rows of an embedding.
        """
        digest = hashlib.sha256()
        stored = sorted({self.aliases.get(name, name) for name in names})
        total = sum(self._nbytes(name) for name in stored)
        piece, stride = (_WHOLE_PIECE, _WHOLE_PIECE) if total <= DIGEST_BYTES else (_PAGE, -(-total // DIGEST_BYTES) * _PAGE)
        for name in stored:
            known, size = self.names[name], self._nbytes(name)
            digest.update(repr((name, known.dtype, known.shape)).encode())
            last = max(0, size - piece)
            for start in sorted({*range(0, size, stride), last} if size else ()):
                digest.update(self._bytes_at(name, start, min(start + piece, size)))
        return digest.hexdigest()

    def differ(self, first: str, second: str) -> bool:
        """Whether these two tensors have another dtype, shape or first 4 KiB."""
        one, two = self.names[first], self.names[second]
        if (one.dtype, one.shape) != (two.dtype, two.shape):
            return True
        here, there = self.aliases.get(first, first), self.aliases.get(second, second)
        return here != there and self._first_bytes(here) != self._first_bytes(there)

    def close(self) -> None:
        """Close the files."""

    def __enter__(self) -> WeightsFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _fill(self, name: str, out: Tensor, slices: tuple[int, IndexRanges]) -> None:
        """Read into `out`, which is contiguous, has elements and at least one dim."""
        raise NotImplementedError

    def _first_bytes(self, name: str) -> bytes:
        """The first `_FIRST_BYTES` bytes of a tensor."""
        raise NotImplementedError

    def _nbytes(self, name: str) -> int:
        """Bytes of a tensor."""
        raise NotImplementedError

    def _bytes_at(self, name: str, start: int, stop: int) -> bytes:
        """These bytes of a tensor, as it is stored."""
        raise NotImplementedError


PART = re.compile(r"(.+)-\d{5}-of-\d{5}\.safetensors")
"""The name of one file of several, as Hugging Face writes them."""


def open_weights(path: str | Path | CheckpointRef) -> WeightsFile:
    """Open the weights at a path; for a run of raypar, its last whole checkpoint (see `resolve_weights_source`).

    Raises `CheckpointError` if there are no weights, or if it is not clear which file is meant.
    """
    if isinstance(path, CheckpointRef) or _is_in_storage(path):
        found_there = path if isinstance(path, CheckpointRef) else open_checkpoint(path)
        if not found_there.has_file(MANIFEST):
            found_there, notes = _checkpoint_in_storage(str(path))
        return _open_checkpoint(found_there)
    found = _existing(path)
    if _is_run(found):
        last, notes = resolve_weights_source(found)
        weights = open_weights(last)
        weights.notes = notes
        return weights
    with _as_checkpoint_errors(found):
        is_folder, is_checkpoint = found.is_dir(), (found / MANIFEST).exists()
    return (
        _open_file(found)
        if not is_folder
        else _open_checkpoint(open_checkpoint(found))
        if is_checkpoint
        else _open_folder(found)
    )


def resolve_weights_source(path: str | Path) -> tuple[Path | CheckpointRef, tuple[str, ...]]:
    """(what workers open: a run's last whole checkpoint, else the path itself; why newer checkpoints were skipped).

    Called once, before workers start: a run that is still going may have a newer checkpoint a moment later. Reads checkpoints
    whole and compares their checksums, which `open_weights` does not. Raises `CheckpointError`.
    """
    if _is_in_storage(path):
        return _checkpoint_in_storage(str(path))
    found = _existing(path)
    with _as_checkpoint_errors(found):
        is_checkpoint = found.is_dir() and (found / MANIFEST).exists()
    if is_checkpoint:
        return verify_checkpoint(found).checkpoint, ()
    if not _is_run(found):
        return found, ()
    with _as_checkpoint_errors(found):
        besides = sorted(p.name for p in found.iterdir() if p.name.endswith((".safetensors", _INDEX)))
        if besides:
            raise CheckpointError(
                f"{found} holds checkpoints and {_listed(besides)}: either may be meant",
                cure=f"give {found / besides[0]}, or one of the checkpoints",
            )
        last, skipped = latest_usable_checkpoint(LocalCheckpointStore(found / "checkpoints"))
    if last is None:
        raise CheckpointError(
            f"run {found} has no checkpoint that is whole" + "".join(f"; {line}" for line in skipped),
            cure="give another run, or the path of a checkpoint",
        )
    return last, tuple(skipped)


def _checkpoint_in_storage(location: str) -> tuple[CheckpointRef, tuple[str, ...]]:
    """What `resolve_weights_source` returns for a URL: a checkpoint, or a run's last whole one. Raises `CheckpointError`."""
    checkpoint = open_checkpoint(location)
    if checkpoint.has_file(MANIFEST):
        return verify_checkpoint(checkpoint).checkpoint, ()
    place, mark, settings = location.partition("?")
    last, skipped = latest_usable_checkpoint(f"{place.rstrip('/')}/checkpoints{mark}{settings}")
    if last is None:
        raise CheckpointError(
            f"{shorten(location)} is neither a checkpoint nor a run of raypar with one that is whole"
            + "".join(f"; {line}" for line in skipped)
            + "; of other weights raypar reads local files only",
            cure="download it first, and give the file or folder",
        )
    return last, tuple(skipped)


def absolute_weights_path(path: Path | CheckpointRef) -> str:
    """The text of a path that `resolve_weights_source` has returned, for other processes."""
    return str(path.resolve()) if isinstance(path, Path) else path.absolute_location()


def _is_in_storage(path: str | Path) -> bool:
    """Whether a path is the URL of a storage that raypar has."""
    return bool(scheme := storage_scheme(path)) and scheme in STORES


def _existing(path: str | Path) -> Path:
    """The path, which exists. Raises `CheckpointError` otherwise."""
    text = str(path)
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]*:/", text):
        raise CheckpointError(
            f"{shorten(text)} is no local file, and raypar reads local files only",
            cure="download it first, and give the file or folder",
        )
    found = Path(text).expanduser()
    with _as_checkpoint_errors(found):
        if not found.exists():
            hub = re.fullmatch(r"\w[\w.-]*(/[\w.-]+)?", text) and found.suffix not in (".safetensors", *STATE_DICT_SUFFIXES)
            download = f"; a model of the Hugging Face Hub is downloaded first (`hf download {text} --local-dir DIR`)"
            raise CheckpointError(f"there is no file or folder {shorten(text)!r}", cure="check the path" + download * bool(hub))
    return found


def _is_run(path: Path) -> bool:
    """Whether a path is the folder of a raypar run."""
    with _as_checkpoint_errors(path):
        return path.is_dir() and not (path / MANIFEST).exists() and (path / "checkpoints").is_dir()


# -- tensors in safetensors files ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Block:
    """A part of a tensor, contiguous in a file: indices [`start`, `stop`) of one dim, or elements of the flattened tensor."""

    start: int
    stop: int
    file: str
    """Name in `_OpenFiles`."""
    offset: int
    """Of its first byte in the file."""
    nbytes: int


_RUNS = -1
"""In the place of a dim: a tensor lies in runs of its elements."""


@dataclass(frozen=True)
class _Blocks:
    """Where a tensor is stored: in blocks along `dim`, or `_RUNS`, in order and without gaps; a whole tensor is one block."""

    stored: StoredTensor
    dim: int
    blocks: tuple[_Block, ...]


class _OpenFiles:
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
        with _as_checkpoint_errors(path):
            changed = file.read_at(memory, offset) < len(memory) or file.version() != checked
        if changed:
            raise CheckpointError(f"{path} has changed while it was read", cure="start again when nobody writes to it")

    def close(self) -> None:
        """Close all files."""
        self._stack.close()


class _SafetensorsWeights(WeightsFile):
    def __init__(
        self, path: Path | CheckpointRef, tensors: Mapping[str, _Blocks], aliases: Mapping[str, str], files: _OpenFiles
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
        content = bytearray(min(_FIRST_BYTES, first.nbytes))
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
        if tensor.dim == _RUNS:
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

    def _fill_from_runs(self, tensor: _Blocks, out: Tensor, shape: Sequence[int], dim: int, spans: IndexRanges) -> None:
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

    def _read(self, block: _Block, tensor: _Blocks, size: int, first: int, out: Tensor) -> None:
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


def _open_file(path: Path) -> WeightsFile:
    if path.name.endswith(_INDEX):
        return _open_index(path)
    if path.suffix in STATE_DICT_SUFFIXES:
        return _open_state_dict(path)
    if path.suffix != ".safetensors":
        raise CheckpointError(
            f"{path} is no weights file: those end in .safetensors, {', '.join(STATE_DICT_SUFFIXES)} or {_INDEX}",
            cure="give one of these, or a folder with an index, a checkpoint or a run of raypar",
        )
    return _open_safetensors(path, path)


def _open_safetensors(path: Path, file: Path) -> WeightsFile:
    """One safetensors file. `path`: what the user gave; `file`: the file itself."""
    with _files_closed_on_error() as files:
        header = files.add("", file, follow=True)
        # `safetensors.torch.save_model` and `raypar export` store shared tensors once, and say so here.
        aliases = {k: v for k, v in header.metadata.items() if k not in header.tensors and v in header.tensors}
        return _SafetensorsWeights(path, _single_blocks(header, ""), aliases, files)


def _single_blocks(header: SafetensorsHeader, file: str) -> dict[str, _Blocks]:
    """The tensors of a file that holds whole tensors."""
    return {
        name: _Blocks(
            StoredTensor(info.shape, _TORCH_NAMES[info.dtype]),
            0,
            (_Block(0, (info.shape or (1,))[0], file, info.start, info.stop - info.start),),
        )
        for name, info in header.tensors.items()
    }


def _open_folder(path: Path) -> WeightsFile:
    with _as_checkpoint_errors(path):
        there = sorted(p.name for p in path.iterdir())
    indices = [name for name in there if name.endswith(_INDEX)]
    single = [name for name in there if name.endswith(".safetensors")]
    if len(indices) > 1:
        raise CheckpointError(f"{path} has {len(indices)} indices: {_listed(indices)}", cure=f"give {path / indices[0]}, say")
    if indices:
        weights = _open_index(path / indices[0], path)
        besides = [name for name in single if name not in weights.files]
        if besides:
            weights.close()
            raise CheckpointError(
                f"{path} has {' and '.join(besides[:5])} besides those of its index: either may be meant",
                cure=f"give {path / indices[0]}, or {path / besides[0]}",
            )
        return weights
    parts = [part for name in single if (part := PART.fullmatch(name))]
    if parts:
        raise CheckpointError(
            f"{path} has files that are parts of one model, and not the index that leads to its tensors: {_listed(single)}",
            cure=f"put the model's {parts[0][1]}{_INDEX} beside them",
        )
    if len(single) > 1:
        raise CheckpointError(
            f"{path} has {len(single)} safetensors files and no index: {_listed(single)}", cure=f"give {path / single[0]}, say"
        )
    if not single:
        other = [name for name in there if name.endswith(STATE_DICT_SUFFIXES)]
        raise CheckpointError(
            f"{path} holds no weights: no .safetensors file, no index, no checkpoint of raypar",
            cure=f"give the file: {path / other[0]}" if other else "give the folder of a model, a checkpoint or a run",
        )
    return _open_safetensors(path, _file_in(path, single[0], "the folder"))


class _IndexedWeights(_SafetensorsWeights):
    """Weights in several safetensors files with an index."""

    files: Collection[str] = ()
    """Names of the files."""


def _open_index(index: Path, path: Path | None = None) -> _IndexedWeights:
    """Weights with an index as Hugging Face writes it: {"weight_map": {tensor: file}}. `path`: what the user gave."""
    text = read_limited_bytes(index, follow=True, limit=INDEX_BYTES, error=CheckpointError, cure="give another index")
    try:
        found = parse_untrusted_json(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{index} is no index: {shorten(str(error), 400)}", cure="download it again") from error
    where = found.get("weight_map") if isinstance(found, dict) else None
    if not isinstance(where, dict) or not where or not all(isinstance(name, str) for name in where.values()):
        raise CheckpointError(f"{index} has no weight_map that leads from tensors to files", cure="download it again")
    folder, tensors = index.parent, dict[str, _Blocks]()
    with _files_closed_on_error() as files:
        names = sorted(set(where.values()))
        paths = [_file_in(folder, name, str(index)) for name in names]
        headers = [files.add(name, path, follow=False) for name, path in zip(names, paths, strict=True)]
        for name, header in zip(names, headers, strict=True):
            tensors |= _single_blocks(header, name)
        extra = [t for name, header in zip(names, headers, strict=True) for t in header.tensors if where.get(t) != name]
        if extra:
            raise CheckpointError(
                f"{index} does not name {format_tensor_count(extra)} of its files: {_listed(extra)}",
                cure="download the folder again",
            )
        lacking = [f"{tensor} in {shorten(name)}" for tensor, name in where.items() if tensor not in tensors]
        if lacking:
            raise CheckpointError(
                f"{index} promises {format_tensor_count(lacking)} that its files do not have: {_listed(lacking)}",
                cure="download the folder again",
            )
        weights = _IndexedWeights(path or index, tensors, {}, files)
    weights.files = names
    return weights


# -- checkpoints of raypar -----------------------------------------------------------------------------------------------------


def _open_checkpoint(checkpoint: CheckpointRef) -> WeightsFile:
    """The parameters and buffers of a checkpoint. `load_manifest` checks that every slice of each is there once."""
    manifest = load_manifest(checkpoint)
    if manifest.frozen is not None:
        raise CheckpointError(
            f"{checkpoint} holds only what was trained, and frozen values are those of {manifest.frozen.path}",
            cure=f"make one file of both, and begin with that: raypar export {checkpoint} --out FILE.safetensors",
        )
    entries = [entry for entry in manifest.entries if entry.kind in (PARAMETER, BUFFER)]
    with _files_closed_on_error() as files:
        headers = {name: files.add_of_checkpoint(manifest, name) for name in sorted({entry.file for entry in entries})}
        for name, header in headers.items():
            check_header(manifest, name, header)
        tensors = {name: _joined(list(parts), headers) for name, parts in itertools.groupby(entries, lambda entry: entry.name)}
        return _SafetensorsWeights(checkpoint, tensors, manifest.ties, files)


def _joined(entries: Sequence[ManifestEntry], headers: Mapping[str, SafetensorsHeader]) -> _Blocks:
    """One tensor of a checkpoint, from its manifest entries."""
    shape = entries[0].shape
    if any(entry.run is not None for entry in entries):
        runs = sorted((entry.as_run, headers[entry.file].tensors[entry.key], entry.file) for entry in entries)
        found = tuple(_Block(*run, file, info.start, info.stop - info.start) for run, info, file in runs)
        return _Blocks(StoredTensor(shape, entries[0].dtype), _RUNS, found)
    cut = next((dim for entry in entries for dim, span in enumerate(entry.slice) if span != (0, shape[dim])), 0)
    blocks = []
    for entry in entries:
        info = headers[entry.file].tensors[entry.key]
        start, stop = entry.slice[cut] if shape else (0, 1)
        blocks.append(_Block(start, stop, entry.file, info.start, info.stop - info.start))
    return _Blocks(StoredTensor(shape, entries[0].dtype), cut, tuple(blocks))


# -- state_dicts ---------------------------------------------------------------------------------------------------------------


class _StateDictWeights(WeightsFile):
    """Tensors of a memory-mapped state_dict. Pages that were read count as the process's memory until they are reclaimed."""

    def __init__(self, path: Path, tensors: Mapping[str, Tensor]) -> None:
        first: dict[Hashable, str] = {}
        aliases = {}
        for name, tensor in tensors.items():
            place = (tensor.untyped_storage().data_ptr(), tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype)
            if tensor.numel() and first.setdefault(place, name) != name:
                aliases[name] = first[place]
        names = {
            name: StoredTensor(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
            for name, tensor in tensors.items()
            if name not in aliases
        }
        super().__init__(path, names, aliases)
        self._tensors = dict(tensors)

    def close(self) -> None:
        self._tensors.clear()

    def _first_bytes(self, name: str) -> bytes:
        import torch

        tensor = self._tensors[name]
        few = tensor.reshape(-1)[: max(1, _FIRST_BYTES // tensor.element_size())].contiguous()
        return bytes(few.view(torch.uint8).numpy().data)

    def _nbytes(self, name: str) -> int:
        return int(self._tensors[name].nbytes)

    def _bytes_at(self, name: str, start: int, stop: int) -> bytes:
        import torch

        tensor = self._tensors[name].detach()
        size = tensor.element_size()
        first = start // size
        few = tensor.reshape(-1)[first : -(-stop // size)].contiguous()
        return bytes(few.view(torch.uint8).numpy().data)[start - first * size : stop - first * size]

    def _fill(self, name: str, out: Tensor, slices: tuple[int, IndexRanges]) -> None:
        tensor = self._tensors[name].detach()
        tensor = tensor if tensor.dim() else tensor.view(1)
        dim, spans = slices
        at = 0
        for start, stop in spans:
            out.narrow(dim, at, stop - start).copy_(tensor.narrow(dim, start, stop - start))
            at += stop - start


def _open_state_dict(path: Path) -> WeightsFile:
    import torch

    cure = "save it as safetensors, or with torch.save(model.state_dict(), FILE)"
    with open_regular_file(path, follow=True, error=CheckpointError, cure=cure):
        pass  # refuses a FIFO or device, on which torch.load would hang
    try:
        found = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # of many classes, as many as there are kinds of damage
        if "Unsupported global" in error_message(error):  # PyTorch advises to trust the file
            raise CheckpointError(
                f"{path} cannot be read as a state_dict: it holds other objects than tensors, such as a whole module, which "
                "only code that trusts the file can load",
                cure=cure,
            ) from error
        raise CheckpointError(
            f"{path} cannot be read as a state_dict: {shorten(_ESCAPES.sub('', error_first_line(error)), 300)}", cure=cure
        ) from error
    if not isinstance(found, Mapping):
        raise CheckpointError(f"{path} holds a {type(found).__name__}, not a state_dict", cure=cure)
    for name, tensor in found.items():
        if not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
            what = f"{path}: {repr_text(name)} is {with_article(type(tensor).__name__)}, not a tensor"
            if isinstance(tensor, Mapping):
                cure = f"give the state_dict in it alone, which torch.save(found[{repr_text(name)}], FILE) writes"
            raise CheckpointError(what, cure=cure)
        if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_meta:
            raise CheckpointError(f"{path}: {shorten(name)} is no dense tensor", cure=cure)
    return _StateDictWeights(path, found)


# -- helpers -------------------------------------------------------------------------------------------------------------------


def _file_in(folder: Path, name: str, by: str) -> Path:
    """The file `name` of a folder, links followed. Raises `CheckpointError` if it lies elsewhere, or is missing.

    Links from a snapshot of a Hugging Face cache into the folder `blobs` of the same model are allowed. `by`: what contains
    the name, for messages.
    """
    with _as_checkpoint_errors(folder / shorten(name)):
        root = folder.resolve()
        roots = [root, *([root.parents[1] / "blobs"] if root.parent.name == "snapshots" else [])]
        found = root / name if "\0" in name else (root / name).resolve()
        if not name or "\0" in name or not any(place in found.parents for place in roots):
            raise CheckpointError(
                f"{by} leads to {shorten(name)!r}, outside of the folder",
                cure="put the files in one folder, not links to them",
            )
        if not found.exists():
            raise CheckpointError(
                f"{shorten(folder / name)} is missing: {by} leads to it", cure="download it, or copy it there"
            )
    return found


@contextlib.contextmanager
def _files_closed_on_error() -> Iterator[_OpenFiles]:
    """New `_OpenFiles`, closed if the block raises."""
    files = _OpenFiles()
    try:
        yield files
    except BaseException:
        files.close()
        raise


@contextlib.contextmanager
def _as_checkpoint_errors(path: Path | str) -> Iterator[None]:
    """Turn an `OSError` into a `CheckpointError` about `path`."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            f"cannot read {shorten(path)}: {error.strerror or error}", cure=cure_of_read_error(error)
        ) from error


def _listed(names: Sequence[str]) -> str:
    """The first names, each shortened, and how many more there are."""
    return format_name_list([shorten(name) for name in names])


def format_tensor_count(names: Collection[str]) -> str:
    """`1 tensor`, `2 tensors`: as many as there are names."""
    return f"{len(names)} tensor" + "s" * (len(names) != 1)
