"""`raypar export RUN --out FILE`: writes the whole model of a run to one file, `.safetensors` or `.pt` (a state_dict)."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from raypar.errors import CheckpointError, ConfigError
from raypar.run_folder import RunFolder, check_local_path

if TYPE_CHECKING:
    from raypar.worker.checkpoint.checkpoint_store import CheckpointRef

SUFFIXES = (".safetensors", ".pt")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `raypar export`."""
    parser.add_argument("run", help="a run's name under --run-dir, its path, or the path of one checkpoint")
    parser.add_argument("--out", required=True, metavar="FILE", help="what to write: .safetensors, or .pt for torch.load")
    parser.add_argument("--step", type=int, help="the checkpoint after so many steps (default: the last that is whole)")
    parser.add_argument("--run-dir", default="runs/", help="where runs lie (default runs/)")


def run(args: argparse.Namespace) -> int:
    """Write the file and print the hash of its weights; exit code 0.

    The file has all parameters and persistent buffers, so that `load_state_dict` takes a .pt unchanged. A tied parameter has
    all its names in a .pt. A .safetensors holds each tensor once, under its first name; the metadata map the other names to it.
    """
    out = check_local_path(args.out, "--out")
    if out.suffix not in SUFFIXES or not out.parent.is_dir():
        raise ConfigError(f"cannot write --out {args.out}", cure=f"name a {' or '.join(SUFFIXES)} file in a folder that exists")
    checkpoint = _checkpoint(args.run, args.run_dir, args.step)
    from raypar.worker.checkpoint.checkpoint_files import (
        BUFFER,
        PARAMETER,
        CheckpointTensors,
        checkpoint_weights_hash,
        load_manifest,
        write_safetensors,
    )

    ties, tensors = load_manifest(checkpoint).ties, CheckpointTensors(checkpoint, kinds=(PARAMETER, BUFFER))
    aside = out.with_name(f".{out.name}.{os.getpid()}.tmp")
    try:
        if out.suffix == ".pt":
            import torch

            whole = dict(tensors)
            with open(aside, "wb") as file:  # unlike torch's own file class, this one says why writing failed
                torch.save(whole | {name: whole[first] for name, first in ties.items()}, file)
        else:
            write_safetensors(aside, tensors.specs(), tensors.values(), metadata={"format": "pt", **ties})
        os.replace(aside, out)
    except CheckpointError as error:
        if not isinstance(error.__cause__, OSError):
            raise
        raise unwritable_out_error(out, error.__cause__) from error
    except Exception as error:
        # torch raises its own classes for a full disk.
        raise unwritable_out_error(out, error) from error
    finally:
        with contextlib.suppress(OSError):  # it is not there, or the disk is read-only
            aside.unlink()
    steps, size = load_manifest(checkpoint).steps_done, out.stat().st_size / 2**20
    print(f"{len(tensors)} tensors after {steps} steps in {out} ({size:.1f} MiB)")
    print(f"weights sha256 {checkpoint_weights_hash(checkpoint)}", flush=True)
    return 0


def unwritable_out_error(out: Path, error: BaseException) -> CheckpointError:
    """The error for an --out that cannot be written, with the first line of `error`."""
    why = str(getattr(error, "strerror", None) or error).partition("\n")[0]
    return CheckpointError(f"cannot write {out}: {why}", cure="choose another --out, or free disk space")


def _checkpoint(run: str, run_dir: str, step: int | None) -> CheckpointRef:
    """The checkpoint at `run`, if that is one; else the run's checkpoint after `step` steps, or its last whole one.

    Raises `CheckpointError`.
    """
    from raypar.worker.checkpoint.checkpoint_files import (
        MANIFEST,
        checkpoint_name,
        latest_usable_checkpoint,
        verify_checkpoint,
    )
    from raypar.worker.checkpoint.checkpoint_store import CheckpointRef, open_checkpoint, open_checkpoint_store

    given = open_checkpoint(run, "the run")
    if given.has_file(MANIFEST):
        return verify_checkpoint(given).checkpoint
    folder = RunFolder.find(run, run_dir, with_job=False)
    store = open_checkpoint_store(folder.checkpoint_location)
    if step is not None:
        there = sorted(name for name in store.names() if name.startswith("step_"))
        if checkpoint_name(step) not in there:
            raise CheckpointError(f"run {folder.name} has no checkpoint after {step} steps", cure=f"it has: {', '.join(there)}")
        return verify_checkpoint(CheckpointRef(store, checkpoint_name(step))).checkpoint
    found, skipped = latest_usable_checkpoint(store)
    for line in skipped:
        print(f"warning: {line}", file=sys.stderr)
    if found is None:
        raise CheckpointError(
            f"run {folder.name} has no checkpoint that is whole",
            cure="train it with checkpoint.at_end, or set checkpoint.every",
        )
    return found
