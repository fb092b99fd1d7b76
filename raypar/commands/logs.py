"""`raypar logs RUN`: prints the log of a run from its folder, or that of a cluster's submitted job (--address, or
RAY_API_SERVER_ADDRESS); -f follows it to its end.

Exit codes: 0 printed, of a followed run or job: as `raypar submit` (0 done, 1 failed, 130 stopped); 2 no such run.
"""

from __future__ import annotations

import argparse

from raypar.console.command_arguments import RUN_OR_JOB_HELP, add_run_dir_or_cluster_arguments


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `raypar logs`."""
    parser.add_argument("run", help=RUN_OR_JOB_HELP)
    parser.add_argument("-f", "--follow", action="store_true", help="go on until the run has ended")
    add_run_dir_or_cluster_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print JSON lines")


def run(args: argparse.Namespace) -> int:
    """Print the log; see above for the exit codes."""
    from raypar.console.json_stdout import json_stdout
    from raypar.console.run_log import print_run_log
    from raypar.launch.find_cluster_job import find_cluster_job, find_server_of_run
    from raypar.launch.job_server import connect_job_server
    from raypar.launch.submitted_job_printer import JobPrinter, print_to_stderr
    from raypar.storage.run_folder import RunFolder

    address = find_server_of_run(args.run, args.run_dir, args.address)
    with json_stdout(args.json) as out:
        if address is None:
            with RunFolder.open_for_reading(args.run, args.run_dir or "runs/", with_job=False) as folder:
                return print_run_log(folder, out, follow=args.follow, as_json=args.json)
        server = connect_job_server(address)
        matched = find_cluster_job(server, args.run)
        job = matched.found.job
        for other in matched.others:
            print_to_stderr(f"note: this is the log of job {job.submission_id}; {args.run} is also {other.describe()}")
        printer = JobPrinter(out, as_json=args.json)
        if args.follow:
            return printer.follow_to_end(server, job.submission_id)
        printer.log(server.log(job.submission_id))
        printer.finish_line()
        return 0
