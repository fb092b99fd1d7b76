"""`raypar export RUN --out FILE`: writes the whole model of a run to one file, `.safetensors` or `.pt` (a state_dict)."""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from raypar.console.command_arguments import add_run_dir_argument
from raypar.errors import ConfigError
from raypar.storage.run_folder import check_local_path, parse_storage_location

if TYPE_CHECKING:
    from raypar.storage.checkpoint_store import CheckpointRef

SUFFIXES = (".safetensors", ".pt")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `raypar export`."""
    parser.add_argument("run", help="a run's name under --run-dir, or the path or URI of a run or of one checkpoint")
    parser.add_argument(
        "--out", required=True, metavar="FILE", help="what to write, a path or a URI: .safetensors, or .pt for torch.load"
    )
    parser.add_argument("--step", type=int, help="the checkpoint after so many steps (default: the last that is whole)")
    add_run_dir_argument(parser)


def run(args: argparse.Namespace) -> int:
    """Write the file and print the hash of its weights; exit code 0.

    The file has all parameters and persistent buffers, so that `load_state_dict` takes a .pt unchanged. A tied parameter has
    all its names in a .pt. A .safetensors holds each tensor once, under its first name; the metadata map the other names to it.
    """
    shared = parse_storage_location(args.out, "--out")
    out = check_local_path(args.out, "--out") if shared is None else Path(shared.name)
    if out.suffix not in SUFFIXES or (shared is None and not out.parent.is_dir()):
        raise ConfigError(f"cannot write --out {args.out}", cure=f"name a {' or '.join(SUFFIXES)} file in a folder that exists")
    from raypar.worker.checkpoint.checkpoint_files import (
        BUFFER,
        PARAMETER,
        CheckpointTensors,
        checkpoint_weights_hash,
        load_manifest,
    )
    from raypar.worker.checkpoint.export_weights import export_checkpoint, write_to_folder, write_to_storage

    def export(checkpoint: CheckpointRef) -> tuple[int, int, int, str]:
        """(tensors, steps done, bytes of the file, hash of the weights)."""
        manifest, tensors = load_manifest(checkpoint), CheckpointTensors(checkpoint, kinds=(PARAMETER, BUFFER))
        size = (
            write_to_folder(out, tensors, manifest.ties) if shared is None else write_to_storage(shared, tensors, manifest.ties)
        )
        return len(tensors), manifest.steps_done, size, checkpoint_weights_hash(checkpoint)

    warn = partial(print, "warning:", file=sys.stderr)
    tensors, steps_done, size, weights = export_checkpoint(args.run, args.run_dir, args.step, export, warn)
    print(f"{tensors} tensors after {steps_done} steps in {args.out} ({size / 2**20:.1f} MiB)")
    print(f"weights sha256 {weights}", flush=True)
    return 0
