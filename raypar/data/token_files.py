"""Token files: a text as one flat, memory-mapped array of token ids (nanoGPT's `.bin`), read as windows of `context` tokens."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Literal

import numpy
import torch
import torch.nn.functional as F
from torch import Tensor

from raypar.errors import ConfigError, DataError, RayparError, UserCodeError
from raypar.files.json_values import Json
from raypar.files.untrusted_files import open_regular_file, parse_untrusted_json, read_limited_bytes, repr_text, shorten

DTYPES: dict[str, numpy.dtype[numpy.unsignedinteger]] = {"uint16": numpy.dtype("<u2"), "uint32": numpy.dtype("<u4")}
"""Little endian, whatever the machine."""
PIECE_BYTES = 4 << 20
"""How much text is read and tokenized at a time; a tokenizer gets whole lines."""

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

    def __len__(self) -> int:
        return (self.last - self.first - 1) // self.context

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(f"no window {index}: {self.path} has windows 0 to {len(self) - 1:,} ({len(self):,} in all)")
        if self._tokens is None:
            with self._open() as file:
                nbytes = os.fstat(file.fileno()).st_size
                if nbytes != self._nbytes:
                    raise DataError(
                        f"token file {self.path} has {nbytes} bytes now, it had {self._nbytes}",
                        cure="do not change a token file while a job reads it",
                    )
                self._tokens = numpy.memmap(file, dtype=self.dtype, mode="r")
        start = self.first + index * self.context
        window = torch.from_numpy(self._tokens[start : start + self.context + 1].astype(numpy.int64))
        return window[:-1], window[1:]


def token_loss(logits: Tensor, targets: Tensor, ignore: int = -100) -> tuple[Tensor, float]:
    """Cross-entropy in nats of logits [mb, seq, vocab] against ids [mb, seq]: (sum over tokens, number of tokens).

    Targets equal to `ignore` (padding) count for nothing.
    """
    total = F.cross_entropy(logits.flatten(0, -2), targets.flatten(), reduction="sum", ignore_index=ignore)
    return total, float((targets != ignore).sum())


def write_tokens(out: Path, pieces: Iterable[Sequence[int] | numpy.ndarray], *, dtype: str, notes: dict[str, Json]) -> int:
    """Write `pieces` (each a sequence of ids) one after the other, aside, and name the file `out` when it is whole.

    Returns the number of tokens. Raises `DataError` for an id that does not fit and for no tokens at all; `out` stays.
    """
    kind = DTYPES[dtype]
    limit = numpy.iinfo(kind).max
    aside = out.with_name(f".{out.name}.{os.getpid()}.tmp")
    noted = token_notes_path(aside)
    total = 0
    try:
        with open(aside, "wb") as file:
            for piece in pieces:
                ids = numpy.asarray(piece)
                if not ids.size:
                    continue
                low, high = int(ids.min()), int(ids.max())
                if low < 0 or high > limit or ids.dtype.kind not in "iu":
                    raise DataError(
                        f"token ids {low} to {high} ({ids.dtype}) do not fit {dtype}",
                        cure="use --dtype uint32" if low >= 0 and high < 2**32 else "the tokenizer must return ids >= 0",
                    )
                file.write(ids.astype(kind).tobytes())
                total += ids.size
            file.flush()
            os.fsync(file.fileno())
        if not total:
            raise DataError("the text has no tokens", cure="give a text that is not empty")
        noted.write_text(json.dumps({"dtype": dtype, "tokens": total, **notes}) + "\n")  # while `out` is as it was
        # The old notes do not belong to the new tokens: there is no moment at which a reader would believe them.
        token_notes_path(out).unlink(missing_ok=True)
        os.replace(aside, out)
        os.replace(noted, token_notes_path(out))
    finally:
        for left in (aside, noted):
            with contextlib.suppress(OSError):  # it is not there, or the disk is read-only
                left.unlink()
    return total


def tokenize_files(files: Sequence[Path], encode: Callable[[str], Sequence[int]] | None) -> Iterator[numpy.ndarray]:
    """The token ids of text files, piece by piece; shows the progress on a terminal.

    `encode`: text -> ids; None: every byte is a token. Raises `ConfigError` for a file that cannot be read, `DataError` for
    text that is not UTF-8 and for ids that are no list, `UserCodeError` if `encode` raises.
    """
    total = sum(file.stat().st_size for file in files)
    done, start = 0, time.monotonic()
    for file in files:
        for piece in _read(file, whole_lines=encode is not None):
            yield numpy.frombuffer(piece, dtype=numpy.uint8) if encode is None else _encoded(encode, piece, file)
            done += len(piece)
            if sys.stderr.isatty():
                rate = done / max(1e-9, time.monotonic() - start)
                print(f"\r{done / total:4.0%} of {total / 2**20:.1f} MiB, {rate / 2**20:.1f} MiB/s", end="", file=sys.stderr)
    if sys.stderr.isatty():
        print(file=sys.stderr)


def _read(file: Path, *, whole_lines: bool) -> Iterator[bytes]:
    try:
        with open(file, "rb") as stream:
            while piece := stream.read(PIECE_BYTES):
                yield piece + stream.readline() if whole_lines else piece
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror or error}", cure="give the paths of text files") from error


def _encoded(encode: Callable[[str], Sequence[int]], piece: bytes, file: Path) -> numpy.ndarray:
    try:
        text = piece.decode()
    except UnicodeDecodeError as error:
        raise DataError(
            f"{file} is not UTF-8 text: {error.reason} at byte {error.start} of a piece",
            cure="convert it, or use --tokenizer bytes",
        ) from error
    try:
        ids = numpy.asarray(encode(text))
    except RayparError:
        raise
    except Exception as error:
        raise UserCodeError(
            f"the tokenizer raised {type(error).__name__}: {error}", cure="it is called with a text and returns a list of ids"
        ) from error
    if ids.ndim != 1:
        raise DataError(
            f"the tokenizer returned an array of shape {ids.shape}", cure="it is called with a text and returns a list of ids"
        )
    return ids
