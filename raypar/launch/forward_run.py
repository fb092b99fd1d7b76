"""Runs that make forward passes only, over a data set, with the weights of a checkpoint: evaluation and prediction.

Such a run is the job, resumed at its end: no step is due, nothing is saved, and a pass that a lost worker has cut off is made
again. Its folder is a temporary one.
"""

from __future__ import annotations

import os
import secrets
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raypar.errors import CheckpointError, ConfigError, Interrupted, RayparError
from raypar.job import CheckpointConfig, Job, OptimizerConfig, ValidationConfig
from raypar.job.read_job import load_job_of_run
from raypar.launch.choose_plan import ChosenPlan, make_plan_chooser
from raypar.launch.launch_options import EventHandler, LaunchOptions
from raypar.launch.launch_run import launch_run
from raypar.launch.load_model import run_of_checkpoint
from raypar.launch.result import Result
from raypar.launch.resume import find_last_whole_checkpoint
from raypar.plan.wording import after_steps
from raypar.storage.checkpoint_store import CheckpointRef, open_checkpoint, open_checkpoint_store
from raypar.storage.run_folder import NoSuchRun, RunFolder, cannot_evaluate_error
from raypar.user_code.user_code_errors import make_importable

if TYPE_CHECKING:
    from raypar.worker.job_preflight import PreflightResult


@dataclass(frozen=True)
class TrainedRun:
    """A run's job, and the checkpoint whose weights are used."""

    job: Job
    """The job."""
    checkpoint: CheckpointRef
    """The checkpoint, which is whole."""


@dataclass(frozen=True)
class Cluster:
    """Where a run finds its workers: the arguments of `raypar train`."""

    address: str | None = None
    """The Ray cluster to join."""
    local_nodes: int = 1
    """Nodes of the local Ray cluster that is started without an `address`."""
    workers: int | None = None
    """The most workers that `plan: auto` may use."""


def find_trained_run(
    run: str | os.PathLike[str],
    run_dir: str | os.PathLike[str],
    step: int | None,
    overrides: Sequence[str],
    tell: EventHandler,
) -> TrainedRun:
    """The job of a run, with overrides, and its last whole checkpoint, or that after `step` steps. `run` may be a checkpoint.

    Raises `ConfigError` for a run without a job file, `CheckpointError` without a whole checkpoint.
    """
    from raypar.worker.checkpoint.checkpoint_files import checkpoint_name, verify_checkpoint

    place = run_of_checkpoint(os.fspath(run))
    if place is not None and step is not None:
        raise ConfigError(f"{run} is one checkpoint: no other one is chosen", cure=f"leave --step out, or give the run {place}")
    try:
        with RunFolder.open_for_reading(place or os.fspath(run), os.fspath(run_dir), with_job=False, last_bytes=0) as folder:
            if not os.path.lexists(folder.job):
                raise cannot_evaluate_error(folder)
            job = load_job_of_run(folder.job, folder.place_of(folder.job), overrides)
            if place is not None:
                return TrainedRun(job, verify_checkpoint(open_checkpoint(run, "the run")).checkpoint)
            if step is None:
                return TrainedRun(job, find_last_whole_checkpoint(folder, tell))
            there = folder.list_checkpoints()
            if checkpoint_name(step) not in there:
                what = f"run {folder.name} has no checkpoint {after_steps(step)}"
                raise CheckpointError(what, cure=f"it has: {', '.join(there) or 'none'}")
            store = open_checkpoint_store(folder.checkpoint_store_location)
            return TrainedRun(job, verify_checkpoint(CheckpointRef(store, checkpoint_name(step))).checkpoint)
    except NoSuchRun:
        if place is None:
            raise
        what = f"checkpoint {run} is in no run, whose job file would say how its model and data are made"
        raise ConfigError(what, cure="give the run, or from Python Trainer(...).evaluate(checkpoint)") from None


def make_forward_job(job: Job, steps_done: int, data: ValidationConfig, batch_size: int | None = None) -> Job:
    """The job of a run that makes forward passes over `data` after `steps_done` steps.

    It trains nothing, and has an optimizer without state. `batch_size`: samples that go through the model at once; None: as in
    training.
    """
    given = job.replace(validation=data)
    changed: dict[str, Any] = {} if batch_size is None else {"batch_size": batch_size * job.microbatches}
    return given.replace(
        data=given.validation_data,
        steps=steps_done,
        epochs=None,
        init_from=None,
        optimizer=OptimizerConfig.model_construct(function="torch.optim:SGD", args={"lr": 0.0}),
        lr_schedule=None,
        clip_norm=None,
        checkpoint=CheckpointConfig.model_construct(at_end=False),
        early_stopping=None,
        callbacks=(),
        trackers=(),
        **changed,
    )


def run_forward(
    job: Job,
    checkpoint: CheckpointRef,
    tell: EventHandler,
    cluster: Cluster,
    *,
    passes: int = 1,
    on_folder: Callable[[Path], None] = lambda folder: None,
) -> Result:
    """Make the forward passes of a job that `make_forward_job` has made. Raises the error of a run that fails, and
    `Interrupted`. `on_folder` gets the run's folder, which is removed at the end."""
    from raypar.worker.checkpoint.checkpoint_files import check_checkpoint_fits_model, load_manifest

    make_importable(job.source_dir)
    manifest, choose = load_manifest(checkpoint), make_plan_chooser(job, cluster.workers)

    def check_and_choose(checked: PreflightResult) -> ChosenPlan:
        from raypar.model.layer_skeletons import parameter_shapes

        check_checkpoint_fits_model(manifest, parameter_shapes(checked.graph))
        return choose(checked)

    with tempfile.TemporaryDirectory(prefix="raypar-forward-", ignore_cleanup_errors=True) as room:
        name = f"{job.name}-{secrets.token_hex(4)}"

        def make_folder(chosen: ChosenPlan) -> RunFolder:
            folder = RunFolder.create(Path(room), name)
            on_folder(folder.path)
            return folder

        options = LaunchOptions(
            job,
            make_folder,
            resume=checkpoint,
            steps_done=manifest.steps_done,
            forward_passes=passes,
            address=cluster.address,
            local_nodes=cluster.local_nodes,
        )
        result = launch_run(check_and_choose, options, tell)
    if result.end == "interrupted":
        raise Interrupted(f"stopped ({result.why}): nothing is left of this pass over the data", cure="run the command again")
    if result.end != "done":
        raise result.error or RayparError(f"the pass over the data failed: {result.why}")
    return result
