"""`raypar stop RUN`: lets a run finish its step, save a checkpoint and end, as Ctrl-C does. A run of this machine, a run on S3
wherever it trains, or, with --address (or RAY_API_SERVER_ADDRESS), a cluster's submitted job.

Exit codes: 0 it has ended (or had before); 1 it has not within --wait-s, or it had, and another job of this name has not;
2 no such run, or several that have not ended have this name.
"""

from __future__ import annotations

import argparse

from raypar.console.command_arguments import RUN_OR_JOB_HELP, add_run_dir_or_cluster_arguments
from raypar.files.json_type import Json

WAIT_S = 150.0
"""How long a run may take to end: somewhat longer than Ray waits before it kills a submitted job."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `raypar stop`."""
    parser.add_argument("run", help=RUN_OR_JOB_HELP)
    add_run_dir_or_cluster_arguments(parser)
    parser.add_argument("--wait-s", type=float, default=WAIT_S, metavar="S", help="wait so long for its end (default 150)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Stop the run and say what it has left; see above for the exit codes."""
    from raypar.console.json_stdout import json_stdout, json_text
    from raypar.errors import ConfigError
    from raypar.launch.find_cluster_job import choose_job_to_stop, find_cluster_job, find_server_of_run
    from raypar.launch.job_server import connect_job_server
    from raypar.launch.stop_run import stop_cluster_job
    from raypar.launch.submitted_job_printer import print_to_stderr

    if not args.wait_s > 0:
        raise ConfigError(f"--wait-s {args.wait_s:g}", cure="give the seconds that the run may take to end, more than 0")
    address = find_server_of_run(args.run, args.run_dir, args.address)
    with json_stdout(args.json) as out:
        if address is None:
            facts = stop_run_of_folder(args.run, args.run_dir or "runs/", args.wait_s)
        else:
            server = connect_job_server(address)
            job = choose_job_to_stop(find_cluster_job(server, args.run), args.run)
            facts = stop_cluster_job(server, job, args.wait_s, print_to_stderr)
        text = facts.pop("text")
        print(json_text(facts) if args.json else text, file=out)
    return 0


def stop_run_of_folder(run: str, run_dir: str, wait_s: float) -> dict[str, Json]:
    """Stop the run in a folder or on S3; returns its facts afterwards, with a `text` for people. Raises `ConfigError`."""
    from raypar.console.run_table import stopped_run_facts
    from raypar.launch.stop_run import stop_local_run, stop_run_on_storage
    from raypar.launch.submitted_job_printer import print_to_stderr
    from raypar.storage.run_folder import RunFolder

    with RunFolder.open_for_reading(run, run_dir, with_job=False, last_bytes=0) as folder:
        if folder.shared is None:
            return stopped_run_facts(folder, stop_local_run(folder, wait_s, print_to_stderr))
        stopped = stop_run_on_storage(folder.shared.uri, wait_s, print_to_stderr)
        place = folder.place
    with RunFolder.open_for_reading(place, with_job=False) as folder:  # again: the copy above is from before its end
        return stopped_run_facts(folder, stopped)
