"""`raypar prepare TEXT --out FILE.bin`: makes a memory-mapped token file from text, for `raypar.data.token_files:TokenFile`."""

from __future__ import annotations

import argparse
from pathlib import Path

from raypar.errors import ConfigError
from raypar.files.os_error_cure import cure_of_os_error
from raypar.storage.run_folder import check_local_path
from raypar.user_code.user_code_errors import make_importable


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
    from raypar.data.tokenize_text import tokenize_files, write_tokens
    from raypar.job import FunctionConfig

    make_importable(Path.cwd())
    encode = FunctionConfig(function=args.tokenizer).resolve() if args.tokenizer != "bytes" else None
    try:
        tokens = write_tokens(out, tokenize_files(files, encode), dtype=args.dtype, notes={"tokenizer": args.tokenizer})
    except OSError as error:
        raise ConfigError(
            f"cannot write {out}: {error.strerror or error}",
            cure=cure_of_os_error(error, "choose another --out, or free disk space"),
        ) from error
    print(f"{tokens:,} tokens ({args.dtype}, {out.stat().st_size / 2**20:.1f} MiB) in {out}; in a job file:")
    print(f"data: {{function: raypar.data.token_files:TokenFile, args: {{path: {out}, context: 128, split: train}}}}")
    return 0
