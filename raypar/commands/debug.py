"""`raypar debug JOB`, or RUN: runs the whole plan in one process and one thread, so that pdb works everywhere."""

from __future__ import annotations

import argparse
import bdb
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from raypar.console.run_folder_arguments import add_run_dir_argument
from raypar.errors import ConfigError, NonFiniteError

if TYPE_CHECKING:
    from raypar.job import Job
    from raypar.storage.checkpoint_store import CheckpointRef
    from raypar.storage.run_folder import RunFolder

DEFAULT_STEPS = 2
"""How many steps are run if `--steps` is not given."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `raypar debug`."""
    parser.add_argument(
        "job",
        metavar="JOB|RUN",
        help="job file (YAML), which is run from its first step; or a run, by its name under --run-dir or the path or URI of "
        "its folder, which is run from its last checkpoint with steps left",
    )
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="a.b=c", help="override a job key")
    parser.add_argument(
        "--steps",
        type=int,
        default=None,
        help="how many steps to run (default 2; of a run up to the step after the last one that it has done)",
    )
    parser.add_argument(
        "--stop-at",
        metavar="STEP,STAGE,MICROBATCH",
        help="open pdb just before the instructions of this stage and microbatch in this step; all count from 0",
    )
    parser.add_argument("--order-seed", type=int, default=None, help="interleave the workers in another (seeded) order")
    add_run_dir_argument(parser)


@dataclass(frozen=True)
class DebugStart:
    """What is run, and from where."""

    job: Job
    """The job."""
    checkpoint: CheckpointRef | None = None
    """The checkpoint to begin from; None: the initial values."""
    first: int = 0
    """The first step to run, from 0: the number of steps done in the checkpoint."""
    failed: int = 0
    """The step of a run after the last one that it has done, from 0; 0 for a job file."""

    def steps(self, wanted: int | None) -> range:
        """The steps to run, of which `wanted` are asked for."""
        count = wanted if wanted is not None else max(DEFAULT_STEPS, self.failed + 1 - self.first)
        return range(self.first, min(self.first + count, self.job.steps))


def run(args: argparse.Namespace) -> int:
    """Run the first steps of a job, or the next ones of a run, here; exit code 0, or 130 if the debugger was left."""
    if is_job_file(args.job):
        from raypar.job.read_job import load_job

        return run_in_this_process(DebugStart(load_job(args.job, args.overrides)), args)
    from raypar.storage.run_folder import NoSuchRun, RunFolder

    try:
        with RunFolder.open_for_reading(args.job, args.run_dir, with_job=False) as folder:
            return run_in_this_process(find_debug_start(folder, args.overrides), args)
    except NoSuchRun as error:
        raise NoSuchRun(error.what, cure=f"{error.cure}; or give a job file, whose name ends in .yaml") from None


def is_job_file(given: str) -> bool:
    """Whether the argument means a job file: it names a file, or looks like the name of one."""
    return Path(given).is_file() or ("://" not in given and Path(given).suffix in (".yaml", ".yml", ".py", ".json"))


def find_debug_start(folder: RunFolder, overrides: Sequence[str]) -> DebugStart:
    """Where to begin in a run: its last whole checkpoint that has steps left. Raises `ConfigError`, `CheckpointError`."""
    from raypar.job.read_job import load_job
    from raypar.record.fold import RunView
    from raypar.storage.run_folder import cannot_debug_error
    from raypar.worker.checkpoint.checkpoint_files import check_contract, latest_usable_checkpoint, load_manifest

    if not os.path.lexists(folder.job):
        raise cannot_debug_error(folder)
    job = load_job(folder.job, overrides)
    view = RunView.of(folder.read_timeline())
    failed = view.last_step.step if view.last_step is not None else 0  # counts from 1 in files
    checkpoint, skipped = latest_usable_checkpoint(folder.checkpoint_location, below=job.steps)
    for line in skipped:
        print(f"warning: {line}", file=sys.stderr, flush=True)
    if checkpoint is None:
        print(f"run {folder.name}: from its first step, as no checkpoint with steps left is there", flush=True)
        return DebugStart(job, failed=failed)
    manifest = load_manifest(checkpoint)
    check_contract(manifest, job)
    print(f"run {folder.name}: from {checkpoint.name}, {manifest.steps_done} steps are done", flush=True)
    return DebugStart(job.replace(init_from=None), checkpoint, manifest.steps_done, failed)


def run_in_this_process(start: DebugStart, args: argparse.Namespace) -> int:
    """See `run`."""
    from raypar.launch.chosen_plan import make_custom_schedule_builder
    from raypar.plan import MicrobatchRouting
    from raypar.plan.recomputation import apply_recompute_policy
    from raypar.user_code.user_code_errors import make_importable
    from raypar.worker.first_non_finite import FirstNonFinite
    from raypar.worker.process.torch_state_guard import TorchStateGuard
    from raypar.worker.run_in_one_process import OneProcessRun
    from raypar.worker.step.step_commit import NON_FINITE_CURE
    from raypar.worker.worker_assignments import make_layer_graph

    spec, steps, place = start.job, start.steps(args.steps), _place(args.stop_at)
    make_importable(spec.source_dir)
    guard = TorchStateGuard(spec.threads)
    with guard.watching(f"the model function {spec.model.label}"):
        graph = make_layer_graph(spec)
    plan = apply_recompute_policy(spec.to_plan(len(graph.layers)), spec.recompute, [layer.name for layer in graph.layers])
    if place is not None:
        _check_place(place, steps, (len(plan.stages), spec.microbatches), args.stop_at)
    build = make_custom_schedule_builder(spec)
    schedule = build(MicrobatchRouting(plan, spec.batching)) if build is not None else spec.schedule_name
    print(f"{plan.world} workers, {len(plan.stages)} stages in one process; schedule {spec.schedule_name}", flush=True)
    if (precision := spec.precision_in_words) is not None:
        print(precision, flush=True)

    def before(step: int, instruction: object) -> None:
        where = (step, getattr(instruction, "stage", None), getattr(instruction, "microbatch", None))
        if where == place:
            print(f"step {step}: about to run {instruction}; `up` leads to the interpreter's frame", file=sys.stderr)
            breakpoint()
            guard.accept_environment()  # pdb handles Ctrl-C itself

    with OneProcessRun(spec, plan, schedule, graph=graph, seed=args.order_seed, before_compute=before, guard=guard) as local:
        if start.checkpoint is not None:
            for core in local.cores:
                core.load(start.checkpoint)
        first = FirstNonFinite(stage for core in local.cores for stage in core.stages.values())
        for step in steps:
            try:
                report = local.step(step)[0]
            except NonFiniteError as error:
                cure = NON_FINITE_CURE if error.cure.endswith(NON_FINITE_CURE) else error.cure
                raise NonFiniteError(f"{error.what}\n  first not finite: {first.describe()}", cure) from error
            except bdb.BdbQuit:
                print(f"left the debugger in step {step}", file=sys.stderr)
                return 130
            while local.warnings:
                print(f"warning: {local.warnings.pop(0)}", file=sys.stderr, flush=True)
            print(f"step {step}: loss {report.loss:.6f}, gradient norm {report.norm:.6f}", flush=True)
            if report.skipped:
                print(f"  skipped; first not finite: {first.describe()}", flush=True)
                first.found = None
    return 0


def _check_place(place: tuple[int, int, int], steps: range, sizes: tuple[int, int], given: str) -> None:
    """Raise `ConfigError` for a place that the run does not reach. `sizes`: number of stages, of microbatches."""
    if place[0] not in steps or not all(0 <= at < size for at, size in zip(place[1:], sizes, strict=True)):
        which = f"{len(steps)} steps" if steps.start == 0 else f"steps {steps.start} to {steps.stop - 1}"
        raise ConfigError(
            f"--stop-at {given} is never reached: {which}, {sizes[0]} stages, {sizes[1]} microbatches",
            cure="all three count from 0; --steps runs more steps",
        )


def _place(text: str | None) -> tuple[int, int, int] | None:
    if text is None:
        return None
    try:
        step, stage, microbatch = (int(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(f"--stop-at {text!r} is not STEP,STAGE,MICROBATCH", cure="for example --stop-at 3,1,0") from None
    return step, stage, microbatch
