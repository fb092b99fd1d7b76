"""The result of a run for its user."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

from raypar.errors import error_first_line
from raypar.files.json_type import Json
from raypar.files.printable_text import shorten
from raypar.launch.run_of_submitted_job import is_submitted_job
from raypar.launch.submitted_job_printer import RESUBMIT_ADVICE
from raypar.plan.wording import count_noun
from raypar.record.metric_names import is_of_validation
from raypar.storage.filesystems import open_filesystem
from raypar.storage.run_folder import parse_storage_location, resume_argument

if TYPE_CHECKING:
    from pandas import DataFrame
    from pyarrow.fs import FileSystem
    from ray.train import Checkpoint

CheckpointArgument: TypeAlias = "str | os.PathLike[str] | Checkpoint"
"""A checkpoint as `ray.train` has it, its path, or a run, by its path or name, whose last one is taken."""


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
        own = [key for key in self.metrics if is_of_validation(key) and key not in shown]
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
    def checkpoint(self) -> Checkpoint | None:
        """The last checkpoint as a `ray.train.Checkpoint`, or None."""
        return checkpoint_of_ray(self.checkpoint_path)

    @property
    def best_checkpoint(self) -> Checkpoint | None:
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


def checkpoint_of_ray(location: str | None) -> Checkpoint | None:
    """The checkpoint at a location as a `ray.train.Checkpoint`; None without one."""
    if location is None:
        return None
    from ray.train import Checkpoint

    place = parse_storage_location(location, "the checkpoint")
    if place is None:
        return Checkpoint.from_directory(location)
    filesystem, path = open_filesystem(place)
    return Checkpoint(path, filesystem)
