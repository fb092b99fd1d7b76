"""Named tensors on disk, in one of the formats that `init_from` takes, read by name and slice, one tensor at a time.

Names and shapes are known without torch, which is imported when tensors are read.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from raypar.errors import CheckpointError
from raypar.files.printable_text import shorten
from raypar.files.untrusted_files import cure_of_read_error
from raypar.plan.shard_ranges import IndexRanges, count_indices
from raypar.storage.checkpoint_store import CheckpointRef

if TYPE_CHECKING:
    import torch
    from torch import Tensor

FLOATING = ("float64", "float32", "float16", "bfloat16")
"""Dtypes that are cast to each other. float8 is not: its files keep scales beside the values."""
FIRST_BYTES = 4096
"""Bytes of each tensor in the fingerprint."""
DIGEST_BYTES = 64 << 20
"""Most bytes that are read for a digest of pieces, and a page of each tensor: about a fifth of a second."""
_PAGE = 16384
"""Bytes of a piece of a tensor, where not all of it is read."""
_WHOLE_PIECE = 1 << 20
"""Bytes of a piece of a tensor that is read whole."""


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
        """The first `FIRST_BYTES` bytes of a tensor."""
        raise NotImplementedError

    def _nbytes(self, name: str) -> int:
        """Bytes of a tensor."""
        raise NotImplementedError

    def _bytes_at(self, name: str, start: int, stop: int) -> bytes:
        """These bytes of a tensor, as it is stored."""
        raise NotImplementedError


@contextlib.contextmanager
def as_checkpoint_errors(path: Path | str) -> Iterator[None]:
    """Turn an `OSError` into a `CheckpointError` about `path`."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            f"cannot read {shorten(path)}: {error.strerror or error}", cure=cure_of_read_error(error)
        ) from error


def format_tensor_count(names: Collection[str]) -> str:
    """`1 tensor`, `2 tensors`: as many as there are names."""
    return f"{len(names)} tensor" + "s" * (len(names) != 1)
