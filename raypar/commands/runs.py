"""`raypar runs`: lists the runs in a runs folder; with --address (or RAY_API_SERVER_ADDRESS) a cluster's submitted jobs.

State, step and loss of a run are those of its folder, of a job those that its log says.
"""

from __future__ import annotations

import argparse

from raypar.console.command_arguments import add_job_server_argument


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `raypar runs`."""
    where = "where runs lie, a folder or a URI such as s3://BUCKET/runs (default runs/); given, the cluster is not asked"
    parser.add_argument("run_dir", nargs="?", metavar="RUN_DIR", help=where)
    parser.add_argument("--run-dir", dest="run_dir_option", metavar="RUN_DIR", help="the same")
    add_job_server_argument(parser)
    parser.add_argument("--last", type=int, default=20, metavar="N", help="show the last N (default 20; 0: all)")
    parser.add_argument("--json", action="store_true", help="print a JSON list")


def run(args: argparse.Namespace) -> int:
    """Print the list, the last one last; exit code 0, also if it is empty."""
    import os
    import time

    from raypar.console.json_stdout import json_stdout, json_text
    from raypar.console.run_table import RunRow, format_run_table, list_runs_in_folder
    from raypar.errors import ConfigError
    from raypar.files.printable_text import printable_text
    from raypar.files.redact_secrets import redact_certain_secrets, secrets_of_environment, tree_without_certain_secrets
    from raypar.launch.find_cluster_job import list_cluster_jobs
    from raypar.launch.job_server import connect_job_server, find_server_address

    if args.last < 0:
        raise ConfigError(f"--last {args.last}", cure="give a number of runs, or 0 for all")
    if args.run_dir is not None and args.run_dir_option is not None:
        raise ConfigError(
            f"two places of runs are given: {args.run_dir} and --run-dir {args.run_dir_option}", cure="give one of them"
        )
    run_dir = args.run_dir if args.run_dir is not None else args.run_dir_option
    if args.address is not None and run_dir is not None:
        raise ConfigError("--address lists a cluster's jobs, --run-dir the runs in a folder", cure="give one of them")
    address = find_server_address(args.address) if run_dir is None else None
    now, known = time.time(), secrets_of_environment(os.environ)
    with json_stdout(args.json) as out:
        if address is None:
            place = run_dir or "runs/"
            rows = list_runs_in_folder(place, args.last, now)
        else:
            server = connect_job_server(address)
            place = server.name
            rows = [RunRow(**job.facts()) for job in list_cluster_jobs(server, args.last)]
        if args.json:
            print(json_text(tree_without_certain_secrets([row.facts() for row in rows], known)), file=out)
        else:
            table = format_run_table(rows, now) if rows else f"no runs in {place}"
            print(printable_text(redact_certain_secrets(table, known)), file=out)
    return 0
