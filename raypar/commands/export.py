"""`raypar export RUN --out FILE`: writes the whole model of a run to one file, `.safetensors` or `.pt` (a state_dict)."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, cast

from raypar.console.run_folder_arguments import add_run_dir_argument
from raypar.errors import CheckpointError, ConfigError
from raypar.files.os_error_cure import cure_of_os_error
from raypar.storage.run_folder import RunFolder, check_local_path, parse_storage_location

if TYPE_CHECKING:
    from typing import BinaryIO

    from raypar.storage.checkpoint_store import CheckpointRef
    from raypar.storage.storage_uri import StorageUri
    from raypar.worker.checkpoint.checkpoint_files import CheckpointTensors

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
    checkpoint = _checkpoint(args.run, args.run_dir, args.step)
    from raypar.worker.checkpoint.checkpoint_files import (
        BUFFER,
        PARAMETER,
        CheckpointTensors,
        checkpoint_weights_hash,
        load_manifest,
    )

    manifest, tensors = load_manifest(checkpoint), CheckpointTensors(checkpoint, kinds=(PARAMETER, BUFFER))
    size = write_to_folder(out, tensors, manifest.ties) if shared is None else write_to_storage(shared, tensors, manifest.ties)
    print(f"{len(tensors)} tensors after {manifest.steps_done} steps in {args.out} ({size / 2**20:.1f} MiB)")
    print(f"weights sha256 {checkpoint_weights_hash(checkpoint)}", flush=True)
    return 0


def write_to_folder(out: Path, tensors: CheckpointTensors, ties: Mapping[str, str]) -> int:
    """Write the file whole or not at all; returns its size in bytes. Raises `CheckpointError`."""
    from raypar.worker.checkpoint.checkpoint_files import write_safetensors

    aside = out.with_name(f".{out.name}.{os.getpid()}.tmp")
    try:
        if out.suffix == ".pt":
            with open(aside, "wb") as file:  # unlike torch's own file class, this one says why writing failed
                save_state_dict(file, tensors, ties)
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
    return out.stat().st_size


def write_to_storage(place: StorageUri, tensors: CheckpointTensors, ties: Mapping[str, str]) -> int:
    """Write the file at a place on shared storage, one tensor at a time; returns its size in bytes. Raises `CheckpointError`.

    A .pt is made in memory first.
    """
    import io

    from raypar.storage.pyarrow_store import open_for_writing
    from raypar.worker.checkpoint.checkpoint_files import write_tensors_as_safetensors

    with open_for_writing(place) as file:
        if place.name.endswith(".pt"):
            whole = io.BytesIO()
            save_state_dict(whole, tensors, ties)
            return file.write(whole.getbuffer())
        stream = cast("BinaryIO", file)  # of which only `write` is used
        return write_tensors_as_safetensors(stream, tensors.specs(), tensors.values(), metadata={"format": "pt", **ties})[0]


def save_state_dict(file: BinaryIO, tensors: CheckpointTensors, ties: Mapping[str, str]) -> None:
    """Write a state_dict, with a tied parameter under all its names."""
    import torch

    whole = dict(tensors)
    torch.save(whole | {name: whole[first] for name, first in ties.items()}, file)


def unwritable_out_error(out: Path, error: BaseException) -> CheckpointError:
    """The error for an --out that cannot be written, with the first line of `error`."""
    why = str(getattr(error, "strerror", None) or error).partition("\n")[0]
    return CheckpointError(
        f"cannot write {out}: {why}", cure=cure_of_os_error(error, "choose another --out, or free disk space")
    )


def _checkpoint(run: str, run_dir: str, step: int | None) -> CheckpointRef:
    """The checkpoint at `run`, if that is one; else the run's checkpoint after `step` steps, or its last whole one.

    Raises `CheckpointError`.
    """
    from raypar.storage.checkpoint_store import CheckpointRef, open_checkpoint, open_checkpoint_store
    from raypar.worker.checkpoint.checkpoint_files import (
        MANIFEST,
        checkpoint_name,
        latest_usable_checkpoint,
        verify_checkpoint,
    )

    given = open_checkpoint(run, "the run")
    if given.has_file(MANIFEST):
        return verify_checkpoint(given).checkpoint
    with RunFolder.open_for_reading(run, run_dir, with_job=False, last_bytes=0) as folder:
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
