"""What `raypar debug` runs: a job from its first step, or a run from its last checkpoint, with all workers in this process."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from raypar.errors import ConfigError
from raypar.job.read_job import load_job, load_job_of_run
from raypar.launch.choose_plan import make_custom_schedule_builder, plan_of_job
from raypar.launch.steps_of_epochs import with_steps_of_epochs
from raypar.plan import MicrobatchRouting
from raypar.plan.wording import after_steps, count_noun
from raypar.record.fold import RunView
from raypar.storage.find_best_checkpoint import find_best_step
from raypar.storage.run_folder import NoSuchRun, RunFolder, run_without_job_error
from raypar.user_code.user_code_errors import make_importable

if TYPE_CHECKING:
    from raypar.job import Job
    from raypar.schedule.instructions import Instruction
    from raypar.storage.checkpoint_store import CheckpointRef
    from raypar.worker.run_in_one_process import OneProcessRun

DEFAULT_STEPS = 2
"""How many steps are run if the user does not say it."""


@dataclass(frozen=True)
class DebugStart:
    """What is run, and from where."""

    job: Job
    """The job."""
    checkpoint: CheckpointRef | None = None
    """The checkpoint to begin from; None: the initial values."""
    first: int = 0
    """The first step to run, from 0: the number of steps done in the checkpoint."""
    validated: Mapping[int, float] = field(default_factory=dict)
    """Number of steps done -> value of the metric that the learning rates follow, as the checkpoint has it."""
    failed: int = 0
    """The step of a run after the last one that it has done, from 0; 0 for a job file."""

    def steps(self, wanted: int | None) -> range:
        """The steps to run, of which `wanted` are asked for."""
        count = wanted if wanted is not None else max(DEFAULT_STEPS, self.failed + 1 - self.first)
        return range(self.first, min(self.first + count, self.job.steps))


@contextlib.contextmanager
def find_debug_start(
    given: str,
    run_dir: str,
    overrides: Sequence[str],
    say: Callable[[str], None],
    warn: Callable[[str], None],
    best: str | None = None,
) -> Iterator[DebugStart]:
    """Gives the block what to run: a job file, or the run that `given` names under `run_dir`. Raises `ConfigError`.

    `best`: begin with the best checkpoint of the run by this metric, by its first one if the text is empty.
    """
    if is_job_file(given):
        if best is not None:
            raise ConfigError(f"--best is for a run, and {given} is a job file", cure="leave it out, or name a run")
        yield DebugStart(with_steps_of_epochs(load_job(given, overrides), lambda event: None))
        return
    try:
        with RunFolder.open_for_reading(given, run_dir, with_job=False) as folder:
            yield find_start_in_run(folder, overrides, say, warn, best)
    except NoSuchRun as error:
        raise NoSuchRun(error.what, cure=f"{error.cure}; or give a job file, whose name ends in .yaml") from None


def is_job_file(given: str) -> bool:
    """Whether the argument means a job file: it names a file, or looks like the name of one."""
    return Path(given).is_file() or ("://" not in given and Path(given).suffix in (".yaml", ".yml", ".py", ".json"))


def find_start_in_run(
    folder: RunFolder, overrides: Sequence[str], say: Callable[[str], None], warn: Callable[[str], None], best: str | None
) -> DebugStart:
    """Where to begin in a run: its last whole checkpoint that has steps left, or the best one. Raises `ConfigError`,
    `CheckpointError`."""
    from raypar.worker.checkpoint.check_job_changes import changes_at_resume, followed_values, with_former_batches
    from raypar.worker.checkpoint.checkpoint_files import latest_usable_checkpoint, load_manifest
    from raypar.worker.checkpoint.contract_comparison import with_streams_of

    if not os.path.lexists(folder.job):
        raise run_without_job_error(
            folder,
            missing="from which `raypar debug` makes the model and the data again",
            cure="write a job file with the arguments of Trainer as its keys: `raypar debug JOB`",
            later="for a run that commands can debug",
        )
    job = with_steps_of_epochs(load_job_of_run(folder.job, folder.place_of(folder.job), overrides), lambda event: None)
    view = RunView.of(folder.read_timeline())
    failed = view.last_step.step if view.last_step is not None else 0  # counts from 1 in files
    below = job.steps if best is None else find_best_step(folder, best) + 1
    if below > job.steps:
        what = f"the best checkpoint of run {folder.name} is its last one, {after_steps(job.steps)}: no steps are left"
        raise ConfigError(what, cure="leave --best out, or raise steps: --set steps=...")
    checkpoint, skipped = latest_usable_checkpoint(folder.checkpoint_store_location, below=below)
    for line in skipped:
        warn(line)
    if checkpoint is None:
        say(f"run {folder.name}: from its first step, as no checkpoint with steps left is there")
        return DebugStart(job, failed=failed)
    manifest = load_manifest(checkpoint)
    changes = changes_at_resume(manifest, job)
    for line in changes.lines:
        say(line)
    say(f"run {folder.name}: from {checkpoint.name}, {count_noun(manifest.steps_done, 'step is', 'steps are')} done")
    job = with_former_batches(manifest, with_streams_of(manifest, job), changes)
    validated = followed_values(manifest, job)
    return DebugStart(job.replace(init_from=None), checkpoint, manifest.steps_done, validated, failed)


@contextlib.contextmanager
def open_debug_run(
    start: DebugStart, steps: range, stop_at: str | None, order_seed: int | None, say: Callable[[str], None]
) -> Iterator[OneProcessRun]:
    """Gives the block the run, ready for its first step. `stop_at`: where pdb opens; `order_seed`: see `OneProcessRun`.

    Raises `ConfigError` for a place that the run does not reach, and whatever is wrong with the job.
    """
    from raypar.worker.data.check_and_count_streams import resolve_streams
    from raypar.worker.layer_graph_of_job import make_layer_graph
    from raypar.worker.process.torch_state_guard import TorchStateGuard
    from raypar.worker.run_in_one_process import Breakpoint, OneProcessRun

    job, place = start.job, Breakpoint(stop_at) if stop_at is not None else None
    make_importable(job.source_dir)
    guard = TorchStateGuard(job.threads)
    with guard.watching("the job's data"):
        job = resolve_streams(job).job
    with guard.watching(f"the model function {job.model.label}"):
        graph = make_layer_graph(job)
    plan = plan_of_job(job, graph).with_gather("step")  # at a breakpoint parameters are there; no bit depends on it
    if place is not None:
        place.check_is_reached(steps, len(plan.stages), job.microbatches)
    build = make_custom_schedule_builder(job)
    schedule = build(MicrobatchRouting(plan, job.batching), graph.crossing(plan)) if build is not None else job.schedule_name
    sizes = f"{count_noun(plan.world, 'worker')}, {count_noun(len(plan.stages), 'stage')}"
    say(f"{sizes} in one process; schedule {job.schedule_name}")
    if (precision := job.precision_in_words) is not None:
        say(precision)

    def before(step: int, instruction: Instruction) -> None:
        if place is not None and place.is_at(step, instruction):
            print(f"step {step + 1}: about to run {instruction}; `up` leads to the interpreter's frame", file=sys.stderr)
            breakpoint()
            guard.accept_environment()  # pdb handles Ctrl-C itself

    with OneProcessRun(job, plan, schedule, graph=graph, seed=order_seed, before_compute=before, guard=guard) as local:
        if start.checkpoint is not None:
            for core in local.cores:
                core.load(start.checkpoint)
            local.follow(start.validated)
        yield local
