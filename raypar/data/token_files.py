"""Token files: a text as one flat, memory-mapped array of token ids (nanoGPT's `.bin`), read as windows of `context` tokens."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO, Literal

import numpy
import torch
import torch.nn.functional as F
from torch import Tensor

from raypar.errors import DataError
from raypar.files.json_type import Json
from raypar.files.printable_text import repr_text, shorten
from raypar.files.untrusted_files import open_regular_file, parse_untrusted_json, read_limited_bytes

DTYPES: dict[str, numpy.dtype[numpy.unsignedinteger]] = {"uint16": numpy.dtype("<u2"), "uint32": numpy.dtype("<u4")}
"""Little endian, whatever the machine."""
PIECE_BYTES = 4 << 20
"""How much text is read and tokenized at a time; a tokenizer gets whole lines."""
DIGEST_PIECES, DIGEST_PIECE_BYTES = 64, 64 << 10
"""Of a file that is larger so many pieces are in its digest, evenly spread: a text may have any size."""

Split = Literal["train", "validation", "all"]


def token_notes_path(path: Path) -> Path:
    """Where `raypar prepare` notes dtype, number of tokens and tokenizer: FILE.bin.json. Files from elsewhere have none."""
    return path.with_name(path.name + ".json")


class TokenFile(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    """Windows of a token file, side by side: sample i is (tokens [context], the same shifted by one), int64.

    `dtype`: uint16 or uint32; by default what `raypar prepare` noted, else uint16, as nanoGPT has it. `split`: the last
    `held_out` (a fraction) of the tokens is for validation. Raises `DataError` for files that cannot be that.
    """

    raypar_thread_safe = True
    """Draws no random numbers: nothing needs to be seeded before a sample."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        context: int,
        *,
        split: Split = "train",
        dtype: str | None = None,
        held_out: float = 0.1,
    ) -> None:
        self.path, self.context = Path(path), context
        if context < 1 or not 0 <= held_out < 1:
            raise DataError(f"context {context}, held_out {held_out}", cure="set context >= 1 and 0 <= held_out < 1")
        if split not in ("train", "validation", "all"):
            raise DataError(f"token file {self.path} has no split {split!r}", cure="one of train, validation, all")
        notes = self._noted()
        kind = dtype or notes.get("dtype", "uint16")
        if not isinstance(kind, str) or kind not in DTYPES:
            raise DataError(f"token file {self.path}: dtype {repr_text(kind)}", cure=f"one of {', '.join(DTYPES)}")
        self.dtype = DTYPES[kind]
        with self._open() as file:
            nbytes = os.fstat(file.fileno()).st_size
        total, rest = divmod(nbytes, self.dtype.itemsize)
        noted = notes.get("tokens", total)
        if rest or type(noted) is not int or noted != total:
            raise DataError(
                f"token file {self.path} has {nbytes} bytes, not {shorten(noted)} tokens of {self.dtype.itemsize} bytes",
                cure="it was cut off, or is of another dtype: make it again, or set dtype",
            )
        cut = total - int(total * held_out)
        parts: dict[str, tuple[int, int]] = {"train": (0, cut), "validation": (cut, total), "all": (0, total)}
        self.first, self.last = parts[split]
        if self.last - self.first <= context:
            raise DataError(
                f"the {split} part of token file {self.path} has {self.last - self.first} tokens, too few for one window of "
                f"{context} + 1",
                cure="use a longer text, a shorter context or another held_out",
            )
        self._nbytes = nbytes
        self._tokens: numpy.ndarray | None = None

    def _open(self) -> contextlib.AbstractContextManager[BinaryIO]:
        cure = f"make it: raypar prepare TEXT --out {self.path}"
        return open_regular_file(self.path, follow=True, error=DataError, cure=cure, what="token file ")

    def _noted(self) -> dict[str, Json]:
        notes, cure = token_notes_path(self.path), "remove it and set dtype"
        if not os.path.lexists(notes):
            return {}
        try:
            found = parse_untrusted_json(read_limited_bytes(notes, follow=True, error=DataError, cure=cure))
        except ValueError as error:
            raise DataError(f"{notes} is not JSON: {shorten(str(error))}", cure=cure) from error
        if not isinstance(found, dict):
            raise DataError(f"{notes} holds {shorten(found)}, not keys and values", cure=cure)
        return found

    def __getstate__(self) -> dict[str, Any]:
        """Another process maps the file itself; the tokens do not travel."""
        return {**self.__dict__, "_tokens": None}

    @property
    def raypar_content_digest(self) -> str:
        """Of the split's tokens, of large ones of pieces: a run that is resumed with other tokens is told so."""
        tokens, size = self._mapped()[self.first : self.last], DIGEST_PIECE_BYTES // self.dtype.itemsize
        found = hashlib.blake2b(f"{self.dtype.str} {len(tokens)}".encode(), digest_size=8)
        if len(tokens) <= DIGEST_PIECES * size:
            found.update(tokens.tobytes())
        else:
            for piece in range(DIGEST_PIECES):
                start = piece * (len(tokens) - size) // (DIGEST_PIECES - 1)
                found.update(tokens[start : start + size].tobytes())
        return found.hexdigest()

    def __len__(self) -> int:
        return (self.last - self.first - 1) // self.context

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self._windows([index])[0]

    def __getitems__(self, ids: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
        """Several windows at once, which takes less time than one by one; PyTorch's `DataLoader` asks so, too."""
        return self._windows(ids)

    def _windows(self, ids: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
        size, width = len(self), self.context + 1
        tokens = self._mapped()
        found = numpy.empty((len(ids), width), dtype=numpy.int64)
        for row, index in enumerate(ids):
            if not 0 <= index < size:
                raise IndexError(f"no window {index}: {self.path} has windows 0 to {size - 1:,} ({size:,} in all)")
            start = self.first + index * self.context
            found[row] = tokens[start : start + width]
        windows = torch.from_numpy(found)
        return list(zip(windows[:, :-1].unbind(), windows[:, 1:].unbind(), strict=True))

    def _mapped(self) -> numpy.ndarray:
        """The tokens of the file, mapped. Raises `DataError` where it has changed its size."""
        if self._tokens is None:
            with self._open() as file:
                nbytes = os.fstat(file.fileno()).st_size
                if nbytes != self._nbytes:
                    raise DataError(
                        f"token file {self.path} has {nbytes} bytes now, it had {self._nbytes}",
                        cure="do not change a token file while a job reads it",
                    )
                # As a plain array: slices of a `memmap` cost three times as much.
                self._tokens = numpy.memmap(file, dtype=self.dtype, mode="r").view(numpy.ndarray)
        return self._tokens


def token_loss(logits: Tensor, targets: Tensor, ignore: int = -100) -> tuple[Tensor, float]:
    """Cross-entropy in nats of logits [mb, seq, vocab] against ids [mb, seq]: (sum over tokens, number of tokens).

    Targets equal to `ignore` (padding) count for nothing.
    """
    total = F.cross_entropy(logits.flatten(0, -2), targets.flatten(), reduction="sum", ignore_index=ignore)
    return total, float((targets != ignore).sum())
