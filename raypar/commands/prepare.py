"""`raypar prepare TEXT --out FILE.bin`: makes a memory-mapped token file from text, for `raypar.data.token_files:TokenFile`."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from raypar.errors import ConfigError, DataError, RayparError, UserCodeError
from raypar.files.os_error_cure import cure_of_os_error
from raypar.storage.run_folder import check_local_path
from raypar.user_code.user_code_errors import make_importable

PIECE_BYTES = 4 << 20
"""How much text is read and tokenized at a time; a tokenizer gets whole lines."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `raypar prepare`."""
    parser.add_argument("text", nargs="+", help="text files (UTF-8), joined in this order")
    parser.add_argument("--out", required=True, metavar="FILE.bin", help="the token file to make")
    parser.add_argument(
        "--tokenizer",
        default="bytes",
        metavar="bytes|module:name",
        help="a function text -> list of ids; bytes (the default): every byte of the text is a token",
    )
    parser.add_argument("--dtype", choices=("uint16", "uint32"), default="uint16", help="of an id (default uint16)")


def run(args: argparse.Namespace) -> int:
    """Write FILE.bin and FILE.bin.json; exit code 0."""
    files = [Path(name) for name in args.text]
    missing = [str(file) for file in files if not file.is_file()]
    if missing:
        raise ConfigError(f"no text file {', '.join(missing)}", cure="give the paths of text files")
    out = check_local_path(args.out, "--out")
    if out.suffix != ".bin" or not out.parent.is_dir() or out in files:
        raise ConfigError(f"cannot write --out {args.out}", cure="name a .bin file in a folder that exists")
    from raypar.data.token_files import write_tokens

    make_importable(Path.cwd())
    encode = _tokenizer(args.tokenizer)
    try:
        tokens = write_tokens(out, _pieces(files, encode), dtype=args.dtype, notes={"tokenizer": args.tokenizer})
    except OSError as error:
        raise ConfigError(
            f"cannot write {out}: {error.strerror or error}",
            cure=cure_of_os_error(error, "choose another --out, or free disk space"),
        ) from error
    print(f"{tokens:,} tokens ({args.dtype}, {out.stat().st_size / 2**20:.1f} MiB) in {out}; in a job file:")
    print(f"data: {{function: raypar.data.token_files:TokenFile, args: {{path: {out}, context: 128, split: train}}}}")
    return 0


def _tokenizer(name: str) -> Callable[[str], Sequence[int]] | None:
    if name == "bytes":
        return None
    from raypar.job import FunctionConfig

    return FunctionConfig(function=name).resolve()


def _pieces(files: Sequence[Path], encode: Callable[[str], Sequence[int]] | None) -> Iterator[Any]:
    """The token ids, piece by piece; shows the progress on a terminal."""
    import numpy

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


def _encoded(encode: Callable[[str], Sequence[int]], piece: bytes, file: Path) -> Any:
    import numpy

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
