"""`raypar export RUN --out FILE`: writes the whole model of a run to one file, `.safetensors` or `.pt` (a state_dict).

`raypar export RUN --format hf --out FOLDER` writes the folder that `from_pretrained` of transformers opens.
"""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path

from raypar.console.command_arguments import add_average_argument, add_best_argument, add_run_dir_argument
from raypar.errors import ConfigError
from raypar.launch.export_run import DTYPES, ExportRequest, FolderOptions, export_to_file, export_to_folder
from raypar.storage.find_best_checkpoint import find_best_step_of_run
from raypar.user_code.user_code_errors import make_importable


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `raypar export`."""
    parser.add_argument("run", help="a run's name under --run-dir, or the path or URI of a run or of one checkpoint")
    parser.add_argument(
        "--out",
        required=True,
        metavar="FILE",
        help="what to write, a path or a URI: .safetensors, or .pt for torch.load; with --format hf a new folder here",
    )
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--step", type=int, help="the checkpoint after so many steps (default: the last that is whole)")
    add_best_argument(which)
    add_average_argument(parser)
    parser.add_argument(
        "--format",
        choices=("file", "hf"),
        default="file",
        help="hf: what the model's own save_pretrained writes; the model function is called for it (default: one file)",
    )
    parser.add_argument(
        "--dtype", choices=tuple(DTYPES), help="cast floating-point tensors (default: they stay as they were trained)"
    )
    hf = parser.add_argument_group("with --format hf")
    hf.add_argument("--model", metavar="MODULE:NAME", help="the model function, for a run that has no job file to name it")
    hf.add_argument("--tokenizer", metavar="FOLDER", help="copy the tokenizer's files from there")
    hf.add_argument("--max-shard-size", metavar="SIZE", help="the most that one file of weights has, such as 5GB")
    hf.add_argument("--merge", action="store_true", help="add the adapters of a PEFT model to its weights")
    add_run_dir_argument(parser)


def run(args: argparse.Namespace) -> int:
    """Write the file or the folder and print the hash of its weights; exit code 0.

    The file has all parameters and persistent buffers, so that `load_state_dict` takes a .pt unchanged. A tied parameter has
    all its names in a .pt. A .safetensors holds each tensor once, under its first name; the metadata map the other names to it.
    """
    step = args.step if args.best is None else find_best_step_of_run(args.run, args.run_dir, args.best)
    request = ExportRequest(args.run, args.run_dir, step, args.out, DTYPES.get(args.dtype), args.average)
    warn = partial(print, "warning:", file=sys.stderr)
    if args.model:
        make_importable(Path.cwd())
    if args.format == "hf":
        lines = export_to_folder(request, FolderOptions(args.model, args.tokenizer, args.max_shard_size, args.merge), warn)
    elif args.model or args.tokenizer or args.max_shard_size or args.merge:
        what = "--model, --tokenizer, --max-shard-size and --merge are for folders"
        raise ConfigError(what, cure="give --format hf, or leave them out")
    else:
        lines = export_to_file(request, warn)
    print("\n".join(lines), flush=True)
    return 0
