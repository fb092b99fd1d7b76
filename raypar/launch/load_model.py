"""`raypar.load(RUN)`: the user's own module with the weights that a run has trained."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from raypar.errors import ConfigError, with_article
from raypar.files.printable_text import repr_text
from raypar.job import FunctionConfig
from raypar.job.function_section import FROM_FOLDER
from raypar.job.importable_name import is_importable_name
from raypar.job.read_job import load_job_of_run, parse_model_section
from raypar.launch.launch_run import keep_callers_state
from raypar.launch.trainer_arguments import function_section
from raypar.storage.checkpoint_store import open_checkpoint
from raypar.storage.filesystems import place_of_checkpoint_object
from raypar.storage.find_best_checkpoint import find_best_step_of_run
from raypar.storage.run_folder import (
    NoSuchRun,
    RunFolder,
    check_local_path,
    parse_storage_location,
    run_without_job_error,
)
from raypar.user_code.traceback_filter import without_raypar_frames
from raypar.user_code.user_code_errors import make_importable

if TYPE_CHECKING:
    from torch import nn

    from raypar.launch.result import CheckpointArgument
    from raypar.storage.checkpoint_store import CheckpointRef


@without_raypar_frames
def load(
    run: CheckpointArgument,
    *,
    step: int | None = None,
    best: str | None = None,
    model: str
    | Callable[..., Any]
    | tuple[Callable[..., Any], Mapping[str, Any]]
    | Mapping[str, Any]
    | nn.Module
    | None = None,
    run_dir: str | os.PathLike[str] = "runs/",
    average: bool = False,
) -> nn.Module:
    """The module of a run with the weights of its last checkpoint, in evaluation mode: `raypar.load("runs/gpt")`.

    `run`: the run's name under `run_dir`, the path or URI of a run or of one checkpoint, or a result's checkpoint. `step`: take
    the checkpoint after so many steps; `best`: the best one by this metric of the run's `checkpoint.best`, by its first one if
    the text is empty. `average`: its parameters are the averages of the weights, of a run that trains with `average`.
    `model`: in the place of the job's model function, which a run that was started from Python with objects does
    not name: the function or class (or a pair of it and its arguments), `{"pretrained": FOLDER}` as in a job, or a module,
    which gets the weights in place.

    The job's model function is called as for training, with its arguments and seed; all its parameters and buffers then get the
    checkpoint's values, in the dtype in which they were trained. Tied parameters stay tied, `requires_grad` is as the function
    left it. A model that is a list of layers, or a `raypar.Graph` in a chain, becomes an `nn.Sequential`. Needs the memory of
    the whole model, and neither Ray nor a cluster. A checkpoint that is damaged is skipped with a warning.

    Raises `ConfigError` if there is no such run, or nothing that makes its model; `CheckpointError` without a whole checkpoint,
    or for one of another model.
    """
    skipped: list[str] = []
    place = place_of_checkpoint_object(run, "the run")
    if best is not None:
        if step is not None:
            raise ConfigError(f"step is {step}, and best is {best!r}", cure="give one of them")
        step = find_best_step_of_run(os.fspath(place), os.fspath(run_dir), best)
    try:
        return load_trained_module(place, run_dir, step, model, skipped.append, average=average)
    finally:
        for line in skipped:
            warnings.warn(line, stacklevel=3)


def load_trained_module(
    run: str | os.PathLike[str],
    run_dir: str | os.PathLike[str],
    step: int | None,
    model: Any,
    warn: Callable[[str], None],
    note: Callable[[CheckpointRef], None] = lambda checkpoint: None,
    *,
    average: bool = False,
) -> nn.Module:
    """See `load`. `warn` gets a line for each checkpoint that is skipped, `note` the checkpoint that is read."""
    from raypar.model.pretrained_folder import set_cache_of_folder
    from raypar.worker.checkpoint.checkpoint_files import load_manifest
    from raypar.worker.checkpoint.export_weights import export_checkpoint
    from raypar.worker.module_with_checkpoint_weights import make_trained_module
    from raypar.worker.pretrained.frozen_values import check_frozen_values

    if not isinstance(run, (str, os.PathLike)):
        raise ConfigError(
            f"the run is {repr_text(run)}, not a path", cure="give a run's name, or the path or URI of a run or a checkpoint"
        )
    chosen = read_model_of_run(run, run_dir) if model is None else model_argument(model)

    def make(checkpoint: CheckpointRef) -> nn.Module:
        checkpoint = replace(checkpoint, averages=average)
        manifest = load_manifest(checkpoint)
        check_frozen_values(manifest)
        seed = manifest.contract.get("seed", 0)
        made = make_trained_module(chosen, seed if isinstance(seed, int) else 0, checkpoint)
        if isinstance(chosen, FunctionConfig) and chosen.function == FROM_FOLDER:
            set_cache_of_folder(made, chosen.args)
        note(checkpoint)
        return made

    with keep_callers_state():
        return export_checkpoint(os.fspath(run), os.fspath(run_dir), step, make, warn)


def read_model_of_run(run: str | os.PathLike[str], run_dir: str | os.PathLike[str]) -> FunctionConfig:
    """The model function that a run's job file names, importable in this process; for a checkpoint that of its run.

    Raises `ConfigError`.
    """
    place = run_of_checkpoint(os.fspath(run))
    try:
        with RunFolder.open_for_reading(place or os.fspath(run), os.fspath(run_dir), with_job=False, last_bytes=0) as folder:
            if not os.path.lexists(folder.job):
                raise run_without_job_error(
                    folder,
                    missing="which would say how its model is made",
                    cure=f"give the function that makes the model: raypar.load({folder.place!r}, model=Net), or "
                    "--model module:name",
                    later="for runs that need no such argument",
                )
            job = load_job_of_run(folder.job, folder.place_of(folder.job))
    except NoSuchRun:
        if place is None:
            raise
        raise ConfigError(
            f"checkpoint {run} is in no run, whose job file would say how its model is made",
            cure="give the function that makes the model: raypar.load(..., model=Net)",
        ) from None
    make_importable(job.source_dir)
    return job.model


def run_of_checkpoint(given: str) -> str | None:
    """The place of the run that has the checkpoint at `given`; None if there is no checkpoint."""
    from raypar.worker.checkpoint.checkpoint_files import MANIFEST

    if not open_checkpoint(given, "the run").has_file(MANIFEST):
        return None
    shared = parse_storage_location(given, "the run")
    return str(shared.parent.parent) if shared is not None else str(check_local_path(given, "the run").absolute().parent.parent)


def model_argument(given: Any) -> FunctionConfig | nn.Module:
    """The argument `model` of `load`, checked: a module that is built, or a function with its arguments.

    Raises `ConfigError`.
    """
    from torch import nn

    if isinstance(given, nn.Module):
        return given
    found = function_section("model", given)
    function = found.get("function") if isinstance(found, Mapping) else None
    if isinstance(found, FunctionConfig):
        return found
    if isinstance(found, Mapping) and "pretrained" in found:
        return parse_model_section(found)
    if callable(function) or (isinstance(function, str) and is_importable_name(function)):
        return FunctionConfig.model_construct(function=function, args=dict(found.get("args", {})))
    raise ConfigError(
        f"model is {with_article(type(given).__name__)}, which makes no module",
        cure="give the function or class that makes it, (function, {arguments}), module:name, or the module itself",
    )
