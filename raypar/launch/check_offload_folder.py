"""Checks the folders of `plan.optimizer_in` and `plan.activations_in` before workers start, where they run on this machine."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterable
from operator import attrgetter
from typing import TYPE_CHECKING

from raypar.errors import ConfigError
from raypar.files.file_systems import file_system_of, is_folder_used
from raypar.job import Job

if TYPE_CHECKING:
    from raypar.planner.memory_sheet import MemorySheet
    from raypar.worker.state.file_memory import FolderUse

IN_MEMORY = ("tmpfs", "ramfs")
"""File systems whose files lie in memory."""
ENDING_S = 10.0
"""How long workers of a run that was killed may take to end."""


def lines_about_offloading(job: Job) -> tuple[str, ...]:
    """Lines for a job whose optimizer state, or activations, lie in files, and in memory all the same: by the mirror's copies,
    or because the files themselves lie there."""
    found = []
    mirrored = job.elastic is not None and job.elastic.mirror != "off" and job.elastic.mirror_in is None
    if job.optimizer_in is not None and mirrored:
        found.append(
            "plan.optimizer_in keeps the optimizer's state out of memory, and elastic.mirror puts up to four copies of it "
            "there\n  cure: set elastic.mirror_in: FOLDER, too, or elastic.mirror: off"
        )
    for key, folder in (("plan.optimizer_in", job.optimizer_in), ("plan.activations_in", job.activations_folder)):
        if folder is not None and (kind := file_system_of(folder)) in IN_MEMORY:
            found.append(
                f"{key} {folder} is on {kind} here, whose files lie in memory: nothing is saved\n"
                "  cure: give a folder on a local disk"
            )
    return tuple(found)


def lines_about_new_folders(job: Job) -> tuple[str, ...]:
    """A line for each folder of a job for state or activations that is not on this machine, where workers make it."""
    mirror_in = job.elastic.mirror_in if job.elastic is not None else None
    folders = {
        "elastic.mirror_in": mirror_in,
        "plan.optimizer_in": job.optimizer_in,
        "plan.activations_in": job.activations_folder,
    }
    return tuple(
        f"{key} {folder} is not there yet: workers make it in {_existing_part(folder)}"
        for key, folder in folders.items()
        if folder is not None and not os.path.exists(folder)
    )


def _existing_part(folder: str) -> str:
    """The folder above one that is not there, or above that, which is."""
    above = os.path.dirname(folder)
    return above if os.path.exists(above) else _existing_part(above)


def check_offload_folder(job: Job, sheets: Iterable[MemorySheet]) -> None:
    """Raise `ConfigError` if this machine's folders cannot hold what all workers offload. `sheets`: theirs."""
    from raypar.worker.state.activation_file import ACTIVATIONS
    from raypar.worker.state.file_memory import OPTIMIZER_STATE, check_folder_for_copies

    sheets, on_disk = list(sheets), dict[int, int]()
    for folder, use, bytes_of in (
        (job.optimizer_in, OPTIMIZER_STATE, attrgetter("optimizer_files")),
        (job.activations_folder, ACTIVATIONS, attrgetter("activation_files")),
    ):
        if folder is None:
            continue
        check_folder_for_copies(folder, use)
        if _is_still_used(folder):
            raise ConfigError(
                f"{use.key} {folder} is used by another run on this machine: each would take the room that the other one "
                "counts on",
                cure="give each run a folder of its own",
            )
        disk = os.stat(folder).st_dev
        on_disk[disk] = on_disk.get(disk, 0) + sum(map(bytes_of, sheets))
        _check_room(folder, use, on_disk[disk])


def _check_room(folder: str, use: FolderUse, needed: int) -> None:
    """Raise `ConfigError` if there is less room for all that is to lie on a folder's disk."""
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise ConfigError(
            f"{use.key} {folder} has room for {free / 2**20:,.0f} MiB, and all workers together offload "
            f"{needed / 2**20:,.0f} MiB",
            cure=use.cure,
        )


def _is_still_used(folder: str) -> bool:
    """Whether processes use a folder, those that are ending after a run left out."""
    until = time.monotonic() + ENDING_S
    while is_folder_used(folder):
        if time.monotonic() > until:
            return True
        time.sleep(0.1)
    return False
