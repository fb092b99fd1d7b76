"""Reads rows of the table of runs from run folders: of all runs in a place, or of one that was stopped."""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING, Any

from raypar.console.read_run_folder import read_job_step_count
from raypar.console.run_table import RunRow, build_run_row
from raypar.errors import ConfigError
from raypar.files.untrusted_files import explain_read_errors
from raypar.storage.new_run_lines import RunFollower
from raypar.storage.run_folder import RunFolder, check_local_path, parse_storage_location, resume_argument

if TYPE_CHECKING:
    from raypar.storage.storage_uri import StorageUri

TAIL_BYTES = 256 << 10
"""How much of a run's metrics and events is read: the last steps, and the end."""


def list_runs_in_folder(run_dir: str, last: int, now: float) -> list[RunRow]:
    """The rows of the runs below `run_dir` that were started or resumed last, in that order."""
    if (shared := parse_storage_location(run_dir, "--run-dir")) is not None:
        return list_runs_on_storage(shared, last, now)
    root = check_local_path(run_dir, "--run-dir")
    with explain_read_errors(root):
        folders = [path for path in root.iterdir() if path.is_dir()] if root.is_dir() else []
        runs = [RunFolder(path) for path in folders if (path / "job.yaml").exists() or (path / "checkpoints").is_dir()]
    runs.sort(key=lambda run: read_start_time(run) or 0.0)
    return [read_run_row(run, now) for run in runs[-last or None :]]


def list_runs_on_storage(run_dir: StorageUri, last: int, now: float) -> list[RunRow]:
    """The same of runs below a place on shared storage."""
    from raypar.storage.folder_download import list_runs_below

    rows = []
    for uri, _ in list_runs_below(run_dir)[-last or None :]:
        with RunFolder.open_for_reading(str(uri), with_job=False, last_bytes=TAIL_BYTES) as run:
            rows.append(read_run_row(run, now))
    return rows


def read_start_time(run: RunFolder) -> float | None:
    """When the run was started or resumed."""
    for path in (run.cluster, run.job, run.path):
        with contextlib.suppress(OSError):
            return path.lstat().st_mtime
    return None


def read_run_row(run: RunFolder, now: float) -> RunRow:
    """The row of the run in a folder. A file that cannot be read is left out."""
    try:
        follower = RunFollower(run, TAIL_BYTES)
        follower.read()
        return build_run_row(
            run.name,
            run.place,
            follower.view,
            steps=read_job_step_count(run),
            members=run.read_document(run.members, damaged=True),
            locked=run.is_locked(),
            started_s=read_start_time(run),
            now=now,
        )
    except ConfigError as error:
        return RunRow(name=run.name, path=run.place, state="unreadable", why=error.what)


def describe_stopped_run(folder: RunFolder, stopped: bool) -> dict[str, Any]:
    """Facts of a run that does not train any more, with a `text` for people. `stopped`: whether it did before."""
    row = read_run_row(folder, time.time())
    at = f"after {row.step} of {row.steps} steps" if row.steps is not None else f"after {row.step} steps"
    text = f"run {folder.name} has ended {at}" if stopped else f"nothing trains run {folder.name}: it is {row.state} {at}"
    saved = folder.list_checkpoints()
    if saved and row.state != "done":
        text += f"\nnext: raypar resume {resume_argument(folder.place)} goes on from {saved[-1]}"
    return {**row.facts(), "stopped": stopped, "checkpoint": saved[-1] if saved else None, "text": text}
