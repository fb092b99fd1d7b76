"""`raypar resume RUN`: resumes training from a run's last good checkpoint, under another plan if you like."""

from __future__ import annotations

import argparse
import contextlib
import shlex

from raypar.console.command_arguments import RUN_DIR, add_run_dir_argument, add_set_argument, add_training_arguments
from raypar.user_code.stop_signals_outside_training import stopped_before_training


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `raypar resume`."""
    parser.add_argument("run", help="name of a run under --run-dir, or the path or URI of its folder")
    add_set_argument(parser, " (one on which results depend counts from the next step on, and a line says so)")
    add_run_dir_argument(parser)
    add_training_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Train from the last checkpoint; exit codes as `raypar train`."""
    words = ["raypar", "resume", args.run, *(["--run-dir", args.run_dir] if args.run_dir != RUN_DIR else [])]
    with stopped_before_training(resume=shlex.join(words)):
        return resume(args)


def resume(args: argparse.Namespace) -> int:
    """See `run`."""
    import time

    start = time.monotonic()
    from raypar.console.event_printer import EventPrinter
    from raypar.console.json_stdout import json_stdout
    from raypar.job.read_job import load_job_of_run
    from raypar.launch import raise_run_failure, resume_job
    from raypar.launch.run_of_submitted_job import choose_lasting_run_dir
    from raypar.launch.steps_of_epochs import length_in_words, with_steps_of_epochs
    from raypar.record.events import StartupStage
    from raypar.storage.run_folder import RunFolder

    with json_stdout(args.json) as out, contextlib.ExitStack() as stack:
        folder = stack.enter_context(RunFolder.open_for_reading(args.run, choose_lasting_run_dir(args.run_dir)))
        job = load_job_of_run(folder.job, folder.place_of(folder.job), args.overrides)
        console = EventPrinter(steps=job.steps, as_json=args.json, start_s=start, out=out, metrics=job.metrics)
        console.add_earlier(folder.read_timeline())
        job = with_steps_of_epochs(job, console)
        console.steps = job.steps
        console(StartupStage(stage="read", text=f"run {folder.name} found in {folder.place}: {length_in_words(job)}"))
        result = resume_job(
            job, folder, console, stop_at_step=args.stop_at_step, address=args.address, local_nodes=args.local_nodes
        )
        raise_run_failure(result)
        return console.finish(result)
