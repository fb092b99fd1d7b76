"""`raypar train JOB`: trains a job on Ray; leaves a run folder with metrics, pictures and checkpoints."""

from __future__ import annotations

import argparse
import contextlib
from typing import TYPE_CHECKING

from raypar.launch.stop_before_training import stopped_before_training

if TYPE_CHECKING:
    from raypar.console.event_printer import EventPrinter
    from raypar.job import Job
    from raypar.launch import Result
    from raypar.storage.run_folder import RunFolder

FORMER_S = 20.0
"""How long a former client may still seem to live: somewhat longer than `actors.driver_client.ALONE_S`."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `raypar train`."""
    parser.add_argument("job", help="job file (YAML)")
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="a.b=c", help="override a job key")
    parser.add_argument(
        "--resume",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="resume the last run of this name if it is the same job and has steps left, else begin a new one (the default "
        "in a job of `ray job submit`)",
    )
    add_run_arguments(parser)


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments that `train` and `resume` share."""
    parser.add_argument("--stop-at-step", type=int, metavar="K", help="stop after K steps with a checkpoint, to be resumed")
    parser.add_argument("--address", help="join the Ray cluster there (default: RAY_ADDRESS, else a local Ray cluster)")
    parser.add_argument(
        "--local-nodes",
        type=int,
        default=1,
        metavar="N",
        help="start the local Ray cluster with N nodes on this machine, each of which may be killed or drained (default 1)",
    )
    parser.add_argument("--json", action="store_true", help="print events as JSON lines")


@stopped_before_training()
def run(args: argparse.Namespace) -> int:
    """Train; exit code 0. Raises the error of a failed run, and `Interrupted` after Ctrl-C."""
    import time

    start = time.monotonic()
    from raypar.console.event_printer import EventPrinter
    from raypar.console.json_stdout import json_stdout
    from raypar.job.read_job import load_job
    from raypar.launch import raise_run_failure, train_job_in_new_folder
    from raypar.launch.ray_job_resubmission import choose_lasting_run_dir, is_submitted_job, unfinished_run
    from raypar.record.events import Note, StartupStage

    with json_stdout(args.json) as out:
        job = load_job(args.job, args.overrides)
        job = job.model_copy(update={"run_dir": str(choose_lasting_run_dir(job.run_dir))})
        console = EventPrinter(steps=job.steps, as_json=args.json, start_s=start, out=out)
        console(StartupStage(stage="read", text=f"job {job.name} read from {args.job}: {job.steps} steps"))
        with contextlib.ExitStack() as stack:
            former = None
            if is_submitted_job() if args.resume is None else args.resume:
                former, why = stack.enter_context(unfinished_run(job))
                if why:
                    console(Note(text=why))
            if former is not None:
                result = resume_existing_run(job, former, console, args)
            else:
                result = train_job_in_new_folder(
                    job, console, stop_at_step=args.stop_at_step, address=args.address, local_nodes=args.local_nodes
                )
        raise_run_failure(result)
        return console.finish(result)


def resume_existing_run(job: Job, former: RunFolder, console: EventPrinter, args: argparse.Namespace) -> Result:
    """Resume a run of this job, after waiting for its former driver, which may still be saving if its client was killed.

    A run on shared storage is also waited for until its lease has ended.

    Raises `ActiveError` if the run has a live client.
    """
    import time

    from raypar.errors import ActiveError, LeaseHeldError, OutlivedError
    from raypar.launch import resume_job
    from raypar.record.events import RunWarning
    from raypar.storage.run_lease import LEASE_S

    console.add_earlier(former.read_timeline())
    until_s, last_warning = time.monotonic() + FORMER_S, ""
    while True:
        try:
            return resume_job(
                job, former, console, stop_at_step=args.stop_at_step, address=args.address, local_nodes=args.local_nodes
            )
        except ActiveError as error:
            more_s = LEASE_S if isinstance(error, LeaseHeldError) else 0.0  # of a process that has died
            if not isinstance(error, OutlivedError) and time.monotonic() > until_s + more_s:
                raise
            if error.what != last_warning:
                last_warning = error.what
                console(RunWarning(text=last_warning))
            time.sleep(1.0)
