"""The result of a run for its user, and the error that a failed run raises."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raypar.errors import Interrupted, LeaseLostError, RayparError, error_first_line
from raypar.files.atomic_write import write_text_atomically
from raypar.files.json_values import Json
from raypar.files.redact_secrets import redact_certain_secrets, secrets_of_environment
from raypar.files.untrusted_files import shorten
from raypar.launch.ray_job_resubmission import is_submitted_job
from raypar.launch.submitted_job_printer import RESUBMIT_ADVICE
from raypar.plan.wording import count_noun
from raypar.record.folder import ERROR
from raypar.storage.filesystems import call_within, open_filesystem
from raypar.storage.folder_download import has_document, has_run, upload_document
from raypar.storage.run_folder import parse_storage_location, resume_argument
from raypar.storage.storage_uri import StorageUri
from raypar.user_code.interrupts_outside_training import before_training_error
from raypar.user_code.traceback_filter import TRACEBACK_VARIABLE, full_traceback, remove_raypar_frames, shows_raypar_frames

if TYPE_CHECKING:
    from pandas import DataFrame
    from pyarrow.fs import FileSystem

DEBUG_COMMAND = "raypar debug JOB"
"""How errors of workers name the command that runs a job in one process."""
ERROR_FILE_S = 20.0
"""How long shared storage may take for a question or a small file after the end of a run."""


@dataclass(repr=False)
class Result:
    """What `fit` returns: the fields of `ray.train.Result`, and the history of the run."""

    metrics: dict[str, Json]
    """The metrics of the last step, with the last `validation_loss` and the job's metrics then, as `validation_NAME`."""
    path: str
    """The run folder, or the URI of the run's place on shared storage."""
    end: str
    """The kind of end: done, stopped, interrupted, failed, or deposed (another driver has taken the run over)."""
    done: int
    """Number of steps of the job that are done."""
    why: str = ""
    """Why the run has ended, in words."""
    error: Exception | None = None
    """The error of a failed run."""
    checkpoint_path: str | None = None
    """Location of the last checkpoint."""
    history: list[dict[str, Json]] = field(default_factory=list)
    """The facts of every step and validation, in order."""
    weights_sha256: str | None = None
    """Hash of the weights in the last checkpoint, of a run that was not interrupted."""
    sample: str | None = None
    """A text that the trained model generates (`generate_text_with_checkpoint`)."""
    best_checkpoint_path: str | None = None
    """Location of the best checkpoint by the first metric of `checkpoint.best`."""
    picture_path: str | None = None
    """The drawing of the predicted and the measured schedule."""

    def __repr__(self) -> str:
        """The end of the run in at most ten lines."""
        shown = ("loss", "validation_loss", "lr", "norm")
        own = [key for key in self.metrics if key.startswith("validation_") and key not in shown]
        numbers = [f"{key} {value:.6g}" for key in (*shown, *own) if isinstance(value := self.metrics.get(key), (int, float))]
        lines = {
            f"Result of a run, {self.end} after {count_noun(self.done, 'step')}": self.why or "no reason was recorded",
            "metrics": ", ".join(numbers),
            "history": f"{len(self.history):,} steps and validations (result.history, result.metrics_dataframe)",
            "folder": self.path,
            "checkpoint": self.checkpoint_path or "none",
            "best": self.best_checkpoint_path or "",
            "weights": f"sha256 {self.weights_sha256}" if self.weights_sha256 else "",
            "picture": self.picture_path or "",
            "error": f"{type(self.error).__name__}: {error_first_line(self.error)}" if self.error is not None else "",
        }
        return "\n".join(f"{'  ' * (at > 0)}{name}: {shorten(text)}" for at, (name, text) in enumerate(lines.items()) if text)

    @property
    def handle(self) -> str:
        """The argument by which `raypar resume` and `raypar export` find the run."""
        return resume_argument(self.path)

    @property
    def resume_advice(self) -> str:
        """How to resume the run: a submitted job is submitted again, as users cannot run commands where it ran."""
        if is_submitted_job():
            return f"{RESUBMIT_ADVICE}, also under another plan: it goes on from there"
        return f"raypar resume {self.handle}, also under another plan: raypar resume {self.handle} --set plan.stages=..."

    @property
    def export_advice(self) -> str:
        """How to export the weights of a run that has done all its steps."""
        export = f"raypar export {self.handle} --out model.safetensors"
        if is_submitted_job():
            return f"on the head: {export}"
        return export

    @property
    def advice_in_program(self) -> list[str]:
        """Lines for the program that called `Trainer.fit`: where the checkpoint is, and how to resume and export it."""
        if self.checkpoint_path is None:
            return [f"no checkpoint was written; metrics and events are in {self.path}"]
        lines = [f"checkpoint: {self.checkpoint_path} (result.checkpoint)"]
        if self.end == "stopped":
            lines.append("next: Trainer(..., resume_from_checkpoint=result.checkpoint).fit() goes on from there")
        on_head = "on the head: " * is_submitted_job()
        return [*lines, f"next: {on_head}raypar export {self.handle} --out model.safetensors"]

    @property
    def checkpoint(self) -> Any:
        """The last checkpoint as a `ray.train.Checkpoint`, or None."""
        return checkpoint_of_ray(self.checkpoint_path)

    @property
    def best_checkpoint(self) -> Any:
        """The best checkpoint, by the first metric of `checkpoint.best`, as a `ray.train.Checkpoint`; None without that key."""
        return checkpoint_of_ray(self.best_checkpoint_path)

    @property
    def filesystem(self) -> FileSystem | None:
        """The `pyarrow.fs` file system that has the run folder."""
        place = parse_storage_location(self.path, "the run")
        if place is not None:
            return open_filesystem(place)[0]
        from pyarrow.fs import LocalFileSystem

        return LocalFileSystem()

    @property
    def metrics_dataframe(self) -> DataFrame:
        """The history as a pandas data frame, one row per step or validation."""
        import pandas

        return pandas.DataFrame(self.history)


def checkpoint_of_ray(location: str | None) -> Any:
    """The checkpoint at a location as a `ray.train.Checkpoint`; None without one."""
    if location is None:
        return None
    from ray.train import Checkpoint

    place = parse_storage_location(location, "the checkpoint")
    if place is None:
        return Checkpoint.from_directory(location)
    filesystem, path = open_filesystem(place)
    return Checkpoint(path, filesystem)


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
            kept = put_error_file(place, error, text)
        elif (folder := Path(result.path)).is_dir():
            write_text_atomically(folder / ERROR, text)
            kept = str(folder / ERROR)
    if isinstance(error, RayparError) and not shows_raypar_frames() and remove_raypar_frames(error):
        where = f"raypar's own frames are in {kept}" if kept else f"{TRACEBACK_VARIABLE}=whole shows raypar's own frames too"
        error.cure = f"{error.cure}; {where}" if error.cure else where
        error.args = (error.what, error.cure)


def put_error_file(place: StorageUri, error: BaseException, text: str) -> str:
    """Write error.txt to a run on shared storage; returns its URI. Empty if there is no run, or this process lost its lease.

    Raises `RayparError`.
    """
    if isinstance(error, LeaseLostError) or not call_within(ERROR_FILE_S, lambda: has_run(place), f"{place}"):
        return ""
    call_within(ERROR_FILE_S, lambda: upload_document(place, ERROR, text), f"{place}")
    return str(place.child(ERROR))


def has_job_file(path: str) -> bool:
    """Whether a run has a job file, so that `raypar resume` can continue it."""
    place = parse_storage_location(path, "the run")
    if place is None:
        return (Path(path) / "job.yaml").is_file()
    with contextlib.suppress(RayparError):
        return call_within(ERROR_FILE_S, lambda: has_document(place, "job.yaml"), f"{place}")
    return True


def raise_run_failure(result: Result) -> None:
    """Raise the error of a failed run, or `Interrupted`; do nothing for a run that is done or was stopped.

    The error shows no frames of raypar; `error.txt` in the run folder has the full traceback.
    """
    if result.end == "failed":
        put_run_name_into_cure(result)
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
        cure = ""
        if result.checkpoint_path:
            cure = (
                "submit the same job again: it goes on from there" if is_submitted_job() else f"raypar resume {result.handle}"
            )
            if not has_job_file(result.path):  # its functions cannot be imported by name: only the script has them
                cure = f"give Trainer resume_from_checkpoint={result.path!r}"
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
