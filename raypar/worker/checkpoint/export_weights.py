"""Writes the parameters and persistent buffers of a checkpoint to one file, `.safetensors` or `.pt` (a state_dict)."""

from __future__ import annotations

import io
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import BinaryIO, TypeVar

from raypar.errors import CheckpointError
from raypar.files.atomic_write import written_aside
from raypar.files.os_error_cure import cure_of_os_error
from raypar.files.remove_if_killed import removed_if_killed
from raypar.plan.wording import after_steps
from raypar.storage.checkpoint_store import CheckpointRef, CheckpointStore, open_checkpoint, open_checkpoint_store
from raypar.storage.pyarrow_store import open_for_writing
from raypar.storage.run_folder import RunFolder
from raypar.storage.storage_uri import StorageUri
from raypar.worker.checkpoint.checkpoint_files import (
    MANIFEST,
    CheckpointTensors,
    checkpoint_name,
    latest_usable_checkpoint,
    no_usable_checkpoint_error,
    verify_checkpoint,
    write_safetensors,
    write_tensors_as_safetensors,
)

Exported = TypeVar("Exported")

ATTEMPTS = 10
"""How often an export begins if the run, which trains on, removes the checkpoint meanwhile."""


def export_checkpoint(
    run: str, run_dir: str, step: int | None, export: Callable[[CheckpointRef], Exported], warn: Callable[[str], None]
) -> Exported:
    """What `export` returns for the checkpoint at `run`, if that is one; else for the run's checkpoint after `step` steps, or
    its last whole one. If a run that trains removes that one meanwhile, `export` is called again, for the last one then.

    `warn` gets a line for each checkpoint that is skipped. Raises `CheckpointError`.
    """
    given = open_checkpoint(run, "the run")
    if given.has_file(MANIFEST):
        if step is not None:
            raise CheckpointError(
                f"{run} is one checkpoint: no other one is chosen", cure="leave the step out, or give the run that has it"
            )
        return export(verify_checkpoint(given).checkpoint)
    with RunFolder.open_for_reading(run, run_dir, with_job=False, last_bytes=0) as folder:
        store = open_checkpoint_store(folder.checkpoint_store_location)
        there = folder.list_checkpoints() if step is not None else []
    if step is not None:
        if checkpoint_name(step) not in there:
            raise CheckpointError(
                f"run {folder.name} has no checkpoint {after_steps(step)}", cure=f"it has: {', '.join(there)}"
            )
        return export(verify_checkpoint(CheckpointRef(store, checkpoint_name(step))).checkpoint)
    for left in reversed(range(ATTEMPTS)):
        known = set(store.names())
        found, skipped = latest_usable_checkpoint(store)
        if found is None and left and has_saved_another(store, known):
            continue
        for line in skipped:
            warn(line)
        if found is None:
            cure = "train it with checkpoint.at_end, or set checkpoint.every"
            raise no_usable_checkpoint_error(folder.name, folder.checkpoint_store_location, skipped, cure)
        try:
            return export(found)
        except CheckpointError as error:
            if not has_saved_another(store, known) or (not left and found.name in store.names()):
                raise
            if not left:
                raise CheckpointError(
                    f"run {folder.name} trains, and has removed the checkpoint during each of {ATTEMPTS} exports: {error.what}",
                    cure="export when it has ended; or set checkpoint.keep to more, or checkpoint.every, when it is resumed",
                ) from error
    raise AssertionError("the last attempt returns or raises")


def has_saved_another(store: CheckpointStore, known: Collection[str]) -> bool:
    """Whether the run has saved a checkpoint that is not among the known names."""
    return not set(store.names()) <= set(known)


def write_to_folder(out: Path, tensors: CheckpointTensors, ties: Mapping[str, str]) -> int:
    """Write the file whole or not at all; returns its size in bytes. Raises `CheckpointError`."""
    try:
        with written_aside(out) as aside, removed_if_killed(aside):
            if out.suffix == ".pt":
                with open(aside, "wb") as file:  # unlike torch's own file class, this one says why writing failed
                    save_state_dict(file, tensors, ties)
            else:
                write_safetensors(aside, tensors.specs(), tensors.values(), metadata={"format": "pt", **ties})
    except CheckpointError as error:
        if not isinstance(error.__cause__, OSError):
            raise
        raise unwritable_out_error(out, error.__cause__) from error
    except Exception as error:
        # torch raises its own classes for a full disk.
        raise unwritable_out_error(out, error) from error
    return out.stat().st_size


def write_to_storage(place: StorageUri, tensors: CheckpointTensors, ties: Mapping[str, str]) -> int:
    """Write the file at a place on shared storage, one tensor at a time; returns its size in bytes. Raises `CheckpointError`.

    A .pt is made in memory first.
    """
    with open_for_writing(place) as file:
        if place.name.endswith(".pt"):
            whole = io.BytesIO()
            save_state_dict(whole, tensors, ties)
            return file.write(whole.getbuffer())
        return write_tensors_as_safetensors(file, tensors.specs(), tensors.values(), metadata={"format": "pt", **ties})[0]


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
