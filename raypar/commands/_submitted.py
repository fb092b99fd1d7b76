"""A job of Ray's job server (`ray job submit`): where its runs lie, and with which of them it goes on. No Ray is asked."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from raypar.config import Job
    from raypar.run_folder import RunFolder

MARK = "RAY_JOB_CONFIG_JSON_ENV_VAR"
"""Environment variable that Ray's job server gives to every job's command."""
FOLDER = "raypar"
"""Below the home directory of whoever runs the head of the cluster."""


def submitted() -> bool:
    """Whether this process belongs to such a job."""
    return MARK in os.environ


def lasting(run_dir: str | os.PathLike[str]) -> Path:
    """Where `run_dir` lies: a submitted job stands in a copy of its folder that Ray removes, so that what is relative lies
    under `~/raypar` there. Raises `ConfigError` for a URI."""
    from raypar.run_folder import local_path

    path = local_path(run_dir, "run_dir")
    return Path.home() / FOLDER / path if submitted() else path


def unfinished(job: Job) -> tuple[RunFolder | None, str]:
    """The run of this name that was started or resumed last, if it has a checkpoint of this very job from which there are
    steps left; and why there is none to go on with, empty where there has been no run or it has done all of its steps."""
    from raypar.run_folder import RunFolder
    from raypar.worker.checkpoint import contract_differences, latest_usable_checkpoint, load_manifest

    numbered = re.compile(rf"{re.escape(job.name)}(-\d+)?")
    runs = [path for path in Path(job.run_dir).glob("*/job.yaml") if numbered.fullmatch(path.parent.name)]
    if not runs:
        return None, ""
    folder = RunFolder(max(runs, key=lambda path: path.lstat().st_mtime).parent)
    folder.check_files()
    path, skipped = latest_usable_checkpoint(folder.checkpoints)
    if path is None:
        lacks = f"has no checkpoint that is whole ({'; '.join(skipped)})" if skipped else "has no checkpoint"
        return None, f"run {folder.name} in {folder.path} {lacks}: a new run begins"
    manifest, spec = load_manifest(path), job.to_spec()
    differences = contract_differences(manifest, spec)
    if differences:
        return None, f"run {folder.name} in {folder.path} was another job ({'; '.join(differences)}): a new run begins"
    return (folder, "") if manifest.steps_done < spec.steps else (None, "")
