"""Checks the folder of `plan.optimizer_in` before workers start, where they run on this machine."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING

from raypar.errors import ConfigError
from raypar.files.file_systems import file_system_of, is_folder_used
from raypar.job import Job

if TYPE_CHECKING:
    from raypar.planner.memory_sheet import MemorySheet

IN_MEMORY = ("tmpfs", "ramfs")
"""File systems whose files lie in memory."""
ENDING_S = 10.0
"""How long workers of a run that was killed may take to end."""


def lines_about_offloading(job: Job) -> tuple[str, ...]:
    """Lines for a job whose optimizer state lies in files, and in memory all the same: by the mirror's copies, or because the
    files themselves lie there."""
    if job.optimizer_in is None:
        return ()
    found = []
    if job.elastic is not None and job.elastic.mirror != "off" and job.elastic.mirror_in is None:
        found.append(
            "plan.optimizer_in keeps the optimizer's state out of memory, and elastic.mirror puts up to four copies of it "
            "there\n  cure: set elastic.mirror_in: FOLDER, too, or elastic.mirror: off"
        )
    if (kind := file_system_of(job.optimizer_in)) in IN_MEMORY:
        found.append(
            f"plan.optimizer_in {job.optimizer_in} is on {kind} here, whose files lie in memory: nothing is saved\n"
            "  cure: give a folder on a local disk"
        )
    return tuple(found)


def check_offload_folder(job: Job, sheets: Iterable[MemorySheet]) -> None:
    """Raise `ConfigError` if this machine's folder cannot hold the optimizer state of all workers. `sheets`: theirs."""
    from raypar.worker.state.file_memory import OPTIMIZER_STATE, check_folder_for_copies

    folder = job.optimizer_in
    if folder is None:
        return
    check_folder_for_copies(folder, OPTIMIZER_STATE)
    if _is_still_used(folder):
        raise ConfigError(
            f"plan.optimizer_in {folder} is used by another run on this machine: each would take the room that the other one "
            "counts on",
            cure="give each run a folder of its own",
        )
    needed = sum(sheet.optimizer_files for sheet in sheets)
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise ConfigError(
            f"plan.optimizer_in {folder} has room for {free / 2**20:,.0f} MiB, and all workers together offload "
            f"{needed / 2**20:,.0f} MiB",
            cure=OPTIMIZER_STATE.cure,
        )


def _is_still_used(folder: str) -> bool:
    """Whether processes use a folder, those that are ending after a run left out."""
    until = time.monotonic() + ENDING_S
    while is_folder_used(folder):
        if time.monotonic() > until:
            return True
        time.sleep(0.1)
    return False
