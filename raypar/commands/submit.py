"""`raypar submit JOB`: trains a job on a cluster, by its job server; the short form of `ray job submit`.

The current folder is sent along, without runs/, .git/, .venv/ and what .gitignore and .rayignore name. Ctrl-C ends the
following only: the job goes on, until `raypar stop` stops it.

Exit codes: 0 done (with --no-wait: submitted), 1 failed, 2 bad input, 130 stopped, or no longer followed.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from raypar.launch.cluster_jobs import ClusterJob
    from raypar.launch.job_printer import JobPrinter
    from raypar.launch.job_server import JobServer

RUN_HELP = (
    "of a cluster: submission id, or name as `raypar runs` shows it; else name of a run under --run-dir, or its path or URI"
)
"""What names a run, for logs and stop."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `raypar submit`."""
    parser.add_argument("job", help="job file (YAML), in the working directory")
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="a.b=c", help="override a job key")
    add_address_argument(parser, "RAY_API_SERVER_ADDRESS, else RAY_ADDRESS")
    parser.add_argument("--working-dir", type=Path, default=Path(), metavar="DIR", help="sent along (default: this one)")
    parser.add_argument("--submission-id", metavar="ID", help="the job's id on the cluster (default: Ray makes one)")
    parser.add_argument("--no-wait", action="store_true", help="do not follow the job's log")
    parser.add_argument(
        "--resume",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="resume the last run of this name if it is the same job and has steps left (the default), else begin a new one",
    )
    parser.add_argument("--json", action="store_true", help="print JSON lines: submitted, log, end")


def add_address_argument(parser: argparse.ArgumentParser, default: str = "RAY_API_SERVER_ADDRESS") -> None:
    """`--address`, which submit, runs, logs and stop share."""
    parser.add_argument("--address", metavar="URL", help=f"the cluster's job server, http://HEAD:8265 (default: {default})")


def names_run_folder(run: str, run_dir: str | None, address: str | None) -> bool:
    """Whether RUN of logs and stop names a run folder or a place on storage, not a job of a cluster.

    It does if --run-dir is given, if RUN has a slash and is a folder of this machine, or if RUN is a URI and no --address is
    given; a cluster in the environment is then ignored.
    """
    from raypar.storage.checkpoint_store import storage_scheme

    if run_dir is not None or (os.sep in run and os.path.isdir(os.path.expanduser(run))):
        return True
    return address is None and bool(storage_scheme(run))


def run(args: argparse.Namespace) -> int:
    """Submit, and follow the job to its end; see above for the exit codes."""
    from raypar.console.json_stdout import json_stdout
    from raypar.job.read_job import load_job
    from raypar.launch.cluster_jobs import parse_ray_job_record
    from raypar.launch.job_printer import JobPrinter
    from raypar.launch.job_server import connect_job_server, find_server_address
    from raypar.launch.submit_to_job_server import (
        check_files_are_sent,
        make_entrypoint,
        make_runtime_env,
        same_name_warning,
        submit_job,
    )

    job = load_job(args.job, args.overrides)
    entrypoint = make_entrypoint(args.job, args.working_dir, args.overrides, args.resume)
    runtime_env = make_runtime_env(args.working_dir)
    with json_stdout(args.json) as out:
        printer = JobPrinter(out, as_json=args.json)
        server = connect_job_server(find_server_address(args.address) or os.environ.get("RAY_ADDRESS"))
        check_files_are_sent(job, args.job, args.working_dir)
        warning = same_name_warning(job.name, [*map(parse_ray_job_record, server.jobs())])
        if warning is not None and args.resume is not False:
            print_to_stderr(warning)
        submission_id = submit_job(server, job.name, entrypoint, runtime_env, args.submission_id)
        printer.submitted(submission_id, job.name, server.name, entrypoint)
        if args.no_wait:
            return 0
        ended = follow_to_the_end(server, parse_ray_job_record({"submission_id": submission_id, "metadata": {}}), printer)
        return printer.ended(ended)


def follow_to_the_end(server: JobServer, job: ClusterJob, printer: JobPrinter) -> ClusterJob:
    """Show a job's log until it has ended. Raises `Interrupted` after Ctrl-C, with what goes on."""
    from raypar.errors import Interrupted
    from raypar.launch.follow_job import JobFollower

    say = print_to_stderr
    try:
        return JobFollower(server, job.submission_id, printer.log, say).follow()
    except KeyboardInterrupt:
        raise Interrupted(
            f"\njob {job.submission_id} goes on at {server.name}",
            cure=f"`raypar logs {job.submission_id} -f` follows it again, `raypar stop {job.submission_id}` stops it",
        ) from None


def print_to_stderr(text: str) -> None:
    """Print a line about a wait, beside what the job prints."""
    print(text, file=sys.stderr, flush=True)
