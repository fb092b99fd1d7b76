"""`raypar submit JOB`: trains a job on a cluster, by its job server; the short form of `ray job submit`.

The current folder is sent along, without runs/, .git/, .venv/ and what .gitignore and .rayignore name. Ctrl-C ends the
following only: the job goes on, until `raypar stop` stops it.

Exit codes: 0 done (with --no-wait: submitted), 1 failed, 2 bad input, 130 stopped, or no longer followed.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from raypar.console.command_arguments import add_job_arguments, add_job_server_argument, add_resume_argument


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `raypar submit`."""
    add_job_arguments(parser, ", in the working directory")
    add_job_server_argument(parser, "RAY_API_SERVER_ADDRESS, else RAY_ADDRESS")
    parser.add_argument("--working-dir", type=Path, default=Path(), metavar="DIR", help="sent along (default: this one)")
    parser.add_argument("--submission-id", metavar="ID", help="the job's id on the cluster (default: Ray makes one)")
    parser.add_argument("--no-wait", action="store_true", help="do not follow the job's log")
    add_resume_argument(parser, first=" (the default)")
    parser.add_argument("--json", action="store_true", help="print JSON lines: submitted, log, end")


def run(args: argparse.Namespace) -> int:
    """Submit, and follow the job to its end; see above for the exit codes."""
    from raypar.console.json_stdout import json_stdout
    from raypar.job.read_job import load_job
    from raypar.launch.cluster_jobs import parse_ray_job_record
    from raypar.launch.job_server import connect_job_server, find_server_address
    from raypar.launch.submit_to_job_server import (
        check_files_are_sent,
        make_entrypoint,
        make_runtime_env,
        same_name_warning,
        submit_job,
    )
    from raypar.launch.submitted_job_printer import JobPrinter, print_to_stderr

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
        return printer.follow_to_end(server, submission_id)
