"""Tokenizes text files and writes them as one token file, for `raypar prepare`."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import numpy

from raypar.data.token_files import DTYPES, PIECE_BYTES, token_notes_path
from raypar.errors import ConfigError, DataError, RayparError, UserCodeError
from raypar.files.json_type import Json


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
