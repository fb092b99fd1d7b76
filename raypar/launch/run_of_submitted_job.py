"""Jobs of Ray's job server (`ray job submit`): where their runs lie, and which run a resubmitted job resumes. Needs no Ray."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from raypar.ray_compat.settings import SUBMITTED_VARIABLE
from raypar.storage.run_folder import RunFolder, check_local_path, parse_storage_location

if TYPE_CHECKING:
    from raypar.job import Job

RUNS_FOLDER = "raypar"
"""Folder below the home directory of the user who runs the head of the cluster."""
QUEUE_S = 24 * 3600.0
"""How long a submitted job waits behind others for room on the cluster, unless `wait_for_workers_s` is longer: jobs are
submitted to be run one after the other."""


def is_submitted_job() -> bool:
    """Whether Ray's job server has started this process."""
    return SUBMITTED_VARIABLE in os.environ


def choose_lasting_run_dir(run_dir: str | os.PathLike[str]) -> Path | str:
    """`run_dir`, moved below `~/raypar` if it is relative and this is a submitted job: Ray removes the folder such a job
    runs in. The URI of a place on shared storage stays. Raises `ConfigError` for one that cannot be."""
    if (shared := parse_storage_location(run_dir, "run_dir")) is not None:
        return str(shared)
    path = check_local_path(run_dir, "run_dir")
    return Path.home() / RUNS_FOLDER / path if is_submitted_job() else path


@contextlib.contextmanager
def unfinished_run(job: Job) -> Iterator[tuple[RunFolder | None, str]]:
    """What `find_unfinished_run` finds; of a run on shared storage a copy, during the block."""
    shared = parse_storage_location(job.run_dir, "run_dir")
    if shared is None:
        yield find_unfinished_run(job)
        return
    from raypar.storage.list_and_remove_runs import list_runs_below

    for uri in reversed([uri for uri, _ in list_runs_below(shared) if is_name_of_run(uri.name, job)]):
        with RunFolder.open_for_reading(str(uri), with_job=False) as folder:
            if is_run_of_job(folder, job):
                yield can_be_resumed(job, folder)
                return
    yield None, ""


def find_unfinished_run(job: Job) -> tuple[RunFolder | None, str]:
    """The run that `job` can resume, or None with the reason.

    It is the run of the job's name that was started or resumed last. It must have a whole checkpoint of the same job with
    steps left. The reason is empty if there has been no run, or if the run has done all its steps.
    """
    runs = [path for path in Path(job.run_dir).glob("*/job.yaml") if is_name_of_run(path.parent.name, job)]
    runs.sort(key=lambda path: path.lstat().st_mtime, reverse=True)
    folder = next((found for found in (RunFolder(path.parent) for path in runs) if is_run_of_job(found, job)), None)
    if folder is None:
        return None, ""
    folder.refuse_special_files()
    return can_be_resumed(job, folder)


def is_name_of_run(name: str, job: Job) -> bool:
    """Whether a run with this name may be one of the job."""
    return re.fullmatch(rf"{re.escape(job.name)}(-\d+)?", name) is not None


def is_run_of_job(folder: RunFolder, job: Job) -> bool:
    """Whether the run, whose name fits, is one of the job: `gpt-2` is the second run of `gpt`, or the first of a job `gpt-2`.

    Its job.yaml says which; one that cannot be read counts as the job's.
    """
    from raypar.errors import ConfigError
    from raypar.files.safe_yaml import parse_yaml
    from raypar.files.untrusted_files import read_limited_text

    if folder.name == job.name:
        return True
    try:
        found = parse_yaml(read_limited_text(folder.job, follow=False), str(folder.job))
    except ConfigError:
        return True
    return not isinstance(found, dict) or found.get("name", job.name) == job.name


def can_be_resumed(job: Job, folder: RunFolder) -> tuple[RunFolder | None, str]:
    """The run's folder if `job` can go on with the run, else None with the reason; see `find_unfinished_run`."""
    from raypar.worker.checkpoint.checkpoint_files import latest_usable_checkpoint, load_manifest
    from raypar.worker.checkpoint.contract_comparison import list_contract_differences

    checkpoint, skipped = latest_usable_checkpoint(folder.checkpoint_store_location)
    if checkpoint is None:
        lacks = f"has no checkpoint that is whole ({'; '.join(skipped)})" if skipped else "has no checkpoint"
        return None, f"run {folder.name} in {folder.place} {lacks}: a new run begins"
    manifest, spec = load_manifest(checkpoint), job
    differences = list_contract_differences(manifest, spec)
    if differences:
        return None, f"run {folder.name} in {folder.place} was another job ({'; '.join(differences)}): a new run begins"
    return (folder, "") if manifest.steps_done < spec.steps else (None, "")
