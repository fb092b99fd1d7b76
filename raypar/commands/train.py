"""`raypar train JOB`: trains a job on Ray; leaves a run folder with metrics, pictures and checkpoints."""

from __future__ import annotations

import argparse
import contextlib

from raypar.console.command_arguments import add_job_arguments, add_resume_argument, add_training_arguments
from raypar.user_code.stop_signals_outside_training import stopped_before_training


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `raypar train`."""
    add_job_arguments(parser)
    add_resume_argument(parser, second=" (the default in a job of `ray job submit`)")
    add_training_arguments(parser)


@stopped_before_training()
def run(args: argparse.Namespace) -> int:
    """Train; exit code 0. Raises the error of a failed run, and `Interrupted` after Ctrl-C."""
    import time

    start = time.monotonic()
    from raypar.console.event_printer import EventPrinter
    from raypar.console.json_stdout import json_stdout
    from raypar.job.read_job import load_job
    from raypar.launch import raise_run_failure, train_job_in_new_folder
    from raypar.launch.resume import resume_former_run
    from raypar.launch.run_of_submitted_job import choose_lasting_run_dir, is_submitted_job, unfinished_run
    from raypar.launch.steps_of_epochs import length_in_words, with_steps_of_epochs
    from raypar.record.events import Note, StartupStage

    where = {"stop_at_step": args.stop_at_step, "address": args.address, "local_nodes": args.local_nodes}
    with json_stdout(args.json) as out:
        job = load_job(args.job, args.overrides)
        job = job.model_copy(update={"run_dir": str(choose_lasting_run_dir(job.run_dir))})
        console = EventPrinter(steps=job.steps, as_json=args.json, start_s=start, out=out, metrics=job.metrics)
        job = with_steps_of_epochs(job, console)
        console.steps = job.steps
        console(StartupStage(stage="read", text=f"job {job.name} read from {args.job}: {length_in_words(job)}"))
        with contextlib.ExitStack() as stack:
            former = None
            if is_submitted_job() if args.resume is None else args.resume:
                former, why = stack.enter_context(unfinished_run(job))
                if why:
                    console(Note(text=why))
            if former is not None:
                console.add_earlier(former.read_timeline())
                result = resume_former_run(job, former, console, **where)
            else:
                result = train_job_in_new_folder(job, console, **where)
        raise_run_failure(result)
        return console.finish(result)
