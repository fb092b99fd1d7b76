"""Runs that make forward passes only, over a data set, with the weights of a checkpoint: evaluation and prediction.

Such a run is the job, resumed at its end: no step is due, nothing is saved, and a pass that a lost worker has cut off is made
again. Its folder is a temporary one. What workers keep of each microbatch comes to the process that has started the run, one
pass after the other, in the order of microbatches: the memory that this takes is that of one pass.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from raypar.errors import (
    CheckpointError,
    ClusterError,
    ConfigError,
    DataError,
    Interrupted,
    RayparError,
    WorkerLost,
    error_first_line,
)
from raypar.files.abandoned_folders import owned_folder
from raypar.files.printable_text import repr_text, shorten
from raypar.files.remove_if_killed import removed_if_killed
from raypar.job import CheckpointConfig, DataConfig, Job, OptimizerConfig, ValidationConfig
from raypar.job.read_job import clause_on_data_file, load_job_of_run
from raypar.launch.activity_reporter import ActivityReporter
from raypar.launch.choose_plan import ChosenPlan, make_plan_chooser
from raypar.launch.launch_options import EventHandler, LaunchOptions
from raypar.launch.launch_run import keep_callers_state, launch_run
from raypar.launch.load_model import run_of_checkpoint
from raypar.launch.resume import find_last_whole_checkpoint
from raypar.launch.unspoken_end_of_checks import spoken_for
from raypar.plan.forward_pass_batching import MICROBATCHES_OF_PASS, PASSES_CURE, ForwardPasses, whole_batching
from raypar.plan.microbatches import Microbatches
from raypar.plan.wording import after_steps
from raypar.record.events import Event, Note, ValidationRecord
from raypar.record.folder import output_file
from raypar.storage.checkpoint_store import CheckpointRef, open_checkpoint, open_checkpoint_store
from raypar.storage.run_folder import NoSuchRun, RunFolder, run_without_job_error
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
    *,
    average: bool = False,
) -> TrainedRun:
    """See `_find_trained_run`. `average`: the averages of the checkpoint's weights are read in their place."""
    found = _find_trained_run(run, run_dir, step, overrides, tell)
    return TrainedRun(found.job, replace(found.checkpoint, averages=average))


def _find_trained_run(
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
                raise run_without_job_error(
                    folder,
                    missing="which would say how its model and data are made",
                    cure=f"from Python, with the same arguments: Trainer(...).evaluate({folder.place!r})",
                    later="for runs that commands can evaluate",
                )
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


def choose_data(job: Job, given: ValidationConfig | str | None, samples: int | None) -> ValidationConfig:
    """The data that is used: what is given, the one of the job's validation sets that is named, or for None all of the job's
    validation; the first `samples` of each.

    Raises `ConfigError` if there is none, and for a number of samples that is none.
    """
    _refuse_what_is_no_count("samples", samples)
    wanted = job.validation if given is None else given
    if isinstance(wanted, str):
        sets = job.validation.sets if job.validation is not None else {}
        if wanted not in sets:
            raise ConfigError(
                f"the job has no validation set {shorten(wanted)!r}",
                cure=(f"its sets are {', '.join(sets)}" if sets else "its validation has no names")
                + f"; another data set is named by its function, module:name{clause_on_data_file(wanted)}",
            )
        wanted = ValidationConfig.of_set(sets[wanted])
    if wanted is None:
        raise ConfigError("the job has no validation data", cure="give the data set: --data module:function; from Python data=")
    wanted = wanted.replace(every=0)
    if samples is None:
        return wanted
    if wanted.sets:
        return wanted.replace(sets={name: one.replace(samples=samples) for name, one in wanted.sets.items()})
    return wanted.replace(samples=samples)


def make_forward_job(job: Job, steps_done: int, data: ValidationConfig, batch_size: int | None = None) -> Job:
    """The job of a run that makes forward passes over `data`, which is one set, after `steps_done` steps.

    It trains nothing, and has an optimizer without state. `batch_size`: samples that go through the model at once; None: as
    `data` says, or as in training. Raises `ConfigError` if it is no number of samples.
    """
    _refuse_what_is_no_count("batch_size", batch_size)
    job.replace(validation=data).check_sets()
    given, at_once = job.replace(validation=data.replace(batch_size=None, metrics=None)), batch_size or data.batch_size
    changed: dict[str, int] = {} if at_once is None else {"batch_size": at_once * job.microbatches}
    return given.replace(
        data=given.validation_data,
        metrics={name: one for name, one in job.metrics.items() if data.metrics is None or name in data.metrics},
        steps=steps_done,
        epochs=None,
        init_from=None,
        optimizer=OptimizerConfig.model_construct(function="torch.optim:SGD", args={"lr": 0.0}),
        lr_schedule=None,
        average=None,
        clip_norm=None,
        checkpoint=CheckpointConfig.model_construct(at_end=False),
        early_stopping=None,
        callbacks=(),
        trackers=(),
        **changed,
    )


def _refuse_what_is_no_count(name: str, value: object) -> None:
    """Raise `ConfigError` for an argument from Python that is neither None nor a number of samples."""
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        raise ConfigError(f"{name} is {repr_text(value)}", cure="give a whole number of samples, at least 1")


@contextlib.contextmanager
def naming_argument(given: object, argument: str) -> Iterator[None]:
    """Where data was given in an argument of its own, errors that name keys of the job's data say where these keys stand."""
    try:
        yield
    except RayparError as error:
        if given is not None and not isinstance(given, str) and re.search(r"\b(data|validation)\.[a-z]", error.cure):
            error.cure += f"; keys of this data set stand in {argument}"
            error.args = (error.what, error.cure)
        raise


Take = Callable[[Sequence[bytes]], None]
"""Gets what was kept of the microbatches of a pass, in their order."""


def find_samples(forward: Job, tell: EventHandler) -> tuple[Job, int]:
    """(the job, the number of samples that go through the model). First call of user code.

    Iterable data without `streams` is read as one stream, in its own order; where its `samples` are not given they are counted,
    by reading it.
    """
    from raypar.worker.data.user_dataset import dataset_size, is_stream, make_dataset
    from raypar.worker.process.torch_state_guard import TorchStateGuard

    assert forward.validation is not None
    limit = forward.validation.samples
    checked = spoken_for(f"the data set {forward.data.label}")
    with ActivityReporter(tell).reporting(), keep_callers_state(), checked:
        guard = TorchStateGuard(forward.threads)
        guard.establish()
        with guard.watching("the job's data"):
            dataset = make_dataset(forward.data)
            if not is_stream(dataset):
                size = dataset_size(dataset, forward.data.label)
                return forward, min(size, limit or size)
            streams = forward.validation.streams or 1
            if streams > 1 and not limit:
                raise ConfigError(
                    f"data set {forward.data.label} is iterable, and read as {streams} streams: nothing says where they end",
                    cure="say how many samples are used (--samples; in a section of data samples), or leave streams out",
                )
            samples = limit or count_samples_of_stream(forward.data.replace(streams=1), forward.seed, tell)
    validation = forward.validation.replace(samples=samples, streams=streams)
    return forward.replace(validation=validation, data=forward.data.replace(streams=1)), samples


COUNTED_S = 10.0
"""How often the count of an iterable data set is told."""


def count_samples_of_stream(data: DataConfig, seed: int, tell: EventHandler) -> int:
    """The number of samples of iterable data, which is read once for it. Raises `DataError` for none."""
    from raypar.worker.data.stream_source import StreamSource

    count, told_s = 0, time.monotonic()
    with contextlib.closing(StreamSource(data, 0, 1, seed)) as source:
        source.begin(0)
        while source.read():
            count += 1
            if time.monotonic() - told_s > COUNTED_S:
                told_s = time.monotonic()
                more = "--samples N says how many are used, of data without an end too"
                tell(Note(text=f"{count:,} samples counted so far; {more}"))
    if not count:
        raise DataError(f"data set {data.label} gave no sample", cure="read the data set by itself: for sample in data(): ...")
    return count


def run_forward(
    forward: Job, samples: int, checkpoint: CheckpointRef, take: Take, tell: EventHandler, cluster: Cluster
) -> float:
    """Send all samples through the model, and give `take` what was kept of each pass; returns how many seconds all passes took.

    `forward`: a job of `make_forward_job`; `samples`: how many there are. A run that is lost with its driver, or with all
    copies of a stage, goes on with the passes that were not taken. Raises the error of a run that fails, and `Interrupted`.
    """
    whole = whole_batching(samples, forward.batch_size, forward.microbatches)
    passes = -(-whole.count // MICROBATCHES_OF_PASS)
    parts = TakenPasses(whole, -(-whole.count // passes), take)
    while parts.passes < passes:
        before = parts.passes
        job = forward.in_passes(ForwardPasses(samples, parts.microbatches, before))
        try:
            run_passes(job, checkpoint, passes - before, parts.taking(tell), cluster, parts.use_folder)
        except (WorkerLost, ClusterError) as error:
            if parts.passes == before:
                raise
            tell(Note(text=f"after {parts.samples:,} samples: {error_first_line(error)}; the others follow in a new run"))
    return parts.seconds


class TakenPasses:
    """Takes what was kept of each pass that is over from the run's folder, in the order of microbatches."""

    def __init__(self, whole: Microbatches, microbatches: int, take: Take) -> None:
        self.whole, self.microbatches, self.take = whole, microbatches, take
        self.passes = 0
        """Passes that were taken."""
        self.seconds = 0.0
        """How long they took."""
        self._folder = Path()

    @property
    def samples(self) -> int:
        """Number of samples in the passes that were taken."""
        done = min(self.passes * self.microbatches, self.whole.count)
        return self.whole.samples(done - 1).stop if done else 0

    def use_folder(self, folder: Path) -> None:
        """Take from this run folder from now on."""
        self._folder = folder

    def taking(self, tell: EventHandler) -> EventHandler:
        """A handler of events that takes a pass when it is over, and tells of how many samples this is."""

        def handle(event: Event) -> None:
            if not isinstance(event, ValidationRecord):
                tell(event)
                return
            self.take_pass()
            self.seconds += event.seconds or 0.0
            tell(Note(text=f"{self.samples:,} of {self.whole.batch_size:,} samples"))

        return handle

    def take_pass(self) -> None:
        """Take the next pass."""
        first = self.passes * self.microbatches
        kept = []
        for microbatch in range(first, min(first + self.microbatches, self.whole.count)):
            path = output_file(self._folder, microbatch)
            kept.append(path.read_bytes())
            path.unlink()
        self.take(kept)
        self.passes += 1


def run_passes(
    job: Job,
    checkpoint: CheckpointRef,
    passes: int,
    tell: EventHandler,
    cluster: Cluster,
    on_folder: Callable[[Path], None],
) -> None:
    """Make so many forward passes. Raises the error of a run that fails, and `Interrupted`. `on_folder` gets the run's folder,
    which is removed at the end."""
    from raypar.worker.checkpoint.checkpoint_files import check_checkpoint_fits_model, load_manifest
    from raypar.worker.pretrained.frozen_values import check_frozen_values

    make_importable(job.source_dir)
    manifest, choose = load_manifest(checkpoint), make_plan_chooser(job, cluster.workers)
    check_frozen_values(manifest)

    def check_and_choose(checked: PreflightResult) -> ChosenPlan:
        from raypar.model.layer_skeletons import parameter_shapes

        check_checkpoint_fits_model(manifest, parameter_shapes(checked.graph))
        return choose(checked)

    folder_of_run = tempfile.TemporaryDirectory(prefix="raypar-forward-", ignore_cleanup_errors=True)
    with folder_of_run as room, owned_folder(Path(room)), removed_if_killed(room):
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
        try:
            result = launch_run(check_and_choose, options, tell)
        except RayparError as error:
            raise _without_resume(error) from error.__cause__
    if result.end == "interrupted":
        raise Interrupted(f"stopped ({result.why}): nothing is left of this pass over the data", cure="run the command again")
    if result.end != "done":
        raise _without_resume(result.error or RayparError(f"the pass over the data failed: {result.why}"))


def _without_resume(error: Exception) -> Exception:
    """The error with a cure that helps here, where no run is left that `raypar resume` could find."""
    if isinstance(error, RayparError) and "raypar resume" in error.cure:
        return type(error)(error.what, PASSES_CURE)
    return error
