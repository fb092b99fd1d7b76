"""What a failed run leaves and raises: the whole error beside its other files, and what is left of its steps."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from raypar.errors import ConfigError, Interrupted, LeaseLostError, RayparError
from raypar.files.atomic_write import write_text_atomically
from raypar.files.redact_secrets import redact_certain_secrets, secrets_of_environment
from raypar.launch.result import Result
from raypar.launch.run_of_submitted_job import is_submitted_job
from raypar.plan.wording import count_noun
from raypar.record.folder import ERROR
from raypar.storage.filesystems import call_with_time_limit
from raypar.storage.folder_download import upload_document
from raypar.storage.list_and_remove_runs import has_document, has_run
from raypar.storage.run_folder import parse_storage_location
from raypar.storage.storage_uri import StorageUri
from raypar.user_code.stop_signals_outside_training import before_training_error
from raypar.user_code.traceback_filter import TRACEBACK_VARIABLE, full_traceback, remove_raypar_frames, shows_raypar_frames

DEBUG_COMMAND = "raypar debug JOB"
"""How errors of workers name the command that runs a job in one process."""

ERROR_FILE_S = 20.0
"""How long shared storage may take for a question or a small file after the end of a run."""


def put_run_name_into_cure(result: Result) -> None:
    """Name the run in the cure of its error where that says `raypar debug JOB`: workers do not know how the run is called.

    A submitted job keeps the words: its run's code is removed with it, and the user has the job file.
    """
    error = result.error
    if isinstance(error, RayparError) and error.cure and DEBUG_COMMAND in error.cure and not is_submitted_job():
        error.cure = error.cure.replace(DEBUG_COMMAND, f"raypar debug {result.handle}")
        if not has_job_file(result.path):
            error.cure += "; this run has no job file: that command says what it needs"
        error.args = (error.what, error.cure)


def put_resume_advice_into_cure(result: Result) -> None:
    """Add to the cure of what a machine refused inside a run, a full disk, say: what is saved, and how to resume the run."""
    error = result.error
    if isinstance(error, ConfigError) and result.done and "raypar resume" not in error.cure:
        done = f"the run had done {count_noun(result.done, 'step')}"
        saved = f"{done}, and its last checkpoint is {result.checkpoint_path}: {_resume_advice(result)}"
        error.cure += f"; {saved}" if result.checkpoint_path else f"; {done}, and has no checkpoint: begin it anew"
        error.args = (error.what, error.cure)


def _resume_advice(result: Result) -> str:
    """How to resume a run from its last checkpoint."""
    if not has_job_file(result.path):  # its functions cannot be imported by name: only the script has them
        return f"give Trainer resume_from_checkpoint={result.path!r}"
    return "submit the same job again: it goes on from there" if is_submitted_job() else f"raypar resume {result.handle}"


def keep_full_error(result: Result) -> None:
    """Write the full traceback of a failed run into its folder, if it still exists; remove raypar's frames from the error."""
    error = result.error
    if error is None:
        return
    place, kept = parse_storage_location(result.path, "the run"), ""
    text = full_traceback(error).encode(errors="backslashreplace").decode()  # a file name may have lone surrogates
    text = redact_certain_secrets(text, secrets_of_environment(os.environ))
    with contextlib.suppress(OSError, RayparError):  # a full disk must not hide the error
        if place is not None:
            kept = upload_error_file(place, error, text)
        elif (folder := Path(result.path)).is_dir():
            write_text_atomically(folder / ERROR, text)
            kept = str(folder / ERROR)
    if isinstance(error, RayparError) and not shows_raypar_frames() and remove_raypar_frames(error):
        where = f"raypar's own frames are in {kept}" if kept else f"{TRACEBACK_VARIABLE}=whole shows raypar's own frames too"
        error.cure = f"{error.cure}; {where}" if error.cure else where
        error.args = (error.what, error.cure)


def upload_error_file(place: StorageUri, error: BaseException, text: str) -> str:
    """Write error.txt to a run on shared storage; returns its URI. Empty if there is no run, or this process lost its lease.

    Raises `RayparError`.
    """
    if isinstance(error, LeaseLostError) or not call_with_time_limit(ERROR_FILE_S, lambda: has_run(place), f"{place}"):
        return ""
    call_with_time_limit(ERROR_FILE_S, lambda: upload_document(place, ERROR, text), f"{place}")
    return str(place.child(ERROR))


def has_job_file(path: str) -> bool:
    """Whether a run has a job file, so that `raypar resume` can continue it."""
    place = parse_storage_location(path, "the run")
    if place is None:
        return (Path(path) / "job.yaml").is_file()
    with contextlib.suppress(RayparError):
        return call_with_time_limit(ERROR_FILE_S, lambda: has_document(place, "job.yaml"), f"{place}")
    return True


def raise_run_failure(result: Result) -> None:
    """Raise the error of a failed run, or `Interrupted`; do nothing for a run that is done or was stopped.

    The error shows no frames of raypar; `error.txt` in the run folder has the full traceback.
    """
    if result.end == "failed":
        put_run_name_into_cure(result)
        put_resume_advice_into_cure(result)
        keep_full_error(result)
        if isinstance(result.error, RayparError):
            result.error.exit_code = RayparError.exit_code  # the run had begun: failed, even where the input was bad
            raise result.error
        raise RayparError(f"the run failed after {count_noun(result.done, 'step')}: {result.why}") from result.error
    if result.end == "deposed":
        raise RayparError(
            f"another driver has taken this run over after {count_noun(result.done, 'step')}: {result.why}",
            cure=f"follow the run with raypar status {result.handle}",
        )
    if result.end == "interrupted":
        cure = _resume_advice(result) if result.checkpoint_path else ""
        if not result.history:  # no step was reported
            raise before_training_error(result.why, describe_what_is_left(result), cure)
        at = f"the checkpoint {result.checkpoint_path} can be resumed" if result.checkpoint_path else "there is no checkpoint"
        raise Interrupted(f"stopped after {count_noun(result.done, 'step')} ({result.why}): {at}", cure=cure)


def describe_what_is_left(result: Result) -> str:
    """What is left of a run that was stopped before its first step, in words."""
    if result.checkpoint_path:
        return f"the checkpoint {result.checkpoint_path} is as it was"
    if parse_storage_location(result.path, "the run") is None and Path(result.path).exists():
        return f"only its folder {result.path} is left"
    return "nothing is left of this start"
